"""A network upgrades the versions of its modules, and a program without a version stops before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ledger.core.genesis import Genesis, ModuleVersion
from ledger.core.module import BlockContext, DecodedTransaction, Module, StateChange, StateReader
from ledger.jobs import JobsModule, JobTerms, StartJob
from ledger.ledger_state import (
    BlockBody,
    LedgerRules,
    LedgerState,
    UnsupportedModuleVersion,
    core_modules,
    newest_module_versions,
)
from ledger.network_governance import ModuleUpgrade, NetworkState
from protocol import codec
from protocol.codec import Count
from protocol.identity import Signed
from protocol.limits import UPGRADE_AHEAD_HEIGHTS_MAX, UPGRADE_NOTICE_HEIGHTS
from tests.ledger.world import LANGUAGE, PEOPLE, SCRATCH, PlainJobs, World
from tests.sim.keys import FastVerifier
from training.job_spec import BF16_TOLERANCE, PRESETS, AuditMode, JobSpec, Precision, complete_fields
from training.model_store import JobModelStore
from training.transformer import ModelSpec, complete_model_fields

NOTICE, AHEAD = UPGRADE_NOTICE_HEIGHTS, UPGRADE_AHEAD_HEIGHTS_MAX


@dataclass(frozen=True, slots=True)
class Add:
    amount: Count


@dataclass(frozen=True, slots=True)
class Tally:
    total: Count = 0


@dataclass(frozen=True, slots=True)
class NamedTally:
    total: Count
    name: str


class TallyModule(Module[Tally]):
    name = "tally"
    contents: ClassVar[Mapping[str, type]] = {"tally/add": Add}
    state_type = Tally

    def genesis_state(self, genesis: Genesis) -> Tally:
        return Tally()

    def apply_transaction(self, state: Tally, said: DecodedTransaction, view: StateReader, context: BlockContext) -> StateChange:
        return StateChange(Tally(state.total + said.content.amount))


class NamedTallyModule(Module[NamedTally]):
    name = "tally"
    version = 2
    contents: ClassVar[Mapping[str, type]] = {"tally/add": Add}
    state_type = NamedTally

    def genesis_state(self, genesis: Genesis) -> NamedTally:
        return NamedTally(0, genesis.network)

    def upgrade_state(self, old: Tally, version: int) -> NamedTally:
        assert version == 1
        return NamedTally(old.total, f"after version {version}")

    def apply_transaction(
        self, state: NamedTally, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        return StateChange(replace(state, total=state.total + 10 * said.content.amount))


CORE = core_modules(PlainJobs())
OLD, NEW = (*CORE, TallyModule()), (*CORE, TallyModule(), NamedTallyModule())


class Upgrading(World):
    """A world whose genesis names the modules `first`, and whose program knows `modules`."""

    def __init__(self, first: tuple[Module[Any], ...] = OLD, modules: tuple[Module[Any], ...] = NEW) -> None:
        super().__init__()
        self.start_chain(replace(self.genesis, modules=newest_module_versions(first)), modules)

    def wish(self, number: int, height: int, module: str = "tally", version: int = 2) -> Signed:
        return self.tx(PEOPLE[number], "network/upgrade", ModuleUpgrade(module, version, height))

    def add(self, amount: int) -> None:
        self.decide(self.tx(PEOPLE[0], "tally/add", Add(amount)))

    def until(self, height: int) -> LedgerState:
        while self.state.height < height:
            self.decide()
        return self.state

    @property
    def network(self) -> NetworkState:
        return self.state.module_state(NetworkState)

    def refusal(self, signed: Signed) -> str | None:
        return self.rules.why_body_refused(self.state, codec.encode(BlockBody((), (), (signed,))))


def upgraded(world: Upgrading, height: int, module: str = "tally") -> None:
    world.decide(*(world.wish(number, height, module) for number in range(3)))


@pytest.fixture
def world() -> Upgrading:
    return Upgrading()


def test_a_quorum_s_wish_acts_at_the_height_that_it_names(world: Upgrading) -> None:
    world.add(3)
    world.decide(world.wish(0, 20))
    world.decide(world.wish(1, 20))
    assert world.network.due_upgrades == () and len(world.network.upgrade_votes) == 2, "two of four are no quorum"
    world.decide(world.wish(2, 20))
    assert world.network.due_upgrades == (ModuleUpgrade("tally", 2, 20),) and not world.network.upgrade_votes
    assert world.until(19).modules["tally"] == Tally(3) and world.network.module_version("tally") == 1
    world.add(2)
    assert world.state.modules["tally"] == NamedTally(23, "after version 1"), "the block of that height is the new version's"
    assert world.network.module_version("tally") == 2 and world.network.due_upgrades == ()


def test_a_transaction_is_judged_by_the_version_of_the_block_that_could_carry_it(world: Upgrading) -> None:
    upgraded(world, 15)
    world.until(14)
    after = world.rules.apply_transaction(world.state, world.tx(PEOPLE[0], "tally/add", Add(1)))
    assert after.modules["tally"] == NamedTally(10, "after version 1")
    world.decide()
    assert world.state.modules["tally"] == NamedTally(0, "after version 1"), "an empty block is enough"


def test_a_module_joins_and_acts_after_all_others() -> None:
    world = Upgrading(first=CORE)
    assert "tally" not in world.state.modules and (world.refusal(world.tx(PEOPLE[0], "tally/add", Add(1))) or "").startswith(
        "unknown-transaction"
    )
    world.decide(*(world.wish(number, 15, version=1) for number in range(3)))
    world.until(15)
    assert world.network.modules[-1] == ModuleVersion("tally", 1)
    world.add(4)
    assert world.state.modules["tally"] == Tally(4)
    again = world.read_back()
    assert again == world.state and again.state_root == world.state.state_root


@pytest.mark.parametrize(
    ("height", "why"),
    [
        (NOTICE, "is outside"),
        (NOTICE + 1, None),
        (UPGRADE_AHEAD_HEIGHTS_MAX + 1, None),
        (UPGRADE_AHEAD_HEIGHTS_MAX + 2, "is outside"),
    ],
)
def test_operators_are_given_time(world: Upgrading, height: int, why: str | None) -> None:
    refusal = world.refusal(world.wish(0, height))  # it would stand in block 1
    assert refusal is None if why is None else why in (refusal or "")


def test_wishes_that_come_too_late_for_their_height_come_to_nothing(world: Upgrading) -> None:
    world.decide(world.wish(0, 14), world.wish(1, 14))
    world.until(4)
    assert "is outside" in (world.refusal(world.wish(2, 14)) or ""), "the third would be decided nine heights before"
    assert not world.network.upgrade_votes and world.network.due_upgrades == ()


def test_only_voters_wish_and_only_for_what_does_not_run_yet(world: Upgrading) -> None:
    world.decide(world.admission(PEOPLE[7]))
    assert "is not a voter" in (world.refusal(world.tx(PEOPLE[7], "network/upgrade", ModuleUpgrade("tally", 2, 30))) or "")
    assert "already runs version 1 of tally" in (world.refusal(world.wish(0, 30, version=1)) or "")
    upgraded(world, 30)
    assert "is already decided" in (world.refusal(world.wish(3, 40)) or "")


def test_a_voter_has_one_wish_and_another_one_takes_its_place(world: Upgrading) -> None:
    world.decide(world.wish(0, 20), world.wish(1, 20))
    world.decide(world.wish(0, 25))
    world.decide(world.wish(2, 20))
    assert world.network.due_upgrades == (), "the first one's wish of before counts no more"
    world.decide(world.wish(0, 20))
    assert world.network.due_upgrades == (ModuleUpgrade("tally", 2, 20),)


def test_a_program_that_lacks_a_version_applies_what_is_below_and_names_what_it_lacks() -> None:
    knows, old = Upgrading(), Upgrading(modules=OLD)
    for world in (knows, old):
        upgraded(world, 15)
    assert knows.rules.last_supported_height(knows.state) is None and knows.rules.why_version_unsupported(knows.state) == ""
    assert old.rules.last_supported_height(old.state) == 14 == old.ledger.last_supported_height()
    told = "this network upgrades to tally 2 at height 15; this program has 1: install a newer program and restart this peer"
    assert old.rules.why_version_unsupported(old.state) == told
    assert knows.until(14).state_root == old.until(14).state_root
    with pytest.raises(UnsupportedModuleVersion, match="tally 2 at height 15"):
        old.decide()
    knows.decide()
    with pytest.raises(UnsupportedModuleVersion, match="this network runs tally 2; this program has 1"):
        old.rules.decode_state(knows.rules.encode_state(knows.state))


class JobsWithAddedFields(PlainJobs):
    """Specifications of the kind `LANGUAGE` have a value in an added field."""

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        terms = super().terms_of_spec(spec)
        return replace(terms, requires=(ModuleVersion("jobs", 2),)) if spec == LANGUAGE else terms


def test_a_network_trains_a_job_with_an_added_field_after_the_upgrade_of_jobs() -> None:
    modules = core_modules(JobsWithAddedFields())
    world = Upgrading(tuple(module for module in modules if module.version == 1), modules)
    start = world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    assert "needs version 2 of the module jobs" in (world.refusal(start) or "")
    world.decide(world.tx(PEOPLE[0], "job/start", StartJob(SCRATCH)))
    before = world.state.jobs
    upgraded(world, 20, "jobs")
    world.until(19)
    assert world.state.jobs.jobs.keys() == before.jobs.keys() and world.network.module_version("jobs") == 1
    world.until(20)
    assert world.state.jobs.jobs.keys() == before.jobs.keys() and world.network.module_version("jobs") == 2
    world.decide(world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE)))
    assert len(world.state.jobs.jobs) + len(world.state.jobs.queue) == 2


LAYERS: list[dict[str, Any]] = [{"experts": 4}, {"experts": 2, "experts_per_token": 1}, {"window": 9}, {"linear": "ternary"}]
AUDITED_HALF = {**complete_fields(PRESETS["per-step"]), "precision": Precision.BF16, "replay_tolerance": BF16_TOLERANCE}


@pytest.mark.parametrize(
    "said",
    [
        {"sam_radius": 0.05},
        {"grokfast": 2.0},
        {"grokfast": 2.0, "grokfast_decay": 0.5},
        *({"model": ModelSpec(**complete_model_fields(layers))} for layers in LAYERS),
        AUDITED_HALF,
        {**AUDITED_HALF, "audit": AuditMode.FULL},
    ],
    ids=str,
)
def test_a_network_of_older_programs_refuses_jobs_that_these_do_not_know(said: dict[str, Any], tmp_path: Path) -> None:
    modules = core_modules(JobModelStore(tmp_path))
    plain = JobSpec(name="options", objective="scratch") if "grokfast" in said else JobSpec(name="options", data=bytes(32))
    older = Upgrading(tuple(module for module in modules if module.version == 1), modules)
    for world, refusal in ((older, "needs version 2 of the module jobs"), (Upgrading(modules, modules), "")):
        start = world.tx(PEOPLE[0], "job/start", StartJob(replace(plain, **said).validated().encode()))
        found = world.refusal(start) or ""
        assert refusal in found and bool(found) == bool(refusal)
        assert world.refusal(world.tx(PEOPLE[0], "job/start", StartJob(plain.encode()))) is None


def test_a_program_refuses_a_genesis_with_modules_that_it_lacks() -> None:
    world = Upgrading(first=NEW)
    assert world.genesis.modules[-1] == ModuleVersion("tally", 2)
    with pytest.raises(UnsupportedModuleVersion, match="runs tally 2; this program does not have this module"):
        LedgerRules(world.genesis, FastVerifier(), CORE).genesis_state()


def test_the_modules_of_the_genesis_make_another_network() -> None:
    assert Upgrading(first=CORE).chain != Upgrading(first=OLD).chain
    with pytest.raises(AssertionError, match="each version once"):
        LedgerRules(World().genesis, FastVerifier(), (*CORE, JobsModule(PlainJobs()))).genesis_state()


def test_a_program_that_lacks_a_version_refuses_what_the_next_block_could_carry() -> None:
    world = Upgrading(modules=OLD)
    upgraded(world, 15)
    world.until(14)
    signed = world.tx(PEOPLE[0], "tally/add", Add(1))
    world.ledger.mempool.add_transaction(signed)
    assert world.ledger.make_body(15, world.state.time_ms + 1) is None and not world.ledger.has_due_transactions()
    assert "upgrades to tally 2" in (world.refusal(signed) or "")


@dataclass(frozen=True, slots=True)
class Subtract:
    amount: Count


def _other_version(**differs: Any) -> Module[Any]:
    """Return a later version of the tally with these attributes."""
    other: Module[Any] = type("OtherTallyModule", (TallyModule,), {"version": 2, **differs})()
    return other


def test_versions_of_a_module_give_a_transaction_the_same_cost_and_signatures() -> None:
    """A mempool knows no state. With a cost other than that of the block's check, leaders would propose refused blocks."""

    def rules(*modules: Module[Any]) -> LedgerRules:
        world = World(modules=modules[:1])
        return LedgerRules(world.genesis, FastVerifier(), (*core_modules(PlainJobs()), *modules))

    def other(*about: object) -> Any:
        return None

    assert rules(
        TallyModule(), _other_version(genesis_state=other, apply_transaction=other, upgrade_state=other, end_block=other)
    )
    differences: list[dict[str, Any]] = [
        {name: other} for name in ("transaction_cost", "embedded_statements", "awaited_job", "lingers")
    ]
    for differs in (*differences, {"costs": {"tally/add": 7}}, {"contents": {"tally/add": Subtract}}):
        for modules in ((TallyModule(), _other_version(**differs)), (_other_version(**differs), TallyModule())):
            with pytest.raises(AssertionError, match="versions of tally read tally/add differently"):
                rules(*modules)
