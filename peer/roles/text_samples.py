"""Text of models on their way, as files: the newest of each job, and that of ten rounds before."""

from __future__ import annotations

from pathlib import Path

from protocol.sampling import SamplingOptions

SAMPLE_INTERVAL_ROUNDS = 10  # between two of them
SAMPLES_KEPT = 2
PROMPT, SAMPLING = "The ", SamplingOptions(max_tokens=120)  # always the same, so that the model alone makes the difference


def is_sample_due(folder: Path, job: bytes, round: int) -> bool:
    """Where rounds are skipped, the first one of the next ten is due."""
    last = _files(folder, job.hex())[-1:]
    return not last or round // SAMPLE_INTERVAL_ROUNDS > _round(last[0]) // SAMPLE_INTERVAL_ROUNDS


def save_sample(folder: Path, job: bytes, round: int, text: str) -> None:
    part = folder / f"{job.hex()}.part"
    part.write_bytes(text.encode())
    part.replace(folder / f"{job.hex()}-{round:08}.sample")
    for old in _files(folder, job.hex())[:-SAMPLES_KEPT]:
        old.unlink(missing_ok=True)


def saved_samples(folder: Path) -> list[tuple[str, int, str]]:
    """(job, round, text), the oldest of each job first."""
    found = []
    for path in _files(folder, "*"):
        found.append((path.stem.partition("-")[0], _round(path), path.read_bytes().decode(errors="replace")))
    return found


def _files(folder: Path, job: str) -> list[Path]:
    return sorted(folder.glob(f"{job}-*.sample"))


def _round(path: Path) -> int:
    return int(path.stem.partition("-")[2])
