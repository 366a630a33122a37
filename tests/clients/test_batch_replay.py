"""The audit's judgement of updates with kept data, and the reasons for which it cannot re-execute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clients.objective import LOSS_DIFFERS
from clients.records import ListedBody, Manifest, StepBrief
from peer.commands import offline_audit
from peer.export.batch_replay import DOUBTFUL, BatchReplay, FalseUpdate, Reexecute, RequestedUpdates
from peer.export.run_export import batch_path, payload_path
from peer.worker.supervisor import WorkerSupervisor
from protocol import codec
from protocol.blob_digest import blob_digest
from protocol.errors import UserError
from protocol.identity import peer_id
from protocol.messages import Proposal
from protocol.verdicts import OBJECTIVE_CODES_FIRST, Verdict
from tests.clients.runs import BASE_JOB, body, client_spec
from tests.clients.test_client_runs import ADAMW
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.worker_protocol import AuditReply, AuditRequest, OpenJobRequest, WorkerDied, WorkerFailed

JOB, TRAINER = b"j" * 32, b"t" * 32
BODY = codec.encode(body())
LISTED = codec.encode(Manifest((ListedBody(blob_digest(BODY), len(BODY)),)))
PAYLOAD = b"payload"
PROPOSAL = Proposal(JOB, 4, bytes(32), blob_digest(PAYLOAD), len(PAYLOAD), None, None, None, None, b"declared")


@dataclass
class Export:
    """An export whose replay is at round 4 of a run."""

    folder: Path
    spec: JobSpec = field(default_factory=client_spec)
    tokens: int = body().tokens
    read: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, data in {batch_path: LISTED, payload_path: PAYLOAD}.items():
            self.write(name(blob_digest(data)), data)
        self.write(batch_path(blob_digest(BODY)), BODY)
        self.host = JobModelStore(self.folder / "models")
        self.host.round_directory(BASE_JOB, 10).mkdir(parents=True)

    def write(self, name: str, data: bytes) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(data)

    def judge(self, reexecute: Reexecute | None) -> RequestedUpdates:
        brief = codec.encode(StepBrief(4, blob_digest(LISTED), self.tokens, ADAMW))
        signed = SimpleNamespace(signer=TRAINER, body=codec.encode(PROPOSAL))
        closed: Any = SimpleNamespace(job=JOB, round=4, brief=brief, proposals=(signed,))
        found = RequestedUpdates("the requests")
        BatchReplay(self.folder, self.host, lambda name, digest: self._read(name), reexecute).judge_round(
            self.spec, closed, found
        )
        assert found.updates == 1
        return found

    def _read(self, name: str) -> bytes:
        self.read.append(name)
        return (self.folder / name).read_bytes()


def test_the_worker_gets_the_request_of_a_voter_and_each_file_is_checked_before(tmp_path: Path) -> None:
    export, asked = Export(tmp_path), list[tuple[OpenJobRequest, AuditRequest]]()

    def reexecute(opening: OpenJobRequest, request: AuditRequest) -> Verdict:
        asked.append((opening, request))
        return Verdict.ACCEPT

    found = export.judge(reexecute)
    assert (found.confirmed, found.first_confirmed, found.without_data) == (1, 4, 0)
    ((opening, request),) = asked
    assert opening.required_model == str(export.host.round_directory(BASE_JOB, 10)) and opening.spec == export.spec.encode()
    assert request.model_directory == str(export.host.round_directory(JOB, 4)) and request.declared.encoded == b"declared"
    assert {digest: Path(path).read_bytes() for digest, path in request.brief.files.items()} == {
        blob_digest(LISTED): LISTED,
        blob_digest(BODY): BODY,
    }
    assert Path(request.payload).read_bytes() == PAYLOAD
    digests = blob_digest(LISTED), blob_digest(BODY)
    assert export.read == [*map(batch_path, digests), payload_path(blob_digest(PAYLOAD))]


@pytest.mark.parametrize("lost", [LISTED, BODY])
def test_an_update_without_one_of_its_files_is_counted(tmp_path: Path, lost: bytes) -> None:
    export = Export(tmp_path)
    (tmp_path / batch_path(blob_digest(lost))).unlink()
    found = export.judge(lambda opening, request: Verdict.ACCEPT)
    assert (found.without_data, found.confirmed, found.unjudged) == (1, 0, {})


@pytest.mark.parametrize("large", [LISTED, BODY], ids=["manifest", "body"])
def test_a_file_that_is_larger_than_peers_fetch_is_not_read(tmp_path: Path, large: bytes) -> None:
    export, name = Export(tmp_path), batch_path(blob_digest(large))
    with (tmp_path / name).open("r+b") as stream:
        stream.truncate(1 << 30)
    found = export.judge(lambda opening, request: Verdict.ACCEPT)
    assert found.without_data == 1 and name not in export.read


@pytest.mark.parametrize(
    ("verdict", "reason", "meaning"),
    [
        (Verdict.REPLAY, "replay", "re-execution gave a different update"),
        (Verdict(OBJECTIVE_CODES_FIRST + 1), LOSS_DIFFERS.label, LOSS_DIFFERS.meaning),
    ],
)
def test_a_false_update_has_its_trainer_and_its_reason(tmp_path: Path, verdict: Verdict, reason: str, meaning: str) -> None:
    found = Export(tmp_path).judge(lambda opening, request: verdict)
    assert found.false_updates == [FalseUpdate(4, peer_id(TRAINER), reason, meaning)] and found.confirmed == 0


def test_a_doubtful_result_is_no_false_update(tmp_path: Path) -> None:
    found = Export(tmp_path).judge(lambda opening, request: Verdict.UNJUDGED)
    assert found.unjudged == {DOUBTFUL: 1} and not found.false_updates


def test_an_update_of_data_that_no_honest_voter_fetches_is_false(tmp_path: Path) -> None:
    found = Export(tmp_path, tokens=1).judge(lambda opening, request: Verdict.ACCEPT)
    assert [false.reason for false in found.false_updates] == ["malformed"]


def lose_base(export: Export) -> None:
    export.host.round_directory(BASE_JOB, 10).rmdir()


def need_tokenizer(export: Export) -> None:
    export.spec = replace(export.spec, tokenizer=b"k" * 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lose_base, f"the replay has no model of job {BASE_JOB.hex()[:16]}@10, which it changes"),
        (need_tokenizer, f"the export lacks the tokenizer {(b'k' * 32).hex()[:16]}: export the run at another peer"),
    ],
)
def test_an_export_that_lacks_what_a_job_needs_says_so(tmp_path: Path, change: Callable[[Export], None], reason: str) -> None:
    export = Export(tmp_path)
    change(export)
    assert export.judge(lambda opening, request: Verdict.ACCEPT).unjudged == Counter({reason: 1})


# The worker of an audit -------------------------------------------------------------------------------------------------


@dataclass
class FakeWorker:
    """A worker whose next replies are given. An exception is raised."""

    replies: list[Any]
    open_jobs: dict[bytes, object] = field(default_factory=dict)
    asked: list[type] = field(default_factory=list)

    async def ask(self, request: Any) -> Any:
        self.asked.append(type(request))
        if isinstance(request, OpenJobRequest):
            self.open_jobs[request.job] = request
            return None
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


OPENING = OpenJobRequest(JOB, b"spec", None, None)
REQUEST = AuditRequest(JOB, 4, TRAINER, "model", "payload", None, None, None)
REPLY = AuditReply(Verdict.ACCEPT, 0.0, 0.0, None)


async def test_a_job_is_opened_once_and_a_dead_worker_is_asked_again() -> None:
    fake = FakeWorker([WorkerDied("killed"), REPLY, REPLY])
    for _ in range(2):
        assert await offline_audit._ask(cast(WorkerSupervisor, fake), OPENING, REQUEST) == REPLY
    assert fake.asked == [OpenJobRequest, AuditRequest, AuditRequest, AuditRequest]


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([WorkerFailed("no room for the base")], "the worker refuses it: no room for the base"),
        ([WorkerDied("killed")] * 3, "the worker died 3 times"),
    ],
)
async def test_a_worker_that_cannot_re_execute_is_a_reason(replies: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        await offline_audit._ask(cast(WorkerSupervisor, FakeWorker(list(replies))), OPENING, REQUEST)


def test_an_audit_on_a_machine_without_torch_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "batches").mkdir()
    monkeypatch.setattr("peer.features.find_spec", lambda name: None)
    given = list[Reexecute]()

    def audit(folder: Path, progress: object, *, reexecute: Reexecute) -> None:
        given.append(reexecute)

    monkeypatch.setattr(offline_audit, "audit_export", audit)
    offline_audit.audit_with_worker(tmp_path, lambda done, total: None)
    with pytest.raises(UserError, match=r"the package torch is not installed: run `pip install 'folkmoot\[train\]'`"):
        given[0](OPENING, REQUEST)
