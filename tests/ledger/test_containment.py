"""A bug in a module: a step that fails at all peers has no effect, and everything else continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import pytest

from ledger.blocks.application import ROUND_DEFERRAL_SECONDS
from ledger.core.encoding_check import check_encodable
from ledger.core.genesis import Genesis, ModuleVersion
from ledger.core.module import BlockContext, DecodedTransaction, EmbeddedStatement, Module, Refused, StateChange, StateReader
from ledger.jobs import JobsModule
from ledger.ledger_state import BlockBody, core_modules
from ledger.members import MemberRekeyed, MembersModule, RenameMember
from ledger.network_governance import ModuleUpgrade, NetworkState
from ledger.tables import Table
from protocol import codec
from protocol.codec import Count, Length
from protocol.errors import LocalProtocolError, RemoteProtocolError, StorageError
from protocol.limits import UPGRADE_NOTICE_HEIGHTS
from tests.ledger.blocks import compute_transition
from tests.ledger.world import LANGUAGE, NEW, PEOPLE, PlainJobs, World, world_with_job

ALIKE = [
    KeyError(b"job"),
    ZeroDivisionError(),
    AssertionError("broken"),
    TypeError(),
    ValueError(),
    IndexError(),
    AttributeError(),
]
ALIKE += [UnboundLocalError(), NotImplementedError(), StopIteration(), RemoteProtocolError("malformed"), Refused("no")]
ALIKE += [LocalProtocolError("twice")]
OF_THIS_MACHINE = [OSError(28, "no space"), MemoryError(), RecursionError(), StorageError("damaged"), RuntimeError("no thread")]
OF_THIS_MACHINE += [ImportError(), KeyboardInterrupt(), SystemExit(1)]


@dataclass(frozen=True, slots=True)
class Tally:
    count: Count = 0
    steps: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Add:
    count: Count


class Planted(Module[Tally]):
    """A module that fails in one step, after it has changed its state in place."""

    name = "planted"
    contents: ClassVar[Mapping[str, type]] = {"planted/add": Add}
    state_type = Tally

    def __init__(self, step: str = "", error: BaseException | None = None) -> None:
        self.step, self.error = step, error

    def _fail_in(self, step: str, state: Tally | None = None) -> None:
        if step == self.step and self.error is not None:
            if state is not None:
                state.steps["half"] = state.steps.get("half", 0) + 1
            raise self.error

    def genesis_state(self, genesis: Genesis) -> Tally:
        return Tally(0, {"genesis": 1})

    def upgrade_state(self, old: Any, version: int) -> Tally:
        self._fail_in("upgraded", old)
        return replace(old, count=1_000)

    def embedded_statements(self, author: bytes, content: Any) -> tuple[EmbeddedStatement, ...]:
        self._fail_in("embedded_statements")
        return ()

    def awaited_job(self, content: Any) -> None:
        self._fail_in("can_wait")

    def apply_transaction(self, state: Tally, said: DecodedTransaction, view: StateReader, context: BlockContext) -> StateChange:
        self._fail_in("apply_transaction", state)
        return StateChange(replace(state, count=state.count + said.content.count))

    def follow_key_rotations(self, state: Tally, current: Callable[[bytes], bytes]) -> Tally:
        self._fail_in("follow_key_rotations", state)
        return replace(state, steps={**state.steps, "follow_key_rotations": 1})

    def settle_block(self, state: Tally, view: StateReader, context: BlockContext) -> StateChange:
        self._fail_in("settle_block", state)
        return StateChange(replace(state, steps={**state.steps, "settle_block": context.height}), (MemberRekeyed(b"", b""),))

    def end_block(self, state: Tally, view: StateReader, context: BlockContext) -> StateChange:
        self._fail_in("end_block", state)
        return StateChange(replace(state, steps={**state.steps, "end_block": context.height}))


class PlantedLater(Planted):
    version = 2


def _world(step: str, error: BaseException) -> World:
    return World(modules=(Planted(step, error),))


def _tally(world: World) -> Tally:
    return world.state.module_state(Tally)


@pytest.mark.parametrize("error", ALIKE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["settle_block", "end_block", "follow_key_rotations"])
def test_a_step_that_fails_does_not_act_and_the_rest_of_the_block_does(step: str, error: Exception) -> None:
    """Transactions act, also those of the failing module, and so do its other steps."""
    world = _world(step, error)
    add, rotation = world.tx(PEOPLE[0], "planted/add", Add(3)), world.rotation(PEOPLE[2], NEW)
    before = world.state
    body = BlockBody((), (), (add, rotation))
    transition = compute_transition(world.rules, before, 1, 2_000, before.state_root, body)
    (failure,) = transition.failures
    assert (failure.module, failure.step) == ("planted", step) and type(error).__name__ in failure.error
    tally = transition.state.module_state(Tally)
    acted = {"settle_block": 1, "end_block": 1, "follow_key_rotations": 1}
    assert tally == Tally(3, {"genesis": 1, **{name: count for name, count in acted.items() if name != step}})
    assert transition.state.members.current_key(PEOPLE[2].public) == NEW.public
    assert transition.state.height == 1
    again = compute_transition(world.rules, before, 1, 2_000, before.state_root, body)
    elsewhere = _world(step, error)
    other = compute_transition(elsewhere.rules, elsewhere.state, 1, 2_000, elsewhere.state.state_root, body)
    assert transition.state.state_root == again.state.state_root == other.state.state_root, "however often it is judged"


@dataclass(frozen=True, slots=True)
class Entry:
    text: Annotated[str, Length(0, 4)]


@dataclass(frozen=True, slots=True)
class Shelf:
    count: Count = 0
    parts: Annotated[dict[Annotated[str, Length(1, 4)], Entry], Length(0, 2)] = field(default_factory=dict)
    either: Entry | None = None
    names: Annotated[tuple[str, ...], Length(0, 4)] = ()
    rows: Table[Entry] = field(default_factory=lambda: Table(Entry))


@dataclass(frozen=True, slots=True)
class LongShelf:
    names: Annotated[tuple[str, ...], Length(0, 8)]


class Shelves(Module[Shelf]):
    """A module that returns a state given by a test."""

    name = "shelves"
    contents: ClassVar[Mapping[str, type]] = {}
    state_type = Shelf

    def __init__(self, step: str, **made: Any) -> None:
        self.step, self.made = step, made

    def genesis_state(self, genesis: Genesis) -> Shelf:
        return self._made("genesis", Shelf(parts={"a": Entry("")}))

    def upgrade_state(self, old: Shelf, version: int) -> Shelf:
        return self._made("upgraded", old)

    def _made(self, step: str, state: Shelf) -> Shelf:
        return replace(state, **self.made) if step == self.step else state

    def follow_key_rotations(self, state: Shelf, current: Callable[[bytes], bytes]) -> Shelf:
        return self._made("follow_key_rotations", state)

    def settle_block(self, state: Shelf, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(self._made("settle_block", state))

    def end_block(self, state: Shelf, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(self._made("end_block", state))


class ShelvesLater(Shelves):
    version = 2


UNENCODABLE: dict[str, Any] = {
    "a number below its bound": {"count": -1},
    "a number that no integer type has": {"count": 2**70},
    "a truth value for a number": {"count": True},
    "an object without an encoding": {"count": object()},
    "a set": {"parts": {"a": {1}}},
    "nothing where something belongs": {"count": None},
    "no dictionary": {"parts": ()},
    "a text that is too long in a record": {"parts": {"a": Entry("12345")}},
    "a text that is too long in a new record": {"parts": {"b": Entry("12345")}},
    "a text that no encoding has": {"parts": {"a": Entry("\ud800")}},
    "nothing for a new entry": {"parts": {"a": Entry(""), "b": None}},
    "a key of another type": {"parts": {b"a": Entry("")}},
    "a key that is too long": {"parts": {"abcde": Entry("")}},
    "too many entries": {"parts": {name: Entry("") for name in "abc"}},
    "an optional record with a wrong field": {"either": Entry(b"")},  # type: ignore[arg-type]
    "a list for a tuple": {"names": ["a"]},
    "a row with a wrong field": {"rows": Table(Entry).with_rows({b"key": Entry("12345")})},
    "a row of another type": {"rows": Table(Entry).with_rows({b"key": 5})},  # type: ignore[arg-type]
    "a table of another type": {"rows": Table(bool)},
    "no table": {"rows": {}},
}


@pytest.mark.parametrize("made", UNENCODABLE.values(), ids=UNENCODABLE)
@pytest.mark.parametrize("step", ["settle_block", "end_block", "follow_key_rotations"])
def test_a_step_whose_state_has_no_encoding_does_not_act(step: str, made: dict[str, Any]) -> None:
    world = World(modules=(Shelves(step, **made),))
    before = world.state
    body = BlockBody((), (), (world.rotation(PEOPLE[2], NEW),))
    transition = compute_transition(world.rules, before, 1, 2_000, before.state_root, body)
    assert [(failure.module, failure.step) for failure in transition.failures] == [("shelves", step)]
    assert transition.state.module_state(Shelf) == before.module_state(Shelf)
    assert world.rules.decode_state(world.rules.encode_state(transition.state)).state_root == transition.state.state_root


def test_a_step_whose_state_has_an_encoding_acts() -> None:
    made = {"count": 1, "parts": {"a": Entry("1234"), "b": Entry("")}, "rows": Table(Entry).with_rows({b"key": Entry("row")})}
    world = World(modules=(Shelves("settle_block", **made),))
    world.decide()
    assert world.state.module_state(Shelf).count == 1 and not world.rules.transaction_failures
    assert world.state.module_state(Shelf).rows.get_record(b"key") == Entry("row")


def test_blocks_go_on_with_a_step_that_always_fails() -> None:
    world = _world("settle_block", KeyError(b"gone"))
    for height in range(1, 6):
        world.decide(world.tx(PEOPLE[0], "member/rename", RenameMember(f"name {height}")))
    assert world.state.height == 5 and world.state.members.members[PEOPLE[0].public].name == "name 5"
    assert _tally(world) == Tally(0, {"genesis": 1, "end_block": 5})


@pytest.mark.parametrize("error", OF_THIS_MACHINE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["settle_block", "end_block", "follow_key_rotations", "apply_transaction"])
def test_what_only_this_machine_meets_ends_the_peer(step: str, error: BaseException) -> None:
    """Other peers apply the step, so this peer must not continue without it."""
    world = _world(step, error)
    with pytest.raises(type(error)):
        world.decide(world.tx(PEOPLE[0], "planted/add", Add(3)), world.rotation(PEOPLE[2], NEW))


def test_a_bug_that_a_fault_of_this_machine_leads_to_ends_the_peer() -> None:
    error = KeyError("rows")
    error.__context__ = StorageError("a damaged page")
    with pytest.raises(KeyError):
        _world("settle_block", error).decide()


@pytest.mark.parametrize("step", ["apply_transaction", "embedded_statements"])
def test_a_transaction_that_makes_its_module_fail_is_refused(step: str) -> None:
    world = _world(step, KeyError(b"gone"))
    world.decide()
    add = world.tx(PEOPLE[0], "planted/add", Add(3))
    tally, root = codec.encode(_tally(world)), world.state.state_root
    with pytest.raises(Refused, match="planted/add of the module planted failed: KeyError"):
        world.rules.apply_transaction(world.state, add)
    assert "failed" in (world.problem(add) or ""), "nor is a block with it decided"
    assert [failure.module for failure in world.rules.transaction_failures] == ["planted"] * 2
    assert world.ledger.mempool.add_transaction(add)
    assert world.ledger.mempool.select_transactions(world.rules, world.state) == ()
    assert codec.encode(_tally(world)) == tally and world.state.state_root == root, "what it has changed is undone"
    world.decide(world.tx(PEOPLE[1], "member/rename", RenameMember("works")))
    assert world.state.height == 2


def test_a_transaction_that_cannot_say_whether_it_waits_is_refused_where_it_fails() -> None:
    world = _world("can_wait", KeyError(b"gone"))
    assert world.ledger.mempool.add_transaction(world.tx(PEOPLE[0], "planted/add", Add(3)))
    assert world.ledger.make_body(1, 0) is not None


def _upgraded(*modules: Module[Any], founded: bool = True) -> World:
    """Return a network after an upgrade to the last version. If `founded`, it began with version 1 of the module."""
    name, version = modules[-1].name, modules[-1].version
    world = World()
    first = *world.genesis.modules, *[ModuleVersion(name, 1)] * founded
    world.start_chain(replace(world.genesis, modules=first), (*core_modules(PlainJobs()), *modules))
    at = world.state.height + UPGRADE_NOTICE_HEIGHTS + 5
    for person in PEOPLE[:3]:
        world.decide(world.tx(person, "network/upgrade", ModuleUpgrade(name, version, at)))
    while world.state.height < at + 1:
        world.decide()
    return world


def test_an_upgrade_that_fails_is_over_and_the_version_of_before_goes_on() -> None:
    world = _upgraded(Planted(), PlantedLater("upgraded", ValueError("old")))
    height = world.state.height
    assert _tally(world) == Tally(0, {"genesis": 1, "settle_block": height, "end_block": height})
    assert [failure.step for failure in world.rules.transaction_failures] == ["the upgrade to version 2"]


@pytest.mark.parametrize("made", UNENCODABLE.values(), ids=UNENCODABLE)
def test_an_upgrade_whose_state_has_no_encoding_is_over(made: dict[str, Any]) -> None:
    world = _upgraded(Shelves(""), ShelvesLater("upgraded", **made))
    assert [failure.step for failure in world.rules.transaction_failures] == ["the upgrade to version 2"]
    assert world.state.module_state(NetworkState).module_version("shelves") == 1 and world.state.module_state(Shelf).parts == {
        "a": Entry("")
    }
    assert world.read_back().state_root == world.state.state_root


@pytest.mark.parametrize("made", UNENCODABLE.values(), ids=UNENCODABLE)
def test_a_module_that_begins_with_a_state_without_an_encoding_does_not_begin(made: dict[str, Any]) -> None:
    world = _upgraded(Shelves("genesis", **made), founded=False)
    assert [failure.step for failure in world.rules.transaction_failures] == ["the upgrade to version 1"]
    assert "shelves" not in world.state.modules
    assert world.read_back().state_root == world.state.state_root


def test_a_part_of_a_state_of_another_type_is_checked_anew() -> None:
    """The earlier version had weaker bounds."""
    check_encodable(Shelf, Shelf(names=("a",) * 4), LongShelf(names=("a",) * 4))
    names = ("a",) * 5
    with pytest.raises(RemoteProtocolError):
        check_encodable(Shelf, Shelf(names=names), LongShelf(names=names))


def test_an_upgrade_whose_state_has_an_encoding_acts() -> None:
    made: dict[str, Any] = {"count": 1, "either": Entry("1"), "rows": Table(Entry).with_rows({b"key": Entry("row")})}
    for world in (_upgraded(Shelves(""), ShelvesLater("upgraded", **made)), _upgraded(Shelves("genesis", **made), founded=False)):
        shelf = world.state.module_state(Shelf)
        assert not world.rules.transaction_failures and shelf.rows.get_record(b"key") == Entry("row")
        assert (shelf.count, shelf.either, shelf.parts) == (1, Entry("1"), {"a": Entry("")})


# Core modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["settle_block", "end_block"])
def test_where_jobs_fail_the_round_stays_open_for_everybody_and_is_not_closed_in_every_block(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    world, key = world_with_job()
    closing = world.closing(key)
    real: Callable[..., StateChange] = getattr(JobsModule, step)

    def fails(self: Any, state: Any, view: StateReader, context: BlockContext) -> StateChange:
        if any(type(fact).__name__ == "ClosedRound" for fact in context.facts):
            raise KeyError(b"trainer")
        return real(self, state, view, context)

    monkeypatch.setattr(JobsModule, step, fails)
    before = world.state
    transition = compute_transition(
        world.rules, before, before.height + 1, 5_000, before.state_root, BlockBody((closing,), (), ())
    )
    assert [(failure.module, failure.step) for failure in transition.failures] == [("jobs", step)]
    assert transition.closed_rounds == () and transition.state.jobs.jobs[key].round == 0
    assert transition.state.jobs.jobs[key].model_root == before.jobs.jobs[key].model_root
    assert world.ledger.has_work()
    world.ledger.advance_state(transition.finish_state({}), before.state_root)
    world.ledger.defer_rounds([closing], now=5.0)
    world.follow()
    assert not world.ledger._closings(1 << 20)[0] and not world.ledger.has_work()
    monkeypatch.undo()
    assert world.ledger.resume_deferred_rounds(5.0) == world.ledger.resume_deferred_rounds(64.9) == 5.0 + ROUND_DEFERRAL_SECONDS
    assert not world.ledger.has_work()
    assert world.ledger.resume_deferred_rounds(65.0) is None and world.ledger.has_work()
    assert [of.round for of in world.ledger._closings(1 << 20)[0]] == [0]


def test_where_members_fail_the_voters_are_those_that_consensus_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, state: Any, view: StateReader, context: BlockContext) -> StateChange:
        raise ZeroDivisionError

    world = World()
    world.decide(world.rotation(PEOPLE[3], NEW))
    before = world.state.members
    assert before.upcoming != before.voters
    monkeypatch.setattr(MembersModule, "settle_block", fails)
    world.decide()
    after = world.state.members
    assert (after.previous, after.voters, after.upcoming) == (before.voters, before.upcoming, before.upcoming)


def test_a_body_that_makes_a_check_fail_is_refused_and_ends_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    world, key = world_with_job(spec=LANGUAGE)
    closing = world.closing(key)
    monkeypatch.setattr("ledger.ledger_state.why_round_certificate_invalid", lambda *about: {}["missing"])
    assert "failed: KeyError" in (world.problem(closings=(closing,)) or "")
    assert codec.encode(BlockBody((), (), ()))
