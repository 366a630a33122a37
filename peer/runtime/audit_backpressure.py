"""Backpressure of audits on a trainer: it proposes only while its uplink can serve the auditors of its proposals in time.

An honest trainer on a slow link would be suspended if it proposed faster than it can upload its buffers. So it proposes only
while the remaining uploads take at most an eighth of the time that auditors have. Fast links always meet this condition. The
trainer does not wait for silent or slow auditors, because one faulty auditor could then stop every trainer.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Hashable, Mapping
from itertools import pairwise

import trio

from ledger.audits.audit_state import awaited_auditors, proposals_to_serve
from ledger.jobs import RUNNING_MAX
from ledger.ledger_state import CurrentState
from protocol.limits import BLOB_CHUNK_BYTES
from training.job_spec import AUDIT_BYTES_MAX, JobSpec
from training.model_store import audit_download_bytes_max
from transport.blobs.blob_exchange import WINDOW_CHUNKS_START
from transport.connections.connection_manager import ConnectionManager

RATE_SECONDS = 20  # seconds over which rates are measured: long enough that bytes in a link's queues hardly change the rates
# Factor by which the remembered best rate decays each second: it halves in six minutes, because the link may change.
RATE_DECAY = 0.998
# An auditor counts as active if it fetches at least this fraction of an equal share of the uplink. Others are slow, or delay us.
ACTIVE_SHARE_MIN = 1 / 4
# An auditor whose audits have just begun counts as active for this time. It suffices for one chunk in each of eight transfers at
# 2 Mbit/s, beside an update that other peers fetch. An auditor gets this time again only after it has fetched all its audits.
GRACE_SECONDS = 10
QUEUED_BYTES = WINDOW_CHUNKS_START * BLOB_CHUNK_BYTES  # bytes that an auditor requests at once before it knows the link's rate
POLL_SECONDS = 0.1  # seconds between two checks while a proposal waits: a fast link finishes its uploads in this time
BACKLOG_SHARE_MAX = 1 / 8  # largest backlog as a fraction of the auditors' time: the uploads of a new proposal must fit as well

Audits = Mapping[Hashable, int]  # audit of one auditor -> bytes that the audit fetches


class AuditBacklog:
    """The upload rate of this trainer for audits, and its remaining uploads. Without I/O and clock.

    `record_second` is called once a second, and `update_owed` before each use of `backlog_seconds`.
    """

    def __init__(self) -> None:
        self._seen: Mapping[bytes, int] = {}  # auditor -> bytes sent to it since the start
        self._sent = deque[Mapping[bytes, int]]([{}], RATE_SECONDS + 1)  # earlier values of `_seen`, one per second
        self._seconds = 0
        self._best = 0.0  # best rate in bytes per second, over all seconds
        self._fastest = 0.0  # best rate in bytes per second, over seconds with uploads
        # auditor -> (its audits, bytes that it had received before them, second in which its audits began)
        self._owed: dict[bytes, tuple[Audits, int, int]] = {}

    def record_second(self, sent: Mapping[bytes, int], awaited: Mapping[bytes, Audits]) -> None:
        self._sent.append(dict(sent))
        self._seconds += 1
        self._best = max(RATE_DECAY * self._best, sum(self._rates().values()))
        self._fastest = max(RATE_DECAY * self._fastest, self._rate_while_asked())
        self.update_owed(sent, awaited)

    def update_owed(self, sent: Mapping[bytes, int], awaited: Mapping[bytes, Audits]) -> None:
        owed = dict[bytes, tuple[Audits, int, int]]()
        for auditor, audits in awaited.items():
            # A fast link sends all data of an audit between two calls, so the count begins with the bytes of the last call. The
            # auditor's report is decided a round or two later.
            before, base, began = self._owed.get(auditor, ({}, self._seen.get(auditor, 0), self._seconds))
            ended = sum(size for audit, size in before.items() if audit not in audits)
            # The ended audits were fetched completely. An audit of a faulty auditor may end without being fetched.
            if ended and base + ended <= sent.get(auditor, 0):
                began = self._seconds
            owed[auditor] = audits, min(base + ended, sent.get(auditor, 0)), began
        self._owed, self._seen = owed, dict(sent)

    def _rates(self) -> dict[bytes, float]:
        """Return the upload rates of the last RATE_SECONDS: auditor -> bytes per second, for auditors that received any."""
        first, last = self._sent[0], self._sent[-1]
        got = {auditor: sent - first.get(auditor, 0) for auditor, sent in last.items()}
        return {auditor: sent / RATE_SECONDS for auditor, sent in got.items() if sent}

    def _rate_while_asked(self) -> float:
        """Return the bytes per second over the seconds with uploads, without bytes that may only have filled queues.

        If the link is faster than the auditors' requests, a mean over all seconds would measure the requests and not the link.
        """
        totals = [sum(sent.values()) for sent in self._sent]
        asked = sum(after > before for before, after in pairwise(totals))
        return max(0, totals[-1] - totals[0] - QUEUED_BYTES * len(self._rates())) / (asked + 1)

    def backlog_seconds(self, least: float) -> float:
        """Return the seconds that this uplink needs for the remaining uploads.

        `least` is the lowest allowed rate in bytes per second.
        """
        rates, best = self._rates(), max(self._best, least)
        owed = 0
        for auditor, (audits, base, began) in self._owed.items():
            begins = self._seconds < began + GRACE_SECONDS
            if begins or rates.get(auditor, 0.0) >= ACTIVE_SHARE_MIN * best / max(1, len(rates)):
                owed += max(0, sum(audits.values()) - (self._seen.get(auditor, 0) - base))
        return owed / max(best, self._fastest)


@functools.lru_cache(maxsize=RUNNING_MAX)
def audit_bytes_of(spec: bytes) -> int:
    """Return the number of bytes that one auditor fetches for a proposal of this job."""
    return audit_download_bytes_max(JobSpec.decode(spec))


class AuditBackpressure:
    """Backpressure on this trainer: a proposal waits until the uplink can serve the auditors in time.

    `run` measures the uplink. It is called once.
    """

    def __init__(self, me: bytes, network: ConnectionManager, applied: CurrentState) -> None:
        self._me, self._network, self._applied = me, network, applied
        self._uplink = AuditBacklog()

    async def run(self) -> None:
        """Measure the uplink once a second until cancelled."""
        while True:
            self._uplink.record_second(*self._shown())
            await trio.sleep(1.0)

    def _shown(self) -> tuple[Mapping[bytes, int], Mapping[bytes, Audits]]:
        """Return two maps: auditor -> bytes sent to it for audits, and auditor -> its audits with the bytes that each fetches."""
        state, awaited = self._applied.current, dict[bytes, Audits]()
        for auditor, due in awaited_auditors(self._me, state).items():
            awaited[auditor] = {(job, place): audit_bytes_of(state.jobs.jobs[job].spec) for job, place in due}
        return self._network.audit_bytes_sent_by_peer(), awaited

    async def wait_to_propose(self, spec: JobSpec, served_seconds: float) -> None:
        """Wait until this trainer may propose. The wait takes at most `2 * served_seconds`: all present audits are then over."""
        # Lowest rate for audits in bytes per second: half of the job's lowest uplink.
        least = spec.uplink_mbit_min * 1_000_000 / 16
        with trio.move_on_after(2 * served_seconds):
            while self._seconds_owed(least) > BACKLOG_SHARE_MAX * served_seconds or self._is_full(spec):  # noqa: ASYNC110 - links count
                await trio.sleep(POLL_SECONDS)

    def _seconds_owed(self, least: float) -> float:
        self._uplink.update_owed(*self._shown())
        return self._uplink.backlog_seconds(least)

    def _is_full(self, spec: JobSpec) -> bool:
        """Return whether the buffers of one more round would exceed `AUDIT_BYTES_MAX`."""
        of_round = spec.audit_bytes // (spec.rounds_audited + 1)
        return (len(proposals_to_serve(self._me, self._applied.current)) + 1) * of_round > AUDIT_BYTES_MAX
