"""Whether a job fits on this peer's disk. Where it does not, the peer says so, votes on, and trains again when there is room."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from ledger.jobs import Job
from ledger.ledger_state import CurrentState
from peer.runtime.telemetry.event_log import EventLog
from protocol.units import format_bytes
from training.job_disk_space import job_disk_space
from training.job_spec import JobSpec
from training.model_store import JobModelStore

# Payloads of so many rounds must fit before a round is trained. Every round looks anew: a long job is not refused for its end.
ROUNDS_AHEAD = 100
RESERVED_BYTES = 512 << 20  # that a job leaves for the ledger and all else: a full disk ends the peer
CHECK_SECONDS = 10.0  # until a peer that has no room looks again


@dataclass(frozen=True, slots=True)
class DiskShortage:
    text: str
    blocks_training: bool  # there is not even room for the next rounds


@dataclass
class DiskSpaceMonitor:
    """`check_job` before a job begins, and in each of its rounds."""

    me: bytes
    folder: Path  # of all data
    host: JobModelStore
    events: EventLog
    applied: CurrentState
    payload_bytes: int = 0  # of a job's old rounds that stay; 0: all
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    _lacks: dict[bytes, DiskShortage] = field(default_factory=dict)  # by job

    @property
    def shortage_text(self) -> str:
        """For people: what does not fit; empty where everything does."""
        going_on = self.applied.current.jobs.unfinished()
        return "; ".join(lack.text for key, lack in self._lacks.items() if key in going_on)

    def is_short_for(self, key: bytes) -> bool:
        """Whether this peer must not train the job, as far as it has looked."""
        return key in self._lacks and self._lacks[key].blocks_training

    async def check_job(self, key: bytes, job: Job) -> None:
        """What has changed is told."""
        found = await trio.to_thread.run_sync(self._lack, key, job)
        going_on, before = self.applied.current.jobs.unfinished(), self._lacks.get(key)
        self._lacks = {of: lack for of, lack in self._lacks.items() if of != key and of in going_on}
        if found is None and before is not None:
            self.events.add("job", f"job {job.name} fits on this peer's disk now", job=key)
        if found is not None:
            self._lacks[key] = found
            if before is None or before.blocks_training is not found.blocks_training:
                self.events.add("warning", found.text, job=key)

    def _lack(self, key: bytes, job: Job) -> DiskShortage | None:
        spec = JobSpec.decode(job.spec)
        if not spec.resolved_objective.needs_worker:
            return None
        trains, left = self.me in job.trainers, job.rounds - job.rounds_in_model
        room = job_disk_space(spec, len(job.trainers), trains)
        here = _size(self.host.round_directory(key, 0).parent) + _size(self.folder / "buffers")
        beside, free = max(0, room.models + room.own - here) + RESERVED_BYTES, self.free(self.folder)
        stays = partial(room.payload_bytes, bytes_max=self.payload_bytes)
        kept = stays(job.round)
        whole = beside + stays(job.round + left) - kept
        if free >= whole:
            return None
        for_now = free < beside + stays(job.round + min(left, ROUNDS_AHEAD)) - kept
        lacks = f"job {job.name} may take {format_bytes(whole)} more of this peer's disk, and {format_bytes(free)} are free"
        refuses = "this peer does not train it until there is room"
        return DiskShortage(f"{lacks}: {refuses if trains and for_now else 'free some before the disk is full'}", for_now)


def _size(folder: Path) -> int:
    """Files and folders come and go meanwhile, and some files have two names."""
    sizes = {}
    for inside, _, names in os.walk(folder):  # it passes over folders that are gone
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(inside, name))
                sizes[found.st_ino] = found.st_size
    return sum(sizes.values())
