"""The set of a plan: only the set that a quorum of the voters derived is used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from curation.ledger.curation_module import CurationModule
from curation.ledger.curation_state import ProjectPhase, ProjectSpec, Redaction
from curation.ledger.transaction_types import SetProjectPhase
from curation.tasks.answers import QuestionKind
from curation.tasks.task_pages import task_id
from ledger.jobs import job_id
from ledger.ledger_state import LedgerState
from ledger.members import ResignAsVoter
from protocol import codec
from protocol.identity import Signed
from rlhf.ledger import preference_set_attestation, tuning_plans
from rlhf.ledger.preference_set_attestation import (
    AttestedPreferenceSet,
    AttestPreferenceSet,
    ClaimStatus,
    PreferenceSetClaim,
    PreferenceSetSource,
)
from rlhf.ledger.rlhf_module import RlhfModule, RlhfState, is_exported
from rlhf.ledger.tuning_plans import CancelPlan, StartPlan, TuningPlan
from tests.curation.room import Room, annotators
from tests.ledger.world import PEOPLE, World
from tests.rlhf.test_plans import POLICY, REWARD, Tuned

AUTHOR, *OTHERS = PEOPLE[:4]  # four voters tolerate one liar, and a quorum is three
NOVICE = PEOPLE[5]
ASKED = ProjectSpec("pairs", QuestionKind.PAIR, (), False, 2, None, 1, 0, False)
TASKS, BOTH_BAD = 8, 3
NAMED, ANOTHER = hashlib.sha256(b"the set").digest(), hashlib.sha256(b"another").digest()


class Compared(Tuned, Room):
    """A project of eight pairs with one person's answers, and a plan that learns from them."""

    def __init__(self, folder: Path, kind: type[RlhfModule] = RlhfModule) -> None:
        super().__init__(folder, kind, (CurationModule(),))
        self.project_key = self.project(ASKED, TASKS)
        self.worked_once(annotators(1)[0], TASKS, lambda number: (number % 4,))
        self.source = PreferenceSetSource(self.project_key, self.state.height)
        self.key = bytes(32)

    def decide_body(self, body: bytes, after_ms: int = 1) -> LedgerState:
        self.now = max(self.now, self.state.time_ms + 1)
        return World.decide_body(self, body, self.now - self.state.time_ms)

    def beginning(self, source: PreferenceSetSource | None = None, author: Any = AUTHOR) -> Signed:
        return self.tx(
            author,
            "rlhf/start",
            StartPlan(self.on(replace(REWARD, data=NAMED)), self.on(POLICY), source or self.source, ignores_accuracy=True),
        )

    def begun(self) -> Compared:
        signed = self.beginning()
        self.decide(signed)
        self.key = job_id(AUTHOR.public, self.rules.open_transaction(signed))
        return self

    @property
    def now_plan(self) -> TuningPlan:
        return self.plan(self.key)

    @property
    def claim(self) -> PreferenceSetClaim:
        claim = self.now_plan.claim
        assert claim is not None
        return claim

    @property
    def has_begun(self) -> bool:
        return tuning_plans.stage_job_id(self.key, 0) in self.state.jobs.jobs

    @property
    def sets(self) -> dict[bytes, AttestedPreferenceSet]:
        return self.state.module_state(RlhfState).sets

    def found(self, who: Any, set: bytes | None = NAMED) -> Signed:
        return self.tx(who, "rlhf/attest-set", AttestPreferenceSet(self.key, set))

    def told(self, *sets: bytes | None) -> str:
        """Return the plan's status after each voter, in turn, has given one of these attestations."""
        told = ""
        for who, set in zip((AUTHOR, *OTHERS), sets, strict=False):
            self.decide(self.found(who, set))
            told += {"running": "job " if self.has_begun else "- ", "cancelled": "! ", "finished": ". "}[self.now_plan.phase]
            if self.now_plan.phase is not tuning_plans.PlanPhase.RUNNING or self.has_begun:
                break
        return told.strip()

    def redact(self, *numbers: int) -> None:
        for number in numbers:
            page = self.curation.pages.get_record(self.project_key + bytes(4))
            assert page is not None
            self.say(AUTHOR, "curation/redact", Redaction(self.project_key, 0, number, page.digest, bytes([number]) * 32, 100))


@pytest.fixture
def world(tmp_path: Path) -> Compared:
    return Compared(tmp_path)


ANSWERS = {  # attestations of the voters in turn, and the plan's status after each
    (NAMED, NAMED, NAMED): "- - job",
    (NAMED, NAMED, ANOTHER, NAMED): "- - - job",
    (ANOTHER, NAMED, NAMED, NAMED): "- - - job",
    (NAMED, ANOTHER, NAMED, ANOTHER): "- - - !",
    (ANOTHER, ANOTHER): "- !",
    (None, None): "- !",
    (ANOTHER, None): "- !",
    (NAMED, NAMED, None, None): "- - - !",
}


def outcome(folder: Path) -> list[str]:
    return [Compared(folder / str(number)).begun().told(*said) for number, said in enumerate(ANSWERS)]


@pytest.mark.parametrize("said", ANSWERS)
def test_a_plan_begins_with_the_set_that_a_quorum_derived_and_never_with_another(
    world: Compared, said: tuple[bytes | None, ...]
) -> None:
    world.begun()
    assert not world.has_begun and world.now_plan.phase is tuning_plans.PlanPhase.RUNNING, "its author's word is not enough"
    assert world.told(*said) == ANSWERS[said]
    assert (NAMED in world.sets) == world.has_begun
    for _ in range(3):
        world.decide()
    assert world.has_begun == ANSWERS[said].endswith("job"), "what was refused stays so"


def test_a_set_is_decided_with_its_project_and_its_height(world: Compared) -> None:
    world.begun().told(NAMED, NAMED, NAMED)
    assert world.sets == {NAMED: AttestedPreferenceSet(world.source, world.state.height, 0)}
    assert world.claim == PreferenceSetClaim(world.source, NAMED, 0, True)
    state = world.state.module_state(RlhfState)
    assert codec.decode(RlhfState, codec.encode(state)) == state
    world.close(tuning_plans.stage_job_id(world.key, 0), blocks=1)
    assert tuning_plans.stage_job_id(world.key, 1) in world.state.jobs.jobs, "the policy begins as in any plan"


def test_what_can_give_no_set_is_refused_at_once(world: Compared) -> None:
    moods, fresh = world.project(tasks=1), world.project(replace(ASKED, name="fresh"), 1, OTHERS[0])
    ahead = world.state.height + 1
    for source, why in (
        (PreferenceSetSource(bytes(32), 1), "0000000000000000 does not compare pairs"),
        (PreferenceSetSource(moods, 1), f"{moods.hex()[:16]} does not compare pairs"),
        (PreferenceSetSource(fresh, 1), "the project 'fresh' has no labels yet"),
        (replace(world.source, height=ahead), f"height {ahead} is not decided yet"),
    ):
        assert why in (world.problem(world.beginning(source)) or "")
    assert world.problem(world.beginning(replace(world.source, height=ahead - 1))) is None


def test_a_network_without_projects_has_no_sets_of_them(tmp_path: Path) -> None:
    world = Tuned(tmp_path)
    assert "does not run the module curation" in (
        world.problem(world.tx(AUTHOR, "rlhf/start", replace(world.begin(), source=PreferenceSetSource(bytes(32), 1)))) or ""
    )


def test_a_voter_speaks_once_and_nobody_else_does(world: Compared) -> None:
    world.begun()
    assert "no plan waits" in (world.problem(world.tx(AUTHOR, "rlhf/attest-set", AttestPreferenceSet(bytes(32), NAMED))) or "")
    world.decide(world.admission(NOVICE))
    assert "only voters" in (world.problem(world.found(NOVICE)) or "")
    world.decide(world.found(AUTHOR))
    assert "already reported" in (world.problem(world.found(AUTHOR, ANOTHER)) or "")
    for who in OTHERS[:2]:
        world.decide(world.found(who))
    assert world.has_begun
    assert "no plan waits" in (world.problem(world.found(OTHERS[2])) or "")


def test_a_plan_that_waits_for_its_set_can_be_cancelled(world: Compared) -> None:
    world.begun().told(NAMED, NAMED)
    world.decide(world.tx(AUTHOR, "rlhf/cancel", CancelPlan(world.key)))
    assert "no plan waits" in (world.problem(world.found(OTHERS[1])) or "")
    world.decide()
    assert not world.has_begun and not world.sets


def test_a_plan_whose_set_nobody_derives_ends(world: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would occupy its place for ever after its author has gone."""
    monkeypatch.setattr(tuning_plans, "REFUSED_HEIGHTS_MAX", 3)
    world.begun()
    for phase in ("running", "running", "cancelled"):
        world.decide()
        assert world.now_plan.phase == phase


def test_a_voter_that_left_is_not_heard_and_one_with_another_key_is(world: Compared) -> None:
    world.begun()
    world.decide(world.found(AUTHOR), world.found(OTHERS[0]))
    newer = PEOPLE[6]
    world.decide(world.rotation(OTHERS[0], newer))
    assert set(world.claim.attestations) == {AUTHOR.public, newer.public}
    assert "already reported" in (world.problem(world.found(newer)) or "")
    world.decide(world.tx(AUTHOR, "member/resign", ResignAsVoter()))
    while AUTHOR.public in world.state.members.voters:
        world.decide()
    assert not world.has_begun, "of three voters two make a quorum, and one of them has spoken"
    world.decide(world.found(OTHERS[1]))
    assert world.has_begun


@pytest.mark.parametrize(
    ("number", "how"),
    [(0, "cancelled"), (1, "cancelled"), (2, "cancelled"), (BOTH_BAD, "running")],
    ids=["first", "second", "tie", "both bad"],
)
def test_a_task_that_is_redacted_before_its_set_is_decided_ends_the_plan(world: Compared, number: int, how: str) -> None:
    """Some voters may have derived it with this text, and the others without."""
    world.begun().told(NAMED)
    world.redact(number)
    assert world.now_plan.phase == how


def test_a_task_that_is_redacted_later_is_counted_and_one_that_the_set_lacks_is_not(world: Compared) -> None:
    world.redact(4)  # before the plan: no voter derives it
    late = world.project(replace(ASKED, name="other"), 1)
    world.source = replace(world.source, height=settled(world, 5))
    world.begun().told(NAMED, NAMED, NAMED)
    within = {number for number in range(TASKS) if number % 4 != BOTH_BAD and settled(world, number) <= world.source.height} - {4}
    assert within < set(range(TASKS)) - {4}
    world.redact(*(number for number in range(TASKS) if number != 4))
    world.say(AUTHOR, "curation/redact", Redaction(late, 0, 0, bytes(32), bytes([1]) * 32, 100))
    assert world.sets[NAMED].redacted == len(within) and world.sets[NAMED].redactions_seen == TASKS + 1
    assert world.has_begun and world.now_plan.phase is tuning_plans.PlanPhase.RUNNING


def settled(world: Compared, number: int) -> int:
    row = world.curation.tasks.get_record(task_id(world.project_key, number))
    assert row is not None
    return row.height


def test_the_oldest_sets_are_forgotten_but_for_those_that_are_named(world: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_set_attestation, "SETS_KEPT_MAX", 2)
    made = {bytes([number]) * 32: AttestedPreferenceSet(world.source, number, 0) for number in range(4)}
    assert preference_set_attestation.update_attested_sets(made, world.curation, {bytes([0]) * 32}).keys() == made.keys() - {
        bytes([1]) * 32
    }


def test_no_redaction_of_a_job_s_set_is_forgotten_however_many_plans_begin(
    world: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preference_set_attestation, "SETS_KEPT_MAX", 0)
    world.begun().told(NAMED, NAMED, NAMED)
    for stage in range(2):
        world.close(tuning_plans.stage_job_id(world.key, stage), blocks=1)
    assert world.now_plan.phase is tuning_plans.PlanPhase.FINISHED
    world.redact(0)
    assert world.sets[NAMED].redacted == 1 and not is_exported(world.state, NAMED)


def test_no_plan_begins_with_a_project_that_is_being_closed(world: Compared) -> None:
    """Its labels may change while voters derive them."""
    world.say(AUTHOR, "curation/set-phase", SetProjectPhase(world.project_key, ProjectPhase.CLOSED))
    assert "is being closed" in (world.problem(world.beginning()) or "")


# Planted bugs -------------------------------------------------------------------------------------------------------------


def anything_counts(claim: PreferenceSetClaim, *rest: Any) -> tuple[PreferenceSetClaim, ClaimStatus]:
    """Plant: every attestation counts as one for the claimed set."""
    return HEARD(replace(claim, attestations=dict.fromkeys(claim.attestations, claim.set)), *rest)


def one_is_enough(claim: PreferenceSetClaim, *rest: Any) -> tuple[PreferenceSetClaim, ClaimStatus]:
    return (claim, ClaimStatus.DECIDED) if claim.set in claim.attestations.values() else HEARD(claim, *rest)


def most_are_enough(
    claim: PreferenceSetClaim, voters: tuple[bytes, ...], curation: Any
) -> tuple[PreferenceSetClaim, ClaimStatus]:
    """Plant: a majority of the attestations decides, instead of a quorum of the voters."""
    agree = [found == claim.set for found in claim.attestations.values()]
    return (claim, ClaimStatus.DECIDED) if 2 * sum(agree) > len(agree) > 1 else HEARD(claim, voters, curation)


def nothing_refuses(claim: PreferenceSetClaim, *rest: Any) -> tuple[PreferenceSetClaim, ClaimStatus]:
    after, heard = HEARD(claim, *rest)
    return after, ClaimStatus.WAITS if heard is ClaimStatus.REFUSED else heard


HEARD = preference_set_attestation.tally_claim


@pytest.mark.parametrize("bug", [anything_counts, one_is_enough, most_are_enough, nothing_refuses], ids=lambda bug: bug.__name__)
def test_a_rule_that_hears_something_else_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[..., Any]
) -> None:
    assert outcome(tmp_path / "sound") == list(ANSWERS.values())
    monkeypatch.setattr(preference_set_attestation, "tally_claim", bug)
    assert outcome(tmp_path / "planted") != list(ANSWERS.values())


def test_a_plan_that_does_not_wait_for_its_set_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tuning_plans.plan_requests
    monkeypatch.setattr(tuning_plans, "plan_requests", lambda plan, author: asked(replace(plan, claim=None), author))
    assert Compared(tmp_path).begun().has_begun


def test_a_rule_that_ignores_redactions_is_found_out(world: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_set_attestation, "redacted_since", lambda *_: 0)
    world.begun().told(NAMED)
    world.redact(0)
    assert world.now_plan.phase is tuning_plans.PlanPhase.RUNNING
