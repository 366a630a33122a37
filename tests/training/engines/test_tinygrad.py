"""The engine tinygrad: its compiler, its cache of compiled programs, and its process without torch."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from peer import features
from protocol.errors import UserError
from training.engine_resources import EngineResources
from training.engines.tinygrad import backend, compiler

MISSING = features.why_engine_missing("tinygrad")


def program(folder: Path, name: str, prints: str = "") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)
    return str(path)


def test_clang_is_found_by_its_own_name_by_its_version_and_by_cc(tmp_path: Path) -> None:
    place = {"PATH": str(tmp_path)}
    assert compiler.find_compiler(place) is None
    old = program(tmp_path, "clang-14")
    assert compiler.find_compiler(place) == old
    new = program(tmp_path, "clang")
    program(tmp_path, "gcc")
    assert compiler.find_compiler(place) == compiler.find_compiler(place | {"CC": "gcc"}) == new
    assert compiler.find_compiler(place | {"CC": old}) == old and compiler.find_compiler(place | {"CC": "/no/clang"}) is None


@pytest.mark.real("processes")
@pytest.mark.parametrize(
    ("prints", "version"),
    [
        ("Debian clang version 14.0.6\nTarget: x86_64", "14.0.6"),
        ("Apple clang version 15.0.0 (clang-1500.3)", "15.0.0"),
        ("", ""),
    ],
)
def test_the_version_of_a_compiler_is_its_number(tmp_path: Path, prints: str, version: str) -> None:
    assert backend.compiler_version(program(tmp_path, "clang", prints)) == version
    assert backend.compiler_version("/no/clang") == ""


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_compiler", lambda: None)
    with pytest.raises(UserError) as refused:
        backend.TinygradBackend().start_backend(EngineResources(), [])
    assert str(refused.value) == (
        "the engine 'tinygrad' needs the program clang, which was not found: "
        "install clang (Debian: `apt install clang`), or name one in the variable CC"
    )


def test_another_device_than_the_processor_is_refused() -> None:
    with pytest.raises(UserError, match="the engine 'tinygrad' has no device 'cuda:1', only cpu: start this peer with it"):
        backend.TinygradBackend().start_backend(EngineResources(device="cuda:1"), [])


def test_failed_compilations_are_dropped_and_others_stay(tmp_path: Path) -> None:
    cache = tmp_path / "cache.db"
    backend.drop_failed_compilations(cache)
    assert not cache.exists()
    with sqlite3.connect(cache) as database:
        database.execute("CREATE TABLE compile_clang_22 (key text PRIMARY KEY, val blob)")
        rows = [("failed", b"\x80\x04C\x00\x94."), ("good", b"\x7fELF" + bytes(100))]
        database.executemany("INSERT INTO compile_clang_22 VALUES (?, ?)", rows)
    database.close()
    backend.drop_failed_compilations(cache)
    with sqlite3.connect(cache) as database:
        assert database.execute("SELECT key FROM compile_clang_22").fetchall() == [("good",)]
    database.close()


def test_a_broken_cache_is_deleted(tmp_path: Path) -> None:
    cache = tmp_path / "cache.db"
    cache.write_bytes(b"not a database" * 100)
    backend.drop_failed_compilations(cache)
    assert not cache.exists()


SCRIPT = """
import os, sys
import peer.worker.main
from pathlib import Path
from peer import features
features.register_features()
from training.data.default_text import default_text
from training.engine_implementations import objective_functions
from training.engine_resources import EngineResources
from training.engines.request_handlers import WorkerContext, open_job
from training.engines.tinygrad.backend import BACKEND
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters
from training.transformer import ModelSpec
from training.worker_protocol import OpenJobRequest
folder = Path(sys.argv[1])
(folder / "text").write_bytes(default_text()[:20_000])
BACKEND.start_backend(EngineResources(threads=1, cache_folder=str(folder / "programs")), [])
model = ModelSpec(context=8, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
spec = JobSpec(name="t", data=bytes(32), model=model, local_steps=1, batch=2, micro_batch=2)
beats = []
context = WorkerContext(BACKEND, lambda: beats.append(1), 1 << 30)
open_job(context, OpenJobRequest(bytes(32), spec.encode(), str(folder / "text"), None))
assert len(beats) > 2, "no heartbeat while it compiles"
engine = context.find_engine(bytes(32))
delta, losses = engine.local_steps(initial_parameters(spec), bytes(32), 0, bytes(32))
engine.compute_metrics(initial_parameters(spec))
assert 0 < losses[0] < 10 and delta.any()
try:
    objective_functions(BACKEND.name, "ppo")  # The handler of each job calls this first.
except Exception as error:
    print(error)
print("torch" in sys.modules, os.path.exists(folder / "programs" / "tinygrad.db"))
with open(f"/proc/self/task/{os.getpid()}/children") as children:
    print(children.read().strip() or "no child")
"""


@pytest.mark.real("compilers")
@pytest.mark.long
@pytest.mark.skipif(MISSING is not None, reason=f"engine tinygrad: {': '.join(MISSING or ())}")
def test_its_worker_trains_without_torch_and_without_a_lasting_child(tmp_path: Path) -> None:
    path = {**os.environ, "PYTHONPATH": "."}
    found = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, env=path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [
        "the engine 'tinygrad' cannot compute the objective 'ppo': it computes language; "
        "start this peer with engine pytorch for such jobs",
        "False True",
        "no child",
    ]


@pytest.mark.real("compilers")
@pytest.mark.skipif(MISSING is not None, reason=f"engine tinygrad: {': '.join(MISSING or ())}")
def test_without_a_folder_no_compiled_program_is_kept(tmp_path: Path) -> None:
    code = "from training.engines.tinygrad.backend import *; BACKEND.start_backend(EngineResources(), [])"
    folders = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ".", **folders})
    assert list(tmp_path.iterdir()) == []
