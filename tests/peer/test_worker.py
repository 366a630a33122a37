from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from peer.worker import supervisor as supervisor
from peer.worker.supervisor import WorkerSupervisor
from protocol.errors import LocalProtocolError, UserError
from protocol.sampling import SAMPLES_MAX, EndReason, SamplingOptions
from protocol.verdicts import Verdict
from tests.waiting import patience, run_process
from training import worker_protocol
from training.data.default_text import default_text
from training.engines.request_handlers import WorkerContext
from training.job_spec import JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.transformer import ModelSpec
from training.worker_protocol import WorkerDied, WorkerFailed

MODEL = ModelSpec(context=32, width=32, layers=1, heads=2, kv_heads=1, hidden=48)
SPEC = JobSpec(name="t", data=bytes(32), model=MODEL, local_steps=3, batch=4, micro_batch=4, rounds=10)
JOB, TRAINER = hashlib.sha256(b"job").digest(), b"t" * 32
SECONDS_MAX = 120.0  # an import of torch on a busy machine, and more

# A worker without torch. It follows commands in the text of an OpenJobRequest's path, and logs its requests.
FAKE = """
import os, signal, sys, time
from training import worker_protocol
from training.engines.request_handlers import WorkerContext
from training.worker_protocol import *
from training.engines.request_handlers import WorkerContext
log = open(sys.argv[1], "a", buffering=1)
log.write("start " + " ".join(sys.argv[2:]) + "\\n")
output = os.fdopen(os.dup(1), "wb")
def send(number, message): output.write(worker_protocol.encode_frame(number, message)); output.flush()
def read():
    header = sys.stdin.buffer.read(8)
    if not header: os._exit(0)
    length, number = worker_protocol.parse_header(header)
    return number, worker_protocol.parse_body(sys.stdin.buffer.read(length), messages_to_worker(REQUESTS))
send(0, WorkerInfo("fake", 1))
while True:
    number, request = read()
    what = getattr(request, "text", None) or getattr(request, "model_directory", None) or request.TAG
    if what == "cancel": continue  # of a request that is over
    log.write(what + "\\n")
    if what == "die": sys.stderr.write("last words\\n"); sys.stderr.flush(); os._exit(7)
    elif what == "killed": os.kill(os.getpid(), signal.SIGKILL)
    elif what == "garbage": output.write(b"\\xff" * 100); output.flush()
    elif what == "hang": log.write(read()[1].TAG + "\\n"); send(number, RequestFailed("cancelled"))
    elif what == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN); send(number, OpenJobReply(0, 0, 0)); time.sleep(1000)
    elif isinstance(request, OpenJobRequest):
        for _ in range(3): send(number, WorkerHeartbeat())
        send(number, OpenJobReply(1, 2, 3))
    elif isinstance(request, EvaluateRequest): send(number, EvaluateReply({"bits": 2.5}, 0.1))
    elif isinstance(request, ProposeRequest): send(number, ProposeReply(bytes(32), 1, bytes(32), 1.0, 0.1))
    elif isinstance(request, AuditRequest): send(number, AuditReply(0, 0.0, 0.1))
    else: send(number, RequestFailed("no such thing"))
"""


@dataclass
class Fake:
    worker: WorkerSupervisor
    journal: Path

    def asked(self) -> list[str]:
        return self.journal.read_text().splitlines()

    async def until(self, what: str) -> None:
        # Another process writes the journal, so a test can only wait for its lines.
        while what not in self.asked():  # noqa: ASYNC110
            await trio.sleep(0.001)


def open_job(what: str, job: bytes = JOB) -> worker_protocol.OpenJobRequest:
    return worker_protocol.OpenJobRequest(job, SPEC.encode(), what, None)


def evaluate(what: str = "model") -> worker_protocol.EvaluateRequest:
    return worker_protocol.EvaluateRequest(JOB, what)


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[Fake]:
    async with running_fake(tmp_path) as fake:
        yield fake


def fake_worker(folder: Path) -> tuple[WorkerSupervisor, Path]:
    """Return a worker of this kind with its journal."""
    script, journal = folder / "fake.py", folder / "journal"
    script.write_text(FAKE)
    return WorkerSupervisor(command=[sys.executable, str(script), str(journal)], backoff_seconds=0.001), journal


@asynccontextmanager
async def running_fake(tmp_path: Path) -> AsyncIterator[Fake]:
    worker, journal = fake_worker(tmp_path)
    with patience(SECONDS_MAX):
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            yield Fake(worker, journal)
            nursery.cancel_scope.cancel()


@pytest.mark.real("processes")
async def test_a_request_gets_its_reply_after_any_number_of_beats(fake: Fake) -> None:
    assert await fake.worker.ask(open_job("text")) == worker_protocol.OpenJobReply(1, 2, 3)
    assert await fake.worker.ask(evaluate()) == worker_protocol.EvaluateReply({"bits": 2.5}, 0.1)
    assert fake.worker.description == worker_protocol.WorkerInfo("fake", 1) and fake.worker.restarts == 0


@pytest.mark.real("processes")
async def test_a_failed_request_says_why_and_the_worker_lives_on(fake: Fake) -> None:
    with pytest.raises(WorkerFailed, match="no such thing"):
        await fake.worker.ask(worker_protocol.PingRequest())
    assert await fake.worker.ask(evaluate()) and fake.worker.restarts == 0


async def order_of(fake: Fake, waiting: list[worker_protocol.WorkerRequest[Any]]) -> list[str]:
    """Return the order in which a busy worker carries out requests that arrived one after another."""
    async with trio.open_nursery() as nursery, trio.open_nursery() as busy:
        busy.start_soon(fake.worker.ask, evaluate("hang"))
        await fake.until("hang")
        for request in waiting:
            nursery.start_soon(fake.worker.ask, request)
            await trio.testing.wait_all_tasks_blocked()
        busy.cancel_scope.cancel()
    assert fake.asked()[1:3] == ["hang", "cancel"]
    return fake.asked()[3:]


@pytest.mark.real("processes")
async def test_the_own_proposal_goes_before_audits_and_audits_before_evaluation(fake: Fake) -> None:
    waiting: list[worker_protocol.WorkerRequest[Any]] = [
        evaluate("evaluate"),
        worker_protocol.AuditRequest(JOB, 0, TRAINER, "audit", "p", "b", None, None),
        evaluate("evaluate again"),
        worker_protocol.ProposeRequest(JOB, 0, TRAINER, "propose", None, None, "b"),
    ]
    assert await order_of(fake, waiting) == ["propose", "audit", "evaluate", "evaluate again"]


@pytest.mark.real("processes")
@pytest.mark.parametrize("what, why", [("die", "exit status 7: last words"), ("killed", "SIGKILL"), ("garbage", "invalid frame")])
async def test_when_the_worker_dies_its_request_fails_and_the_next_one_finds_a_new_worker_with_the_jobs_open(
    fake: Fake, what: str, why: str
) -> None:
    await fake.worker.ask(open_job("text"))
    with pytest.raises(WorkerDied, match=why):
        await fake.worker.ask(evaluate(what))
    assert await fake.worker.ask(evaluate()) == worker_protocol.EvaluateReply({"bits": 2.5}, 0.1)
    assert fake.worker.restarts == 1
    assert fake.asked()[-2:] == ["text", "model"] and len([line for line in fake.asked() if line.startswith("start")]) == 2


@pytest.mark.real("processes")
async def test_of_too_many_open_jobs_the_least_recently_used_one_is_closed_as_in_the_worker(fake: Fake) -> None:
    others = [bytes([number]) * 32 for number in range(supervisor.JOBS_MAX)]
    for job in (JOB, *others[:-1]):
        await fake.worker.ask(open_job("text", job))
    await fake.worker.ask(evaluate())
    await fake.worker.ask(open_job("text", others[-1]))
    assert list(fake.worker.open_jobs) == [*others[1:-1], JOB, others[-1]]


@pytest.mark.real("processes")
async def test_requests_that_wait_survive_the_death_of_the_worker(fake: Fake) -> None:
    async def dies() -> None:
        with pytest.raises(WorkerDied):
            await fake.worker.ask(worker_protocol.ProposeRequest(JOB, 0, TRAINER, "die", None, None, "b"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dies)
        nursery.start_soon(fake.worker.ask, evaluate())
    assert fake.worker.restarts == 1


@pytest.mark.real("processes")
async def test_a_kill_out_of_the_blue_is_taken_for_lack_of_memory_and_halves_the_micro_batch(fake: Fake) -> None:
    await fake.worker.ask(open_job("text"))
    for expected in (2, 1, 1):
        with pytest.raises(WorkerDied):
            await fake.worker.ask(evaluate("killed"))
        await fake.worker.ask(evaluate())
        starts = [line for line in fake.asked() if line.startswith("start")]
        assert starts[-1] == f"start --engine pytorch --threads 1 --micro-batch-max {expected}"


@pytest.mark.real("processes")
async def test_a_request_beyond_its_deadline_ends_the_worker(fake: Fake) -> None:
    with pytest.raises(WorkerDied, match="took longer than"):
        await fake.worker.ask(evaluate("hang"), deadline_seconds=0.05)
    assert await fake.worker.ask(evaluate())


@pytest.mark.real("processes")
async def test_a_silent_worker_is_ended(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENCE_SECONDS_MAX", 0.05)
    with pytest.raises(WorkerDied, match="silent"):
        await fake.worker.ask(evaluate("hang"))


@pytest.mark.real("processes")
async def test_a_cancelled_request_is_dropped_by_the_worker_which_lives_on(fake: Fake) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.worker.ask, evaluate("hang"))
            await fake.until("hang")
            scope.cancel()
    assert await fake.worker.ask(evaluate()) == worker_protocol.EvaluateReply({"bits": 2.5}, 0.1)
    assert fake.asked()[1:] == ["hang", "cancel", "model"] and fake.worker.restarts == 0


@pytest.mark.real("processes")
async def test_a_waiting_request_that_is_cancelled_never_reaches_the_worker(fake: Fake) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fake.worker.ask, evaluate("hang"))
        await fake.until("hang")
        with trio.move_on_after(0):
            await fake.worker.ask(evaluate("never"))
        nursery.cancel_scope.cancel()
    await fake.worker.ask(evaluate())
    assert fake.asked()[1:] == ["hang", "cancel", "model"]


@pytest.mark.real("processes")
async def test_the_queue_is_bounded(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "QUEUE_MAX", 0)
    with pytest.raises(LocalProtocolError):
        await fake.worker.ask(evaluate())


@pytest.mark.real("processes")
async def test_an_idle_worker_is_pinged(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PING_SECONDS", 0.001)
    await fake.worker.ask(evaluate())
    await fake.until("ping")


@pytest.mark.real("processes")
async def test_stopping_leaves_no_process_and_fails_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.05)
    async with running_fake(tmp_path) as fake:
        worker, pid = fake.worker, fake.worker.pid
        await worker.ask(open_job("stubborn"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)
    with pytest.raises(WorkerDied, match="stopped"):
        await worker.ask(evaluate())


@pytest.mark.real("descriptors of this process run out")
async def test_a_worker_for_which_there_is_no_descriptor_starts_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker, _ = fake_worker(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with patience(SECONDS_MAX):
        async with trio.open_nursery() as nursery:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                nursery.start_soon(worker.run)
                while caplog.text.count("Too many open files") <= supervisor.STARTS_MAX:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await worker.ask(evaluate()) == worker_protocol.EvaluateReply({"bits": 2.5}, 0.1)
            nursery.cancel_scope.cancel()


@pytest.mark.real("processes")
@pytest.mark.parametrize("command", [["/nowhere/python"], [sys.executable, "-c", "raise SystemExit('no torch here')"]])
async def test_a_worker_that_never_starts_is_a_clear_error(command: list[str]) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            await nursery.start(WorkerSupervisor(command=command, backoff_seconds=0.001).run)
    (error,) = caught.value.exceptions
    assert isinstance(error, UserError) and ("no torch here" in str(error) or "/nowhere/python" in str(error))


@pytest.mark.real("processes")
async def test_a_request_to_a_worker_that_never_starts_fails_with_the_reason() -> None:
    """The daemon may log the failed request before its own end, so this line must name the cause."""
    worker, failed = WorkerSupervisor(command=["/nowhere/python"], backoff_seconds=0.001), list[str]()

    async def ask() -> None:
        with pytest.raises(worker_protocol.WorkerFailed) as refused:
            await worker.ask(evaluate())
        failed.append(str(refused.value))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        with pytest.raises(UserError) as caught:
            await worker.run()
    await ask()
    assert failed == [str(caught.value)] * 2


# The real worker process


@dataclass
class Files:
    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def digest(self, name: str) -> bytes:
        return hashlib.sha256((self.folder / name).read_bytes()).digest()

    def write(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "text").write_bytes(default_text()[:20_000])
    ReplicatedModel.initial(JOB, SPEC).save(tmp_path / "model")
    return Files(tmp_path)


@pytest.mark.real("processes")
async def test_the_real_worker_started_in_any_folder_proposes_and_accepts_its_own_proposal_but_not_another(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files.folder)
    worker = WorkerSupervisor()
    with patience(SECONDS_MAX):
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            opened = await worker.ask(worker_protocol.OpenJobRequest(JOB, SPEC.encode(), files.path("text"), None))
            assert opened.train_tokens == 18_000 and opened.held_out_tokens == 2_000
            model, buffer = files.path("model"), files.path("buffer")
            proposed = await worker.ask(worker_protocol.ProposeRequest(JOB, 0, TRAINER, model, None, None, buffer))
            assert files.digest("buffer") == proposed.buffer_digest
            audit = worker_protocol.AuditRequest(JOB, 0, TRAINER, model, f"{buffer}.payload", buffer, None, None)
            own = await worker.ask(audit)
            assert own.verdict is Verdict.ACCEPT and own.relative_error < 1e-5
            foreign = await worker.ask(replace(audit, trainer=b"u" * 32))
            assert foreign.verdict is Verdict.REPLAY and foreign.relative_error > 0.1
            evaluated = await worker.ask(worker_protocol.EvaluateRequest(JOB, model))
            assert evaluated.figures["held_out_bits_per_byte"] == pytest.approx(8.5, abs=1)
            # A request for a proposal is served before the text ends, and leaves the text unchanged.
            text = worker_protocol.GenerateRequest(
                JOB, model, "The ", SamplingOptions(max_tokens=1_000, temperature=1.0, stop=("no model says this by chance",))
            )
            slices = [await worker.ask(replace(text, text_number=1))]
            assert not slices[0].is_over, "a text longer than a slice"
            again = await worker.ask(worker_protocol.ProposeRequest(JOB, 0, TRAINER, model, None, None, files.path("again")))
            assert again.payload_digest == proposed.payload_digest
            while not slices[-1].is_over:
                slices.append(
                    await worker.ask(replace(text, text_number=1, told_characters=sum(len(done.text) for done in slices)))
                )
            whole = "".join(done.text for done in slices)
            assert (await worker_protocol.generate_text(worker.ask, text)).text == whole
            # A worker that has lost the text, as after a restart, generates it again behind the delivered characters.
            lost = replace(text, text_number=9, told_characters=100)
            while not (part := await worker.ask(lost)).text:
                pass
            assert whole[100:].startswith(part.text)
            await check_samples(worker, model)
            with pytest.raises(WorkerFailed, match="is not open"):
                await worker.ask(worker_protocol.EvaluateRequest(bytes(32), model))
            with pytest.raises(WorkerFailed, match="nowhere"):
                await worker.ask(worker_protocol.EvaluateRequest(JOB, files.path("nowhere")))
            with pytest.raises(WorkerFailed, match="round"):
                await worker.ask(replace(audit, round=5))
            nursery.cancel_scope.cancel()


async def check_samples(worker: WorkerSupervisor, model: str) -> None:
    """Check samples and their scores, also while the worker computes proposals between their slices."""
    prompt = b"T\0h\0e\0"
    request = worker_protocol.GenerateTokensRequest(
        JOB, model, prompt, SamplingOptions(max_tokens=30, temperature=1.0, seed=5), SAMPLES_MAX
    )

    async def ask(request: worker_protocol.GenerateTokensRequest) -> worker_protocol.GenerateTokensReply:
        await worker.ask(worker_protocol.ProposeRequest(JOB, 0, TRAINER, model, None, None, f"{model}.again"))
        return await worker.ask(request)

    samples = await worker_protocol.generate_tokens(ask, request)
    assert await worker_protocol.generate_tokens(worker.ask, request) == samples
    assert len(set(samples)) == len(samples) and {sample.end for sample in samples} == {EndReason.LENGTH}
    for sample in samples[:2]:
        scored = await worker.ask(worker_protocol.ScoreTokensRequest(JOB, model, prompt + sample.tokens))
        logprobs = array("f", scored.logprobs)
        assert len(logprobs) == 32 and array("f", sample.logprobs)[:] == pytest.approx(logprobs[2:], abs=1e-5)
    with pytest.raises(WorkerFailed, match="the prompt has 33 tokens, at most 32 are allowed"):
        await worker.ask(replace(request, prompt=33 * b"T\0"))


def test_texts_of_one_model_share_its_parameters(tmp_path: Path) -> None:
    """Otherwise an engine would copy them at each switch between texts."""
    ReplicatedModel.initial(JOB, SPEC).save(tmp_path / "model")
    none: Any = None
    context = WorkerContext(none, lambda: None, 1)
    first, second = (context.shared_parameters(str(tmp_path / "model")) for _ in range(2))
    assert first is second
    del first, second
    assert not context._mapped, "a model that no text has is given back"


@pytest.mark.real("processes")
def test_the_real_worker_ends_with_its_pipe_and_keeps_stray_prints_out_of_the_conversation() -> None:
    script = "import peer.worker.main as w, torch; torch.get_num_threads = lambda: print('stray', flush=True) or 1; w.main()"
    ended = run_process([sys.executable, "-c", script], input=b"", capture_output=True, check=True)
    output, errors = ended.stdout, ended.stderr
    length, _ = worker_protocol.parse_header(output[:8])
    assert isinstance(
        worker_protocol.parse_body(output[8 : 8 + length], worker_protocol.messages_from_worker(worker_protocol.REQUESTS)),
        worker_protocol.WorkerInfo,
    )
    assert b"stray" in errors and b"stray" not in output


@pytest.mark.real("processes")
def test_the_daemons_side_does_not_import_torch() -> None:
    script = (
        "import sys, peer.worker.supervisor, training.replay.proposal_replay, "
        "training.formats.checkpoint; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
