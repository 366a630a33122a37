"""`python -m scenarios.rlhf`: a model is trained and tuned, while peers are killed, who started it too, and somebody joins.

Each trial is a network of its own: it trains a base, tunes it, kills a trainer (in the first trial the one that asked for the
tuning), starts it again, and lets a newcomer in, which gets the models with a snapshot. All end at the same roots, and the export
passes `peer audit`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from random import Random

import trio

from ledger.snapshots.snapshot import LAG_HEIGHTS
from peer.demo import demo
from peer.demo.cast import DemoPeer
from peer.demo.report import Disk
from protocol.api import INVITATION_DAYS
from protocol.identity import Identity
from rlhf.calls import RlhfCalls
from scenarios import network
from scenarios.network import SMALL_JOB, Network
from scenarios.trials import COUNT, Trial, arguments, report, table_of

BASE_ROUNDS = 2
TERMS = {"prompt_tokens": "8", "response_tokens": "16", "epochs": "2", "local_steps": "4", "batch": "8"}
STAGE_SECONDS_MAX = 300.0  # for training or tuning, on a busy machine
JOIN_SECONDS_MAX = 60.0
AUDIT_SECONDS_MAX = 120.0


def tunes(peer: DemoPeer) -> None:
    """Whoever trains has both roles."""
    if peer.trains:
        peer.serves = ("--web-listen", "127.0.0.1:0")


async def tuned(peers: Network, rounds: int, base: dict[str, str], terms: dict[str, str]) -> str:
    """The id of a job that tunes a model, which was trained for it."""
    first = await peers.train(base, rounds=BASE_ROUNDS)
    if not await network.holds(partial(is_over, [peers.demo.watched], first), STAGE_SECONDS_MAX):
        raise RuntimeError("the base was not trained in time")
    calls: RlhfCalls = peers.demo.watched.client  # type: ignore[assignment]
    return await calls.start_rlhf_training(first, "rule:vowels", rounds, "", terms)


async def is_over(of: list[DemoPeer], job: str, at_least: int | None = None) -> bool:
    """Whether the job is finished, or so many of its rounds are closed, as all of these peers see it."""
    for peer in of:
        views = [view for view in await peer.client.jobs() if view.job == job]
        if not views or (views[0].state != "finished" if at_least is None else views[0].round < at_least):
            return False
    return True


async def attempt(options: argparse.Namespace, number: int, trial: Trial) -> list[str]:
    """What was found on the disks."""
    random = Random(options.seed + number)
    async with network.running(options.peers, seed=options.seed + number, dress=tunes) as peers:
        watched = peers.demo.watched
        job = await tuned(peers, options.rounds, SMALL_JOB, TERMS)
        others = [peer for peer in peers.peers if peer.trains and peer is not watched]
        victim = watched if number == 0 else random.choice(others)
        asked = next(peer for peer in peers.peers if peer is not victim)
        moment = random.randrange(options.rounds // 2)
        await network.holds(partial(is_over, [asked], job, moment), STAGE_SECONDS_MAX)
        peers.kill(victim)
        await trio.sleep(random.uniform(0, 1))
        await peers.restart(victim)
        await network.holds(partial(is_long, peers, asked), STAGE_SECONDS_MAX)
        newcomer = await joined(peers, asked)
        everybody = [*peers.peers, newcomer]
        trial.require(await network.holds(partial(is_over, everybody, job), STAGE_SECONDS_MAX), "the tuning did not end")
        trial.figures |= {"killed": victim.name, "in round": moment}
        calls: list[RlhfCalls] = [peer.client for peer in everybody]  # type: ignore[misc]
        trial.require(len({await call.rlhf_status() for call in calls}) == 1, "not all say the same of the tuning")
        with tempfile.TemporaryDirectory(prefix="folkmoot-scenario-") as folder:
            export = str(Path(folder) / "export")
            await asked.client.export(export)
            command = [sys.executable, "-m", "peer.cli", "audit", export]
            with trio.move_on_after(AUDIT_SECONDS_MAX):
                audited = await trio.run_process(command, check=False, capture_stdout=True)
                trial.figures["audit"] = audited.stdout.decode().strip().splitlines()[-1][:40]
                trial.require(audited.returncode == 0, "the export does not pass `peer audit`")
        with trio.CancelScope(shield=True):
            peers.peers.append(newcomer)
            await trio.to_thread.run_sync(peers.stop)
        found = [disk_of(peer, job) for peer in peers.peers]
        trial.require(len(set(found)) == 1, f"not all hold the same models: {found}")
        rejected = {reason for peer in peers.peers[:1] for reason in reasons(peer, job)} - {"absent", "unjudged"}
        trial.require(not rejected, f"honest proposals were rejected: {', '.join(sorted(rejected))}")
        return peers.failures()


async def is_long(peers: Network, asked: DemoPeer) -> bool:
    """A newcomer asks for a snapshot."""
    return await peers.height(asked) > LAG_HEIGHTS + 1


async def joined(peers: Network, asked: DemoPeer) -> DemoPeer:
    folder = peers.demo.folder / "newcomer"
    folder.mkdir()
    newcomer = DemoPeer(len(peers.peers), Identity.generate(), folder, True, False, threads=1, restricted=False)
    tunes(newcomer)
    invitation = await asked.client.invite(INVITATION_DAYS)
    demo.launch(peers.demo, newcomer, ",".join(peer.address for peer in peers.peers), ("join", invitation))
    await demo.answers(newcomer)
    peers.record(newcomer)
    return newcomer


def disk_of(peer: DemoPeer, job: str) -> tuple[int, str]:
    disk = Disk(peer.directory)
    try:
        found = disk.job(job)
        return found.round, found.model_root.hex()
    finally:
        disk.close()


def reasons(peer: DemoPeer, job: str) -> set[str]:
    disk = Disk(peer.directory)
    try:
        return {reason for told in disk.job(job).rejected.values() for reason in told}
    finally:
        disk.close()


async def run(options: argparse.Namespace) -> int:
    started, trials, failures = trio.current_time(), list[Trial](), list[str]()
    for number in range(options.trials):
        trial = Trial(f"network {number}")
        trials.append(trial)
        found = await attempt(options, number, trial)
        failures += [f"{trial.what}: {problem}" for problem in (*trial.problems, *found)]
        print(f"{trial.what}: {'; '.join((*trial.problems, *found)) or 'held'}", file=sys.stderr, flush=True)
    seconds = trio.current_time() - started
    title = f"tuned while peers are killed and join, {options.peers} peers, seed {options.seed}, {seconds:.0f} s in all"
    return report(options, title, *table_of(trials), failures, {"trials": [vars(trial) for trial in trials], "seconds": seconds})


def main() -> int:
    parser = arguments("rlhf", __doc__)
    parser.add_argument("--trials", type=COUNT, default=1, metavar="N", help="networks, one after another")
    parser.add_argument("--rounds", type=COUNT, default=20, metavar="N", help="of tuning")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
