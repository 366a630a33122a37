"""Assembly of a snapshot from parts. Each part is checked on arrival, so that a false part identifies its sender. Sans-IO.

Each part is checked against an earlier one:

| part                       | checked against                                        |
| headers of H − 1 .. H + 1  | their certificates                                     |
| their blocks               | the headers' digests                                   |
| older headers              | the `parent` of the header above                       |
| modules                    | the state root in the header of H + 1                  |
| rows, by ranges            | the root of their table, in a module                   |
| manifests                  | the root of their model, in a module                   |
| parts of models            | their hashes in the manifest                           |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from consensus.block import block_digest, decode_header, header_digest
from consensus.effects import DecidedBlock
from consensus.light_client import VerifiedHeader
from ledger.ledger_state import (
    CERTIFIED_ROOTS_KEPT,
    LedgerRules,
    LedgerState,
    StoredState,
    UnsupportedModuleVersion,
    module_digest,
    state_root_over,
)
from ledger.snapshots.snapshot_server import ModelReceiver, ModelStore, decode_model_name, encode_model_name, models_in_state
from ledger.tables import TableAssembly, decode_range_name, encode_range_name, fetch_ranges
from protocol.codec import Length, decode, encode
from protocol.errors import RemoteProtocolError, StorageError
from protocol.limits import BLOCK_BYTES_MAX, HEADER_BYTES_MAX, MODEL_MANIFEST_BYTES_MAX
from protocol.messages import SnapshotContent

# Maximum bytes of a module in a snapshot: three times the size of full tables of members and jobs. A faulty peer can fill this
# much memory once.
SNAPSHOT_MODULE_BYTES_MAX: Final = 64 << 20

Headers = Annotated[tuple[Annotated[bytes, Length(1, HEADER_BYTES_MAX)], ...], Length(1, CERTIFIED_ROOTS_KEPT)]


@dataclass(frozen=True, slots=True)
class SnapshotPartKey:
    """The key of a request to a peer: one part of a snapshot, or an item that the peer sends in pieces."""

    content: SnapshotContent
    name: bytes = b""
    index: int = 0

    @property
    def in_pieces(self) -> bool:
        return self.content in _SIZES_MAX or self.content is SnapshotContent.ROWS


_SIZES_MAX = {
    SnapshotContent.BLOCK: BLOCK_BYTES_MAX,
    SnapshotContent.MODULE: SNAPSHOT_MODULE_BYTES_MAX,
    SnapshotContent.MANIFEST: MODEL_MANIFEST_BYTES_MAX,
}


@dataclass(frozen=True, slots=True)
class RestoredSnapshot:
    """A complete, verified snapshot.

    The models must be installed first, because no code uses them before the ledger is installed.
    """

    decisions: tuple[DecidedBlock, ...]  # decided blocks of H − 1, H and H + 1, for a state at height H
    state: LedgerState
    headers: tuple[bytes, ...]  # headers of earlier heights, descending, for peers that later request a snapshot from this peer
    models: tuple[ModelReceiver, ...]

    @property
    def height(self) -> int:
        return self.state.height

    def is_overtaken(self, applied: int, repairs: bool) -> bool:
        """Return whether single blocks were faster: this peer has already applied the snapshot's height.

        A snapshot that `repairs` a wrong state is always needed.
        """
        return self.height <= applied and not repairs

    def install_models(self) -> None:
        for model in self.models:
            model.install()


class SnapshotAssembly:
    """A snapshot while it is downloaded.

    `missing` holds the keys that can be requested now. The set grows when an arriving part names further parts.
    """

    def __init__(
        self, rules: LedgerRules, models: ModelStore, tip: tuple[VerifiedHeader, ...], digests: Mapping[str, bytes]
    ) -> None:
        # The state root binds the names, number and digests of modules. Without this check, this peer would request nonexistent
        # parts from honest peers.
        if state_root_over(digests) != tip[-1].header.state_root:
            raise RemoteProtocolError("bad-offer", f"the modules do not match the state root after height {tip[1].header.height}")
        self.tip = tip
        self.height = tip[1].header.height
        self._rules, self._models, self._digests = rules, models, digests
        self._blocks: dict[bytes, bytes] = {}
        self._modules: dict[str, bytes] = {}
        self._headers: list[bytes] = []
        self._roots = {proven.header.height - 1: proven.header.state_root for proven in tip[:2]}
        self._parent = tip[0].header.parent  # digest of the next missing header, in descending order of heights
        self._state: LedgerState | None = None
        self._roots_of_models: dict[tuple[bytes, int], bytes] = {}
        self._incoming: dict[bytes, ModelReceiver] = {}  # name of a model in requests -> receiver of its parts
        self._rows: dict[str, TableAssembly] = {}  # table -> its rows that have arrived
        self.missing: dict[SnapshotPartKey, None] = {
            SnapshotPartKey(SnapshotContent.BLOCK, proven.digest): None for proven in tip
        }
        self.missing |= {SnapshotPartKey(SnapshotContent.MODULE, name.encode()): None for name in digests}
        self._want_headers(self.height - 2)

    @property
    def snapshot_id(self) -> bytes:
        """Identifier of the snapshot: two snapshots of one height are equal if their identifiers are."""
        return self.tip[-1].digest

    def size_max(self, key: SnapshotPartKey) -> int:
        """Return the maximum size in bytes of the item with this key, which arrives in pieces."""
        if key.content is not SnapshotContent.ROWS:
            return _SIZES_MAX[key.content]
        return self._rows[decode_range_name(key.name)[0]].root.part_bytes_max

    def add_part(self, key: SnapshotPartKey, data: bytes) -> None:
        """Add a part. Raises `RemoteProtocolError` if `data` contradicts the certificates; the part is then still missing."""
        if key not in self.missing:
            return
        match key.content:
            case SnapshotContent.BLOCK:
                if block_digest(data) != key.name:
                    raise RemoteProtocolError("bad-part", "the block is not the certified one")
                self._blocks[key.name] = data
            case SnapshotContent.HEADERS:
                self._take_headers(key.index, data)
            case SnapshotContent.MODULE:
                self._take_module(key.name.decode(), data)
            case SnapshotContent.ROWS:
                table, of = decode_range_name(key.name)
                self._rows[table].add_range(of, data)
            case SnapshotContent.MANIFEST:
                model = decode_model_name(key.name)
                self._incoming[key.name] = self._models.start_receiving(*model, self._roots_of_models[model], data)
            case SnapshotContent.MODEL:
                self._incoming[key.name].add_part(key.index, data)
        del self.missing[key]
        if (
            self._state is None
            and len(self._modules) == len(self._digests)
            and not any(wanted.content is SnapshotContent.HEADERS for wanted in self.missing)
        ):
            roots = {height: self._roots[height] for height in sorted(self._roots)}
            stored = StoredState(self.height, self.tip[1].header.time_ms, self._modules, roots)
            try:
                self._state = self._rules.decode_state(encode(stored))
            except UnsupportedModuleVersion as error:
                raise StorageError(str(error)) from None
            except RemoteProtocolError as error:  # a quorum has certified these bytes, so the sender is not at fault
                problem = f"this program cannot read the state of the network ({error}): install a newer version"
                raise StorageError(problem) from None
            self._want_rows(self._state)
            # Models of running jobs are first, because rounds do not need the models of finished jobs.
            running = self._state.jobs.running()
            self._roots_of_models = models_in_state(self._state)
            wanted_first = sorted(self._roots_of_models.items(), key=lambda item: (item[0][0] not in running, item[0]))
            for (job, number), root in wanted_first:
                if not self._models.has_model(job, number, root):
                    self.missing[SnapshotPartKey(SnapshotContent.MANIFEST, encode_model_name(job, number))] = None
        if key.content is SnapshotContent.MANIFEST:
            parts = self._incoming[key.name].parts
            self.missing |= {SnapshotPartKey(SnapshotContent.MODEL, key.name, index): None for index in range(parts)}

    # Headers ---------------------------------------------------------------------------------------------------------

    def _want_headers(self, first: int) -> None:
        if first >= self._oldest_header:
            self.missing[SnapshotPartKey(SnapshotContent.HEADERS, index=first)] = None

    @property
    def _oldest_header(self) -> int:
        """Lowest height whose header is needed.

        A state has the state roots of these heights, and a candidate voter must name one of them.
        """
        return max(1, self.height - CERTIFIED_ROOTS_KEPT + 1)

    def _take_headers(self, first: int, data: bytes) -> None:
        headers = decode(Headers, data)[: first - self._oldest_header + 1]
        parent, roots = self._parent, {}
        for height, header in zip(range(first, 0, -1), headers, strict=False):
            if header_digest(header) != parent:
                raise RemoteProtocolError("bad-part", f"the header of height {height} is not the one that its child names")
            decoded = decode_header(header)
            parent, roots[height - 1] = decoded.parent, decoded.state_root
        # The assembly changes only after all headers are verified, so that another sender can still supply this part.
        self._parent = parent
        self._roots |= roots
        self._headers += headers
        self._want_headers(first - len(headers))

    # The ledger ------------------------------------------------------------------------------------------------------

    def _take_module(self, name: str, data: bytes) -> None:
        if module_digest(data) != self._digests[name]:
            raise RemoteProtocolError("bad-part", f"the module {name!r} does not match the state root")
        self._modules[name] = data

    # Tables ----------------------------------------------------------------------------------------------------------

    def _want_rows(self, state: LedgerState) -> None:
        self._rows = {name: TableAssembly(table) for name, table in state.tables.items() if table.root.rows}
        for name, rows in self._rows.items():
            self.missing |= {
                SnapshotPartKey(SnapshotContent.ROWS, encode_range_name(name, of)): None for of in fetch_ranges(rows.root)
            }

    # The end ---------------------------------------------------------------------------------------------------------

    def restored_snapshot(self) -> RestoredSnapshot | None:
        """Return the complete snapshot, or None while a part is missing."""
        if self.missing or self._state is None:
            return None
        for rows in self._rows.values():
            rows.install_rows()
        decisions = tuple(
            DecidedBlock(proven.header.height, proven.digest, self._blocks[proven.digest], proven.certificate)
            for proven in self.tip
        )
        return RestoredSnapshot(decisions, self._state, tuple(self._headers), tuple(self._incoming.values()))

    def discard_parts(self) -> None:
        for model in self._incoming.values():
            model.discard_parts()
