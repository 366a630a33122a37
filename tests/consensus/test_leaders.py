"""The turns of leaders: a voter loses its turn only by a failed view, for any evidence that liars show."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Collection, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consensus.block import Block
from consensus.pbft.chain import LeaderSchedule, make_leader_schedule, update_failed_leaders
from consensus.voter_set import VoterSet
from protocol.messages import Certificate


def voter_set(n: int) -> VoterSet:
    return VoterSet.from_keys(i.to_bytes(32, "big") for i in range(n))


def block(height: int, failed: dict[bytes, int] | None = None, signers: Iterable[bytes] = ()) -> Block:
    certificate = Certificate(b"vote", dict.fromkeys(sorted(signers), bytes(64)))
    return Block(height, bytes(32), height, bytes(32), bytes(32), bytes(32), bytes(32), certificate, failed or {}, b"body")


def test_leaders_rotate_over_heights_and_views() -> None:
    voters = voter_set(4)
    assert [make_leader_schedule(height, voters, block(height - 1)).leader_of_view(0) for height in range(4, 8)] == list(
        voters.keys
    )
    assert [make_leader_schedule(8, voters, block(7)).leader_of_view(view) for view in range(4)] == list(voters.keys)


def test_who_is_not_among_the_commits_that_a_block_shows_keeps_its_turn() -> None:
    voters = voter_set(7)
    for hidden in voters.keys:
        parent = block(9, signers=[key for key in voters.keys if key != hidden])
        assert make_leader_schedule(10, voters, parent) == make_leader_schedule(10, voters, block(9, signers=voters.keys))


def test_the_latest_failures_are_left_out_and_n_minus_q_at_most() -> None:
    voters = voter_set(7)  # q = 5
    parent = block(9, failed={voters.keys[1]: 20, voters.keys[3]: 12, voters.keys[6]: 30})
    assert set(voters.keys) - set(make_leader_schedule(10, voters, parent).eligible) == {voters.keys[1], voters.keys[6]}


@given(st.integers(1, 40), st.integers(0, 500), st.data())
def test_in_n_views_everybody_who_is_not_left_out_leads_and_a_quorum_is_not(n: int, start: int, data: st.DataObject) -> None:
    voters = voter_set(n)
    failed = data.draw(st.dictionaries(st.sampled_from(voters.keys), st.integers(1, 99)))
    made = make_leader_schedule(10, voters, block(9, failed))
    assert len(made.eligible) >= voters.quorum
    assert {made.leader_of_view(view) for view in range(start, start + n)} == set(made.eligible)


def test_who_is_left_out_moves_nobody_elses_turn_and_its_own_go_round() -> None:
    voters = voter_set(10)
    gone = set(voters.keys[3:6])
    heirs: Counter[bytes] = Counter()
    for height in range(10, 10 + 7 * 10):
        turn = voters.keys[height % 10]
        leader = make_leader_schedule(height, voters, block(height - 1, dict.fromkeys(gone, 10_000))).leader_of_view(0)
        if turn in gone:
            heirs[leader] += 1
        else:
            assert leader == turn
    assert set(heirs.values()) == {3} and len(heirs) == 7, "in seven laps each of seven has three turns of the three"


@given(st.integers(1, 200), st.integers(0, 500))
def test_the_leader_that_succeeded_is_never_named_as_failed(n: int, view: int) -> None:
    voters = voter_set(n)
    leaders = make_leader_schedule(9, voters, None)
    failed = update_failed_leaders(10, voters, block(9), leaders, view, voters.keys)
    assert leaders.leader_of_view(view) not in failed and len(failed) == min(view, n - 1)
    assert all(until == 9 + 2 * n for until in failed.values())


def dropped(height: int, until: int, signers: Collection[bytes], voters: VoterSet) -> bool:
    parent = block(height - 1, {voter_set(4).keys[1]: until})
    return not update_failed_leaders(height, voters, parent, make_leader_schedule(height - 1, voters, None), 0, signers)


def test_a_failure_is_forgotten_when_its_time_is_over_and_its_leader_is_seen_again() -> None:
    voters = voter_set(4)
    others = [key for key in voters.keys if key != voters.keys[1]]
    assert not dropped(10, 11, voters.keys, voters)
    assert not dropped(11, 11, others, voters) and not dropped(1_000, 11, others, voters), "a dead voter costs one view, once"
    assert dropped(11, 11, voters.keys, voters)
    assert dropped(5, 11, others, VoterSet.from_keys(others)), "it does not vote any more"


# Liars ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class History:
    """A history of decided heights. At random, liars are silent, and sign and show only some commits. Honest voters do not."""

    n: int
    seed: int

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.n} {self.seed}")
        self.voters = voter_set(self.n)
        self.liars = set(self.random.sample(self.voters.keys, self.voters.faults_tolerated))
        self.parent: Block | None = None
        self.leaders = make_leader_schedule(1, self.voters, None)
        self.view = 0  # in which the parent was decided
        self.committed: set[bytes] = set()  # to the parent

    def honest(self, keys: Iterable[bytes]) -> set[bytes]:
        return set(keys) - self.liars

    def decide(self, gone: Collection[bytes] = ()) -> tuple[LeaderSchedule, Block, int]:
        """Decide the next height without the absent voters. Return its leader schedule, its block, and its view."""
        height = self.leaders.height if self.parent is None else self.parent.height + 1
        leaders = make_leader_schedule(height, self.voters, self.parent)
        view = 0
        while (leader := leaders.leader_of_view(view)) in gone or (leader in self.liars and self.random.random() < 0.3):
            view += 1
        made = block(height)
        if self.parent is not None:
            shown = self.shown(leader)
            failed = update_failed_leaders(height, self.voters, self.parent, self.leaders, self.view, shown)
            made = block(height, dict(failed), shown)
        made = dataclasses.replace(made, proposer=leader)
        self.parent, self.leaders, self.view = made, leaders, view
        self.committed = self.honest(self.voters.keys) - set(gone)
        self.committed |= {liar for liar in self.liars if self.random.random() < 0.5}
        return leaders, made, view

    def shown(self, leader: bytes) -> set[bytes]:
        if leader not in self.liars:
            return self.committed
        most = self.random.sample(sorted(self.committed | self.liars), len(self.committed | self.liars))
        return set(most[: self.random.randint(self.voters.quorum, len(most))])


@pytest.mark.parametrize("n", [4, 7, 10])
@given(st.integers(0, 2**32))
def test_liars_lead_no_more_than_their_own_turns(n: int, seed: int) -> None:
    history = History(n, seed)
    led = 0
    for height in range(1, 20 * n + 1):
        _, made, _ = history.decide()
        turn = history.voters.keys[height % n]
        assert turn in history.liars or made.proposer == turn
        assert history.honest(made.failed) == set()
        led += made.proposer in history.liars
    assert led <= 20 * len(history.liars)


@pytest.mark.parametrize("n", [4, 7, 10])
@given(st.integers(0, 2**32))
def test_beside_their_own_turns_liars_lead_only_those_of_voters_whose_views_really_failed(n: int, seed: int) -> None:
    """Honest voters are offline for a while. After its return and an honest block that can show it, a voter keeps its turns."""
    history = History(n, seed)
    out: dict[bytes, int] = {}  # honest voters whose views failed -> the height whose block may take them back
    gone: set[bytes] = set()
    for height in range(1, 20 * n + 1):
        if height % (3 * n) == 0:
            honest = sorted(history.honest(history.voters.keys))
            gone = set(history.random.sample(honest, history.random.randint(0, n - history.voters.quorum)))
        back = {key for key, until in out.items() if until <= height and key in history.committed}
        leaders, made, view = history.decide(gone)
        turn = history.voters.keys[height % n]
        assert made.proposer == turn or turn in history.liars | gone | out.keys(), f"{turn.hex()} lost its turn at {height}"
        assert history.honest(made.failed) <= out.keys()
        if made.proposer not in history.liars:
            assert not back & made.failed.keys()
            out = {key: until for key, until in out.items() if key not in back}
        out |= dict.fromkeys(history.honest(leaders.leader_of_view(lost) for lost in range(view)), height + 2 * n)
