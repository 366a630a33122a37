"""Who takes part in a demo, and how it was asked for."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from peer.api import control_socket
from peer.commands.definitions.job_commands import job_overrides, preset_overrides
from peer.features import FULL_ROLE
from protocol.api import BULK_TRAFFIC_KINDS, PeerApi, StatsView
from protocol.identity import Identity
from training.job_spec import JobSpec

TEXT = "text"  # of `--rlhf`: a base, a reward model and a policy, one after another
DEFAULT_ROUNDS = JobSpec(name="demo").rounds


@dataclass
class DemoPeer:
    number: int
    identity: Identity
    directory: Path
    trains: bool
    lies: bool
    threads: int
    without_avx: bool  # numpy without its wide instructions
    module: tuple[str, ...] = ("peer.cli",)  # what runs, with its first arguments
    environment: dict[str, str] = field(default_factory=dict)  # beside what this process has
    address: str = "127.0.0.1:0"  # the port that it got at its first start is the one it has for good
    process: subprocess.Popen[bytes] | None = None
    memory_mb: float = 0.0  # the most that was seen
    stats: StatsView | None = None
    stats_time: float = 0.0  # when `stats` were taken, seconds since the epoch
    bytes_sent_before: int = 0  # bytes sent before the job started
    trains_as: str = "trainer"  # role of those who train and serve nobody
    evaluates: bool = True  # if it is the watched one
    serves: tuple[str, ...] = ()  # the settings with which it serves people; empty: it serves none

    @property
    def name(self) -> str:
        work = "trainer" if self.trains else "server" if self.serves else "voter"
        return f"{'liar' if self.lies else work}-{self.number}"

    @property
    def role(self) -> str:
        if self.serves:
            return FULL_ROLE if self.trains else "annotator"
        return self.trains_as if self.trains else "voter"

    @property
    def client(self) -> PeerApi:
        return control_socket.make_client(self.directory)


@dataclass
class Demo:
    options: argparse.Namespace
    folder: Path
    peers: list[DemoPeer]
    started: float = field(default_factory=time.time)
    page: str = ""  # where a browser shows it; empty: nowhere

    @property
    def honest(self) -> list[DemoPeer]:
        return [peer for peer in self.peers if not peer.lies]

    @property
    def is_default(self) -> bool:
        """Whether the promise on the loss of `peer demo` without flags applies."""
        options = self.options
        settings = (options.peers, options.malicious, options.trainers, options.preset, options.audit, options.set)
        return not options.data and options.rounds in (None, DEFAULT_ROUNDS) and settings == (4, 1, None, None, None, [])

    @property
    def overrides(self) -> dict[str, str]:
        """Fields of the job, as a person would type them: what stands further behind counts."""
        options = self.options
        overrides = {
            "audit": "full",
            "seed": str(options.seed),
            "byzantine_max": str(max(options.malicious, (options.peers - 1) // 3)),
        }
        said = job_overrides(options)
        overrides |= preset_overrides(options.preset, said)
        if getattr(options, "algorithm", None):
            overrides["algorithm"] = options.algorithm
        return overrides | ({"audit": options.audit} if options.audit else {}) | said

    @property
    def is_sampled(self) -> bool:
        """Whether lies are found after the vote, by sampled audits."""
        return self.overrides.get("audit") == "sampled"

    @property
    def watched(self) -> DemoPeer:
        """An honest trainer: it starts the job, and measures. Where annotators are served, the peer that imports the tasks."""
        return next(peer for peer in self.peers if (peer.trains or peer.serves) and not peer.lies)


def derive_identity(seed: int, number: int) -> Identity:
    """Keys from the seed, so that the same seed assigns the same data: such a network is for looking at, not for use."""
    return Identity(hashlib.sha256(f"folkmoot/demo/{seed}/{number}".encode()).digest())


def count_bytes_sent(peer: DemoPeer) -> int:
    stats = peer.stats
    return 0 if stats is None else sum(count for kind, count in stats.bytes_sent.items() if kind not in BULK_TRAFFIC_KINDS)
