"""Builder of jobs from a person's request: the fields of the job, and its text as blobs."""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import trio

from consensus.voter_set import VoterSet
from features.lazy_import import import_object
from features.nearest_names import suggest_nearest
from ledger.core.genesis import TRAINER
from protocol import codec
from protocol.api import TrainRequest
from protocol.errors import UserError
from protocol.limits import AUDIT_WINDOW_MS_MAX
from training import corpus as data
from training.api.initial_model import InitialModel, resolve_initial_model
from training.data import default_text, token_shards, tokenizer
from training.data.text_files import TextFileReport, printable_path, read_text
from training.job_spec import AuditMode, JobSpec, complete_fields
from training.objectives.registry import find_objective, objective_names
from training.round_context import TrainingPeer
from training.safe_settings import unsafe_reason
from training.transformer import BYTE_VOCABULARIES, BYTES_WITH_END, ModelSpec, complete_model_fields

BUILT_IN_DATA = ""  # value of `TrainRequest.data` for the text inside every Python
LOCAL_DATA = "local"
BLOB_FETCH_SECONDS_MAX = 30.0  # timeout in seconds to fetch a blob: a tokenizer has some megabytes
# Fields of a job that `--set` cannot set: their values follow from other parts of the request.
FIELDS_NOT_SET_BY_NAME = frozenset(
    {
        "data",
        "tokenizer",
        "model",
        "objective",
        "name",
        "base",
        "objective_settings",
        "initial_model",
        "preparation",
    }
)


def build_job_spec(peer: TrainingPeer, request: TrainRequest, findings: TextFileReport) -> JobSpec:
    """Make the blobs of a new job (shards, manifest, tokenizer, parameters). Return the job's specification.

    Raises `UserError` for an unusable text, model or value.
    """
    start = resolve_initial_model(peer, request) if request.initial_model else None
    spec = _job_spec(peer, request, start, findings)
    return spec if start is None else start.publish_parameters(peer, spec)


def build_example_job(peer: TrainingPeer, request: TrainRequest) -> JobSpec:
    """Return the specification of a job that learns from a file with prompts and responses. Raises `UserError`."""
    builders = [kind.example_job_builder for kind in map(find_objective, objective_names()) if kind and kind.example_job_builder]
    if not builders:
        raise UserError(f"{request.examples}: this peer has no objective that learns from prompts and responses")
    return import_object(builders[0])(peer, request)


def _job_spec(peer: TrainingPeer, request: TrainRequest, start: InitialModel | None, findings: TextFileReport) -> JobSpec:
    said = parse_overrides(request.overrides) | ({"rounds": request.rounds} if request.rounds else {})
    if request.data == LOCAL_DATA:
        said["audit"] = AuditMode.OFF  # No other peer has the text.
    # Some defaults follow from the layers of the model, which is that of `start`, whatever context the request sets.
    fields = complete_fields(said if start is None else said | {"model": start.model}) | said
    spec = replace(JobSpec(name=request.name or "text", data=bytes(32), byzantine_max=byzantine_trainers_max(peer)), **fields)
    if start is None and "model.vocabulary" not in request.overrides:
        of_bytes = request.vocabulary in BYTE_VOCABULARIES
        known = request.vocabulary if of_bytes else max(request.vocabulary, BYTES_WITH_END)
        spec = replace(spec, model=replace(spec.model, vocabulary=known))
    spec = add_compression_warmup_rounds(spec, said) if start is None else _on_start(request, spec, start)
    if request.data == LOCAL_DATA:
        if request.vocabulary > BYTES_WITH_END:
            raise UserError(f"--vocabulary {request.vocabulary}: with local data the tokens are bytes; leave it out")
        if peer.worker_client is not None and not peer.local_data:
            raise UserError("this peer has no local data: start it with `peer run --local-data PATH`")
        spec = replace(spec, data=None).validated()
        require_safe_settings(peer, spec, request)
        if peer.worker_client is not None:
            own = peer.local_data
            data.require_enough_text(spec, sum(map(len, read_text(Path(own).expanduser(), findings=findings))), own)
        return spec
    keep = peer.blobs.add_bytes
    if request.data and token_shards.is_token_folder(Path(request.data).expanduser()):
        return _job_on_tokens(peer, spec, request, keep, start, said)
    spec = add_audits(peer, spec, request, said)
    pieces, bpe = _pieces(request), None
    if spec.tokenizer is not None:  # The job uses the tokenizer of the initial model.
        bpe = tokenizer.BpeTokenizer(fetch_job_blob(peer, spec.tokenizer))
    elif request.vocabulary > BYTES_WITH_END:
        made = tokenizer.train_bpe(pieces(TextFileReport()), request.vocabulary)
        bpe = tokenizer.BpeTokenizer(made)
        spec = replace(spec, tokenizer=keep(made), model=replace(spec.model, vocabulary=request.vocabulary))
    spec.validated()
    manifest = data.split_into_shards(pieces(findings), keep)
    data.require_enough_text(spec, manifest.size, request.data or "the built-in text")
    if bpe is not None:  # The manifest names the hash of the tokens, so that other peers can check their own tokens.
        with tempfile.TemporaryDirectory(prefix="tokens-", dir=peer.store.path.parent) as folder:
            text = Path(folder) / "text"
            data.assemble_text(manifest, peer.blobs.read_range, text)
            manifest = replace(manifest, tokens=data.tokens_digest(data.open_tokens(spec, text, bpe)))
    return replace(spec, data=keep(manifest.encode())).validated()


def add_compression_warmup_rounds(spec: JobSpec, said: Container[str]) -> JobSpec:
    """Set the default number of opening rounds with more bits, in a job without base.

    The job is unchanged if `said`, the fields that a person set, contains this field.
    """
    if "compression_warmup_rounds" in said:
        return spec
    return replace(spec, compression_warmup_rounds=spec.usual_compression_warmup_rounds)


def add_final_full_audit_rounds(spec: JobSpec, said: Container[str]) -> JobSpec:
    """Set the default number of last rounds with full audits, unless a person set that field."""
    if "final_full_audit_rounds" in said:
        return spec
    return replace(spec, final_full_audit_rounds=spec.usual_final_full_audit_rounds)


def add_audits(peer: TrainingPeer, spec: JobSpec, request: TrainRequest, said: Mapping[str, Any]) -> JobSpec:
    """Add audits to a job whose model is known.

    Raises `UserError` unless measurements show that the audits hold against the job's liars.
    """
    spec = add_final_full_audit_rounds(choose_sampled_audits(peer, spec, said), said)
    require_safe_settings(peer, spec, request)
    return spec


def choose_sampled_audits(peer: TrainingPeer, spec: JobSpec, said: Mapping[str, Any]) -> JobSpec:
    """Set sampled audits, unless a person set `audit`, they would take too long, or no measurement shows that they hold.

    Any member can invite trainers, and only voters are approved. All trainers without a vote therefore count as liars.
    """
    if "audit" in said or not spec.byzantine_max:
        return spec
    usual = replace(JobSpec(name="usual"), **complete_fields({**said, "audit": AuditMode.SAMPLED}))
    sampled = replace(spec, audit=usual.audit, audit_rate=usual.audit_rate, rule=usual.rule)
    sampled = add_final_full_audit_rounds(sampled, said)
    state, trainers = peer.state, count_trainers(peer)
    strangers = sum(TRAINER in member.roles for key, member in state.members.members.items() if key not in state.members.voters)
    judged = replace(sampled, byzantine_max=max(spec.byzantine_max, byzantine_trainers_max(peer)) + strangers)
    if unsafe_reason(judged, trainers) is not None or sampled.problem() is not None:
        return spec
    window_ms = peer.audit_window_ms(sampled)
    return sampled if window_ms <= AUDIT_WINDOW_MS_MAX else spec


def _on_start(request: TrainRequest, spec: JobSpec, start: InitialModel) -> JobSpec:
    """Add the model and the tokenizer of the initial model.

    Raises `UserError` if the request sets another model or vocabulary.
    """
    others = [name for name in request.overrides if name.startswith("model.")]
    if start.base is None and others == ["model.context"]:  # A job may change the length of training sequences.
        model = replace(start.model, context=spec.model.context)
        return start.apply_to_spec(spec, model if model.window is None else model.with_window(model.window))
    own_bytes = request.vocabulary == start.model.vocabulary and start.tokenizer is None
    if (request.vocabulary and not own_bytes) or (others and spec.model != start.model):
        said = f"--set {others[0]}={request.overrides[others[0]]}" if others else f"--vocabulary {request.vocabulary}"
        raise UserError(f"{said}: the job starts from the model of {start.name}, which fixes this value; leave it out")
    return start.apply_to_spec(spec, start.model)


def fetch_job_blob(
    peer: TrainingPeer, digest: bytes, size_max: int = tokenizer.TOKENIZER_BYTES_MAX, what: str = "the tokenizer"
) -> bytes:
    """Return a blob of a job, and fetch it from other peers if necessary. Call this function in a thread. Raises `UserError`."""

    async def fetch() -> bool:
        with trio.move_on_after(BLOB_FETCH_SECONDS_MAX):
            await peer.fetch_blob(digest, size_max)
            return True
        return False

    if not trio.from_thread.run(fetch):
        raise UserError(f"no connected peer has {what} {digest.hex()[:16]} of that job: connect to a peer that trained it")
    return peer.blobs.read_blob(digest, size_max)


def byzantine_trainers_max(peer: TrainingPeer, role: str = TRAINER) -> int:
    """Return how many members with this role a new job tolerates as faulty."""
    return min(VoterSet(peer.state.members.voters).faults_tolerated, max(0, (count_trainers(peer, role) - 1) // 2))


def count_trainers(peer: TrainingPeer, role: str = TRAINER) -> int:
    return sum(role in member.roles for member in peer.state.members.members.values())


def require_safe_settings(peer: TrainingPeer, spec: JobSpec, request: TrainRequest) -> None:
    """Raise `UserError` unless measurements show that the job holds against its liars. The ledger accepts all jobs."""
    is_accepted = request.accept_risk and spec.audit is AuditMode.SAMPLED
    problem = None if is_accepted else unsafe_reason(spec, count_trainers(peer))
    if problem:
        raise UserError(f"job {spec.name!r}: {problem}")


def parse_overrides(texts: dict[str, str], others: Iterable[str] = ()) -> dict[str, Any]:
    """Return typed values of the job fields that a person set; model fields are named as `model.width`.

    Raises `UserError` for an unknown field. The suggestions of the error include `others`, the fields that the caller reads
    itself.
    """
    overrides: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for name, text in texts.items():
        owner, target, field = (ModelSpec, model, name[6:]) if name.startswith("model.") else (JobSpec, overrides, name)
        kinds = get_type_hints(owner)
        if field not in kinds or field in FIELDS_NOT_SET_BY_NAME:
            free = [
                *sorted(others),
                *sorted(set(get_type_hints(JobSpec)) - FIELDS_NOT_SET_BY_NAME),
                *(f"model.{name}" for name in get_type_hints(ModelSpec)),
            ]
            raise UserError(f"unknown job field {name!r}{suggest_nearest(name, free)}")
        target[field] = parse_field(kinds[field], name, text)
    if model:
        overrides["model"] = replace(ModelSpec(), **complete_model_fields(model))
    return overrides


def parse_field(kind: Any, name: str, text: str) -> Any:
    """Return the typed value of a field from the text that a person typed. Raises `UserError`."""
    if type(None) in get_args(kind):
        if text.lower() == "none":
            return None
        kind = get_args(kind)[0]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{name} = {text!r} is neither true nor false")
        return text.lower() == "true"
    try:
        value = kind(text)
    except ValueError:
        if issubclass(kind, enum.Enum):
            raise UserError(f"{name} = {text!r} is invalid: choose one of {', '.join(kind)}") from None
        raise UserError(f"{name} = {text!r} is not a {'whole ' if kind is int else ''}number") from None
    if kind is int and abs(value) > codec.INTEGER_MAX:
        raise UserError(f"{name} = {printable_path(text)} is out of range: at most {codec.INTEGER_MAX} is allowed")
    return value


def _job_on_tokens(
    peer: TrainingPeer,
    spec: JobSpec,
    request: TrainRequest,
    keep: Callable[[bytes], bytes],
    start: InitialModel | None,
    said: Mapping[str, Any],
) -> JobSpec:
    """Return the specification of a job on a text that is tokenized already, with the tokenizer and vocabulary of this text."""
    if request.column:
        raise UserError(f"--column {request.column}: {request.data} is tokenized already; leave it out")
    if request.vocabulary:
        raise UserError(
            f"--vocabulary {request.vocabulary}: {request.data} is tokenized already, with its own vocabulary; leave it out"
        )
    folder = token_shards.open_token_folder(Path(request.data).expanduser())
    asked = request.overrides.get("model.vocabulary")
    if asked is not None and spec.model.vocabulary != folder.vocabulary:
        raise UserError(
            f"--set model.vocabulary={asked}: the tokens of {request.data} have vocabulary {folder.vocabulary}; leave it out"
        )
    made = None if folder.tokenizer is None else keep(folder.tokenizer)
    if start is not None and (made != spec.tokenizer or folder.vocabulary > spec.model.vocabulary):
        raise UserError(f"{request.data} has tokens of another tokenizer than {start.name}: give the text itself")
    known = folder.vocabulary if start is None else start.model.vocabulary
    spec = add_audits(peer, replace(spec, tokenizer=made, model=replace(spec.model, vocabulary=known)), request, said)
    spec = spec.validated()
    if folder.tokens < data.text_bytes_min(spec):
        few = f"{request.data} has {folder.tokens} tokens, but context {spec.model.context}"
        raise UserError(f"{few} needs at least {data.text_bytes_min(spec)}; give more data")
    manifest = data.split_into_shards(folder.iter_shard_bytes(), keep, tokenized=True)
    return replace(spec, data=keep(manifest.encode())).validated()


def _pieces(request: TrainRequest) -> Callable[[TextFileReport], Iterator[bytes]]:
    if request.data == BUILT_IN_DATA:
        return lambda findings: iter([default_text.default_text()])
    return lambda findings: read_text(Path(request.data).expanduser(), request.column, findings)
