"""This program reads the exports and data directories of each release since 0.3.0, and refuses others.

`tests/releases` keeps the files of each release from 0.3.0 on. The files of the present program are made for the test.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import trio

from peer.daemon.daemon import running_daemon
from peer.export.export_replay import audit_export
from peer.export.run_export import EXPORT_FORMAT, EXPORT_FORMAT_MIN, MANIFEST
from peer.settings.config import load_settings
from protocol.errors import UserError
from tests.releases.make import make
from tests.waiting import patience

pytestmark = pytest.mark.real("sockets, and a worker process")

KEPT = Path(__file__).parents[1] / "releases"
RELEASES = sorted(path.parents[1].name for path in KEPT.glob(f"*/export/{MANIFEST}"))


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files that `python -m tests.releases.make` makes with this program."""
    folder = tmp_path_factory.mktemp("release")
    trio.run(make, folder)
    return folder


@pytest.fixture(params=["present", *RELEASES])
def release(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("present") if request.param == "present" else KEPT / request.param


def test_an_export_of_each_release_is_reproduced(release: Path) -> None:
    said = json.loads((release / "export" / MANIFEST).read_text())
    verdict = audit_export(release / "export")
    assert verdict.state_root == said["state_root"]
    assert verdict.models == {job: model["root"] for job, model in said["models"].items()}
    assert len(verdict.models) == 2 and verdict.rounds == 4


@pytest.mark.parametrize(
    ("format", "way_out"),
    [(EXPORT_FORMAT + 1, "install a newer one"), (EXPORT_FORMAT_MIN - 1, "audit it with the program that wrote it")],
)
def test_an_export_of_another_format_is_refused_with_the_way_out(
    present: Path, tmp_path: Path, format: int, way_out: str
) -> None:
    folder = Path(shutil.copytree(present / "export", tmp_path / "other"))
    (folder / MANIFEST).write_text(json.dumps(json.loads((folder / MANIFEST).read_text()) | {"format": format}))
    reads = f"formats {EXPORT_FORMAT_MIN} to {EXPORT_FORMAT}" if EXPORT_FORMAT_MIN < EXPORT_FORMAT else f"format {EXPORT_FORMAT}"
    with pytest.raises(UserError, match=f"has format {format}, this program reads {reads}: {way_out}"):
        audit_export(folder)


async def test_a_peer_of_each_release_goes_on_where_it_was(release: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(release / "peer", tmp_path / "peer"))
    (directory / "identity.key").chmod(0o600)
    said = json.loads((release / "export" / MANIFEST).read_text())
    config = load_settings({"data_directory": directory}, {"HOME": str(tmp_path)}).config
    with patience():
        async with running_daemon(config) as daemon:
            driver = daemon.driver
            roots = {key.hex(): job.model_root.hex() for key, job in driver.state.jobs.jobs.items()}
            assert driver.node.ledger.certified_root.hex() == said["state_root"]
            assert roots.items() >= {job: model["root"] for job, model in said["models"].items()}.items()
            height = driver.state.height
            await daemon.api.run_test_round()
            while driver.state.height == height:
                await driver.block_applied.wait()
