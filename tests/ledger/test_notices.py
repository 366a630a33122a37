"""Inclusion lists: a block must include the transactions that f+1 voters have waited for, unless they cannot be applied."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.blocks import application as ledger_module
from ledger.blocks import mempool as pool_module
from ledger.blocks.application import LedgerApplication
from ledger.blocks.mempool import INCLUSION_LIST_HEIGHTS_MAX, InclusionListSet, transaction_digest
from ledger.core.genesis import TRAINER
from ledger.jobs import StartJob
from ledger.ledger_state import EMPTY_BODY, BlockBody, CurrentState, decode_body
from ledger.members import RegisterRoles
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.limits import INCLUSION_LIST_MAX
from protocol.messages import InclusionList
from tests.ledger.world import LANGUAGE, PEOPLE, SCRATCH, World
from tests.sim.keys import FastSigner


@pytest.fixture
def world() -> World:
    return World()


def register(world: World, person: FastSigner, ahead: int = 1, roles: tuple[str, ...] = ()) -> Signed:
    return world.tx(person, "member/register", RegisterRoles(roles), ahead, expires=200)


def notice(world: World, *persons: FastSigner, of: tuple[Signed, ...], height: int | None = None, empty_after: int = 0) -> None:
    """Add inclusion lists of these voters with these transactions, then decide `empty_after` empty blocks."""
    digests = tuple(sorted(transaction_digest(signed) for signed in of))
    for person in persons:
        assert world.ledger.add_inclusion_list(
            person.public, InclusionList(world.state.height if height is None else height, digests)
        )
    world.decide_empty(empty_after)


def refusal(world: World, *transactions: Signed) -> str | None:
    """Return why a block with just these transactions is refused, or None. Without transactions the block is empty."""
    return world.ledger.why_body_refused(world.state.height + 1, codec.encode(BlockBody((), (), transactions)), b"")


def waiting(world: World, person: FastSigner = PEOPLE[0]) -> Signed:
    """Return a transaction that the next block must include if f+1 voters list it."""
    signed = register(world, person)
    assert world.ledger.mempool.add_transaction(signed)
    return signed


# Lists of a voter -----------------------------------------------------------------------------------------------------


def test_a_voter_names_what_was_here_before_the_last_block_could_be_made(world: World) -> None:
    me, early = PEOPLE[1].public, waiting(world)
    assert world.ledger.make_inclusion_list(me) is None
    world.decide()
    late = register(world, PEOPLE[2])
    world.ledger.mempool.add_transaction(late)
    assert world.ledger.make_inclusion_list(me) is None, "block 1 was made without knowing of it, perhaps"
    world.decide()
    assert world.ledger.make_inclusion_list(me) == InclusionList(2, (transaction_digest(early),))
    world.decide()
    assert world.ledger.make_inclusion_list(me) == InclusionList(3, tuple(sorted(map(transaction_digest, (early, late)))))
    world.decide(early, late)
    assert world.ledger.make_inclusion_list(me) is None


def test_nobody_names_what_could_not_be_decided_now(world: World) -> None:
    for item in (register(world, PEOPLE[0], ahead=2), world.tx(PEOPLE[1], "job/start", StartJob(b"nonsense"))):
        world.ledger.mempool.add_transaction(item)
    world.decide_empty(4)
    assert world.ledger.make_inclusion_list(PEOPLE[1].public) is None


@pytest.fixture
def signed(world: World) -> Signed:
    return waiting(world)


def test_only_voters_speak_and_are_heard(signed: Signed, world: World) -> None:
    world.decide_empty(3)
    assert world.ledger.make_inclusion_list(PEOPLE[6].public) is None
    assert not world.ledger.add_inclusion_list(PEOPLE[6].public, InclusionList(3, (transaction_digest(signed),)))
    assert world.ledger.make_inclusion_list(PEOPLE[3].public) is not None
    world.decide(evidence=(world.double(PEOPLE[3]),))
    assert PEOPLE[3].public in world.state.members.voters and world.ledger.make_inclusion_list(PEOPLE[3].public) is None
    assert not world.ledger.add_inclusion_list(PEOPLE[3].public, InclusionList(4, (transaction_digest(signed),)))


def test_a_notice_names_the_oldest_few_and_ascends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "INCLUSION_LIST_MAX", 2)
    old = [waiting(world, person) for person in PEOPLE[:2]]
    world.decide()
    waiting(world, PEOPLE[2])
    world.decide_empty(2)
    said = world.ledger.make_inclusion_list(PEOPLE[1].public)
    assert said is not None and said.transactions == tuple(sorted(map(transaction_digest, old))) and INCLUSION_LIST_MAX == 64
    assert codec.decode_message(codec.encode(said), (InclusionList,)) == said
    with pytest.raises(RemoteProtocolError, match="ascend"):
        world.ledger.add_inclusion_list(PEOPLE[1].public, InclusionList(9, tuple(reversed(said.transactions))))


# Required transactions of a block -------------------------------------------------------------------------------------


def test_f_plus_1_notices_force_a_transaction_in_and_f_do_not(signed: Signed, world: World) -> None:
    notice(world, PEOPLE[1], of=(signed,), empty_after=2)
    assert refusal(world) is None, "one voter of four may lie"
    notice(world, PEOPLE[2], of=(signed,), height=1)
    assert "inclusion lists require" in (refusal(world) or "")
    assert refusal(world, signed) is None


def test_notices_act_two_heights_later_so_that_they_and_the_transaction_can_reach_the_leader(
    signed: Signed, world: World
) -> None:
    world.decide()
    notice(world, *PEOPLE[1:3], of=(signed,))
    assert refusal(world) is None, "block 2 may have been made before notices of 1 came"
    world.decide()
    assert "inclusion lists require" in (refusal(world) or ""), "block 3"


def test_a_transaction_counts_from_the_first_of_the_notices_that_name_it_without_a_break(world: World) -> None:
    signed, other = waiting(world), waiting(world, PEOPLE[3])
    for named in ((signed,), (signed, other), (signed,), (signed, other)):
        world.decide()
        notice(world, *PEOPLE[1:3], of=named)
    assert world.ledger.inclusion_lists.transactions_due(world.state.members.voters, 5) == {transaction_digest(signed)}


def test_what_is_not_here_or_cannot_be_decided_vetoes_nothing(world: World) -> None:
    unknown, hopeless = register(world, PEOPLE[0]), register(world, PEOPLE[1], ahead=3)
    world.ledger.mempool.add_transaction(hopeless)
    notice(world, *PEOPLE[:4], of=(unknown, hopeless), empty_after=2)
    assert refusal(world) is None


def test_of_two_transactions_with_one_nonce_either_will_do(world: World) -> None:
    """Otherwise two halves of the voters, each of which waits for another one, would refuse every block for ever."""
    left, right = register(world, PEOPLE[0]), register(world, PEOPLE[0], roles=("trainer",))
    for signed in (left, right):
        world.ledger.mempool.add_transaction(signed)
    notice(world, *PEOPLE[1:4], of=(left, right), empty_after=2)
    assert refusal(world) is not None and refusal(world, left) is None and refusal(world, right) is None


def test_a_full_block_is_excused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, others = waiting(world), [register(world, PEOPLE[3], ahead=i) for i in (1, 2)]
    notice(world, *PEOPLE[1:3], of=(signed,), empty_after=2)
    assert refusal(world, *others) is not None
    size = sum(len(other.body) + pool_module.SIGNED_BYTES for other in (*others, signed))
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "TRANSACTIONS_BYTES_MAX", size)
        assert refusal(world, *others) is not None
        patch.setattr(ledger_module, "TRANSACTIONS_BYTES_MAX", size - 1)
        assert refusal(world, *others) is None
    monkeypatch.setattr(ledger_module, "TRANSACTIONS_PER_BLOCK_MAX", 2)
    assert refusal(world, *others) is None and refusal(world, others[0]) is not None


def test_whoever_leads_puts_what_is_due_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for ahead in (1, 2, 3):
        world.ledger.mempool.add_transaction(register(world, PEOPLE[3], ahead))
    world.decide(register(world, PEOPLE[0]))
    signed = waiting(world)  # its nonce is higher
    notice(world, *PEOPLE[1:3], of=(signed,), empty_after=2)
    body = world.ledger.make_body(world.state.height + 1, 0)
    assert body is not None and decode_body(body).transactions[0] == signed


def test_what_evidence_of_the_same_block_makes_void_may_be_left_out(world: World) -> None:
    notice(world, *PEOPLE[1:3], of=(waiting(world, PEOPLE[3]),), empty_after=2)
    body = codec.encode(BlockBody((), (world.double(PEOPLE[3]),), ()))
    assert refusal(world) is not None and world.ledger.why_body_refused(world.state.height + 1, body, b"") is None


def test_what_is_due_and_applies_only_behind_the_others_is_not_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queued job can start when another transaction of the block has registered a third trainer."""
    monkeypatch.setattr(pool_module, "SELECTION_PASSES_MAX", 1)
    world.decide(register(world, PEOPLE[0]))
    start = world.tx(PEOPLE[3], "job/start", StartJob(LANGUAGE), expires=200)
    world.ledger.mempool.add_transaction(start)
    notice(world, *PEOPLE[1:3], of=(start,), empty_after=2)
    for ahead in range(1, 6):
        world.ledger.mempool.add_transaction(register(world, PEOPLE[0], ahead))
    world.ledger.mempool.add_transaction(register(world, PEOPLE[0], 6, (TRAINER,)))
    body = world.ledger.make_body(world.state.height + 1, 0)
    assert body is not None and decode_body(body).transactions[-1] == start
    assert world.ledger.why_body_refused(world.state.height + 1, body, b"") is None
    assert "inclusion lists require" in (refusal(world, *decode_body(body).transactions[:-1]) or "")


def test_notices_are_forgotten_when_they_are_not_repeated_or_their_voter_is_none_any_more(signed: Signed, world: World) -> None:
    notice(world, *PEOPLE[1:3], of=(signed,), empty_after=INCLUSION_LIST_HEIGHTS_MAX)
    assert refusal(world) is not None
    world.decide()
    assert refusal(world) is None
    notice(world, PEOPLE[2], PEOPLE[3], of=(signed,), height=world.state.height - 2)
    assert refusal(world) is not None
    world.decide(evidence=(world.double(PEOPLE[3]),))
    assert refusal(world) is None


def test_only_a_later_notice_of_a_voter_replaces_its_last_one() -> None:
    notices, digest = InclusionListSet(), bytes(32)
    assert notices.add_list(b"voter", InclusionList(5, (digest,)))
    assert not notices.add_list(b"voter", InclusionList(5, (b"x" * 32,))) and not notices.add_list(
        b"voter", InclusionList(4, (digest,))
    )
    assert notices.transactions_due((b"voter",), 7) == {digest} and notices.transactions_due((b"voter",), 6) == set()


actions = st.lists(
    st.tuples(st.sampled_from(["register", "conflict", "start", "accuse", "block", "empty"]), st.integers(0, 3)), max_size=25
)


@given(actions)
@settings(max_examples=60)
def test_an_honest_leader_with_the_same_notices_is_never_refused(script: list[tuple[str, int]]) -> None:
    world = World()
    for action, number in script:
        act(world, action, number)
        body = world.ledger.make_body(world.state.height + 1, 0)
        assert world.ledger.has_work() == (body is not None)
        for peer in (world.ledger, LedgerApplication(world.rules, CurrentState(world.state), world.ledger.certified_root)):
            assert body is None or peer.why_body_refused(world.state.height + 1, body, b"") is None


def act(world: World, action: str, number: int) -> None:
    person, ledger = PEOPLE[number], world.ledger
    match action:
        case "register":
            ledger.mempool.add_transaction(register(world, person, ahead=1 + number % 2))
        case "conflict":
            ledger.mempool.add_transaction(register(world, person, roles=("trainer",)))
        case "start":
            ledger.mempool.add_transaction(world.tx(person, "job/start", StartJob(SCRATCH), expires=200))
        case "accuse" if number == 3:
            ledger.add_evidence(world.double(person))
        case "block" | "empty":
            body = ledger.make_body(world.state.height + 1, 0) if action == "block" else EMPTY_BODY
            if body is None:
                return
            world.decide_body(body)
            ledger.mempool.prune_transactions(world.rules, world.state)
            for voter in world.state.members.voters:
                said = ledger.make_inclusion_list(voter)
                if said is not None:
                    ledger.add_inclusion_list(voter, said)
