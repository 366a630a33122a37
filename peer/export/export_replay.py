"""The offline audit of an exported run: a replay from the genesis, which returns a verdict or names the first wrong file."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consensus.block import Block, block_digest, decode_block
from consensus.voter_set import VoterSet, verify_certificate
from features.export_query import ExportQuery
from features.json_output import print_json_result
from features.lazy_import import import_object
from ledger.core.genesis import Genesis
from ledger.ledger_state import StateTransition, decode_body
from peer.export.batch_replay import BatchReplay, Reexecute, RequestedUpdates
from peer.export.run_export import (
    EXPORT_FORMAT,
    EXPORT_FORMAT_MIN,
    GENESIS,
    MANIFEST,
    ExportSummary,
    block_path,
    certified_rounds,
    initial_model_digests,
    list_files,
    model_path,
    payload_path,
    set_path,
    tokenizer_path,
    write_manifest,
    write_models,
)
from peer.features import rules_of
from peer.settings.data_directory import storage_errors
from protocol import codec
from protocol.blob_digest import BlobHasher, blob_digest, hash_pieces
from protocol.errors import FolkmootError, MissingBlobError, StorageError, UserError
from protocol.identity import CachingVerifier, Ed25519Verifier, peer_id
from protocol.messages import Commit, Decision, Proposal
from storage.regular_files import open_regular, read_regular
from training import parameter_blob
from training.corpus import read_manifest
from training.job_spec import JobSpec
from training.model_store import JobModelStore

WRONG_DIGEST = "its bytes do not have the digest in its name"
Progress = Callable[[int, int], None]  # function that is called with (number of checked blocks, number of all blocks)


@dataclass(slots=True)
class VouchCounts:
    """Numbers of accepted updates of one job that have vouches.

    A vouch is a voter's signed statement that it re-executed the update.
    """

    updates: int = 0
    vouchers: Counter[str] = field(default_factory=Counter)  # peer id -> number of updates that it vouched for


@dataclass(frozen=True, slots=True)
class ExportVerdict:
    """The facts that an export proves."""

    network: str
    chain_id: str
    blocks: int
    signatures: int
    rounds: int
    proposals: int
    state_root: str  # last certified state root, which the replay has reproduced
    models: dict[str, str]  # job id -> model root, which the replay has reproduced
    names: dict[str, str]  # job id -> name of the job
    # id of a job with an initial model -> (id of the job, round) whose model this is
    initial_models: dict[str, tuple[str, int]]
    vouch_counts: dict[str, VouchCounts]  # id of a job with vouches -> the counts of its vouches
    requested_updates: dict[str, RequestedUpdates]  # by the id of a job on request that has any
    members: dict[str, str]  # peer id -> name of the member


def audit_export(
    folder: Path,
    progress: Progress = lambda done, total: None,
    seen: Callable[[StateTransition], None] = lambda transition: None,
    reexecute: Reexecute | None = None,
) -> ExportVerdict:
    """Replay an export and return its verdict.

    `seen` is called with each block's transition of the state. `reexecute` re-executes updates of client runs whose data are in
    the export; None leaves them unjudged. Raises `UserError` with the first file that is missing, changed or
    not part of the run.
    """
    if not (folder / GENESIS).is_file():
        raise UserError(f"{folder} is not an export: it has no {GENESIS}; create an export with `peer export FOLDER`")
    _require_readable_format(folder)
    try:
        with storage_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory(prefix="folkmoot-audit-") as scratch:
            return _ExportReplay(folder, Path(scratch), reexecute).run(progress, seen)
    except _BadFile as found:
        wrong = folder / _first_wrong_file(folder, found.name)
        raise UserError(f"{wrong}: {found if wrong.exists() else 'it is missing'}") from None


def _require_readable_format(folder: Path) -> None:
    """Raise `UserError` if this program does not read the export's format.

    A damaged manifest raises no error here: a later check finds it.
    """
    try:
        format = json.loads(read_regular(folder / MANIFEST))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if type(format) is int and not EXPORT_FORMAT_MIN <= format <= EXPORT_FORMAT:
        reads = (
            f"formats {EXPORT_FORMAT_MIN} to {EXPORT_FORMAT}" if EXPORT_FORMAT_MIN < EXPORT_FORMAT else f"format {EXPORT_FORMAT}"
        )
        way_out = "install a newer one" if format > EXPORT_FORMAT else "audit it with the program that wrote it"
        raise UserError(f"{folder / MANIFEST}: the export has format {format}, this program reads {reads}: {way_out}")


def _first_wrong_file(folder: Path, found: str) -> str:
    """Return the file to report for an error in the file `found`: another one whose digest differs from the manifest, or `found`.

    For example, a changed genesis causes an error in block 1. The manifest proves nothing, but it helps to find the cause.
    """
    if found == MANIFEST:
        return found
    try:
        files = json.loads(read_regular(folder / MANIFEST))["files"]
        wrong = [name for name, digest in sorted(files.items()) if _digest(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found
    return found if found in wrong or not wrong else wrong[0]


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _ExportReplay:
    def __init__(self, folder: Path, scratch: Path, reexecute: Reexecute | None) -> None:
        self._folder, self._scratch = folder, scratch
        self._host = JobModelStore(scratch / "models")
        self._batches = BatchReplay(folder, self._host, self._blob, reexecute)
        self._verifier = CachingVerifier(Ed25519Verifier())
        self._expected = {MANIFEST, GENESIS}
        with self._blaming(GENESIS):
            self._genesis = Genesis.decode(self._read(GENESIS))
            self._rules = rules_of(self._genesis, self._host, self._verifier)
            self._state = self._rules.genesis_state()
        self._parent = self._genesis.chain_id
        self._signatures = self._rounds = self._proposals = 0
        blobs = (folder / payload_path(bytes(32))).parent
        self._sizes = {file.stat().st_size for file in blobs.glob("*")}  # sizes in bytes of all payloads, also of initial models
        self._models: dict[bytes, tuple[str, int]] = {}  # digest of a model's parameters -> (job id, round) of the model
        self._starts: dict[str, tuple[str, int]] = {}
        self._vouched = defaultdict[str, VouchCounts](VouchCounts)
        self._requested: dict[str, RequestedUpdates] = {}

    def run(self, progress: Progress, seen: Callable[[StateTransition], None]) -> ExportVerdict:
        # Blocks after a missing block do not belong to the export.
        total = next(height for height in itertools.count() if not (self._folder / block_path(height + 1)).is_file())
        if not total:
            raise _BadFile(block_path(1), "the export holds no first block")
        block: Block | None = None
        for height in range(1, total + 1):
            with self._blaming(block_path(height)):
                block, transition = self._check_block(height)
                self._state = transition.finish_state(self._step(transition))
                seen(transition)
            progress(height, total)
        assert block is not None
        return self._conclude(block)

    def _check_block(self, height: int) -> tuple[Block, StateTransition]:
        decision = codec.decode(Decision, self._read(block_path(height)))
        block, state = decode_block(decision.block), self._state
        voters = VoterSet(state.members.voters)
        vote = verify_certificate(decision.certificate, Commit, voters, self._genesis.chain_id, self._verifier)
        expected = (
            height,
            block_digest(decision.block),
            self._parent,
            state.state_root,
            voters.hash,
            VoterSet(state.members.upcoming).hash,
        )
        if (vote.height, vote.block, block.parent, block.state_root, block.voters, block.next_voters) != expected:
            raise UserError("it does not follow the block before it")
        if block.height != height or (block.time_ms <= state.time_ms and height > 1):
            raise UserError("its height or time does not follow the block before it")
        self._check_parent_certificate(block)
        for digest in initial_model_digests(block.body):
            # An export may lack the model of a job that never began; for a started job, `_step` finds the missing file.
            if (self._folder / payload_path(digest)).is_file():
                self._check_start(digest)
        self._signatures += len(decision.certificate.signatures)
        self._parent = vote.block
        return block, self._rules.apply_block(state, block)

    def _check_parent_certificate(self, block: Block) -> None:
        certificate, voters = block.parent_certificate, VoterSet(self._state.members.previous)
        if certificate is None:
            if block.height > 1:
                raise UserError("it carries no certificate of its parent")
            return
        vote = verify_certificate(certificate, Commit, voters, self._genesis.chain_id, self._verifier)
        if (vote.height, vote.block) != (block.height - 1, block.parent):
            raise UserError("it carries the certificate of another block")

    def _step(self, transition: StateTransition) -> dict[bytes, bytes]:
        roots = {}
        for job in transition.started_jobs:
            encoded = transition.state.jobs.jobs[job].spec
            spec = JobSpec.decode(encoded)
            if spec.resolved_objective.on_request:
                self._requested[job.hex()] = RequestedUpdates(spec.resolved_objective.data_without_text)
            # An export may lack the job's data set and tokenizer.
            if spec.resolved_objective.data_exported and spec.data and (self._folder / set_path(spec.data)).is_file():
                for shard in read_manifest(spec.data, lambda digest, size_max: self._blob(set_path(digest), digest)).shards:
                    self._blob(set_path(shard), shard)
            if spec.tokenizer and (self._folder / tokenizer_path(spec.tokenizer)).is_file():
                self._blob(tokenizer_path(spec.tokenizer), spec.tokenizer)
            if spec.initial_model is not None:
                self._check_start(spec.initial_model)
                if (found := self._models.get(spec.initial_model)) is not None:
                    self._starts[job.hex()] = found
            roots[job] = self._host.create_model(job, encoded, self._part)
        for closed in transition.closed_rounds:
            self._rounds += 1
            self._proposals += len(closed.proposals)
            if (requested := self._requested.get(closed.job.hex())) is not None:
                spec = JobSpec.decode(self._state.jobs.jobs[closed.job].spec)
                self._batches.judge_round(spec, closed, requested)
            for vouchers in closed.outcome.vouchers.values():
                if vouchers:
                    vouched = self._vouched[closed.job.hex()]
                    vouched.updates += 1
                    vouched.vouchers.update(map(peer_id, vouchers))
            # The model step is undone, but the payloads of its updates belong to the export.
            if closed.job in transition.rolled_back:
                for signed in closed.proposals:
                    self._payload(codec.decode_message(signed.body, (Proposal,)).payload)
        for closed in transition.model_steps:
            roots[closed.job] = self._host.apply_round(closed, self._payload)
        for job, back in transition.rolled_back.items():
            roots[job] = self._host.roll_back(job, back.anchor.round, back.round)
        for job in roots.keys() - set(transition.started_jobs):
            state = transition.state.jobs.jobs[job]
            spec = JobSpec.decode(state.spec)
            # A payload has the size of this model, so it may be this model as the initial model of another job.
            if spec.resolved_objective.makes_text and 4 * spec.model.parameters in self._sizes:
                digest = hash_pieces(parameter_blob.iter_parameters(self._host.open_model(job, state.round))).digest()
                self._models.setdefault(digest, (job.hex(), state.round))
            earlier = [model.round for model in (*state.anchors, *state.saved_models)]
            self._host.prune_models(job, state.round, spec, earlier=earlier)
        return roots

    def _check_start(self, digest: bytes) -> None:
        """Check the digest of an initial model. The file may be large, so it is read in pieces."""
        name = payload_path(digest)
        self._expected.add(name)
        hasher = BlobHasher()
        try:
            with open_regular(self._folder / name) as stream:
                hasher.update_from_stream(stream)
        except OSError as error:
            raise _BadFile(name, error.strerror or "cannot be read") from None
        if hasher.digest() != digest:
            raise _BadFile(name, WRONG_DIGEST)

    def _part(self, digest: bytes, offset: int, length: int) -> bytes:
        with open_regular(self._folder / payload_path(digest)) as stream:
            stream.seek(offset)
            return stream.read(length)

    def _payload(self, digest: bytes) -> bytes:
        return self._blob(payload_path(digest), digest)

    def _blob(self, name: str, digest: bytes) -> bytes:
        data = self._read(name)
        if blob_digest(data) != digest:
            raise _BadFile(name, WRONG_DIGEST)
        return data

    def _conclude(self, last: Block) -> ExportVerdict:
        """Compare models, list of files and manifest of the export with those of the replay, and return the verdict."""
        state = self._state
        closings = decode_body(last.body).round_certificates if last.state_root != state.state_root else ()
        rounds = certified_rounds(state, {closing.job for closing in closings})
        made = self._scratch / "export"
        made.mkdir()
        models = write_models(made, self._host, state, rounds)
        for job in models:
            name = model_path(bytes.fromhex(job))
            if (made / name).read_bytes() != self._read(name):
                raise _BadFile(name, "it is not the model that the blocks produce")
        self._expected |= {model_path(bytes.fromhex(job)) for job in models}
        for name in list_files(self._folder):
            if name not in self._expected:
                raise _BadFile(name, "it does not belong to this export")
        genesis = self._genesis
        summary = ExportSummary(genesis.network, genesis.chain_id.hex(), state.height, last.state_root.hex(), models)
        self._check_manifest(summary)
        return ExportVerdict(
            genesis.network,
            genesis.chain_id.hex(),
            state.height,
            self._signatures,
            self._rounds,
            self._proposals,
            last.state_root.hex(),
            {job: str(model["root"]) for job, model in models.items()},
            {job: state.jobs.jobs[bytes.fromhex(job)].name for job in models},
            self._starts,
            {job: vouched for job, vouched in self._vouched.items() if vouched.updates},
            {job: requested for job, requested in self._requested.items() if requested.updates},
            {peer_id(key): member.name for key, member in state.members.members.items()},
        )

    def _check_manifest(self, summary: ExportSummary) -> None:
        """Check that a new manifest of the replay's files has the same bytes as the manifest of the export."""
        text = self._read(MANIFEST)
        made = self._scratch / "manifest"
        made.mkdir()
        for name in self._expected - {MANIFEST}:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).symlink_to((self._folder / name).resolve())
        write_manifest(made, summary)
        if (made / MANIFEST).read_bytes() != text:
            raise _BadFile(self._missing(text) or MANIFEST, "the manifest does not list the files of the export")

    def _missing(self, manifest: bytes) -> str | None:
        """Return a file that was removed from the export, or None.

        It is a file that the manifest lists beside all files of the replay.
        """
        try:
            listed = set(json.loads(manifest)["files"])
        except (ValueError, KeyError, TypeError):
            return None
        missing = listed - self._expected
        return min(missing) if missing and listed >= self._expected - {MANIFEST} else None

    def _read(self, name: str) -> bytes:
        self._expected.add(name)
        try:
            return read_regular(self._folder / name)
        except OSError as error:
            raise _BadFile(name, error.strerror or "cannot be read") from None
        except MemoryError:
            raise StorageError(f"{self._folder / name}: it does not fit into the memory of this machine") from None

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Attribute errors that are raised in this context to a file, unless the error names another file."""
        try:
            yield
        except (_BadFile, StorageError):
            raise
        except FolkmootError as error:
            raise _BadFile(name, str(error)) from None


class _BadFile(FolkmootError):
    """An error in the export, with the file in which the replay found it."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, slots=True)
class ExportedSetFiles:
    folder: Path

    def has_set(self, digest: bytes) -> bool:
        return (self.folder / set_path(digest)).is_file()

    def read_set(self, digest: bytes, size_max: int) -> bytes:
        if not self.has_set(digest):
            raise MissingBlobError(digest.hex())
        return (self.folder / set_path(digest)).read_bytes()


def ask_export(folder: Path, query: ExportQuery) -> Any:
    """Audit an export and return the query's answer. Raises `UserError` as `audit_export` does."""
    audit_export(folder, seen=query.observe_block)
    return query.answer(ExportedSetFiles(folder))


def main() -> int:
    query, folder, *arguments = sys.argv[1:]
    return print_json_result(lambda: ask_export(Path(folder), import_object(query)(*arguments)))


if __name__ == "__main__":
    sys.exit(main())
