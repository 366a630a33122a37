"""Exports of earlier programs are audited by this one; one of a later program is refused with the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from peer.export.replaying import audit
from peer.export.writing import FORMAT, MANIFEST
from protocol.errors import UserError

KEPT = Path(__file__).parents[1] / "exports"
EXPORTS = sorted(path.parent for path in KEPT.glob(f"*/{MANIFEST}"))


@pytest.mark.parametrize("folder", EXPORTS, ids=lambda folder: folder.name)
def test_an_export_that_an_earlier_program_wrote_is_reproduced(folder: Path) -> None:
    said = json.loads((folder / MANIFEST).read_text())
    verdict = audit(folder)
    assert verdict.state_root == said["state_root"]
    assert verdict.models == {job: model["root"] for job, model in said["models"].items()}
    assert len(verdict.models) == 2 and verdict.rounds == 4


def test_an_export_of_a_later_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXPORTS[-1], tmp_path / "later"))
    manifest = json.loads((folder / MANIFEST).read_text()) | {"format": FORMAT + 1}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}, this program reads format {FORMAT}: install a newer one$"):
        audit(folder)
