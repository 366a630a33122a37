"""This program reads the exports and data directories of every program since 0.2.0, and refuses those of a later one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest

from curation.calls import CurationCalls
from peer.daemon.daemon import running
from peer.export.replaying import audit
from peer.export.writing import FORMAT, MANIFEST
from peer.settings.config import load
from protocol.errors import UserError
from tests.waiting import patience

KEPT = Path(__file__).parents[1] / "releases"
EXPORTS = sorted(path.parent for path in KEPT.glob(f"*/export/{MANIFEST}"))
PEERS = sorted(KEPT.glob("*/peer"))


@pytest.mark.parametrize("folder", EXPORTS, ids=lambda folder: folder.parent.name)
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
    with pytest.raises(UserError, match=f"has format {FORMAT + 1}, this program reads formats 2 to {FORMAT}: install"):
        audit(folder)


@pytest.mark.real("sockets")
@pytest.mark.parametrize("kept", PEERS, ids=lambda folder: folder.parent.name)
async def test_a_peer_of_an_earlier_program_goes_on_where_it_was(kept: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(kept, tmp_path / "peer"))
    (directory / "identity.key").chmod(0o600)
    said = json.loads((kept.parent / "export" / MANIFEST).read_text())
    config = load({"data_directory": directory}, {"HOME": str(tmp_path)}).config
    with patience():
        async with running(config) as daemon:
            driver = daemon.driver
            roots = {key.hex(): job.model_root.hex() for key, job in driver.state.jobs.jobs.items()}
            assert driver.ledger.certified_root.hex() == said["state_root"]
            assert roots.items() >= {job: model["root"] for job, model in said["models"].items()}.items()
            with pytest.raises(UserError, match="this network does not run the module curation: `upgrade curation 1`"):
                await cast(CurationCalls, daemon.api).projects()
            height = driver.state.height
            await daemon.api.test()
            while driver.state.height == height:
                await driver.applied.wait()
