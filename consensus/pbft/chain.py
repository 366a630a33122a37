"""The end of the chain at one replica: the last decided blocks, the applied height, voter sets and leaders."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from consensus.block import BODY_BYTES_MAX, FIRST_HEIGHT, Block, block_digest, decode_block, encode_block
from consensus.effects import DecidedBlock, RestartState
from consensus.inputs import Application, AppliedInput
from consensus.voter_set import VoterSet, verify_certificate
from protocol import codec
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.identity import Signed, Verifier
from protocol.limits import CLOCK_AHEAD_SECONDS
from protocol.messages import Certificate, Commit

DECIDED_AHEAD_MAX = 64  # decided heights that are not applied yet, at which a replica stops requesting decisions


# Leaders -------------------------------------------------------------------------------------------------------------

# Voters lead in turn. A voter whose view failed is left out for two turns of all voters, and then until a parent's certificate
# contains its commit. The leaders depend only on decided blocks, so all honest voters agree on them, even after a restart. A
# proposer's free choices in a block, such as the set of commits, cost no other voter its turn.


@dataclass(frozen=True, slots=True)
class LeaderSchedule:
    """The leaders of all views of one height."""

    height: int
    voters: tuple[bytes, ...]
    eligible: tuple[bytes, ...]  # voters that are not left out

    def leader_of_view(self, view: int) -> bytes:
        """Return the leader of `view`.

        A voter that is left out keeps its place in the order, so that no other voter's turn moves. Another voter takes the
        turn, a different one each time the order starts again. With one fixed substitute, a faulty voter could choose its key
        so that it becomes this substitute.
        """
        lap, place = divmod(self.height + view, len(self.voters))
        key = self.voters[place]
        return key if key in self.eligible else self.eligible[(lap + place) % len(self.eligible)]


def make_leader_schedule(height: int, voters: VoterSet, parent: Block | None) -> LeaderSchedule:
    """Return the schedule of `height`. `parent` is the decided block before it; None for the first height.

    At most n − q voters are left out: those that failed last. The others form a quorum, which has at least one honest voter.
    """
    failed = parent.failed if parent else {}
    latest = sorted((-until, key) for key, until in failed.items() if key in voters)
    left_out = {key for _, key in latest[: len(voters) - voters.quorum]}
    return LeaderSchedule(height, voters.keys, tuple(key for key in voters.keys if key not in left_out))


def update_failed_leaders(
    height: int, voters: VoterSet, parent: Block, leaders: LeaderSchedule, view: int, signers: Collection[bytes]
) -> Mapping[bytes, int]:
    """Return the field `failed` of the block at `height`.

    The parent was decided in the view `view` of the schedule `leaders`, by the commits of `signers`.
    """
    assert parent.height == height - 1 == leaders.height and height > FIRST_HEIGHT
    failed = {key: until for key, until in parent.failed.items() if key in voters and (until > height or key not in signers)}
    for earlier in range(min(view, len(leaders.voters))):
        key = leaders.leader_of_view(view - 1 - earlier)
        if key in voters and key != leaders.leader_of_view(view):
            failed[key] = parent.height + 2 * len(voters)
    return failed


# Decided heights -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DecidedHeight:
    """A decided block with its certificate."""

    block: Block  # decided block, stored without its body
    digest: bytes
    vote: Commit
    # Commit certificate, to which late commits are added, so that the next block shows that their voters work.
    certificate: Certificate


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """The reason why a block must not be prepared. If its time is ahead of this clock, `retry_at` is the time to try again."""

    reason: str
    retry_at: float | None = None


class Chain:
    """The last two decided heights and all heights that are not applied, at most `DECIDED_AHEAD_MAX`, with their voters."""

    def __init__(self, chain_id: bytes, application: Application, applied: AppliedInput, restart: RestartState) -> None:
        self._chain_id = chain_id
        self._application = application
        self._past: dict[int, DecidedHeight] = {}
        self.voters: dict[int, VoterSet] = {}  # height -> its voter set
        self._schedules: dict[int, LeaderSchedule] = {}  # height -> its schedule, cached because a step reads it several times
        self.applied = applied.height
        self._state_root = applied.state_root
        self.divergence: str | None = None
        self._dissenters: set[bytes] = set()  # leaders at this height whose fresh blocks have another state root than ours
        self.height = FIRST_HEIGHT  # the height that is decided next
        for decided in restart.decided:
            self.height = decided.height
            self.add_decided(decided)
        if self.height <= applied.height:
            raise LocalProtocolError(f"height {applied.height} is applied, but the journal ends before {self.height}")
        self._learn(applied)

    @property
    def is_applied(self) -> bool:
        """True if the parent of the next block is applied. Only then can the next block be made or judged."""
        return self.applied == self.height - 1

    @property
    def state_root_split(self) -> str | None:
        """A text for people if more than n − q leaders of this height have proposed another state root; otherwise None."""
        voters, count = self.voters.get(self.height), len(self._dissenters)
        if voters is None or count <= len(voters) - voters.quorum:
            return None
        root = self._state_root.hex()[:16]
        proposed = f"{count} of {len(voters)} voters proposed height {self.height} on a different state root than ours ({root})"
        return f"{proposed}; a decision needs {voters.quorum} voters with the same root"

    @property
    def parent(self) -> DecidedHeight | None:
        return self._past.get(self.height - 1)

    def is_known_voter(self, key: bytes) -> bool:
        return any(key in voters for voters in self.voters.values())

    def leader_schedule(self, height: int) -> LeaderSchedule | None:
        """Return the schedule of leaders of `height`. None: the voters or the parent of that height are not known yet."""
        known = self._schedules.get(height)
        if known is not None:
            return known
        voters, parent = self.voters.get(height), self._past.get(height - 1)
        if voters is None or (parent is None and height > FIRST_HEIGHT):
            return None
        made = self._schedules[height] = make_leader_schedule(height, voters, parent.block if parent else None)
        return made

    def extends_tip(self, data: bytes) -> bool:
        """Return whether a block's parent is the last decided block. Otherwise the block belongs to another chain."""
        return decode_block(data).parent == (self.parent.digest if self.parent else self._chain_id)

    def add_decided(self, decided: DecidedBlock) -> None:
        assert decided.height == self.height
        block = decided.decode()
        vote = codec.decode_message(decided.certificate.vote, (Commit,))
        slim = replace(block, body=b"")
        self._past[self.height] = DecidedHeight(slim, decided.digest, vote, decided.certificate)
        self.height += 1
        self._dissenters.clear()
        # Voter sets change rarely, so the hash in the block usually names a known set. The voters are then known before the
        # block is applied.
        known = {voters.hash: voters for voters in self.voters.values()}
        if self.height not in self.voters and block.next_voters in known:
            self.voters[self.height] = known[block.next_voters]
        self._compare()
        self._forget()

    def add_applied(self, applied: AppliedInput) -> None:
        if applied.height != self.applied + 1 or applied.height >= self.height:
            raise LocalProtocolError(f"height {applied.height} applied after {self.applied}, while {self.height} is undecided")
        self.applied, self._state_root = applied.height, applied.state_root
        self._learn(applied)

    def _learn(self, applied: AppliedInput) -> None:
        for height, voters in enumerate(applied.voters, applied.height):
            self.voters[height] = voters
        self._schedules.clear()
        self._compare()
        self._forget()

    def _compare(self) -> None:
        """Compare the block after the applied height with this replica's state and voters. If they differ, set `divergence`."""
        child = self._past.get(self.applied + 1)
        if child is None or self.divergence is not None or self.applied + 1 not in self.voters:
            return
        block, height = child.block, child.block.height
        for what, theirs, mine in (
            ("state root", block.state_root, self._state_root),
            ("voters", block.voters, self.voters[height].hash),
            ("next voters", block.next_voters, self.voters[height + 1].hash),
        ):
            if theirs != mine:
                self.divergence = f"height {height} was decided with {what} {theirs.hex()[:16]}, but ours is {mine.hex()[:16]}"

    def _forget(self) -> None:
        needed = min(self.applied, self.height - 2)
        self._past = {height: past for height, past in self._past.items() if height >= needed}
        self.voters = {height: voters for height, voters in self.voters.items() if height >= needed}
        self._schedules = {height: made for height, made in self._schedules.items() if height >= needed}

    def commit_votes_of(self, voter: bytes) -> list[Signed]:
        """Return this voter's commits in the stored certificates, the latest height first."""
        pasts = [self._past[height] for height in sorted(self._past, reverse=True)]
        certificates = [past.certificate for past in pasts if voter in past.certificate.signatures]
        return [Signed(certificate.vote, voter, certificate.signatures[voter]) for certificate in certificates]

    # Blocks ----------------------------------------------------------------------------------------------------------

    def build_block(self, body: bytes, proposer: bytes, now_ms: int) -> bytes:
        """Return the encoded block of this body on the last decided block, which must be applied."""
        assert self.is_applied and len(body) <= BODY_BYTES_MAX, len(body)
        parent = self.parent
        time_ms = max(now_ms, parent.block.time_ms + 1) if parent else now_ms
        return encode_block(self._envelope(proposer, time_ms, parent.certificate if parent else None, body))

    def _envelope(self, proposer: bytes, time_ms: int, parent_certificate: Certificate | None, body: bytes) -> Block:
        """Return the only correct block at this height that has these four fields, which a proposer may choose."""
        parent, leaders, failed = self.parent, self.leader_schedule(self.height - 1), {}
        if parent_certificate is not None and parent is not None and leaders is not None:
            view, voters = codec.decode_message(parent_certificate.vote, (Commit,)).view, self.voters[self.height]
            signers = parent_certificate.signatures
            failed = dict(update_failed_leaders(self.height, voters, parent.block, leaders, view, signers))
        return Block(
            height=self.height,
            parent=parent.digest if parent else self._chain_id,
            time_ms=time_ms,
            proposer=proposer,
            voters=self.voters[self.height].hash,
            next_voters=self.voters[self.height + 1].hash,
            state_root=self._state_root,
            parent_certificate=parent_certificate,
            failed=failed,
            body=body,
        )

    def why_block_refused(
        self, data: bytes, proposer: bytes, now_ms: int, is_vouched_for: bool, verifier: Verifier
    ) -> BlockRefusal | None:
        """Return why a fresh block must not be prepared, or None. The parent must be applied.

        The block's time must be later than the parent's time. It may be more than CLOCK_AHEAD_SECONDS ahead of this clock in
        two cases: no earlier time is possible, or the block `is_vouched_for`, because an honest voter has prepared it.
        """
        assert self.is_applied
        try:
            block = decode_block(data)
            self._check_parent_certificate(block.parent_certificate, verifier)
        except RemoteProtocolError as error:
            return BlockRefusal(str(error))
        if block.state_root != self._state_root:
            self._dissenters.add(proposer)
            return BlockRefusal(f"its state root is {block.state_root.hex()[:16]}, but ours is {self._state_root.hex()[:16]}")
        if block != self._envelope(proposer, block.time_ms, block.parent_certificate, block.body):
            return BlockRefusal("its envelope does not follow from its parent")
        first_ms = self.parent.block.time_ms + 1 if self.parent else 0
        if block.time_ms < first_ms:
            return BlockRefusal(f"its time {block.time_ms} ms is not later than its parent's")
        if block.time_ms > max(first_ms, now_ms + CLOCK_AHEAD_SECONDS * 1_000) and not is_vouched_for:
            reason = f"its time {block.time_ms} ms is more than {CLOCK_AHEAD_SECONDS} s ahead of this clock"
            return BlockRefusal(reason, retry_at=block.time_ms / 1_000 - CLOCK_AHEAD_SECONDS)
        refusal = self._application.why_body_refused(block.height, block.body, proposer)
        return None if refusal is None else BlockRefusal(refusal)

    def _check_parent_certificate(self, certificate: Certificate | None, verifier: Verifier) -> None:
        parent = self.parent
        if (certificate is None) != (parent is None):
            raise RemoteProtocolError("bad-parent", "every block except the first needs its parent's certificate")
        if certificate is None or parent is None:
            return
        vote = verify_certificate(certificate, Commit, self.voters[self.height - 1], self._chain_id, verifier)
        if (vote.height, vote.block) != (self.height - 1, parent.digest):
            raise RemoteProtocolError("bad-parent", "the certificate is not of the parent block")


def make_decided_block(data: bytes, certificate: Certificate, vote: Commit) -> DecidedBlock:
    assert block_digest(data) == vote.block
    return DecidedBlock(vote.height, vote.block, data, certificate)
