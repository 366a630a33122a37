"""One replica among voters of which f lie, under any order of events that hypothesis can think of.

Its signatures and its records are checked after every step, from its sends and its journal alone.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from consensus.block import block_digest, decode_block, encode_header, header_digest, make_header
from consensus.effects import DecidedBlock, RestartState, SendMessage, StepEffects, persist_effects
from consensus.inputs import (
    AgreementMessage,
    ConnectedInput,
    DisconnectedInput,
    MessageInput,
    ReplicaInput,
    TickInput,
    WorkChangedInput,
)
from consensus.pbft.replica import Replica
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.limits import VIEWS_AHEAD_MAX
from protocol.messages import (
    AGREEMENT_MESSAGES,
    BlockBytes,
    Certificate,
    Commit,
    Decision,
    GetBlock,
    GetDecisions,
    GetRememberedStatements,
    Prepare,
    Propose,
    ProposeEnvelope,
    RememberedStatements,
    Status,
    Timeout,
    TimeoutEnvelope,
    Vote,
)
from tests.consensus.company import CHAIN_ID, Company
from tests.consensus.counter import Log
from tests.consensus.journal import MemoryJournal
from tests.fuzz.mutations import mutate
from tests.fuzz.strategies import strategy_of
from tests.sim.keys import FastVerifier

Statement = Propose | Prepare | Commit | Timeout
STATEMENTS = (Propose, Prepare, Commit, Timeout)
AHEAD = st.sampled_from((0, 0, 0, 0, 1, -1))  # the view of the honest voters
MOSTLY = st.sampled_from((True, True, True, False))
CHOICES = st.integers(0, 1 << 16)
EXAMPLES, STEPS = 100, 50  # hundreds of decisions and restarts in a few seconds
TICKS_MAX = 3  # at one moment: timers that are due together may take turns


class OneReplica(RuleBasedStateMachine):
    @initialize(n=st.sampled_from((4, 5, 7)), place=CHOICES, answered=MOSTLY)
    def start(self, n: int, place: int, answered: bool) -> None:
        self.company = Company(n, place % n)
        self.now = 1_000.0
        self.disk, self.old_disk = MemoryJournal(), MemoryJournal()
        self.log = Log(self.company.voters)
        self.slots: dict[tuple[str, int, int], bytes] = {}  # all sent statements, over all restarts
        self.order: list[Statement] = []
        self.asked: list[tuple[bytes, Any]] = []  # unanswered requests that it has sent
        self.unapplied: list[DecidedBlock] = []
        self.senders_of_bad: set[bytes] = set()
        self.build(RestartState(), answered)

    def build(self, restart: RestartState, answered: bool) -> None:
        me, log = self.company.me, self.log
        self.replica = Replica(me, CHAIN_ID, FastVerifier(), log, log.applied(), restart)
        self.asked.clear()
        self.step(TickInput())
        for peer in self.company.keys if answered else ():
            self.step(ConnectedInput(peer))
        if self.asked:
            self.everybody_answers()

    # Steps -----------------------------------------------------------------------------------------------------------

    def step(self, *events: ReplicaInput) -> StepEffects:
        for event in events:
            self.replica.handle_input(event, self.now)
        turn = self.replica.finish_step(self.now)
        self.take(turn, persist_effects(turn, self.disk))
        for _ in range(TICKS_MAX):
            if turn.deadline is None or turn.deadline > self.now:
                break
            turn = self.replica.step(TickInput(), self.now)
            self.take(turn, persist_effects(turn, self.disk))
        assert turn.deadline is None or turn.deadline > self.now, "a timer that is always due keeps a processor busy for ever"
        self.deadline = turn.deadline
        return turn

    def take(self, turn: StepEffects, sends: tuple[SendMessage, ...]) -> None:
        for fault in turn.faults:
            assert fault.peer in self.senders_of_bad, f"{fault.error} against a peer that sent nothing bad"
        for evidence in turn.evidence:
            assert self.company.is_liar(evidence.signer), "evidence against an honest voter"
        for send in sends:
            self.check_send(send)
            self.company.hear_me(send.message, self.disk.blocks)  # type: ignore[arg-type]
        for decided in turn.decided_blocks:
            self.check_decided(decided)
            self.unapplied.append(decided)

    def check_send(self, send: SendMessage) -> None:
        message = send.message
        if isinstance(message, (GetDecisions, GetBlock, GetRememberedStatements)) and send.to:
            self.asked += [(peer, message) for peer in send.to]
        signed = {Vote: "vote", TimeoutEnvelope: "timeout", ProposeEnvelope: "propose"}.get(type(message))
        if signed is not None:
            self.check_statement(getattr(message, signed))

    def check_statement(self, signed: Any) -> None:
        statement: Any = codec.decode_message(signed.body, STATEMENTS)
        if signed.signer != self.company.me.public:
            assert isinstance(statement, Propose), "only proposals of others are passed on"
            return
        is_decided = statement.height in self.disk.decided  # in the same turn, which needs its slot no more
        assert is_decided or any(voted.signed == signed for voted in self.disk.votes), "sent before it was durable"
        slot = (statement.TAG, statement.height, statement.view)
        if self.slots.setdefault(slot, signed.body) != signed.body:
            raise AssertionError(f"two statements in slot {slot}")
        if statement not in self.order and not is_decided:
            self.check_first(statement)
            self.order.append(statement)

    def check_first(self, statement: Statement) -> None:
        of_height = [said for said in self.order if said.height == statement.height]
        if isinstance(statement, (Prepare, Commit)):
            given_up = [said.view for said in of_height if isinstance(said, Timeout)]
            assert max(given_up, default=-1) < statement.view, f"{statement.TAG} after a timeout"
        if isinstance(statement, Prepare):
            assert statement.block in self.disk.blocks, "prepared without the block on disk"
        if isinstance(statement, Commit):
            assert self.disk.prepared is not None, "committed without a certificate on disk"
            self.check_quorum(self.disk.prepared)
            vote = codec.decode_message(self.disk.prepared.vote, (Prepare,))
            assert (vote.height, vote.view, vote.block) == (statement.height, statement.view, statement.block)
        if isinstance(statement, Timeout):
            committed = [said.view for said in of_height if isinstance(said, Commit)]
            assert statement.high_view >= max(committed, default=-1), "a timeout that hides the certificate of a commit"

    def check_quorum(self, certificate: Certificate) -> None:
        voters = self.company.voters
        assert 3 * len(certificate.signatures) > 2 * len(voters.keys), "fewer than two thirds"
        assert set(certificate.signatures) <= set(voters.keys), "signatures of others than voters"

    def check_decided(self, decided: DecidedBlock) -> None:
        self.check_quorum(decided.certificate)
        known = self.company.decided.get(decided.height)
        if known is None:
            assert decided.height == self.company.height
            self.company.decide(Decision(decided.block, decided.certificate))
        else:
            assert block_digest(known.block) == decided.digest, "another block than the others decided"
        self.old_disk = self.disk.copy() if decided.height % 2 else self.old_disk

    def give(self, sender: bytes, message: AgreementMessage) -> StepEffects:
        return self.step(MessageInput(sender, message))

    def offer(self, said: tuple[bytes, AgreementMessage] | None, delivered: bool) -> None:
        if said is not None and delivered:
            self.give(*said)

    def view(self, ahead: int) -> int:
        return max(0, self.company.view + ahead)

    # Events ----------------------------------------------------------------------------------------------------------

    @rule(item=st.integers(0, 99))
    def work_comes(self, item: int) -> None:
        self.log.hear(item)
        self.step(WorkChangedInput())

    @rule(ahead=AHEAD, item=st.integers(0, 99), known=st.booleans(), delivered=MOSTLY)
    def a_leader_proposes(self, ahead: int, item: int, known: bool, delivered: bool) -> None:
        if known:
            self.log.hear(item)
        self.offer(self.company.propose(self.view(ahead), item), delivered)

    @rule(ahead=AHEAD, count=CHOICES, choice=CHOICES, delivered=MOSTLY)
    def others_prepare(self, ahead: int, count: int, choice: int, delivered: bool) -> None:
        for honest in self.company.honest[: 1 + count % len(self.company.honest)]:
            self.offer(self.company.prepare(honest, self.view(ahead), choice), delivered)

    @rule(ahead=AHEAD, kind=st.sampled_from((Prepare, Prepare, Commit)), delivered=MOSTLY)
    def a_certificate_is_made(self, ahead: int, kind: Any, delivered: bool) -> None:
        self.offer(self.company.certify(kind, self.view(ahead)), delivered)

    @rule(count=CHOICES, choice=CHOICES, delivered=MOSTLY)
    def others_commit(self, count: int, choice: int, delivered: bool) -> None:
        for honest in self.company.honest[: 1 + count % len(self.company.honest)]:
            if self.company.prepared:
                honest.adopt(*self.company.prepared[choice % len(self.company.prepared)])
            self.offer(self.company.commit(honest), delivered)

    @rule(count=CHOICES, delivered=MOSTLY)
    def others_time_out(self, count: int, delivered: bool) -> None:
        for honest in self.company.honest[: 1 + count % len(self.company.honest)]:
            self.offer(self.company.time_out(honest), delivered)

    @rule(ahead=AHEAD, with_lies=st.booleans(), delivered=MOSTLY)
    def a_view_ends(self, ahead: int, with_lies: bool, delivered: bool) -> None:
        view = self.view(ahead)
        said = self.company.end_view(view, with_lies)
        for honest in self.company.honest if said else ():
            honest.view = max(honest.view, view + 1)
        self.offer(said, delivered)

    @precondition(lambda self: self.company.mail)
    @rule(choice=CHOICES, sender=CHOICES)
    def something_said_before_arrives(self, choice: int, sender: int) -> None:
        """A valid statement arrives late, again, or from a forwarding peer, with any height and view."""
        self.give(self.peer(sender), self.company.mail[-1 - choice % min(60, len(self.company.mail))][1])

    @precondition(lambda self: self.company.mail)
    @rule(choices=st.lists(CHOICES, min_size=2, max_size=20))
    def much_arrives_in_one_turn(self, choices: list[int]) -> None:
        mail = self.company.mail[-60:]
        self.step(*(MessageInput(self.peer(choice), mail[choice % len(mail)][1]) for choice in choices))

    @rule(apart=st.integers(-2, 3), peer=CHOICES, kind=st.sampled_from((Status, GetDecisions, GetBlock, GetRememberedStatements)))
    def somebody_asks(self, apart: int, peer: int, kind: Any) -> None:
        height = max(0, self.replica.height + apart)
        known = sorted(self.company.blocks) or [bytes(32)]
        messages = {
            Status: Status(height, peer % 3),
            GetDecisions: GetDecisions(height, 1 + peer % 9),
            GetBlock: GetBlock(height, known[peer % len(known)]),
            GetRememberedStatements: GetRememberedStatements(),
        }
        self.give(self.peer(peer), messages[kind])

    @rule(item=st.integers(0, 99), delivered=MOSTLY)
    def the_agreement_gets_to_a_decision(self, item: int, delivered: bool) -> None:
        self.the_agreement_goes_on(item, delivered, 7)

    @rule(item=st.integers(0, 99), delivered=MOSTLY, phases=st.integers(1, 5))
    def the_agreement_goes_on(self, item: int, delivered: bool, phases: int) -> None:
        """The honest voters take their next steps, one after another."""
        self.log.hear(item)
        if delivered:
            self.step(WorkChangedInput())
        for _ in range(phases):
            height = self.company.height
            self.next_phase(item, delivered)
            if height != self.company.height:
                break

    def next_phase(self, item: int, delivered: bool) -> None:
        company, view = self.company, self.company.view
        everybody = len(company.honest) - 1
        if not company.proposals.get(view):
            self.offer(company.propose(view, item), delivered)
            if not company.proposals.get(view):  # its leader is the replica, or has given up
                self.others_time_out(everybody, delivered)
                self.a_view_ends(0, False, delivered)
        elif not any(entry[0] == view for entry in company.prepared):
            self.others_prepare(0, everybody, 0, delivered)
            self.a_certificate_is_made(0, Prepare, delivered)
        else:
            self.others_commit(everybody, len(company.prepared) - 1, delivered)
            self.a_certificate_is_made(0, Commit, delivered)

    @precondition(lambda self: self.asked)
    @rule()
    def everybody_answers(self) -> None:
        while self.asked:
            self.answer(*self.asked.pop(0), False)

    @precondition(lambda self: self.asked)
    @rule(choice=CHOICES, lie=st.booleans())
    def somebody_answers(self, choice: int, lie: bool) -> None:
        self.answer(*self.asked.pop(choice % len(self.asked)), lie)

    def answer(self, peer: bytes, request: Any, lie: bool) -> None:
        lie = lie and self.company.is_liar(peer)
        match request:
            case GetRememberedStatements():
                self.give(peer, RememberedStatements(self.company.height + 7 * lie, () if lie else self.company.heard_of_me()))
            case GetDecisions(first=first, count=count):
                for height in range(first, min(first + count, self.company.height)):
                    self.give(peer, self.company.decided[height])
            case GetBlock(height=height, block=digest):
                block = next(iter(self.company.blocks.values())) if lie else self.company.blocks.get(digest)
                if block is not None:
                    self.give(peer, BlockBytes(height, block))

    @precondition(lambda self: self.unapplied)
    @rule()
    def a_block_is_applied(self) -> None:
        self.step(self.log.apply(self.unapplied.pop(0)))

    @rule(seconds=st.sampled_from((0.01, 0.3, 1.0, 10.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.company.now_ms = max(self.company.now_ms, int(1_000 * self.now))
        self.step(TickInput())

    @precondition(lambda self: self.deadline is not None)
    @rule()
    def a_timer_expires(self) -> None:
        self.now = max(self.now, self.deadline or 0.0)
        self.step(TickInput())

    @rule(peer=CHOICES, up=st.booleans())
    def a_link_changes(self, peer: int, up: bool) -> None:
        self.step(ConnectedInput(self.peer(peer)) if up else DisconnectedInput(self.peer(peer)))

    # Lies ------------------------------------------------------------------------------------------------------------

    @rule(choice=CHOICES, ahead=AHEAD, kind=st.sampled_from(STATEMENTS), digest=CHOICES)
    def a_liar_says_anything(self, choice: int, ahead: int, kind: Any, digest: int) -> None:
        """A liar sends a well-formed, signed statement. If it contradicts another one, it is evidence at most."""
        company, view = self.company, self.view(ahead)
        liar = company.liars[choice % len(company.liars)]
        known = [*sorted(company.blocks), bytes(32)]
        block = known[digest % len(known)]
        if kind is Timeout:
            high = next((entry for entry in company.prepared if entry[0] <= view), None)
            self.give(liar.public, company.timeout(liar, view, high if digest % 2 else None))
        elif kind is not Propose:
            self.give(liar.public, Vote(company.sign(liar, kind(company.voters.hash, company.height, view, block))))
        else:
            self.offer(company.propose(view, 100 + digest % 50), company.is_liar(company.leader(view)))

    @rule(choice=CHOICES, field=st.sampled_from(("time_ms", "state_root", "body", "proposer")))
    def a_lying_leader_proposes_a_bad_block(self, choice: int, field: str) -> None:
        company = self.company
        liar = next((liar for liar in company.liars if liar.public == company.leader(0)), None)
        if liar is None:
            return
        body = b"\xc1" if field == "body" else codec.encode([choice % 100])
        self.senders_of_bad.add(liar.public)
        block = company.build(body, company.me.public if field == "proposer" else liar.public)
        header = make_header(decode_block(block))
        header = replace(header, time_ms=1 << 50) if field == "time_ms" else header
        header = replace(header, state_root=bytes(32)) if field == "state_root" else header
        data = encode_header(header)
        signed = company.sign(liar, Propose(company.voters.hash, company.height, 0, header_digest(data)))
        self.give(liar.public, ProposeEnvelope(signed, data, codec.encode(()) if field == "body" else short_of(body), None))

    @rule(peer=CHOICES, ahead=AHEAD, kind=st.sampled_from((Prepare, Commit)), item=st.integers(0, 99))
    def a_certificate_below_the_quorum_arrives(self, peer: int, ahead: int, kind: Any, item: int) -> None:
        self.give_bad(peer, self.company.too_small(kind, self.view(ahead), item))

    @precondition(lambda self: self.company.mail)
    @rule(choice=CHOICES, seed=CHOICES, peer=CHOICES)
    def something_arrives_changed(self, choice: int, seed: int, peer: int) -> None:
        message = self.company.mail[-1 - choice % min(60, len(self.company.mail))][1]
        try:
            changed: Any = codec.decode_message(mutate(codec.encode(message), Random(seed)), AGREEMENT_MESSAGES)
        except RemoteProtocolError:
            return
        self.give_bad(peer, changed)

    @rule(message=st.one_of(*map(strategy_of, AGREEMENT_MESSAGES)), peer=CHOICES)
    def nonsense_arrives(self, message: Any, peer: int) -> None:
        self.give_bad(peer, message)

    def give_bad(self, peer: int, message: Any) -> None:
        liar = self.company.liars[peer % len(self.company.liars)].public
        self.senders_of_bad.add(liar)
        self.give(liar, message)

    def peer(self, choice: int) -> bytes:
        keys = self.company.keys
        return keys[choice % len(keys)]

    # Restarts --------------------------------------------------------------------------------------------------------

    @rule(lost=st.booleans(), event=st.sampled_from((TickInput(), WorkChangedInput())), answered=MOSTLY)
    def it_is_killed_and_starts_again(self, lost: bool, event: ReplicaInput, answered: bool) -> None:
        """Kill it in the middle of a turn: all of its records are on disk or none are, and nothing was sent."""
        turn = self.replica.step(event, self.now)
        if not lost:
            self.disk.append_records(turn.records)
        self.restart(answered)

    @rule(answered=MOSTLY)
    def its_disk_goes_back_to_an_older_state(self, answered: bool) -> None:
        self.disk = self.old_disk.copy()
        self.restart(answered)

    def restart(self, answered: bool) -> None:
        self.log = Log(self.company.voters)
        self.unapplied = [self.disk.decided[height] for height in sorted(self.disk.decided)]
        while len(self.unapplied) > 1:
            self.log.apply(self.unapplied.pop(0))
        self.build(self.disk.read_restart_state(), answered)

    # Invariants ------------------------------------------------------------------------------------------------------

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "replica"):
            return
        replica = self.replica
        assert len(replica._blocks) <= 8 and len(replica._closed) <= 2 and not replica._records and not replica._sends
        books = [*replica._closed.values(), *([replica._book] if replica._book else [])]
        for book in books:
            assert all(len(said) <= 4 * (2 * VIEWS_AHEAD_MAX + 1) for said in book._statements.values())
            assert len(book.proposals) <= VIEWS_AHEAD_MAX + 1

    def teardown(self) -> None:
        """Check that the remaining honest voters bring it to their height, after any events."""
        if not hasattr(self, "replica"):
            return
        while self.replica.height < self.company.height or self.unapplied:
            height = self.replica.height
            if self.unapplied:
                self.a_block_is_applied()
            if self.replica.height < self.company.height:
                self.give(self.company.keys[-1], self.company.decided[self.replica.height])
                assert self.replica.height > height or self.unapplied, "a decision of its height was not taken"


def short_of(body: bytes) -> bytes:
    return Log(Company(4, 0).voters).make_compact_body(body)


OneReplica.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestOneReplica = OneReplica.TestCase


def test_a_block_that_nobody_can_read_is_fetched_and_never_passed_on() -> None:
    """Its leader sends it to every peer that asks. To pass it on, the replica must have read it."""
    machine = OneReplica()
    for place in range(7):
        machine.start(n=7, place=place, answered=True)
        if machine.company.is_liar(machine.company.leader(0)):
            break
    leader = machine.company.leader(0)
    machine.a_lying_leader_proposes_a_bad_block(choice=0, field="body")
    while not any(isinstance(request, GetBlock) for _, request in machine.asked):
        machine.a_timer_expires()
    machine.answer(*next(entry for entry in machine.asked if isinstance(entry[1], GetBlock)), lie=False)
    assert machine.replica.block_refusal is not None
    for _ in range(5):
        machine.time_passes(10.0)
    machine.step(*map(ConnectedInput, [peer for peer in machine.company.keys if peer != leader]))
