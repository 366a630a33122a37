"""What auditors still ask of this trainer, and whether its uplink has room for another proposal.

An honest trainer on a slow link would be suspended if it proposed faster than its uplink can show what it commits to. So it
proposes only while the rest takes an eighth of the time that auditors have. Where links are fast, that is always so. Silent
auditors, and those that ask slowly, are not waited for: otherwise one liar could stop every trainer.
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

RATE_SECONDS = 20  # over which rates are measured: what the queues of a link take at once is little in so long
RATE_DECAY = 0.998  # of the best rate, a second: half in six minutes, after which a link may be another one
# An auditor that gets less than such a part of an equal share could ask faster: it is slow itself, or holds this trainer up.
ACTIVE_SHARE_MIN = 1 / 4
# That is not known of an auditor whose audits have just begun: a chunk of each of eight transfers takes as long at 2 Mbit/s,
# beside an update that others fetch. It is waited for meanwhile, once while anything is awaited of it that it has not fetched.
GRACE_SECONDS = 10
QUEUED_BYTES = WINDOW_CHUNKS_START * BLOB_CHUNK_BYTES  # what an auditor asks for before it knows how fast the link is
POLL_SECONDS = 0.1  # between two looks while a proposal waits: over a fast link nothing is owed any more by the next one
BACKLOG_SHARE_MAX = 1 / 8  # of the time that auditors have: what is owed before a proposal, and what all ask for of it, fit in

Audits = Mapping[Hashable, int]  # of one auditor: the bytes that it has to fetch for each


class AuditBacklog:
    """How fast this peer shows what audits ask for, and what it still owes. Pure: `record_second` is called once a second, and
    `update_owed` whenever what is owed matters.
    """

    def __init__(self) -> None:
        self._seen: Mapping[bytes, int] = {}  # bytes by auditor, since the start
        self._sent = deque[Mapping[bytes, int]]([{}], RATE_SECONDS + 1)  # the same, once a second
        self._seconds = 0
        self._best = 0.0  # bytes a second, of what was asked for
        self._fastest = 0.0  # the same of the seconds in which anything was
        # By auditor: its audits, what it had got before them, and when it began.
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
            # Over a fast link all of an audit comes between two looks, and its report is decided a round or two later.
            before, base, began = self._owed.get(auditor, ({}, self._seen.get(auditor, 0), self._seconds))
            ended = sum(size for audit, size in before.items() if audit not in audits)
            if ended and base + ended <= sent.get(auditor, 0):  # it has reported, and got that before; a liar lets it lapse
                began = self._seconds
            owed[auditor] = audits, min(base + ended, sent.get(auditor, 0)), began
        self._owed, self._seen = owed, dict(sent)

    def _rates(self) -> dict[bytes, float]:
        """Bytes a second in the last seconds, by auditor that got any."""
        first, last = self._sent[0], self._sent[-1]
        got = {auditor: sent - first.get(auditor, 0) for auditor, sent in last.items()}
        return {auditor: sent / RATE_SECONDS for auditor, sent in got.items() if sent}

    def _rate_while_asked(self) -> float:
        """Where a link could show more than it is asked for, a mean over all seconds says how little that is. What may only have
        filled queues is left out.
        """
        totals = [sum(sent.values()) for sent in self._sent]
        asked = sum(after > before for before, after in pairwise(totals))
        return max(0, totals[-1] - totals[0] - QUEUED_BYTES * len(self._rates())) / (asked + 1)

    def backlog_seconds(self, least: float) -> float:
        """How long this uplink takes for what is still asked for; `least` is its rate in bytes a second if it is not known."""
        rates, best = self._rates(), max(self._best, least)
        owed = 0
        for auditor, (audits, base, began) in self._owed.items():
            begins = self._seconds < began + GRACE_SECONDS
            if begins or rates.get(auditor, 0.0) >= ACTIVE_SHARE_MIN * best / max(1, len(rates)):
                owed += max(0, sum(audits.values()) - (self._seen.get(auditor, 0) - base))
        return owed / max(best, self._fastest)


@functools.lru_cache(maxsize=RUNNING_MAX)
def audit_bytes_of(spec: bytes) -> int:
    """What one auditor fetches of a proposal of this job."""
    return audit_download_bytes_max(JobSpec.decode(spec))


class AuditBackpressure:
    """`run` it once; `wait_to_propose` is awaited before each proposal."""

    def __init__(self, me: bytes, network: ConnectionManager, applied: CurrentState) -> None:
        self._me, self._network, self._applied = me, network, applied
        self._uplink = AuditBacklog()

    async def run(self) -> None:
        while True:
            self._uplink.record_second(*self._shown())
            await trio.sleep(1.0)

    def _shown(self) -> tuple[Mapping[bytes, int], Mapping[bytes, Audits]]:
        """What each auditor got, and what it is to get."""
        state, awaited = self._applied.current, dict[bytes, Audits]()
        for auditor, due in awaited_auditors(self._me, state).items():
            awaited[auditor] = {(job, place): audit_bytes_of(state.jobs.jobs[job].spec) for job, place in due}
        return self._network.audit_bytes_sent_by_peer(), awaited

    async def wait_to_propose(self, spec: JobSpec, served_seconds: float) -> None:
        """Returns when this trainer may propose: at once, mostly, and at the latest when its audits of now are over."""
        least = spec.uplink_mbit_min * 1_000_000 / 16  # the half of it that is for audits, in bytes
        with trio.move_on_after(2 * served_seconds):
            while self._seconds_owed(least) > BACKLOG_SHARE_MAX * served_seconds or self._is_full(spec):  # noqa: ASYNC110 - links count
                await trio.sleep(POLL_SECONDS)

    def _seconds_owed(self, least: float) -> float:
        self._uplink.update_owed(*self._shown())
        return self._uplink.backlog_seconds(least)

    def _is_full(self, spec: JobSpec) -> bool:
        """Whether the buffers of another round are too much for the disk."""
        of_round = spec.audit_bytes // (spec.rounds_audited + 1)
        return (len(proposals_to_serve(self._me, self._applied.current)) + 1) * of_round > AUDIT_BYTES_MAX
