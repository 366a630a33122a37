"""Nodes on virtual time, run by a plan: a whole network of real peers, with all planned faults.

One process, one thread, one heap of events. Each peer is the real `peer.node.node.Node` with the real ledger; a daemon's work
around it (disk, network, clock, applying, judging) consists of events that take virtual time. A peer's messages leave
through `consensus.effects.persist_effects` and `send_messages`, as in the daemon.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import heapq
import itertools
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from consensus.block import decode_block, encode_header, make_header
from consensus.effects import DecidedBlock, RestartState, StepEffects, load_restart_state, persist_effects, send_messages
from consensus.light_client import TrustedBlock
from consensus.pbft.pacemaker import REPEAT_SECONDS_MAX
from consensus.voter_set import faults_tolerated, quorum
from ledger.blocks.application import LedgerApplication
from ledger.core.module import Refused
from ledger.jobs import Job, JobPhase
from ledger.ledger_state import BlockBody, CurrentState, LedgerRules, LedgerState, StateTransition, decode_body
from ledger.snapshots.snapshot_assembly import RestoredSnapshot
from peer.node.future_messages import RoundKey
from peer.node.node import AppliedBlock, Node, NodeInput, RoundEnded, RoundOpened, StepAction
from peer.node.open_rounds import RoundTimings
from protocol import codec
from protocol.errors import LocalProtocolError, RemoteProtocolError, StorageError
from protocol.identity import Signed, Signer
from protocol.limits import CLOCK_AHEAD_SECONDS
from protocol.messages import AGREEMENT_MESSAGES, GOSSIP_MESSAGES, Proposal, ProposeEnvelope
from protocol.messages import LightBlock as ChainLink
from protocol.verdicts import Verdict
from rounds.round_state import OpenRoundState
from tests.ledger.blocks import with_rows_of
from tests.sim import audits, keys, memory, workload
from tests.sim.client_runs import ClientRuns
from tests.sim.crowd import Desk, hurried, people
from tests.sim.curated import Curated
from tests.sim.disk import Disk
from tests.sim.gateways import Gateway, late_after, withholds
from tests.sim.invariants import Invariants, Violation
from tests.sim.ledgers import TRAINING, SharedRules, continued_model, finish, genesis_of, read_again, rules_of, with_wrong_bit
from tests.sim.lineage import Lineage
from tests.sim.network import WEATHER, Link, Network
from tests.sim.plan import Fault, Plan
from tests.sim.progress import Newcomer, Progress
from tests.sim.strategies import STRATEGIES, Liar, Strategy
from tests.sim.transfers import HashedModels, Restoring, Snapshots, is_snapshot_message
from tests.sim.wire import decoding_once
from transport.network import DataReceived, PeerConnected, PeerDisconnected

START = 1_000_000.0  # virtual seconds since the epoch
KINDS = ("audited", "sampled", "plain")  # of jobs, by seed
SECOND_AUTHOR = 1  # among the honest ones
SECOND_JOB_ROUNDS = 8  # it ends while the other one continues
PROPOSED = codec.encode(ProposeEnvelope.TAG)  # prefix of such a message after its first byte
ITEMS_PER_TURN_MAX = 64  # as in the daemon
PULSE_SECONDS = 0.5  # an idle network gets something to decide this often
THINK_SECONDS = (0.0, 0.8)  # between a block and the next transaction of a peer
SYNC_SECONDS = (0.0005, 0.003)  # until a turn is durable
APPLY_SECONDS = (0.001, 0.008)
TRAIN_SECONDS = (0.02, 0.3)
JUDGE_SECONDS = (0.005, 0.05)
REPLAY_SECONDS = (0.005, 0.1)
NOTICED_AFTER_SECONDS = 0.02  # until the others see that a link broke
# Measured in 360 histories of n = 4 and 30 of n = 7. The recovery took 0.5 s in half of them, 1.7 s in 90 %, 10 s in 99 %, and
# 16 s at most. The slowest height after it took 0.4, 1.3, 7.5 and 9.8 s. It was decided in view 0 in 82 %, and in view 2 at most
# (view 4 during the recovery). RECOVERY_SECONDS is the time from healing until all peers have decided RECOVERY_HEIGHTS more. It
# allows for a view timer at its cap of 60 s after slow disks, under the one stopped leader, and then for a leader's fast clock.
RECOVERY_SECONDS = 90.0
RECOVERY_HEIGHTS = 3
HEIGHT_SECONDS_MAX = 25.0  # of a height after those, while f liars still lie
# If a wrong clock is one fault too many, only progress is promised. Views grow by half until one lasts as long as that clock is
# wrong, and a liar may use up further views at their cap.
BEYOND_SECONDS_MAX = RECOVERY_SECONDS
VIEWS_AFTER_HEALING = 6  # no height is decided in a later view after those RECOVERY_HEIGHTS
REST_SECONDS = 70.0  # without work: longer than any view, so that the end of a view would be noticed
RESTS_MAX = 3  # one for messages in transit, one for the effects of a wrong clock
RESTED = 4  # times, each under another leader
# Messages on one link between honest peers in that time. There are none, unless one peer has signed at the open height. Then a
# repeat has a proposal, two certificates, two timeouts, two votes and a Status, and the answer to a Status has as many.
REPEATED_MAX = int(REST_SECONDS / REPEAT_SECONDS_MAX + 1) * 16
SETTLED_SECONDS = 0.3  # after healing, until every link has repeated earlier messages
COLLECTED_EVERY = 8  # histories: one leaves some 20 MB of garbage
BORDERLINE_OF_256 = 32  # updates that one re-execution accepts and another may not
FORGOTTEN_EVERY = 16  # heights between two clean-ups of old ones
SAMPLED_EVERY = 25  # heights between two measurements of a peer's memory


@dataclass
class Peer:
    """One simulated machine: a node and its surroundings."""

    simulation: Simulation
    number: int
    signer: Signer
    author: workload.Author
    rules: LedgerRules
    strategy: Strategy | None = None  # of a liar
    disk: Disk = field(default_factory=Disk)
    node: Node | None = None  # None: it does not run
    inbox: list[NodeInput] = field(default_factory=list)
    busy: bool = False  # in a turn: between writing and sending
    waking: bool = False  # a turn begins in a moment
    life: int = 0  # counts starts: events scheduled for an earlier life are void
    deadline: float | None = None
    due: float | None = None  # a deadline that has passed
    offset: float = START  # of its clock from virtual time
    offset_max: float = START  # largest offset so far: a block that it dated may be decided after its clock was set back
    slowness: float = 0.0  # seconds that each item of a turn costs
    sync: float = 0.0  # more seconds that each sync takes
    doomed: Fault | None = None  # stops in the middle of its next append
    is_late: bool = False  # has not joined the network yet
    anchor: TrustedBlock | None = None  # of its invitation
    is_lost: bool = False  # its disk is damaged: it stays down
    flips: str = ""  # wrong part of the next state that it applies: "counter" or "model"
    is_wrong: bool = False  # its applied state differs from the decided one
    draws: int = 0  # verdicts on borderline updates so far, over all its lives: each may differ
    applying: bool = False
    to_apply: list[DecidedBlock] = field(default_factory=list)
    judging: set[tuple[RoundKey, bytes]] = field(default_factory=set)
    reexecuting: set[tuple[RoundKey, bytes]] = field(default_factory=set)
    models: HashedModels = field(default_factory=HashedModels)  # durable, as the disk
    snapshots: Snapshots | None = None
    restoring: Restoring | None = None

    @functools.cached_property
    def key(self) -> bytes:
        return self.signer.public

    @property
    def is_honest(self) -> bool:
        return self.strategy is None

    @property
    def is_in_time(self) -> bool:
        """True if a quorum can rely on the peer at once: no block waits because of its clock."""
        return self.is_honest and not self.is_lost and abs(self.offset - START) <= CLOCK_AHEAD_SECONDS

    @property
    def is_behind(self) -> bool:
        """True if its clock is slow, so that it prepares only blocks that f + 1 others prepared."""
        return self.is_honest and not self.is_lost and self.offset - START < -CLOCK_AHEAD_SECONDS

    @property
    def height(self) -> int:
        """Return the last applied height."""
        applied = self.disk.applied
        return max(applied) if applied else 0

    def set_clock(self, seconds: float) -> None:
        self.offset += seconds
        self.offset_max = max(self.offset, self.offset_max)

    def now(self) -> float:
        return self.offset + self.simulation.now

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call that is void after a crash."""
        self.simulation.after(seconds, self._if_alive, (self.life, call, arguments))

    def _if_alive(self, life: int, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.life == life:
            call(*arguments)

    # Starting and stopping -------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.node is not None or self.is_late:
            return
        try:
            restart = load_restart_state(self.disk, self.height)
        except StorageError:
            self.is_lost = True
            self.simulation.note_lost(self)
            return
        if self.strategy is not None:
            restart = self.strategy.restart(restart)
        if self is self.simulation.lone:
            self.rules = self.simulation.own_rules()  # its memory is lost
        state, root = self._applied_state()
        self.node = self._new_node(LedgerApplication(self.rules, CurrentState(state), root), restart)
        self.author.auditor.started(self.node)
        if self.is_honest:
            records = [*self.disk.undecided(), *self.disk.round_votes()]
            self.simulation.invariants.on_restart(self.key, self.disk.last, state.height, records)
        self.to_apply = self.disk.decided_above(state.height)
        self.snapshots = Snapshots(self, state)
        self.author.restarted()
        self.simulation.connect(self)
        if self.strategy is not None:
            self.strategy.started()
        if not self.busy:
            self.work()
        self._apply_next()
        self.after(0.05, self.submit)

    def _new_node(self, ledger: LedgerApplication, restart: RestartState, measured: RoundTimings | None = None) -> Node:
        anchor_height = self.anchor.height if self.anchor else 0
        verifier, disk = self.simulation.verifier, self.disk
        node = Node(self.signer, self.rules, ledger, restart, verifier, disk.spoken, disk.accepted_in, anchor_height, measured)
        self.simulation.on_new_node(self, node)
        return node

    def _applied_state(self) -> tuple[LedgerState, bytes]:
        if not self.disk.applied:
            state = self.rules.genesis_state()
            return state, state.state_root
        kept = self.disk.applied[self.height]
        state = with_rows_of(self.rules.decode_state(self.rules.encode_state(kept)), kept)
        return state, decode_block(self.disk.decided[state.height].block).state_root

    def stop(self) -> None:
        """Stop the peer, and lose all that is not durable."""
        if self.node is None:
            return
        self.life += 1
        self.node, self.inbox, self.judging, self.reexecuting = None, [], set(), set()
        self.snapshots = self.restoring = None
        self.busy = self.applying = self.waking = False
        self.deadline = self.due = self.doomed = None
        self.simulation.disconnect(self)

    def restore(self, restored: RestoredSnapshot, links: tuple[ChainLink, ...]) -> None:
        """Continue from a snapshot, between two turns."""
        self.restoring = (restored, links)
        if not self.busy:
            self._take_over(restored, links)

    def _take_over(self, restored: RestoredSnapshot, links: tuple[ChainLink, ...]) -> None:
        """Load everything from the disk as after a restart, but keep the links."""
        self.restoring = None
        if restored.is_overtaken(self.height, self.is_wrong):
            return
        assert self.node is not None
        restored.install_models()
        self.disk.restore(restored.decisions, restored.state, restored.headers, links)
        self.simulation.note_restored(self, restored)
        self.life += 1
        self.is_wrong = False
        state, root = self._applied_state()
        ledger = LedgerApplication(self.rules, CurrentState(state), root)
        self.node = self._new_node(ledger, load_restart_state(self.disk, state.height), self.node.rounds.measured)
        self.author.auditor.started(self.node)
        self.judging, self.reexecuting, self.applying, self.waking, self.deadline = set(), set(), False, False, None
        self.to_apply = self.disk.decided_above(state.height)
        self.snapshots = Snapshots(self, state)
        waiting = [item for item in self.inbox if isinstance(item, DataReceived | StepAction)]
        self.inbox = [*self.simulation.connections(self), *waiting]
        self.author.restarted()
        self.work()
        self._apply_next()

    # Turns -----------------------------------------------------------------------------------------------------------

    def give(self, item: NodeInput) -> None:
        if self.node is not None:
            self.inbox.append(item)
            self.wake()

    def wake(self) -> None:
        if self.busy or self.waking or not self.inbox:
            return
        if self.simulation.plan.wake:
            self.waking = True
            self.after(self.simulation.plan.wake, self._woken)
        else:
            self.work()

    def _woken(self) -> None:
        self.waking = False
        if not self.busy:
            self.work()

    def work(self) -> None:
        """Process all received items in one turn, as the daemon does: sync once, and then send."""
        node = self.node
        assert node is not None and not self.busy
        items, self.inbox = self.inbox[:ITEMS_PER_TURN_MAX], self.inbox[ITEMS_PER_TURN_MAX:]
        now = max(self.now(), self.due or 0.0)  # rounding must not make a deadline early
        self.due = None
        turn = self._turn(node, items, now)
        if turn is None:
            return
        self.busy = True
        self._set_deadline(turn.deadline)
        if self.simulation.sends_before_sync:
            self._send(turn)
        seconds = self.slowness * len(items)
        if turn.records:
            if self.doomed is not None:
                self._tear(turn, self.doomed)
                return
            seconds += self.sync + self.simulation.draw(SYNC_SECONDS)
        if seconds:
            self.after(seconds, self._synced, turn)
        else:
            self._synced(turn)

    def _turn(self, node: Node, items: list[NodeInput], now: float) -> StepEffects | None:
        if self.is_honest:
            return node.step(items, now)
        try:
            return node.step(items, now)
        except Exception:  # lies may crash the liar's own code
            self.stop()
            return None

    def _tear(self, turn: StepEffects, fault: Fault) -> None:
        self.disk.tear(turn.records, fault.amount, fault.detail == "garbled")
        self.simulation.count("torn")
        self.stop()

    def _synced(self, turn: StepEffects) -> None:
        try:
            sends = persist_effects(turn, self.disk)
        except StorageError:
            self.simulation.count("fsync failed")
            self.stop()
            return
        except LocalProtocolError as error:
            if self.is_honest:
                raise Violation("one per slot", str(error)) from None
            self.stop()
            return
        self.simulation.note_durable(self, turn)
        if not self.simulation.sends_before_sync:
            send_messages(sends, self)
            self._flush()
        self.busy = False
        self._follow(turn)
        if self.strategy is not None:
            self.strategy.turned(turn)
        if self.snapshots is not None:
            self.snapshots.look()
        if self.restoring is not None and not self.busy:  # otherwise after the turn that one of these began
            self._take_over(*self.restoring)
        if self.node is not None and not self.busy and (self.inbox or self.due is not None):
            self.work()

    def _follow(self, turn: StepEffects) -> None:
        """Do the daemon's other work after a turn: apply, drop, train, judge."""
        node = self.node
        assert node is not None
        for fault in turn.faults:
            self.simulation.drop(self, fault.peer, fault.error)
        if turn.decided_blocks:
            self.to_apply += turn.decided_blocks
            self._apply_next()
        for change in node.take_round_changes():
            if isinstance(change, RoundOpened):
                self._open_round(change)
            elif isinstance(change, RoundEnded):
                self.judging = {entry for entry in self.judging if entry[0] != change.key}
                self.reexecuting = {entry for entry in self.reexecuting if entry[0] != change.key}
        for signer, message in node.counted_messages:
            if isinstance(message, Proposal):
                self._judge_later((message.job, message.round), signer, message)
        for key, book in node.ledger.rounds.items():
            for trainer in sorted(book.vouching.assigned_at.keys() - book.vouching.own_judgements.keys()):
                self._reexecute_later((key, book.terms.round), trainer, book)

    def _set_deadline(self, deadline: float | None) -> None:
        if deadline != self.deadline:
            self.deadline = deadline
            if deadline is not None:
                self.after(max(0.0, deadline - self.now()), self._tick, deadline)

    def _tick(self, deadline: float) -> None:
        if self.deadline == deadline:
            self.deadline, self.due = None, deadline
            if not self.busy:
                self.work()

    # Outlet ----------------------------------------------------------------------------------------------------------

    def send(self, to: tuple[bytes, ...] | None, message: Any) -> None:
        self.simulation.send(self, to, message)

    def _flush(self) -> None:
        self.simulation.flush(self)

    def _send(self, turn: StepEffects) -> None:
        send_messages((send for send in turn.sends if hasattr(send, "message")), self)
        self._flush()

    # Applying --------------------------------------------------------------------------------------------------------

    def _apply_next(self) -> None:
        if self.applying or not self.to_apply or self._differs(self.to_apply[0]):
            return  # a wrong state is restored first, and then this begins anew
        self.applying = True
        self.after(self.simulation.draw(APPLY_SECONDS) + self.slowness, self._apply, self.to_apply.pop(0))

    def _differs(self, decided: DecidedBlock) -> bool:
        return self.is_wrong and decided.decode().state_root != self._state_before(decided).state_root

    def _apply(self, decided: DecidedBlock) -> None:
        transition, after = self.simulation.apply(self, self._state_before(decided), decided)
        for key, back in transition.rolled_back.items():
            if self.is_honest and not self.is_wrong and not self.models.has_model(key, back.anchor.round, back.anchor.root):
                raise Violation("anchor kept", f"peer {self.number} has no model of round {back.anchor.round}")
        for saved in (continued_model(after.jobs.jobs[key].spec) for key in transition.started_jobs):
            if saved is not None and self.is_honest and not self.models.has_model(saved.job, saved.round, saved.root):
                raise Violation("client checkpoints", f"peer {self.number} has no model of round {saved.round} to continue from")
        if self.flips:
            after = with_wrong_bit(after, self.flips == "model")
            self.flips, self.is_wrong = "", True
        self.disk.applied = {after.height: after}
        block = decided.decode()
        if block.next_voters != block.voters:
            header = encode_header(make_header(block))
            self.disk.links_by_height[block.height] = ChainLink(header, decided.certificate, after.members.voters)
        if self.snapshots is not None:
            self.snapshots.applied(after)
        self.applying = False
        self.give(AppliedBlock(decided, transition, after))
        self.simulation.note_applied(self, after)
        if self.node is not None:
            self._apply_next()
            self.after(self.simulation.draw(THINK_SECONDS), self.submit)

    def _state_before(self, decided: DecidedBlock) -> LedgerState:
        assert decided.height == 1 or decided.height - 1 in self.disk.applied
        return self.disk.applied.get(decided.height - 1) or self.rules.genesis_state()

    # Rounds ----------------------------------------------------------------------------------------------------------

    def _open_round(self, opened: RoundOpened) -> None:
        job, number = opened.key
        if self.key in opened.job.trainers and not opened.has_proposed:
            if not self.simulation.has_bodies(opened.job, self):
                return
            payload = audits.payload_of(job, number, self.key, opened.job.model_root, opened.job.brief)
            if self.strategy is not None:
                payload = self.strategy.payload(payload)
            buffer = self.author.auditor.buffer(payload) if self._is_sampled(job) else audits.buffer_of(payload)
            proposal = Proposal(job, number, opened.job.model_root, payload, 100, buffer, None)
            self.after(self.simulation.draw(TRAIN_SECONDS), self._publish, proposal)

    def _is_sampled(self, job: bytes) -> bool:
        return self.node is not None and job in self.node.state.audits.jobs

    def _publish(self, proposal: Proposal) -> None:
        node = self.node
        assert node is not None
        place = proposal.job, proposal.round
        opening = node.rounds.secrets.make_opening(*place, self.author.auditor.own_loss(*place, self.key))
        self.give(StepAction(lambda: node.rounds.publish_proposal(proposal, self.now(), opening)))

    def _judge_later(self, key: RoundKey, trainer: bytes, proposal: Proposal) -> None:
        if (key, trainer) in self.judging:
            return
        self.judging.add((key, trainer))
        seconds = self.simulation.payload_seconds(trainer, self)
        if seconds is not None:
            self.after(seconds + self.simulation.draw(JUDGE_SECONDS), self._judge, key, trainer, proposal)

    def _judge(self, key: RoundKey, trainer: bytes, proposal: Proposal) -> None:
        node = self.node
        assert node is not None
        job = node.state.jobs.jobs.get(key[0])
        if job is None or job.phase is not JobPhase.RUNNING or job.round != key[1]:
            return
        verdict = Verdict.STALE if proposal.model_root != job.model_root else Verdict.ACCEPT
        self.give(StepAction(lambda: node.rounds.record_verdict(key, trainer, verdict, self.now())))

    def _reexecute_later(self, key: RoundKey, trainer: bytes, book: OpenRoundState) -> None:
        if (key, trainer) in self.reexecuting:
            return
        self.reexecuting.add((key, trainer))
        assert self.node is not None
        job = self.node.state.jobs.jobs[key[0]]
        seconds = self.simulation.reveal_seconds(trainer, self) if self.simulation.has_bodies(job, self) else None
        if seconds is not None:
            proposal = codec.decode_message(book.proposals[trainer].body, (Proposal,))
            self.after(seconds, self._begin, key, trainer, proposal, job.brief)

    def _begin(self, key: RoundKey, trainer: bytes, proposal: Proposal, brief: bytes) -> None:
        node = self.node
        assert node is not None
        self.give(StepAction(lambda: node.rounds.record_replay_start(key, trainer)))
        self.after(self.simulation.draw(REPLAY_SECONDS), self._found, key, trainer, proposal, brief)

    def _found(self, key: RoundKey, trainer: bytes, proposal: Proposal, brief: bytes) -> None:
        node = self.node
        assert node is not None
        verdict = self._finding(key, trainer, proposal, brief)
        if self.strategy is not None:
            verdict = self.strategy.finding(verdict)
        self.give(StepAction(lambda: node.rounds.record_replay_verdict(key, trainer, verdict, self.now())))

    def _finding(self, key: RoundKey, trainer: bytes, proposal: Proposal, brief: bytes) -> Verdict:
        """Return the verdict on an update. Some updates lie at the edge of the tolerance, where two re-executions may differ."""
        if proposal.payload != audits.payload_of(*key, trainer, proposal.model_root, brief):
            return Verdict.REPLAY
        if proposal.payload[0] >= BORDERLINE_OF_256:
            return Verdict.ACCEPT
        self.draws += 1
        drawn = hashlib.sha256(proposal.payload + self.key + bytes([self.draws % 256])).digest()[0]
        return Verdict.UNJUDGED if drawn < 128 else Verdict.ACCEPT

    # Work ------------------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit the next transaction, unless this peer knows that it lags behind."""
        if self.node is None or not self.simulation.has_work or self.height + 1 < self.simulation.height:
            return
        signed = self.author.next(self.node.state, self.simulation.chain_id)
        if signed is not None:
            workload.submit(self, signed)


class Simulation:
    """A simulated network; call `run` once. Raises `Violation`, or any unexpected error of a peer."""

    def __init__(self, plan: Plan, strategies: dict[str, type[Strategy]] = STRATEGIES) -> None:
        self.plan = plan
        self.now = 0.0
        self.sends_before_sync = False  # a planted bug
        self.has_work = True
        self.healed: float | None = None
        self.counts: dict[str, int] = {}
        self.history = hashlib.blake2b(digest_size=16)  # over every delivered byte, durable write and decision, with times
        self.lineage = Lineage()
        self._back: list[tuple[bytes, int, int]] = []  # rollbacks of the last block: (job, open round, rounds in its model)
        self._strategies = strategies
        self._random = random.Random(f"history {plan.seed} {plan.n}")
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._outbox: dict[int, list[bytes]] = {}
        self.network = Network(plan.peers, plan.delay, self._random, self.after, self._arrive)
        self.network.use_clock(lambda: self.now)
        self._make_peers(plan)
        self._schedule_faults()
        self.after(PULSE_SECONDS, self._pulse, ())

    def _make_peers(self, plan: Plan) -> None:
        signers = self.signers(plan)
        founders = sorted({signer.public for signer in signers[: plan.n]})
        genesis = genesis_of(founders, curates=plan.minute_ms > 0, has_runs=bool(plan.gateways))
        self.chain_id, self.verifier = genesis.chain_id, keys.verifier(plan.ed25519)
        self.rules: LedgerRules = SharedRules(genesis, self.verifier) if plan.shares else rules_of(genesis, self.verifier)
        self._reference = self.rules if plan.shares else rules_of(genesis, self.verifier)
        self.decided_state = self.rules.genesis_state()
        self.peers: list[Peer] = []
        for number, signer in enumerate(signers):
            author = workload.Author(signer, random.Random(f"author {plan.seed} {number}"), plan.work / plan.peers)
            author.openings = partial(self.rules.audits_module.loss_openings_due, signer.public)
            author.volunteering = partial(self.rules.audits_module.proposals_to_volunteer_for, signer.public)
            if plan.minute_ms:
                author.desk = Desk(signer, random.Random(f"desk {plan.seed} {number}"), self.chain_id, people(plan.seed, signer))
            if number in plan.gateways:
                author.gateway = Gateway(signer, random.Random(f"gateway {plan.seed} {number}"))
            self.peers.append(Peer(self, number, signer, author, self.rules, is_late=signer.public not in founders))
        self.numbers: dict[bytes, list[int]] = {}
        for peer in self.peers:
            self.numbers.setdefault(peer.key, []).append(peer.number)
        for peer in self.peers:
            peer.author.trainers = lambda key: self.peers[self.numbers[key][0]].author if key in self.numbers else None
            peer.author.now = lambda: self.now
            peer.author.slowness = audits.slowness(plan.seed, peer.number)
        self._make_liars(plan, tuple(founders))
        self._mark_twins()
        self.honest = [peer for peer in self.peers if peer.is_honest]
        self.honest[-1].author.auditor = audits.Distrusts()
        self.lone = self._choose_lone(plan)
        self.lone.rules = self.own_rules()
        self.invariants = Invariants(
            tuple(founders), self.chain_id, self.verifier, {peer.key for peer in self.honest}, self._refer
        )
        self.invariants.latest_clock = lambda: self.now + max(peer.offset_max for peer in self.honest)
        self.invariants.waits = self._waits
        self.curated = Curated(self.chain_id, self.verifier)
        self.client_runs = ClientRuns(plan.lost_ms_max)
        self.progress = Progress(tuple(founders), self.chain_id, self.verifier, self.invariants.honest, self.invariants.sets)
        self.invariants.on_block = self._on_block
        inviter = self._choose_inviter(plan)
        for peer in (peer for peer in self.peers[plan.n : plan.n + plan.joiners] if peer.is_late and peer.is_honest):
            peer.author.invitation = workload.invitation(self.chain_id, inviter.signer, peer.key, f"joiner {peer.number}")
            self.progress.newcomers[peer.key] = Newcomer(inviter.key)
        if plan.jobs:
            self.honest[0].author.wishes.append(workload.start_job(KINDS[plan.seed % len(KINDS)], 1_000))
        if plan.second_job:
            kind = KINDS[plan.seed // len(KINDS) % len(KINDS)]
            self.honest[SECOND_AUTHOR].author.wishes.append(workload.start_job(kind, SECOND_JOB_ROUNDS, alone=True))
        for peer in self.peers:
            if not peer.is_late:
                self.after(0.0, peer.start, ())

    def _choose_lone(self, plan: Plan) -> Peer:
        """Choose the peer that computes everything itself, from states decoded from bytes.

        Shared results could depend on anything, and all peers would still agree.
        """
        damaged = {fault.nodes[0] for fault in plan.of("damage")}
        founders = [peer for peer in self.honest if peer.number < plan.n and peer.number not in damaged]
        return random.Random(f"lone {plan.seed} {plan.n}").choice(founders or self.honest)

    def own_rules(self) -> LedgerRules:
        """Return rules with a cache that no other peer reads."""
        genesis = self.rules.genesis
        return SharedRules(genesis, self.verifier) if self.plan.shares else rules_of(genesis, self.verifier)

    def _choose_inviter(self, plan: Plan) -> Peer:
        """Choose a peer whose invitations last: an honest founder that keeps its vote and its key."""
        gone = {fault.nodes[0] for kind in ("leave", "rotate") for fault in plan.of(kind)}
        return next((peer for peer in self.honest if peer.number < plan.n and peer.number not in gone), self.peers[0])

    def signers(self, plan: Plan) -> list[Signer]:
        return keys.signers(plan.peers, plan.ed25519)

    def _make_liars(self, plan: Plan, founders: tuple[bytes, ...]) -> None:
        colluders = tuple(self.peers[number].key for number in plan.liars)
        shared: dict[str, Any] = {}
        for number, name in plan.liars.items():
            peer = self.peers[number]
            peer.strategy = self._strategies[name](self._liar(peer, founders, shared, colluders))
            peer.author.auditor = audits.drawn(self.plan.seed, number, colluders)

    def _liar(self, peer: Peer, founders: tuple[bytes, ...], shared: dict[str, Any], colluders: tuple[bytes, ...]) -> Liar:
        return Liar(
            signer=peer.signer,
            chain_id=self.chain_id,
            random=random.Random(f"liar {self.plan.seed} {peer.number}"),
            founders=founders,
            colluders=colluders,
            shared=shared,
            now=peer.now,
            node=lambda: peer.node,
            send=lambda to, message, seconds: self._lie(peer, to, message, seconds),
        )

    def _mark_twins(self) -> None:
        """Mark twins as a liar: two honest machines with one key contradict each other."""
        for numbers in self.numbers.values():
            if len(numbers) > 1:
                for number in numbers:
                    self.peers[number].strategy = Strategy(self._liar(self.peers[number], (), {}, ()))

    # Running ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the faults, heal the network, and check that all peers make progress."""
        with self._short_cuts(), _without_garbage_collection():
            self.run_until(self.plan.heal_at)
            self.heal()
            self._recover()
            self._go_on()
            self._see_through()
            if not self.plan.jobs:  # without jobs: their rounds would continue
                self._rest()
        if len(self.plan.of("leave")) > 1:
            self.count("several leaves")
        self.counts |= self.progress.came_about() | self.curated.came_about() | self.client_runs.came_about()
        self.counts |= {"attempts at runs": sum(peer.author.gateway.attempts for peer in self.peers if peer.author.gateway)}
        self.counts |= {"rollbacks of all": self.lineage.rollbacks, "voted rollback": self.lineage.voted}
        self.counts |= {"jobs that go on": self.lineage.reopened}
        self.counts |= {"justified": self.invariants.justified, "unseen": self.invariants.unseen}

    @contextlib.contextmanager
    def _short_cuts(self) -> Iterator[None]:
        if not self.plan.shares:
            with self._changed_limits():
                yield
            return
        with decoding_once(), self._changed_limits():
            yield

    @contextlib.contextmanager
    def _changed_limits(self) -> Iterator[None]:
        with hurried(self.plan.minute_ms), late_after(self.plan.lost_ms_max):
            yield

    def run_until(self, time: float, finished: Callable[[], bool] = lambda: False) -> bool:
        """Run events up to `time`, and return True as soon as `finished()`, called after every event, is true."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= time:
            self.now, _, call, arguments = pop(queue)
            call(*arguments)
            if finished():
                return True
        self.now = max(self.now, time)
        return finished()

    def after(self, seconds: float, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, call, arguments))

    def draw(self, span: tuple[float, float]) -> float:
        low, high = span
        return low + (high - low) * self._random.random()

    def on_new_node(self, peer: Peer, node: Node) -> None:
        """React to the start of a peer."""

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    @property
    def expected(self) -> list[Peer]:
        """Return the peers that must make progress."""
        return [peer for peer in self.honest if not peer.is_lost]

    @property
    def height(self) -> int:
        """Return the highest height that an honest peer has decided."""
        return max(self.invariants.decided, default=0)

    def _recover(self) -> None:
        self.height_healed = self.height
        target = self.height + RECOVERY_HEIGHTS
        if not self.run_until(self.now + RECOVERY_SECONDS, lambda: self._all_at(target)):
            raise Violation("progress", f"{RECOVERY_SECONDS:.0f} s after healing, not at height {target}: {self._where()}")
        self.recovered = self.now
        self.progress.begin(self.now, self.height)
        for peer in self.honest:
            self.sample(peer)

    def _go_on(self) -> None:
        first = self.height + 1
        while not self._all_at(self.plan.blocks):
            self._decide_one_more(min(peer.height for peer in self.expected) + 1)
            self._has_all()
        late = {height: view for height, view in self.invariants.views.items() if height > first and view > VIEWS_AFTER_HEALING}
        if late:
            raise Violation("progress", f"decided in late views after healing: {late}")

    def _decide_one_more(self, target: int) -> None:
        seconds = BEYOND_SECONDS_MAX if self._is_beyond(target) else HEIGHT_SECONDS_MAX
        if not self.run_until(self.now + seconds, lambda: self._all_at(target)):
            raise Violation("progress", f"height {target} takes longer than {seconds:.0f} s: {self._where()}")

    def _is_beyond(self, height: int) -> bool:
        """Return True if more than f voters lie, are lost, or have an unacceptable clock."""
        voters = self.invariants.sets[height]
        f, there = faults_tolerated(len(voters)), [peer for peer in self.peers if peer.key in voters]
        right = [peer for peer in there if peer.is_in_time]
        right += [peer for peer in there if peer.is_behind] if len(right) > f else []
        return len(there) - len(right) > f

    def _has_all(self) -> bool:
        """Return True if all demands are met. Beyond f faulty voters only decided blocks are demanded."""
        if self._is_beyond(self.height + 1):
            self.progress.begin(self.now, self.height)
            return True
        return self.progress.check(self.now, self._running(), self.client_runs.demands(self.now, self.progress.began or 0.0))

    def _running(self) -> set[bytes]:
        """Return honest running peers with an accepted clock and everything that a vote needs."""
        return {peer.key for peer in self.peers if peer.is_in_time and peer.node is not None and not peer.is_wrong}

    def _see_through(self) -> None:
        """Run until every demand is met once; each has its own bound.

        Few blocks are decided meanwhile: they cost time here, and the open demands wait for seconds rather than for heights.
        """
        for peer in self.peers:
            peer.author.work = 0.0
        while not self._has_all():
            self._decide_one_more(min(peer.height for peer in self.expected) + 1)

    def _rest(self) -> None:
        """Check an idle network: no view is given up, no peer talks, and later work is decided. The history excludes this."""
        history = self.history.copy()
        for _ in range(RESTED):
            self.has_work = False
            self._come_to_rest()
            self.has_work = True
            self._decide_one_more(min(peer.height for peer in self.expected) + 1)
        self.history = history

    def _come_to_rest(self) -> None:
        for _ in range(RESTS_MAX):
            before, said = self._views(), self._overhear()
            self.run_until(self.now + REST_SECONDS)
            self.network.filter = None
            most = max(said.values(), default=0)
            if self._views() == before and most <= (REPEATED_MAX if self.invariants.is_under_way(self.height + 1) else 0):
                return
        seconds = f"{RESTS_MAX * REST_SECONDS:.0f} s without work"
        raise Violation("idle", f"{seconds}, and peers go on, with {most} messages on a link: {self._where()}")

    def _overhear(self) -> Counter[tuple[int, int]]:
        """Count, by link, the messages between honest nodes until the filter is removed.

        Messages about snapshots are excluded: a liar that claims a height makes peers search for one at any time.
        """
        said, expected = Counter[tuple[int, int]](), {peer.number for peer in self.expected}

        def pass_on(sender: int, receiver: int, data: bytes) -> bool:
            if sender in expected and receiver in expected and not is_snapshot_message(data):
                said[sender, receiver] += 1
            return True

        self.network.filter = pass_on
        return said

    def _views(self) -> list[tuple[int, int]]:
        replicas = [peer.node.replica for peer in self.expected if peer.node is not None]
        return [(replica.height, replica.view) for replica in replicas]

    def _all_at(self, height: int) -> bool:
        return all(peer.is_lost or (peer.height >= height and not peer.is_wrong) for peer in self.honest)

    def _where(self) -> str:
        def one(peer: Peer) -> str:
            if peer.node is None:
                return f"{peer.number}: down"
            replica = peer.node.replica
            refusal = f" ({replica.block_refusal})" if replica.block_refusal else ""
            return f"{peer.number}: applied {peer.height}, at {replica.height}.{replica.view}{refusal}"

        return "; ".join(one(peer) for peer in self.peers)

    def _pulse(self) -> None:
        """Keep something to decide: an idle network would show no progress."""
        alive = [peer for peer in self.honest if peer.node is not None and not peer.is_late]
        if self.has_work and alive:
            peer = self._random.choice(alive)
            if not peer.author.wishes:
                peer.author.wishes.append(("counter/add", workload.Add(1)))
            peer.submit()
        for peer in alive:
            if peer.author.invitation is not None:
                peer.submit()
        self.after(PULSE_SECONDS, self._pulse, ())

    # Decisions -------------------------------------------------------------------------------------------------------

    def apply(self, peer: Peer, state: LedgerState, decided: DecidedBlock) -> tuple[Any, LedgerState]:
        block = decided.decode()
        if isinstance(peer.rules, SharedRules):
            transition, after = peer.rules.applied(state, block, decided.digest)
        else:
            transition = peer.rules.apply_block(state, block)
            after = finish(transition, state)
        if peer is self.lone:
            after = read_again(after, state)
            if isinstance(peer.rules, SharedRules):
                peer.rules.forget_below(after.height)
        return transition, after

    def _refer(self, height: int, block: bytes) -> tuple[str | None, bytes]:
        decoded = decode_block(block)
        state = self.decided_state
        problem = self._reference.why_body_refused(state, decoded.body)
        if problem is None:
            if isinstance(self._reference, SharedRules):
                transition, self.decided_state = self._reference.applied(state, decoded, self.invariants.decided[height])
                if height % FORGOTTEN_EVERY == 0:
                    self._reference.forget_below(height - 60)
            else:
                transition = self._reference.apply_block(state, decoded)
                self.decided_state = finish(transition, state)
            self._follow_rollbacks(transition, decode_body(decoded.body))
            self.curated.on_block(height, decoded.body, state, self.decided_state)
            self.client_runs.on_block(height, decoded.body, state, self.decided_state, self.now)
        return problem, self.decided_state.state_root

    def _follow_rollbacks(self, transition: StateTransition, body: BlockBody) -> None:
        self.lineage.on_block(transition, self.decided_state, body.transactions)
        jobs = self.decided_state.jobs.jobs
        self._back = [
            (key, jobs[key].round, jobs[key].rounds_in_model)
            for key in transition.rolled_back
            if jobs[key].phase is not JobPhase.FINISHED
        ]
        for key, number, _ in self._back:
            self.invariants.on_rolled_back_job(key, number)

    def _on_block(self, height: int, body: bytes) -> None:
        self.progress.on_block(height, body, self.now)
        for back in self._back:
            self.progress.on_rolled_back(*back, self.now)

    def _waits(self, signed: Signed) -> bool:
        """Return True if a transaction could still be decided."""
        try:
            self._reference.apply_transaction(self.decided_state, signed)
        except (Refused, RemoteProtocolError):
            return False
        return True

    def note_submitted(self, peer: Peer, signed: Signed) -> None:
        """Note a transaction on a healed network, where any leader must include it soon."""
        if self.healed is not None and self.now > self.healed + SETTLED_SECONDS and peer.is_honest:
            self.invariants.on_submitted(signed, self.height)

    def note_lost(self, peer: Peer) -> None:
        self.count("disk damaged")
        if not peer.disk.is_damaged:
            raise Violation("durable", f"peer {peer.number} does not start again from a disk on which nothing was damaged")

    def note_durable(self, peer: Peer, turn: StepEffects) -> None:
        if peer.is_wrong:
            self.invariants.on_wrong_turn(peer.key, turn.records, peer.node.state.height if peer.node else 0)
        if not turn.records and not turn.faults:
            return
        when_and_who = struct.pack("<dH", self.now, peer.number)
        for record in turn.records:
            signed = getattr(record, "signed", None)
            what = signed.signature if signed is not None else getattr(record, "digest", b"")
            self.history.update(when_and_who + type(record).__name__.encode() + what)
        if not peer.is_honest:
            return
        self.invariants.on_durable(peer.key, turn.records)
        for evidence in turn.evidence:
            self.progress.on_evidence(evidence.signer)
        for decided in turn.decided_blocks:
            self.invariants.on_decided(peer.key, decided)
            if decided.height % SAMPLED_EVERY == 0:
                self.sample(peer)

    def note_applied(self, peer: Peer, state: LedgerState) -> None:
        self.history.update(struct.pack("<dHQ", self.now, peer.number, state.height) + state.state_root)
        if not peer.is_honest:
            return
        members = state.members
        expelled = [key for key, member in members.members.items() if member.expelled is not None]
        sets = (members.previous, members.voters, members.upcoming)
        if peer.is_wrong:
            self.invariants.on_wrong(peer.key, state.height)
            return
        self.invariants.on_applied(peer.key, state.height, state.state_root, sets, expelled)
        self.invariants.on_audits(state.audits)
        self.invariants.on_job_records(state.jobs.jobs)
        self.progress.on_finished([key for key, job in state.jobs.jobs.items() if job.phase is JobPhase.FINISHED])
        self.client_runs.check_kept(state, peer.models.has_model)
        node = peer.node
        if node is not None and node.replica.divergence is not None:
            raise Violation("roots", node.replica.divergence)
        if node is not None and node.replica.duplicate_identity_reason is not None:
            raise Violation("copied", f"{peer.number} takes a signature of its own earlier life for another machine's")

    def note_restored(self, peer: Peer, restored: RestoredSnapshot) -> None:
        self.count("restored")
        if peer.is_honest:
            self.invariants.on_restored(peer.key, restored.decisions, restored.height, restored.state.state_root)

    def sample(self, peer: Peer) -> None:
        if peer.node is not None:
            self.invariants.on_sample(peer.key, memory.sizes(peer.node), memory.limits(self.plan.peers))
            self.invariants.on_kept(peer.key, memory.kept_for_later(peer.node))

    # Messages --------------------------------------------------------------------------------------------------------

    def send(self, peer: Peer, to: tuple[bytes, ...] | None, message: Any) -> None:
        """Queue one message of a turn. `to` None: every link."""
        if peer.strategy is not None:
            self._send_lies(peer, to, message)
            return
        self.invariants.on_sent(peer.key, message)
        self.progress.on_sent(peer.key, message)
        data = codec.encode(message)
        for number in self._receivers(peer, to):
            self._outbox.setdefault(number, []).append(data)

    def _receivers(self, peer: Peer, to: tuple[bytes, ...] | None) -> Iterable[int]:
        if to is None:
            return [link.receiver for link in self.network.links[peer.number] if link.up]
        return [number for key in to for number in self.numbers.get(key, ()) if number != peer.number]

    def _send_lies(self, peer: Peer, to: tuple[bytes, ...] | None, message: Any) -> None:
        assert peer.strategy is not None
        for number in self._receivers(peer, to):
            for said in peer.strategy.sends(self.peers[number].key, message):
                self._outbox.setdefault(number, []).append(said if isinstance(said, bytes) else codec.encode(said))

    def flush(self, peer: Peer) -> None:
        outbox, self._outbox = self._outbox, {}
        for number, messages in outbox.items():
            self.network.transmit(peer.number, number, messages)

    def send_aside(self, peer: Peer, to: bytes, message: Any) -> None:
        """Send a message outside turns. It depends on nothing durable."""
        outbox, self._outbox = self._outbox, {}
        self.send(peer, (to,), message)
        self.flush(peer)
        self._outbox = outbox

    def connections(self, peer: Peer) -> list[NodeInput]:
        return [PeerConnected(self.peers[link.receiver].key) for link in self.network.links[peer.number] if link.up]

    def _lie(self, peer: Peer, to: bytes, message: Any, seconds: float) -> None:
        data = message if isinstance(message, bytes) else codec.encode(message)
        for number in self.numbers.get(to, ()):
            if number != peer.number:
                self.after(seconds, self.network.transmit, (peer.number, number, [data]))

    def _arrive(self, link: Link, epoch: int, messages: list[bytes]) -> None:
        if epoch != link.epoch or link.blocked:
            link.has_lost = True
            return
        sender, receiver = self.peers[link.sender], self.peers[link.receiver]
        if receiver.node is None:
            return
        self.history.update(b"".join((struct.pack("<dHH", self.now, link.sender, link.receiver), *messages)))
        is_watched, is_honest = sender.is_honest and sender.key in self.watched, receiver.is_honest
        hears_liars = is_honest and len(self.honest) < len(self.peers)
        for data in messages:
            if is_snapshot_message(data):
                if receiver.snapshots is not None:
                    receiver.snapshots.received(sender.key, data)
                continue
            if is_watched:
                self.invariants.on_delivered(
                    sender.key, receiver.key, codec.decode_message(data, (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES))
                )
            if is_honest and data.startswith(PROPOSED, 1):
                self.invariants.on_offered(receiver.key, data)
            if hears_liars:
                with contextlib.suppress(RemoteProtocolError):
                    message = codec.decode_message(data, (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES))
                    self.progress.on_heard(receiver.key, receiver.disk.last, message)
            if receiver.strategy is None or receiver.strategy.hears(sender.key, data):
                receiver.inbox.append(DataReceived(sender.key, data))
        receiver.wake()

    def payload_seconds(self, trainer: bytes, receiver: Peer) -> float | None:
        """Return the seconds until the receiver has the trainer's payload, or None if it never arrives."""
        for number in self.numbers.get(trainer, ()):
            strategy = self.peers[number].strategy
            if strategy is not None:
                return strategy.payload_seconds(receiver.key)
        return 0.0

    def reveal_seconds(self, trainer: bytes, receiver: Peer) -> float | None:
        """Return the seconds until the receiver has the other data for re-execution, or None if it never arrives."""
        for number in self.numbers.get(trainer, ()):
            strategy = self.peers[number].strategy
            if strategy is not None:
                return strategy.reveal_seconds(receiver.key)
        return 0.0

    def has_bodies(self, job: Job, receiver: Peer) -> bool:
        """Return True if the receiver gets the data of a step from its gateway, which may be down or withhold them."""
        if not job.brief:
            return True
        for gateway in (self.peers[number] for number in self.numbers.get(job.author, ())):
            if gateway is not receiver and (gateway.node is None or (not gateway.is_honest and withholds(job.brief))):
                return False
        return True

    # Links -----------------------------------------------------------------------------------------------------------

    def connect(self, peer: Peer) -> None:
        for other in self.peers:
            if other is not peer and other.key != peer.key and other.node is not None:
                self._link(peer, other)

    def _link(self, one: Peer, other: Peer) -> None:
        out, back = self.network.between(one.number, other.number)
        if out.up or one.node is None or other.node is None or frozenset((one.number, other.number)) in self._cut:
            return
        out.up = back.up = True
        out.has_lost = back.has_lost = False
        for here, there in ((one, other), (other, one)):
            here.give(PeerConnected(there.key))
            if here.snapshots is not None:
                here.snapshots.connected(there.key)

    def _unlink(self, one: Peer, other: Peer) -> None:
        out, back = self.network.between(one.number, other.number)
        if not out.up:
            return
        for link in (out, back):
            link.up = False
            link.epoch += 1
            link.held = []
        for here, there in ((one, other), (other, one)):
            here.give(PeerDisconnected(there.key))
            if here.snapshots is not None:
                here.snapshots.disconnected(there.key)

    def disconnect(self, peer: Peer) -> None:
        if peer.is_honest:
            self.invariants.on_forgotten(peer.key)
            self.progress.on_forgotten(peer.key)
        for other in self.peers:
            if other is not peer:
                self._unlink(peer, other)

    def drop(self, peer: Peer, key: bytes, error: Any) -> None:
        """Close a connection, as a daemon does, and open another one later."""
        self.count(f"dropped {error.reason}")
        if peer.is_honest:
            self.invariants.on_dropped(peer.key, key, error)
        for number in self.numbers.get(key, ()):
            other = self.peers[number]
            self._unlink(peer, other)
            self.after(1.0, self._link, (peer, other))

    # Faults ----------------------------------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        self._cut: dict[frozenset[int], int] = {}
        self.watched = {self.peers[fault.nodes[0]].key for fault in self.plan.of("rollback")}
        for key in sorted(self.watched):
            self.invariants.watch(key)
        for fault in self.plan.faults:
            if fault.kind in WEATHER:
                self._between(fault, lambda fault=fault: self.network.begin(fault), lambda fault=fault: self.network.end(fault))
            else:
                getattr(self, "_fault_" + fault.kind.replace("-", "_"))(fault)

    def _between(self, fault: Fault, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.after(fault.at, self._unless_healed, (fault.kind, begin))
        self.after(fault.until, self._unless_healed, ("", end))

    def _unless_healed(self, kind: str, act: Callable[[], None]) -> None:
        if self.healed is None:
            if kind:
                self.count(kind)
            act()

    def _fault_liar(self, fault: Fault) -> None:
        self.count("liar")

    def _fault_one_way(self, fault: Fault) -> None:
        pairs = [(fault.nodes[0], fault.nodes[1])]
        self._between(fault, lambda: self.network.block(pairs, 1), lambda: self.network.block(pairs, -1))

    def _fault_clog(self, fault: Fault) -> None:
        one, other = fault.nodes
        self._between(fault, lambda: self.network.clog(one, other, 1), lambda: self.network.clog(one, other, -1))

    def _across(self, fault: Fault) -> list[tuple[int, int]]:
        return [
            (one.number, other.number)
            for one in self.peers
            for other in self.peers
            if (one.number in fault.nodes) != (other.number in fault.nodes)
        ]

    def _fault_partition(self, fault: Fault) -> None:
        pairs = self._across(fault)
        if fault.amount:
            self._between(fault, lambda: self._separate(pairs), lambda: self._rejoin(pairs))
        else:
            self._between(fault, lambda: self.network.block(pairs, 1), lambda: self.network.block(pairs, -1))

    def _fault_flap(self, fault: Fault) -> None:
        """Split and rejoin the network every `amount` seconds."""
        pairs = self._across(fault)
        begin, at = True, fault.at
        while at < fault.until or not begin:
            act = self._separate if begin else self._rejoin
            self.after(at, self._unless_healed, ("flap" if begin else "", lambda act=act: act(pairs)))
            begin, at = not begin, at + fault.amount

    def _separate(self, pairs: list[tuple[int, int]]) -> None:
        for one, other in pairs:
            if one < other:
                pair = frozenset((one, other))
                self._cut[pair] = self._cut.get(pair, 0) + 1
                self._unlink(self.peers[one], self.peers[other])

    def _rejoin(self, pairs: list[tuple[int, int]]) -> None:
        for one, other in pairs:
            if one < other:
                pair = frozenset((one, other))
                self._cut[pair] -= 1
                if not self._cut[pair]:
                    del self._cut[pair]
                    self._link(self.peers[one], self.peers[other])

    def _fault_break(self, fault: Fault) -> None:
        one, other = (self.peers[number] for number in fault.nodes)
        self._between(fault, lambda: self._unlink(one, other), lambda: self._link(one, other))

    def _fault_slow(self, fault: Fault) -> None:
        def set_to(seconds: float) -> None:
            self.peers[fault.nodes[0]].slowness = seconds

        self._between(fault, lambda: set_to(fault.amount), lambda: set_to(0.0))

    def _fault_slow_disk(self, fault: Fault) -> None:
        def set_to(seconds: float) -> None:
            for peer in self.peers:
                if not fault.nodes or peer.number in fault.nodes:
                    peer.sync = seconds

        self._between(fault, lambda: set_to(fault.amount), lambda: set_to(0.0))

    def _fault_crash(self, fault: Fault) -> None:
        """Crash in the middle of the peer's next append, or at the end of the fault if there is none."""
        peer = self.peers[fault.nodes[0]]

        def doom() -> None:
            peer.doomed = fault if peer.node is not None else None

        def revive() -> None:
            if peer.doomed is fault:
                peer.stop()
            if not peer.is_late:
                peer.start()

        self._between(fault, doom, revive)

    def _fault_fsync(self, fault: Fault) -> None:
        peer = self.peers[fault.nodes[0]]

        def fail() -> None:
            peer.disk.fails = True

        def mend() -> None:
            peer.disk.fails = False
            if not peer.is_late:
                peer.start()

        self._between(fault, fail, mend)

    def _fault_skew(self, fault: Fault) -> None:
        self.count("skew")
        self.peers[fault.nodes[0]].set_clock(fault.amount)

    def _fault_clock(self, fault: Fault) -> None:
        """Stop a peer, and start it with a changed clock."""
        peer = self.peers[fault.nodes[0]]

        def start() -> None:
            peer.stop()
            peer.set_clock(fault.amount)
            if not peer.is_late:
                peer.start()

        self._between(fault, peer.stop, start)

    def _fault_stop(self, fault: Fault) -> None:
        """End the job in the middle of a round. Its author begins another one."""

        def stop() -> None:
            running = self.decided_state.jobs.running()
            for peer in self.honest:
                job = next(
                    (
                        key
                        for key, job in running.items()
                        if job.author == peer.key and job.spec.startswith(TRAINING) and b":alone" not in job.spec
                    ),
                    None,
                )
                if job is not None:
                    self.count("job stopped")
                    peer.author.wishes.append(workload.stop_job(job))
                    peer.author.wishes.append(workload.start_job(KINDS[(self.plan.seed + 1) % len(KINDS)], 1_000))

        self._between(fault, stop, lambda: None)

    def _fault_back(self, fault: Fault) -> None:
        """Let a quorum of voters, or one voter too few, request a rollback of a job to its oldest anchor."""

        def ask() -> None:
            state = self.decided_state
            for key, job in state.jobs.running().items():
                if not job.brief and job.anchors and job.anchors[0].rounds_in_model < job.rounds_in_model:
                    voters = [peer for peer in self.honest if peer.key in state.members.voters]
                    count = quorum(len(state.members.voters)) - (not fault.amount)
                    for peer in voters[:count]:
                        peer.author.wishes.append(workload.roll_back(key, job.anchors[0].round, job.last_rollback))
                    self.count("voters asked for a rollback")

        self._between(fault, ask, lambda: None)

    def _fault_rollback(self, fault: Fault) -> None:
        peer, images = self.peers[fault.nodes[0]], list[Disk]()

        def restore() -> None:
            if not images:
                return
            peer.stop()
            self.invariants.on_rolled_back(peer.key)
            peer.disk = images[0]
            peer.start()

        self._between(fault, lambda: images.append(peer.disk.image()), restore)

    def _fault_damage(self, fault: Fault) -> None:
        """Change a byte in the middle of the durable log: the peer notices it at its next start, and stays down."""
        peer = self.peers[fault.nodes[0]]

        def damage() -> None:
            peer.stop()
            peer.disk.damage_middle(fault.amount)
            peer.start()
            if peer.node is not None:
                raise Violation("damage", f"peer {peer.number} goes on with a damaged disk")

        self._between(fault, damage, lambda: None)

    def _fault_wrong_state(self, fault: Fault) -> None:
        """Flip a bit of a peer's result: it must fall silent, restore the certified state and take part again."""
        peer = self.peers[fault.nodes[0]]

        def flip() -> None:
            peer.flips = fault.detail

        self._between(fault, flip, lambda: None)

    def _fault_join(self, fault: Fault) -> None:
        def join() -> None:
            peer, height = self.peers[fault.nodes[0]], self.height // 2
            peer.anchor = TrustedBlock(height, self.invariants.decided[height]) if height else None
            peer.is_late = False
            peer.start()

        self._between(fault, join, lambda: None)

    def _fault_leave(self, fault: Fault) -> None:
        peer = self.peers[fault.nodes[0]]
        self.invariants.may_go.add(peer.key)
        self._between(fault, lambda: peer.author.wishes.append(workload.leave()), lambda: None)

    def _fault_retire(self, fault: Fault) -> None:
        """Let all others vote to retire a peer. If it still runs, or returns, it applies again."""
        subject = self.peers[fault.nodes[0]]

        def wish() -> None:
            subject.author.returns = True
            for peer in self.honest:
                if peer is not subject:
                    peer.author.wishes.append(workload.retire(subject.key, fault.amount == 1.0))

        self._between(fault, wish, lambda: None)

    def _fault_rotate(self, fault: Fault) -> None:
        """Continue a member with another key, on another machine."""
        old, new = (self.peers[number] for number in fault.nodes)
        self.invariants.may_go.add(old.key)
        if not old.is_honest:
            self.invariants.heirs.add(new.key)

        def rotate() -> None:
            old.author.wishes.append(workload.rotate(self.chain_id, old.key, new.signer))
            new.author.formers = {**old.author.formers, old.key: old.signer}
            if old.author.gateway is not None:
                new.author.gateway = replace(old.author.gateway, signer=new.signer)
            new.is_late = False
            new.start()

        self._between(fault, rotate, lambda: None)

    # Healing ---------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Start all peers and renew all links (the plan may keep those without losses). Messages arrive, and liars still lie."""
        self.healed = self.now
        for peer in self.honest:
            self.sample(peer)
        self.network.heal()
        self._cut = {}
        for peer in self.peers:
            peer.slowness, peer.sync, peer.doomed, peer.disk.fails = 0.0, 0.0, None, False
            peer.is_late = False
            peer.start()
        for one in self.peers:
            for other in self.peers:
                if one.number < other.number and one.key != other.key:
                    if self.plan.keeps_links and not any(
                        link.has_lost for link in self.network.between(one.number, other.number)
                    ):
                        self.count("link kept")
                    else:
                        self._unlink(one, other)
                    self._link(one, other)


_histories = itertools.count(1)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: it frees nothing before the history ends."""
    if next(_histories) % COLLECTED_EVERY == 0:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
