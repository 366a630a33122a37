"""`python -m tests.releases.make`: a small export and the data directory of a peer of this release.

`tests/peer/test_releases.py` reads the files of each release and of the current program.

One peer decides a member's name, a scratch job, a job of a tiny language model, and one that starts from its model.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import trio

from peer import VERSION, cli
from peer.daemon.daemon import running_daemon
from peer.settings.config import load_settings
from protocol.api import TrainRequest
from tests.waiting import patience
from training.data.default_text import default_text

TINY = {
    "model.width": "8",
    "model.layers": "1",
    "model.heads": "1",
    "model.kv_heads": "1",
    "model.hidden": "8",
    "model.context": "16",
    "local_steps": "1",
    "batch": "1",
}
JOBS = (TrainRequest("tiny", "", 2, 0, TINY), TrainRequest("more", "", 1, 0, {"local_steps": "1", "batch": "1"}, "tiny"))
TEXT_BYTES = 20_000


async def make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch, patience():
        directory = Path(scratch) / "peer"
        text = Path(scratch) / "text"
        text.write_bytes(default_text()[:TEXT_BYTES])
        said = ["--data-dir", str(directory), "--network", "kept", "--listen", "127.0.0.1:0"]
        assert await trio.to_thread.run_sync(cli.main, ["init", *said]) == 0
        config = load_settings({"data_directory": directory, "name": "anna"}, {"HOME": scratch}).config
        async with running_daemon(config) as daemon:
            await daemon.api.run_test_round()
            for number, request in enumerate(JOBS):
                await daemon.api.start_job(replace(request, data=str(text)))
                while sum(job.state == "finished" for job in await daemon.api.jobs()) < number + 2:
                    with trio.move_on_after(0.2):
                        await daemon.driver.block_applied.wait()
            while daemon.driver.node.ledger.certified_root != daemon.driver.state.state_root:
                await daemon.driver.block_applied.wait()
            await daemon.api.export_run(str(folder / "export"))
        keep = shutil.ignore_patterns("texts", "*.lock", "*.sock", "*.safetensors", "*-shm", "address")
        shutil.copytree(directory, folder / "peer", ignore=keep)


def main() -> None:
    folder = Path(__file__).with_name(VERSION)
    shutil.rmtree(folder, ignore_errors=True)
    trio.run(make, folder)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
