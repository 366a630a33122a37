"""The leader of each view. Each voter has its turns. A voter whose view failed has none until it is seen again.

Everything is a pure function of decided blocks, so that all honest voters, also after a restart, agree on every leader. A
proposer takes no turn from anybody by what it may choose, such as the ballots and commits that it shows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from consensus.block import FIRST_HEIGHT, Block
from consensus.voter_set import VoterSet


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
