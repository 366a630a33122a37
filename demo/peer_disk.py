"""What a stopped peer of a demo or a scenario has on its disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.demo_peers import DemoPeer
from ledger.core.genesis import Genesis
from ledger.jobs import Job
from ledger.ledger_state import LedgerState, decode_body
from peer.features import rules_of
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.errors import FolkmootError
from protocol.messages import Judgement, Vouch
from storage.ledger_store import LedgerStore
from training.corpus import DataManifest, text_path
from training.job_spec import JobSpec
from training.model_store import JobModelStore, round_directory
from training.replicated.replicated_model import ReplicatedModel


class PeerDisk:
    """A stopped peer's data directory."""

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
        return {(item.job.hex(), item.round): item.model_root.hex() for item in self._store.closed_rounds(1_000_000)}

    def job(self, job: str) -> Job:
        return self.state.jobs.jobs[bytes.fromhex(job)]

    def vouches(self, job: str) -> list[tuple[bytes, Judgement]]:
        """(voter, judgement) of each vouch in the blocks that this peer holds."""
        decided = filter(None, map(self._store.get_decision, self._store.state_roots()))
        closings = (closing for block in decided for closing in decode_body(block.decode().body).round_certificates)
        signed = (vouch for closing in closings if closing.job == bytes.fromhex(job) for vouch in closing.vouches)
        decoded = ((vouch.signer, codec.decode_message(vouch.body, (Vouch,))) for vouch in signed)
        return [(voter, judgement) for voter, vouch in decoded for judgement in vouch.judgements]

    def spec(self, job: str) -> JobSpec:
        return JobSpec.decode(self.job(job).spec)

    def model(self, job: bytes) -> ReplicatedModel:
        """The newest one."""
        return ReplicatedModel.open(round_directory(self._directory.models, job, self.state.jobs.jobs[job].round))

    def blob(self, digest: bytes) -> bytes:
        return (self._directory.blobs / digest.hex()).read_bytes()

    def text(self, spec: JobSpec) -> Path:
        """The file of what the job is trained on, as the peer assembled it."""
        assert spec.data is not None
        return text_path(self._directory.path / "texts", DataManifest.decode(self.blob(spec.data)))

    def held_out(self, job: str) -> dict[int, float]:
        return self.figures(job, "held_out_bits_per_byte")

    def figures(self, job: str, name: str) -> dict[int, float]:
        """By round, what this peer has measured under this name."""
        measured = self._store.measurements(bytes.fromhex(job))
        return {number: figures[name] for number, figures in measured.items() if name in figures}


@contextmanager
def open_peer_disks(peers: Iterable[DemoPeer]) -> Iterator[dict[str, PeerDisk | None]]:
    """By the name of each peer; None: its disk cannot be read."""
    disks = {peer.name: _open(peer) for peer in peers}
    try:
        yield disks
    finally:
        for disk in disks.values():
            if disk is not None:
                disk.close()


def _open(peer: DemoPeer) -> PeerDisk | None:
    try:
        return PeerDisk(peer.directory)
    except (FolkmootError, sqlite3.Error):
        return None


def roots_equal(disks: list[PeerDisk]) -> bool:
    """Whether all computed the same state root after every height, and the same model root after every round."""
    return all(all_equal(tables) for tables in ([disk.roots() for disk in disks], [disk.model_roots() for disk in disks]))


def all_equal(tables: list[dict[int, str]] | list[dict[tuple[str, int], str]]) -> bool:
    return bool(tables[0]) and all(table == tables[0] for table in tables)
