"""`python -m scenarios.audits`: a trainer that cheats, one that is caught by a person's challenge alone, and a false auditor.

With sampled audits, lies are found after the vote, by re-execution. Every peer must derive the same suspension at the same height
from the decided blocks alone. No honest peer may be suspended. An auditor that is killed must report after its restart or let its
audits lapse, and the job must continue in either case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from random import Random

import trio

from demo.demo_peers import DemoPeer, PeerDisk
from demo.network_demo import IDLE_SECONDS
from ledger.audits.audit_state import AuditResult, AuditsState, MemberAuditRecord
from protocol.api import JobView
from protocol.identity import peer_id
from scenarios import network
from scenarios.network import SMALL_JOB, Network
from scenarios.trials import COUNT, Trial, arguments, conduct_apart

JOB = {**SMALL_JOB, "local_steps": "5", "batch": "128", "micro_batch": "32", "audit": "sampled", "audit_rate": "1"}
OPENING_ROUNDS = 1
JOB["compression_warmup_rounds"] = str(OPENING_ROUNDS)
JOB["proposal_seconds"] = "10"  # a job that settles waits for silent auditors for this long, times its window
JOB_SECONDS_MAX = 240.0
DOWN_ROUNDS = 1  # rounds that are closed while the auditor is down
SETTLE_SECONDS_MAX = 90.0  # after the last round: 30 s until data counts as withheld, and 30 s to judge it
POLL_SECONDS = 0.2


async def cheats(random: Random, options: argparse.Namespace, peers: Network, trial: Trial) -> None:
    """Check that the cheat is suspended while the killed auditor comes back."""
    job = await peers.train({**JOB, "seed": str(options.seed), "audit_window": str(options.window)}, options.rounds)
    victim = random.choice([peer for peer in peers.honest if peer is not peers.demo.watched])
    trial.figures["killed"] = victim.name
    await until(peers.demo.watched, job, lambda view: view.round >= 1)
    await trio.sleep(random.uniform(0, 1))
    peers.kill(victim)
    before, heard = (await view_of(peers.demo.watched, job)).round, await said_by(peers.demo.watched, victim)
    trial.figures["in round"] = before
    await until(peers.demo.watched, job, lambda view: view.round >= min(options.rounds, before + DOWN_ROUNDS))
    await peers.restart(victim)
    trial.figures["back in round"] = (await view_of(victim, job)).round
    await concluded(peers, job)
    audits = read(peers, trial)
    (liar,) = [peer for peer in peers.peers if peer.lies]
    told = [entry for entry in audits.log if entry.result is AuditResult.SUSPENDED]
    suspended = {entry.trainer for entry in told}  # each dispute about it ends with a suspension
    trial.require(suspended == {liar.identity.public}, f"{len(suspended)} were suspended, expected only the liar")
    trial.figures |= {"suspended in round": told[0].round, "at height": told[0].height} if told else {}
    require_honest_clean(peers, audits, trial)
    standing = audits.member_records.get(victim.identity.public, MemberAuditRecord())
    trial.figures |= {"reports since": standing.reports - heard[0], "lapsed since": standing.lapsed - heard[1]}
    trial.require((standing.reports, standing.lapsed) > heard, f"{victim.name} sent no more reports, and no audit lapsed")


async def challenged(options: argparse.Namespace, peers: Network, trial: Trial) -> None:
    """Check that a cheat is suspended after a person's challenge, in a job whose audits draw no proposals."""
    fields = {**JOB, "seed": str(options.seed), "audit_window": str(options.window), "audit_rate": "1e-9"}
    job, asked = await peers.train(fields, options.rounds), peers.demo.watched
    (liar,) = [peer for peer in peers.peers if peer.lies]
    await until(asked, job, lambda view: view.accepted.get(peer_id(liar.identity.public), 0) > 0)
    (honest, *_) = [peer for peer in peers.honest if peer is not asked]
    trial.figures["of the liar"] = found = await asked.client.challenge_trainer(peer_id(liar.identity.public), None)
    trial.require("mismatch" in found, f"{asked.name} found {found!r} of {liar.name}, which is dishonest")
    # Undone rounds are no longer audited. Opening rounds are re-executed before the vote, also those after a rollback.
    await until(asked, job, lambda view: bool(view.undone_rounds) and view.rounds_in_model > OPENING_ROUNDS)
    trial.figures["of an honest trainer"] = found = await asked.client.challenge_trainer(peer_id(honest.identity.public), None)
    trial.require("passed" in found, f"{asked.name} found {found!r} of {honest.name}, which is honest")
    await concluded(peers, job)
    audits = read(peers, trial)
    told = [(entry.trainer, entry.auditor) for entry in audits.log if entry.result is AuditResult.SUSPENDED]
    trial.require(told == [(liar.identity.public, asked.identity.public)], f"{len(told)} suspensions, not the liar's one")
    require_honest_clean(peers, audits, trial)


async def said_by(asked: DemoPeer, auditor: DemoPeer) -> tuple[int, int]:
    """Return the auditor's decided numbers of reports and of lapsed audits."""
    views = {view.peer: view for view in (await asked.client.audits(1)).records}
    view = views.get(peer_id(auditor.identity.public))
    return (view.reports, view.reports_lapsed) if view else (0, 0)


async def challenges_falsely(options: argparse.Namespace, peers: Network, trial: Trial) -> None:
    job = await peers.train({**JOB, "seed": str(options.seed), "audit_window": str(options.window)}, options.rounds)
    await concluded(peers, job)
    audits = read(peers, trial)
    (liar,) = [peer for peer in peers.peers if peer.lies]
    standing = audits.member_records.get(liar.identity.public)
    refuted = standing.refuted if standing else 0
    trial.figures["refuted"] = refuted
    trial.require(refuted > 0, f"no challenge of {liar.name} was refuted")
    trial.require(all(entry.result is not AuditResult.SUSPENDED for entry in audits.log), "a peer was suspended")
    require_honest_clean(peers, audits, trial)


def require_honest_clean(peers: Network, audits: AuditsState, trial: Trial) -> None:
    for peer in peers.honest:
        standing = audits.member_records.get(peer.identity.public)
        if standing is not None:
            trial.require(not standing.suspensions, f"{peer.name} is honest and was suspended")
            trial.require(not standing.refuted, f"a challenge of {peer.name} was refuted")


async def view_of(peer: DemoPeer, job: str) -> JobView:
    return next(view for view in await peer.client.jobs() if view.job == job)


async def until(peer: DemoPeer, job: str, condition: Callable[[JobView], bool]) -> None:
    with trio.fail_after(JOB_SECONDS_MAX):
        while not condition(await view_of(peer, job)):  # noqa: ASYNC110 - it is another process
            await trio.sleep(POLL_SECONDS)


async def concluded(peers: Network, job: str) -> None:
    """Wait until the job and its audits are over and all peers hold one height. Then stop all peers."""
    for peer in peers.honest:
        await until(peer, job, lambda view: view.state == "finished")

    height, since = 0, trio.current_time()

    async def settled() -> bool:
        nonlocal height, since
        heights = {await peers.height(peer) for peer in peers.honest}
        if max(heights) != height:
            height, since = max(heights), trio.current_time()
        return len(heights) == 1 and trio.current_time() - since > IDLE_SECONDS  # no block comes while the peers are stopped

    await network.holds(settled, SETTLE_SECONDS_MAX)
    await trio.to_thread.run_sync(peers.stop)


def read(peers: Network, trial: Trial) -> AuditsState:
    """Return the state of audits on the disks of all honest peers, which must be the same."""
    states = []
    for peer in peers.honest:
        with closing(PeerDisk(peer.directory)) as disk:
            states.append(disk.state.audits)
    trial.require(all(state == states[0] for state in states), "honest peers hold different audits")
    results = [entry.result.value for entry in states[0].log]
    trial.figures["results"] = ", ".join(f"{result} {results.count(result)}" for result in dict.fromkeys(results))
    return states[0]


def dress(peer: DemoPeer) -> None:
    """Let every peer train: there must be enough judges besides the accused peer, the liar and the killed one."""
    peer.trains = True


async def run(options: argparse.Namespace) -> int:
    random = Random(options.seed)
    kinds = (
        ("false-update", "false-update", partial(cheats, random, options)),
        ("challenged", "false-update", partial(challenged, options)),
        ("false-challenge", "false-challenge", partial(challenges_falsely, options)),
    )
    attempts = [(what, attempt, {"malicious": 1, "attack": attack, "dress": dress}) for what, attack, attempt in kinds]
    return await conduct_apart(options, f"sampled audits of {options.rounds} rounds", attempts)


def main() -> int:
    parser = arguments("audits", __doc__)
    parser.add_argument("--rounds", type=COUNT, default=12, metavar="N", help="rounds of each job")
    parser.add_argument("--window", type=COUNT, default=6, metavar="N", help="rounds in which an audit can be reported")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
