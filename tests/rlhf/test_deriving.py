"""A voter derives the sets that plans wait for, and attests its own result even if the author named another."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from curation.ledger.curation_state import Redaction
from curation.ledger.transaction_types import AddTaskPage
from curation.tasks.answers import Answer
from curation.tasks.task_pages import AnnotationTask, PageEntry, TaskPageBlob, page_merkle_root, redact_entry, task_id
from ledger.jobs import ModelReference
from peer.daemon import daemon
from protocol import codec
from protocol.errors import MissingBlobError, UserError
from rlhf import preference_derivation, services
from rlhf.api.pair_trace import read_preference_set
from rlhf.data.preference_sets import PreferencePair, encode_records
from rlhf.data.tokenized_records import preference_set_manifest
from rlhf.ledger import tuning_plans
from rlhf.ledger.preference_set_attestation import AttestPreferenceSet, PreferenceSetSource
from rlhf.ledger.rlhf_module import RlhfState, outdated_sets, sets_in_use
from rlhf.services import PreferenceDatasetBuilder
from tests.ledger.world import PEOPLE
from tests.rlhf import test_sets
from tests.rlhf.seat import WorldDesk
from tests.rlhf.test_plans import OWN, POLICY
from tests.rlhf.test_sets import AUTHOR, BOTH_BAD, TASKS, Compared
from training.corpus import text_path

VOTER = PEOPLE[1]


class Paged(Compared):
    """A world whose project has a real page."""

    def page(self, project: bytes, tasks: int, author: Any = AUTHOR, gold: Mapping[int, Answer] = {}) -> None:
        self.first = codec.encode(
            TaskPageBlob(tuple(PageEntry(bytes([n]) * 16, AnnotationTask(f"q{n}", (f"a{n}", f"b{n}"))) for n in range(tasks)))
        )
        root = page_merkle_root(codec.decode(TaskPageBlob, self.first))
        self.say(
            author, "curation/add-page", AddTaskPage(project, hashlib.sha256(self.first).digest(), len(self.first), root, tasks)
        )

    def redact_in_page(self, number: int) -> bytes:
        """Redact a task, and return the resulting page."""
        made, old = redact_entry(codec.decode(TaskPageBlob, self.first), number), hashlib.sha256(self.first).digest()
        self.say(AUTHOR, "curation/redact", Redaction(self.project_key, 0, number, old, hashlib.sha256(made).digest(), len(made)))
        return made

    def pairs(self, without: int | None = None) -> list[PreferencePair]:
        chosen = [n for n in range(TASKS) if n % 4 != BOTH_BAD and n != without]
        p = {0: 1000, 1: 0, 2: 500}
        return sorted(
            (PreferencePair(task_id(self.project_key, n), f"q{n}", f"a{n}", f"b{n}", p[n % 4]) for n in chosen),
            key=lambda pair: pair.id,
        )


class Desk(WorldDesk):
    """The voter's desk: its transactions are decided at once."""

    def __init__(self, world: Paged, folder: Path, *blobs: bytes) -> None:
        super().__init__(world, VOTER.public)
        self.folder, self.text_folder = folder, folder
        self.blobs = {hashlib.sha256(blob).digest(): blob for blob in blobs}
        self.said = list[Any]()
        self.told = list[str]()
        self.asked, self.came = trio.Event(), trio.Event()

    async def fetch_blob(self, digest: bytes, size_max: int, sources: Iterable[bytes] = ()) -> None:
        self.asked.set()
        while digest not in self.blobs:
            await self.came.wait()
            await trio.lowlevel.checkpoint()

    def read_blob(self, digest: bytes, size_max: int) -> bytes:
        if digest not in self.blobs:
            raise MissingBlobError(digest.hex())
        return self.blobs[digest]

    def delete_blob(self, digest: bytes) -> None:
        self.blobs.pop(digest, None)

    def add_blob(self, data: bytes) -> bytes:
        self.blobs[hashlib.sha256(data).digest()] = data
        return hashlib.sha256(data).digest()

    def log_event(self, text: str) -> None:
        self.told.append(text)

    async def submit_transaction(self, kind: str, content: Any) -> None:
        assert kind == "rlhf/attest-set"
        refused = self.world.refused(VOTER, kind, content)
        if refused:
            raise UserError(refused)
        self.said.append(content)
        self.world.decide(self.world.tx(VOTER, kind, content))


@pytest.fixture
def world(tmp_path: Path) -> Paged:
    return Paged(tmp_path / "models")


async def said(desk: Desk) -> list[bytes | None]:
    """Run the builder until this peer attests sets, and return them."""
    await until(lambda: desk.said, PreferenceDatasetBuilder(desk).run)  # type: ignore[arg-type]
    assert all(isinstance(content, AttestPreferenceSet) and content.plan == desk.world.key for content in desk.said)
    return [content.set for content in desk.said]


def naming(world: Paged, pairs: list[PreferencePair], monkeypatch: pytest.MonkeyPatch, tokens: bytes | None = None) -> bytes:
    """Begin a plan that names these pairs as its set."""
    named = preference_set_manifest(pairs, tokens).digest
    monkeypatch.setattr(test_sets, "NAMED", named)
    world.source = PreferenceSetSource(world.project_key, world.source.height, tokens)
    world.begun()
    return named


@pytest.fixture
def named(world: Paged, monkeypatch: pytest.MonkeyPatch) -> bytes:
    return naming(world, world.pairs(), monkeypatch)


@pytest.fixture
def desk(world: Paged, tmp_path: Path) -> Desk:
    return Desk(world, tmp_path, world.first)


async def until(condition: Callable[[], object], run: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, *arguments)
            while not condition():  # noqa: ASYNC110
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("tokens", [None, b"t" * 32], ids=["bytes", "tokens"])
async def test_a_voter_confirms_a_set_that_it_derived_and_keeps_it_for_others(
    world: Paged, desk: Desk, monkeypatch: pytest.MonkeyPatch, tokens: bytes | None
) -> None:
    named = naming(world, world.pairs(), monkeypatch, tokens)
    assert await said(desk) == [named]
    assert read_preference_set(named, desk.read_blob) == world.pairs()
    assert "the set" in desk.told[0] and "of 6 pairs, which the plan names" in desk.told[0]


async def test_a_voter_derives_a_set_again_after_a_fault_of_its_disk(
    named: bytes, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(daemon, "RETRY_SECONDS", 0.01)
    keep = desk.add_blob

    def fail(data: bytes) -> bytes:
        monkeypatch.setattr(desk, "add_blob", keep)
        raise OSError(errno.ENOSPC, "no space is left")

    monkeypatch.setattr(desk, "add_blob", fail)
    part = PreferenceDatasetBuilder(desk)  # type: ignore[arg-type]
    await until(lambda: desk.said, daemon.restart_on_fault, "the part sets", part.run, told.append)
    assert desk.said[0].set == named and len(told) == 1


INVENTED = {
    "another p": lambda pairs: [
        *pairs[:-1],
        PreferencePair(pairs[-1].id, pairs[-1].prompt, pairs[-1].first, pairs[-1].second, 999),
    ],
    "another text": lambda pairs: [
        *pairs[:-1],
        PreferencePair(pairs[-1].id, "?", pairs[-1].first, pairs[-1].second, pairs[-1].p),
    ],
    "one left out": lambda pairs: pairs[1:],
    "one invented": lambda pairs: [*pairs, PreferencePair(b"\xff" * 32, "q", "a", "b", 0)],
}


@pytest.mark.parametrize("how", INVENTED)
async def test_a_voter_says_what_it_found_where_a_plan_names_something_else(
    world: Paged, desk: Desk, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    named = naming(world, INVENTED[how](world.pairs()), monkeypatch)
    assert await said(desk) == [preference_set_manifest(world.pairs()).digest] != [named]
    assert list(desk.blobs.values()) == [world.first], "what nobody asks for is not kept"
    assert "but a plan names" in desk.told[0]


async def test_a_voter_waits_for_the_tasks(world: Paged, named: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference_derivation, "FETCHING_SECONDS", 0.02)
    desk = Desk(world, tmp_path)
    async with trio.open_nursery() as nursery:

        async def arrives() -> None:
            await desk.asked.wait()
            assert not desk.said
            desk.add_blob(world.first)
            desk.came.set()

        nursery.start_soon(arrives)
        assert await said(desk) == [named]


@pytest.mark.usefixtures("named")
async def test_a_plan_whose_tasks_never_come_holds_no_thread_and_is_forgotten_when_it_is_cancelled(
    world: Paged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one member could occupy all threads of every voter with plans that it begins and cancels."""
    monkeypatch.setattr(preference_derivation, "FETCHING_SECONDS", 0.02)
    desk = Desk(world, tmp_path)
    work = PreferenceDatasetBuilder(desk)  # type: ignore[arg-type]
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work.run)
            await desk.asked.wait()
            await trio.testing.wait_all_tasks_blocked()
            limits = (work._threads, trio.to_thread.current_default_thread_limiter())
            assert [limit.borrowed_tokens for limit in limits] == [0, 0]
            world.say(AUTHOR, "rlhf/cancel", tuning_plans.CancelPlan(world.key))
            while work._begun:  # noqa: ASYNC110
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert not desk.said


@pytest.mark.usefixtures("named")
async def test_a_page_that_is_redacted_while_it_is_fetched_is_not_waited_for(
    world: Paged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The redaction ends the plan and the voter's work. A new plan makes it derive the remaining pairs."""
    monkeypatch.setattr(preference_derivation, "FETCHING_SECONDS", 0.02)
    desk = Desk(world, tmp_path)
    source = world.source

    async def redacts() -> None:
        await desk.asked.wait()
        desk.add_blob(world.redact_in_page(0))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(redacts)
            assert await preference_derivation.derive_pairs(desk, source) == world.pairs(without=0)  # type: ignore[arg-type]
    assert world.now_plan.phase == "cancelled"


@pytest.mark.usefixtures("named")
async def test_a_page_that_is_none_gives_no_set(world: Paged, tmp_path: Path) -> None:
    desk = Desk(world, tmp_path)
    desk.blobs[hashlib.sha256(world.first).digest()] = b"no page"
    assert await said(desk) == [None]
    assert "gives at height" in desk.told[0] and "no set" in desk.told[0]


@pytest.mark.usefixtures("named")
async def test_who_has_no_vote_says_nothing(desk: Desk) -> None:
    desk.me = PEOPLE[7].public
    assert not PreferenceDatasetBuilder(desk)._due()  # type: ignore[arg-type]


# Redacted texts -----------------------------------------------------------------------------------------------------------


def text_of(desk: Desk) -> Path:
    return text_path(desk.text_folder, preference_set_manifest(desk.world.pairs()))


def held(desk: Desk, named: bytes) -> list[bool]:
    """Return which blobs of a set are held: its manifest, its shard, its text."""
    return [
        named in desk.blobs,
        hashlib.sha256(b"".join(encode_records(desk.world.pairs()))).digest() in desk.blobs,
        text_of(desk).exists(),
    ]


def decided_and_redacted(world: Paged, desk: Desk) -> None:
    for who in PEOPLE[:3]:
        world.decide(world.found(who, world.claim.set))
    preference_set_manifest(world.pairs(), world.source.tokens, desk.add_blob)
    text_of(desk).write_bytes(b"as a trainer assembled it")
    world.redact_in_page(0)


async def test_a_set_of_which_a_pair_is_redacted_is_deleted_when_no_job_needs_it(world: Paged, named: bytes, desk: Desk) -> None:
    decided_and_redacted(world, desk)
    reward, policy = (tuning_plans.stage_job_id(world.key, stage) for stage in range(2))
    for job in (reward, policy):
        assert outdated_sets(world.state.module_state(RlhfState)) == {named} and named in sets_in_use(world.state)
        await PreferenceDatasetBuilder(desk)._finish_block()  # type: ignore[arg-type]
        assert all(held(desk, named)), "it is being learned from, or rewards by it"
        world.close(job)
        assert (named in sets_in_use(world.state)) == (job == reward), "also in the block between the stages"
        world.decide()
    await until(lambda: not any(held(desk, named)), PreferenceDatasetBuilder(desk).run)  # type: ignore[arg-type]


def test_the_set_of_a_reward_model_that_a_policy_without_a_plan_reads_is_in_use(world: Paged, named: bytes, desk: Desk) -> None:
    decided_and_redacted(world, desk)
    reward = tuning_plans.stage_job_id(world.key, 0)
    world.close(reward)
    model = ModelReference(reward, world.job(reward).round, world.job(reward).model_root)
    world.decide(world.tx(PEOPLE[0], "rlhf/cancel", tuning_plans.CancelPlan(world.key)))
    assert named not in sets_in_use(world.state)
    policy = world.start(PEOPLE[1], world.on(POLICY, objective_settings=codec.encode(replace(OWN, reward_model=model))))
    assert named in sets_in_use(world.state)
    world.close(policy)
    assert named not in sets_in_use(world.state)


async def test_a_set_that_was_not_decided_is_deleted(world: Paged, named: bytes, desk: Desk) -> None:
    await said(desk)
    assert held(desk, named)[:2] == [True, True]
    world.redact_in_page(0)
    assert world.now_plan.phase == "cancelled"
    await until(lambda: not any(held(desk, named)), PreferenceDatasetBuilder(desk).run)  # type: ignore[arg-type]


async def test_what_another_set_has_stays(world: Paged, named: bytes, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other set has the same pairs in the tokens of another base, and a job uses it."""
    decided_and_redacted(world, desk)
    other = preference_set_manifest(world.pairs(), b"t" * 32, desk.add_blob).digest
    monkeypatch.setattr(services, "sets_in_use", lambda state: {other})
    await until(lambda: named not in desk.blobs, PreferenceDatasetBuilder(desk).run)  # type: ignore[arg-type]
    assert held(desk, named) == [False, True, True] and read_preference_set(other, desk.read_blob) == world.pairs()
