"""`python -m scenarios.crash_points`: a peer is killed right before and right after each of its durable writes.

`storage/crash_points.py` names the writes. After each kill the others must finish the round and continue. The killed peer, once
restarted, must take part again, hold the same roots, and have signed nothing twice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random

import trio

from demo.demo_peers import DemoPeer
from ledger.snapshots.snapshot_server import SNAPSHOT_LAG_HEIGHTS
from protocol.api import INVITATION_DAYS
from protocol.errors import UserError
from protocol.identity import Identity
from scenarios import network
from scenarios.network import Network, holds
from scenarios.pace import STALL_SECONDS_MAX, comes_back, goes_on, in_order, takes_part
from scenarios.trials import Attempt, Trial, arguments, conduct
from storage.crash_points import CRASH_POINT_VARIABLE, POINTS, WRITES
from training.replicated.model_files import DURABLE

REACH_SECONDS_MAX = 90.0  # until the point is reached; a cut-off comes after the longest wait for proposals (60 s)
FROZEN_SECONDS, THAWED_SECONDS = 8.0, 2.0  # a leader is stopped until its view ends, then runs until all hear it again
COUNT_MAX = 3  # the point is armed for its 1st to 3rd occurrence, drawn at random
# Rounds before a victim beside a liar is stopped. While it is down no voter vouches, so a round takes 8 times the usual time of a
# vouch. That time is correct once the first rounds, in which workers start, are a small share.
MEASURED_ROUNDS = 12
ROUNDS_AFTER = 2  # rounds that the others close while the victim is down: the round of the crash, and one more

RESTORED = ("model-fetched", "restore")  # written by a peer that begins with a snapshot
NEWCOMERS = ("identity.key", "genesis", "file-invitation", "file-toml", "store-create", *RESTORED)  # written when a peer joins
RARE = ("store-count", "append-timeout", "append-cut-off", "append-evidence", "file-addresses", "file-txt", "file-tokens")
TRAINERS = ("append-proposal", "append-vouch", "append-cut-off", "file-tokens", "file-txt", "file-safetensors")
IN_WORKER = ("file-tokens",)
LIARS = ("append-evidence",)
REJECTING = ("append-cut-off",)  # written beside a liar that rejects each honest update
ARMED = 3  # the one of four peers that dies when it holds evidence: it votes, does not train, and is not the liar
VOCABULARY = 300  # more than 256, so that texts are tokenized into files
UNREACHED = {
    "identity.next": "`peer rekey` writes it, which a test cuts off at every step",
    "store-migrate": "only where an older program wrote the database: tests/storage/test_store.py",
    "append-silence": "only on a disk that was put back: `python -m scenarios.rollback`",
    "blob-part": "only of objects above 16 MiB: tests/storage/test_parts.py",
    "blob-keep": "only where a liar names somebody's payload as its buffer",
}


def write_of(point: str) -> str:
    return point.partition("-")[2]


# Causes of each write --------------------------------------------------------------------------------------------------


def prepare(peers: Network, victim: DemoPeer, write: str) -> None:
    """Prepare the disk of the stopped victim so that it will make this write."""
    match write:
        case "file-addresses":
            (victim.directory / "addresses").unlink(missing_ok=True)
        case "file-txt":
            shutil.rmtree(victim.directory / "texts", ignore_errors=True)
        case "file-tokens":
            for file in (victim.directory / "texts").glob("*.tokens"):
                file.unlink()
        case "model-aside":
            for job in (victim.directory / "models").glob("[0-9a-f]*"):
                last = max(int(model.name) for model in job.glob("[0-9]*"))
                for number in range(last + 1, last + 100):  # durable ones; at its start the peer removes others that are too new
                    (job / f"{number:08d}").mkdir()
                    (job / f"{number:08d}" / DURABLE).touch()


async def provoke(peers: Network, victim: DemoPeer, write: str, ends: Callable[[float], Awaitable[bool]]) -> None:
    """Make the others, or the running victim, do what causes this write, until the victim has ended.

    `ends` waits for the end, for the given number of seconds.
    """
    others = [peer for peer in peers.honest if peer is not victim]
    match write:
        case "append-timeout":
            has_ended, deadline = False, trio.current_time() + REACH_SECONDS_MAX
            while not has_ended and trio.current_time() < deadline:
                leader = await peers.leader(others[0])
                frozen = leader if leader in others and leader is not None else others[-1]
                peers.freeze(frozen)
                has_ended = await ends(FROZEN_SECONDS)
                peers.thaw(frozen)
                has_ended = has_ended or await ends(THAWED_SECONDS)
        case "append-cut-off":  # one is silent and the liar rejects, so neither acceptance nor rejection has a quorum
            await holds(partial(takes_part, victim, others[0]), REACH_SECONDS_MAX)  # its timers must run with those of the others
            voter = next((peer for peer in others if not peer.trains), others[0])
            peers.freeze(voter)
            await ends(2 * REACH_SECONDS_MAX)  # if the others close a round first, the next one follows
            peers.thaw(voter)
        case "file-safetensors":
            deadline = trio.current_time() + REACH_SECONDS_MAX
            for number in itertools.count():
                with contextlib.suppress(UserError):  # nothing to export yet, or the peer died during the export
                    await victim.client.export_run(str(victim.directory / f"export-{number}"))
                if await ends(THAWED_SECONDS) or trio.current_time() > deadline:
                    break
        case _:
            await ends(REACH_SECONDS_MAX)


# Attempts ------------------------------------------------------------------------------------------------------------


async def crash(random: Random, point: str, peers: Network, trial: Trial) -> None:
    write = write_of(point)
    candidates = [peer for peer in peers.honest if peer.trains or write not in TRAINERS]
    victim = random.choice([peer for peer in candidates if peer is not peers.demo.watched])
    asked = next(peer for peer in peers.honest if peer is not victim)
    with trio.fail_after(STALL_SECONDS_MAX):
        await in_order(peers)
    if write in REJECTING:
        await goes_on(asked, MEASURED_ROUNDS)
    await peers.end(victim)
    prepare(peers, victim, write)
    count = 1 if write in RARE else random.randint(1, COUNT_MAX)
    trial.figures |= {"victim": victim.name, "time": count}
    if not await _reach(peers, victim, point, count):
        trial.problems.append("the point was never reached")
    trial.figures["round"] = (await asked.client.rounds(1))[-1].round + 1
    peers.kill(victim)  # the daemon still runs if only its worker died
    await goes_on(asked, ROUNDS_AFTER)
    await peers.restart(victim)
    await comes_back(peers, victim, asked, trial)
    await goes_on(asked, 1)


async def _reach(peers: Network, victim: DemoPeer, point: str, count: int) -> bool:
    """Run the victim until it has killed itself at the point."""
    log = victim.directory / "peer.log"
    before = log.stat().st_size
    said = f"crash point {point}\n".encode()

    async def ends(seconds: float) -> bool:
        return await holds(died, seconds)

    async def died() -> bool:
        has_ended = victim.process is None or victim.process.poll() is not None
        return has_ended or (write_of(point) in IN_WORKER and said in log.read_bytes()[before:])

    async def started() -> bool:
        return await died() or await peers.height(victim) >= 0

    victim.environment[CRASH_POINT_VARIABLE] = f"{point}:{count}"
    try:
        peers.launch(victim)
        await holds(started, REACH_SECONDS_MAX)
        await provoke(peers, victim, write_of(point), ends)
    finally:
        del victim.environment[CRASH_POINT_VARIABLE]
    return said in log.read_bytes()[before:]


def arm(point: str, peer: DemoPeer) -> None:
    """Arm a peer before the first round, in which the liar is caught: this peer dies when it writes the evidence."""
    if peer.number == ARMED:
        peer.environment[CRASH_POINT_VARIABLE] = point


async def crash_with_proof(point: str, peers: Network, trial: Trial) -> None:
    victim = peers.peers[ARMED]
    trial.require(await peers.dies(victim, REACH_SECONDS_MAX), "the point was never reached")
    del victim.environment[CRASH_POINT_VARIABLE]
    await peers.restart(victim)
    await comes_back(peers, victim, peers.demo.watched, trial)
    await goes_on(peers.demo.watched, 1)


async def crash_newcomer(point: str, peers: Network, trial: Trial) -> None:
    """Kill a newcomer's `peer join` at the point, and repeat the command."""
    number = len(list((peers.demo.folder / "peers").iterdir()))
    directory = peers.demo.folder / "peers" / f"new-{number}"
    newcomer = DemoPeer(number, Identity.generate(), directory, False, False, 1, False)
    directory.mkdir()
    if write_of(point) in RESTORED:
        with trio.fail_after(STALL_SECONDS_MAX):
            await in_order(peers)
        await goes_on(peers.demo.watched, 2 * SNAPSHOT_LAG_HEIGHTS)  # more heights than a newcomer fetches block by block
    invitation = await peers.demo.watched.client.create_invitation(INVITATION_DAYS)
    newcomer.environment[CRASH_POINT_VARIABLE] = point
    command = ("join", invitation, "--no-stand")
    peers.launch(newcomer, *command)
    try:
        died = await peers.dies(newcomer, REACH_SECONDS_MAX)
        trial.require(died and f"crash point {point}" in (directory / "peer.log").read_text(), "the point was never reached")
        del newcomer.environment[CRASH_POINT_VARIABLE]
        if died:
            await peers.restart(newcomer, *command)
            trial.require(await holds(partial(_is_member, peers, newcomer), REACH_SECONDS_MAX), "never became a member")
    finally:
        peers.kill(newcomer)


async def _is_member(peers: Network, newcomer: DemoPeer) -> bool:
    mine = (await newcomer.client.status()).peer
    return any(view.peer == mine and view.member for view in await peers.demo.watched.client.peers())


def chosen(only: str) -> list[str]:
    return [point for point in POINTS if point.startswith(only) or only == write_of(point)]


def refusal(only: str) -> str:
    """Return the reason why `--only` selects nothing to try, or ""."""
    writes = {write_of(point) for point in chosen(only)}
    if not writes:
        return f"--only {only!r} matches no crash point: run with --list to list them"
    if writes <= set(UNREACHED):
        return f"--only {only!r} is not tried here: {UNREACHED[min(writes)]}; run with --list to see all reasons"
    return ""


def attempts(options: argparse.Namespace) -> list[tuple[str, Attempt]]:
    """Return the attempts in a network without liars."""
    random = Random(options.seed)
    found: list[tuple[str, Attempt]] = []
    for point in chosen(options.only):
        if write_of(point) in NEWCOMERS:
            found.append((point, partial(crash_newcomer, point)))
        elif write_of(point) not in (*UNREACHED, *LIARS, *REJECTING):
            found.append((point, partial(crash, random, point)))
    return found


async def run(options: argparse.Namespace) -> int:
    status, random = 0, Random(options.seed)
    if found := attempts(options):
        status = await conduct(options, "killed at every durable write", found, vocabulary=VOCABULARY)
    if found := [(point, partial(crash, random, point)) for point in chosen(options.only) if write_of(point) in REJECTING]:
        status |= await conduct(apart(options, "cut-off"), "killed beside a liar", found, malicious=1)
    for side in ("before", "after"):  # a liar is caught once per network
        point = f"{side}-append-evidence"
        if point in chosen(options.only):
            one = apart(options, f"{side}-evidence")
            attempt, dress = (point, partial(crash_with_proof, point)), partial(arm, point)
            title = "killed with a proof in hand"
            status |= await conduct(one, title, [attempt], dress=dress, malicious=1, attack="equivocate")
    return status


def apart(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Return the same options for another network, with its name in the paths of its table and its data."""
    one = argparse.Namespace(**vars(options))
    if options.json:
        one.json = str(Path(options.json).with_stem(f"{Path(options.json).stem}-{name}"))
    if options.keep:
        one.keep = options.keep / name
    return one


def main() -> int:
    parser = arguments("crash_points", __doc__)
    parser.add_argument(
        "--only", default="", metavar="NAME", help="one write, one point, or the first characters of several points"
    )
    parser.add_argument("--list", action="store_true", help="print all crash points and exit")
    options = parser.parse_args()
    if options.list:
        for write, about in WRITES.items():
            note = f"; not tried here: {UNREACHED[write]}" if write in UNREACHED else ""
            print(f"before-{write}, after-{write}\n    {about}{note}")
        return 0
    if why := refusal(options.only):
        parser.error(why)
    return network.main(partial(run, options))


if __name__ == "__main__":
    sys.exit(main())
