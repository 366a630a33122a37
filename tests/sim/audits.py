"""Sampled audits in a simulated network: which proposals are false, and what liars say about proposals.

A buffer is a hash. The payload determines the buffer of honest work, so every auditor that replays a proposal with another
buffer sees that it is false.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from ledger.audits.audit_state import AuditDuty
from protocol.messages import Ballot
from protocol.verdicts import ReplayFinding

if TYPE_CHECKING:
    from peer.node.node import Node


USUAL_LOSS = 2_000_000  # millionths
ROUNDING = 100  # a larger difference than replays of one round really have


def payload_of(job: bytes, number: int, trainer: bytes, model_root: bytes, brief: bytes = b"") -> bytes:
    """`brief` is that of a round on request."""
    return hashlib.sha256(b"update" + job + number.to_bytes(8, "big") + trainer + model_root + brief).digest()


def buffer_of(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


def loss_of(job: bytes, number: int, trainer: bytes) -> int:
    """Return the loss of a trainer's last step, in millionths."""
    made = hashlib.sha256(b"loss" + job + number.to_bytes(8, "big") + trainer).digest()
    return USUAL_LOSS + int.from_bytes(made[:4], "big") % 500_000


def found(due: AuditDuty) -> ReplayFinding:
    """Return the finding of an honest replay of this proposal."""
    proposal = due.proposal
    is_honest = proposal.payload == payload_of(due.job, due.round, due.trainer, proposal.model_root)
    return ReplayFinding.MATCH if is_honest and proposal.buffer == buffer_of(proposal.payload) else ReplayFinding.MISMATCH


class Auditor:
    """An honest auditor."""

    waits = True  # for the data to re-execute; liars with one fixed finding do not need it

    def __init__(self, colluders: tuple[bytes, ...] = ()) -> None:
        self.colluders = colluders

    def shows(self, due: AuditDuty, to: bytes) -> float:
        """Return, as a trainer, the share of the slowest link's time after which this auditor or judge has the whole proposal."""
        return 0.0

    def says(self, due: AuditDuty, shown: bool, is_late: bool) -> ReplayFinding | None:
        """`shown`: the data to re-execute is here; `is_late`: the slowest allowed link would have delivered it by now."""
        if shown or not self.waits:
            return self.finding(due)
        return ReplayFinding.WITHHELD if is_late else None

    def started(self, node: Node) -> None:
        """React to a start of its node."""

    def buffer(self, payload: bytes) -> bytes:
        return buffer_of(payload)

    def finding(self, due: AuditDuty) -> ReplayFinding | None:
        """Return the reported finding, or None for no report."""
        return found(due)

    def loss(self, due: AuditDuty) -> int:
        """Return the loss that it reports with a match."""
        return loss_of(due.job, due.round, due.trainer) + due.auditor[0] % ROUNDING - ROUNDING // 2

    def own_loss(self, job: bytes, number: int, trainer: bytes) -> int:
        """Return the loss that it commits to and opens as a trainer."""
        return loss_of(job, number, trainer)

    def opens(self) -> bool:
        return True

    def volunteers(self, due: AuditDuty) -> bool:
        """Return True if it volunteers to audit the proposals of this round."""
        return False


class Distrusts(Auditor):
    """An honest auditor that also volunteers to replay a share of all proposals."""

    def volunteers(self, due: AuditDuty) -> bool:
        return due.proposal.payload[0] < 128


class Cheats(Auditor):
    """Cheats in half of its proposals as a trainer, and accepts those of its colluders as an auditor."""

    def buffer(self, payload: bytes) -> bytes:
        return buffer_of(b"false" * (payload[1] < 128) + payload)

    def finding(self, due: AuditDuty) -> ReplayFinding | None:
        return ReplayFinding.MATCH if due.trainer in self.colluders else found(due)


class Hides(Auditor):
    """As a trainer it shows its proposals only to colluders."""

    def shows(self, due: AuditDuty, to: bytes) -> float:
        return 0.0 if to in self.colluders else math.inf


class ShowsSome(Cheats):
    """Shows its proposals to f + 1 honest auditors, so that most judges do not see them."""

    def __init__(self, colluders: tuple[bytes, ...] = (), shown: int | None = None) -> None:
        super().__init__(colluders)
        self._shown = len(colluders) + 1 if shown is None else shown
        self._chosen = dict[tuple[bytes, int], list[bytes]]()  # by job and round: those that asked first

    def shows(self, due: AuditDuty, to: bytes) -> float:
        chosen = self._chosen.setdefault((due.job, due.round), [])
        if to not in chosen and to not in self.colluders and len(chosen) < self._shown:
            chosen.append(to)
        return 0.0 if to in (*chosen, *self.colluders) else math.inf


class Blind(Auditor):
    """An honest judge that receives nothing, because its own link is down."""

    def says(self, due: AuditDuty, shown: bool, is_late: bool) -> ReplayFinding | None:
        return super().says(due, shown and not due.is_dispute, is_late)


class Claims(Auditor):
    """Claims that every trainer except its colluders withholds its proposal."""

    waits = False

    def finding(self, due: AuditDuty) -> ReplayFinding | None:
        return ReplayFinding.MATCH if due.trainer in self.colluders else ReplayFinding.WITHHELD

    def volunteers(self, due: AuditDuty) -> bool:
        return True


class Challenges(Auditor):
    """Challenges every proposal, drawn or not, and finds all guilty."""

    waits = False

    def finding(self, due: AuditDuty) -> ReplayFinding | None:
        return ReplayFinding.MISMATCH

    def volunteers(self, due: AuditDuty) -> bool:
        return True


class Passes(Auditor):
    """Passes every proposal without a replay, and guesses the loss."""

    waits = False

    def finding(self, due: AuditDuty) -> ReplayFinding | None:
        return ReplayFinding.MATCH

    def loss(self, due: AuditDuty) -> int:
        return USUAL_LOSS


class Frames(Auditor):
    """As a trainer it commits to a false loss, so that honest auditors look lazy."""

    def own_loss(self, job: bytes, number: int, trainer: bytes) -> int:
        return loss_of(job, number, trainer) + 1_000_000


class Shut(Auditor):
    """As a trainer it never opens its loss."""

    def opens(self) -> bool:
        return False


class Colludes(Cheats):
    """Cheats, finds its colluders innocent and all others guilty."""

    waits = False

    def finding(self, due: AuditDuty) -> ReplayFinding | None:
        return ReplayFinding.MATCH if due.trainer in self.colluders else ReplayFinding.WITHHELD

    def volunteers(self, due: AuditDuty) -> bool:
        return due.proposal.payload[0] < 128


class Withholds(Auditor):
    """Sends no reports, and reveals either nothing or a value without a commitment."""

    def started(self, node: Node) -> None:
        nonces = node.rounds.secrets
        honest = nonces.with_nonce

        def added_to(ballot: Ballot) -> Ballot:
            said = honest(ballot)
            return replace(said, reveal=None if ballot.round % 2 else said.commitment and said.commitment[:16])

        nonces.with_nonce = added_to  # type: ignore[method-assign]

    def finding(self, due: AuditDuty) -> ReplayFinding | None:
        return None

    def volunteers(self, due: AuditDuty) -> bool:
        return True


LIES: tuple[type[Auditor], ...] = (
    Auditor,
    Cheats,
    Challenges,
    Passes,
    Colludes,
    Withholds,
    Hides,
    ShowsSome,
    Claims,
    Frames,
    Shut,
)
CHEATS_SHARE = 0.5  # of liars: a conviction rolls a job back
LINKS = (0.0, 0.5, 0.95)  # slowness of honest trainers; the last one is close to the slowest allowed link


def slowness(seed: int, number: int) -> float:
    return random.Random(f"link {seed} {number}").choice(LINKS)


def drawn(seed: int, number: int, colluders: tuple[bytes, ...]) -> Auditor:
    """Draw how a liar behaves in audits; its strategy decides the rest."""
    source = random.Random(f"auditor {seed} {number}")
    lies = source.choice(LIES)
    return (Cheats if source.random() < CHEATS_SHARE else lies)(colluders)
