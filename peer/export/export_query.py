"""A feature's question to an export, in a process of its own: `python -m peer.export.export_query MODULE:CLASS FOLDER ARGUMENT…`
prints the answer as JSON. Everything in the export is checked on the way.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from features.export_query import ExportQuery
from features.json_output import print_json_result
from features.lazy_import import import_object
from peer.export.export_replay import audit_export
from peer.export.run_export import set_path
from protocol.errors import MissingBlobError


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
    """Raises `UserError` as `audit_export` does."""
    audit_export(folder, seen=query.observe_block)
    return query.answer(ExportedSetFiles(folder))


def main() -> int:
    query, folder, *arguments = sys.argv[1:]
    return print_json_result(lambda: ask_export(Path(folder), import_object(query)(*arguments)))


if __name__ == "__main__":
    sys.exit(main())
