"""The results of a state are the same after applied blocks and after decoding from bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.audits import state_machine
from ledger.audits.audit_state import AuditDuty, AuditFinding, audit_duties
from ledger.blocks.application import LedgerApplication
from ledger.core.genesis import TRAINER
from ledger.core.module import Refused
from ledger.jobs import Job, JobTerms, StartJob, StopJob
from ledger.ledger_state import CurrentState, LedgerState, core_modules, with_sorted_dictionaries
from ledger.members import ApproveVoter, RegisterRoles, ResignAsVoter, StandAsVoter
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed
from protocol.verdicts import ReplayFinding
from tests.ledger.world import BY_KEY, PEOPLE, SAMPLED, PlainJobs, World
from tests.sim.keys import FastSigner

FOUNDERS = 4
AFTERMATH = 2  # heights; a thousand would take too long here


class ManyJobs(PlainJobs):
    """Jobs with sampled audits, up to the largest number of running jobs."""

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        return replace(super().terms_of_spec(spec), needs_worker=False)


class TwoWays(World):
    """A world that applies each block twice: to the state of the block before, and to that state decoded from bytes."""

    def __init__(self) -> None:
        super().__init__(FOUNDERS, FOUNDERS)
        self.start_chain(self.genesis, core_modules(ManyJobs()))

    def decide_body(self, body: bytes) -> LedgerState:
        before = self.ledger
        self.ledger = LedgerApplication(
            self.rules, CurrentState(self.rules.decode_state(self.rules.encode_state(before.state))), before.certified_root
        )
        try:
            read = super().decide_body(body)
        finally:
            self.ledger = before
        went_on = super().decide_body(body)
        assert went_on.state_root == read.state_root
        assert repr(went_on.modules) == repr(read.modules), "in another order, which a later rule may look at"
        return went_on

    # Transactions, each made from any person and any number

    def started(self, person: FastSigner, number: int) -> Signed:
        return self.tx(person, "job/start", StartJob(SAMPLED + b":%d" % (2 + number)))

    def stopped(self, person: FastSigner, number: int) -> Signed:
        return self.tx(person, "job/stop", StopJob(self._one(self._jobs_of(person), number)))

    def registered(self, person: FastSigner, number: int) -> Signed:
        return self.tx(person, "member/register", RegisterRoles((TRAINER,) if number % 2 else ()))

    def admitted(self, person: FastSigner, number: int) -> Signed:
        return self.admission(person, token=FastSigner(f"token {number}"))

    def stood(self, person: FastSigner, number: int) -> Signed:
        height, root = max(self.state.certified_roots.items(), default=(0, bytes(32)))
        return self.tx(person, "member/stand", StandAsVoter(height, root))

    def approved(self, person: FastSigner, number: int) -> Signed:
        return self.tx(person, "member/approve", ApproveVoter(self._one(self.state.members.candidates, number)))

    def left(self, person: FastSigner, number: int) -> Signed:
        return self.tx(person, "member/resign", ResignAsVoter())

    def rotated(self, person: FastSigner, number: int) -> Signed:
        return self.rotation(person, PEOPLE[-1 - number])

    def judged(self, person: FastSigner, number: int) -> Signed:
        due: AuditDuty = self._one(audit_duties(person.public, self.state), number)
        kind = "audit/verdict" if due.is_dispute else "audit/report"
        finding = ReplayFinding.MATCH if number % 3 else ReplayFinding.MISMATCH
        return self.tx(person, kind, AuditFinding(due.job, *due.proposal_key, finding, 0))

    def _jobs_of(self, person: FastSigner) -> list[bytes]:
        return [key for key, job in self.state.jobs.running().items() if job.author == person.public]

    @staticmethod
    def _one(choices: Any, number: int) -> Any:
        keys = sorted(choices, key=repr)
        if not keys:
            raise Refused("there is none")
        return keys[number % len(keys)]


SAID: tuple[Callable[[TwoWays, FastSigner, int], Signed], ...] = (
    TwoWays.started,
    TwoWays.stopped,
    TwoWays.registered,
    TwoWays.admitted,
    TwoWays.stood,
    TwoWays.approved,
    TwoWays.left,
    TwoWays.rotated,
    TwoWays.judged,
)
LIKELY = (TwoWays.started, TwoWays.judged, TwoWays.judged)
EVENTS = ("close", "close", "close", "all approve", "all stop", "", "", "", "expel")
sayings = st.tuples(st.sampled_from((*SAID, *LIKELY)), st.sampled_from(PEOPLE[: FOUNDERS + 2]), st.integers(0, 5))
histories = st.lists(st.tuples(st.sampled_from(EVENTS), st.lists(sayings, max_size=6)), min_size=20, max_size=30)


def decide(world: TwoWays, event: str, sayings: list[Any]) -> None:
    """Decide one block with the event and the valid ones among the transactions."""
    running, standing = world.state.jobs.running(), sorted(world.state.members.candidates)
    closings = tuple(world.closing(key) for key in sorted(running)) if event == "close" else ()
    evidence = (world.double(PEOPLE[0], world.state.height + 1),) if event == "expel" else ()
    said = list[Signed]()
    if event == "all stop":
        said += [world.tx(BY_KEY[author], "job/stop", StopJob(key)) for author, key in authors(running).items()]
    elif event == "all approve" and standing:
        said += [world.tx(BY_KEY[voter], "member/approve", ApproveVoter(standing[0])) for voter in world.state.members.voters]
    for saying, person, number in sayings:
        with suppress(Refused):
            signed = saying(world, person, number)
            said += [signed] if world.problem(*said, signed, closings=closings, evidence=evidence) is None else []
    world.decide(*said, closings=closings, evidence=evidence)


def authors(running: dict[bytes, Job]) -> dict[bytes, bytes]:
    """Return one job per author."""
    return {job.author: key for key, job in running.items()}


@given(history=histories)
@settings(max_examples=30)
def test_a_state_and_the_one_read_from_its_bytes_go_the_same_way(history: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_machine, "POST_JOB_AUDIT_HEIGHTS", AFTERMATH)
        world = TwoWays()
        for event, sayings in history:
            with suppress(Refused, RemoteProtocolError):  # such a block is never decided
                decide(world, event, sayings)


def test_what_is_in_order_stays_the_very_same_object() -> None:
    old = {1: ({b"a": 1, b"b": 2},), 2: ()}
    assert with_sorted_dictionaries(old, None) is old
    new = {2: old[2], 1: old[1], 0: ({b"b": 2, b"a": 1},)}
    ordered = with_sorted_dictionaries(new, old)
    assert ordered == new and repr(ordered) == "{0: ({b'a': 1, b'b': 2},), 1: ({b'a': 1, b'b': 2},), 2: ()}"
    assert ordered[1] is old[1]
