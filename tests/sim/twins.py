"""Twins (Bano et al. 2021, "Twins: BFT systems made robust"): two machines with one key, each running the honest code.

The twins send every message that a liar could send by running the protocol twice. For each view the peers are split in two
halves that hear only each other, mostly with one twin in each. Any peer may crash meanwhile.
"""

from __future__ import annotations

import random
from typing import Any

from consensus.pbft.own_votes import RollbackCheck
from peer.node.node import Node
from protocol import codec
from protocol.identity import Signer
from protocol.messages import (
    AGREEMENT_MESSAGES,
    GOSSIP_MESSAGES,
    SNAPSHOT_MESSAGES,
    Decision,
    GossipEnvelope,
    Prepared,
    ProposeEnvelope,
    TimeoutEnvelope,
    ViewEnded,
    Vote,
)
from tests.sim import keys
from tests.sim.plan import Fault, Plan, faults_tolerated
from tests.sim.simulation import Peer, Simulation

HEIGHTS = 16  # heights with splits; the twins are detected sooner or later
LATER_HEIGHTS = (6, 9, 12)  # at which the second machine may begin to send; until then nothing contradicts the first one
VIEWS = 4
SPLIT_PROBABILITY = 0.7
HEAL_SECONDS = 25.0
CRASHED_BEFORE_SECONDS = 10.0  # most heights that are split have been decided by then
BLOCKS = 24

SPOKEN = (ProposeEnvelope, Vote, TimeoutEnvelope, Prepared, ViewEnded, GossipEnvelope, Decision)
ANYTHING = (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES, *SNAPSHOT_MESSAGES)


def expand(seed: int, n: int, twins: int | None = None) -> Plan:
    source = random.Random(f"twins {seed} {n}")
    twins = faults_tolerated(n) if twins is None else twins
    late = random.Random(f"late twins {seed} {n}")
    faults: list[Fault] = []
    begins = late.choice((1, *LATER_HEIGHTS))
    for twin in range(twins):
        faults.append(Fault(len(faults), "twin", 0.0, HEAL_SECONDS, (twin, n + twin), float(begins)))
    for height in range(1, HEIGHTS + 1):
        for view in range(VIEWS):
            if source.random() < SPLIT_PROBABILITY and height >= begins:
                side = _side(source, n, twins)
                faults.append(Fault(len(faults), "split", float(height), float(height), side, float(view)))
    for _ in range(source.choice((0, 0, 1, 3))):
        at = round(source.uniform(0.2, CRASHED_BEFORE_SECONDS), 3)
        until = round(at + source.uniform(0.05, 1.5), 3)
        faults.append(Fault(len(faults), "crash", at, until, (source.randrange(n + twins),), round(source.random(), 4)))
    low = source.choice((0.001, 0.01, 0.05))
    return Plan(
        seed, n, twins, 0, (low, low * source.choice((1.5, 6.0))), HEAL_SECONDS, tuple(faults), blocks=BLOCKS, jobs=seed % 2 == 0
    )


def _side(source: random.Random, n: int, twins: int) -> tuple[int, ...]:
    side = {peer for peer in range(n) if source.random() < 0.5}
    for twin in range(twins):
        if (twin in side) != (source.random() < 0.15):
            side.discard(n + twin)
        else:
            side.add(n + twin)
    return tuple(sorted(side))


class Careless(RollbackCheck):
    """A check that takes every signature of its own key for one that this machine made and remembers."""

    def record_forgotten_statement(self, height: int) -> bool:
        return False


class Twins(Simulation):
    """A simulation in which peers n … have the keys of peers 0 …; both of each pair count as liars."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._sides = {(int(fault.at), int(fault.amount)): set(fault.nodes) for fault in plan.of("split")}
        self._begins = {fault.nodes[1]: int(fault.amount) for fault in plan.of("twin")}
        self.network.filter = self._may_pass

    def on_new_node(self, peer: Peer, node: Node) -> None:
        """Let both twins continue: honest machines would stop as soon as they noticed each other."""
        if peer.number < self.plan.joiners or peer.number >= self.plan.n:
            node.replica._check = Careless(no_votes_below=node.replica.no_votes_below)

    def signers(self, plan: Plan) -> list[Signer]:
        own = keys.signers(plan.n, plan.ed25519)
        return [*own, *own[: plan.joiners]]

    def _may_pass(self, sender: int, receiver: int, data: bytes) -> bool:
        message = codec.decode_message(data, ANYTHING)
        when = self._when(sender, message)
        if isinstance(message, SPOKEN) and when[0] < self._begins.get(sender, 0):
            return False
        side = self._sides.get(when)
        return side is None or (sender in side) == (receiver in side)

    def _when(self, sender: int, message: Any) -> tuple[int, int]:
        """Return the height and view of a message, or those of its sender if it names none."""
        match message:
            case ProposeEnvelope():
                statement = codec.unpack(message.propose.body, 1 << 20)
            case Vote(vote):
                statement = codec.unpack(vote.body, 1 << 20)
            case TimeoutEnvelope(timeout, _):
                statement = codec.unpack(timeout.body, 1 << 20)
            case Prepared(certificate):
                statement = codec.unpack(certificate.vote, 1 << 20)
            case ViewEnded(certificate):
                statement = codec.unpack(certificate.timeouts[0].body, 1 << 20)
            case _:
                node = self.peers[sender].node
                return (node.replica.height, node.replica.view) if node is not None else (0, 0)
        return statement[2], statement[3]

    def _fault_split(self, fault: Fault) -> None:
        self.count("split")

    def _fault_twin(self, fault: Fault) -> None:
        self.count("twin")

    def heal(self) -> None:
        self.network.filter = None
        super().heal()


def simulation(plan: Plan) -> Simulation:
    return Twins(plan)
