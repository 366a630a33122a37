"""A run as a folder that anybody can check offline: genesis, decided blocks with certificates, payloads, models.

| file | content |
|---|---|
| `manifest.json` | format, network, state root, models, and the SHA-256 of each file |
| `genesis.msgpack` | the genesis, whose hash is the chain id |
| `blocks/00000001.msgpack` | `Decision`: the block and the quorum's signatures on it |
| `payloads/<sha256>` | accepted updates, and initial models of jobs |
| `sets/<sha256>` | manifests and shards of data, for jobs whose draws are traceable |
| `tokenizers/<sha256>` | tokenizers of jobs whose tokens are not bytes |
| `batches/<sha256>` | data of steps of client runs, if the exporting peer keeps them (`keep_batches_gb`) |
| `<job>.safetensors` | parameters under the last certified state root |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from consensus.block import FIRST_HEIGHT
from consensus.effects import DecidedBlock
from features.lazy_import import import_object
from ledger.core.genesis import Genesis
from ledger.jobs import StartJob
from ledger.ledger_state import LedgerState, decode_body
from peer.features import rules_of
from protocol import codec
from protocol.api import RunExportView
from protocol.errors import MissingBlobError, RemoteProtocolError, StorageError, UserError
from protocol.identity import short_id
from protocol.limits import MESSAGE_BYTES_MAX
from protocol.messages import Decision, Proposal, Transaction
from storage.batch_store import BatchStore
from storage.disk_blob_store import DiskBlobStore
from storage.ledger_store import LedgerStore
from training import parameter_blob
from training.corpus import read_manifest
from training.data.tokenizer import TOKENIZER_BYTES_MAX
from training.formats import checkpoint
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.replicated.replicated_model import ReplicatedModel

Models = dict[str, dict[str, str | int]]

EXPORT_FORMAT = 6
FORMAT_WITHOUT_BATCHES = 5  # format of an export without the folder of batches: earlier programs read it, too
EXPORT_FORMAT_MIN = 5  # oldest readable format, that of release 0.3.0: tests/releases has one export of each release
FOUNDERS_NAMED_MAX = 4  # founders named in an error message
COPIED_BYTES = 1 << 20  # bytes in one read of a copy
MANIFEST = "manifest.json"
GENESIS = "genesis.msgpack"
BLOCKS, PAYLOADS, SETS, TOKENIZERS, BATCHES = "blocks", "payloads", "sets", "tokenizers", "batches"


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The head of the manifest.

    It describes the last certified state, which is the last one whose root a decided block contains.
    """

    network: str
    chain_id: str
    blocks: int
    state_root: str
    models: Models  # job id -> {"round": applied rounds, "root": model root}


def block_path(height: int) -> str:
    return f"{BLOCKS}/{height:08d}.msgpack"


def payload_path(digest: bytes) -> str:
    return f"{PAYLOADS}/{digest.hex()}"


def set_path(digest: bytes) -> str:
    return f"{SETS}/{digest.hex()}"


def tokenizer_path(digest: bytes) -> str:
    return f"{TOKENIZERS}/{digest.hex()}"


def batch_path(digest: bytes) -> str:
    return f"{BATCHES}/{digest.hex()}"


def model_path(job: bytes) -> str:
    return f"{job.hex()}.safetensors"


def require_new_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: choose a new one")


def state_to_export(store: LedgerStore, host: JobModelStore, genesis: Genesis, folder: Path) -> LedgerState:
    """Return the state after the last applied block.

    Raises `UserError` if the folder for the export is not empty or blocks are missing.
    """
    require_new_folder(folder)
    state = _newest_state(store, host, genesis)
    if store.get_decision(FIRST_HEIGHT) is None:
        first = next(height for height in range(state.height, 0, -1) if store.get_decision(height - 1) is None)
        raise UserError(f"this peer restored a snapshot and has no block below {first}: {_who_holds_all(state)}")
    return state


def _newest_state(store: LedgerStore, host: JobModelStore, genesis: Genesis) -> LedgerState:
    encoded = store.encoded_state()
    if encoded is None:
        raise UserError("no block is decided yet, so there is nothing to export")
    return rules_of(genesis, host).restore_state(encoded)


def export_run(
    store: LedgerStore,
    blobs: DiskBlobStore,
    host: JobModelStore,
    genesis: Genesis,
    folder: Path,
    batches: BatchStore | None = None,
) -> RunExportView:
    """Write the run up to the last applied block into a new folder. `batches` are the kept data of client runs, if any.

    Raises `UserError` if blocks or updates are missing, or the folder cannot be written.
    """
    state, existed = state_to_export(store, host, genesis, folder), folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BLOCKS).mkdir()  # fails if another export writes into this folder
        try:
            state, models = _newest_models(store, host, genesis, state, folder)
            if batches is not None:
                _write_batches(batches, state.height, folder)
            return _write(store, blobs, genesis, state, models, folder)
        except BaseException:
            _clear(folder, existed)
            raise
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None


def _clear(folder: Path, existed: bool) -> None:
    """Remove all files of a failed export, so that nobody takes the folder for a complete export."""
    for name in (BLOCKS, PAYLOADS, SETS, TOKENIZERS, BATCHES):
        shutil.rmtree(folder / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        _clear_models(folder)
        for name in (GENESIS, MANIFEST):
            (folder / name).unlink(missing_ok=True)
        if not existed:
            folder.rmdir()


def _clear_models(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def _who_holds_all(state: LedgerState) -> str:
    members = state.members
    founders = [members.current_key(key) for key, member in members.members.items() if member.admitted == 0]
    named = [f"{members.members[key].name} ({short_id(key)})" for key in founders if members.is_current_key(key)]
    such_as = f", such as a founder: {', '.join(named[:FOUNDERS_NAMED_MAX])}" if named else ""
    return f"run `peer export` at a peer that has all blocks and runs with payloads_gb 0{such_as}"


def _newest_models(
    store: LedgerStore, host: JobModelStore, genesis: Genesis, state: LedgerState, folder: Path
) -> tuple[LedgerState, Models]:
    """Write the models of the state, and return (state, models).

    The running peer may delete models of old rounds meanwhile. The result is then a newer state with its models.
    """
    while True:
        closings = (
            decode_body(_decided(store, state.height).decode().body).round_certificates
            if _certified(state) != state.state_root
            else ()
        )
        try:
            return state, write_models(folder, host, state, certified_rounds(state, {closing.job for closing in closings}))
        except StorageError:
            newer = _newest_state(store, host, genesis)
            if newer.height == state.height:
                raise
            state = newer
            _clear_models(folder)


def _certified(state: LedgerState) -> bytes:
    return state.certified_roots[state.height - 1]


def _decided(store: LedgerStore, height: int) -> DecidedBlock:
    decided = store.get_decision(height)
    assert decided is not None, "every applied block is stored"
    return decided


def _write(
    store: LedgerStore, blobs: DiskBlobStore, genesis: Genesis, state: LedgerState, models: Models, folder: Path
) -> RunExportView:
    (folder / PAYLOADS).mkdir()
    (folder / GENESIS).write_bytes(codec.encode(genesis))
    begun = {JobSpec.decode(job.spec).initial_model for job in state.jobs.jobs.values()}
    for height in range(1, state.height + 1):
        decided = _decided(store, height)
        (folder / block_path(height)).write_bytes(codec.encode(Decision(decided.block, decided.certificate)))
        body = decided.decode().body
        for digest in (*accepted_payloads(body), *initial_model_digests(body)):
            size = blobs.size(digest)
            if size is None and digest in initial_model_digests(body) and digest not in begun:
                continue  # the job of this initial model never began, or the ledger has dropped the job
            if size is None:
                text = f"this peer lacks an update that block {height} accepts, as after a snapshot"
                raise UserError(f"{text}: {_who_holds_all(state)}")
            with (folder / payload_path(digest)).open("wb") as stream:
                for offset in range(0, size, COPIED_BYTES):
                    stream.write(blobs.read_range(digest, offset, COPIED_BYTES))
    _write_sets(blobs, state, folder)
    _write_tokenizers(blobs, state, folder)
    summary = ExportSummary(genesis.network, genesis.chain_id.hex(), state.height, _certified(state).hex(), models)
    write_manifest(folder, summary)
    files = list_files(folder)
    last_job = max(models, key=lambda job: state.jobs.jobs[bytes.fromhex(job)].started_height, default=None)
    model = str(models[last_job]["root"]) if last_job else ""
    size = sum((folder / name).stat().st_size for name in files)
    return RunExportView(str(folder), state.height, summary.state_root, model, len(files), size)


def _write_sets(blobs: DiskBlobStore, state: LedgerState, folder: Path) -> None:
    """Write the data sets that this peer has with all their shards."""
    for job in state.jobs.jobs.values():
        spec = JobSpec.decode(job.spec)
        data = (
            spec.data
            if spec.resolved_objective.data_exported
            and spec.data
            and import_object(spec.resolved_objective.data_exported)(state, spec.data)
            else None
        )
        with contextlib.suppress(MissingBlobError, RemoteProtocolError):
            parts = [data, *read_manifest(data, blobs.read_blob).shards] if data else []
            if all(blobs.size(digest) is not None for digest in parts):
                (folder / SETS).mkdir(exist_ok=True)
                for digest in parts:
                    (folder / set_path(digest)).write_bytes(blobs.read_blob(digest, MESSAGE_BYTES_MAX))


def _write_tokenizers(blobs: DiskBlobStore, state: LedgerState, folder: Path) -> None:
    """Write the tokenizers that this peer has. Without its tokenizer, a model's tokens cannot be turned into text."""
    for job in state.jobs.jobs.values():
        digest = JobSpec.decode(job.spec).tokenizer
        if digest is not None and blobs.size(digest) is not None:
            (folder / TOKENIZERS).mkdir(exist_ok=True)
            (folder / tokenizer_path(digest)).write_bytes(blobs.read_blob(digest, TOKENIZER_BYTES_MAX))


def _write_batches(batches: BatchStore, height: int, folder: Path) -> None:
    """Write the kept data of rounds that were closed up to this height, without rounds with a damaged file."""
    for kept in batches.kept_rounds():
        if kept.height <= height and (files := batches.read_round(kept)):
            (folder / BATCHES).mkdir(exist_ok=True)
            for digest, data in files.items():
                (folder / batch_path(digest)).write_bytes(data)


def accepted_payloads(body: bytes) -> dict[bytes, int]:
    """Return digests and lengths of the payloads that the round certificates of a block accept."""
    closings = decode_body(body).round_certificates
    proposals = [codec.decode_message(signed.body, (Proposal,)) for closing in closings for signed in closing.proposals]
    return {proposal.payload: proposal.payload_bytes for proposal in proposals}


def initial_model_digests(body: bytes) -> dict[bytes, int]:
    """Return digests and lengths of the initial models of jobs that a block's transactions create.

    Some of these jobs may never begin.
    """
    transactions = [codec.decode_message(signed.body, (Transaction,)) for signed in decode_body(body).transactions]
    started = [codec.decode(StartJob, said.content) for said in transactions if said.kind == "job/start"]
    specs = [JobSpec.decode(start.spec) for start in started]
    return {spec.initial_model: parameter_blob.blob_bytes(spec) for spec in specs if spec.initial_model is not None}


def missing_payloads(store: LedgerStore, blobs: DiskBlobStore) -> dict[bytes, int]:
    """Return digests and lengths of accepted payloads and initial models that stored blocks name and this peer lacks.

    A peer that restored a snapshot never fetched them. The setting `payloads_gb` lets a peer delete payloads of old rounds.
    """
    missing: dict[bytes, int] = {}
    for height in range(FIRST_HEIGHT, store.decided_height + 1):
        if (decided := store.get_decision(height)) is not None:
            body = decided.decode().body
            named = accepted_payloads(body) | initial_model_digests(body)
            missing |= {digest: size for digest, size in named.items() if blobs.size(digest) is None}
    return missing


def certified_rounds(state: LedgerState, closed_by_last: set[bytes]) -> dict[bytes, int]:
    """Return the number of applied rounds of each job's model under the last certified root.

    The effect of the last block is usually not certified yet, so the rounds that it closed do not count. `closed_by_last` names
    the jobs of these rounds.
    """
    is_certified = _certified(state) == state.state_root
    rounds = {job: item.round - (job in closed_by_last) for job, item in state.jobs.jobs.items()}
    for job, item in state.jobs.jobs.items() if not is_certified else ():
        if item.undone_rounds and item.undone_rounds[-1].height == state.height:
            rounds[job] = item.undone_rounds[-1].last
    # Jobs that the last block started are not certified.
    started = {job: item.started_height for job, item in state.jobs.jobs.items()}
    return {job: number for job, number in sorted(rounds.items()) if is_certified or started[job] != state.height}


def write_models(folder: Path, host: JobModelStore, state: LedgerState, rounds: dict[bytes, int]) -> Models:
    """Write a safetensors file for each model that workers train, and return the models' rounds and roots."""
    models: Models = {}
    for job, number in rounds.items():
        spec = JobSpec.decode(state.jobs.jobs[job].spec)
        if spec.resolved_objective.needs_worker:
            model = ReplicatedModel.open(host.round_directory(job, number))
            origin = checkpoint.CheckpointOrigin(job, number, model.root)
            checkpoint.write_checkpoint(folder / model_path(job), spec, model.parameters, origin)
            models[job.hex()] = {"round": number, "root": model.root.hex()}
    return models


def write_manifest(folder: Path, summary: ExportSummary) -> None:
    format = EXPORT_FORMAT if (folder / BATCHES).is_dir() else FORMAT_WITHOUT_BATCHES
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in list_files(folder) if name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps({"format": format, **asdict(summary), "files": files}, indent=1) + "\n")


def list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
