"""`python -m scenarios.diverge`: a job whose learning rate is far too high ends by itself, and the next one learns.

Four honest daemons train with `inner_rate` 10. In two trials, with full and with sampled audits, the first updates are already
far too large. In a third one, updates are accepted until the model's values are not finite. After eight rounds without an
accepted update all peers must end the job with one root and the alert `no-progress`. No peer may be suspended or expelled. Then
the alert's command runs, without `--from` if the model is spoilt, and that job must train to its last round.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing
from functools import partial

import trio

from demo.demo_peers import DemoPeer, PeerDisk
from ledger.jobs import NO_PROGRESS_ROUNDS
from protocol.api import AlertCause, RoundView, TrainRequest
from protocol.verdicts import DIVERGING
from scenarios import network
from scenarios.audits import dress, until
from scenarios.network import SMALL_JOB, Network
from scenarios.trials import COUNT, Trial, arguments, conduct_apart

ROUNDS = 100  # in the specification; the job ends before
TRIALS = {
    "full": {"audit": "full", "initial_norm": "8"},
    "sampled": {"audit": "sampled", "initial_norm": "8"},
    "not a number": {"audit": "full", "local_steps": "20"},
}
SMALL_MODEL = {name: value for name, value in SMALL_JOB.items() if name.startswith("model.")}
WAY_OUT = re.compile(r"`peer train --from (\w+) --set inner=(\w+) inner_rate=([^ `]+)`")


async def attempt(options: argparse.Namespace, peers: Network, trial: Trial) -> None:
    fields = {"seed": str(options.seed), "local_steps": "10", **TRIALS[trial.what]}
    job = await peers.train({**SMALL_JOB, **fields, "inner_rate": "10"}, ROUNDS)
    for peer in peers.peers:
        await until(peer, job, lambda view: view.state == "finished")
    refused = list[RoundView]()  # the last ones
    for view in (closed := await rounds_of(peers, job)):
        refused = [] if "accept" in view.verdicts.values() else [*refused, view]
    counted = [view for view in refused if list(view.verdicts.values()).count(DIVERGING) > (options.peers - 1) // 3]
    trial.figures |= {"first refused": refused[0].round if refused else "–", "refused": len(counted)}
    trial.require(len(counted) == NO_PROGRESS_ROUNDS, f"it ended after {len(counted)} rounds whose updates diverge")
    trial.require(verdicts(refused) <= {DIVERGING, "norm", "absent", "unjudged"}, f"the verdicts are {verdicts(refused)}")
    alerts = {peer.name: await no_progress(peer) for peer in peers.peers}
    trial.require(len(set(alerts.values())) == 1, f"alerts differ: {alerts}")
    way_out = WAY_OUT.search(alerts[peers.peers[0].name])
    if way_out is None:
        trial.problems.append(f"the alert names no remedy: {alerts}")
        return
    fields |= {"inner": way_out[2], "inner_rate": way_out[3], "byzantine_max": str((options.peers - 1) // 3)}
    base = way_out[1] if len(refused) == len(closed) else ""
    fields |= {} if base else SMALL_MODEL
    request = TrainRequest("again", "", options.rounds, 0, fields, initial_model=base, accept_risk=True)
    again = await peers.demo.watched.client.start_job(request)
    for peer in peers.peers:
        await until(peer, again, lambda view: view.state == "finished")
    rounds = await rounds_of(peers, again)
    trial.require(len(rounds) == options.rounds and verdicts(rounds) == {"accept"}, f"the second job says {verdicts(rounds)}")
    losses = [view.training_nats for view in rounds if view.training_nats is not None]
    trial.figures |= {"inner_rate": way_out[3], "nats": f"{losses[0]:.2f} to {losses[-1]:.2f}" if losses else "–"}
    trial.require(bool(losses) and losses[-1] < losses[0], "the second job learned nothing")
    await trio.to_thread.run_sync(peers.stop)
    compare(peers, [bytes.fromhex(of) for of in (job, again)], trial)


async def rounds_of(peers: Network, job: str) -> list[RoundView]:
    return [view for view in await peers.demo.watched.client.rounds(1_000) if view.job == job]


def verdicts(rounds: list[RoundView]) -> set[str]:
    return {verdict for view in rounds for verdict in view.verdicts.values()}


async def no_progress(peer: DemoPeer) -> str:
    """Return the text of the peer's alert, or "" if there is none."""
    return next((alert.text for alert in await peer.client.alerts() if alert.cause == AlertCause.NO_PROGRESS), "")


def compare(peers: Network, jobs: list[bytes], trial: Trial) -> None:
    """Check that the disks of all peers agree on the jobs and their members."""
    for peer in peers.peers:
        with closing(PeerDisk(peer.directory)) as disk:
            state = disk.state
        found = [state.jobs.jobs[key] for key in jobs]
        trial.figures.setdefault("model root", found[0].model_root.hex()[:8])
        trial.require(found[0].model_root.hex()[:8] == trial.figures["model root"], f"{peer.name} has another model")
        suspended = {key for key, standing in state.audits.member_records.items() if standing.suspensions}
        suspended |= {key for job in found for key in (*job.trainer_records, *job.distrusted_members)}
        trial.require(not suspended, f"{len(suspended)} trainers are suspended, or on the way")
        trial.require(not any(map(state.members.is_expelled, state.members.members)), "a peer was expelled")


async def run(options: argparse.Namespace) -> int:
    attempts = [(what, partial(attempt, options), {"dress": dress}) for what in TRIALS]
    return await conduct_apart(options, "a job diverges", attempts)


def main() -> int:
    parser = arguments("diverge", __doc__)
    parser.add_argument("--rounds", type=COUNT, default=12, metavar="N", help="rounds of the second job")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
