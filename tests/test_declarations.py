"""An objective's own record in proposals: honest declarations pass, and a false one is named by the objective's own reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from ledger.audits.audit_state import AuditLogEntry, AuditResult
from ledger.jobs import StartJob, job_id
from ledger.ledger_state import LedgerState
from peer import features
from peer.features import founding_modules
from peer.roles.trainer import Trainer
from peer.roles.voter import fetch_declared
from peer.runtime.auditor import describe_audit_entry
from peer.worker.main import WorkerRequestHandler
from protocol import codec
from protocol.errors import RemoteProtocolError, UserError
from protocol.verdicts import ReplayFinding, Verdict, find_verdict_by_label, verdict_label
from storage.disk_blob_store import DiskBlobStore
from tests.notes.engine import KIND, Slate
from tests.notes.listing import listed
from tests.notes.objective import COUNTED_BYTES, Counted
from tests.peer import chain, network
from tests.peer.network import Network, Seat, has_finished, service_of
from tests.peer.processes import LATE
from tests.training.replicated.support import proposed
from tests.waiting import patience
from training import corpus, worker_protocol
from training.data.default_text import default_text
from training.engines.request_handlers import WorkerContext
from training.job_spec import AuditMode, JobSpec
from training.objectives import registry
from training.objectives.objective import Objective, RejectionReason
from training.replicated.replicated_model import ReplicatedModel

LETTERS = JobSpec(name="letters", objective="letters", data=bytes(32), rounds=2, byzantine_max=0, initial_norm=1e6, local_steps=2)
SAMPLED = replace(LETTERS, audit=AuditMode.SAMPLED, local_steps=1, auditors=3, audit_window=20)
TEXT = default_text()[:20_000]
ME = bytes(32)


@pytest.fixture
def feature(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with listed():
        features.register_features()
        monkeypatch.setattr(chain, "MODULES", founding_modules())
        yield


class Counting:
    """A worker in this process. It may invent its counts, and train on them."""

    def __init__(self, invents: bool) -> None:
        self.jobs = WorkerRequestHandler(WorkerContext(KIND, lambda: None, 1 << 30))
        self.invents = invents
        self.open_jobs = set[bytes]()

    async def ask(self, request: Any) -> Any:
        reply = await trio.to_thread.run_sync(self.jobs.handle_request, request)
        if isinstance(request, worker_protocol.OpenJobRequest):
            self.open_jobs.add(request.job)
        if isinstance(request, worker_protocol.OpenJobRequest) and self.invents:
            engine: Any = self.jobs.context.find_engine(request.job)
            counts = engine._counts
            engine._counts = lambda *place: np.roll(counts(*place), 1)
        return reply


async def train(made: Network, spec: JobSpec) -> bytes:
    """Begin a job with four trainers, the last of which invents its counts, and return the job's key."""
    for number, seat in enumerate(made.seats):
        seat.folder.mkdir(exist_ok=True)
        (seat.folder / "texts").mkdir(exist_ok=True)
        await made.start(seat, Trainer(Counting(number == 3), seat.folder / "texts"))  # type: ignore[arg-type]
    first = made.seats[0]
    keep = first.blobs.add_bytes
    spec = replace(spec, data=keep(corpus.split_into_shards(iter([TEXT]), keep).encode())).validated()
    return job_id(first.public, await first.author.submit("job/start", StartJob(spec.encode())))


def rejections(seat: Seat, job: bytes) -> dict[bytes, dict[str, int]]:
    return dict(seat.driver.state.jobs.jobs[job].rejected)


async def test_an_invented_declaration_is_rejected_by_the_objective_s_own_reason(feature: None, tmp_path: Path) -> None:
    async with network.network(tmp_path, founders=4, start=False, roles=("clerk",)) as made:
        with patience():
            job = await train(made, LETTERS)
            for seat in made.seats:
                await seat.until(has_finished(job))
        liar = made.seats[3].public
        found = rejections(made.seats[0], job)
        assert all(rejections(seat, job) == found for seat in made.seats), "a code has one name in the state"
        # On a busy machine a proposal, or a ballot on it, may be too late in one of the rounds.
        assert {key for key, reasons in found.items() if reasons.keys() - LATE} == {liar}
        assert found[liar].keys() <= {"own_0", *LATE} and 1 <= found[liar]["own_0"] <= LETTERS.rounds
        # The state has the code's own name; people read the objective's name for it.
        view = next(view for view in await service_of(made.seats[0]).jobs() if view.job == job.hex())
        assert [of["miscounted"] for of in view.rejected.values() if of.keys() - LATE] == [found[liar]["own_0"]]
        stored = [made.seats[0].store.closed_round(job, number) for number in range(LETTERS.rounds)]
        named = [kept.verdicts for kept in stored if kept is not None and kept.verdicts[liar] == "miscounted"]
        assert named and all("accept" in verdicts.values() for verdicts in named)


def suspensions(state: LedgerState) -> list[AuditLogEntry]:
    return [entry for entry in state.audits.log if entry.result is AuditResult.SUSPENDED]


async def test_an_invented_declaration_is_found_by_sampled_audits(feature: None, tmp_path: Path) -> None:
    async with network.network(tmp_path, founders=4, start=False, roles=("clerk",)) as made:
        with patience():
            job = await train(made, replace(SAMPLED, rounds=4))
            await made.seats[0].until(lambda driver: bool(suspensions(driver.state)))
        state, liar = made.seats[0].driver.state, made.seats[3].public
        found = suspensions(state)  # one for each finished dispute; two may end in one block
        assert {entry.trainer for entry in found} == {liar} and job in state.jobs.jobs
        assert all("(miscounted)" in describe_audit_entry(entry, state) for entry in found)


def test_voters_without_an_engine_refuse_what_is_no_declaration(feature: None) -> None:
    sound = codec.encode(Counted(bytes(32), 1))
    assert LETTERS.decode_declaration(sound) == Counted(bytes(32), 1)
    assert LETTERS.declared_blobs(sound) == {bytes(32): COUNTED_BYTES}
    model = ReplicatedModel.initial(bytes(32), LETTERS)
    item = proposed(model, ME, np.ones(model.layout.size, dtype=np.float32))

    def verdict(declaration: bytes) -> Verdict:
        return model.check_proposal(ME, replace(item.proposal, declaration=declaration), item.payload)

    nothing_counted = codec.encode(Counted(bytes(32), 0))
    assert verdict(sound) is Verdict.ACCEPT
    assert {verdict(declaration) for declaration in (b"", nothing_counted, sound[:-1], sound + b"\x00")} == {Verdict.MALFORMED}
    scratch = JobSpec(name="t", objective="scratch")
    assert scratch.decode_declaration(b"") is None
    with pytest.raises(RemoteProtocolError, match="objective 'scratch' has no declarations, but 1 bytes were given"):
        scratch.decode_declaration(b"x")


def test_an_objective_s_reasons_have_labels_of_their_own(feature: None) -> None:
    own = LETTERS.resolved_objective.reason_labels
    assert registry.rejection_meanings()["miscounted"] == "it met other letters than it says"
    for verdict in Verdict:
        assert find_verdict_by_label(verdict_label(verdict, own), own) is verdict
    assert verdict_label(Verdict.OWN_0, own) == verdict_label(ReplayFinding.OWN_0, own) == "miscounted"
    assert verdict_label(Verdict.OWN_1, own) == "own_1", "a liar may vote for a reason that the objective does not have"
    assert find_verdict_by_label("absent", own) is None and find_verdict_by_label("diverging", own) is Verdict.NORM


async def test_an_engine_that_makes_no_declarations_does_not_open_such_a_job(
    feature: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Slate, "make_declaration")
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    with pytest.raises(UserError, match="engine 'slate' cannot make the declarations that objective 'letters' requires"):
        WorkerRequestHandler(WorkerContext(KIND, lambda: None, 1 << 30)).handle_request(
            worker_protocol.OpenJobRequest(bytes(32), LETTERS.encode(), str(text), None)
        )


async def test_a_blob_of_a_declaration_is_not_larger_than_the_objective_says(feature: None, tmp_path: Path) -> None:
    blobs = DiskBlobStore(tmp_path / "blobs", tmp_path / "buffers")
    large = blobs.add_bytes(bytes(COUNTED_BYTES + 1))

    async def fetch(*_: object) -> None:
        """Do nothing: every blob is here."""

    past = SimpleNamespace(spec=LETTERS, blobs=blobs, fetch=fetch, blob_owner=object())
    declaration = codec.encode(Counted(large, 1))
    with pytest.raises(RemoteProtocolError, match="a blob of 2049 bytes, at most 2048 are allowed"):
        await fetch_declared(past, ME, SimpleNamespace(declaration=declaration))  # type: ignore[arg-type]


def test_labels_of_reasons_are_nobody_else_s(feature: None) -> None:
    for labels in (("accept",), ("own_1",), ("withheld",), ("twice", "twice")):
        kind = type(
            "Odd", (Objective,), {"name": "odd", "rejection_reasons": tuple(RejectionReason(label, "") for label in labels)}
        )()
        with pytest.raises(AssertionError, match="odd"):
            registry.register_objectives((kind,))
        registry._known.pop("odd")
