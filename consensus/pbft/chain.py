"""Where this replica stands: the last decided blocks, what is applied of them, who votes and who leads next."""

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

DECIDED_AHEAD_MAX = 64  # decided heights that wait for being applied; a peer that applies slower stops asking for more


# Leaders -------------------------------------------------------------------------------------------------------------

# Each voter has its turns. A voter whose view failed has none until it is seen again. Everything is a pure function of decided
# blocks, so that all honest voters, also after a restart, agree on every leader. A proposer takes no turn from anybody by what it
# may choose, such as the ballots and commits that it shows.


@dataclass(frozen=True, slots=True)
class LeaderSchedule:
    """The leaders of all views of one height."""

    height: int
    voters: tuple[bytes, ...]
    eligible: tuple[bytes, ...]  # those that are not left out

    def leader_of_view(self, view: int) -> bytes:
        """Turns go round all voters, so a voter that is left out or comes back moves no other voter's turn.

        The turn of a voter that is left out goes to another voter in each lap. With one heir for all laps, a liar could choose
        the key next to it.
        """
        lap, place = divmod(self.height + view, len(self.voters))
        key = self.voters[place]
        return key if key in self.eligible else self.eligible[(lap + place) % len(self.eligible)]


def make_leader_schedule(height: int, voters: VoterSet, parent: Block | None) -> LeaderSchedule:
    """The leaders of `height`, from the decided block before it (None for the first height).

    At most n − q voters are left out, the latest failures first. So a quorum remains, with at least one honest voter in it.
    """
    failed = parent.failed if parent else {}
    latest = sorted((-until, key) for key, until in failed.items() if key in voters)
    left_out = {key for _, key in latest[: len(voters) - voters.quorum]}
    return LeaderSchedule(height, voters.keys, tuple(key for key in voters.keys if key not in left_out))


def update_failed_leaders(
    height: int, voters: VoterSet, parent: Block, leaders: LeaderSchedule, view: int, signers: Collection[bytes]
) -> Mapping[bytes, int]:
    """`Block.failed` of a block at `height` whose parent was decided under `leaders`, in `view`, by the commits of `signers`."""
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
    """One decided height."""

    block: Block  # without its body
    digest: bytes
    vote: Commit
    certificate: Certificate  # grows with commits that come after the decision: the next block shows that their voters are there


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """Why a block is not prepared, and until when that is certain if the clock alone can change it."""

    reason: str
    retry_at: float | None = None


class Chain:
    """The last two decided heights and those not applied yet, `DECIDED_AHEAD_MAX` at most, each with its voters."""

    def __init__(self, chain_id: bytes, application: Application, applied: AppliedInput, restart: RestartState) -> None:
        self._chain_id = chain_id
        self._application = application
        self._past: dict[int, DecidedHeight] = {}
        self.voters: dict[int, VoterSet] = {}  # by height
        self._schedules: dict[int, LeaderSchedule] = {}  # asked for several times a step
        self.applied = applied.height
        self._state_root = applied.state_root
        self.divergence: str | None = None
        self._dissenters: set[bytes] = set()  # leaders of this height whose fresh blocks stand on another state than ours
        self.height = FIRST_HEIGHT  # the next one to be decided
        for decided in restart.decided:
            self.height = decided.height
            self.add_decided(decided)
        if self.height <= applied.height:
            raise LocalProtocolError(f"height {applied.height} is applied, the journal ends before {self.height}")
        self._learn(applied)

    @property
    def is_applied(self) -> bool:
        """Whether the parent of the next block is applied, so that a block can be made and judged."""
        return self.applied == self.height - 1

    @property
    def state_root_split(self) -> str | None:
        """That so many voters stand on another state that no quorum may be left which stands on ours."""
        voters, count = self.voters.get(self.height), len(self._dissenters)
        if voters is None or count <= len(voters) - voters.quorum:
            return None
        root = self._state_root.hex()[:16]
        proposed = f"{count} of {len(voters)} voters proposed height {self.height} on another state root than {root}"
        return f"{proposed}, which is here; {voters.quorum} with the same root are needed to decide"

    @property
    def parent(self) -> DecidedHeight | None:
        return self._past.get(self.height - 1)

    def is_known_voter(self, key: bytes) -> bool:
        return any(key in voters for voters in self.voters.values())

    def leader_schedule(self, height: int) -> LeaderSchedule | None:
        """The leaders of `height`; None while what decides about them is not known."""
        known = self._schedules.get(height)
        if known is not None:
            return known
        voters, parent = self.voters.get(height), self._past.get(height - 1)
        if voters is None or (parent is None and height > FIRST_HEIGHT):
            return None
        made = self._schedules[height] = make_leader_schedule(height, voters, parent.block if parent else None)
        return made

    def extends_tip(self, data: bytes) -> bool:
        """Whether a block's parent is the last decided one. If not, it is of another history than this replica."""
        return decode_block(data).parent == (self.parent.digest if self.parent else self._chain_id)

    def add_decided(self, decided: DecidedBlock) -> None:
        assert decided.height == self.height
        block = decided.decode()
        vote = codec.decode_message(decided.certificate.vote, (Commit,))
        slim = replace(block, body=b"")
        self._past[self.height] = DecidedHeight(slim, decided.digest, vote, decided.certificate)
        self.height += 1
        self._dissenters.clear()
        # The sets change rarely: the hash in the block usually names one that is known, before this block is applied.
        known = {voters.hash: voters for voters in self.voters.values()}
        if self.height not in self.voters and block.next_voters in known:
            self.voters[self.height] = known[block.next_voters]
        self._compare()
        self._forget()

    def add_applied(self, applied: AppliedInput) -> None:
        if applied.height != self.applied + 1 or applied.height >= self.height:
            raise LocalProtocolError(f"height {applied.height} applied after {self.applied}, {self.height} is to be decided")
        self.applied, self._state_root = applied.height, applied.state_root
        self._learn(applied)

    def _learn(self, applied: AppliedInput) -> None:
        for height, voters in enumerate(applied.voters, applied.height):
            self.voters[height] = voters
        self._schedules.clear()
        self._compare()
        self._forget()

    def _compare(self) -> None:
        """What a decided block says about the state after its parent must be what this replica found."""
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
                self.divergence = f"height {height} was decided with {what} {theirs.hex()[:16]}, here it is {mine.hex()[:16]}"

    def _forget(self) -> None:
        needed = min(self.applied, self.height - 2)
        self._past = {height: past for height, past in self._past.items() if height >= needed}
        self.voters = {height: voters for height, voters in self.voters.items() if height >= needed}
        self._schedules = {height: made for height, made in self._schedules.items() if height >= needed}

    def commit_votes_of(self, voter: bytes) -> list[Signed]:
        """What this voter committed in the heights that are held, the latest first."""
        pasts = [self._past[height] for height in sorted(self._past, reverse=True)]
        certificates = [past.certificate for past in pasts if voter in past.certificate.signatures]
        return [Signed(certificate.vote, voter, certificate.signatures[voter]) for certificate in certificates]

    # Blocks ----------------------------------------------------------------------------------------------------------

    def build_block(self, body: bytes, proposer: bytes, now_ms: int) -> bytes:
        assert self.is_applied and len(body) <= BODY_BYTES_MAX, len(body)
        parent = self.parent
        time_ms = max(now_ms, parent.block.time_ms + 1) if parent else now_ms
        return encode_block(self._envelope(proposer, time_ms, parent.certificate if parent else None, body))

    def _envelope(self, proposer: bytes, time_ms: int, parent_certificate: Certificate | None, body: bytes) -> Block:
        """The one correct block with these four free parts."""
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
        """Why a fresh block must not be prepared; None: nothing is wrong. The parent must be applied.

        Its time is right if it is the first one after the parent's, if this clock allows it, or if it `is_vouched_for`: an
        honest voter has found it right.
        """
        assert self.is_applied
        try:
            block = decode_block(data)
            self._check_parent_certificate(block.parent_certificate, verifier)
        except RemoteProtocolError as error:
            return BlockRefusal(str(error))
        if block.state_root != self._state_root:
            self._dissenters.add(proposer)
            return BlockRefusal(
                f"it stands on state root {block.state_root.hex()[:16]}, here it is {self._state_root.hex()[:16]}"
            )
        if block != self._envelope(proposer, block.time_ms, block.parent_certificate, block.body):
            return BlockRefusal("the envelope is not the one that follows from the parent")
        first_ms = self.parent.block.time_ms + 1 if self.parent else 0
        if block.time_ms < first_ms:
            return BlockRefusal(f"time {block.time_ms} ms is not after its parent's")
        if block.time_ms > max(first_ms, now_ms + CLOCK_AHEAD_SECONDS * 1_000) and not is_vouched_for:
            reason = f"time {block.time_ms} ms is more than {CLOCK_AHEAD_SECONDS} s ahead of this clock"
            return BlockRefusal(reason, retry_at=block.time_ms / 1_000 - CLOCK_AHEAD_SECONDS)
        refusal = self._application.why_body_refused(block.height, block.body, proposer)
        return None if refusal is None else BlockRefusal(refusal)

    def _check_parent_certificate(self, certificate: Certificate | None, verifier: Verifier) -> None:
        parent = self.parent
        if (certificate is None) != (parent is None):
            raise RemoteProtocolError("bad-parent", "every block but the first carries its parent's certificate")
        if certificate is None or parent is None:
            return
        vote = verify_certificate(certificate, Commit, self.voters[self.height - 1], self._chain_id, verifier)
        if (vote.height, vote.block) != (self.height - 1, parent.digest):
            raise RemoteProtocolError("bad-parent", "the certificate is of another block")


def make_decided_block(data: bytes, certificate: Certificate, vote: Commit) -> DecidedBlock:
    assert block_digest(data) == vote.block
    return DecidedBlock(vote.height, vote.block, data, certificate)
