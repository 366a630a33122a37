"""Costs of curation in a large network: batches, memory, the close of a project: `python -m benchmarks.curation --json FILE`.

The data directory has a network of one voter, which also serves: 10,000 annotators, a million settled answers in projects of
10,000 tasks, and a project of 100,000 open tasks. Another process has written these rows directly, without batches.

Then batches of 512 statements pass through the real ledger, a third each of lease requests, commitments and openings. The time of
a batch runs from its author's own check to the end of the commit. A batch is applied for that check, for the test whether there
is anything to propose, for the proposal, and for the vote; the result of the vote is committed. At the end the real daemon opens
the store, decides batches as well, and closes one of the projects.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table as Screen

from benchmarks.provenance import write
from benchmarks.verdicts import conclude, verdict
from consensus.effects import DecidedBlock
from curation.estimation.annotator_agreement import add_coincidences, agreement_units
from curation.ledger.curation_module import ANNOTATOR_ROLE, CurationModule
from curation.ledger.curation_state import (
    AgreementCounts,
    Annotator,
    AnnotatorSkill,
    Assignment,
    AssignmentState,
    CurationState,
    PeerAnnotators,
    Project,
    ProjectPhase,
    ProjectSpec,
    TaskRow,
    TaskStage,
)
from curation.ledger.transaction_types import (
    AnnotationStatement,
    AnswerCommitment,
    AnswerOpening,
    LeaseRequest,
    SessionStatement,
    SetProjectPhase,
    StatementBatch,
)
from curation.limits import BATCH_MAX, OPENING_MS
from curation.tasks.answers import Answer, QuestionKind, answer_commitment
from curation.tasks.task_pages import assignment_id, task_id
from ledger.blocks.application import LedgerApplication
from ledger.blocks.mempool import LINGER_SECONDS
from ledger.core.genesis import Founder, Genesis
from ledger.ledger_state import EMPTY_BODY, CurrentState, LedgerRules, LedgerState
from peer.daemon.daemon import running_daemon, tune_garbage_collector
from peer.features import founding_modules, rules_of
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import load_settings
from peer.settings.data_directory import DataDirectory
from peer.settings.process_resources import process_memory_mb
from protocol import codec
from protocol.identity import Identity, Signed, sign_message, signing_preimage
from protocol.messages import Transaction
from scenarios.trials import COUNT, Parser
from storage.ledger_store import LedgerStore
from tests.ledger.blocks import decided_after
from training.model_store import JobModelStore

VOTES, PROJECT_TASKS, ANNOTATORS_OF_PROJECT = 5, 10_000, 1_000
FILLED_AT_ONCE = 5_000  # tasks
ASKED = ProjectSpec("moods", QuestionKind.LABEL, ("glad", "sad"), False, 0, None, VOTES, 10, False)
OPEN = replace(ASKED, votes=2)
WARM_UP = ((250, 250, 12),) * 4  # leases, commitments and openings of unmeasured batches; some remain for the later ones
MIXED = (172, 170, 170)
RIGHT = 0.8  # share of right answers
BATCH_MS, STATEMENT_MS, DAEMON_MB, CLOSE_SECONDS = 200.0, 0.4, 400.0, 5.0
PARTS = ("author", "waits", "propose", "judge", "apply", "root", "commit", "after")


@dataclass
class Batches:
    batch_ms: list[float]  # ascending
    cpu_ms: float  # of one core per batch, median
    parts_ms: dict[str, float]  # median
    statements: int
    acted: int  # part of the statements


@dataclass
class Figures:
    annotators: int
    answers: int
    open_tasks: int
    file_mb: float
    fill_seconds: float
    open_seconds: float  # of the store and the state, until the first batch can be applied
    batches: Batches
    daemon: Closing


@dataclass
class Closing:
    """Measurements of the daemon."""

    started_mb: float
    batches_mb: float  # peak after the same number of batches
    closed_mb: float
    closed_seconds: float  # wall-clock time after the minute in which votes can still be opened
    batches: int
    close_seconds: float  # of one core in the slices of the close, each application of a batch included
    slice_ms: float  # the longest of these
    loop_batches_ms: float  # the longest slice of the event loop during batches
    loop_close_ms: float  # the same during the close
    paid: int


def named(what: str, number: int) -> bytes:
    return hashlib.sha256(f"{what} {number}".encode()).digest()


def people(count: int) -> list[bytes]:
    return [Identity(named("annotator", number)).public for number in range(count)]


# Filling -----------------------------------------------------------------------------------------------------------------


class Filler:
    """A writer of the rows of a long-lived network."""

    def __init__(self, folder: Path, annotators: int, answers: int, open_tasks: int, seed: int = 0) -> None:
        self.directory = DataDirectory.create(folder)
        self.me, self.draw = Identity(named("peer", 0)), random.Random(seed)
        self.directory.write_identity(self.me)
        founders = {self.me.public: Founder("peer", (ANNOTATOR_ROLE,))}
        genesis = Genesis("large", int(time.time() * 1_000), bytes(16), founders, founding_modules())
        self.directory.write_genesis(codec.encode(genesis))
        self.rules = rules_of(genesis, JobModelStore(self.directory.models))
        self.store = LedgerStore(self.directory.ledger, genesis.chain_id)
        first = self.rules.genesis_state()
        decided = decided_after(first, None, genesis.chain_id, EMPTY_BODY, [self.me])
        self.store.append_records([decided])
        self.state = replace(self.rules.apply_block(first, decided.decode()).finish_state({}))
        self.people = people(annotators)
        self.answers, self.open_tasks = answers, open_tasks
        self.said, self.accepted = dict.fromkeys(self.people, 0), dict.fromkeys(self.people, 0)

    def fill(self) -> None:
        tasks = self.answers // VOTES
        for number, first in enumerate(range(0, tasks, PROJECT_TASKS)):
            self._settled(number, min(PROJECT_TASKS, tasks - first))
        curation = self.state.module_state(CurationState)
        key = named("project", tasks)
        rows = {
            who: Annotator(f"ann {number}", self.me.public, False, 1, annotations=self.said[who], accepted=self.accepted[who])
            for number, who in enumerate(self.people)
        }
        self._save(
            open=(*curation.open, key),
            annotators_count=len(rows),
            projects=curation.projects.with_rows({key: Project(self.me.public, OPEN, ProjectPhase.OPEN, 391, self.open_tasks)}),
            annotators=curation.annotators.with_rows(rows),
            shares=curation.shares.with_rows({self.me.public: PeerAnnotators(len(rows))}),
        )
        self.store.close()

    def _settled(self, number: int, tasks: int) -> None:
        key, curation = named("project", number), self.state.module_state(CurationState)
        first = number * ANNOTATORS_OF_PROJECT // 2
        crowd = [self.people[(first + place) % len(self.people)] for place in range(min(len(self.people), ANNOTATORS_OF_PROJECT))]
        counts = {who: [0] * len(ASKED.options) ** 2 for who in crowd}
        agreed: tuple[int, ...] = ()
        for start in range(0, tasks, FILLED_AT_ONCE):
            task_rows, assignments = dict[bytes, TaskRow | None](), dict[bytes, Assignment | None]()
            for of in range(start, min(tasks, start + FILLED_AT_ONCE)):
                task, who = task_id(key, of), self.draw.sample(crowd, VOTES)
                truth = self.draw.randrange(2)
                answers: list[Answer] = [(truth if self.draw.random() < RIGHT else 1 - truth,) for _ in who]
                label = (int(sum(answer == (1,) for answer in answers) * 2 > VOTES),)
                task_rows[task] = TaskRow(key, of, TaskStage.SETTLED, VOTES, VOTES, VOTES, VOTES, 0, None, tuple(who), label, 1)
                for person, answer in zip(who, answers, strict=True):
                    assignments[assignment_id(task, person)] = Assignment(
                        key, of, person, self.me.public, 1, AssignmentState.SETTLED, self.draw.randbytes(32), answer, 1, True
                    )
                    self.said[person] += 1
                    self.accepted[person] += answer == label
                    counts[person][label[0] * 2 + answer[0]] += 1
                agreed = add_coincidences(agreed, 2, agreement_units(ASKED.kind, 2, False, answers))
            curation = self._save(
                tasks=curation.tasks.with_rows(task_rows), assignments=curation.assignments.with_rows(assignments)
            )
        skills = {key + who: AnnotatorSkill(tuple(count)) for who, count in counts.items()}
        project = Project(self.me.public, ASKED, ProjectPhase.OPEN, 40, tasks, tasks, 0, tasks)
        self._save(
            open=(*curation.open, key),
            annotations=curation.annotations + VOTES * tasks,
            settled=curation.settled + tasks,
            projects=curation.projects.with_rows({key: project}),
            skills=curation.skills.with_rows(skills),
            agreements=curation.agreements.with_rows({key: AgreementCounts(agreed)}),
        )

    def _save(self, **changes: Any) -> CurationState:
        curation = replace(self.state.module_state(CurationState), **changes)
        self.state = self.state.with_modules(curation=curation)
        encoded = self.rules.encode_state(self.state)
        self.store.save_state(self.state.height, self.state.state_root, encoded, tables=self.state.tables)
        return curation


# Batches -----------------------------------------------------------------------------------------------------------------


class Crowd:
    """Annotators that request a task, commit in a later batch, and open in a batch after that."""

    def __init__(self, chain: bytes, peer: bytes, annotators: int) -> None:
        self.chain, self.peer, self.annotators = chain, peer, annotators
        self._next = 0
        self._wished: list[int] = []
        self._to_commit: list[tuple[int, bytes]] = []
        self._committed: list[bytes] = []

    def batch(self, state: CurationState, now_ms: int, most: tuple[int, int, int]) -> StatementBatch:
        leases_most, commits_most, openings_most = most
        for number in self._wished:
            row = state.annotators.get_record(self._key(number))
            assert row is not None
            self._to_commit += [(number, lease) for lease in row.leases]
        commits, self._to_commit = self._to_commit[:commits_most], self._to_commit[commits_most:]
        openings = list[AnswerOpening]()
        for assignment in self._committed:
            row = state.assignments.get_record(assignment)
            assert row is not None
            task = state.tasks.get_record(task_id(row.project, row.number))
            if task is not None and task.stage is TaskStage.OPENING and len(openings) < openings_most:
                openings.append(AnswerOpening(assignment, bytes(16), (0,)))
        opened = {opening.assignment for opening in openings}
        self._committed = [key for key in self._committed if key not in opened] + [key for _, key in commits]
        self._wished = [(self._next + place) % self.annotators for place in range(leases_most)]
        self._next += leases_most
        wishes = tuple(self._wish(number, now_ms) for number in self._wished)
        return StatementBatch((), wishes, tuple(self._commit(*commit) for commit in commits), tuple(openings))

    def _key(self, number: int) -> bytes:
        return Identity(named("annotator", number)).public

    def _signed(self, number: int, statement: Any) -> bytes:
        return Identity(named("annotator", number)).sign(signing_preimage(statement.TAG, self.chain, codec.encode(statement)))

    def _wish(self, number: int, now_ms: int) -> LeaseRequest:
        until = now_ms + 86_400_000
        return LeaseRequest(
            self._key(number), bytes(16), until, self._signed(number, SessionStatement(self.peer, bytes(16), until)), 1
        )

    def _commit(self, number: int, assignment: bytes) -> AnswerCommitment:
        digest = answer_commitment(assignment, bytes(16), (0,))
        return AnswerCommitment(
            assignment, self._key(number), digest, self._signed(number, AnnotationStatement(assignment, digest))
        )


class Chain:
    """The ledger of a data directory, without a daemon."""

    def __init__(self, folder: Path) -> None:
        directory = DataDirectory.open(folder)
        self.me = directory.load_identity()
        genesis = Genesis.decode(directory.read_genesis())
        self.rules: LedgerRules = rules_of(genesis, JobModelStore(directory.models))
        self.store = LedgerStore(directory.ledger, genesis.chain_id)
        encoded = self.store.encoded_state()
        assert encoded is not None
        state = self.rules.decode_state(encoded)
        self.store.rows.attach_tables(state.tables)
        self.last: DecidedBlock | None = self.store.get_decision(state.height)
        assert self.last is not None
        self.ledger = LedgerApplication(self.rules, CurrentState(state), self.last.decode().state_root)

    @cached_property
    def chain_id(self) -> bytes:
        return self.rules.chain_id

    def signed(self, kind: str, content: Any) -> Signed:
        nonce = self.ledger.state.members.members[self.me.public].nonce + 1
        transaction = Transaction(nonce, self.ledger.state.height + 50, kind, codec.encode(content))
        return sign_message(self.me, self.chain_id, transaction)

    def decide(self, signed: Signed) -> dict[str, float]:
        """Decide a transaction and return the milliseconds of each part."""
        ledger, state = self.ledger, self.ledger.state
        height, times = state.height + 1, [time.perf_counter()]

        def lap() -> None:
            times.append(time.perf_counter())

        self.rules.apply_transaction(state, signed)
        lap()
        ledger.mempool.add_transaction(signed)
        for now in (0.0, LINGER_SECONDS):  # the time for which a batch waits for those of other peers
            ledger.mempool.release_lingering(now)
        assert ledger.has_due_transactions()
        lap()
        body = ledger.make_body(height, 0)
        assert body is not None
        lap()
        assert ledger.why_body_refused(height, body, self.me.public) is None
        lap()
        deciding = time.perf_counter()
        self.last = decided_after(state, self.last, self.chain_id, body, [self.me])
        self.store.append_records([self.last])
        times = [at + time.perf_counter() - deciding for at in times]  # the time of agreement is excluded
        after: LedgerState = self.rules.apply_block(state, self.last.decode()).finish_state({})
        lap()
        encoded = self.rules.encode_state(after)
        lap()
        self.store.save_state(after.height, after.state_root, encoded, tables=after.tables)
        lap()
        ledger.advance_state(after, state.state_root)
        ledger.mempool.prune_transactions(self.rules, after)
        lap()
        return {name: 1_000 * (end - start) for name, start, end in zip(PARTS, times, times[1:], strict=False)}


def timed(chain: Chain, annotators: int, count: int) -> Batches:
    """Measure `count` batches after the warm-up."""
    crowd = Crowd(chain.chain_id, chain.me.public, annotators)
    parts, cpu_ms, acted, statements = list[dict[str, float]](), list[float](), 0, 0
    for most in (*WARM_UP, *(MIXED,) * count):
        state = chain.ledger.state
        batch = crowd.batch(state.module_state(CurationState), state.time_ms, most)
        signed, began = chain.signed("curation/statements", batch), time.process_time()
        times = chain.decide(signed)
        if most is MIXED:
            parts.append(times)
            cpu_ms.append(1_000 * (time.process_time() - began))
            passed = chain.ledger.state.module_state(CurationState).passed_over - state.module_state(CurationState).passed_over
            statements, acted = statements + batch.size, acted + batch.size - passed
    return Batches(
        sorted(sum(times.values()) for times in parts),
        _median(cpu_ms),
        {name: _median([times[name] for times in parts]) for name in PARTS},
        statements,
        acted,
    )


def measure(folder: Path, options: Any, fill_seconds: float) -> Figures:
    began = time.perf_counter()
    chain = Chain(folder)
    tune_garbage_collector()  # as in the daemon
    opened = time.perf_counter() - began
    batches = timed(chain, options.annotators, options.batches)
    chain.store.close()
    size = DataDirectory(folder).ledger.stat().st_size / 1e6
    command = [sys.executable, "-m", "benchmarks.curation", "--daemon", str(folder), "--annotators", str(options.annotators)]
    said = subprocess.run([*command, "--batches", str(options.batches)], check=True, stdout=subprocess.PIPE, text=True).stdout
    daemon = Closing(**json.loads(said.splitlines()[-1]))
    return Figures(options.annotators, options.answers, options.open_tasks, size, fill_seconds, opened, batches, daemon)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


# The daemon --------------------------------------------------------------------------------------------------------------


class Slices(trio.abc.Instrument):
    """An instrument that records the longest time for which one task kept the event loop."""

    def __init__(self) -> None:
        self.longest_ms, self._began = 0.0, math.inf

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.longest_ms = max(self.longest_ms, 1_000 * (time.perf_counter() - self._began))

    def taken(self) -> float:
        """Return the longest time since the previous call."""
        longest, self.longest_ms = self.longest_ms, 0.0
        return longest


async def serve(folder: Path, annotators: int, batches: int) -> Closing:
    """Run a daemon with the store, and measure its memory and its event loop."""
    flags = {"data_directory": folder, "role": "annotator", "listen": "127.0.0.1:0", "web_listen": "127.0.0.1:0"}
    config, slices = load_settings(flags, {}).config, Slices()
    async with running_daemon(config) as daemon:
        tune_garbage_collector()
        driver = daemon.driver
        author, chain = TransactionSubmitter(driver), driver.chain_id
        await trio.sleep(2)
        started_mb, most = _memory(), 0.0
        crowd = Crowd(chain, driver.signer.public, annotators)
        crowd._next = annotators // 2  # annotators without leases
        trio.lowlevel.add_instrument(slices)
        for mixed in (*WARM_UP, *(MIXED,) * batches):
            state = driver.state
            batch = await trio.to_thread.run_sync(crowd.batch, state.module_state(CurationState), state.time_ms, mixed)
            await author.submit("curation/statements", batch)
            most = max(most, _memory())
        loop_batches, close_times = slices.taken(), list[float]()
        (closer,) = {driver.rules.module_of_class(CurationModule)._closer}
        go_on = closer.advance_close

        def timed(*arguments: Any) -> None:
            began = time.thread_time()
            go_on(*arguments)
            close_times.append(time.thread_time() - began)

        closer.advance_close = timed  # type: ignore[method-assign]
        project, *_ = driver.state.module_state(CurationState).open
        await author.submit("curation/set-phase", SetProjectPhase(project, ProjectPhase.CLOSED))
        await trio.sleep(OPENING_MS / 1_000)
        slices.taken()
        height, began, closed = driver.state.height, time.perf_counter(), 0.0
        while project in driver.state.module_state(CurationState).closing:  # the serving part continues the close
            await driver.block_applied.wait()
            closed = max(closed, _memory())
        row = driver.state.module_state(CurationState).projects.get_record(project)
        assert row is not None
        return Closing(
            started_mb,
            most,
            closed,
            time.perf_counter() - began,
            driver.state.height - height,
            sum(close_times),
            1_000 * max(close_times),
            loop_batches,
            slices.taken(),
            row.paid,
        )


def _memory() -> float:
    return process_memory_mb(os.getpid())


# Bounds ------------------------------------------------------------------------------------------------------------------


def verdicts(figures: Figures) -> Iterator[str]:
    batches, daemon = figures.batches, figures.daemon
    batch = _median(batches.batch_ms)
    yield verdict(batch <= BATCH_MS, f"a batch of {BATCH_MAX}: ≤ {BATCH_MS:g} ms in the median, all in all: {batch:.0f}")
    each = batch / BATCH_MAX
    yield verdict(each <= STATEMENT_MS, f"a statement: ≤ {STATEMENT_MS:g} ms: {each:.2f}")
    memory = max(daemon.started_mb, daemon.batches_mb, daemon.closed_mb)
    yield verdict(memory <= DAEMON_MB, f"the daemon: ≤ {DAEMON_MB:g} MB: {memory:.0f}")
    seconds = daemon.close_seconds
    yield verdict(
        seconds <= CLOSE_SECONDS, f"a close of {PROJECT_TASKS:,} tasks × {VOTES}: ≤ {CLOSE_SECONDS:g} s in all: {seconds:.1f}"
    )
    yield verdict(daemon.paid == ASKED.price * PROJECT_TASKS, f"that close paid {daemon.paid:,} points")
    full = batches.statements == BATCH_MAX * len(batches.batch_ms)
    yield verdict(full and batches.acted == batches.statements, f"{batches.acted:,} of {batches.statements:,} statements acted")


def show(figures: Figures) -> None:
    title = f"{figures.annotators:,} annotators, {figures.answers:,} settled answers, {figures.open_tasks:,} open tasks"
    screen, batches, daemon = Screen(title=title, show_header=False), figures.batches, figures.daemon
    times = batches.batch_ms
    rows = {
        f"a batch of {BATCH_MAX}, in the median": f"{_median(times):.0f} ms",
        f"the fastest and the slowest of {len(times)}": f"{times[0]:.0f}, {times[-1]:.0f} ms",
        **{f"of that, {name}": f"{of:.0f} ms" for name, of in batches.parts_ms.items()},
        "one core for a batch, agreement included": f"{batches.cpu_ms:.0f} ms",
        "file": f"{figures.file_mb:.0f} MB",
        "making the rows": f"{figures.fill_seconds:.0f} s",
        "opening the store": f"{figures.open_seconds:.1f} s",
        "daemon: after the start, with batches, in a close": (
            f"{daemon.started_mb:.0f}, {daemon.batches_mb:.0f}, {daemon.closed_mb:.0f} MB"
        ),
        "longest slice of its event loop, with batches": f"{daemon.loop_batches_ms:.0f} ms",
        "the same, in a close": f"{daemon.loop_close_ms:.0f} ms",
        "close: one core, longest slice": f"{daemon.close_seconds:.1f} s, {daemon.slice_ms:.0f} ms",
        "close: the clock, batches": f"{daemon.closed_seconds:.0f} s, {daemon.batches}",
    }
    for name, value in rows.items():
        screen.add_row(name, value)
    Console(width=130).print(screen)


def main() -> int:
    parser = Parser("curation", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--annotators", type=COUNT, default=10_000, metavar="N", help="annotators of the network")
    parser.add_argument("--answers", type=COUNT, default=1_000_000, metavar="N", help="number of settled answers")
    parser.add_argument("--open-tasks", type=COUNT, default=100_000, metavar="N", help="number of tasks without an answer")
    parser.add_argument("--batches", type=COUNT, default=20, metavar="N", help="number of batches, whose median counts")
    parser.add_argument("--fill", type=Path, metavar="FOLDER", help="only make the data directory in this folder")
    parser.add_argument("--filled", type=Path, metavar="FOLDER", help="measure with a copy of a folder of --fill")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of the settled votes")
    parser.add_argument("--daemon", type=Path, metavar="FOLDER", help="only measure a daemon with this folder")
    options = parser.parse_args()
    if options.fill:
        Filler(options.fill, options.annotators, options.answers, options.open_tasks, options.seeds[0]).fill()
        return 0
    if options.daemon:
        print(json.dumps(asdict(trio.run(serve, options.daemon, options.annotators, options.batches))))
        return 0
    started, rows, lines = time.time(), list[Figures](), list[str]()
    for seed in options.seeds:
        # Use this disk: /tmp may be in memory, where a commit costs nothing.
        with tempfile.TemporaryDirectory(dir=".") as temporary:
            folder, began = Path(temporary) / "peer", time.time()
            if options.filled:
                shutil.copytree(options.filled, folder)
            else:
                sizes = ("--annotators", options.annotators, "--answers", options.answers, "--open-tasks", options.open_tasks)
                command = [sys.executable, "-m", "benchmarks.curation", "--fill", folder, "--seeds", seed, *sizes]
                subprocess.run(list(map(str, command)), check=True)
            rows.append(measure(folder, options, time.time() - began))
        show(rows[-1])
        lines += verdicts(rows[-1])
        write(options.json, started, {"seeds": list(options.seeds), "rows": [asdict(row) for row in rows]})
    return conclude(lines)


if __name__ == "__main__":
    sys.exit(main())
