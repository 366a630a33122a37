"""Simulated gateways of client runs: mostly valid transactions, and attempts that the ledger must refuse."""

from __future__ import annotations

import contextlib
import hashlib
import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

from clients.ledger import clients_module
from clients.ledger.clients_module import (
    ClientRun,
    ClientsState,
    EndRun,
    OpenRun,
    RequestStep,
    SaveModel,
    SetExpiry,
)
from clients.records import OptimizerStep, StepBrief
from ledger.jobs import StartJob, StopJob
from ledger.ledger_state import LedgerState
from protocol import codec
from protocol.identity import Signer

RUNS_AT_ONCE = 2  # of one gateway
RUNS_OF_ONE = 4
ROUNDS = (4, 1_000)  # of a run: some runs end with their last round
WANTED_SHARE = 0.8  # of the moments at which a gateway could say something; it does other work as well
ATTEMPT_SHARE = 0.15  # of the wishes
EXPIRY_SHARE, END_SHARE, SAVE_SHARE = 0.1, 0.06, 0.25  # of the wishes about own runs
CONTINUED_SHARE = 0.5  # of the runs that could continue from a checkpoint
NAMES = ("first", "second", "third")  # of checkpoints
LIFETIMES_MS = (0, 0, 500, 2_000)  # of checkpoints: some expire within a history
WITHHELD_OF_256 = 128  # steps of a liar whose data nobody else gets
ADAMW = OptimizerStep(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


def late_after(lost_ms_max: int) -> contextlib.AbstractContextManager[object]:
    """Change the lost time from which on the steps of a gateway are late."""
    return mock.patch.object(clients_module, "LOST_MS_MAX", lost_ms_max)


def withholds(brief: bytes) -> bool:
    """Return True if a lying gateway withholds the data of this step."""
    return hashlib.sha256(b"withheld" + brief).digest()[0] < WITHHELD_OF_256


def _continued(spec: bytes, job: bytes, number: int, root: bytes) -> bytes:
    return b"%s:%s:%d:%s" % (spec, job.hex().encode(), number, root.hex().encode())


@dataclass
class Gateway:
    """Transactions of one peer about client runs. The peer keeps nothing: the state says which steps are open."""

    signer: Signer
    random: random.Random
    opened: int = 0
    attempts: int = 0  # wishes that the ledger must refuse

    def wanted(self, state: LedgerState) -> tuple[str, Any] | None:
        """Return the next transaction, or None if there is nothing to say."""
        draw = self.random
        if draw.random() >= WANTED_SHARE:
            return None
        runs, owners = state.module_state(ClientsState).runs, state.members.current_key
        mine = {key: run for key, run in sorted(runs.items()) if owners(run.owner) == self.signer.public}
        others = {key: run for key, run in sorted(runs.items()) if key not in mine}
        if draw.random() < ATTEMPT_SHARE:
            attempt = self._attempt(mine, others)
            self.attempts += attempt is not None
            return attempt
        unfinished = [key for key, run in mine.items() if not run.is_over]
        if len(unfinished) < RUNS_AT_ONCE and self.opened < RUNS_OF_ONE and draw.random() < (0.3 if unfinished else 1.0):
            self.opened += 1
            return "client/open", OpenRun(self._spec(mine | others))
        saving = [key for key, run in mine.items() if run.checkpoints]
        if saving and draw.random() < EXPIRY_SHARE:
            key = draw.choice(saving)
            return "client/expire", SetExpiry(key, draw.choice(list(mine[key].checkpoints)), self._expires_ms(state.time_ms))
        if unfinished and draw.random() < END_SHARE:
            key = draw.choice(unfinished)
            return draw.choice((("client/end", EndRun(key)), ("job/stop", StopJob(key))))
        idle = [key for key in unfinished if mine[key].open_step is None]
        if not idle:
            return None
        if draw.random() < SAVE_SHARE:
            return "client/save", SaveModel(draw.choice(idle), draw.choice(NAMES), self._expires_ms(state.time_ms))
        key = draw.choice(idle)
        return "client/step", RequestStep(key, self._brief(key, mine[key].next_step))

    def _spec(self, runs: dict[bytes, ClientRun]) -> bytes:
        """Return the specification of a run, which may continue from a checkpoint of any member."""
        spec = b"client:%d" % self.random.choice(ROUNDS)
        saved = [(key, of.model) for key, run in runs.items() for of in run.checkpoints.values()]
        if not saved or self.random.random() >= CONTINUED_SHARE:
            return spec
        key, model = self.random.choice(saved)
        return _continued(spec, key, model.round, model.root)

    def _expires_ms(self, now_ms: int) -> int:
        lifetime = self.random.choice(LIFETIMES_MS)
        return lifetime and now_ms + lifetime

    def _brief(self, key: bytes, step: int) -> StepBrief:
        """Return a brief with new data: a gateway that has forgotten its last request does not repeat it."""
        return StepBrief(step, hashlib.sha256(key + codec.encode(step) + self.random.randbytes(8)).digest(), 100, ADAMW)

    def _attempt(self, mine: dict[bytes, ClientRun], others: dict[bytes, ClientRun]) -> tuple[str, Any] | None:
        """Return a transaction that breaks a rule: of a stranger, doubled, out of order, or about a run that is over."""
        draw = self.random
        over = [key for key, run in mine.items() if run.is_over]
        if over and draw.random() < 0.3:
            key = draw.choice(over)
            return "client/step", RequestStep(key, self._brief(key, mine[key].next_step))
        if others and draw.random() < 0.5:
            key = draw.choice(list(others))
            run = others[key]
            name = next(iter(run.checkpoints), NAMES[0])
            return draw.choice(
                (
                    ("client/step", RequestStep(key, self._brief(key, run.next_step))),
                    ("client/step", RequestStep(key, self._brief(key, run.next_step))),
                    ("client/save", SaveModel(key, "stolen", 0)),
                    ("client/expire", SetExpiry(key, name, 1)),
                    ("client/end", EndRun(key)),
                )
            )
        if mine and draw.random() < 0.8:
            key = draw.choice(list(mine))
            run = mine[key]
            if run.open_step is not None:
                step = draw.choice((run.open_step.brief, self._brief(key, run.next_step), self._brief(key, run.next_step + 1)))
                return draw.choice((("client/step", RequestStep(key, step)), ("client/save", SaveModel(key, NAMES[0], 0))))
            wrong = draw.choice((0, run.next_step - 1, run.next_step + 1))
            if not run.is_over and wrong not in (-1, run.next_step):
                return "client/step", RequestStep(key, self._brief(key, wrong))
        unsaved = [*mine, *others, self.signer.public][0]
        return draw.choice(
            (
                ("job/start", StartJob(b"client:9")),
                ("client/open", OpenRun(b"audited:9")),
                ("client/open", OpenRun(_continued(b"client:9", unsaved, 0, draw.randbytes(32)))),
            )
        )
