"""Three rings of tests: each ring forbids what could make the result depend on luck.

| ring    | which tests                                | clock                  | forbidden                                    |
|---------|--------------------------------------------|------------------------|----------------------------------------------|
| pure    | synchronous ones without a marker          | none                   | sockets, processes, Trio, sleeping, the time |
| virtual | asynchronous ones without a marker         | autojump, of the test  | connections, listeners, processes, sleeping  |
| real    | tests with the marker `real`, and a reason | the machine's          | nothing                                      |

A mock clock that jumps while a thread works would end deadlines at random. So `trio.to_thread.run_sync` calls its function in the
event loop in a virtual test. A function that calls back into Trio needs a thread: tests marked `virtual(threads=True)` have
threads, and their clock stands still while one of them works.

Tests of the real ring wait for progress with the helpers of `tests/waiting.py`. These raise `PatienceEnded`, the one failure that
`tests/run.py` tries a second time.
"""

from __future__ import annotations

import contextvars
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from inspect import iscoroutinefunction
from math import inf
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.lowlevel import in_trio_run
from trio.testing import MockClock

RINGS = ("pure", "virtual", "real")
CONNECTED = {"socket.bind", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}
FORBIDDEN = {
    "pure": CONNECTED | {"socket.__new__"},  # Trio makes a pair of sockets to wake itself
    "virtual": CONNECTED,
    "real": set[str](),
}
STEP_SECONDS = 1e-4  # so that a loop which waits for a time ends
CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
# The libraries below our code may read clocks: hypothesis and logging do.
OURS = {
    "protocol",
    "consensus",
    "transport",
    "rounds",
    "ledger",
    "storage",
    "features",
    "training",
    "curation",
    "rlhf",
    "clients",
    "web",
}
OURS |= {"peer", "demo", "scenarios", "benchmarks", "tests"}
QUARANTINE = Path(__file__).with_name("quarantine.toml")
QUARANTINED_MAX = 5  # a person cannot repair more in two weeks
QUARANTINE_DAYS_MAX = 14

_real_run, _real_sleep = trio.run, time.sleep
_real_run_sync, _real_from_thread = trio.to_thread.run_sync, trio.from_thread.run
_ring = "real"  # of the test that runs now; collection is unrestricted
_broken: list[str] = []
_reads = 0  # of a clock, by the test that runs
_began = 0.0  # the date at its start, which dates of files may be compared with


def ring_of(item: pytest.Item) -> str:
    if (marker := item.get_closest_marker("real")) is not None:
        if len(marker.args) != 1 or not isinstance(marker.args[0], str):
            raise pytest.UsageError(f"{item.nodeid}: `real` needs its reason: @pytest.mark.real('browser')")
        return "real"
    if item.get_closest_marker("virtual") is not None or _is_async(item):
        return "virtual"
    return "pure"


def _is_async(item: pytest.Item) -> bool:
    function = getattr(item, "obj", None)
    return iscoroutinefunction(getattr(getattr(function, "hypothesis", None), "inner_test", function))


def mark(items: list[pytest.Item]) -> None:
    """Give each test the marker of its ring, the virtual ones their clock, and those in quarantine leave to fail."""
    reasons = quarantined()
    for item in items:
        if (reason := reasons.get(item.nodeid.partition("[")[0])) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
        ring = ring_of(item)
        if item.get_closest_marker(ring) is None:
            item.add_marker(ring)
        if ring == "virtual" and _is_async(item):
            item.add_marker(pytest.mark.trio(run=run_virtually), append=False)


def run_virtually(function: Callable[..., Any], *args: object, clock: trio.abc.Clock | None = None, **options: Any) -> Any:
    return _real_run(function, *args, clock=clock or MockClock(autojump_threshold=0), **options)


def _run_on(
    threads: ThreadClock, function: Callable[..., Any], *args: object, clock: trio.abc.Clock | None = None, **options: Any
) -> Any:
    if isinstance(clock, MockClock):
        threads.clock = clock
    return _real_run(function, *args, clock=threads.clock, **options)


async def run_inline(function: Callable[..., Any], *args: object, **options: object) -> Any:
    """Stand in for `trio.to_thread.run_sync`: the same checkpoint and context, and no thread."""
    await trio.lowlevel.checkpoint()
    return contextvars.copy_context().run(function, *args)


class ThreadClock:
    """Threads of Trio, and an autojump clock that jumps only while none of them works."""

    def __init__(self) -> None:
        self.clock = MockClock(autojump_threshold=0)
        self._working = 0

    def work(self, change: int) -> None:
        self._working += change
        self.clock.autojump_threshold = inf if self._working else 0

    async def run_in_thread(self, function: Callable[..., Any], *args: object, **options: Any) -> Any:
        self.work(+1)
        try:
            return await _real_run_sync(function, *args, **options)
        finally:
            self.work(-1)

    def run_from_thread(self, function: Callable[..., Any], *args: object, **options: Any) -> Any:
        async def wait_in_virtual_time() -> Any:
            self.work(-1)
            try:
                return await function(*args)
            finally:
                self.work(+1)

        return _real_from_thread(wait_in_virtual_time, **options)


@contextmanager
def enforced(item: pytest.Item) -> Iterator[None]:
    """Run one test, from its set-up to its end, under the rules of its ring."""
    global _ring, _reads, _began
    ring = ring_of(item)
    _ring, _reads, _began = ring, 0, time.time()
    with pytest.MonkeyPatch.context() as patch:
        if ring == "virtual":
            patch.setattr(trio, "run", run_virtually)
            _replace_threads(item, patch)
        if ring != "real":
            patch.setattr(time, "sleep", partial(_sleep, ring))
            for name in CLOCKS:
                patch.setattr(time, name, partial(_read_clock, ring, name, getattr(time, name)))
        _broken.clear()
        try:
            yield
        finally:
            _ring = "real"


def _replace_threads(item: pytest.Item, patch: pytest.MonkeyPatch) -> None:
    marker = item.get_closest_marker("virtual")
    if marker is None or not marker.kwargs.get("threads"):
        patch.setattr(trio.to_thread, "run_sync", run_inline)
        return
    threads = ThreadClock()
    patch.setattr(trio, "run", partial(_run_on, threads))
    if _is_async(item):
        item.add_marker(pytest.mark.trio(run=partial(_run_on, threads)), append=False)
    patch.setattr(trio.to_thread, "run_sync", threads.run_in_thread)
    patch.setattr(trio.from_thread, "run", threads.run_from_thread)


def broken() -> list[str]:
    """The rules that the test broke so far, also where the code under test survived the exception."""
    return _broken


def _refuse(what: str) -> None:
    _broken.append(what)
    pytest.fail(f"{what} in a test of the ring {_ring!r} (tests/rings.py)")


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event in FORBIDDEN[_ring]:
        _refuse(event)


def _sleep(ring: str, seconds: float) -> None:
    if seconds > 0:
        _refuse("time.sleep")
    _real_sleep(seconds)


def _read_clock(ring: str, name: str, real: Callable[[], float]) -> float:
    """Return a time that does not depend on the machine: Trio's virtual one, a little later at each call."""
    global _reads
    if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in OURS:
        return real()
    _reads += 1
    seconds = _reads * STEP_SECONDS
    if ring == "virtual" and in_trio_run():
        seconds += trio.current_time()
    if name.startswith("time"):
        seconds += _began
    return int(seconds * 1e9) if name.endswith("_ns") else seconds


def quarantined(today: date | None = None, path: Path = QUARANTINE) -> dict[str, str]:
    """Return the reasons of quarantined tests by id. Raise `pytest.UsageError` for too many of them, or an old one."""
    today = today or datetime.now(UTC).date()
    entries = tomllib.loads(path.read_text()).get("test", [])
    if len(entries) > QUARANTINED_MAX:
        raise pytest.UsageError(f"{path.name} holds {len(entries)} tests; at most {QUARANTINED_MAX} are allowed. Mend one.")
    for entry in entries:
        if not entry["since"] <= today <= entry["since"] + timedelta(days=QUARANTINE_DAYS_MAX):
            raise pytest.UsageError(
                f"{path.name}: {entry['id']} is there since {entry['since']}; {QUARANTINE_DAYS_MAX} days are allowed. Mend it."
            )
    return {entry["id"]: entry["reason"] for entry in entries}


sys.addaudithook(_audit)
