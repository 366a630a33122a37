"""`peer audit` with a worker process, which re-executes updates of client runs whose data are in the export."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

from ledger.core.genesis import Genesis
from peer.export.export_replay import ExportVerdict, Progress, audit_export
from peer.export.run_export import BATCHES, export_run
from peer.features import require_engine
from peer.roles.trainer import WORKER_DEATHS_MAX
from peer.roles.voter import vouch_verdict
from peer.settings.data_directory import DataDirectory, storage_errors
from peer.worker.supervisor import WorkerSupervisor
from protocol.errors import UserError
from protocol.verdicts import Verdict
from storage.batch_store import BatchStore
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from training.engine_resources import EngineResources
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.worker_protocol import AuditReply, AuditRequest, OpenJobRequest, WorkerDied, WorkerFailed

ENGINE = "pytorch"


def audit_with_worker(folder: Path, progress: Progress) -> ExportVerdict:
    """Audit an export, with a worker if it has data to re-execute. Raises `UserError` as `audit_export` does."""
    if not (folder / BATCHES).is_dir():
        return audit_export(folder, progress)
    try:
        require_engine(ENGINE, "updates with data are re-executed by a worker")
    except UserError as error:
        return audit_export(folder, progress, reexecute=partial(_refuse, str(error)))
    return trio.run(_audit, folder, progress, strict_exception_groups=True)


def audit_data_directory(folder: Path, progress: Progress) -> ExportVerdict:
    """Export the run of a stopped peer into a temporary folder, and audit the export.

    Raises `UserError`, also if the peer runs.
    """
    directory = DataDirectory(folder)
    genesis = Genesis.decode(directory.read_genesis())
    with tempfile.TemporaryDirectory(prefix="folkmoot-audit-") as scratch:
        made = Path(scratch) / "export"
        with directory.lock(), contextlib.closing(LedgerStore(directory.ledger, genesis.chain_id)) as store:
            blobs, host = DiskBlobStore(directory.blobs, directory.buffers), JobModelStore(directory.models)
            # An audit deletes nothing, whatever the setting `keep_batches_gb` is.
            batches = BatchStore(directory.batches, sys.maxsize)
            with storage_errors(Path(scratch)):
                export_run(store, blobs, host, genesis, made, batches)
        return audit_with_worker(made, progress)


def _refuse(reason: str, opening: OpenJobRequest, request: AuditRequest) -> Verdict:
    raise UserError(reason)


async def _audit(folder: Path, progress: Progress) -> ExportVerdict:
    """Replay the export in a thread, and its re-executions in a worker process."""
    worker = WorkerSupervisor(EngineResources(), engine=ENGINE)

    def report(done: int, total: int) -> None:
        trio.from_thread.check_cancelled()  # Ctrl-C ends the thread after the present block.
        progress(done, total)

    def reexecute(opening: OpenJobRequest, request: AuditRequest) -> Verdict:
        return vouch_verdict(trio.from_thread.run(_ask, worker, opening, request), JobSpec.decode(opening.spec))

    verdict: ExportVerdict | UserError
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        try:
            verdict = await trio.to_thread.run_sync(partial(audit_export, folder, report, reexecute=reexecute))
        except UserError as error:  # A nursery would raise it in a group.
            verdict = error
        nursery.cancel_scope.cancel()
    if isinstance(verdict, UserError):
        raise verdict
    return verdict


async def _ask(worker: WorkerSupervisor, opening: OpenJobRequest, request: AuditRequest) -> AuditReply:
    """Return the worker's reply. Raises `UserError` if the worker refuses the job or the request, or dies each time."""
    for _ in range(WORKER_DEATHS_MAX):
        try:
            if opening.job not in worker.open_jobs:
                await worker.ask(opening)
            return await worker.ask(request)
        except WorkerDied:
            continue
        except WorkerFailed as error:
            raise UserError(f"the worker refuses it: {error}") from None
    raise UserError(f"the worker died {WORKER_DEATHS_MAX} times: see `memory_mb_max` of a peer")
