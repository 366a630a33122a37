"""Who leads which view: rotation over the voters, leaving out those that showed that they are not there.

Everything is a pure function of decided blocks, so that all honest voters, also after a restart, agree on every leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from consensus.block import FIRST_HEIGHT, Block
from consensus.voters import VoterSet


@dataclass(frozen=True, slots=True)
class Schedule:
    """The leaders of all views of one height."""

    height: int
    order: tuple[bytes, ...]

    def leader(self, view: int) -> bytes:
        return self.order[(self.height + view) % len(self.order)]


def schedule(height: int, voters: VoterSet, parent: Block | None, participants: frozenset[bytes] | None) -> Schedule:
    """The leaders of `height`, from the decided block before it (None for the first height) and the voters named in its body.

    At most n − q voters are left out: whoever remains is a quorum, so at least one honest voter is among them.
    """
    if parent is None:
        return Schedule(height, voters.keys)
    skipped: list[bytes] = []
    for key in [*_failed(height, voters, parent), *_absent(voters, parent, participants)]:
        if key not in skipped:
            skipped.append(key)
    left_out = frozenset(skipped[: len(voters) - voters.quorum])
    return Schedule(height, tuple(key for key in voters.keys if key not in left_out))


def _failed(height: int, voters: VoterSet, parent: Block) -> Iterable[bytes]:
    """The latest failures first."""
    current = [(-until, key) for key, until in parent.failed.items() if until > height and key in voters]
    return [key for _, key in sorted(current)]


def _absent(voters: VoterSet, parent: Block, participants: frozenset[bytes] | None) -> Iterable[bytes]:
    """Without a ballot in the last block, or without a commit for the one before it (a new voter until its first one)."""
    if participants is not None:
        yield from (key for key in voters.keys if key not in participants)
    if parent.parent_certificate is not None:
        yield from (key for key in voters.keys if key not in parent.parent_certificate.signatures)


def failed_leaders(height: int, voters: VoterSet, parent: Block, leaders: Schedule, view: int) -> Mapping[bytes, int]:
    """`Block.failed` of a block at `height` whose parent was decided in `view` under `leaders`."""
    assert parent.height == height - 1 == leaders.height and height > FIRST_HEIGHT
    failed = {key: until for key, until in parent.failed.items() if until > height and key in voters}
    for earlier in range(min(view, len(leaders.order))):
        key = leaders.leader(view - 1 - earlier)
        if key in voters and key != leaders.leader(view):
            failed[key] = parent.height + 2 * len(voters)
    return failed
