"""The files that a demo leaves: `report.json`, a picture, a sample of text; and the places where it may write them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from demo.demo_peers import Demo
from demo.demo_report import DemoReport
from peer.settings.data_directory import storage_errors
from protocol.errors import UserError
from storage.regular_files import require_writable_kind


@contextmanager
def path_errors_as_user_errors(flag: str, path: Path, remedy: str) -> Iterator[None]:
    """What the operating system says about the path of a flag becomes a line for a person."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}; {remedy}") from None


def prepare_output_paths(folder: Path, json_file: str) -> None:
    """Makes the folder of the report and tries whether both places can be written: the end of a run would be too late."""
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        _make_folder(folder)
        if json_file:
            _try_file(Path(json_file))
    except UserError:
        for path in made:
            with suppress(OSError):
                path.rmdir()  # nothing is left of a demo that never started
        raise


def _make_folder(folder: Path) -> None:
    with path_errors_as_user_errors("--report", folder, "name a new folder where you may write"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--report {folder} is a file: name a new folder")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--report {folder} is not empty: name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _try_file(file: Path) -> None:
    with path_errors_as_user_errors("--json", file, "name a file in a folder that is there, where you may write"):
        require_writable_kind(file)
        was_there = file.exists()
        file.open("ab").close()
        if not was_there:
            file.unlink()


def write_report_files(demo: Demo, report: DemoReport, sample: str, export: str) -> None:
    demo.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**asdict(report), "export": export}, indent=1) + "\n"
    write_report(demo, text)
    if sample:
        write_text(demo.folder / "sample.txt", sample + "\n")
    if len(report.heldout_bits_per_byte) > 1:
        draw_loss(report, demo.folder / "loss.svg")
        draw_loss(report, demo.folder / "loss.png")


def write_report(demo: Demo, text: str) -> None:
    write_text(demo.folder / "report.json", text)
    if demo.options.json:
        write_text(Path(demo.options.json), text)


def write_text(file: Path, text: str) -> None:
    """Raises `StorageError`, such as for a full disk."""
    with storage_errors(file):
        file.write_text(text)


def draw_loss(report: DemoReport, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        report.heldout_rounds,
        report.heldout_bits_per_byte,
        color="#0b6e4f",
        linewidth=2,
        label=f"{report.voters} peers, {len(report.malicious)} lying ({report.attack})",
    )
    if report.baseline_bits_per_byte is not None:
        axes.axhline(report.baseline_bits_per_byte, color="#8a8a8a", linestyle="--", label="one process, same accepted samples")
    axes.set_xlabel("rounds decided")
    axes.set_ylabel("held-out bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    last = report.heldout_bits_per_byte[-1]
    axes.annotate(f"{last:.2f}", (report.heldout_rounds[-1], last), textcoords="offset points", xytext=(0, 8), ha="right")
    with storage_errors(file):
        figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
