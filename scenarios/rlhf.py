"""`python -m scenarios.rlhf`: preferences tune a policy, while peers are killed and a newcomer joins.

Each trial is a network of its own. It trains a base, and one peer starts a plan: epochs over a file of preferences, then rounds
of PPO. At four moments one peer is killed and restarted: while the others fetch the plan's data, in a round of the reward model,
between the stages, and in a round of PPO. At one of these moments, another one in each trial, it is the plan's author. Meanwhile
a newcomer joins by snapshot and is killed, too. All peers must end with the same models, and the export must pass `peer audit`.
Every second trial has sampled audits. With `--liar` one more peer sends false updates. In trials with sampled audits it must be
convicted in each stage, and the rounds since its lie must be undone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Set
from contextlib import closing
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import trio

from demo import network_demo
from demo.demo_peers import DemoPeer, PeerDisk
from features.command_arguments import parse_integer_in
from ledger.snapshots.snapshot_server import SNAPSHOT_LAG_HEIGHTS
from protocol.api import INVITATION_DAYS
from protocol.identity import Identity
from rlhf.data import preference_sets
from rlhf.rpc import RlhfRpc, RlhfView, StageView
from scenarios import network
from scenarios.network import SMALL_JOB, Network
from scenarios.trials import COUNT, Trial, arguments, conduct_apart

BASE_ROUNDS = 4
PAIRS = 400
REWARD, PPO = range(2)  # indexes of the plan's stages
REWARD_TERMS = {"local_steps": "2", "batch": "4"}  # many short rounds
TERMS = {"prompt_tokens": "8", "response_tokens": "48", "epochs": "2", "local_steps": "4", "batch": "16"}
MEASURED = (
    "held_out_accuracy",
    "held_out_pairs",
    "held_out_interval",
    "calibration_error",
    "measured_rounds",
    "word_count_accuracy",
    "identical_pairs",
    "contradictory_pairs",
)
KILLS = ("fetching", "reward", "turn", "ppo")
DOWN_SECONDS_MAX = 2.0
AUDITORS = "6"  # with a rate of 1, all are drawn for every update of the others
TRIAL_SECONDS_MAX = 600.0  # for work of about one minute on an idle machine
AUDIT_SECONDS_MAX = 120.0
TIMELY = {"absent", "unjudged"}  # rejections without blame: the trainer or its judges were killed


def tunes(peer: DemoPeer) -> None:
    """Give all roles to trainers."""
    if peer.trains:
        peer.serves = ("--web-listen", "127.0.0.1:0")


def calls(peer: DemoPeer) -> RlhfRpc:
    return peer.client  # type: ignore[return-value]


class Attempt:
    """One network, from its base to its tuned policy."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self._options, self._number = options, number
        self._random = Random(options.seed + number)
        self._is_sampled = bool(number % 2)

    async def run(self, peers: Network, trial: Trial) -> None:
        founders, random = peers.honest, self._random
        starter, host = random.sample(founders, 2)  # the host is never killed, and invites the newcomer
        victim: DemoPeer | None = None
        trial.figures["starter"] = starter.name
        with trio.fail_after(TRIAL_SECONDS_MAX):
            await self._begin(peers, starter)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._join, peers, host, trial)
                for place, kill in enumerate(KILLS):
                    # The previous victim may still be starting, so no peer is killed twice in a row.
                    left = [peer for peer in founders if peer not in (starter, host, victim)]
                    victim = starter if place == self._number % len(KILLS) else random.choice(left)
                    await network_demo.wait_until_ready(victim)
                    trial.figures[kill] = f"{victim.name} {await self._moment(host, kill, trial)}"
                    peers.kill(victim)
                    await trio.sleep(random.uniform(0, DOWN_SECONDS_MAX))
                    peers.launch(victim)
            for peer in peers.honest:
                await network_demo.wait_until_ready(peer)
                while (await calls(peer).rlhf_status()).state not in ("finished", "failed", "cancelled"):  # noqa: ASYNC110
                    await trio.sleep(network.POLL_SECONDS)
        await self._judge(peers, host, trial)

    async def _begin(self, peers: Network, starter: DemoPeer) -> None:
        base = await based(peers, starter, SMALL_JOB)
        file = peers.demo.folder / "preferences.jsonl"
        pairs = [
            {"prompt": f"q{number}: "}
            | {name: "".join(self._random.choices(letters, k=8)) for name, letters in (("chosen", "aeiou"), ("rejected", "kstx"))}
            for number in range(PAIRS)
        ]
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        audit = {"audit": "sampled", "audit_rate": "1", "auditors": AUDITORS} if self._is_sampled else {"audit": "full"}
        said = TERMS | audit | {f"reward.{name}": value for name, value in (REWARD_TERMS | audit).items()}
        how = (self._options.rounds, "", said, str(file), self._options.epochs)
        await calls(starter).start_rlhf_training(base, "", *how)

    async def _moment(self, host: DemoPeer, kill: str, trial: Trial) -> str:
        """Wait for the moment of a kill. Return the number of closed rounds of the stages, as the host sees it."""
        random, place = self._random, PPO if kill == "ppo" else REWARD
        if kill == "fetching":
            await trio.sleep(random.uniform(0, 1))
        elif kill == "turn":
            await reached(host, place, (await stages(host))[place].rounds)
            await trio.sleep(random.uniform(0, 0.5))
        else:
            now = (await stages(host))[place]
            await reached(host, place, random.randint(now.round, max(now.round, now.rounds - 2)))
            await trio.sleep(random.uniform(0, 0.2))
        found = await stages(host)
        trial.require(kill == "turn" or found[place].state != "finished", f"{kill}: the stage was over before the kill")
        return "/".join(str(stage.round) for stage in found)

    async def _join(self, peers: Network, host: DemoPeer, trial: Trial) -> None:
        """Start a newcomer as soon as it needs a snapshot, and kill it once.

        In two of four trials it has restored the snapshot by then. Otherwise it may still lack it. After its restart it applies
        the blocks that it has, and may no longer need a snapshot.
        """
        while await peers.height(host) <= SNAPSHOT_LAG_HEIGHTS + 1:  # noqa: ASYNC110 - it is another process
            await trio.sleep(network.POLL_SECONDS)
        folder = peers.demo.folder / "newcomer"
        folder.mkdir()
        newcomer = DemoPeer(len(peers.peers), Identity.generate(), folder, True, False, threads=1, without_avx=False)
        tunes(newcomer)
        command = ("join", await host.client.create_invitation(INVITATION_DAYS))
        try:
            await peers.restart(newcomer, *command)
        finally:
            peers.peers.append(newcomer)
        peers.record(newcomer)
        while self._number // 2 % 2 and await network.restored(newcomer) is None:  # noqa: ASYNC110 - it is another process
            await trio.sleep(network.POLL_SECONDS)
        await trio.sleep(self._random.uniform(0, 0.5))
        had = "with" if await network.restored(newcomer) else "without"
        trial.figures["newcomer"] = f"{had} a snapshot, at {await peers.height(newcomer)}"
        peers.kill(newcomer)
        await peers.restart(newcomer, *command)

    async def _judge(self, peers: Network, host: DemoPeer, trial: Trial) -> None:
        views = {bare(await calls(peer).rlhf_status()) for peer in peers.honest}
        trial.require(len(views) == 1, "the peers have different states of the plan")
        view = views.pop()
        trained = sum(not preference_sets.is_held_out(f"q{number}: ") for number in range(PAIRS))
        sizes = {"steps": int(REWARD_TERMS["local_steps"]), "batch": int(REWARD_TERMS["batch"])}
        trainers = sum(peer.trains for peer in peers.peers[: self._options.peers + self._options.liar])
        rounds = preference_sets.rounds_for_epochs(self._options.epochs, trained, trainers=trainers, **sizes)
        done = [(stage.objective, stage.state, stage.round) for stage in view.stages]
        wanted = [("reward-mean", "finished", rounds), ("ppo", "finished", self._options.rounds)]
        trial.require((view.state, done) == ("finished", wanted), f"the plan is {view.state}, its stages {done}, not {wanted}")
        export = str(peers.demo.folder / "export")
        await host.client.export_run(export)
        with trio.move_on_after(AUDIT_SECONDS_MAX) as scope:
            command = [sys.executable, "-m", "peer.cli", "audit", export]
            audited = await trio.run_process(command, check=False, capture_stdout=True, capture_stderr=True)
            said = (audited.stdout + audited.stderr).decode().strip().splitlines()[-1]
            trial.require(audited.returncode == 0, f"the export does not pass `peer audit`: {said}")
        trial.require(not scope.cancelled_caught, "`peer audit` timed out")
        await trio.to_thread.run_sync(peers.stop)
        liars = {peer.identity.public for peer in peers.peers if peer.lies}
        for peer in peers.honest:
            for problem in problems(peer, view, liars):
                trial.problems.append(f"{peer.name}: {problem}")
        with closing(PeerDisk(host.directory)) as disk:
            for stage in view.stages:
                undone = [of for of in disk.job(stage.job).undone_rounds if of.trainer in liars]
                trial.figures[f"{stage.objective}: rounds undone"] = sum(of.last - of.first + 1 for of in undone)
                trial.require(
                    bool(undone) or not (liars and self._is_sampled), f"the liar of the {stage.objective} job was not convicted"
                )
        trial.problems += peers.failures()


async def based(peers: Network, asked: DemoPeer, settings: dict[str, str]) -> str:
    """Train a job until this peer has finished it, and return its id."""
    base = await peers.train(settings, rounds=BASE_ROUNDS)
    while not any(view.job == base and view.state == "finished" for view in await asked.client.jobs()):  # noqa: ASYNC110
        await trio.sleep(network.POLL_SECONDS)
    return base


async def stages(peer: DemoPeer) -> tuple[StageView, ...]:
    return (await calls(peer).rlhf_status()).stages


async def reached(peer: DemoPeer, place: int, round: int) -> None:
    """Wait until this number of rounds of a stage is closed."""
    while (await stages(peer))[place].round < round:  # noqa: ASYNC110 - it is another process
        await trio.sleep(network.POLL_SECONDS)


def bare(view: RlhfView) -> RlhfView:
    """Remove the values that a peer has measured for itself."""
    nothing: dict[str, Any] = dict.fromkeys(MEASURED)
    return replace(view, stages=tuple(replace(stage, **nothing) for stage in view.stages))


def problems(peer: DemoPeer, view: RlhfView, liars: Set[bytes]) -> list[str]:
    """Return the problems on a stopped peer's disk: missing results and forbidden contents."""
    found: list[str] = []
    disk = PeerDisk(peer.directory)
    try:
        state = disk.state
        for stage in view.stages:
            job = disk.job(stage.job)
            if (job.rounds_in_model, job.model_root.hex()) != (stage.round, stage.model_root):
                found.append(f"the {stage.objective} job has another model after {job.rounds_in_model} rounds")
            rejected = {reason for key, told in job.rejected.items() if key not in liars for reason in told} - TIMELY
            if rejected:
                found.append(f"honest proposals of the {stage.objective} job were rejected: {', '.join(sorted(rejected))}")
        suspended = {
            key for key, of in state.audits.member_records.items() if of.suspensions or of.rewards_lost or of.wrong_losses
        }
        found += [f"{key.hex()[:8]} was suspended, or lost a reward" for key in suspended - liars]
    finally:
        disk.close()
    return found


async def run(options: argparse.Namespace) -> int:
    common = {"peers": options.peers + options.liar, "malicious": int(options.liar), "attack": "false-update", "dress": tunes}
    attempts = [
        (f"network {number}", Attempt(options, number).run, {**common, "seed": options.seed + number})
        for number in range(options.first, options.first + options.trials)
    ]
    who = " and a liar" if options.liar else ""
    return await conduct_apart(options, f"tuned while peers are killed and join{who}", attempts)


def main() -> int:
    parser = arguments("rlhf", __doc__)
    parser.add_argument("--trials", type=COUNT, default=1, metavar="N", help="number of networks, one after another")
    parser.add_argument("--first", type=parse_integer_in(0), default=0, metavar="N", help="number of the first network")
    parser.add_argument("--liar", action="store_true", help="add a peer that sends false updates")
    parser.add_argument("--epochs", type=COUNT, default=3, metavar="N", help="epochs over the preferences")
    parser.add_argument("--rounds", type=COUNT, default=10, metavar="N", help="rounds of PPO")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
