"""Trials of `python -m scenarios.annotate --abuse`: people who cheat over HTTP, and a serving peer that sends false batches.

Four peers run in this process on real sockets. Two of them serve annotators, and the scenario also writes transactions in the
name of one of these. Each trial states the expected reply. Afterwards the decided state of curation must be unchanged, except for
the count of statements that were passed over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import trio

from curation.ledger import curation_module
from curation.ledger.curation_state import AssignmentState, CurationState
from curation.ledger.transaction_types import (
    AnswerCommitment,
    AnswerOpening,
    EnrolmentEntry,
    LeaseRequest,
    SkipAssignment,
    StatementBatch,
)
from curation.limits import LEASE_MS
from curation.rpc import CurationRpc, ImportRequest
from ledger.core.genesis import Founder, Genesis
from peer.api.running_peer import RunningPeer
from peer.daemon.daemon import running_daemon
from peer.features import founding_modules
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import load_settings
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.errors import UserError
from protocol.identity import Identity
from scenarios.trials import report
from tests.web.client import Person, Reply, Site, committed, receipt_holds
from tests.web.room import assigned, enrolled, said, served_at, settled

SECONDS_MAX = 300.0
QUIET_SECONDS = 0.8  # no change of the decided state for this long: all statements on the way have arrived
PEERS = 4
HONEST, LIAR, VOTER = 0, 1, 2
SALT = b"a" * 16
PASSED = "passed over"


@dataclass
class Stage:
    """The network and its annotators."""

    folder: Path
    daemons: list[RunningPeer]
    sites: list[Site]  # the honest serving peer and the lying one
    project: str = ""  # a project with one vote per task
    rows: list[list[str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def site(self) -> Site:
        return self.sites[HONEST]

    def state(self, peer: int = LIAR) -> CurationState:
        found: CurationState = self.daemons[peer].driver.state.module_state(CurationState)
        return found

    def print(self, peer: int = LIAR) -> bytes:
        """Return a digest of the decided state of curation, without the count of statements that were passed over."""
        return hashlib.sha256(codec.encode(replace(self.state(peer), passed_over=0, expired_height=0))).digest()

    @property
    def api(self) -> CurationRpc:
        found: CurationRpc = self.daemons[HONEST].api  # type: ignore[assignment]
        return found

    async def found(self, name: str, votes: int) -> str:
        """Create a project and return its id."""
        file = self.folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(12)))
        request = ImportRequest(str(file), name, "", "label", ("glad", "sad"), False, votes, 1, "", False)
        return (await self.api.import_tasks(request)).project

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.failures.append(problem)

    async def quiet(self) -> None:
        while True:
            before = [self.print(peer) for peer in range(PEERS)]
            await trio.sleep(QUIET_SECONDS)
            if before == [self.print(peer) for peer in range(PEERS)] and len(set(before)) == 1:
                return

    async def together(self) -> None:
        """Wait until all peers have applied the highest block of any of them."""
        height = max(daemon.driver.state.height for daemon in self.daemons)
        for daemon in self.daemons:
            while daemon.driver.state.height < height:
                await daemon.driver.block_applied.wait()

    # Trials ----------------------------------------------------------------------------------------------------------

    async def trial(self, what: str, expected: str, do: Callable[[], Awaitable[str]]) -> None:
        before = self.print()
        came = await do()
        await self.quiet()
        is_same = self.print() == before
        held = came == expected and is_same
        print(f"{what}: {came}", file=sys.stderr, flush=True)
        self.rows.append([what, expected, came, "no" if is_same else "YES", "yes" if held else "no"])
        if not held:
            self.failures.append(f"{what}: {came}, expected {expected}" + ("" if is_same else "; what is decided has changed"))

    async def asked(self, call: Callable[..., Reply], *arguments: Any) -> str:
        return shown(await said(call, *arguments))

    async def carried(self, peer: int = LIAR, **statements: Any) -> str:
        """Send a batch of the lying peer with these statements, without its own checks, and return how the network handled it."""
        batch = StatementBatch(**{name: tuple(items) for name, items in statements.items()})
        before = self.state(peer).passed_over
        try:
            await TransactionSubmitter(self.daemons[peer].driver).submit("curation/statements", batch)
        except UserError:
            return "refused"
        passed = self.state(peer).passed_over - before
        return PASSED if passed == batch.size else f"{batch.size - passed} of {batch.size} acted"


def shown(reply: Reply) -> str:
    return f"{reply.status} {reply.code}" if reply.status >= 400 else str(reply.status)


def bits(statement: dict[str, Any]) -> tuple[bytes, bytes, bytes, tuple[int, ...]]:
    """Return assignment, signature, salt and answer from the body of a submission."""
    return (*(bytes.fromhex(statement[name]) for name in ("assignment", "signature", "salt")), tuple(statement["answer"]))  # type: ignore[return-value]


def commit_of(person: Person, statement: dict[str, Any], signature: bytes | None = None) -> AnswerCommitment:
    assignment, signed, salt, answer = bits(statement)
    return AnswerCommitment(assignment, person.key, committed(assignment, salt, answer), signature or signed)


async def play(stage: Stage) -> None:
    """Run all trials in this order."""
    site, ann, bob = stage.site, *await enrolled(stage.site, "ann", "bob")
    (eve,) = await enrolled(stage.sites[LIAR], "eve")
    await _late(stage, eve)
    tasks = [task["assignment"] for task in await assigned(site, ann, 3)]
    chain, trial, asked, carried = site.network["chain_id"], stage.trial, stage.asked, stage.carried

    first = await said(ann.submit, site, tasks[0], (1,), SALT)
    assert first.status == 201, first
    statement = await said(ann.statement, site, tasks[0], (1,), SALT)
    await settled(site, tasks[0])
    await stage.quiet()
    await trial("replayed: the same submission", "200", partial(asked, ann.submit, site, tasks[0], (1,), SALT))
    await trial("replayed: a decided commitment, by a peer", PASSED, partial(carried, commits=[commit_of(ann, statement)]))
    await trial(
        "replayed: a decided opening, by a peer", PASSED,
        partial(carried, openings=[AnswerOpening(bytes.fromhex(tasks[0]), SALT, (1,))]),
    )  # fmt: skip
    wish = ann.sign(chain, "enrol", "ann", site.peer_key, False)
    await trial(
        "replayed: an enrolment, by a peer", "refused", partial(carried, enrolments=[EnrolmentEntry(ann.key, "ann", False, wish)])
    )
    challenge = (await said(ann.challenge, site)).body
    assert (await said(ann.begin, site, **challenge)).status == 201
    await trial("replayed: a session's nonce", "401 unauthorized", partial(asked, lambda: ann.begin(site, **challenge)))

    await trial(
        "re-signed: the answer with another salt", "409 already-answered", partial(asked, ann.submit, site, tasks[0], (1,))
    )
    await trial("re-signed: by another annotator", "403 forbidden", partial(asked, bob.submit, site, tasks[1], (1,), SALT))
    theirs = await said(bob.statement, site, tasks[1], (1,), SALT)
    await trial("re-signed: by another annotator, by a peer", PASSED, partial(carried, commits=[commit_of(bob, theirs)]))
    await trial("re-signed: by the peer itself", "refused", partial(carried, commits=[commit_of(ann, statement, bytes(64))]))

    await trial("double: another answer", "409 already-answered", partial(asked, ann.submit, site, tasks[0], (0,), SALT))
    other = await said(ann.statement, site, tasks[0], (0,), SALT)
    await trial("double: another answer, by a peer", PASSED, partial(carried, commits=[commit_of(ann, other)]))

    foreign = bytes(32).hex()
    elsewhere = ann.sign(foreign, "annotation", *_said(tasks[1], (1,)))
    body = {**await said(ann.statement, site, tasks[1], (1,), SALT), "signature": elsewhere.hex()}
    token = await said(ann.token, site)
    await trial("foreign chain: a submission", "422 bad-signature", partial(asked, site.ask, "POST", "/api/submit", body, token))
    await trial("foreign chain: a commitment, by a peer", "refused", partial(carried, commits=[commit_of(ann, body)]))
    abroad = Person("abroad")
    signed = abroad.sign(foreign, "enrol", "abroad", site.peer_key, False)
    entry = {"key": abroad.key.hex(), "name": "abroad", "signature": signed.hex()}
    await trial("foreign chain: an enrolment", "422 bad-signature", partial(asked, site.ask, "POST", "/api/v1/annotators", entry))

    await trial(
        "foreign peer: its session's token", "401 unauthorized",
        partial(asked, stage.sites[LIAR].get, "/api/tasks?limit=1", token),
    )  # fmt: skip
    nonce, until = bytes.fromhex(challenge["nonce"]), challenge["expires_ms"]
    session = ann.sign(chain, "session", site.peer_key, nonce, until)
    lease = LeaseRequest(ann.key, nonce, until, session, 8)
    await trial("foreign peer: leases by its session, by a peer", "refused", partial(carried, leases=[lease]))
    await trial("foreign peer: an enrolment there, by a peer", "refused", partial(carried, enrolments=[
        EnrolmentEntry(abroad.key, "abroad", False, abroad.sign(chain, "enrol", "abroad", site.peer_key, False))
    ]))  # fmt: skip
    await trial("foreign peer: a skip of its lease, by a peer", PASSED, partial(carried, skips=[
        SkipAssignment(bytes.fromhex(tasks[1]), "no")
    ]))  # fmt: skip
    await trial("foreign peer: one that serves nobody", "refused", partial(carried, VOTER, leases=[lease]))

    await trial("oversize: a body", "413 too-large", partial(asked, site.ask, "POST", "/api/submit", b" " * (65 << 10), token))
    await trial("oversize: a batch of 514", "refused", partial(carried, leases=[lease] * 257, skips=[
        SkipAssignment(bytes.fromhex(tasks[1]), "no")
    ] * 257))  # fmt: skip

    await _openings(stage, ann, bob)

    receipt, commitment = first.body["receipt"], committed(bytes.fromhex(tasks[0]), SALT, (1,))
    assert receipt_holds(receipt, site, tasks[0], commitment, first.body["height"]), "the honest one holds"

    async def forged() -> str:
        no_vote = committed(bytes.fromhex(tasks[0]), SALT, (0,))
        by_liar = (await said(eve.sign, chain, "receipt", bytes.fromhex(tasks[0]), commitment, first.body["height"])).hex()
        tries = (
            receipt_holds(receipt, site, tasks[0], no_vote, first.body["height"]),
            receipt_holds(receipt, site, tasks[0], commitment, first.body["height"] + 1),
            receipt_holds(receipt, stage.sites[LIAR], tasks[0], commitment, first.body["height"]),
            receipt_holds(receipt[:-128] + by_liar, site, tasks[0], commitment, first.body["height"]),
        )
        return "shows nothing" if not any(tries) else f"{sum(tries)} of {len(tries)} convince"

    await trial("forged receipt: other answer, height, peer, key", "shows nothing", forged)


def _said(assignment: str, answer: tuple[int, ...]) -> tuple[bytes, bytes]:
    key = bytes.fromhex(assignment)
    return key, committed(key, SALT, answer)


async def _openings(stage: Stage, ann: Person, bob: Person) -> None:
    """Try false openings for a task with several votes: early ones, ones without a commitment, and one of a copied commitment."""
    site, trial, carried, chain = stage.site, stage.trial, stage.carried, stage.site.network["chain_id"]
    await stage.api.set_project_phase(stage.project, "paused")
    several = await stage.found("several", votes=7)
    (task,) = [task for task in await assigned(site, ann, 3) if task["project"] == several]
    assert (await said(ann.submit, site, task["assignment"], (1,), SALT)).status == 201
    await stage.quiet()
    key = bytes.fromhex(task["assignment"])
    await trial("early opening, by a peer", PASSED, partial(carried, openings=[AnswerOpening(key, SALT, (1,))]))
    (mine,) = [found for found in await assigned(site, bob) if found["task"] == task["task"]]
    copy, copied = bytes.fromhex(mine["assignment"]), committed(key, SALT, (1,))
    # A person can copy a commitment, but can only open the copied answer. The honest vote is opened meanwhile.
    acted = await carried(commits=[AnswerCommitment(copy, bob.key, copied, bob.sign(chain, "annotation", copy, copied))])
    assert acted == "1 of 1 acted", acted
    await stage.quiet()
    await trial("false opening: another answer, by a peer", PASSED, partial(carried, openings=[AnswerOpening(copy, SALT, (0,))]))
    await trial(
        "false opening: another salt, by a peer", PASSED, partial(carried, openings=[AnswerOpening(copy, bytes(16), (1,))])
    )
    await trial("copied commitment: opened as the original", PASSED, partial(carried, openings=[AnswerOpening(copy, SALT, (1,))]))
    await trial(
        "copied commitment: the original's answer", "409 already-answered",
        partial(stage.asked, bob.submit, site, mine["assignment"], (1,), SALT),
    )  # fmt: skip
    states = [row.state for row in (stage.state().assignments.get_record(key), stage.state().assignments.get_record(copy)) if row]
    stage.require(
        states == [AssignmentState.OPENED, AssignmentState.COMMITTED], f"the original is opened and the copy is not: {states}"
    )


async def _late(stage: Stage, eve: Person) -> None:
    """Try an answer after its lease has expired and another person has its place.

    This lease is the first one of the network, and a short one.
    """
    site, lasts = stage.site, LEASE_MS
    (dan,) = await enrolled(site, "dan")
    setattr(curation_module, "LEASE_MS", 1_000)  # noqa: B010 - for all peers, which run in this process
    (task,) = await assigned(site, dan)
    await stage.together()
    setattr(curation_module, "LEASE_MS", lasts)  # noqa: B010
    key = bytes.fromhex(task["assignment"])
    while (row := stage.state().assignments.get_record(key)) is None or row.state is not AssignmentState.EXPIRED:
        await stage.daemons[LIAR].driver.block_applied.wait()
    (given,) = await assigned(stage.sites[LIAR], eve)
    assert given["task"] == task["task"], "begun tasks are given first"
    await stage.quiet()
    statement = await said(dan.statement, site, task["assignment"], (1,), SALT)
    await stage.trial(
        "late: the lease is over", "410 gone", partial(stage.asked, dan.submit, site, task["assignment"], (1,), SALT)
    )
    await stage.trial("late: the lease is over, by a peer", PASSED, partial(stage.carried, commits=[commit_of(dan, statement)]))


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    keys = [Identity(hashlib.sha256(b"abuse" + bytes([number])).digest()) for number in range(PEERS)]
    founders = {key.public: Founder(f"peer-{number}", ()) for number, key in enumerate(keys)}
    modules = founding_modules()
    genesis = Genesis("abuse", int(time.time() * 1000), secrets.token_bytes(16), dict(sorted(founders.items())), modules)
    async with AsyncExitStack() as stack:
        daemons: list[RunningPeer] = []
        for number, key in enumerate(keys):
            directory = DataDirectory.create(folder / str(number))
            directory.write_identity(key)
            directory.write_genesis(codec.encode(genesis))
            others = ((await daemons[0].api.status()).address,) if daemons else ()
            flags = {
                "data_directory": folder / str(number), "role": "annotator" if number in (HONEST, LIAR) else "voter",
                "listen": "127.0.0.1:0", "bootstrap": others, "web_listen": "127.0.0.1:0", "sign_up": "open",
            }  # fmt: skip
            daemons.append(await stack.enter_async_context(running_daemon(load_settings(flags, {"HOME": str(folder)}).config)))
        stage = Stage(folder, daemons, [Site(*await served_at(daemons[number])) for number in (HONEST, LIAR)])
        while not all("annotator" in stage.daemons[0].driver.state.members.members[keys[n].public].roles for n in (HONEST, LIAR)):
            await daemons[0].driver.block_applied.wait()
        stage.project = await stage.found("one", votes=1)
        yield stage


async def run(options: argparse.Namespace) -> int:
    started = trio.current_time()
    with tempfile.TemporaryDirectory(prefix="folkmoot-abuse-") as folder, trio.fail_after(SECONDS_MAX):
        async with staged(Path(folder)) as stage:
            await play(stage)
            await stage.quiet()
    title = f"abuse of annotation, {PEERS} peers, {trio.current_time() - started:.0f} s in all"
    columns = ["what", "expected", "came", "changed", "held"]
    return report(options, title, columns, stage.rows, stage.failures, {"trials": stage.rows})
