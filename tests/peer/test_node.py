"""The decisions of one peer, without disk, network or clock."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest

from consensus.effects import OwnRoundStatement
from consensus.evidence import Evidence
from ledger.blocks import mempool as pool_module
from ledger.blocks.mempool import LINGER_SECONDS, SIGNED_BYTES, transaction_digest
from ledger.jobs import Job, StartJob, StopJob, job_id
from ledger.ledger_state import decode_body
from ledger.members import ApproveVoter, MembersModule, RegisterRoles, ResignAsVoter
from peer.node import node as node_module
from peer.node.node import AppliedBlock, NodeInput, RoundEnded, RoundOpened, StepAction
from protocol import codec
from protocol.identity import Signed, sign_message
from protocol.messages import (
    Ballot,
    EvidenceMessage,
    GetRound,
    GossipEnvelope,
    InclusionList,
    Proposal,
    RememberedStatements,
    Status,
    TimeoutEnvelope,
    Transaction,
)
from protocol.verdicts import Verdict
from tests.ledger.world import LANGUAGE, PEOPLE
from tests.peer.nodes import Pack, Shell
from tests.sim.keys import FastSigner
from transport.network import DataReceived, DuplicateIdentity, PeerConnected, PeerDisconnected


@pytest.fixture
def pack() -> Pack:
    return Pack()


def start_job(pack: Pack) -> bytes:
    signed = pack.world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    pack[0].say(signed)
    pack.until(lambda shell: bool(shell.node.state.jobs.jobs))
    return job_id(signed.signer, pack.world.rules.open_transaction(signed))


def hears(shell: Shell, sender: Shell, message: object) -> None:
    shell.turn(DataReceived(sender.me, codec.encode(message)))


def proposals(pack: Pack, job: bytes, liar: FastSigner) -> tuple[Signed, Signed]:
    root = pack[0].node.state.jobs.jobs[job].model_root
    pair = [Proposal(job, 0, root, bytes([n]) * 32, 1, bytes(32), None) for n in range(2)]
    first, second = (sign_message(liar, pack.world.chain, proposal) for proposal in pair)
    return first, second


def evidence_of(liar: FastSigner, pack: Pack, variant: int = 0) -> Evidence:
    """Return evidence: two ballots of a round of an unknown job."""
    job = bytes([variant + 1]) * 32
    first, second = (sign_message(liar, pack.world.chain, Ballot(job, 0, bytes([n]) * 32, ())) for n in range(2))
    return Evidence(first, second)


def test_who_has_met_its_own_key_says_nothing_more_in_agreement_and_rounds_whether_it_votes_or_not() -> None:
    pack = Pack(6)
    job, leaver = with_proposal(pack), pack[3]
    leaver.say(pack.world.tx(PEOPLE[3], "member/resign", ResignAsVoter()))
    pack.until(lambda shell: leaver.me not in shell.node.state.members.voters)
    assert leaver.node.rounds.books[job] and not leaver.node.replica.is_voter
    for shell in (pack[1], leaver):
        assert shell.node.may_sign_round_messages
        shell.turn(DuplicateIdentity("10.0.0.9:7700"))
        assert not shell.node.may_sign_round_messages and shell.node.rounds.is_silent


# Messages ---------------------------------------------------------------------------------------------------------------


def test_a_transaction_is_decided_by_all_and_applied_alike(pack: Pack) -> None:
    pack[3].say(pack.world.tx(PEOPLE[3], "member/register", RegisterRoles(("trainer",))))
    pack.until(lambda shell: shell.node.state.height >= 1)
    assert len({shell.node.state.state_root for shell in pack}) == 1
    assert pack[0].node.state.members.members[PEOPLE[3].public].roles == ("trainer",)


def test_transactions_that_linger_share_a_block_and_go_with_any_that_does_not(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MembersModule, "lingers", lambda module, content: isinstance(content, RegisterRoles))
    first, second, third = (pack.world.tx(person, "member/register", RegisterRoles(("trainer",))) for person in PEOPLE[:3])

    def decided(height: int) -> list[Signed]:
        found = pack[0].journal.get_decision(height)
        return [] if found is None else list(decode_body(found.decode().body).transactions)

    pack[0].say(first)
    pack.pass_time(LINGER_SECONDS / 2)
    pack[1].say(second)
    pack.pass_time(LINGER_SECONDS / 3)
    assert [shell.node.state.height for shell in pack] == [0] * 4, "the first one lingers"
    pack.pass_time(LINGER_SECONDS / 3)
    assert {signed.signer for signed in decided(1)} == {PEOPLE[0].public, PEOPLE[1].public}
    pack.pass_time(1.0)
    height = pack[0].node.state.height
    pack[2].say(third)
    pack.settle()
    pack[3].say(pack.world.tx(PEOPLE[3], "job/start", StartJob(LANGUAGE)))
    pack.settle()
    assert {signed.signer for signed in decided(height + 1)} == {PEOPLE[2].public, PEOPLE[3].public}, "at once"


@pytest.mark.parametrize("data", [b"", b"\xc1", codec.encode(["nonsense", 1]), codec.encode(Status(1, 0)) + b"\x00"])
def test_bytes_that_are_no_message_are_the_fault_of_who_sent_them(pack: Pack, data: bytes) -> None:
    (fault,) = pack[0].turn(DataReceived(pack[1].me, data)).faults
    assert fault.peer == pack[1].me


def test_one_bad_message_does_not_spoil_the_others_of_its_turn(pack: Pack) -> None:
    signed = pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(("trainer",)))
    good, bad = DataReceived(pack[1].me, codec.encode(GossipEnvelope(signed))), DataReceived(pack[2].me, b"?")
    turn = pack[0].turn(bad, good)
    assert [fault.peer for fault in turn.faults] == [pack[2].me] and list(pack[0].node.ledger.mempool) == [signed]


def test_a_transaction_is_passed_on_once(pack: Pack) -> None:
    signed = pack.world.tx(PEOPLE[1], "member/register", RegisterRoles(()), ahead=5)
    pack[0].said(GossipEnvelope)
    hears(pack[0], pack[1], GossipEnvelope(signed))
    assert GossipEnvelope(signed) in pack[0].said(GossipEnvelope)
    hears(pack[0], pack[2], GossipEnvelope(signed))
    assert pack[0].said(GossipEnvelope) == []


def test_what_we_want_decided_is_said_again_because_who_is_a_block_behind_cannot_keep_it(pack: Pack) -> None:
    signed = pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(()), ahead=5)
    pack[0].say(signed)
    pack.settle()
    pack[1].said(GossipEnvelope)
    for _ in range(2):
        pack[0].said(GossipEnvelope)
        pack.pass_time(node_module.OWN_REPEAT_SECONDS)
        pack[0].turn()
        assert GossipEnvelope(signed) in pack[0].said(GossipEnvelope)
    assert GossipEnvelope(signed) not in pack[1].said(GossipEnvelope)


def test_what_we_want_decided_is_said_again_with_every_block(pack: Pack) -> None:
    signed = pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(()), ahead=5)
    pack[0].say(signed)
    pack.settle()
    for ahead in (1, 2):
        began = pack.now
        pack[0].said(GossipEnvelope)
        height = pack[0].node.state.height
        pack[1].say(pack.world.tx(PEOPLE[1], "member/register", RegisterRoles(()), ahead=ahead))
        pack.until(lambda shell, height=height: shell.node.state.height > height)
        assert pack.now < began + node_module.OWN_REPEAT_SECONDS
        assert GossipEnvelope(signed) in pack[0].said(GossipEnvelope)


def test_who_catches_up_says_again_what_it_wants_decided_only_with_the_last_block(pack: Pack) -> None:
    """It applies blocks as fast as it can. Otherwise it would send all its waiting transactions with each block."""
    signed = pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(()), ahead=5)
    pack[0].say(signed)
    pack.settle()
    for peer in sorted(pack[0].links):
        pack.cut(pack[0].me, peer)
    for ahead in (1, 2, 3):
        pack[1].say(pack.world.tx(PEOPLE[1], "member/register", RegisterRoles(()), ahead=ahead))
        pack.pass_time(5.0)
    height = pack[1].node.state.height
    assert pack[0].node.state.height == 0 and height >= 3
    pack.link_all(pack[0])
    pack[0].sent.clear()
    pack.settle()  # no time passes, since a delay would repeat the waiting transactions anyway
    assert pack[0].node.state.height == height
    assert [to for to, message in pack[0].sent if message == GossipEnvelope(signed)] == [None]


def test_a_transaction_that_is_held_is_not_verified_and_applied_again(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its author repeats it every second, and every new link sends it, so duplicates must cost no signature check."""
    signed = pack.world.tx(PEOPLE[1], "member/register", RegisterRoles(()), ahead=5)
    hears(pack[0], pack[1], GossipEnvelope(signed))
    pack[0].said(GossipEnvelope)
    opened: list[Signed] = []
    real = pack[0].node.rules.open_message
    monkeypatch.setattr(pack[0].node.rules, "open_message", lambda given, kinds: (opened.append(given), real(given, kinds))[1])
    hears(pack[0], pack[2], GossipEnvelope(signed))
    assert opened == [] and pack[0].last.faults == () and pack[0].said(GossipEnvelope) == []
    forged = Signed(signed.body, signed.signer, bytes(64))
    hears(pack[0], pack[2], GossipEnvelope(forged))
    assert opened == [forged] and [fault.peer for fault in pack[0].last.faults] == [pack[2].me]


@pytest.fixture
def job(pack: Pack) -> bytes:
    return start_job(pack)


def test_rounds_open_and_close_with_the_blocks_that_do_it(pack: Pack, job: bytes) -> None:
    (opened,) = pack[0].node.take_round_changes()
    assert isinstance(opened, RoundOpened) and opened.key == (job, 0) and not opened.has_proposed
    assert pack[0].node.take_round_changes() == ()
    hears(pack[0], pack[1], GossipEnvelope(proposals(pack, job, PEOPLE[0])[0]))
    for person in PEOPLE[:4]:
        pack.shells[person.public].say(pack.world.tx(person, "job/stop", StopJob(job), ahead=1 + (person is PEOPLE[0])))
    pack.until(lambda shell: not shell.node.state.jobs.running())
    (closed,) = pack[0].node.take_round_changes()
    assert isinstance(closed, RoundEnded) and closed.key == (job, 0)
    other = pack[1].node.take_round_changes()[-1]
    assert isinstance(other, RoundEnded) and (closed.has_proposed, other.has_proposed) == (True, False), "each by itself"


def test_a_round_is_opened_with_what_tells_who_is_alive(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[bytes, float]] = []
    real = pack[0].node.rounds.open_round

    def opens(key: bytes, job: Job, now: float, spoken: Any, seconds: float, heard: dict[bytes, float], accepted: Any) -> Any:
        told.append(dict(heard))
        return real(key, job, now, spoken, seconds, heard, accepted)

    monkeypatch.setattr(pack[0].node.rounds, "open_round", opens)
    linked = pack.now
    pack.cut(pack[0].me, pack[3].me)
    pack.pass_time(50.0)
    start_job(pack)
    assert pack[3].me not in told[0] and all(told[0][pack[number].me] > linked for number in (1, 2))


def test_a_ballot_is_a_record_of_the_turn_that_sends_it(pack: Pack, job: bytes) -> None:
    liar_free, _ = proposals(pack, job, PEOPLE[0])
    for shell in pack:
        hears(shell, pack[1], GossipEnvelope(liar_free))
    pack[1].node.rounds.record_verdict((job, 0), PEOPLE[0].public, Verdict.ACCEPT, pack.now)
    pack.pass_time(200.0)
    ballots = [record for record in pack[1].journal.records if isinstance(record, OwnRoundStatement) and record.tag == "ballot"]
    assert len(ballots) == 1
    assert any(message == GossipEnvelope(ballots[0].signed) for _, message in pack[1].sent)


def test_a_vouch_is_a_record_of_the_turn_that_sends_it_and_reaches_those_who_have_no_link_to_its_author(pack: Pack) -> None:
    job = with_proposal(pack)
    pack.cut(pack[1].me, pack[3].me)
    pack.settle()
    judges(pack, pack[1], job, Verdict.ACCEPT)
    pack[1].turn()
    (vouch,) = [record for record in pack[1].last.records if isinstance(record, OwnRoundStatement)]
    assert vouch.tag == f"vouch:{PEOPLE[0].public.hex()}"
    assert any(message == GossipEnvelope(vouch.signed) for _, message in pack[1].sent)
    pack.settle()
    assert all(vouch.signed in shell.node.rounds.messages_of_round((job, 0)) for shell in pack)


def test_a_round_that_cannot_be_closed_is_asked_about_and_the_answer_is_given_once_a_second(pack: Pack, job: bytes) -> None:
    first, _ = proposals(pack, job, PEOPLE[0])
    hears(pack[0], pack[1], GossipEnvelope(first))
    pack[1].said(GetRound)
    pack.pass_time(4.0)
    assert GetRound(job, 0) in pack[1].said(GetRound)
    pack[0].said(GossipEnvelope)
    for asked in (1, 0):
        pack.now += 0.1
        hears(pack[0], pack[1], GetRound(job, 0))
        assert pack[0].said(GossipEnvelope).count(GossipEnvelope(first)) == asked
    pack.now += 1.0
    hears(pack[0], pack[1], GetRound(job, 0))
    assert pack[0].said(GossipEnvelope).count(GossipEnvelope(first)) == 1


def test_a_round_that_cannot_be_closed_is_asked_about_here_and_there_until_everybody_was_asked(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "ROUND_REQUEST_LINKS", 2)
    start_job(pack)
    pack[1].sent.clear()
    pack.pass_time(10.0)
    asked = [to for to, message in pack[1].sent if isinstance(message, GetRound)]
    others = {shell.me for shell in pack} - {pack[1].me}
    assert len(asked) >= 3 and all(to is not None and len(to) == 2 for to in asked)
    assert {peer for to in asked[:2] for peer in to or ()} == others


def full_pool(pack: Pack, count: int, author: FastSigner = PEOPLE[1]) -> list[Signed]:
    """Fill peer 0's pool with undecided transactions that no other peer has. All wait for a missing first one."""
    waiting = [pack.world.tx(author, "member/register", RegisterRoles(()), ahead=n + 2) for n in range(count)]
    for signed in waiting:
        pack[0].node.ledger.mempool.add_transaction(signed)
    return waiting


def relinked(pack: Pack) -> None:
    pack[0].sent.clear()
    pack[0].turn(PeerDisconnected(pack[1].me), PeerConnected(pack[1].me))


def relayed(pack: Pack) -> list[Signed]:
    """Return the transactions that peer 0 has sent to peer 1 alone since the last call."""
    sent, pack[0].sent = pack[0].sent, []
    found = [m.signed for to, m in sent if to == (pack[1].me,) and isinstance(m, GossipEnvelope)]
    return [s for s in found if codec.unpack(s.body, len(s.body))[0] == Transaction.TAG]


def test_a_new_link_gets_our_own_transactions_and_a_few_others_at_once_and_the_rest_with_later_blocks(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "POOL_PAGE_MAX", 10)
    waiting, own = full_pool(pack, 25), full_pool(pack, 3, PEOPLE[0])
    relinked(pack)
    first = relayed(pack)
    assert set(own) < set(first) and len(first) == 13, "own ones, and one page of the others"
    pages = [first]
    pack[0].node.ledger.mempool.add_transaction(pack.world.tx(PEOPLE[2], "member/register", RegisterRoles(()), ahead=2))
    for number in range(3):
        pack.now += node_module.POOL_PAGE_SECONDS
        pack[0].say(pack.world.tx(PEOPLE[3], "member/register", RegisterRoles(()), ahead=1 + number))
        pack.settle()
        pages.append(relayed(pack))
    told = [signed for page in pages for signed in page]
    assert set(told) == {*waiting, *own} and len(told) == len(set(told)), "each once, and none that came after the link"


def test_a_page_of_the_pool_is_bounded_in_bytes(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "POOL_PAGE_BYTES", 1_000)
    full_pool(pack, 25)
    relinked(pack)
    assert 0 < sum(len(signed.body) + SIGNED_BYTES for signed in relayed(pack)) <= 1_000


@pytest.mark.parametrize("victim", range(4))
def test_no_leader_fails_because_a_member_filled_its_pool(pack: Pack, monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    """Invariant: no view timer runs for a transaction that the leader has no room for. One of the four leads."""
    monkeypatch.setattr(pool_module, "PENDING_PER_MEMBER_MAX", 8)
    first, *flood = [pack.world.tx(PEOPLE[3], "member/register", RegisterRoles(()), ahead=n + 1) for n in range(9)]
    for signed in flood:
        hears(pack[victim], pack[0], GossipEnvelope(signed))
    for shell in pack:
        hears(shell, pack[3], GossipEnvelope(first))
    pack.settle()
    assert len({frozenset(shell.node.ledger.mempool) for shell in pack}) == 1
    pack.pass_time(10.0)
    assert all(shell.node.replica.view == 0 for shell in pack)
    pack[1].say(pack.world.tx(PEOPLE[1], "member/register", RegisterRoles(())))
    pack.until(lambda shell: shell.node.state.height >= 1)


def waiting_for(shell: Shell) -> frozenset[Signed]:
    return frozenset(shell.node.ledger.mempool)


def until_applied(pack: Pack, *late: Shell) -> list[tuple[bytes, NodeInput]]:
    """Run until all is done but the late peers' reports of their applied block. Return those reports."""
    reports: list[tuple[bytes, NodeInput]] = []
    keys = {shell.me for shell in late}
    while pack.queue:
        to, item = pack.queue.popleft()
        if to in keys and isinstance(item, AppliedBlock):
            reports.append((to, item))
        else:
            pack.shells[to].turn(item)
    return reports


def test_what_one_honest_voter_waits_for_costs_one_view_only(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant: f liars and one honest voter that waits end one honest leader's view, but not that of the next honest leader.

    The author has its maximum of waiting transactions. One more reaches the first two leaders right before they apply a block,
    and the others right after it, when the block has made room. So the third honest peer, which leads last, waits alone. The
    author is the liar and repeats nothing.
    """
    monkeypatch.setattr(pool_module, "PENDING_PER_MEMBER_MAX", 8)
    start_job(pack)  # a running job, so that no block is due for its own sake
    liar, waits, first, second = pack[1], pack[2], pack[3], pack[0]
    liar.node._repeat_own = lambda: None  # type: ignore[method-assign]
    liar.node.ledger.make_body = lambda height, now_ms: None  # type: ignore[method-assign]
    ahead = [pack.world.tx(PEOPLE[1], "member/register", RegisterRoles(()), n) for n in (1, 2, *range(50, 57))]
    decided, following, last_one, *flood = ahead
    for shell in pack:
        for signed in (*flood, decided):
            hears(shell, liar, GossipEnvelope(signed))
    reports = until_applied(pack, first, second)
    for shell in pack:
        hears(shell, liar, GossipEnvelope(following))
    assert until_applied(pack) == []
    assert waiting_for(first) == {decided, following, *flood} and waiting_for(waits) == {following, *flood}
    for shell in (first, second):
        hears(shell, liar, GossipEnvelope(last_one))
    pack.queue.extendleft(reports)
    pack.settle()
    assert {shell.node.state.height for shell in pack} == {2}
    assert waiting_for(waits) == {following, *flood, last_one} and waiting_for(first) == waiting_for(second) == {last_one}
    assert waits.node.replica.leader == first.me
    while waits.node.state.height == 2:
        assert waits.node.replica.view < 2, "another honest leader's view failed"
        pack.pass_time(0.25)
    assert following not in waiting_for(waits)


def lose_a_view(pack: Pack, leader: Shell, heir: Shell) -> list[Signed]:
    """All but the second leader wait for these transactions, whose author it is. Neither leader proposes."""
    author = next(person for person in PEOPLE if person.public == heir.me)
    waiting = [pack.world.tx(author, "member/register", RegisterRoles(()), ahead) for ahead in (1, 2, 3, 4)]
    for shell in (leader, heir):
        shell.node.ledger.make_body = lambda height, now_ms: None  # type: ignore[method-assign]
    for shell in pack:
        if shell is not heir:
            for signed in waiting:
                shell.node.ledger.mempool.add_transaction(signed)
        shell.turn()
        shell.sent.clear()
    assert leader.node.replica.leader == leader.me
    pack.until(lambda shell: shell.node.replica.view > 0 or not shell.node.replica.is_voter)
    assert leader.node.replica.leader == heir.me
    return waiting


def transactions_said(shell: Shell) -> list[tuple[tuple[bytes, ...] | None, Signed]]:
    said = [(to, message.signed) for to, message in shell.sent if isinstance(message, GossipEnvelope)]
    return [(to, signed) for to, signed in said if codec.unpack(signed.body, len(signed.body))[0] == Transaction.TAG]


def test_who_lost_a_view_tells_the_next_leader_a_bounded_part_of_what_it_waits_for(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant: after a failed view a voter sends one page to one peer, and an observer sends nothing."""
    monkeypatch.setattr(node_module, "AWAITED_MAX", 2)
    observer = pack.add(PEOPLE[4])
    pack.settle()
    waiting = lose_a_view(pack, pack[1], pack[2])
    assert transactions_said(pack[0]) == [((pack[2].me,), signed) for signed in waiting[:2]]
    for number in range(4):
        for message in pack[number].said(TimeoutEnvelope):
            hears(observer, pack[number], message)
    assert observer.node.replica.view == 1 and observer.node.ledger.has_work()
    assert transactions_said(observer) == []


def test_what_the_next_leader_is_told_is_bounded_in_bytes(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "AWAITED_BYTES", 600)
    waiting = lose_a_view(pack, pack[1], pack[2])
    told = [signed for _, signed in transactions_said(pack[0])]
    assert told and len(told) < len(waiting) and sum(len(signed.body) + SIGNED_BYTES for signed in told) <= 600


def test_who_has_not_applied_the_last_block_tells_no_leader_anything(pack: Pack) -> None:
    """It waits for no transaction, and does not know those that others wait for."""
    start_job(pack)  # a running job, so that no block is due for its own sake
    pack[2].say(pack.world.tx(PEOPLE[2], "member/register", RegisterRoles(())))
    assert until_applied(pack, pack[1])
    lose_a_view(pack, pack[3], pack[0])
    assert (pack[1].node.state.height, pack[1].node.replica.height, pack[1].node.replica.view) == (1, 3, 1)
    assert transactions_said(pack[1]) == [] != transactions_said(pack[2])


def test_a_transaction_that_was_dropped_is_passed_on_again_only_if_it_applies(pack: Pack) -> None:
    early = pack.world.tx(PEOPLE[1], "member/approve", ApproveVoter(PEOPLE[6].public))
    hears(pack[0], pack[1], GossipEnvelope(early))
    assert pack[0].said(Transaction), "it may follow something"
    pack[2].say(pack.world.tx(PEOPLE[2], "member/register", RegisterRoles(())))
    pack.until(lambda shell: shell.node.state.height >= 1)
    assert early not in pack[0].node.ledger.mempool
    pack[0].said(Transaction)
    hears(pack[0], pack[1], GossipEnvelope(early))
    assert pack[0].said(Transaction) == [] and early not in pack[0].node.ledger.mempool
    assert pack[0].node.refusal_counts["refused-before"] == 1


def successor(pack: Pack, number: int, new: FastSigner) -> None:
    """Stop the peer and continue with another key on another disk."""
    shell = pack[number]
    pack[3].say(pack.world.rotation(PEOPLE[number], new))
    for peer in sorted(shell.links):
        pack.cut(shell.me, peer)
    del pack.shells[shell.me]
    pack.queue = deque(entry for entry in pack.queue if entry[0] != shell.me)
    pack.settle()
    pack.add(new)
    pack.until(lambda other: new.public in other.node.state.members.voters)


def test_a_round_is_closed_by_those_who_have_other_keys_since_it_was_opened(pack: Pack, job: bytes) -> None:
    ours = Proposal(job, 0, pack[0].node.state.jobs.jobs[job].model_root, bytes(32), 1, bytes(32), None)
    pack[0].turn(StepAction(lambda: pack[0].node.rounds.publish_proposal(ours, pack.now)))
    cast(pack, pack[0], job, Verdict.ACCEPT)
    successor(pack, 1, PEOPLE[8])
    successor(pack, 2, PEOPLE[9])
    assert pack[3].node.rounds.books[job].ballots.keys() == {PEOPLE[0].public}
    for shell in pack:
        (opened,) = shell.node.take_round_changes()[-1:]
        assert isinstance(opened, RoundOpened) and PEOPLE[9].public in opened.job.voters
        judges(pack, shell, job, Verdict.ACCEPT)
    pack.until(lambda shell: shell.node.state.jobs.jobs[job].round == 1)
    assert pack[0].node.state.jobs.jobs[job].accepted == {PEOPLE[0].public: 1}
    assert all(not shell.node.state.members.is_expelled(person.public) for shell in pack for person in PEOPLE)


# Evidence ---------------------------------------------------------------------------------------------------------------


def test_who_finds_a_double_proposal_records_it_and_tells_everybody(pack: Pack) -> None:
    first, second = proposals(pack, start_job(pack), PEOPLE[1])
    pack[0].said(EvidenceMessage)
    hears(pack[0], pack[2], GossipEnvelope(first))
    assert pack[0].said(EvidenceMessage) == []
    hears(pack[0], pack[2], GossipEnvelope(second))
    assert pack[0].last.evidence == (Evidence(first, second),)
    assert pack[0].said(EvidenceMessage) == [EvidenceMessage(first, second)]


def test_a_proven_accusation_is_recorded_and_passed_on_once(pack: Pack) -> None:
    found = evidence_of(PEOPLE[3], pack)
    pack[0].said(EvidenceMessage)
    hears(pack[0], pack[1], EvidenceMessage(found.first, found.second))
    assert pack[0].last.evidence == (found,) and pack[0].last.faults == ()
    assert pack[0].said(EvidenceMessage) == [EvidenceMessage(found.first, found.second)]
    for again in (found, evidence_of(PEOPLE[3], pack, variant=1)):
        hears(pack[0], pack[2], EvidenceMessage(again.first, again.second))
        assert pack[0].last.evidence == () and pack[0].said(EvidenceMessage) == [], "one proof about one culprit is enough"


def test_a_forged_accusation_costs_its_sender_the_link_and_nothing_else(pack: Pack) -> None:
    one, other = evidence_of(PEOPLE[3], pack), evidence_of(PEOPLE[2], pack)
    unsigned = Signed(one.second.body, one.second.signer, bytes(64))
    for first, second in ((one.first, one.first), (one.first, other.second), (one.first, unsigned)):
        hears(pack[0], pack[1], EvidenceMessage(first, second))
        assert [fault.peer for fault in pack[0].last.faults] == [pack[1].me]
        assert pack[0].last.evidence == () and not pack[0].node.ledger.pending_evidence


def test_an_accusation_of_somebody_who_is_no_member_is_not_kept(pack: Pack) -> None:
    found = evidence_of(PEOPLE[9], pack)
    hears(pack[0], pack[1], EvidenceMessage(found.first, found.second))
    assert pack[0].last.evidence == () and pack[0].last.faults == () and not pack[0].node.ledger.pending_evidence


def test_every_new_link_hears_of_undecided_evidence_also_after_a_restart() -> None:
    pack = Pack(count=1)
    found = evidence_of(PEOPLE[3], pack)
    pack[0].turn(DataReceived(PEOPLE[1].public, codec.encode(EvidenceMessage(found.first, found.second))))
    for _ in range(2):
        pack[0].said(EvidenceMessage)
        pack[0].turn(PeerConnected(PEOPLE[2].public))
        assert pack[0].said(EvidenceMessage) == [EvidenceMessage(found.first, found.second)]
        pack.restart(0)
        assert pack[0].last.evidence == (), "it is on disk already"


def test_evidence_that_a_block_left_out_is_told_again_after_it(pack: Pack) -> None:
    knows = next(shell for shell in pack if shell.me not in (shell.node.replica.leader, PEOPLE[3].public))
    found = evidence_of(PEOPLE[3], pack)
    knows.node.ledger.add_evidence(found)
    knows.said(EvidenceMessage)
    pack[3].say(pack.world.tx(PEOPLE[3], "member/register", RegisterRoles(("trainer",))))
    pack.until(lambda shell: shell.node.state.height >= 1)
    assert EvidenceMessage(found.first, found.second) in knows.said(EvidenceMessage)
    pack.until(lambda shell: PEOPLE[3].public not in shell.node.state.members.voters)
    for shell in pack:
        shell.said(EvidenceMessage)
    pack[0].say(pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(())))
    pack.pass_time(5.0)
    assert all(shell.said(EvidenceMessage) == [] for shell in pack), "decided"


def test_a_liar_is_expelled_by_evidence_that_one_voter_saw(pack: Pack) -> None:
    found = evidence_of(PEOPLE[3], pack)
    hears(pack[0], pack[1], EvidenceMessage(found.first, found.second))
    pack.until(lambda shell: PEOPLE[3].public not in shell.node.state.members.voters)
    assert all(not shell.node.ledger.pending_evidence for shell in pack)
    assert len({shell.node.state.state_root for shell in pack}) == 1


# Notices ----------------------------------------------------------------------------------------------------------------


def test_a_voter_tells_what_waited_through_a_whole_block(pack: Pack) -> None:
    waiting = next(shell for shell in pack if shell.me != shell.node.replica.leader)
    neglected = pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(("trainer",)))
    waiting.node.ledger.mempool.add_transaction(neglected)  # no other peer has it
    waiting.said(InclusionList)
    pack[3].say(pack.world.tx(PEOPLE[3], "member/register", RegisterRoles(("trainer",))))
    pack.until(lambda shell: shell.node.state.height >= 1)
    assert {notice.transactions for notice in waiting.said(InclusionList)} == {(transaction_digest(neglected),)}


def test_notices_of_more_voters_than_may_lie_make_a_transaction_due(pack: Pack) -> None:
    notice = InclusionList(0, (bytes(32),))
    for liar in (PEOPLE[1], PEOPLE[9]):
        hears(pack[0], pack[1], GossipEnvelope(sign_message(liar, pack.world.chain, notice)))
    due = pack[0].node.ledger.inclusion_lists.transactions_due
    assert due(pack.genesis.voters.keys, 2) == frozenset(), "one voter and a stranger"
    hears(pack[0], pack[1], GossipEnvelope(sign_message(PEOPLE[2], pack.world.chain, notice)))
    assert due(pack.genesis.voters.keys, 2) == {bytes(32)}


def test_a_notice_out_of_form_costs_its_sender_the_link(pack: Pack) -> None:
    hears(pack[0], pack[1], GossipEnvelope(sign_message(PEOPLE[1], pack.world.chain, InclusionList(0, (bytes(32), bytes(32))))))
    assert [fault.peer for fault in pack[0].last.faults] == [pack[1].me]


# Forgotten statements ---------------------------------------------------------------------------------------------------


def cast(pack: Pack, shell: Shell, job: bytes, verdict: Verdict) -> list[OwnRoundStatement]:
    """Judge the one proposal, let all timers run out, and return this voter's statements."""
    judges(pack, shell, job, verdict)
    before = len(shell.journal.records)
    pack.pass_time(200.0)
    return [record for record in shell.journal.records[before:] if isinstance(record, OwnRoundStatement)]


def judges(pack: Pack, shell: Shell, job: bytes, verdict: Verdict) -> None:
    """Set the result of the proposal's cheap checks, and of its re-execution if this voter has a worker."""
    rounds, trainer = shell.node.rounds, PEOPLE[0].public
    rounds.record_verdict((job, 0), trainer, verdict, pack.now)
    if shell.me in rounds.books[job].terms.reexecutors - {trainer}:
        rounds.record_replay_verdict((job, 0), trainer, verdict, pack.now)


def with_proposal(pack: Pack) -> bytes:
    job = start_job(pack)
    first, _ = proposals(pack, job, PEOPLE[0])
    for shell in pack:
        hears(shell, pack[1], GossipEnvelope(first))
    return job


def forget(shell: Shell) -> None:
    """Restore the disk from before the job, like yesterday's backup."""
    shell.journal.records = [record for record in shell.journal.records if not isinstance(record, OwnRoundStatement)]


def came_back_alone(pack: Pack, shell: Shell) -> None:
    """Restart the peer without a link."""
    for peer in sorted(shell.links):
        pack.cut(shell.me, peer)
    pack.settle()
    shell.start()
    pack.settle()


def test_nobody_signs_before_a_quorum_has_said_what_it_heard_of_it() -> None:
    pack = Pack(count=2)
    pack[0].say(pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(())))
    pack.pass_time(30.0)
    assert not any(shell.node.may_sign_round_messages or shell.journal.read_restart_state().votes for shell in pack)
    pack.add(PEOPLE[2])
    pack.until(lambda shell: shell.node.state.height >= 1)


def test_a_voter_that_forgot_its_ballot_casts_no_other_and_is_accused_by_nobody(pack: Pack) -> None:
    job = with_proposal(pack)
    vouch, record = said = cast(pack, pack[1], job, Verdict.ACCEPT)
    assert (vouch.tag, record.tag) == (f"vouch:{PEOPLE[0].public.hex()}", "ballot")
    forget(pack[1])
    before = pack[1].journal.records.copy()
    pack.restart(1)
    known = [r for r in pack[1].journal.records[len(before) :] if isinstance(r, OwnRoundStatement)]
    assert sorted(known, key=lambda r: r.tag) == sorted(said, key=lambda r: r.tag), "recognised at once"
    assert pack[1].node.rounds.muted == {(job, 0)}
    assert cast(pack, pack[1], job, Verdict.REPLAY) == []
    assert pack[1].node.rounds.books[job].signed_ballots[pack[1].me] == record.signed
    assert not any(shell.node.ledger.pending_evidence for shell in pack)


def test_a_forgotten_ballot_that_is_named_in_the_last_awaited_answer_is_not_cast_again_in_that_turn(pack: Pack) -> None:
    job, voter = with_proposal(pack), pack[1]
    (record,) = [r for r in cast(pack, voter, job, Verdict.ACCEPT) if r.tag == "ballot"]
    forget(voter)
    came_back_alone(pack, voter)
    hears(voter, pack[0], GossipEnvelope(proposals(pack, job, PEOPLE[0])[0]))
    assert cast(pack, voter, job, Verdict.REPLAY) == [], "nobody has answered yet, all timers have run out"
    hears(voter, pack[0], RememberedStatements(voter.node.replica.height, ()))
    assert not voter.node.may_sign_round_messages
    before = len(voter.journal.records)
    hears(voter, pack[2], RememberedStatements(voter.node.replica.height, (record.signed,)))
    assert voter.node.may_sign_round_messages
    assert [r for r in voter.journal.records[before:] if isinstance(r, OwnRoundStatement)] == [record]


def left_and_forgot(pack: Pack, leaver: Shell, job: bytes) -> OwnRoundStatement:
    """Let person 3 resign as a voter, cast its ballot of the open round, and forget the ballot."""
    leaver.say(pack.world.tx(PEOPLE[3], "member/resign", ResignAsVoter()))
    pack.until(lambda shell: leaver.me not in {*shell.node.state.members.voters, *shell.node.state.members.previous})
    (record,) = [r for r in cast(pack, leaver, job, Verdict.ACCEPT) if r.tag == "ballot"]
    forget(leaver)
    return record


def test_who_does_not_vote_any_more_and_forgot_its_ballot_of_an_open_round_casts_no_other() -> None:
    """It ceased to vote in the middle of the round, which five of six voters can still close."""
    pack = Pack(6)
    job, leaver = with_proposal(pack), pack[3]
    assert leaver.me not in leaver.node.rounds.books[job].terms.trainers
    record = left_and_forgot(pack, leaver, job)
    came_back_alone(pack, leaver)
    pack.pass_time(5.0)
    assert leaver.node.state.height == pack[0].node.state.height and not leaver.node.may_sign_round_messages, (
        "nobody has told it anything"
    )
    assert cast(pack, leaver, job, Verdict.REPLAY) == []
    pack.link_all(leaver)
    pack.pass_time(5.0)
    assert leaver.node.may_sign_round_messages and leaver.node.rounds.muted == {(job, 0)}
    assert leaver.node.rounds.books[job].signed_ballots[leaver.me] == record.signed
    assert not any(shell.node.ledger.pending_evidence for shell in pack)


@pytest.mark.parametrize("seconds", [0.1, 0.9, 2.5])
def test_answers_that_come_before_the_voters_of_the_height_are_known_do_not_count(seconds: float) -> None:
    """Such answers are not read: two decided blocks that change the voters are not applied yet."""
    pack = Pack(6)
    job, leaver = with_proposal(pack), pack[3]
    record = left_and_forgot(pack, leaver, job)
    leaver.applies_up_to = leaver.node.state.height - 2
    came_back_alone(pack, leaver)
    assert job in leaver.node.rounds.books
    pack.link_all(leaver)
    pack.pass_time(seconds)
    leaver.applies_up_to = math.inf
    leaver.turn()
    pack.settle()
    assert set(cast(pack, leaver, job, Verdict.REPLAY)) <= {record} and leaver.node.rounds.muted == {(job, 0)}
    assert leaver.node.rounds.books[job].signed_ballots[leaver.me] == record.signed
    assert not any(shell.node.ledger.pending_evidence for shell in pack)


def test_a_forgotten_ballot_is_named_also_by_those_who_have_not_applied_the_block_that_opens_its_round(pack: Pack) -> None:
    pack.pass_time(2.0)
    slow, voter = [pack[1], pack[2]], pack[3]
    for shell in slow:
        shell.applies_up_to = 0
    start = pack.world.tx(PEOPLE[0], "job/start", StartJob(LANGUAGE))
    pack[0].say(start)
    pack.until(lambda shell: shell.node.replica.height >= 2)
    job = job_id(start.signer, pack.world.rules.open_transaction(start))
    first, _ = proposals(pack, job, PEOPLE[0])
    for shell in pack:
        hears(shell, pack[0], GossipEnvelope(first))
    (record,) = [r for r in cast(pack, voter, job, Verdict.ACCEPT) if r.tag == "ballot"]
    assert all(job not in shell.node.rounds.books for shell in slow)
    forget(voter)
    came_back_alone(pack, voter)
    for shell in slow:
        pack.link(voter.me, shell.me)
    pack.pass_time(2.0)
    assert voter.node.may_sign_round_messages and voter.node.rounds.muted == {(job, 0)}, "a quorum with itself has answered"
    hears(voter, slow[0], GossipEnvelope(first))
    assert cast(pack, voter, job, Verdict.REPLAY) == []
    assert voter.node.rounds.books[job].signed_ballots[voter.me] == record.signed


def test_a_voter_that_forgot_that_it_proposed_says_nothing_at_all_in_that_round(pack: Pack, job: bytes) -> None:
    first, second = proposals(pack, job, PEOPLE[1])
    mine = codec.decode_message(first.body, (Proposal,))
    pack[1].turn(StepAction(lambda: pack[1].node.rounds.publish_proposal(mine, pack.now)))
    pack.settle()
    forget(pack[1])
    pack.restart(1)
    other = codec.decode_message(second.body, (Proposal,))
    pack[1].said(Ballot)
    pack[1].turn(StepAction(lambda: pack[1].node.rounds.publish_proposal(other, pack.now)))
    pack[1].node.rounds.record_verdict((job, 0), PEOPLE[1].public, Verdict.ACCEPT, pack.now)
    pack.pass_time(200.0)
    assert pack[1].said(Ballot) == [] and not any(shell.node.ledger.pending_evidence for shell in pack)


@pytest.fixture
def trainer(pack: Pack) -> FastSigner:
    """Return a member that trains and does not vote. Its peer does not run yet."""
    newcomer = PEOPLE[5]
    pack[0].say(pack.world.admission(newcomer))
    pack.until(lambda shell: shell.node.state.height >= 1)
    pack[0].say(
        sign_message(newcomer, pack.world.chain, Transaction(2, 50, "member/register", codec.encode(RegisterRoles(("trainer",)))))
    )
    pack.until(lambda shell: newcomer.public in shell.node.state.members.members)
    pack.until(lambda shell: shell.node.state.members.members[newcomer.public].roles == ("trainer",))
    return newcomer


def test_a_trainer_that_does_not_vote_asks_too_and_keeps_its_proposal_until_it_knows(pack: Pack, trainer: FastSigner) -> None:
    shell = pack.add(trainer)
    pack.until(lambda shell: shell.node.state.height >= 2)
    first, second = (codec.decode_message(signed.body, (Proposal,)) for signed in proposals(pack, start_job(pack), trainer))
    shell.turn(StepAction(lambda: shell.node.rounds.publish_proposal(first, pack.now)))
    pack.settle()
    forget(shell)
    for other in pack:
        pack.cut(shell.me, other.me)
    shell.start()
    pack.until(lambda shell: shell.node.state.height >= 3)
    shell.turn(StepAction(lambda: shell.node.rounds.publish_proposal(second, pack.now)))
    pack.link(shell.me, pack[0].me)
    shell.said(Proposal)
    pack.pass_time(5.0)
    assert not shell.node.may_sign_round_messages, "one voter is no quorum"
    pack.link_all(shell)
    pack.pass_time(5.0)
    assert shell.node.may_sign_round_messages
    assert second not in shell.said(Proposal) and not any(shell.node.ledger.pending_evidence for shell in pack)
    assert codec.decode_message(shell.node.rounds.own_messages()[0].body, (Proposal,)) == first


def test_a_trainer_that_does_not_vote_and_forgot_nothing_proposes_when_a_quorum_has_answered(
    pack: Pack, trainer: FastSigner
) -> None:
    job = start_job(pack)
    shell = pack.add(trainer)
    pack.until(lambda shell: shell.node.state.height >= 3)
    first, _ = proposals(pack, job, trainer)
    pack.pass_time(5.0)
    shell.turn(StepAction(lambda: shell.node.rounds.publish_proposal(codec.decode_message(first.body, (Proposal,)), pack.now)))
    pack.settle()
    assert all(trainer.public in shell.node.rounds.books[job].proposals for shell in pack)


def test_a_peer_says_nothing_in_rounds_while_a_decided_block_waits_for_being_applied(pack: Pack) -> None:
    """The block may close the round. Peers that have applied it have forgotten our statements, and could not return them."""
    slow = pack[2]
    pack.settle()
    slow.applies_up_to = 0
    pack[0].say(pack.world.tx(PEOPLE[0], "member/register", RegisterRoles(())))
    pack.until(lambda shell: shell.node.replica.height == 2)
    silent = not slow.node.may_sign_round_messages
    assert slow.node.state.height == 0 and silent
    slow.applies_up_to = math.inf
    slow.turn()
    pack.settle()
    assert slow.node.state.height >= 1 and slow.node.may_sign_round_messages
