"""A feature is a folder and a line: with the line it shows everywhere, without it nowhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from features.feature import Feature
from features.lazily import named
from features.roles import Role
from features.settings import Setting
from ledger.core.genesis import ROLES_MAX, check_roles
from ledger.jobs import Phase, Start
from ledger.state import Unknown
from peer import cli, features
from peer.daemon.daemon import running
from peer.driver.author import Author
from peer.features import FEATURES, founding_modules, modules_of, rules_of
from peer.settings.config import abouts, load, show
from peer.worker.supervisor import Worker, WorkerFailed
from protocol import codec
from protocol.api import EventView
from protocol.errors import RemoteProtocolError, UserError
from protocol.reasons import Verdict, label
from tests.fuzz.decoders import decoders
from tests.ledger.world import PlainJobs, World
from tests.notes.feature import NOTES
from tests.notes.module import NotesState, Write
from tests.notes.objective import OBJECTIVES, Sizes
from tests.peer.network import SECONDS_MAX
from tests.test_docs import sections
from training import tasks
from training.data.default_text import default_text
from training.host import ModelHost
from training.objectives import registry
from training.replicated.model import ReplicatedModel
from training.spec import JobSpec

LETTERS = JobSpec(name="letters", objective="letters", data=bytes(32), rounds=1, liars=0)
JOB = JobSpec(name="ones", objective="ones", rounds=1, liars=0, settings=codec.encode(Sizes(5000)))


@pytest.fixture
def feature() -> Iterator[None]:
    FEATURES.append(NOTES)
    yield
    FEATURES.remove(NOTES)
    for objective in OBJECTIVES:
        registry._known.pop(objective.name, None)


def seen() -> dict[str, bool]:
    """Where the feature shows."""
    help_text = cli.build_parser().format_help()
    run_help = next(command for name, command in cli.build_parser().commands().items() if name == "run").format_help()
    features.install()
    return {
        "modules": "notes" in {module.name for module in modules_of(PlainJobs())},
        "genesis": "notes" in {module.name for module in founding_modules()},
        "documents": any("notes/write" in title for title, _ in sections()),
        "fuzz targets": any(name.startswith("tests.notes") for name in decoders.__wrapped__()),
        "help": "what was noted" in help_text,
        "settings": "first_note" in abouts() and "first_note" in show(load({}, {"HOME": "/home/ann"})),
        "flags": "--first-note" in run_help,
        "roles": "scribe" in features.roles() and "scribe: writes a note" in run_help,
        "parts": "scribe" in features.roles()["full"].parts,
        "objectives": registry.find("ones") is not None,
        "engines": "slate" in features.engines() and "pytorch, slate" in run_help,
    }


def test_with_the_line_it_shows_everywhere(feature: None) -> None:
    assert [what for what, shows in seen().items() if not shows] == []


def test_without_the_line_it_shows_nowhere() -> None:
    assert [what for what, shows in seen().items() if shows] == []


def test_another_list_of_modules_is_another_network(feature: None) -> None:
    world = World()
    founded = replace(world.genesis, modules=founding_modules())
    assert founded.chain_id != world.genesis.chain_id
    state = rules_of(founded, PlainJobs()).first_state()
    assert state.of(NotesState) == NotesState() and state.root != world.state.root
    FEATURES.remove(NOTES)
    with pytest.raises(Unknown, match="this network runs notes 1; this program does not know it"):
        rules_of(founded, PlainJobs()).first_state()
    FEATURES.append(NOTES)


def test_a_setting_is_read_checked_and_refused_like_any_other(feature: None) -> None:
    home = {"HOME": "/home/ann"}
    assert load({}, home).config.of_features["first_note"] == "hello"
    assert load({}, {**home, "PEER_FIRST_NOTE": "milk"}).config.of_features["first_note"] == "milk"
    with pytest.raises(UserError, match=r"first_note = 'x+' \(command line\) is too long a note"):
        load({"first_note": "x" * 21}, home)


def test_an_objective_s_own_record_is_part_of_what_is_checked(feature: None, tmp_path: Path) -> None:
    features.install()
    assert JOB.checked().own == Sizes(5000)
    for settings, why in ((codec.encode(Sizes(9000)), "size 9000 is outside"), (b"\xc0", "Sizes")):
        with pytest.raises(RemoteProtocolError, match=why):
            JobSpec.decode(replace(JOB, settings=settings).encode())
    assert ModelHost(tmp_path).terms(JOB.encode()).requires.name == "notes"
    assert ModelHost(tmp_path).terms(LETTERS.encode()).role == "clerk"
    with pytest.raises(RemoteProtocolError, match="has no settings"):
        JobSpec.decode(replace(JOB, objective="scratch").encode())


def test_a_job_of_an_unknown_objective_is_refused_by_name() -> None:
    with pytest.raises(RemoteProtocolError, match="objective 'ones' is none that this program knows: language, scratch"):
        JobSpec.decode(JOB.encode())


def test_all_that_features_name_is_there(feature: None) -> None:
    """Names are looked up when something is used: a slip would be found by whoever uses it first."""
    for item in FEATURES:
        named_by_it = [item.objectives, item.words, item.calls, item.answers, *item.parts.values(), *item.engines.values()]
        assert all(named(place) is not None for place in named_by_it if place)
    for name, place in features.engines().items():
        assert named(place).name == name
    features.install()
    for objective in map(registry.find, registry.names()):
        assert objective is not None and bool(objective.losses) == objective.needs_worker, "a worker trains, or everybody knows"
        assert all(callable(named(place)) for engine, place in objective.losses.items() if engine in features.engines())
        trained_by = [role for role in features.roles().values() if objective.role in role.registers]
        assert trained_by and all(role.needs_worker for role in trained_by), "who registers for it can train it"
    for role in features.roles().values():
        check_roles(role.registers)
        assert len(role.registers) <= ROLES_MAX


@pytest.mark.parametrize(
    ("twin", "what"),
    [
        (Feature(name="twin", about="", roles=(Role("scribe", ""),)), "role called 'scribe'"),
        (Feature(name="twin", about="", roles=(Role("full", ""),)), "as all of them together"),
        (Feature(name="twin", about="", roles=(Role("reader", "", parts=("reader",)),)), "a part that no feature brings"),
        (Feature(name="twin", about="", parts={"scribe": ""}, roles=()), "part called 'scribe'"),
        (Feature(name="twin", about="", settings=(Setting("listen", "", ""),)), "the peer's own"),
    ],
)
def test_no_feature_takes_the_name_of_another_one_s(feature: None, twin: Feature, what: str) -> None:
    FEATURES.append(twin)
    try:
        with pytest.raises(AssertionError, match=what):
            features.roles(), abouts()
    finally:
        FEATURES.remove(twin)


async def test_an_engine_of_a_feature_trains_in_a_worker_without_torch(feature: None, tmp_path: Path) -> None:
    features.install()
    text, model, buffer, payload = (str(tmp_path / name) for name in ("text", "model", "buffer", "payload"))
    Path(text).write_bytes(default_text()[:20_000])
    ReplicatedModel.initial(bytes(32), LETTERS).save(Path(model))
    worker = Worker(command=[sys.executable, "-m", "tests.notes.worker"], engine="slate")
    with trio.fail_after(SECONDS_MAX):
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            assert worker.ready is not None and worker.ready.engine == "slate alone"
            with pytest.raises(WorkerFailed, match="'slate' cannot train the objective 'language': it has losses for pytorch"):
                await worker.ask(tasks.OpenJob(bytes(32), replace(LETTERS, objective="language").encode(), text, None))
            opened = await worker.ask(tasks.OpenJob(bytes(32), LETTERS.encode(), text, None))
            assert opened.parameters == 256
            folder = tmp_path / "declared"
            propose = tasks.Propose(bytes(32), 0, b"t" * 32, model, None, None, buffer, declared_out=str(folder))
            proposed = await worker.ask(propose)
            Path(payload).write_bytes(proposed.payload)
            update = np.fromfile(buffer, "<f4")
            assert update.argmin() == ord(" "), "of its share there is most to learn"
            declared = tasks.Declared(proposed.declaration, {bytes.fromhex(file.name): str(file) for file in folder.iterdir()})
            audit = tasks.Audit(bytes(32), 0, b"t" * 32, model, payload, buffer, None, None, declared=declared)
            assert (await worker.ask(audit)).verdict is Verdict.ACCEPT
            theirs = await worker.ask(replace(audit, trainer=b"u" * 32))
            assert label(theirs.verdict, LETTERS.kind.labels) == "miscounted", "another trainer draws other sequences"
            file = next(folder.iterdir())
            counts = np.fromfile(file, "<i8")
            np.roll(counts, 1).tofile(file)
            assert (await worker.ask(audit)).verdict is Verdict.OWN_0, "steps of invented counts are not even re-executed"
            counts.tofile(file)
            other = tmp_path / "other"
            (np.fromfile(buffer, "<f4") * 2).tofile(other)
            assert (await worker.ask(replace(audit, buffer=str(other)))).verdict is Verdict.REPLAY
            measured = await worker.ask(tasks.Evaluate(bytes(32), model))
            assert measured.figure is not None and 0 < measured.figure < 2
            nursery.cancel_scope.cancel()


async def test_a_running_peer_has_its_role_its_part_its_blob_and_its_objective(feature: None, tmp_path: Path) -> None:
    """A real daemon in this process: the part writes, the module names the blob, and a job of the objective trains."""
    directory = tmp_path / "peer"
    said = ["--data-dir", str(directory)]
    assert await trio.to_thread.run_sync(cli.main, ["init", "--network", "lab", "--listen", "127.0.0.1:0", *said]) == 0
    config = load({"data_directory": directory, "role": "scribe", "first_note": "milk"}, {"HOME": str(tmp_path)}).config
    with trio.fail_after(SECONDS_MAX):
        async with running(config) as daemon:
            driver = daemon.driver
            told: tuple[EventView, ...] = ()
            while "the first note is decided" not in [event.text for event in told]:
                told += await daemon.api.events(len(told), SECONDS_MAX)
            notes, me = driver.state.of(NotesState), driver.signer.public
            assert notes.written == {me: 1} and notes.last is not None and driver.blobs.read(notes.last) == b"milk"
            assert driver.state.members.members[me].roles == ("scribe",)
            assert (directory / "parts" / "scribe" / "written").exists()
            author = Author(driver)
            await author.submit("job/start", Start(JOB.encode()))
            while any(job.phase is not Phase.FINISHED for job in driver.state.jobs.jobs.values()):
                await driver.applied.wait()
            (closed,) = await daemon.api.rounds(1)
            assert list(closed.verdicts.values()) == ["accept"] and closed.stepped
            await author.submit("notes/write", Write(notes.last))
            assert driver.state.of(NotesState).written == {me: 2}
