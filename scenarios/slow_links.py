"""`python -m scenarios.slow_links --preset P`: sampled audits over narrow uplinks with long round trips.

Real peers train through the proxy, which gives each of them an uplink and delays every byte. Without liars no peer may be
suspended, however slow the links are. A trainer that withholds its committed buffers must still be convicted.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from functools import partial

import trio

from consensus.block import decode_block
from demo.demo_peers import DemoPeer, PeerDisk
from ledger.audits.audit_state import FINDING_KINDS, AuditFinding, AuditsState
from ledger.jobs import Job
from ledger.ledger_state import decode_body
from peer.commands.definitions.job_commands import preset_overrides
from protocol import codec
from protocol.messages import Transaction
from protocol.verdicts import ReplayFinding
from scenarios import network
from scenarios.audits import view_of
from scenarios.emulation.link_profiles import steady_profile
from scenarios.network import Network, journal
from scenarios.proxy import Proxy, running_proxy
from scenarios.trials import COUNT, Trial, arguments, report, table_of
from training.job_spec import PRESETS

UPLINKS = (100.0, 10.0, 2.0)  # Mbit/s
ROUND_TRIPS = (100.0, 200.0, 300.0)  # ms
CASE_SECONDS_MAX = 1_800.0
SETTLE_SECONDS = 30.0  # after the last round: awaited audits are reported or lapse
POLL_SECONDS = 0.5
LIAR = "withhold"


async def case(options: argparse.Namespace, uplink: float, round_trip: float, attack: str = "") -> Trial:
    trial = Trial(f"{uplink:g} Mbit/s, {round_trip:g} ms{' and a liar that withholds' if attack else ''}")
    profile = steady_profile("slow", uplink, math.inf, round_trip)
    folder = options.keep / f"{uplink:g}-{round_trip:g}{attack and '-liar'}" if options.keep else None

    def dress(proxy: Proxy, peer: DemoPeer) -> None:
        peer.trains = True
        proxy.dress(peer)

    async with running_proxy(profile) as proxy:
        running = network.running(
            options.peers, int(bool(attack)), seed=options.seed, attack=attack or LIAR, folder=folder, dress=partial(dress, proxy)
        )
        async with running as peers:
            try:
                with trio.fail_after(CASE_SECONDS_MAX):
                    await _train(options, peers, trial, is_attacked=bool(attack))
            except trio.TooSlowError:
                trial.problems.append(f"not over after {CASE_SECONDS_MAX:.0f} s")
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(peers.stop)
            _judge(peers, trial, is_attacked=bool(attack))
    return trial


async def _train(options: argparse.Namespace, peers: Network, trial: Trial, *, is_attacked: bool) -> None:
    overrides = {
        **preset_overrides(options.preset, dict(options.set)),
        **dict(options.set),
        "audit": "sampled",
        "seed": str(options.seed),
    }
    overrides |= {"audit_rate": "1"} if is_attacked else {}
    rounds = options.liar_rounds if is_attacked else options.rounds
    asked, started = peers.demo.watched, trio.current_time()
    job = await peers.train(overrides, rounds)
    while True:
        view = await view_of(asked, job)
        if view.state == "finished" or (is_attacked and await _is_convicted(asked)):
            break
        await trio.sleep(POLL_SECONDS)
    trial.figures["rounds"] = view.round
    trial.figures["s/round"] = (trio.current_time() - started) / max(1, view.round)
    with trio.move_on_after(0.0 if is_attacked else SETTLE_SECONDS):
        while (await view_of(asked, job)).audits_open:  # noqa: ASYNC110 - it is another process
            await trio.sleep(POLL_SECONDS)


async def _is_convicted(asked: DemoPeer) -> bool:
    return any(view.suspensions for view in (await asked.client.audits(1)).records)


def _judge(peers: Network, trial: Trial, *, is_attacked: bool) -> None:
    with closing(PeerDisk(peers.demo.watched.directory)) as disk:
        audits: AuditsState = disk.state.audits
        (job,) = disk.state.jobs.jobs.values()
    honest = {peer.identity.public: peer.name for peer in peers.honest}
    suspended = {key for key, standing in audits.member_records.items() if standing.suspensions}
    trial.figures |= {"suspended": sum(key in honest for key in suspended), "accepted": _accepted(job, honest)}
    said = findings(peers.demo.watched)
    trial.figures |= {
        "match": said[ReplayFinding.MATCH],
        "withheld": said[ReplayFinding.WITHHELD],
        "others": sum(count for finding, count in said.items() if finding not in (ReplayFinding.MATCH, ReplayFinding.WITHHELD)),
        "lapsed": sum(standing.lapsed for standing in audits.member_records.values()),
    }
    for key in suspended & honest.keys():
        trial.problems.append(f"{honest[key]} is honest and was suspended")
    trial.require(is_attacked or not job.undone_rounds, "rounds were undone")
    if is_attacked:
        liars = {peer.identity.public for peer in peers.peers} - honest.keys()
        trial.require(liars <= suspended, "the liar was not suspended")
    trial.problems += peers.failures() if not is_attacked else []


def _accepted(job: Job, honest: dict[bytes, str]) -> str:
    return f"{sum(count for key, count in job.accepted.items() if key in honest)} of {job.round * len(honest)}"


def findings(peer: DemoPeer) -> Counter[ReplayFinding]:
    """Return the findings in reports, challenges and verdicts of a stopped peer's blocks, repeated ones included."""
    found = Counter[ReplayFinding]()
    with journal(peer) as database:
        blocks = [block for (block,) in database.execute("SELECT block FROM blocks ORDER BY height")]
    for block in blocks:
        for signed in decode_body(decode_block(block).body).transactions:
            transaction = codec.decode_message(signed.body, (Transaction,))
            if transaction.kind in FINDING_KINDS:
                found[codec.decode(AuditFinding, transaction.content).finding] += 1
    return found


async def run(options: argparse.Namespace) -> int:
    started, trials = trio.current_time(), list[Trial]()
    cases = [(uplink, round_trip, "") for uplink in options.uplinks for round_trip in options.round_trips]
    if options.liar:
        cases.append((options.uplinks[0], options.round_trips[0], LIAR))
    for number, (uplink, round_trip, attack) in enumerate(cases):
        trials.append(trial := await case(options, uplink, round_trip, attack))
        print(f"{number + 1}. {trial.what}: {trial.figures} {'; '.join(trial.problems) or 'held'}", file=sys.stderr, flush=True)
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    seconds = trio.current_time() - started
    title = (
        f"preset {options.preset}, {options.peers} trainers, sampled audits, {options.rounds} rounds each, {seconds:.0f} s in all"
    )
    return report(
        options, title, *table_of(trials), failures, {"trials": [asdict(trial) for trial in trials], "seconds": seconds}
    )


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def main() -> int:
    parser = arguments("slow_links", __doc__)
    parser.add_argument("--preset", choices=PRESETS, default="local", help="preset of the job; its audits are always sampled")
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="a field of the job")
    parser.add_argument("--rounds", type=COUNT, default=20, metavar="N", help="rounds of each case")
    parser.add_argument(
        "--liar-rounds", type=COUNT, default=200, metavar="N", help="rounds within which the liar must be convicted"
    )
    parser.add_argument(
        "--uplinks", type=float, nargs="+", default=UPLINKS, metavar="MBIT", help="uplinks of each peer in Mbit/s"
    )
    parser.add_argument(
        "--round-trips", type=float, nargs="+", default=ROUND_TRIPS, metavar="MS", help="round trips between any two peers in ms"
    )
    parser.add_argument("--no-liar", dest="liar", action="store_false", help="skip the case with a liar")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
