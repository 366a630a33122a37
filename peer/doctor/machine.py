"""Checks of the machine: program versions, disk, memory, open files and clock."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import statistics
import time
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from features.feature import Role
from peer import features
from peer.api.alerts import DISK_CRITICAL_BYTES, DISK_WARNING_BYTES
from peer.doctor.findings import DoctorFinding, fault, ok, warning
from peer.settings.config import Config
from peer.settings.process_resources import DESCRIPTORS_NEEDED, DESCRIPTORS_NEEDED_WITHOUT_WEB, connection_limits
from protocol.api import PeerApi
from protocol.limits import CLOCK_AHEAD_SECONDS

MEMORY_BYTES_MIN = 120_000_000  # free memory for a peer with the default model and no worker: `scenarios.idle` checks this bound
WORKER_BYTES_MIN = 400_000_000  # free memory for a peer and its worker
RUNNING_BYTES_MIN = 64_000_000  # free memory for a running peer, which has already allocated most of its memory
INODES_MIN = 10_000  # free inodes: each blob is a file, and a round of training leaves a dozen
CLOCK_UNSYNCHRONISED = 5  # result TIME_ERROR of adjtimex(2): the clock is not synchronized
TIMEX_BYTES = 512  # size of the buffer for struct timex, of which the kernel writes 208 bytes

EVENTS_READ: Final = 500  # newest events of the peer that `clock_offset` reads for times of decisions
# Blocks that `clock_offset` reads, the last decided ones: in most networks, each voter leads one of 32 blocks.
BLOCKS_READ: Final = 32
CLOCK_ADVICE = "synchronize it over the network (timedatectl set-ntp true, or chrony), then restart the peer"


def check_version(role: Role) -> Iterator[DoctorFinding]:
    """Yield findings on the packages that the role's services need and on the program's version."""
    for part in features.roles().values():
        if role.name in (part.name, features.FULL_ROLE) and part.needs_package and not find_spec(part.needs_package):
            yield warning(
                "version",
                f"the role {part.name} needs the package {part.needs_package}, which is not installed: no annotator is served",
                "run `pip install 'folkmoot[web]'`, or use another --role",
            )
    yield ok("version", f"folkmoot {metadata.version('folkmoot')}, Python {platform.python_version()}")


def check_engine(role: Role, engine: str) -> Iterator[DoctorFinding]:
    """Yield a finding on the package and the compiler of the engine if the role trains."""
    kind = features.engines().get(engine)
    if not role.needs_worker or kind is None or not kind.package:
        return
    if missing := features.why_engine_missing(engine):
        problem, remedy = missing
        advice = f"{remedy}, or take --role voter, which does not train"
        yield fault("train", f"the role {role.name} trains, and {problem}", advice)
        return
    required = (re.match(rf"{kind.package}==([\w.]+)", text) for text in metadata.requires("folkmoot") or ())
    wanted = next((match[1] for match in required if match), "")
    here = metadata.version(kind.package).partition("+")[0]
    if wanted and here != wanted:
        text = f"{kind.package} {here} is installed, but this program needs {wanted}: re-executions may round differently"
        yield warning("train", text, f"install {kind.package}=={wanted}")
    else:
        compiler = features.find_engine_compiler(engine)
        yield ok("train", f"{kind.package} {here}" + (f", compiler {compiler}" if compiler else ""))


def check_disk(folder: Path) -> Iterator[DoctorFinding]:
    """Yield findings on the disk of a data directory, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    usage, inodes = shutil.disk_usage(folder), _free_inodes(folder)
    text = f"{_size(usage.free)} of {_size(usage.total)} are free on the disk of {folder}"
    advice = "free some space, or move the data directory to a larger disk and set --data-dir"
    if usage.free < DISK_CRITICAL_BYTES:
        yield fault("disk", text + ": a full disk ends the peer", advice)
    elif usage.free < DISK_WARNING_BYTES:
        yield warning("disk", text, advice)
    elif inodes is not None and inodes < INODES_MIN:
        yield warning("disk", f"the disk of {folder} has room for only {inodes} more files, and each blob is a file", advice)
    else:
        yield ok("disk", text)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _free_inodes(folder: Path) -> int | None:
    """Return the number of free inodes, or None if the file system creates them on demand."""
    counted = os.statvfs(folder)
    return counted.f_favail if counted.f_files else None


def check_memory(config: Config, role: Role, *, runs: bool) -> Iterator[DoctorFinding]:
    free, bound = available_bytes()
    need = RUNNING_BYTES_MIN if runs else WORKER_BYTES_MIN if role.needs_worker else MEMORY_BYTES_MIN
    if free is None:
        yield ok("memory", "this system does not report its free memory")
    elif free < need:
        what = "as a reserve" if runs else f"by the role {role.name} with the default model"
        text = f"{free / 1e6:.0f} MB are free ({bound}), but {need / 1e6:.0f} MB are needed {what}"
        way = "" if not role.needs_worker else ", or use --role voter, which needs less"
        make = warning if runs else fault
        yield make("memory", text, f"stop other programs or raise that limit{way}")
    else:
        yield ok("memory", f"{free / 1e6:.0f} MB are free ({bound})")
    total = _meminfo().get("MemTotal")
    if total and config.memory_mb_max * 1_000_000 > total:
        yield warning(
            "memory",
            f"memory_mb_max allows {config.memory_mb_max} MB for jobs, but this machine has {total / 1e6:.0f} MB",
            "set memory_mb_max below that: otherwise the worker may run out of memory",
        )


def available_bytes() -> tuple[int | None, str]:
    """Return the memory that this process can still allocate, in bytes, and the name of the limit that applies.

    None means unknown.
    """
    bounds = {"machine": _meminfo().get("MemAvailable"), "control group": _left_in_group(), "ulimit -v": _address_space()}
    known = {name: left for name, left in bounds.items() if left is not None}
    name = min(known, key=known.__getitem__, default="")
    return known.get(name), name


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def _left_in_group() -> int | None:
    """Return the free memory of this process's control group (version 2), in bytes, or None if the group has no limit."""
    try:
        group = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup", group.lstrip("/"))
        return max(0, int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    except (OSError, StopIteration, ValueError):  # a ValueError comes from the word `max`, which means no limit
        return None


def _address_space() -> int | None:
    bound, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if bound == resource.RLIM_INFINITY else bound


def check_open_files(served: bool = True, process: int = 0) -> Iterator[DoctorFinding]:
    """Yield a finding on the file descriptors of a process. `served` adds the descriptors for connections to the web port.

    `process` 0 means this process, whose limits a peer inherits if the same shell starts it. The hard limit counts, because the
    daemon raises its soft limit to it.
    """
    needed = DESCRIPTORS_NEEDED if served else DESCRIPTORS_NEEDED_WITHOUT_WEB
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if process:
        with contextlib.suppress(AttributeError, OSError):  # this is not Linux, or the process belongs to another user
            soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        yield ok("files", f"a process may open all {needed} files that a peer with all its connections needs")
        return
    text = f"a process may open {hard} files (soft limit {soft}, hard limit {hard}), but a peer with all its connections needs"
    peers, web = connection_limits(hard)
    of_web = f" and {web} of the web port" if served else ""
    yield warning(
        "files",
        f"{text} {needed}: it accepts only {peers} connections of peers{of_web}",
        f"raise the hard limit to {needed}: `ulimit -Hn {needed}`, or LimitNOFILE={needed} of a service",
    )


def is_clock_synchronized() -> bool | None:
    """Return True if the kernel reports a synchronized clock, False if it does not, and None without a report."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != CLOCK_UNSYNCHRONISED


def check_clock(ahead: float | None, last_block_ms: int | None, genesis_ms: int) -> DoctorFinding:
    """Return the finding on the clock. `ahead` is the clock's offset from other leaders' clocks in seconds, or None if unknown.
    Without an offset, the check only compares the clock with the time of the last stored block or of the genesis.
    """
    late = max(last_block_ms or 0, genesis_ms) / 1_000 - time.time()
    if ahead is not None and ahead > CLOCK_AHEAD_SECONDS:
        return fault(
            "clock", f"the clock is {ahead:.0f} s ahead of the other peers: they refuse blocks of this peer", CLOCK_ADVICE
        )
    if ahead is not None and ahead < -CLOCK_AHEAD_SECONDS:
        return fault("clock", f"the clock is {-ahead:.0f} s behind the other peers: this peer refuses their blocks", CLOCK_ADVICE)
    if ahead is not None:
        return ok("clock", f"the clock differs by {abs(ahead):.1f} s from the other peers")
    if late > CLOCK_AHEAD_SECONDS:
        return fault("clock", f"the clock is at least {late:.0f} s behind: the last block has a later time", CLOCK_ADVICE)
    if is_clock_synchronized() is False:
        return warning(
            "clock",
            "the kernel does not synchronize the clock, and no other leader's clock is known",
            CLOCK_ADVICE,
        )
    return ok("clock", "no error found")


async def clock_offset(api: PeerApi, me: str) -> float | None:
    """Return the offset of this machine's clock from the clocks of other recent leaders in seconds, or None if there are none.

    A block has the time at which its leader began it, by the leader's clock. This machine's clock gives the time of the decision,
    some hundredths of a second later. The smallest difference for each leader is therefore the most accurate. The median over
    leaders tolerates some wrong clocks. Decisions that this peer learned later are ignored.
    """
    events = await api.events(-EVENTS_READ, 0.0)
    decided = [event for event in events if event.kind == "decided" and event.fields.get("seen") == str(True)]
    seconds: dict[str, float] = {}
    for event in decided[-BLOCKS_READ:]:
        block = await api.block(int(event.fields["height"]))
        if block.proposer != me:
            passed = (event.at_ms - block.time_ms) / 1_000
            seconds[block.proposer] = min(passed, seconds.get(block.proposer, passed))
    return statistics.median(seconds.values()) if seconds else None
