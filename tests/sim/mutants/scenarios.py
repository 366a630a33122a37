"""Small histories that can reveal a certain bug: few blocks, and only the necessary faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

from consensus.effects import OwnRoundStatement, OwnStatement, StepEffects
from protocol import codec
from protocol.messages import (
    Commit,
    Decision,
    Prepare,
    Prepared,
    Propose,
    ProposeEnvelope,
    Timeout,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
)
from tests.sim import partitions
from tests.sim.client_runs import LOST_MS_MAX
from tests.sim.disk import Disk
from tests.sim.invariants import Violation, faults_tolerated
from tests.sim.network import Link
from tests.sim.plan import Fault, Plan
from tests.sim.simulation import SECOND_AUTHOR, Peer, Simulation
from tests.sim.strategies.base import opened

RESTORED_SECONDS = 0.1  # after the leader proposed
JOIN_SECONDS = 0.2  # from an arrival to the reaction
SPARED = 0.5  # prepares and timeouts are lost this much more rarely than commits: many blocks are prepared, few decided


@dataclass(frozen=True, slots=True)
class Scenario:
    """Settings of a history that its seed does not determine."""

    n: int = 4
    liars: tuple[str, ...] = ()
    blocks: int = 8
    seconds: float = 1.0  # of trouble
    lost: float = 0.0  # share of the commits that are lost meanwhile
    calm_seconds: float = 0.1  # nothing happens before
    crashes: int = 0
    blackouts: int = 0  # everybody crashes at once
    breaks: int = 0  # links that break
    rollbacks: int = 0
    rolled_back_after: str = Propose.TAG  # tag of the signature that the old disk lacks
    rolled_back_far: bool = False  # to a disk of some heights before, not of the turn before
    wrong_states: int = 0  # of a model
    work: float | None = None  # transactions a block; None: the seed decides
    in_a_row: bool = False  # the liars lead one after the other
    leaves: int = 0  # at the same time
    joiners: int = 0
    stranger: str = ""  # strategy of a liar that comes after the joiners and never votes
    joins_at: float = 0.3
    rotates: bool = False
    retires: float | None = None  # 1: all voters allow f to fall
    goes_back: float | None = None  # 1: a quorum of voters requests a rollback of the job; 0: one voter too few
    jobs: bool = True
    minute_ms: int = 0  # of curation
    serves: bool = False  # all founders are gateways of client runs
    is_liar_gateway: bool = False  # the first liar is the only gateway
    lost_ms_max: int = LOST_MS_MAX  # lost time of a gateway whose steps are not late
    loner: str = ""  # there is a second job, and the others retire its only trainer: "back", it runs; "lost", its disk is damaged

    def simulation(self, seed: int) -> Simulation:
        return Trouble(self, self.plan(seed))

    @property
    def _settings(self) -> dict[str, Any]:
        """Return the fields that differ from a calm network. A new field leaves the scenarios that do not set it unchanged."""
        settings = {of.name: (of.default, getattr(self, of.name)) for of in fields(self)}
        return {name: value for name, (default, value) in settings.items() if value != default}

    def plan(self, seed: int) -> Plan:
        source = random.Random(f"scenario {seed} {self._settings}")
        faults: list[Fault] = []

        def add(kind: str, at: float, until: float, nodes: tuple[int, ...], amount: float = 0.0, detail: str = "") -> None:
            faults.append(Fault(len(faults), kind, round(at, 3), round(until, 3), nodes, amount, detail))

        peers = source.sample(range(self.n), self.n) if not self.in_a_row else [*reversed(range(self.n))]
        liars = peers[::-1][: len(self.liars)]
        for name in self.liars:
            add("liar", 0.0, self.seconds, (peers.pop(),), detail=name)
        for _ in range(self.crashes):
            at = source.uniform(self.calm_seconds, self.seconds * 0.9)
            add("crash", at, at + source.uniform(0.05, 0.6), (source.choice(peers),), source.random())
        for _ in range(self.blackouts):
            at = source.uniform(self.calm_seconds, self.seconds * 0.9)
            for peer in range(self.n):
                add("crash", at, at + 0.2, (peer,), source.choice((0.0, 1.0)))
        for _ in range(self.breaks):
            at = source.uniform(self.calm_seconds, self.seconds * 0.9)
            one, other = source.sample(range(self.n), 2)
            add("break", at, at + source.uniform(0.05, 0.5), (one, other))
        if self.goes_back is not None:
            add("back", self.seconds, self.seconds, (), self.goes_back)
        for _ in range(self.rollbacks):
            at = source.uniform(self.calm_seconds, self.seconds * 0.7)
            add("rollback", at, at + source.uniform(0.05, 0.6), (peers[0],))
        for _ in range(self.wrong_states):
            at = source.uniform(self.calm_seconds, self.seconds * 0.9)
            add("wrong-state", at, at, (peers[0],), detail="model")
        leaves_at = source.uniform(0.1, 0.6)
        for peer in peers[: self.leaves]:
            add("leave", leaves_at, leaves_at, (peer,))
        for joiner in range(self.joiners):
            add("join", self.joins_at, self.joins_at, (self.n + joiner,))
        if self.retires is not None:
            add("retire", 0.2, 0.2, (peers[0],), self.retires)
        if self.loner == "lost":
            add("damage", 0.6, 0.6, (SECOND_AUTHOR,), 0.5)
        if self.loner:
            assert not self.liars, "the second honest peer is the second one"
            add("retire", 0.6, 0.6, (SECOND_AUTHOR,), 1.0)
        if self.stranger:
            add("join", 0.1, 0.1, (self.n + self.joiners,))
            add("liar", 0.0, self.seconds, (self.n + self.joiners,), detail=self.stranger)
        if self.rotates:
            add("rotate", 0.4, 0.4, (peers[-1], self.n + self.joiners))
        return Plan(
            seed,
            self.n,
            self.joiners + bool(self.stranger),
            int(self.rotates),
            (0.002, source.choice((0.004, 0.03))),
            self.seconds,
            tuple(faults),
            blocks=self.blocks,
            jobs=self.jobs,
            minute_ms=self.minute_ms,
            second_job=bool(self.loner),
            gateways=tuple(range(self.n)) if self.serves else tuple(liars[:1]) if self.is_liar_gateway else (),
            lost_ms_max=self.lost_ms_max,
            work=self.work or source.choice((0.5, 2.0)),
        )


@dataclass(frozen=True, slots=True)
class Splits(Scenario):
    """The histories of `tests.sim.partitions`. Only the field n has an effect."""

    def simulation(self, seed: int) -> Simulation:
        return partitions.simulation(partitions.expand(seed, self.n))


CALM = Scenario()


class Trouble(Simulation):
    _doomed: Peer | None = None  # will come back with an old disk
    _image: Disk | None = None

    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        super().__init__(plan)
        self._scenario = scenario
        self._luck = random.Random(f"luck {plan.seed}")
        self._timeouts: dict[tuple[int, int, int], dict[bytes, int]] = {}
        if scenario.lost:
            self.network.filter = self._may_pass

    def _may_pass(self, sender: int, receiver: int, data: bytes) -> bool:
        message = opened(data)
        weight = SPARED if isinstance(message, ProposeEnvelope) and self._scenario.rollbacks else _weight(message)
        return self.now < self._scenario.calm_seconds or self._luck.random() >= self._scenario.lost * weight

    def _arrive(self, link: Link, epoch: int, messages: list[bytes]) -> None:
        sender, receiver = self.peers[link.sender], self.peers[link.receiver]
        if epoch == link.epoch and not link.blocked and receiver.node is not None and sender.is_honest and receiver.is_honest:
            for message in map(opened, messages):
                if isinstance(message, TimeoutEnvelope):
                    self._note_timeout(receiver, codec.decode_message(message.timeout.body, (Timeout,)), message.timeout.signer)
        super()._arrive(link, epoch, messages)

    def _note_timeout(self, receiver: Peer, timeout: Timeout, signer: bytes) -> None:
        if receiver.node is not None and receiver.node.replica.height == timeout.height:
            heard = self._timeouts.setdefault((receiver.number, receiver.life, timeout.height), {})
            heard[signer] = max(timeout.view, heard.get(signer, -1))
            views = sorted(heard.values(), reverse=True)
            enough = faults_tolerated(len(self.invariants.sets[timeout.height])) + 1
            if len(views) >= enough and views[enough - 1] >= receiver.node.replica.view:
                self.after(JOIN_SECONDS, self._check_joined, (receiver, receiver.life, timeout.height, views[enough - 1]))

    def _check_joined(self, peer: Peer, life: int, height: int, view: int) -> None:
        """Check that a peer gave up a view after it heard of more than f timeouts for it."""
        if peer.life != life or peer.node is None or peer.node.replica.height != height or not peer.node.may_sign_round_messages:
            return
        if peer.node.replica.view <= view and self.invariants.gave_up(peer.key, height) < view:
            raise Violation("join", f"peer {peer.number} is at {height}.{peer.node.replica.view}, others gave up view {view}")

    def _fault_rollback(self, fault: Fault) -> None:
        """Roll back at the worst moment: a leader, for example, returns with its disk from before its proposal."""
        self._doomed, self._image = self.peers[fault.nodes[0]], None
        self.after(fault.at, self._keep_image, ())

    def _keep_image(self) -> None:
        assert self._doomed is not None
        self._image = self._doomed.disk.image()

    def note_durable(self, peer: Peer, turn: StepEffects) -> None:
        super().note_durable(peer, turn)
        if peer is self._doomed and self._image is not None and self.healed is None:
            if self._scenario.rolled_back_after in map(_tag, turn.records):
                self.after(RESTORED_SECONDS, self._restore, (peer, self._image))
                self._doomed = None
            elif not self._scenario.rolled_back_far:
                self._image = peer.disk.image()

    def _restore(self, peer: Peer, image: Disk) -> None:
        if self.healed is None:
            peer.stop()
            self.invariants.on_rolled_back(peer.key)
            peer.disk = image
            peer.start()

    def heal(self) -> None:
        self.network.filter = None
        super().heal()


def _tag(record: Any) -> str:
    """Return the tag of the signed statement in a record, or an empty string."""
    return record.slot[0] if isinstance(record, OwnStatement) else record.tag if isinstance(record, OwnRoundStatement) else ""


def _weight(message: Any) -> float:
    match message:
        case Vote(vote):
            return 1.0 if isinstance(codec.decode_message(vote.body, (Prepare, Commit)), Commit) else SPARED
        case Decision() | Prepared():
            return 1.0
        case TimeoutEnvelope() | ViewEnded():
            return SPARED
    return 0.0
