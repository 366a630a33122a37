"""Re-execution of client runs from the data in an export, by the same judgement as that of a voter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ledger.jobs import ClosedRound
from peer.export.run_export import batch_path, payload_path, tokenizer_path
from protocol import codec
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import peer_id
from protocol.messages import Proposal
from protocol.verdicts import VERDICT_MEANINGS, Verdict, verdict_label
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.worker_protocol import AuditRequest, BriefFiles, DeclarationFiles, OpenJobRequest

NO_WORKER = "this audit has no worker"
DOUBTFUL = "the result differs by little more than the tolerance, as on another machine"

# Function that re-executes a proposal of a job, and returns the verdict of a voter that did so. It raises `UserError` with the
# reason if it cannot.
Reexecute = Callable[[OpenJobRequest, AuditRequest], Verdict]
ReadBlob = Callable[[str, bytes], bytes]  # function that reads and checks a file of the export, given its name and digest


@dataclass(frozen=True, slots=True)
class FalseUpdate:
    """An accepted update that does not follow from its data."""

    round: int
    trainer: str  # peer id
    reason: str  # label of the verdict
    meaning: str  # meaning of the label, for people


@dataclass(slots=True)
class RequestedUpdates:
    """The accepted updates of a job on request. Peers delete the data of a round when it is over, unless they keep them."""

    description: str  # source of the updates, for people
    updates: int = 0  # number of all accepted updates
    without_data: int = 0  # number of updates whose data the export lacks
    confirmed: int = 0  # number of updates that re-execution confirmed
    first_confirmed: int | None = None  # first round with such an update
    unjudged: Counter[str] = field(default_factory=Counter)  # reason -> number of updates with data that were not re-executed
    false_updates: list[FalseUpdate] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchReplay:
    """The re-execution of updates whose data are in an export. `reexecute` is None in an audit without a worker."""

    folder: Path
    host: JobModelStore
    read_blob: ReadBlob
    reexecute: Reexecute | None

    def judge_round(self, spec: JobSpec, closed: ClosedRound, found: RequestedUpdates) -> None:
        """Re-execute the accepted updates of a round before the model's step, and add the results to `found`."""
        for signed in closed.proposals:
            found.updates += 1
            try:
                brief = self._read_brief(spec, closed.brief)
                if brief is None:
                    found.without_data += 1
                    continue
                verdict = self._judge(spec, closed, signed.signer, codec.decode_message(signed.body, (Proposal,)), brief)
            except RemoteProtocolError:  # Voters accepted an update of data that no honest voter fetches.
                verdict = Verdict.MALFORMED
            except UserError as error:
                found.unjudged[str(error)] += 1
                continue
            if verdict is Verdict.ACCEPT:
                found.confirmed += 1
                found.first_confirmed = closed.round if found.first_confirmed is None else found.first_confirmed
            elif verdict is Verdict.UNJUDGED:
                found.unjudged[DOUBTFUL] += 1
            else:
                found.false_updates.append(FalseUpdate(closed.round, peer_id(signed.signer), *_explain(verdict, spec)))

    def _read_brief(self, spec: JobSpec, brief: bytes) -> BriefFiles | None:
        """Return the brief with its files, whose digests are checked. None: the export lacks one of them.

        A file that is larger than peers fetch is not read, since no peer can have kept it.
        """
        files = dict[bytes, Path]()
        while True:
            sizes_max = spec.resolved_objective.round_files(spec, brief, files)
            missing = sizes_max.keys() - files.keys()
            if not missing:
                break
            for digest in sorted(missing):
                path = self.folder / batch_path(digest)
                if not path.is_file() or path.stat().st_size > sizes_max[digest]:
                    return None
                self.read_blob(batch_path(digest), digest)
                files[digest] = path.absolute()
        return BriefFiles(brief, {digest: str(path) for digest, path in files.items()})

    def _judge(self, spec: JobSpec, closed: ClosedRound, trainer: bytes, proposal: Proposal, brief: BriefFiles) -> Verdict:
        if self.reexecute is None:
            raise UserError(NO_WORKER)
        request = AuditRequest(
            job=closed.job,
            round=closed.round,
            trainer=trainer,
            model_directory=str(self.host.round_directory(closed.job, closed.round)),
            payload=str((self.folder / payload_path(proposal.payload)).absolute()),
            buffer=None,
            previous_buffer=None,
            previous_payload=None,
            declared=DeclarationFiles(proposal.declaration),
            brief=brief,
        )
        self.read_blob(payload_path(proposal.payload), proposal.payload)
        return self.reexecute(self._opening(closed.job, spec), request)

    def _opening(self, job: bytes, spec: JobSpec) -> OpenJobRequest:
        """Return the request to open a job in the worker. Raises `UserError` if the export lacks its model or tokenizer."""
        reference, directory = spec.resolved_objective.required_model(spec), None
        if reference is not None:
            directory = self.host.round_directory(reference.job, reference.round)
            if not directory.is_dir():
                raise UserError(f"the replay has no model of job {reference.job.hex()[:16]}@{reference.round}, which it changes")
        tokenizer = None
        if spec.tokenizer is not None:
            tokenizer = (self.folder / tokenizer_path(spec.tokenizer)).absolute()
            if not tokenizer.is_file():
                raise UserError(f"the export lacks the tokenizer {spec.tokenizer.hex()[:16]}: export the run at another peer")
        return OpenJobRequest(
            job,
            spec.encode(),
            text=None,
            tokenizer=str(tokenizer) if tokenizer else None,
            required_model=str(directory) if directory else None,
        )


def _explain(verdict: Verdict, spec: JobSpec) -> tuple[str, str]:
    """Return the label of a verdict and its meaning."""
    own = {reason.label: reason.meaning for reason in spec.resolved_objective.rejection_reasons}
    label = verdict_label(verdict, tuple(own))
    return label, (VERDICT_MEANINGS | own)[label]
