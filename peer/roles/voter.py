"""The voter without an engine: it checks payloads, relies on vouches of other voters, and applies every update.

It never imports torch.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from ledger.audits.loss_commitments import LossOpening
from protocol import codec
from protocol.errors import MissingBlobError, RemoteProtocolError, UserError
from protocol.identity import Signed
from protocol.messages import Proposal
from protocol.verdicts import OBJECTIVE_CODES_FIRST, ReplayFinding, Verdict
from storage.disk_blob_store import JOB_BYTES
from training.job_spec import AuditMode, JobSpec
from training.round_context import OpenRoundContext, ReplayResult, RoundContext, WorkerClient

if TYPE_CHECKING:
    from training.replicated.error_feedback import FeedbackRecord
    from training.worker_protocol import AuditReply, AuditRequest, BriefFiles, DeclarationFiles, ProposeReply, ProposeRequest


SUFFIX = ".losses"

log = logging.getLogger("peer")


class Voter:
    @property
    def worker_client(self) -> WorkerClient | None:
        return None

    async def propose(self, round: OpenRoundContext) -> None:
        """Propose in jobs whose objective needs no worker, because their updates are known. Do nothing in other jobs."""
        if not round.spec.resolved_objective.needs_worker:
            from training.replay import proposal_replay

            with tempfile.TemporaryDirectory(dir=round.model_directory.parent) as folder:
                request = propose_request(round, Path(folder) / "buffer")
                done = await trio.to_thread.run_sync(
                    proposal_replay.make_proposal, request, proposal_replay.known_update(round.spec)
                )
                await publish_proposal(round, request, done)

    async def check_proposal(self, round: OpenRoundContext, signed: Signed, proposal: Proposal) -> Verdict:
        """Return the verdict of the cheap, exact checks of a proposal. All voters get the same verdict."""
        from training.replicated.codec import payload_bytes

        if proposal.payload_bytes > payload_bytes(round.model.layout, round.spec.payload_bits(round.model.rounds_in_model)):
            return Verdict.MALFORMED
        try:
            round.blobs.add_round_reference(proposal.payload, round.job, round.number)
            payload = await _fetched(round, proposal.payload, proposal.payload_bytes, signed.signer)
        except RemoteProtocolError:
            return Verdict.MALFORMED
        return await trio.to_thread.run_sync(round.model.check_proposal, signed.signer, proposal, payload)

    async def reexecute(self, round: OpenRoundContext, trainer: bytes, proposal: Proposal) -> Verdict:
        request = await audit_request(round, trainer, proposal)
        await round.record_replay_start(trainer)
        return vouch_verdict(await self.audit(round, request), round.spec)

    async def audit(self, round: RoundContext, request: AuditRequest) -> AuditReply:
        """Re-execute a proposal of a job that needs no worker. Raises `UserError` for other jobs."""
        if round.spec.resolved_objective.needs_worker:
            raise UserError("this peer must audit but has no worker: restart it with --role trainer")
        from training.replay import proposal_replay

        return await trio.to_thread.run_sync(proposal_replay.audit_proposal, request, proposal_replay.known_update(round.spec))

    async def replay(self, round: RoundContext, request: AuditRequest) -> ReplayResult:
        return replay_result(await self.audit(round, request))

    async def observe_round(self, round: OpenRoundContext) -> None:
        """Do nothing: a voter has no engine to evaluate models."""


def propose_request(round: OpenRoundContext, buffer_out: Path) -> ProposeRequest:
    """Return the request to the worker for our next update.

    It continues from the buffers of our last accepted proposal, if these are stored and valid. An update without earlier buffers
    is always allowed.
    """
    from training.worker_protocol import ProposeRequest

    record = round.model.records.get(round.me)
    previous = _previous(round, record)
    here = all(round.blobs.size(digest) is not None for digest in previous.values())
    inner = record.inner if record and record.inner and round.blobs.size(record.inner) is not None else None
    return ProposeRequest(
        job=round.job,
        round=round.number,
        trainer=round.me,
        model_directory=str(round.model_directory),
        **_paths(round, previous if here else {}),
        buffer_out=str(buffer_out),
        previous_inner=str(round.blobs.path(inner)) if inner else None,
        inner_out=f"{buffer_out}.inner" if round.spec.keeps_inner_state else None,
        declared_out=f"{buffer_out}.declaration" if round.spec.resolved_objective.declaration_type else None,
    )


def _previous(round: RoundContext, record: FeedbackRecord | None) -> dict[str, bytes]:
    """Return the digests of the buffers from which an update continues: field of the request -> digest.

    In jobs with estimates (`memory=estimates`), this is only the buffer, which is the momentum.
    """
    if record is None or record.buffer is None:
        return {}
    return {"previous_buffer": record.buffer} | ({} if round.spec.has_estimates else {"previous_payload": record.payload})


def _paths(round: RoundContext, previous: Mapping[str, bytes]) -> dict[str, Any]:
    fields = dict.fromkeys(("previous_buffer", "previous_payload"))
    return fields | {name: str(round.blobs.path(digest)) for name, digest in previous.items()}


async def publish_proposal(round: OpenRoundContext, request: ProposeRequest, done: ProposeReply) -> None:
    """Store the files of a proposal, then store and send the proposal itself."""
    proposal = proposal_of(round, done)
    # In jobs with sampled audits whose objective needs a worker, auditors compare losses, so the proposal commits to its loss.
    is_bound = round.spec.audit is AuditMode.SAMPLED and round.spec.resolved_objective.needs_worker
    opening = round.make_loss_opening(done.last_loss) if done.last_loss is not None and is_bound else None
    await trio.to_thread.run_sync(store_proposal_files, round, request, done, proposal, opening)
    await round.publish_proposal(proposal, opening)


def proposal_of(round: OpenRoundContext, done: ProposeReply) -> Proposal:
    return Proposal(
        job=round.job,
        round=round.number,
        model_root=round.model.root,
        payload=done.payload_digest,
        payload_bytes=done.payload_bytes,
        buffer=done.buffer_digest,
        feedback=done.feedback,
        inner=done.inner,
        inner_from=done.inner_from,
        declaration=done.declaration,
    )


def store_proposal_files(
    round: OpenRoundContext, request: ProposeRequest, done: ProposeReply, proposal: Proposal, opening: LossOpening | None = None
) -> None:
    """Move the worker's output files into the blob store.

    In jobs with sampled audits, the blobs that an audit needs are retained together, also the buffers from which the proposal
    continues.
    """
    blobs, owner = round.blobs, (round.job, round.number)
    if opening is not None:
        save_opening(Path(request.buffer_out).parent, opening)
    blobs.adopt_file(Path(request.payload_out), proposal.payload, lent=owner)
    if proposal.buffer is not None:
        blobs.mark_temporary(proposal.buffer, owner)
        blobs.adopt_file(Path(request.buffer_out), proposal.buffer)
    if request.inner_out is not None and proposal.inner is not None:
        blobs.mark_temporary(proposal.inner, owner)
        blobs.adopt_file(Path(request.inner_out), proposal.inner)
    declared = tuple(round.spec.declared_blobs(proposal.declaration))
    for digest in declared:
        assert request.declared_out is not None
        blobs.mark_temporary(digest, owner)
        blobs.adopt_file(Path(request.declared_out) / digest.hex(), digest)
    if request.declared_out is not None:
        shutil.rmtree(request.declared_out)
    if round.spec.audit is AuditMode.SAMPLED:
        named = (proposal.buffer, proposal.feedback, *declared)
        blobs.retain_round(*owner, [digest for digest in named if digest])


def vouch_verdict(audited: AuditReply, spec: JobSpec) -> Verdict:
    """Return the verdict that a vouch has after a re-execution.

    Errors above the tolerance and up to twice the tolerance are UNJUDGED, so that two honest machines do not contradict each
    other.
    """
    if audited.verdict is Verdict.REPLAY and audited.relative_error <= 2 * spec.replay_tolerance:
        return Verdict.UNJUDGED
    return audited.verdict


def replay_result(audited: AuditReply) -> ReplayResult:
    finding = ReplayFinding.MATCH if audited.verdict is Verdict.ACCEPT else ReplayFinding.MISMATCH
    if audited.verdict >= OBJECTIVE_CODES_FIRST:
        # An objective's own reason has the same code as a `Verdict` and as a `ReplayFinding`.
        finding = ReplayFinding(audited.verdict)
    return ReplayResult(finding, audited.relative_error, audited.last_loss)


async def audit_request(round: RoundContext, trainer: bytes, proposal: Proposal) -> AuditRequest:
    """Fetch the data for a re-execution. Raises `RemoteProtocolError` if the proposal's declaration is invalid."""
    from training.replay.inner_state import inner_bytes
    from training.replicated import error_feedback
    from training.replicated.codec import payload_bytes
    from training.worker_protocol import AuditRequest

    size, blobs = error_feedback.buffer_bytes(round.spec), round.blobs
    record = round.model.records.get(trainer) if proposal.feedback is not None else None
    previous = _previous(round, record)
    for digest in (proposal.buffer, previous.get("previous_buffer")):
        if digest is not None:
            await fetch_audit_data(round, digest, size, trainer)
    if record and "previous_payload" in previous:
        # The payload may have more bits in a warm-up round.
        bits = max(round.spec.payload_bits(taken) for taken in (0, round.spec.rounds))
        await round.fetch(previous["previous_payload"], payload_bytes(round.model.layout, bits), (trainer,))
    for digest in (proposal.inner, proposal.inner_from) if round.spec.keeps_inner_state else ():
        if digest is not None:
            await fetch_audit_data(round, digest, inner_bytes(round.spec), trainer)
    return AuditRequest(
        job=round.job,
        round=round.number,
        trainer=trainer,
        model_directory=str(round.model_directory),
        payload=str(blobs.path(proposal.payload)),
        buffer=str(blobs.path(proposal.buffer)) if proposal.buffer else None,
        **_paths(round, previous),
        inner=str(blobs.path(proposal.inner)) if proposal.inner else None,
        previous_inner=str(blobs.path(proposal.inner_from)) if proposal.inner_from else None,
        declared=await fetch_declared(round, trainer, proposal),
        brief=await fetch_brief(round, trainer),
    )


async def fetch_brief(round: RoundContext, *holders: bytes) -> BriefFiles:
    """Fetch the blobs that the round's brief names. `holders` are peers that may have them.

    Raises `RemoteProtocolError` if the brief or one of its blobs is malformed.
    """
    from training.worker_protocol import ROUND_FILES_MAX, BriefFiles

    objective, files = round.spec.resolved_objective, dict[bytes, str]()
    while missing := {
        digest: size_max
        for digest, size_max in objective.round_files(round.spec, round.brief, _as_paths(files)).items()
        if digest not in files
    }:
        if len(files) + len(missing) > ROUND_FILES_MAX:
            raise RemoteProtocolError("bad-brief", f"the round has more than {ROUND_FILES_MAX} files")
        files |= await _fetch_bounded(round, missing, "bad-brief", *holders)
    return BriefFiles(round.brief, files)


def _as_paths(files: Mapping[bytes, str]) -> dict[bytes, Path]:
    return {digest: Path(file) for digest, file in files.items()}


async def fetch_declared(round: RoundContext, trainer: bytes, proposal: Proposal) -> DeclarationFiles:
    """Fetch the blobs that a declaration names. Raises `RemoteProtocolError` if the declaration is invalid."""
    from training.worker_protocol import DeclarationFiles

    named = round.spec.declared_blobs(proposal.declaration)
    return DeclarationFiles(proposal.declaration, await _fetch_bounded(round, named, "bad-declaration", trainer))


async def _fetch_bounded(round: RoundContext, named: Mapping[bytes, int], reason: str, *holders: bytes) -> dict[bytes, str]:
    """Fetch blobs with these most bytes, and return their files by digest.

    Raises `RemoteProtocolError` with this reason for a larger blob.
    """
    files = dict[bytes, str]()
    for digest, size_max in named.items():
        await fetch_audit_data(round, digest, size_max, *holders)
        size = round.blobs.size(digest)
        if size is not None and size > size_max:  # a larger blob with this digest was stored for another purpose
            raise RemoteProtocolError(reason, f"a blob of {size} bytes, at most {size_max} are allowed")
        files[digest] = str(round.blobs.path(digest))
    return files


async def _fetched(round: RoundContext, digest: bytes, size: int, trainer: bytes) -> bytes:
    """Fetch and return a payload.

    A stored copy for audits may be deleted before it is read: the payload is then fetched again.
    """
    await round.fetch(digest, size, (trainer,))
    try:
        return await trio.to_thread.run_sync(read_bounded_blob, round, digest, size)
    except MissingBlobError:
        await round.fetch(digest, size, (trainer,))
        return await trio.to_thread.run_sync(read_bounded_blob, round, digest, size)


def read_bounded_blob(round: RoundContext, digest: bytes, size_max: int) -> bytes:
    """Return a fetched blob.

    Raises `RemoteProtocolError` if the blob has more than `size_max` bytes. A blob that was stored for another purpose may be
    larger. At most `size_max + 1` bytes are read.
    """
    data = round.blobs.read_range(digest, 0, size_max + 1)
    if len(data) > size_max:
        raise RemoteProtocolError("bad-blob", f"{round.blobs.size(digest)} bytes, {size_max} at most are expected")
    return data


async def fetch_audit_data(round: RoundContext, digest: bytes, size_max: int, *holders: bytes) -> None:
    """Fetch a blob for a round or for the re-execution of a proposal, from `holders` first.

    It is stored until the votes on the round, or its audits, are over.
    """
    round.blobs.mark_temporary(digest, round.blob_owner)
    await round.fetch(digest, size_max, holders)


def save_opening(folder: Path, opening: LossOpening) -> None:
    """Write an opening with its secret to a file.

    The file may be lost with the machine's power: the trainer then only loses a reward.
    """
    opening_path(folder, opening.job, opening.round, opening.trainer).write_bytes(codec.encode(opening))


def read_opening(folder: Path, job: bytes, number: int, trainer: bytes) -> LossOpening | None:
    """Return the stored opening, or None if its file is missing or damaged."""
    path = opening_path(folder, job, number, trainer)
    try:
        found: LossOpening = codec.decode(LossOpening, path.read_bytes())
        return found
    except (OSError, RemoteProtocolError) as error:
        log.warning("%s cannot be read (%s): the reward of that round is lost", path, error)
        return None


def list_opening_files(folder: Path) -> set[Path]:
    return set(folder.glob(f"*{SUFFIX}"))


def delete_files(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def opening_path(folder: Path, job: bytes, number: int, trainer: bytes) -> Path:
    return folder / f"{round_file_prefix(job, number)}{trainer.hex()}{SUFFIX}"


def round_file_prefix(job: bytes, number: int) -> str:
    """Return the first part of the names of a round's files.

    It contains the trainer's key, because a peer may have files of an old key.
    """
    return f"{job[:JOB_BYTES].hex()}-{number}-"
