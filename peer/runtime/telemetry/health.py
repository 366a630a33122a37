"""The state of a peer as a word for programs and a line for people, and the detection of stragglers. No decision of the network
depends on this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass

from consensus.pbft.replica import Replica
from consensus.voter_set import VoterSet
from ledger.members import Member
from peer.node.node import Node
from protocol.api import PeerState
from protocol.units import display_round_number
from rounds.round_state import PROPOSALS_FACTOR, RoundResult

COMPARE_PEERS = "operators must compare their peers: see docs/how-to/when-something-is-wrong.md"
COMPARE_BLOCKS = "compare the blocks of that height with people you trust, over another channel"
# Time without a decision after which a peer is stalled, about six failed views: a few dead leaders delay a decision less.
STALLED_SECONDS = 30.0
# Heights behind other voters that count as behind: three are normal, one being applied and two with votes on their way.
BEHIND_MIN = 4
BEHIND_SECONDS = 10.0  # time without a decision after which fewer heights count as behind


# First words of a text of `why_halted` -> state of the peer.
HALT_STATES = {
    "EXPELLED": PeerState.EXPELLED,
    "HALTED": PeerState.HALTED,
    "silent": PeerState.SILENT,
    "not a member": PeerState.JOINING,
}

# Window of rounds that decide whether a trainer is a straggler: in a minute, one good round does not outweigh the others.
WINDOW_SECONDS = 60.0
WINDOW_ROUNDS_MIN = 5  # last rounds that count even if they took longer than the window
WINDOW_ROUNDS_MAX = 1_000  # rounds in the window, a bound of memory: no network decides rounds of 0.06 s for a minute
# Least number of missed rounds of a straggler: any trainer misses one or two, for example beside another program.
LATE_ROUNDS_MIN = 3
LATE_SECONDS_MIN = 30.0  # least duration of all missed rounds of a straggler: the start of a worker takes a third of this time


def peer_state(halted: str, waiting: str, behind: int | None, decided_seconds_ago: float | None, suspended: str) -> PeerState:
    if halted:
        return next(state for beginning, state in HALT_STATES.items() if halted.startswith(beginning))
    if waiting:
        return PeerState.WAITING
    is_late = decided_seconds_ago is None or decided_seconds_ago >= BEHIND_SECONDS
    if behind and (behind >= BEHIND_MIN or is_late):
        return PeerState.BEHIND
    return PeerState.SUSPENDED if suspended else PeerState.WORKING


def heights_behind(node: Node, links: Set[bytes]) -> int | None:
    """Return the number of decided heights that this peer has not applied, or None if no other voter is linked.

    A height counts if f + 1 voters report it, or all linked voters if fewer are linked: a faulty voter can report any height.
    """
    voters = VoterSet(node.state.members.voters)
    others = voters.members - {node.me}
    linked = links & others
    if others and not linked:
        return None
    claimed = node.replica.height_claimed_by(linked, min(voters.faults_tolerated + 1, len(linked)))
    return max(claimed, node.replica.height) - (node.state.height + 1)


def why_stalled(node: Node, links: Set[bytes], awaits_seconds: float, now: float) -> str:
    """Return a line about the voters, decision, ballots or trainer whose absence stalls this peer, or an empty string.

    `awaits_seconds` is the time for which voters have had work since the last decision.
    """
    voters = VoterSet(node.state.members.voters)
    linked = links & voters.members
    if node.me not in voters and not linked:
        return f"waiting for the voters: 0 of {len(voters)} are connected"
    if awaits_seconds >= STALLED_SECONDS:
        here = f"{len(linked | ({node.me} & voters.members))} of {len(voters)} voters are connected"
        return f"waiting for a decision: height {node.replica.height} has been undecided for {awaits_seconds:.0f} s ({here})"
    return next(_open_rounds(node, links, now), "")


def _open_rounds(node: Node, links: Set[bytes], now: float) -> Iterator[str]:
    for key, book in node.rounds.books.items():
        terms, name = book.terms, node.state.jobs.jobs[key].name
        which = f"round {display_round_number(terms.round)} of {name!r}, open for {now - book.opened_at:.0f} s"
        if book.proposals and now >= book.cut_off_due_at + STALLED_SECONDS:
            yield f"waiting for the ballots of {which}: {len(book.ballots)} of {terms.quorum} needed have arrived"
        elif not book.proposals and not terms.trainers & (links | {node.me}) and now >= book.opened_at + STALLED_SECONDS:
            yield f"waiting for a trainer of {which}: 0 of {len(terms.trainers)} are connected"


def why_halted(replica: Replica, member: Member | None, membership_problem: str = "", unknown: str = "") -> str:
    """Return the reason why this peer signs no valid message, or an empty string. `member` is the peer's own entry."""
    if member is not None and member.expelled is not None:
        return f"EXPELLED at height {member.expelled}: this peer's key signed two statements that exclude each other"
    if replica.divergence is not None:
        return f"HALTED: {replica.divergence}; this peer restores the certified state"
    if replica.duplicate_identity_reason is not None:
        return f"HALTED: {duplicate_identity_text(replica.duplicate_identity_reason)}"
    if replica.is_outdated:
        return f"HALTED: {unknown}"
    if replica.state_root_split is not None:
        return f"HALTED: {replica.state_root_split}; {COMPARE_PEERS}"
    if replica.height < replica.no_votes_below:
        return vote_lockout_text(replica.no_votes_below)
    return f"not a member: {membership_problem}" if member is None and membership_problem else ""


def fork_text(replica: Replica) -> str:
    """Return a line about a proven fork of the chain, which people must resolve, or an empty string."""
    return f"DISPUTED: {replica.fork_proof}; {COMPARE_BLOCKS}" if replica.fork_proof is not None else ""


def why_waiting(node: Node, links: Set[bytes]) -> str:
    """Return a line about the quorum for which this peer waits before it can sign, or an empty string."""
    voters = VoterSet(node.state.members.voters)
    here = len((links | {node.me}) & set(voters.keys))
    if node.replica.is_voter and here < voters.quorum:
        return f"waiting for a quorum: {here} of {len(voters)} voters are connected, {voters.quorum} are needed"
    is_working = node.state.height + 1 >= node.replica.height and not why_halted(node.replica, None)
    if is_working and not node.may_sign_round_messages:
        return f"waiting for a quorum: {voters.quorum} voters must first report the statements that they heard from this peer"
    return ""


def duplicate_identity_text(what: str) -> str:
    return (
        f"another machine has this peer's key (it {what}), perhaps a copy of this data directory. This peer signs nothing "
        "more: stop one of the two for good, then restart the other"
    )


def vote_lockout_text(below: int) -> str:
    return f"silent until height {below}: the disk lacks signatures of this peer, as after a restore from a backup"


@dataclass(frozen=True, slots=True)
class _RoundTiming:
    absent: bool  # True if the round was closed without this trainer's update
    proposed: bool  # True if this trainer had proposed before the round was closed
    seconds: float  # duration of the round at this peer


class StragglerDetector:
    """The detection that this trainer is a straggler in one job, from the job's recent rounds."""

    def __init__(self) -> None:
        self._rounds: deque[_RoundTiming] = deque(maxlen=WINDOW_ROUNDS_MAX)
        self._missed = 0  # missed rounds since the window last had few missed rounds
        self._told = 0  # value of `_missed` at the last warning, or 0 before the first

    def record_round(self, outcome: RoundResult, me: bytes, proposed: bool, seconds: float) -> bool:
        """Add a closed round. Return True if the operator must be warned now.

        The first warning comes as soon as the trainer is a straggler. A further warning comes each time when the number of missed
        rounds has doubled, so that the end of the log has one, too.
        """
        absent = me in outcome.absent
        if not absent and me not in outcome.accepted and me not in outcome.rejected:
            return False  # this peer is no trainer of the round
        self._rounds.append(_RoundTiming(absent, proposed, seconds))
        self._missed += absent
        while (
            len(self._rounds) > WINDOW_ROUNDS_MIN
            and sum(of.seconds for of in self._rounds) - self._rounds[0].seconds >= WINDOW_SECONDS
        ):
            self._rounds.popleft()
        # The count is reset if a quarter or less is missed. With half as the limit, a trainer that misses every second round
        # would be warned again and again.
        if 4 * len(self._absent()) <= len(self._rounds):
            self._missed = self._told = 0
        if not self.is_straggling or self._missed < 2 * self._told:
            return False
        self._told = self._missed
        return True

    def _absent(self) -> list[_RoundTiming]:
        return [round for round in self._rounds if round.absent]

    @property
    def is_straggling(self) -> bool:
        """True if the trainer's update was missing in most recent rounds."""
        absent = self._absent()
        is_enough = len(absent) >= LATE_ROUNDS_MIN and sum(round.seconds for round in absent) >= LATE_SECONDS_MIN
        return is_enough and 2 * len(absent) > len(self._rounds)

    def describe_cause(self, name: str) -> str:
        """Return a line with the effect, the cause and a remedy, or an empty string if the trainer is no straggler."""
        if not self.is_straggling:
            return ""
        absent = self._absent()
        patience = f"a round waits {PROPOSALS_FACTOR:.0f} times as long as most trainers take, `proposal_seconds` at most"
        if 2 * sum(round.proposed for round in absent) > len(absent):
            why = "they are computed in time, but reach too few voters in time: this peer's link is too slow, or interrupted"
            helps = "use a faster link, or start a job with more `local_steps`, which sends less often"
        else:
            took = sum(round.seconds for round in absent) / len(absent)
            why = f"a round closes after {took:.1f} s, before they are computed"
            helps = "use more `threads` or a faster machine, or start a job with fewer `local_steps`"
        missing = f"this peer's updates are missing in {len(absent)} of the last {len(self._rounds)} rounds of {name!r}"
        return f"{missing}: {why}; {helps} ({patience})"
