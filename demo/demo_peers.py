"""The peers and the options of a demo, and access to the disk of a stopped peer."""

from __future__ import annotations

import argparse
import hashlib
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ledger.core.genesis import Genesis
from ledger.jobs import Job
from ledger.ledger_state import LedgerState, decode_body
from peer.api import control_socket
from peer.commands.definitions.job_commands import job_overrides, preset_overrides
from peer.features import FULL_ROLE, rules_of
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.api import BULK_TRAFFIC_KINDS, PeerApi, StatsView
from protocol.errors import FolkmootError
from protocol.identity import Identity
from protocol.messages import Judgement, Vouch
from storage.ledger_store import LedgerStore, StoredRound
from training.corpus import DataManifest, text_path
from training.engine_implementations import USUAL_ENGINE
from training.job_spec import JobSpec
from training.model_store import JobModelStore, round_directory
from training.replicated.replicated_model import ReplicatedModel

TEXT = "text"  # value of `--rlhf` for three jobs: a base model, a reward model, and a policy
# Fields of a job for all engines: only `pytorch` has Muon, and others compile for a minute or more before their first proposal.
PORTABLE_FIELDS = {"inner": "adamw", "proposal_seconds": "300"}
DEFAULT_ROUNDS = JobSpec(name="demo").rounds


@dataclass
class DemoPeer:
    number: int
    identity: Identity
    directory: Path
    trains: bool
    lies: bool
    threads: int
    without_avx: bool  # True if the peer runs numpy without AVX instructions
    module: tuple[str, ...] = ("peer.cli",)  # module that `python -m` runs, with its first arguments
    # Variables that the peer's process gets in addition to this process's environment.
    environment: dict[str, str] = field(default_factory=dict)
    # Address on which the peer listens: the first start chooses the port, and later starts use the same port.
    address: str = "127.0.0.1:0"
    process: subprocess.Popen[bytes] | None = None
    memory_mb: float = 0.0  # largest measured memory of daemon and worker
    stats: StatsView | None = None
    stats_time: float = 0.0  # time at which `stats` was fetched, in seconds since the epoch
    bytes_sent_before: int = 0  # bytes that the peer had sent before the job started
    trains_as: str = "trainer"  # role of the peer if it trains and serves no annotators
    evaluates: bool = True  # True if the peer measures models when it is the watched peer
    engine: str = USUAL_ENGINE
    serves: tuple[str, ...] = ()  # flags of `peer run` for a peer that serves annotators; empty for other peers

    @property
    def name(self) -> str:
        work = "trainer" if self.trains else "server" if self.serves else "voter"
        return f"{'liar' if self.lies else work}-{self.number}"

    @property
    def role(self) -> str:
        if self.serves:
            return FULL_ROLE if self.trains else "annotator"
        return self.trains_as if self.trains else "voter"

    @property
    def client(self) -> PeerApi:
        return control_socket.make_client(self.directory)


@dataclass
class Demo:
    options: argparse.Namespace
    folder: Path
    peers: list[DemoPeer]
    started: float = field(default_factory=time.time)
    page: str = ""  # URL of the page `live`; empty without such a page

    @property
    def honest(self) -> list[DemoPeer]:
        return [peer for peer in self.peers if not peer.lies]

    @property
    def is_default(self) -> bool:
        """True if these are the default flags, for which `TARGET_BITS_PER_BYTE` holds."""
        options = self.options
        settings = (options.peers, options.malicious, options.trainers, options.preset, options.audit, options.set)
        return not options.data and options.rounds in (None, DEFAULT_ROUNDS) and settings == (4, 1, None, None, None, [])

    @property
    def overrides(self) -> dict[str, str]:
        """Fields of the job as in `--set`: those of the demo, then of the preset, then of flags.

        Later ones replace earlier ones.
        """
        options = self.options
        overrides = {
            "audit": "full",
            "seed": str(options.seed),
            "byzantine_max": str(max(options.malicious, (options.peers - 1) // 3)),
        }
        if {peer.engine for peer in self.peers} != {USUAL_ENGINE}:
            overrides |= PORTABLE_FIELDS
        said = job_overrides(options)
        overrides |= preset_overrides(options.preset, said)
        if getattr(options, "algorithm", None):
            overrides["algorithm"] = options.algorithm
        return overrides | ({"audit": options.audit} if options.audit else {}) | said

    @property
    def is_sampled(self) -> bool:
        """True if audits are sampled, so that false updates are found after the vote."""
        return self.overrides.get("audit") == "sampled"

    @property
    def watched(self) -> DemoPeer:
        """The honest peer that starts and measures the job, or imports the tasks.

        It is the first that trains or serves annotators.
        """
        return next(peer for peer in self.peers if (peer.trains or peer.serves) and not peer.lies)


def derive_identity(seed: int, number: int) -> Identity:
    """Derive a peer's key from the demo's seed, so that equal seeds assign equal data. Such keys are not secret."""
    return Identity(hashlib.sha256(f"folkmoot/demo/{seed}/{number}".encode()).digest())


def count_bytes_sent(peer: DemoPeer) -> int:
    stats = peer.stats
    return 0 if stats is None else sum(count for kind, count in stats.bytes_sent.items() if kind not in BULK_TRAFFIC_KINDS)


class PeerDisk:
    """The data directory of a stopped peer."""

    def __init__(self, path: Path) -> None:
        self._directory = DataDirectory(path)
        genesis = Genesis.decode(self._directory.read_genesis())
        self._rules = rules_of(genesis, JobModelStore(self._directory.models))
        self._store = LedgerStore(self._directory.ledger, genesis.chain_id)

    def close(self) -> None:
        self._store.close()

    @property
    def state(self) -> LedgerState:
        return self._rules.restore_state(self._store.encoded_state())

    def state_with_rows(self) -> LedgerState:
        state = self.state
        self._store.rows.attach_tables(state.tables)
        return state

    def roots(self) -> dict[int, str]:
        return {height: root.hex() for height, root in self._store.state_roots().items()}

    def model_roots(self) -> dict[tuple[str, int], str]:
        return {(item.job.hex(), item.round): item.model_root.hex() for item in self.closed_rounds()}

    def closed_rounds(self) -> list[StoredRound]:
        """Return the closed rounds of all jobs, also of those that the state has deleted."""
        return self._store.closed_rounds(1_000_000)

    def job(self, job: str) -> Job:
        return self.state.jobs.jobs[bytes.fromhex(job)]

    def vouches(self, job: str) -> list[tuple[bytes, Judgement]]:
        """Yield (voter, judgement) for each judgement in vouches for the job, from the blocks of this peer."""
        decided = filter(None, map(self._store.get_decision, self._store.state_roots()))
        closings = (closing for block in decided for closing in decode_body(block.decode().body).round_certificates)
        signed = (vouch for closing in closings if closing.job == bytes.fromhex(job) for vouch in closing.vouches)
        decoded = ((vouch.signer, codec.decode_message(vouch.body, (Vouch,))) for vouch in signed)
        return [(voter, judgement) for voter, vouch in decoded for judgement in vouch.judgements]

    def spec(self, job: str) -> JobSpec:
        return JobSpec.decode(self.job(job).spec)

    def model(self, job: bytes) -> ReplicatedModel:
        """Open the newest model of the job."""
        return ReplicatedModel.open(round_directory(self._directory.models, job, self.state.jobs.jobs[job].round))

    def blob(self, digest: bytes) -> bytes:
        return (self._directory.blobs / digest.hex()).read_bytes()

    def text(self, spec: JobSpec) -> Path:
        """Return the path of the job's data, which the peer has assembled from shards."""
        assert spec.data is not None
        return text_path(self._directory.path / "texts", DataManifest.decode(self.blob(spec.data)))

    def figures(self, job: str, name: str) -> dict[int, float]:
        """Return this peer's measurements of a job with this name: round -> value."""
        measured = self._store.measurements(bytes.fromhex(job))
        return {number: figures[name] for number, figures in measured.items() if name in figures}


@contextmanager
def open_peer_disks(peers: Sequence[DemoPeer]) -> Iterator[dict[str, PeerDisk | None]]:
    """Open the disks of stopped peers: name -> disk, or None if the disk cannot be read."""
    with ExitStack() as opened:
        disks: dict[str, PeerDisk | None] = {peer.name: None for peer in peers}
        for peer in peers:
            with suppress(FolkmootError, sqlite3.Error):
                disks[peer.name] = opened.enter_context(closing(PeerDisk(peer.directory)))
        yield disks


def all_equal(tables: list[dict[int, str]] | list[dict[tuple[str, int], str]]) -> bool:
    return bool(tables[0]) and all(table == tables[0] for table in tables)
