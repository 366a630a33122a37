"""`python -m scenarios.rollback_job`: a conviction removes a false update from the model at every peer.

One of four daemons is a light voter, and one lies. The first trial kills no peer. Then each honest peer in turn is killed when it
first sees the rollback (`kill -9`), and restarted. One newcomer joins before the conviction and one after it. All must continue
from the same model to the end, and the export must pass `peer audit`, which computes every model again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import trio

from demo.demo_peers import DemoPeer, PeerDisk
from ledger.jobs import Job
from ledger.ledger_state import LedgerState
from ledger.model_anchors import UndoReason
from peer.export.export_replay import audit_export
from protocol.errors import UserError
from scenarios import network
from scenarios.audits import JOB, concluded, require_honest_clean, until, view_of
from scenarios.join import join
from scenarios.network import Network
from scenarios.trials import COUNT, AttemptApart, Trial, arguments, conduct_apart

ROLLBACK_SECONDS_MAX = 120.0
POLL_SECONDS = 0.02


async def attempt(options: argparse.Namespace, victim: str | None, peers: Network, trial: Trial) -> None:
    fields = {**JOB, "seed": str(options.seed), "audit_window": str(options.window), "final_full_audit_rounds": "4"}
    job, watched = await peers.train(fields, options.rounds), peers.demo.watched
    await until(watched, job, lambda view: view.round >= 1)
    joins = [await join(peers, 0, keeps=False)] if victim is None else []
    killed = next((peer for peer in peers.honest if peer.name == victim), watched)
    await undone(killed, job)
    if victim is not None:
        peers.kill(killed)
        await peers.restart(killed)
    else:
        joins.append(await join(peers, 1, keeps=False))
    for number, newcomer in enumerate(joins):
        trial.require(newcomer.succeeded, f"newcomer {number} did not come to the others' state")
    for peer in peers.honest:
        await until(peer, job, lambda view: view.state == "finished")
    folder = peers.demo.folder / "export"
    await watched.client.export_run(str(folder))
    await concluded(peers, job)
    await compare(peers, bytes.fromhex(job), trial)
    try:
        found = await trio.to_thread.run_sync(audit_export, folder)
        trial.figures["rounds audited"] = found.rounds
    except UserError as error:
        trial.problems.append(f"peer audit: {error}")


async def undone(peer: DemoPeer, job: str) -> None:
    with trio.fail_after(ROLLBACK_SECONDS_MAX):
        while not (await view_of(peer, job)).undone_rounds:  # noqa: ASYNC110 - it is another process
            await trio.sleep(POLL_SECONDS)


async def compare(peers: Network, key: bytes, trial: Trial) -> None:
    """Check that the disks of all honest peers agree on the job and its audits."""
    states: list[LedgerState] = []
    for peer in peers.honest:
        with closing(PeerDisk(peer.directory)) as disk:
            states.append(disk.state)
    jobs: list[Job] = [state.jobs.jobs[key] for state in states]
    trial.require(all(job == jobs[0] for job in jobs), "honest peers hold different jobs")
    job = jobs[0]
    false = [undone for undone in job.undone_rounds if undone.reason in (UndoReason.FALSE, UndoReason.WITHHELD)]
    (liar,) = [peer for peer in peers.peers if peer.lies]
    trial.require(bool(false), "no round was undone")
    trial.require(all(undone.trainer == liar.identity.public for undone in false), "an honest peer was convicted")
    trial.require(job.rounds_in_model == job.rounds, f"{job.rounds_in_model} of {job.rounds} rounds are in the model")
    trial.figures |= {"rollbacks": len(false), "rounds undone": sum(undone.last - undone.first + 1 for undone in false)}
    trial.figures |= {"rounds closed": job.round, "in the model": job.rounds_in_model}
    require_honest_clean(peers, states[0].audits, trial)
    expelled = [peer.name for peer in peers.honest if states[0].members.is_expelled(peer.identity.public)]
    trial.require(not expelled, f"{', '.join(expelled)} was expelled")


async def run(options: argparse.Namespace) -> int:
    names, made = list[str](), {"malicious": 1, "attack": "false-update"}

    async def undisturbed(peers: Network, trial: Trial) -> None:
        names.extend(peer.name for peer in peers.honest)
        await attempt(options, None, peers, trial)

    def attempts() -> Iterator[AttemptApart]:
        yield "nobody is killed", undisturbed, made
        for victim in names:
            yield f"{victim} is killed", partial(attempt, options, victim), made

    return await conduct_apart(options, f"a conviction undoes, {options.rounds} rounds", attempts())


def main() -> int:
    parser = arguments("rollback_job", __doc__)
    parser.add_argument("--rounds", type=COUNT, default=24, metavar="N", help="rounds of each job")
    parser.add_argument("--window", type=COUNT, default=6, metavar="N", help="rounds in which an audit can be reported")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
