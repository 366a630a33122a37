"""A small GPT with some lying trainers, in one process: the lies that are accepted, and their effect on the loss.

The rules are the real ones: cheap checks of `ReplicatedModel.check_proposal`, re-execution by `proposals.compared`, audits drawn
by `ledger.audits.sortition`, votes and vouches by `rounds.round_state`, and rounds by `ReplicatedModel.apply_round`. Network and
time are not simulated, so no payload is withheld. A dispute takes `DISPUTE_ROUNDS`, and then the job returns to the newest anchor
before the lie. Updates are cached, so runs with the same model compute them once.

Runs of one attack differ in their draws (`Plan.draws`). All but the first of them end as soon as the trigger's result is known.
The rest is a clean run once all liars were convicted and no lie is in the model.

The replay of a round finds a lie in it, however few of its steps are false. A fifth of the honest auditors' reports lapse.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks import attacks_trigger as on_trigger
from benchmarks.attack_suite import (
    ACCEPT_ALL,
    IN_TURN,
    INVENTED_FEEDBACK,
    LATE,
    PAYLOADS,
    TARGETED,
    VECTORS,
    VOTES,
    VOTES_VECTOR,
    Knowledge,
    Said,
)
from benchmarks.attacks_detection import LAPSES
from benchmarks.attacks_trigger import UNMEASURED, Trigger
from benchmarks.attacks_voters import decided
from benchmarks.simulated import JOB, Rounds, Update, engine_of, trainer_key
from ledger.audits import sortition
from peer.runtime.audit_scheduler import first_spike, most_suspect_round, spike_threshold
from peer.runtime.round_executor import LossHistory
from protocol.errors import LocalProtocolError
from protocol.messages import Proposal
from protocol.verdicts import Verdict
from rounds.round_terms import RoundTerms
from training.engines.pytorch.engine import TorchEngine
from training.engines.pytorch.model import GPT
from training.job_spec import AuditMode, JobSpec
from training.replay import proposal_replay
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array

CLEAN = "none"
DELAY_ROUNDS = 2  # of the delayed gradient and of the replayed payload
DISPUTE_ROUNDS = 2  # from the closing of a round to the suspension of its liar: a report, then the verdicts
LIARS_DRAW = hashlib.sha256(b"what liars compute losses on").digest()
LATE_SHARE = 1 / 3  # share of the rounds in which late liars lie before the closing rounds, unless a plan has its own number
UPDATES_MAX = 1_000  # cache size: 1.3 GB for the usual model
PUBLIC_SEQUENCES = 16  # sequences of the public text, others in each round


@dataclass(frozen=True)
class Plan:
    """Rounds in which liars lie, and the seed of the audits' draws."""

    closing: int | None = None  # last rounds, re-executed before the vote with sampled audits; None: as usual in jobs
    late: int | None = None  # rounds in which late liars lie, right before those; None: `LATE_SHARE`
    draws: int = 0  # seed of the draws of auditors and of their lapses, besides that of the job

    def rounds(self, spec: JobSpec, audit: AuditMode) -> tuple[int, int]:
        """Return the first round in which late liars propose, and the number of closing rounds."""
        usual = replace(spec, audit=audit).usual_final_full_audit_rounds
        closing = self.closing if audit is AuditMode.SAMPLED and self.closing is not None else usual
        return spec.rounds - closing - (math.ceil(LATE_SHARE * spec.rounds) if self.late is None else self.late), closing


@dataclass
class Outcome:
    attack: str
    peers: int
    liars: int
    audit: str
    plan: Plan
    heldout_nats: float | None = None  # None: the run ended early, since the rest is a clean run
    trigger: Trigger = UNMEASURED  # of the final model
    planted_by_round: int | None = None  # attacks with a target: first round after which most prompts succeed
    honest_refused: int = 0  # proposals of honest trainers
    rejected: dict[str, int] = field(default_factory=dict)  # lies, by reason
    accepted: int = 0  # lies that moved the model
    audits: int = 0  # steps replayed afterwards
    suspended_by_round: int | None = None  # the round in which every liar had been suspended once
    found: int = 0  # accepted lies that an honest auditor has seen
    undone: int = 0  # rounds, by convictions
    rounds: int = 0  # closed, with the undone ones


class Lying(GPT):
    """A GPT that learns another text than the job's."""

    def __init__(self, job: JobSpec, changed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(job)
        self._changed = changed

    def loss(self, x_BT: Tensor, y_BT: Tensor, reduction: str = "mean") -> Tensor:
        return super().loss(*self._changed(x_BT, y_BT), reduction)


def flipped(x_BT: Tensor, y_BT: Tensor) -> tuple[Tensor, Tensor]:
    return x_BT, 255 - y_BT


class World:
    """Shared parts of the runs of one size: engines, and updates by model and trainer."""

    def __init__(self, spec: JobSpec, text: Path, peers: int, liars: int) -> None:
        self.spec, self.peers, self.liars = spec, peers, liars
        self.engine = engine_of(spec, text)
        self.flipped, self.triggered = (engine_of(spec, text) for _ in range(2))
        self.flipped.model, self.triggered.model = Lying(spec, flipped), Lying(spec, on_trigger.planted)
        self.rare = on_trigger.rare_rows(spec)
        self._updates: dict[tuple[bytes, bytes, TorchEngine], Update] = {}  # by root, trainer and engine, in order of last use
        self._triggers: dict[bytes, Trigger] = {}  # by root

    @property
    def honest(self) -> list[bytes]:
        return [trainer_key(number) for number in range(self.peers - self.liars)]

    @property
    def lying(self) -> list[bytes]:
        return [trainer_key(number) for number in range(self.peers - self.liars, self.peers)]

    def update(self, rounds: Rounds, trainer: bytes, engine: TorchEngine | None = None) -> Update:
        """Return the update of a trainer. The model root covers all accepted updates, so root, trainer and text determine it."""
        engine = engine or self.engine
        place = (rounds.model.root, trainer, engine)
        made = self._updates.pop(place, None) or rounds.update(trainer, engine)
        self._updates[place] = made
        if len(self._updates) > UPDATES_MAX:
            del self._updates[next(iter(self._updates))]
        return made

    def trigger(self, model: ReplicatedModel) -> Trigger:
        if model.root not in self._triggers:
            self._triggers[model.root] = on_trigger.measured(self.engine, np.array(model.parameters))
        return self._triggers[model.root]


class Run:
    """One attack under one kind of audit."""

    def __init__(self, world: World, attack: str, audit: AuditMode, plan: Plan = Plan()) -> None:
        self.world, self.attack, self.audit, self.plan = world, attack, audit, plan
        self.rounds = Rounds(world.spec, world.engine)
        self.late, self.closing = plan.rounds(world.spec, audit)
        self.poison: Float32Array | None = None  # of this round
        self.outcome = Outcome(attack, world.peers, world.liars, audit.value, plan)
        self.back_in: dict[bytes, int] = {}  # suspended liars, with the first round in which they train again
        self.times: Counter[bytes] = Counter()
        self.pending: list[tuple[int, bytes, int]] = []  # (round of the conviction, liar, round of the lie)
        self.line = list[int]()  # the rounds in the model
        self.audited = dict[int, list[bytes]]()  # trainers whose updates may be challenged, by round
        self.false = set[tuple[int, bytes]]()  # accepted lies: (round, liar)
        self.challenged = set[tuple[int, bytes]]()
        self.volunteered: dict[bytes, list[int]] = {key: [] for key in world.honest}  # rounds
        self.reports: dict[bytes, list[tuple[int, bytes]]] = {key: [] for key in world.honest}  # due from volunteers
        self.watches = {key: LossHistory() for key in world.honest}
        self.lines_undone: list[tuple[int, int]] = []  # first and last round of each
        self.anchors = [self.rounds.model]
        self.is_foreseen = True  # the draw of the open round is predictable, so all updates are re-executed
        self.history: dict[bytes, list[tuple[Float32Array, bytes]]] = {liar: [] for liar in world.lying}

    def finish(self) -> Outcome:
        while self.rounds.model.rounds_in_model < self.world.spec.rounds:
            if self.plan.draws and self._is_clean():
                return self.outcome
            self.round()
            if self.rounds.model.rounds_in_model == self.world.spec.rounds:
                self._convict(math.inf)
        self.outcome.rounds = self.rounds.model.round
        self.outcome.heldout_nats = self.rounds.held_out()
        self.outcome.trigger = self._trigger()
        return self.outcome

    def _is_clean(self) -> bool:
        """Return whether the model is free of lies for the rest of the run. Convicted liars are re-executed before the vote."""
        is_sampled, is_convicted = self.audit is AuditMode.SAMPLED, len(self.times) == self.world.liars
        return is_sampled and is_convicted and {number for number, _ in self.false}.isdisjoint(self.line)

    def _trigger(self) -> Trigger:
        return self.world.trigger(self.rounds.model)

    def round(self) -> None:
        number, self.poison = self.rounds.model.round, None
        present = self._present(number)
        lying = self._lying(present)
        honest = [self._honest(trainer) for trainer in (*self.world.honest, *(liar for liar in present if liar not in lying))]
        for trainer, (_, made) in zip(self.world.honest, honest, strict=False):
            self.watches[trainer].record_loss(JOB, number, made.loss)
        told = {liar: self._lie(liar, honest) for liar in lying}
        lies = {liar: lie for liar, lie in told.items() if lie is not None}
        honest += [self._honest(liar) for liar in told.keys() - lies.keys()]
        accepted, rejected = self._judged([*honest, *lies.values()])
        for liar in lies.keys() - accepted.keys():
            reason = rejected.get(liar, Verdict.UNJUDGED).label
            self.outcome.rejected[reason] = self.outcome.rejected.get(reason, 0) + 1
        self.outcome.accepted += len(lies.keys() & accepted.keys())
        self.false |= {(number, liar) for liar in lies if liar in accepted}
        self.outcome.honest_refused += len(set(self.world.honest) - accepted.keys())
        is_audited, taken = self._is_audited(), self.rounds.model.rounds_in_model
        self.line.append(number)
        self.rounds.close(list(accepted.values()), rejected)
        if self.rounds.model.rounds_in_model % self.world.spec.anchor_rounds == 0:
            self.anchors.append(self.rounds.model)
        self.is_foreseen = False
        if self.audit is AuditMode.SAMPLED:
            self._convict(number)
            self._volunteer(number)
            sampled = [] if is_audited else [key for key in accepted if key not in self.times]
            self._sample(number, taken, sampled, lies.keys())
        if self.attack in TARGETED and self.outcome.planted_by_round is None and self._trigger().success > 0.5:
            self.outcome.planted_by_round = number

    def _present(self, number: int) -> list[bytes]:
        if self.attack == CLEAN or (self.attack in LATE and self.rounds.model.rounds_in_model < self.late):
            return []
        return [liar for liar in self.world.lying if self.back_in.get(liar, 0) <= number]

    def _lying(self, present: Sequence[bytes]) -> Sequence[bytes]:
        """Return the liars of this round.

        With turns only the liar with the fewest convictions lies, since a second conviction has no effect.
        """
        return sorted(present, key=lambda liar: self.times[liar])[:1] if self.attack in IN_TURN else present

    def _honest(self, trainer: bytes) -> tuple[AcceptedProposal, Update]:
        made = self._update(trainer)
        return self.rounds.proposal(trainer, made.m, self.rounds.encode(trainer, made.m), made.inner), made

    def _update(self, trainer: bytes) -> Update:
        return self.world.update(self.rounds, trainer)

    # Lies ------------------------------------------------------------------------------------------------------------

    def _lie(self, liar: bytes, honest: Sequence[tuple[AcceptedProposal, Update]]) -> tuple[AcceptedProposal, Update] | None:
        """Return the liar's proposal and its commitments, or None if it does not lie. Starting from e = 0 is always allowed."""
        attack = VOTES_VECTOR if self.attack in VOTES else VECTORS.get(self.attack)
        if attack is not None:
            vector = attack(self._knowledge(liar, honest))
            return None if vector is None else self._vector(liar, vector)
        own = self._update(liar)
        payload = self.rounds.encode(liar, own.m)
        self.history[liar].append((own.m, payload))
        if self.attack == INVENTED_FEEDBACK:
            return self._invented(liar, own)
        if self.attack in PAYLOADS:
            earlier = self._earlier(liar)
            payload = PAYLOADS[self.attack](
                Said(payload, earlier[1] if earlier else None, honest[0][0].payload, self.rounds.model.layout, self._chance())
            )
        return self.rounds.proposal(liar, own.m, payload, own.inner), own

    def _vector(self, liar: bytes, vector: Float32Array) -> tuple[AcceptedProposal, Update]:
        try:
            m = self.rounds.committed(liar, vector)
            payload = self.rounds.encode(liar, m)
        except LocalProtocolError:  # the values exceed the range of an update
            m, payload = np.zeros_like(vector), b""
        made = Update(vector, m, self._update(liar).inner if self.world.spec.keeps_inner_state else None)
        lie = self.rounds.proposal(liar, m, payload, made.inner)
        return AcceptedProposal(liar, replace(lie.proposal, feedback=None), payload), made

    def _invented(self, liar: bytes, own: Update) -> tuple[AcceptedProposal, Update]:
        """Return an m with an error feedback that has no commitment."""
        m = self.rounds.committed(liar, own.m - np.float32(4) * own.delta)
        lie = self.rounds.proposal(liar, m, self.rounds.encode(liar, m), own.inner)
        invented: Proposal = replace(lie.proposal, feedback=hashlib.sha256(m.tobytes()).digest())
        return AcceptedProposal(liar, invented, lie.payload), replace(own, m=m)

    def _knowledge(self, liar: bytes, honest: Sequence[tuple[AcceptedProposal, Update]]) -> Knowledge:
        said = [self.rounds.given(item.trainer, item.payload).dequantize() for item, _ in honest]

        def own() -> Float32Array:
            m = self._update(liar).m
            self.history[liar].append((m, b""))
            return m

        if self.attack == "delayed":
            own()
        earlier = self._earlier(liar)
        return Knowledge(
            said,
            [made.m for _, made in honest],
            own,
            lambda: self.world.update(self.rounds, liar, self.world.flipped).m,
            self._poison,
            self.world.rare,
            earlier[0] if earlier else None,
            lambda: self._public(self.rounds.model.parameters)[1],
            lambda vector: self._loss_after(vector, honest),
            self._chance(),
            self._unseen(),
        )

    def _poison(self) -> Float32Array:
        """Return the trigger's effect on the first liar's update. All liars send the same."""
        if self.poison is None:
            liar = self.world.lying[0]
            self.poison = self.world.update(self.rounds, liar, self.world.triggered).delta - self._update(liar).delta
        return self.poison

    def _loss_after(self, vector: Float32Array, honest: Sequence[tuple[AcceptedProposal, Update]]) -> float:
        """Return the loss on the public text if all present liars send this vector."""
        model = self.rounds.model
        lies = [self._vector(liar, vector)[0] for liar in self._present(model.round)]
        if any(model.check_proposal(lie.trainer, lie.proposal, lie.payload) is not Verdict.ACCEPT for lie in lies):
            return -math.inf
        after = model.apply_round([*(item for item, _ in honest), *lies], {})
        loss = self._public(after.parameters)[0]
        return loss if math.isfinite(loss) else math.inf

    def _unseen(self) -> float:
        """Return the largest loss of the next round at which no honest trainer sees a jump."""
        number = self.rounds.model.round + 1
        return min(spike_threshold(of.losses(JOB, self.lines_undone), number) for of in self.watches.values())

    def _public(self, parameters: Float32Array) -> tuple[float, Float32Array]:
        """Return loss and gradient on text that a liar draws for itself."""
        engine = self.world.engine
        engine.load_parameters(np.array(parameters))
        loss = engine.accumulate_gradient(engine.draw_batch(JOB, self.rounds.model.round, LIARS_DRAW, 0, PUBLIC_SEQUENCES))
        return loss, engine.model.gradients.numpy().copy()

    def _earlier(self, liar: bytes) -> tuple[Float32Array, bytes] | None:
        past = self.history[liar]
        return past[-1 - DELAY_ROUNDS] if len(past) > DELAY_ROUNDS else None

    def _chance(self) -> np.random.Generator:
        return np.random.default_rng((self.world.spec.seed, self.rounds.model.round))

    # Judging ---------------------------------------------------------------------------------------------------------

    def _judged(
        self, made: Sequence[tuple[AcceptedProposal, Update]]
    ) -> tuple[dict[bytes, tuple[AcceptedProposal, Update]], dict[bytes, Verdict]]:
        """Return the accepted proposals, and the verdicts that rejected the others, by trainer."""
        model, by_trainer = self.rounds.model, {item.trainer: (item, update) for item, update in made}
        voters, trainers = frozenset((*self.world.honest, *self.world.lying)), frozenset(by_trainer)
        probation = trainers & self.times.keys() if self.audit is AuditMode.SAMPLED else frozenset[bytes]()
        vouched = trainers if self._is_audited() else probation
        auditors = voters if vouched else frozenset[bytes]()
        terms = RoundTerms(JOB, model.round, model.root, voters, auditors, trainers, trainers, vouched)
        checked = {
            trainer: (item.proposal, model.check_proposal(trainer, item.proposal, item.payload))
            for trainer, (item, _) in by_trainer.items()
        }
        lying = dict.fromkeys(self.world.lying, VOTES.get(self.attack, ACCEPT_ALL))
        closed = decided(terms, lying, checked, lambda trainer: self._replayed(*by_trainer[trainer]))
        return {trainer: by_trainer[trainer] for trainer in by_trainer if trainer in closed.accepted}, closed.rejected

    def _is_audited(self) -> bool:
        """Return whether all updates of the open round are re-executed before the vote."""
        is_sampled = self.audit is AuditMode.SAMPLED
        is_closing = self.rounds.model.rounds_in_model >= self.world.spec.rounds - self.closing
        return self.audit is AuditMode.FULL or (is_sampled and (is_closing or self.is_foreseen))

    def _replayed(self, lie: AcceptedProposal, made: Update) -> Verdict:
        """Return the verdict of an honest re-execution, which reproduces an honest trainer's update bit for bit."""
        liar = lie.trainer
        if liar not in self.world.lying:
            return Verdict.ACCEPT
        e = self.rounds.remainder(liar) if lie.proposal.feedback else np.zeros_like(made.m)
        delta, buffer = self._update(liar).delta, self.rounds.buffer(liar, made.m)
        return proposal_replay.compare_update(self.rounds.model, liar, delta, lie.payload, e, buffer)[0]

    def _convict(self, number: float) -> None:
        """Suspend the liars whose convictions are due, and return the job to the newest anchor before their lies."""
        due = [item for item in self.pending if item[0] <= number]
        self.pending = [item for item in self.pending if item not in due]
        for _, liar, _ in due:
            if self.back_in.get(liar, 0) <= self.rounds.model.round:
                self.back_in[liar] = self.rounds.model.round + self.world.spec.suspension_rounds * 2 ** self.times[liar]
                self.times[liar] += 1
        lies = [lie for _, _, lie in due if lie in self.line]
        if lies:
            self.anchors = [anchor for anchor in self.anchors if anchor.round <= min(lies)]
            kept = [of for of in self.line if of < self.anchors[-1].round]
            self.outcome.undone += len(self.line) - len(kept)
            self.line, self.is_foreseen = kept, True
            self.rounds.roll_back(self.anchors[-1])
            self.lines_undone.append((self.anchors[-1].round, self.rounds.model.round - 1))
            self.reports = {key: [of for of in reports if of[0] in kept] for key, reports in self.reports.items()}

    def _volunteer(self, number: int) -> None:
        """Draw a round near a loss jump for each honest trainer that saw one.

        From the next round on the trainer re-executes one update of that round per round, besides its own steps.
        """
        chance = random.Random(f"volunteers {self.world.spec.seed} {self.plan.draws} {number}")
        window = [of for of in self.line if number - self.world.spec.audit_window <= of < number and of in self.audited]
        for me, watch in self.watches.items():
            self.reports[me] = [of for of in self.reports[me] if of[0] in window]  # the others have lapsed
            if self.reports[me]:
                self.outcome.audits += 1
                place = self.reports[me].pop()
                if place in self.false and chance.random() >= LAPSES:
                    self._challenge(number, place)
                continue
            jump = first_spike(watch.losses(JOB, self.lines_undone), number + 1)
            rounds = [of for of in window[-self.world.spec.audit_window + 1 :] if of not in self.volunteered[me]]
            if jump is not None and rounds:
                drawn = most_suspect_round(rounds, jump)
                self.volunteered[me].append(drawn)
                self.reports[me] = [(drawn, trainer) for trainer in self.audited[drawn] if trainer != me]
                chance.shuffle(self.reports[me])

    def _challenge(self, number: int, lie: tuple[int, bytes]) -> None:
        if lie not in self.challenged:
            self.challenged.add(lie)
            self.outcome.found += 1
            self.pending.append((number + DISPUTE_ROUNDS, lie[1], lie[0]))

    def _sample(self, number: int, taken: int, trainers: Sequence[bytes], lying: Collection[bytes]) -> None:
        """Draw audits. A liar is found if an honest auditor is drawn for it and reports."""
        everybody = [*self.world.honest, *self.world.lying]
        nonces = {
            key: hashlib.sha256(b"nonce %d %d" % (number, self.plan.draws) + key + bytes([self.world.spec.seed % 256])).digest()
            for key in everybody
        }
        self.audited[number] = list(trainers)
        for trainer in trainers:
            spec, others = self.world.spec, [key for key in everybody if key != trainer]
            tickets = sortition.lottery_tickets(JOB, number, nonces, trainer, others)
            rate = sortition.audit_rate_of_round(spec.audit_rate, taken, spec.rounds, self.closing)
            drawn = sortition.draw_auditors(tickets, len(others), spec.auditors, rate)
            self.outcome.audits += len(drawn)
            chance = random.Random(f"{spec.seed} {self.plan.draws} {number} {trainer.hex()}")
            # Lying auditors report nothing.
            is_seen = any(key in self.world.honest and chance.random() >= LAPSES for key in drawn)
            if is_seen and trainer in lying:
                self._challenge(number, (number, trainer))
        if len(self.times) == self.world.liars and self.outcome.suspended_by_round is None:
            self.outcome.suspended_by_round = number


def attacked(world: World, attack: str, audit: AuditMode, plan: Plan = Plan()) -> Outcome:
    return Run(world, attack, audit, plan).finish()
