"""A model and its provenance, from a running peer, from a stopped peer's data directory, or from an export.

It uses numpy and never torch.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from features.lazy_import import import_object
from ledger.core.genesis import Genesis
from ledger.jobs import ModelReference
from ledger.ledger_state import LedgerState
from peer.export.run_export import MANIFEST, tokenizer_path
from peer.features import register_features, rules_of
from peer.settings.data_directory import DataDirectory
from protocol.api import NEWEST
from protocol.errors import MissingBlobError, UserError
from protocol.verdicts import ABSENT
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from training.data.tokenizer import TOKENIZER_BYTES_MAX
from training.formats import checkpoint
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.objectives.objective import MergedModel
from training.replicated.tensor_layout import Float32Array, layout_of
from training.ternary import ternary_weights
from training.transformer import ModelSpec, model_tensors

ReadTokenizer = Callable[[bytes], bytes]  # digest of a tokenizer -> its bytes


@dataclass(frozen=True)
class ExportableModel:
    """A model with its parameters, tokenizer and provenance."""

    network: str
    chain_id: str
    job: bytes
    spec: JobSpec
    round: int  # number of applied rounds, also of those that were undone later
    root: bytes
    parameters: Float32Array
    tokenizer: bytes | None
    source_text: str  # origin of the model in words, for the model card
    data_origin: str = ""  # origin of the training data in words, for the model card
    accepted: int | None = None  # number of accepted proposals, or None if unknown
    rejected: int | None = None
    absent: int | None = None  # number of updates that were missing or late
    figures: Mapping[str, float] = field(default_factory=dict)
    rounds_in_model: int | None = None  # rounds in the model without undone ones, or None if unknown
    merged: MergedModel | None = None  # the transformer, if `parameters` change the model of another job
    newer_round: int = 0  # `round` of the job's newest model if audits may still undo that model, otherwise 0

    @property
    def model(self) -> ModelSpec:
        return self.merged.model if self.merged else self.spec.model

    @property
    def tensors(self) -> Mapping[str, Float32Array]:
        """The weights with which the transformer computes, by name, without tensors that the objective added."""
        found = self.merged.tensors if self.merged else layout_of(self.spec).tensor_views(self.parameters)
        return {
            name: ternary_weights(found[name]) if tensor.parameter.is_ternary else found[name]
            for name, tensor in model_tensors(self.model).items()
        }

    @property
    def makes_text(self) -> bool:
        return self.merged is not None or self.spec.resolved_objective.makes_text


def model_from_state(
    state: LedgerState, genesis: Genesis, store: LedgerStore, host: JobModelStore, read_tokenizer: ReadTokenizer, text: str
) -> ExportableModel:
    """Return the model that `text` names (see `choose_model`) from a peer's disk. Raises `UserError` if it is missing."""
    key, number, newer = choose_model(state, host, text)
    job = state.jobs.jobs[key]
    spec, model = JobSpec.decode(job.spec), host.open_decided_model(store, key, job, number)
    required, merged = required_model(spec), None
    if required is not None:
        of_base = state.jobs.jobs.get(required.job)
        if of_base is None:
            raise UserError(f"the network has deleted job {required.job.hex()[:8]}, whose model job {spec.name!r} changes")
        base = host.open_decided_model(store, required.job, of_base, required.round)
        merged = _merge(spec, model.parameters, base.spec, base.parameters)
    not_accepted = sum(map(Counter, job.rejected.values()), Counter[str]())
    return ExportableModel(
        network=genesis.network,
        chain_id=genesis.chain_id.hex(),
        job=key,
        spec=spec,
        round=model.round,
        root=model.root,
        parameters=model.parameters,
        tokenizer=None if spec.tokenizer is None else read_tokenizer(spec.tokenizer),
        source_text="a peer's own disk",
        data_origin=import_object(spec.resolved_objective.data_origin)(state, spec.data)
        if spec.resolved_objective.data_origin
        else "",
        accepted=sum(job.accepted.values()),
        rejected=not_accepted.total() - not_accepted[ABSENT],
        absent=not_accepted[ABSENT],
        figures=store.measurements(key).get(model.round, {}),
        rounds_in_model=model.rounds_in_model,
        merged=merged,
        newer_round=newer,
    )


def required_model(spec: JobSpec) -> ModelReference | None:
    """Return the model of another job that this job changes; None: the job has a model of its own."""
    kind = spec.resolved_objective
    return kind.required_model(spec) if kind.changes_required_model else None


def _merge(spec: JobSpec, parameters: Float32Array, base: JobSpec, of_base: Float32Array) -> MergedModel:
    tensors, others = layout_of(spec).tensor_views(parameters), layout_of(base).tensor_views(of_base)
    return spec.resolved_objective.merge_into_required(spec, tensors, base.model, others)


def choose_model(state: LedgerState, host: JobModelStore, text: str) -> tuple[bytes, int, int]:
    """Return the job and the round that `text` names, and the round of a newer model that is not final yet, or 0.

    | text | model |
    |---|---|
    | JOB | the job's newest final model |
    | JOB@ROUND | the model at this round |
    | JOB@newest | the newest model |
    | without JOB | the newest job of text |

    Raises `UserError` if the job is unknown or this peer lacks the model.
    """
    jobs = state.jobs.jobs
    is_newest = text.endswith(NEWEST)
    name, number = _asked(text.removesuffix(NEWEST), {job.name for job in jobs.values()})
    specs = {key: JobSpec.decode(job.spec) for key, job in jobs.items()}
    key = _chosen(name, specs, {key: job.started_height for key, job in jobs.items()})
    newest, newer = jobs[key].round, 0
    if number is None:
        number = newest if is_newest else state.final_round(key)
        newer = newest if number < newest else 0
    host.require_model(key, jobs[key], number)
    return key, number, newer


def model_from_data_directory(folder: Path, text: str) -> ExportableModel:
    """Return a model from the data directory of a stopped peer. Raises `UserError`, also if the peer runs."""
    directory = DataDirectory(folder)
    genesis = Genesis.decode(directory.read_genesis())
    host = JobModelStore(directory.models)

    def read(digest: bytes) -> bytes:
        try:
            return DiskBlobStore(directory.blobs, directory.buffers).read_blob(digest, TOKENIZER_BYTES_MAX)
        except MissingBlobError:
            raise UserError(
                f"this peer lacks the tokenizer {digest.hex()[:16]} of the job: run the peer, and try again while it runs"
            ) from None

    with directory.lock(), contextlib.closing(LedgerStore(directory.ledger, genesis.chain_id)) as store:
        encoded = store.encoded_state()
        if encoded is None:
            raise UserError(f"{directory.path}: no block is decided yet, so there is no model")
        return model_from_state(rules_of(genesis, host).restore_state(encoded), genesis, store, host, read, text)


def model_from_export(folder: Path, text: str) -> ExportableModel:
    """Return a model from an export.

    The export is not checked (`peer audit` checks it). Raises `UserError` if the model is missing.
    """
    register_features()  # specifications of jobs name objectives of features
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        rounds = {bytes.fromhex(job): int(model["round"]) for job, model in manifest["models"].items()}
        network, chain_id = str(manifest["network"]), str(manifest["chain_id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} is not an export, or is damaged: create an export with `peer export FOLDER`") from None
    read = {job: checkpoint.read_checkpoint(folder / f"{job.hex()}.safetensors") for job in rounds}
    specs = {job: spec for job, (spec, _, _) in read.items()}
    name, number = _asked(text.removesuffix(NEWEST), {spec.name for spec in specs.values()})
    key = _chosen(name, specs, {job: place for place, job in enumerate(specs)})
    spec, parameters, origin = read[key]
    if number not in (None, origin.round):
        raise UserError(f"the model of job {spec.name!r} at round {number} is not in the export, which has @{origin.round}")
    required, merged = required_model(spec), None
    if required is not None:
        if required.job not in read:
            raise UserError(f"the export has no model of job {required.job.hex()[:8]}, whose model job {spec.name!r} changes")
        base, of_base, _ = read[required.job]
        merged = _merge(spec, parameters, base, of_base)
    return ExportableModel(
        network=network,
        chain_id=chain_id,
        job=key,
        spec=spec,
        round=origin.round,
        root=origin.model_root,
        parameters=parameters,
        tokenizer=None if spec.tokenizer is None else _exported_tokenizer(folder, spec.tokenizer),
        source_text="an export, which `peer audit` checks",
        merged=merged,
    )


def _exported_tokenizer(folder: Path, digest: bytes) -> bytes:
    try:
        return (folder / tokenizer_path(digest)).read_bytes()
    except OSError:
        text = f"{folder} has no {tokenizer_path(digest)}"
        raise UserError(f"{text}: the exporting peer lacked it; export the model from a peer") from None


def _asked(text: str, names: set[str]) -> tuple[str, int | None]:
    """Return the two parts of `JOB@ROUND`, or the whole text as job if a job has this text as its name."""
    job, at, number = text.rpartition("@")
    if text in names or not at:
        return text, None
    if not re.fullmatch(r"\d{1,9}", number):
        raise UserError(f"--job {text!r}: write JOB or JOB@ROUND, where ROUND is a number")
    return job, int(number)


def _chosen(text: str, specs: Mapping[bytes, JobSpec], order: Mapping[bytes, int]) -> bytes:
    if not text:
        with_text = [key for key, spec in specs.items() if spec.resolved_objective.needs_worker and spec.has_text]
        if not with_text:
            raise UserError("no language model has been trained yet: start a job with `peer train`")
        return max(with_text, key=lambda key: (order[key], key))
    found = [key for key, spec in specs.items() if text == spec.name or key.hex().startswith(text.lower())]
    if len(found) != 1:
        known = ", ".join(f"{key.hex()[:8]} {spec.name!r}" for key, spec in specs.items()) or "none"
        raise UserError(f"{text!r} matches {len(found) or 'no'} jobs (choices: {known})")
    return found[0]
