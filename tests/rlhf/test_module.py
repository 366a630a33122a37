"""What the state keeps of a round's figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ledger.core.module import BlockContext
from ledger.jobs import ClosedRound
from protocol import codec
from protocol.identity import Ed25519Verifier, Signed
from protocol.messages import Proposal
from rlhf.ledger.rlhf_module import RlhfModule, RlhfState
from rlhf.objectives.policy_monitors import PolicyHistory, RoundMedians
from rlhf.objectives.ppo import RolloutDeclaration
from tests.rlhf.test_ppo import SPEC
from training.job_spec import JobSpec

JOB, OTHER = bytes([1]) * 32, bytes([2]) * 32


class Objectives:
    def terms_of_spec(self, spec: bytes) -> Any:
        return SimpleNamespace(objective=JobSpec.decode(spec).objective)

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        raise AssertionError("no job is started")


def closed(job: bytes, number: int, *figures: tuple[int, int, int, int]) -> Any:
    declared = [codec.encode(RolloutDeclaration(bytes(32), *each, distinct=each[0], correlation=-each[1])) for each in figures]
    bodies = [
        codec.encode(Proposal(job, number, bytes(32), bytes(32), 1, bytes(32), None, declaration=each)) for each in declared
    ]
    return ClosedRound(job, number, None, tuple(Signed(body, bytes(32), bytes(64)) for body in bodies), ())  # type: ignore[arg-type]


def after(state: RlhfState, jobs: dict[bytes, bytes], *facts: Any) -> RlhfState:
    known = SimpleNamespace(jobs={key: SimpleNamespace(spec=spec) for key, spec in jobs.items()})
    view: Any = SimpleNamespace(module_state=lambda kind: known)
    context = BlockContext(bytes(32), 1, 0, Ed25519Verifier(), {}, facts)
    changed: RlhfState = RlhfModule(Objectives()).end_block(state, view, context).state
    return changed


def test_the_medians_of_the_accepted_stay_until_the_next_round_or_until_the_job_is_forgotten() -> None:
    jobs = {JOB: SPEC.encode(), OTHER: replace(SPEC, objective="language", objective_settings=b"").encode()}
    first = after(RlhfState(), jobs, closed(JOB, 0, (10, 1, -5, 7), (30, 2, 9, 1), (20, 9, 0, 2)), closed(OTHER, 0, (1, 1, 1, 1)))
    assert first == RlhfState({JOB: PolicyHistory((RoundMedians(0, 3, 20, 2, 0, 2, 20, -2),))})
    assert after(first, jobs, closed(JOB, 1)) == first, "a round that accepts nothing says nothing"
    second = after(first, jobs, closed(JOB, 1, (10, 0, 4, 8), (30, 2, 6, 6)))
    assert second == RlhfState({JOB: PolicyHistory((*first.jobs[JOB].rounds, RoundMedians(1, 2, 10, 0, 4, 6, 10, -2)))}), (
        "of two the lower one"
    )
    assert after(second, {OTHER: jobs[OTHER]}) == RlhfState()
    assert codec.decode(RlhfState, codec.encode(second)) == second
