"""In what state a peer is: one word for programs, one line for people, and whether its updates come too late.

Nothing here decides anything.
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

COMPARE_PEERS = "people have to compare their peers: see 'When peers do not hold the same state' in the guide"
COMPARE_BLOCKS = "compare the blocks of that height with people you trust, over another way"
STALLED_SECONDS = 30.0  # about six views fail meanwhile: a leader or two that died, or a busy machine, take less
BEHIND_MIN = 4  # heights: one that is being applied, and two whose votes are on their way, are normal
BEHIND_SECONDS = 10.0  # fewer heights count too if nothing was decided here for so long


# How `why_halted` begins.
HALT_STATES = {
    "EXPELLED": PeerState.EXPELLED,
    "HALTED": PeerState.HALTED,
    "silent": PeerState.SILENT,
    "not a member": PeerState.JOINING,
}

WINDOW_SECONDS = 60.0  # what counts are the rounds of the last minute, so that one that goes well does not wipe out the others,
WINDOW_ROUNDS_MIN = 5  # and where rounds are long so many
WINDOW_ROUNDS_MAX = 1_000  # of a tenth of a second and less, which no network decides for a whole minute
LATE_ROUNDS_MIN = 3  # one or two happen to anybody, as beside another program
LATE_SECONDS_MIN = 30.0  # together: a worker that has just been started takes a third of that, while short rounds go by


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
    """How many heights the voters have decided that are not applied here; None: no voter is there that could say.

    One liar can claim any height: f + 1 voters must claim it, or all that are linked, where those are fewer.
    """
    voters = VoterSet(node.state.members.voters)
    others = voters.members - {node.me}
    linked = links & others
    if others and not linked:
        return None
    claimed = node.replica.height_claimed_by(linked, min(voters.faults_tolerated + 1, len(linked)))
    return max(claimed, node.replica.height) - (node.state.height + 1)


def why_stalled(node: Node, links: Set[bytes], awaits_seconds: float, now: float) -> str:
    """What a peer waits for although a quorum is linked; empty if for nothing.

    `awaits_seconds`: for how long there has been work for the voters since the last decision.
    """
    voters = VoterSet(node.state.members.voters)
    linked = links & voters.members
    if node.me not in voters and not linked:
        return f"waiting for the voters: none of {len(voters)} is here"
    if awaits_seconds >= STALLED_SECONDS:
        here = f"{len(linked | ({node.me} & voters.members))} of {len(voters)} voters are here"
        return f"waiting for a decision: height {node.replica.height} has not come for {awaits_seconds:.0f} s ({here})"
    return next(_open_rounds(node, links, now), "")


def _open_rounds(node: Node, links: Set[bytes], now: float) -> Iterator[str]:
    for key, book in node.rounds.books.items():
        terms, name = book.terms, node.state.jobs.jobs[key].name
        which = f"round {display_round_number(terms.round)} of {name!r}, open for {now - book.opened_at:.0f} s"
        if book.proposals and now >= book.cut_off_due_at + STALLED_SECONDS:
            yield f"waiting for the ballots of {which}: {len(book.ballots)} of {terms.quorum} needed are here"
        elif not book.proposals and not terms.trainers & (links | {node.me}) and now >= book.opened_at + STALLED_SECONDS:
            yield f"waiting for a trainer of {which}: none of {len(terms.trainers)} is here"


def why_halted(replica: Replica, member: Member | None, membership_problem: str = "", unknown: str = "") -> str:
    """Why a peer, which is this member, signs nothing, or nothing that counts; empty if it works."""
    if member is not None and member.expelled is not None:
        return f"EXPELLED at height {member.expelled}: the chain holds two statements of this key that exclude each other"
    if replica.divergence is not None:
        return f"HALTED: {replica.divergence}; the certified state is being restored"
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
    """Why people must look at the network although this peer works; empty if they need not."""
    return f"DISPUTED: {replica.fork_proof}; {COMPARE_BLOCKS}" if replica.fork_proof is not None else ""


def why_waiting(node: Node, links: Set[bytes]) -> str:
    """The voters for which a peer that could sign waits; empty if for none."""
    voters = VoterSet(node.state.members.voters)
    here = len((links | {node.me}) & set(voters.keys))
    if node.replica.is_voter and here < voters.quorum:
        return f"waiting for a quorum: {here} of {len(voters)} voters are here, {voters.quorum} are needed"
    is_working = node.state.height + 1 >= node.replica.height and not why_halted(node.replica, None)
    if is_working and not node.may_sign_round_messages:
        return f"waiting for a quorum: {voters.quorum} voters must first say what they heard this peer sign"
    return ""


def duplicate_identity_text(what: str) -> str:
    return (
        f"another machine has this peer's key (it {what}): is a copy of this data directory running? This peer signs nothing "
        "more. Stop one of the two for good, then start the other again"
    )


def vote_lockout_text(below: int) -> str:
    return f"silent until height {below}: signatures of ours are missing from this disk (was it restored from a backup?)"


@dataclass(frozen=True, slots=True)
class _RoundTiming:
    absent: bool  # it was closed without this trainer's update
    proposed: bool  # which had said its proposal before that
    seconds: float  # that it took here


class StragglerDetector:
    """Of one trainer in one job: the last rounds in which the others waited for it."""

    def __init__(self) -> None:
        self._rounds: deque[_RoundTiming] = deque(maxlen=WINDOW_ROUNDS_MAX)
        self._missed = 0  # rounds, since few were missed
        self._told = 0  # how many that were when it was told last; 0: it was not

    def record_round(self, outcome: RoundResult, me: bytes, proposed: bool, seconds: float) -> bool:
        """After one more closed round. Whether its operator is to be told now.

        It is told as soon as it is late, and again whenever twice as many rounds were missed, for whoever reads the log later.
        """
        absent = me in outcome.absent
        if not absent and me not in outcome.accepted and me not in outcome.rejected:
            return False  # it does not train in this round
        self._rounds.append(_RoundTiming(absent, proposed, seconds))
        self._missed += absent
        while (
            len(self._rounds) > WINDOW_ROUNDS_MIN
            and sum(of.seconds for of in self._rounds) - self._rounds[0].seconds >= WINDOW_SECONDS
        ):
            self._rounds.popleft()
        # Not already below half: a trainer that misses every second round would be told again and again.
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
        """In most of the last rounds."""
        absent = self._absent()
        is_enough = len(absent) >= LATE_ROUNDS_MIN and sum(round.seconds for round in absent) >= LATE_SECONDS_MIN
        return is_enough and 2 * len(absent) > len(self._rounds)

    def describe_cause(self, name: str) -> str:
        """What happens, why, and what helps; empty if it is not late, or it is too early to say."""
        if not self.is_straggling:
            return ""
        absent = self._absent()
        patience = f"the others wait {PROPOSALS_FACTOR:.0f} times what most of them take, `proposal_seconds` of the job at most"
        if 2 * sum(round.proposed for round in absent) > len(absent):
            why = "they were computed in time and reached too few voters in time: this peer's link is too slow, or cut"
            helps = "a faster link, or a job that sends less often (more `local_steps`)"
        else:
            took = sum(round.seconds for round in absent) / len(absent)
            why = f"a round closes after {took:.1f} s, before they are computed"
            helps = "more `threads` or a faster machine, or a job with fewer `local_steps`"
        missing = f"this peer's updates are missing in {len(absent)} of the last {len(self._rounds)} rounds of {name!r}"
        return f"{missing}: {why}; what helps: {helps}; {patience}"
