"""Calls about this peer itself: its state, statistics, events, alerts, disk and engines, and its shutdown."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from consensus.voter_set import VoterSet
from features.lazy_import import import_object
from features.peer_names import PeerNames
from ledger.audits.audit_state import JobAudits
from ledger.jobs import MISSED_VOUCHES_MAX, WRONG_VOUCH_ROUNDS, WRONG_VOUCHES_MAX, Job, JobsState, VouchRecord
from ledger.ledger_state import LedgerState
from ledger.network_governance import NetworkState
from peer import VERSION, features
from peer.api.alerts import AlertInputs, find_alerts
from peer.api.running_peer import RunningPeer
from peer.runtime.auditor import suspension_reason
from peer.runtime.membership.membership import NOT_DECIDED
from peer.runtime.telemetry.health import fork_text, heights_behind, peer_state, why_halted, why_stalled, why_waiting
from peer.settings.process_resources import child_processes, process_memory_mb
from protocol.api import (
    AlertView,
    DeviceView,
    DialView,
    DiskView,
    EngineView,
    EventView,
    LocalPeerRpc,
    OptionalServiceView,
    StatsView,
    StatusView,
)
from protocol.identity import peer_id
from protocol.units import display_round_number
from training.api.job_notes import find_stalled_jobs
from transport.discovery.address_book import AddressEntry
from transport.network import Priority

if TYPE_CHECKING:
    from peer.worker.supervisor import WorkerSupervisor


@dataclass(frozen=True)
class LocalPeerRpcHandler(LocalPeerRpc):
    peer: RunningPeer

    async def status(self) -> StatusView:
        driver, members = self.peer.driver, self.peer.driver.state.members
        voters, member = VoterSet(members.voters), members.members.get(driver.signer.public)
        links = self.peer.network.connected_peers()
        problem = driver.observer.membership_problem or (NOT_DECIDED if member is None else "")
        halted = why_halted(driver.replica, member, problem, driver.rules.why_version_unsupported(driver.state))
        waiting, suspended = self._why_waiting(), suspension_reason(driver.signer.public, driver.state)
        behind, ago = heights_behind(driver.node, links), await self._seconds_since_decision()
        return StatusView(
            peer=peer_id(driver.signer.public),
            # The name in the settings, otherwise the one in the member table.
            name=self.peer.config.name or (member.name if member else ""),
            network=self.peer.genesis.network,
            chain_id=driver.chain_id.hex(),
            role=self.peer.config.role,
            version=VERSION,
            address=(self.peer.addresses() or (self.peer.network.address,))[0],
            unreached_addresses=tuple(_dial(dial, driver.events.names) for dial in self.peer.network.unreached_addresses()),
            data_directory=str(self.peer.config.data_directory),
            process=os.getpid(),
            height=driver.state.height,
            view=driver.replica.view,
            state_root=driver.state.state_root.hex(),
            voter=driver.signer.public in voters,
            voters=len(voters),
            tolerated=voters.faults_tolerated,
            quorum=voters.quorum,
            links=len(links),
            halted=halted,
            uptime_seconds=time.monotonic() - self.peer.started,
            waiting=waiting,
            suspended=suspended,
            fork=fork_text(driver.replica),
            module_failure=driver.observer.failure,
            unaudited=unaudited_jobs(driver.state),
            state=peer_state(halted, waiting, behind, ago, suspended),
            decided_seconds_ago=ago,
            heights_behind=behind,
            reexecution_limits=describe_own_limits(driver.signer.public, driver.state.jobs),
            disk_shortage=driver.round_executor.disk_space.shortage_text,
            parameters_max=driver.state.module_state(NetworkState).parameters_max,
            reachability=self.peer.network.reachability,
            listen_addresses=self.peer.network.addresses,
            announced_addresses=self.peer.network.announced_addresses,
            optional_services=tuple(
                OptionalServiceView(aside.name, aside.works, aside.text) for aside in self.peer.optional_services
            ),
            straggling=driver.observer.straggler_text(driver.state.jobs.running()),
        )

    def _why_waiting(self) -> str:
        driver, hearing, heard = self.peer.driver, self.peer.liveness_monitor, self.peer.network.live_peers()
        waiting = hearing.partition_text(driver.events.names) or why_waiting(driver.node, heard)
        stalled = why_stalled(driver.node, heard, driver.observer.pending_work_seconds, driver.now())
        gaps = hearing.gaps_text(driver.events.names) if stalled else ""
        return waiting or "; ".join(filter(None, (stalled, gaps)))

    async def _seconds_since_decision(self) -> float | None:
        """Return the seconds since this peer saw the last decision, or None before any block.

        After a start, the last block's age counts.
        """
        driver, at = self.peer.driver, self.peer.driver.observer.last_decision_at
        if at is None:
            last = await trio.to_thread.run_sync(driver.store.get_decision, driver.state.height)
            at = None if last is None else last.decode().time_ms / 1_000
        return None if at is None else max(0.0, driver.now() - at)

    async def stats(self) -> StatsView:
        from peer.api.handlers.audit_handler import audit_record_view

        driver, traffic = self.peer.driver, self.peer.network.traffic()
        first = driver.observer.first_decision_at
        refused = dict(self.peer.network.refusal_counts())
        for reason, count in driver.node.refusal_counts.items():
            refused[reason] = refused.get(reason, 0) + count
        evidence = await trio.to_thread.run_sync(driver.store.evidence)
        known = driver.state.audits.member_records
        worker = self.peer.worker.pid if self.peer.worker else None
        processes = [os.getpid(), *(() if worker is None else (worker, *child_processes(worker)))]
        return StatsView(
            status=await self.status(),
            decisions=driver.observer.decisions,
            decision_ms_p50=_percentile(tuple(driver.observer.decision_seconds), 50),
            decision_ms_p99=_percentile(tuple(driver.observer.decision_seconds), 99),
            seconds_to_first_decision=None if first is None else first - driver.observer.started_at,
            bytes_sent=_by_kind(traffic.sent, traffic.blobs_sent, traffic.audit_bytes_sent),
            bytes_received=_by_kind(traffic.received, traffic.blobs_received, traffic.audit_bytes_received),
            refused=refused,
            evidence=tuple(peer_id(pair.first.signer) for pair in evidence),
            transactions_pending=len(driver.node.ledger.mempool),
            worker=_worker_state(self.peer.worker),
            memory_mb=sum(map(process_memory_mb, processes)),
            expelled=tuple(peer_id(key) for key in driver.state.members.members if driver.state.members.is_expelled(key)),
            audit_record=audit_record_view(driver.signer.public, known[driver.signer.public])
            if driver.signer.public in known
            else None,
        )

    async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
        return await self.peer.driver.events.wait_for_events(after, min(wait_seconds, 60.0))

    async def alerts(self) -> tuple[AlertView, ...]:
        state, folder = self.peer.driver.state, self.peer.config.data_directory
        members = state.members.members
        finders = [import_object(feature.failures) for feature in features.FEATURES if feature.failures]
        look = AlertInputs(
            status=await self.status(),
            worker=_worker_state(self.peer.worker),
            free_bytes=(await trio.to_thread.run_sync(shutil.disk_usage, folder)).free,
            expelled={peer_id(key): member.expelled for key, member in members.items() if member.expelled is not None},
            suspended=_suspended(state),
            failed=tuple(text for find in finders for text in find(state, state.height)),
            without_progress=tuple(find_stalled_jobs(state, state.height)),
            unheard=[peer_id(key) for key in state.members.voters if key not in {self.peer.me, *self.peer.network.live_peers()}],
        )
        return self.peer.alerts.update_alerts(find_alerts(look), time.time_ns() // 1_000_000)

    async def disk_usage(self) -> DiskView:
        folder = Path(self.peer.config.data_directory)
        usage = await trio.to_thread.run_sync(shutil.disk_usage, folder)
        return DiskView(await trio.to_thread.run_sync(_used_bytes, folder), usage.free, usage.total)

    async def engines(self) -> tuple[EngineView, ...]:
        worker = self.peer.worker
        said = await worker.refresh_description() if worker else None
        devices = tuple(DeviceView(*dataclasses.astuple(device)) for device in said.devices) if said else ()
        about: dict[str, Any] = {"threads": said.threads, "versions": said.versions, "devices": devices} if said else {}
        return tuple(
            dataclasses.replace(_engine_view(name), in_use=True, state=_worker_state(worker), **about)
            if worker and name == self.peer.config.engine
            else _engine_view(name)
            for name in features.engines()
        )

    async def stop_peer(self) -> None:
        self.peer.stopped.set()


def _engine_view(name: str) -> EngineView:
    """Return a view of an engine without a worker. Nothing of the engine is imported."""
    from importlib import metadata  # A voter does without it, and its import takes long.

    kind, missing = features.engines()[name], features.why_engine_missing(name)
    versions = {kind.package: metadata.version(kind.package)} if kind.package and find_spec(kind.package) else {}
    compiler = features.find_engine_compiler(name) or ""
    return EngineView(name, False, "", versions=versions, compiler=compiler, missing=": ".join(missing) if missing else "")


def describe_own_limits(me: bytes, jobs: JobsState) -> str:
    """Return a text that names the running jobs in which this peer re-executes nothing or is asked last, or an empty text."""
    texts = ((job.name, limited_reexecutors(job).get(peer_id(me))) for job in jobs.running().values())
    return "; ".join(f"in {name} this peer {text}" for name, text in texts if text)


def unaudited_jobs(state: LedgerState) -> tuple[str, ...]:
    """Return the names of running jobs without full or sampled audits."""
    return tuple(job.name for key, job in state.jobs.running().items() if not job.fully_audited and key not in state.audits.jobs)


def _suspended(state: LedgerState) -> dict[str, str]:
    """Return the suspended trainers: peer id -> name of one running job from which the trainer is suspended."""
    audits = state.audits.jobs
    running = ((job, audits.get(key, JobAudits())) for key, job in state.jobs.running().items())
    return {peer_id(who): job.name for job, of_job in running for who in suspended_trainers(job, of_job)}


def _used_bytes(folder: Path) -> int:
    """Return the size of all files below the folder, in bytes. Files that vanish meanwhile are skipped."""
    used = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            used += path.lstat().st_size
    return used


def _worker_state(worker: WorkerSupervisor | None) -> str:
    if worker is None:
        return ""
    restarts = f", restarted {worker.restarts} times" if worker.restarts else ""
    return (f"{worker.description.engine}, {worker.description.threads} threads" if worker.description else "starting") + restarts


def _dial(entry: AddressEntry, names: PeerNames) -> DialView:
    now, peer = trio.current_time(), peer_id(entry.peer) if entry.peer is not None else ""
    text = names.replace_ids(entry.describe_failure(now))
    return DialView(entry.address, peer, entry.reason, entry.failures, max(0.0, entry.next_at - now), text)


def _by_kind(counts: tuple[int, int, int], blobs: int, reveals: int) -> dict[str, int]:
    return {priority.name.lower(): counts[priority] for priority in Priority} | {"blobs": blobs, "reveals": reveals}


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    """Return a percentile of the values in milliseconds by the nearest-rank method, or None if there are no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return 1_000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def suspended_trainers(job: Job, audits: JobAudits) -> dict[bytes, int]:
    """Return the job's suspended trainers: public key -> first round in which the trainer may train again."""
    after_audits = {trainer: until for trainer, until in audits.suspended.items() if until > job.round}
    before_votes = job.suspended_trainers
    both = sorted(after_audits.keys() | before_votes.keys())
    return {key: max(after_audits.get(key, 0), before_votes.get(key, 0)) for key in both}


def limited_reexecutors(job: Job) -> dict[str, str]:
    """Return texts by peer id for voters that re-execute nothing in the open round or are asked last: for how long, and why."""
    limits = {peer_id(key): _limit(record, job.round) for key, record in sorted(job.vouch_records.items())}
    return {peer: text for peer, text in limits.items() if text}


def _limit(record: VouchRecord, round: int) -> str:
    if record.suspended_until > round:
        why = f"its vouches were false in {WRONG_VOUCHES_MAX} of {WRONG_VOUCH_ROUNDS} rounds"
        return f"is not asked to re-execute until round {display_round_number(record.suspended_until)}: {why}"
    if record.assigned_last_until > round:
        why = f"it missed its vouches in {MISSED_VOUCHES_MAX} successive rounds"
        return f"is asked last to re-execute until round {display_round_number(record.assigned_last_until)}: {why}"
    return ""
