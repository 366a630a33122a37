"""A submission of an author acts exactly once, or it fails and never acts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from consensus.block import Block, encode_block
from consensus.effects import DecidedBlock
from ledger.blocks.mempool import Mempool
from ledger.core.genesis import TRAINER
from ledger.jobs import JobPhase, StartJob, StopJob, job_id
from ledger.ledger_state import BlockBody, LedgerState
from ledger.members import Invitation, RegisterRoles, RenameMember
from peer.node.open_rounds import RoundEffects
from peer.runtime import transaction_submitter as author_module
from peer.runtime.membership.membership import NOT_DECIDED, Membership
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.node_observer import NodeObserver
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.invitation import InvitationString
from protocol import codec
from protocol.errors import UserError
from protocol.identity import Signed, sign_message
from protocol.messages import Certificate, Transaction
from tests.ledger.world import LANGUAGE, PEOPLE, SCRATCH, World
from tests.peer.network import SCRATCH as REAL_SCRATCH
from tests.peer.network import Network, network, poll
from tests.sim.keys import FastSigner
from tests.waiting import patience

ME, OTHER = PEOPLE[0], PEOPLE[1]


class Log:
    """A driver as a `TransactionSubmitter` sees it. The test decides blocks, and applies any number of them at a time."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery, self.world, self.signer, self.store = nursery, World(), ME, self
        self.rules, self.chain_id = self.world.rules, self.world.chain
        self.replica = SimpleNamespace(duplicate_identity_reason=None, is_outdated=False)
        self.block_applied = trio.Event()
        self.blocks: dict[int, DecidedBlock] = {}
        self._say, self._said = trio.open_memory_channel[Signed](100)

    @property
    def node(self) -> Any:
        return self.world

    @property
    def state(self) -> LedgerState:
        return self.world.state

    async def run_action(self, do: Callable[[], RoundEffects | None]) -> None:
        await trio.lowlevel.checkpoint()
        for signed in (do() or RoundEffects()).sends:
            self._say.send_nowait(signed)

    def get_decision(self, height: int) -> DecidedBlock | None:
        return self.blocks.get(height)

    async def said(self) -> Signed:
        with patience():
            return await self._said.receive()

    def is_silent(self) -> bool:
        return not self._said.statistics().current_buffer_used

    def decide(self, *blocks: Iterable[Signed]) -> None:
        for transactions in blocks:
            body = codec.encode(BlockBody((), (), tuple(transactions)))
            self.world.decide_body(body)
            height, zero = self.state.height, bytes(32)
            self.blocks[height] = DecidedBlock(
                height,
                zero,
                encode_block(Block(height, zero, 1_000, ME.public, zero, zero, zero, None, {}, body)),
                Certificate(b"-", {}),
            )
            self.world.ledger.mempool.height = height
            self.world.ledger.mempool.prune_transactions(self.rules, self.state)
        self._wake()

    def restored(self) -> None:
        """Restore a snapshot: earlier blocks and waiting transactions are gone."""
        self.blocks.clear()
        self.world.ledger.mempool = Mempool(self.state.height)
        self._wake()

    def _wake(self) -> None:
        applied, self.block_applied = self.block_applied, trio.Event()
        applied.set()

    def selected(self) -> tuple[Signed, ...]:
        chosen: tuple[Signed, ...] = self.world.ledger.mempool.select_transactions(self.rules, self.state)
        return chosen

    def starts(self) -> int:
        """Return how often this author has started a job."""
        return sum(job.author == ME.public for job in self.state.jobs.jobs.values())


class Asked:
    """A submission in progress."""

    def __init__(self, log: Log, author: Any, kind: str, content: object) -> None:
        self.transaction: Transaction | None = None
        self.error = ""
        self.ended, self.scope = trio.Event(), trio.CancelScope()
        self._log = log
        log.nursery.start_soon(self._run, author, kind, content)

    async def _run(self, author: TransactionSubmitter, kind: str, content: object) -> None:
        with self.scope:
            try:
                self.transaction = await author.submit(kind, content)
            except UserError as error:
                self.error = str(error)
        self.ended.set()

    async def settled(self) -> Asked:
        """Wait until the submission has ended and everything that can be decided is decided."""
        while not self.ended.is_set() or self._log.selected():
            await poll(lambda: self.ended.is_set() or bool(self._log.selected()))
            self._log.decide(self._log.selected())
        return self


@asynccontextmanager
async def logged() -> AsyncIterator[tuple[Log, TransactionSubmitter]]:
    async with trio.open_nursery() as nursery:
        log = Log(nursery)
        author: Any = log
        yield log, TransactionSubmitter(author)
        nursery.cancel_scope.cancel()


def start(spec: bytes = SCRATCH) -> tuple[str, StartJob]:
    return "job/start", StartJob(spec)


def stop(log: Log, job: bytes, *voters: int) -> tuple[Signed, ...]:
    return tuple(log.world.tx(PEOPLE[voter], "job/stop", StopJob(job)) for voter in voters)


def transaction_of(signed: Signed) -> Transaction:
    return codec.decode_message(signed.body, (Transaction,))


async def test_it_is_said_to_be_decided_when_the_very_one_that_was_signed_is() -> None:
    async with logged() as (log, author):
        asked = Asked(log, author, *start())
        signed = await log.said()
        await asked.settled()
        assert asked.transaction == transaction_of(signed)
        assert job_id(ME.public, asked.transaction) in log.state.jobs.jobs


async def test_another_transaction_with_its_nonce_is_not_taken_for_it() -> None:
    async with logged() as (log, author):
        asked = Asked(log, author, *start())
        first = await log.said()
        log.decide([log.world.tx(ME, "member/register", RegisterRoles(()))])  # from another device, or from before a restart
        second = await log.said()
        assert [transaction_of(signed).nonce for signed in (first, second)] == [1, 2]
        await asked.settled()
        assert asked.transaction == transaction_of(second) and log.starts() == 1


async def test_it_is_found_among_many_blocks_that_were_applied_at_once() -> None:
    async with logged() as (log, author):
        asked = Asked(log, author, *start())
        signed = await log.said()
        later, theirs = (log.world.tx(who, "member/register", RegisterRoles(()), ahead) for who, ahead in ((ME, 2), (OTHER, 1)))
        log.decide([], [signed], [theirs], [later], [])
        await asked.settled()
        assert asked.transaction == transaction_of(signed) and log.starts() == 1 and log.is_silent()


async def behind_a_gap(log: Log, author: TransactionSubmitter, count: int) -> list[Asked]:
    """Return submissions behind an abandoned one that a block has made impossible."""
    job = log.world.start(ME)
    given_up = Asked(log, author, "job/stop", StopJob(job))
    await log.said()
    asked = []
    for number in range(count):
        asked.append(Asked(log, author, *start(b"scratch:%d" % (number + 3))))
        assert transaction_of(await log.said()).nonce == number + 3
    given_up.scope.cancel()
    await given_up.ended.wait()
    log.decide(stop(log, job, 1, 2, 3))
    assert log.state.jobs.jobs[job].phase is JobPhase.FINISHED and len(log.world.ledger.mempool) == count
    return asked


async def test_what_follows_one_that_was_refused_acts_once() -> None:
    async with logged() as (log, author):
        (asked,) = await behind_a_gap(log, author, 1)
        before, members = log.starts(), log.state.members.members
        await asked.settled()
        assert asked.transaction is not None and log.starts() == before + 1
        assert job_id(ME.public, asked.transaction) in log.state.jobs.jobs
        assert log.state.members.members[ME.public].roles == members[ME.public].roles == (TRAINER,)


async def test_several_that_wait_behind_a_gap_have_it_closed_once_and_act_in_their_order() -> None:
    async with logged() as (log, author):
        asked = await behind_a_gap(log, author, 3)
        await log.said()
        for submission in asked:
            await submission.settled()
        assert [submission.transaction and submission.transaction.nonce for submission in asked] == [3, 4, 5]
        assert log.is_silent()


async def test_what_was_refused_after_it_was_on_the_log_never_acts() -> None:
    async with logged() as (log, author):
        asked = Asked(log, author, *start(LANGUAGE))
        signed = await log.said()
        log.decide([log.world.tx(OTHER, "member/register", RegisterRoles(()))])
        await asked.settled()
        assert "needs 3 voters with a worker" in asked.error
        log.decide([log.world.tx(OTHER, "member/register", RegisterRoles((TRAINER,)))])
        assert "nonce" in (log.world.problem(signed) or ""), "else it acts although its author was told that it does not"
        assert log.starts() == 0


async def test_what_expired_is_signed_anew_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.runtime.transaction_submitter.LIFETIME_HEIGHTS", 3)
    async with logged() as (log, author):
        asked = Asked(log, author, *start())
        first = await log.said()
        log.decide([], [])
        await trio.testing.wait_all_tasks_blocked()
        assert log.is_silent() and log.world.problem(first) is None
        log.decide([])
        second = await log.said()
        assert "expires" in (log.world.problem(first) or "")
        assert (transaction_of(first).nonce, transaction_of(second).nonce) == (1, 1)
        await asked.settled()
        assert asked.transaction == transaction_of(second) and log.starts() == 1


async def test_what_a_snapshot_took_out_of_the_pool_is_put_there_again_and_not_signed_anew() -> None:
    async with logged() as (log, author):
        asked = Asked(log, author, *start())
        signed = await log.said()
        log.decide([])
        log.restored()
        assert await log.said() == signed
        await asked.settled()
        assert asked.transaction == transaction_of(signed) and log.starts() == 1


async def test_several_that_a_snapshot_took_out_of_the_pool_act_once_each() -> None:
    async with logged() as (log, author):
        asked = [Asked(log, author, *start(b"scratch:%d" % n)) for n in (3, 4)]
        for _ in asked:
            await log.said()
        log.restored()
        for submission in asked:
            await submission.settled()
        assert log.starts() == 2 and all(submission.transaction for submission in asked)


async def test_where_a_snapshot_hides_what_was_decided_that_is_said_and_nothing_is_signed_anew() -> None:
    async with logged() as (log, author):
        asked = Asked(log, author, *start())
        log.decide([], [await log.said()], [])
        log.restored()
        await asked.settled()
        assert "snapshot" in asked.error and log.is_silent() and log.starts() == 1


async def test_whoever_was_expelled_is_told_so() -> None:
    async with logged() as (log, author):
        asked = Asked(log, author, *start())
        await log.said()
        log.world.decide(evidence=(log.world.double(ME),))
        log.decide([])
        await asked.settled()
        assert "is expelled" in asked.error and log.is_silent()


async def test_what_was_not_decided_in_time_may_still_be_and_the_next_one_comes_behind_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with logged() as (log, author):
        with pytest.raises(UserError, match="and may still be"):
            await author.submit(*start())
        asked = Asked(log, author, *start())
        await trio.testing.wait_all_tasks_blocked()
        assert [transaction_of(signed).nonce for signed in log.selected()] == [1, 2]
        log.decide(log.selected())
        await asked.ended.wait()
        assert log.starts() == 2 and asked.transaction is not None and asked.transaction.nonce == 2


async def test_of_many_commands_no_more_wait_for_a_block_at_once_than_other_pools_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant: an honest author never has more waiting transactions than other peers accept."""
    monkeypatch.setattr(author_module, "PENDING_MAX", 2)
    async with logged() as (log, author):
        asked = [Asked(log, author, *start()) for _ in range(5)]
        await trio.testing.wait_all_tasks_blocked()
        assert len(log.world.ledger.mempool) == 2
        for submission in asked:
            await submission.settled()
        assert log.starts() == 5 and not any(submission.error for submission in asked)


async def test_what_is_refused_is_said_at_once_and_never_put_on_the_log() -> None:
    async with logged() as (log, author):
        with pytest.raises(UserError, match="is not running, paused or queued"):
            await author.submit("job/stop", StopJob(bytes(32)))
        assert log.is_silent()


# With real drivers ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def founders(tmp_path: Path) -> AsyncIterator[Network]:
    """Four founders, of which only the first runs. Nothing is decided before the others start."""
    async with network(tmp_path, founders=4, start=False) as made:
        await made.start(made.seats[0])
        with patience():
            yield made


async def others_come(founders: Network) -> None:
    for seat in founders.seats[1:]:
        await founders.start(seat)


async def test_two_devices_with_one_key_get_both_of_their_commands_decided(founders: Network) -> None:
    seat, done = founders.seats[0], dict[str, Transaction]()

    async def submit(author: TransactionSubmitter, name: str) -> None:
        done[name] = await author.submit("job/start", StartJob(replace(REAL_SCRATCH, name=name).encode()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(submit, seat.author, "one")
        nursery.start_soon(submit, TransactionSubmitter(seat.driver), "two")
        await poll(lambda: len(seat.driver.node.ledger.mempool) == 2)
        assert {transaction_of(signed).nonce for signed in seat.driver.node.ledger.mempool} == {1}
        await others_come(founders)
    assert {transaction.nonce for transaction in done.values()} == {1, 2}
    jobs = seat.driver.state.jobs.jobs
    names = {name: jobs[job_id(seat.public, transaction)].name for name, transaction in done.items()}
    assert names == {"one": "one", "two": "two"}


async def test_what_one_author_says_at_once_is_decided_in_that_order_without_waiting_for_each_other(founders: Network) -> None:
    seat, done = founders.seats[0], dict[str, Transaction]()

    async def register(name: str, *roles: str) -> None:
        done[name] = await seat.author.submit("member/register", RegisterRoles(roles))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(register, "first", TRAINER)
        await poll(lambda: len(seat.driver.node.ledger.mempool) == 1)
        nursery.start_soon(register, "second")
        await poll(lambda: len(seat.driver.node.ledger.mempool) == 2)
        await others_come(founders)
    assert (done["first"].nonce, done["second"].nonce) == (1, 2)
    assert seat.driver.state.members.members[seat.public].roles == ()


async def test_a_command_behind_one_that_left_the_pool_for_good_acts_once(founders: Network) -> None:
    seat = founders.seats[0]
    pool, given_up = seat.driver.node.ledger.mempool, trio.CancelScope()

    async def give_up() -> None:
        with given_up:
            await seat.author.submit("member/register", RegisterRoles((TRAINER,)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up)
        await poll(lambda: len(pool) == 1)
        nursery.start_soon(seat.start_job)
        await poll(lambda: len(pool) == 2)
        given_up.cancel()
        pool._forget(next(iter(pool._waiting.values())))  # as if a block made it impossible
        await others_come(founders)
        await founders.seats[1].author.submit("member/register", RegisterRoles((TRAINER,)))
    await poll(lambda: seat.author.nonce == 2)
    assert len(seat.driver.state.jobs.jobs) == 1


async def test_a_peer_says_its_name_once_a_start_even_where_somebody_with_its_key_says_another() -> None:
    async with logged() as (log, author):
        peer: Any = log
        peer.signer, peer.observer = ME, NodeObserver(EventLog(), lambda: 0.0)
        other = log.world.tx(ME, "member/rename", RenameMember("bne"), ahead=2)
        membership = Membership(peer, author, "ben", (TRAINER,), False, 0, None)
        log.nursery.start_soon(membership.run)
        said = await log.said()
        assert codec.decode(RenameMember, codec.decode_message(said.body, (Transaction,)).content) == RenameMember("ben")
        log.decide([said], [other])
        await poll(lambda: membership._has_said_name)
        log.decide([])
        await trio.testing.wait_all_tasks_blocked()
        assert log.state.members.members[ME.public].name == "bne" and log.is_silent()


async def test_an_admission_that_others_tell_of_while_it_is_asked_for_again_is_only_not_decided_yet() -> None:
    """After a restart the peer has forgotten its request, and a member relays the admission at the same moment."""
    async with logged() as (log, _):
        newcomer: Any = FastSigner("newcomer")
        told = log.world.admission(newcomer)
        invited = InvitationString(
            log.world.genesis, ("127.0.0.1:1",), sign_message(ME, log.chain_id, Invitation(bytes(32), 100)), bytes(32), None
        )

        class Told(TransactionSubmitter):
            @property
            def has_pending(self) -> bool:
                waited = super().has_pending
                log.world.ledger.mempool.add_transaction(told)
                return waited

        peer: Any = log
        peer.signer, peer.observer = newcomer, NodeObserver(EventLog(), lambda: 0.0)
        peer.network = SimpleNamespace(connected_peers=lambda: {ME.public})
        author = Told(peer)
        assert not TransactionSubmitter(peer).has_pending
        log.nursery.start_soon(Membership(peer, author, "newcomer", (), False, 0, invited).run)
        await trio.testing.wait_all_tasks_blocked()
        assert author.has_pending and peer.observer.membership_problem == NOT_DECIDED
        assert await peer.observer.events.wait_for_events(0, 0.0) == ()


async def test_a_peer_whose_key_another_machine_has_signs_no_transaction() -> None:
    async with logged() as (log, author):
        log.replica.duplicate_identity_reason = "is at 10.0.0.9:7700"
        asked = Asked(log, author, *start(SCRATCH))
        await asked.settled()
        assert "another machine has this peer's key" in asked.error and log.is_silent() and log.starts() == 0
