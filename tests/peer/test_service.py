"""Jobs on people's own text, at one real peer that trains; and jobs from their own models, at four peers."""

from __future__ import annotations

import gzip
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import trio

from demo.demo_peers import PeerDisk
from ledger.audits.audit_state import AuditResult
from ledger.core.genesis import TRAINER, Founder, Genesis
from peer.api.handlers.audit_handler import list_suspensions
from peer.api.handlers.local_peer_handler import unaudited_jobs
from peer.export.export_replay import audit_export
from peer.features import founding_modules
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.api import JobView
from protocol.identity import Identity, peer_id
from tests.ledger.court import A, B, C, Court, D
from tests.ledger.world import LANGUAGE, SAMPLED, SCRATCH, UNAUDITED, World
from tests.peer.processes import Daemon, command, daemons, import_torch_for_ever, peer, poll
from tests.training.folders import tensors, written
from tests.waiting import patience
from training.formats import huggingface_model
from training.job_spec import AggregationRule
from training.model_store import JobModelStore

TINY = [
    word
    for setting in (
        "local_steps=1",
        "batch=2",
        "micro_batch=2",
        "model.layers=1",
        "model.width=32",
        "model.hidden=64",
        "model.context=32",
    )
    for word in ("--set", setting)
]
SENTENCE = "Nobody is above the others, and what is decided is decided by two thirds of them.\n"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "own.txt").write_text(SENTENCE * 40)
    assert command("init", "--network", "lab", "--data-dir", str(folder / "peer"))[0] == 0
    with daemons([folder / "peer"]) as (made,):
        made.start("run", "--listen", "127.0.0.1:0", "--threads", "1", "--local-data", str(folder / "own.txt"))
        trio.run(made.answers)
        yield made


def train(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
    return command("console", "--data-dir", str(daemon.directory), "train", "--rounds", "1", *arguments)


async def finished(daemon: Daemon) -> JobView:
    """Wait for the end of the newest job and return it."""

    async def is_over() -> bool:
        return (await daemon.client.jobs())[-1].state == "finished"

    await poll(is_over)
    return (await daemon.client.jobs())[-1]


def rule_of(trainer: Daemon, job: str) -> AggregationRule:
    """Return the aggregation rule of the job on the log."""
    with closing(PeerDisk(trainer.directory)) as disk:
        return disk.spec(job).rule


@pytest.mark.real("processes")
async def test_local_data_turns_audits_off_and_says_and_shows_it(trainer: Daemon) -> None:
    status, out, error = train(trainer, "--data", "local", *TINY)
    assert (status, error) == (0, "")
    assert "audits are off" in out
    job = await finished(trainer)
    assert (job.audit, job.data, list(job.accepted.values())) == ("off", "local", [1])
    assert rule_of(trainer, job.job) is AggregationRule.ARC_NNM_TRIM, "nobody re-executes: the rule alone stands against lies"
    shown = command("console", "--data-dir", str(trainer.directory), "jobs")[1]
    assert [line.split()[-3:-1] for line in shown.splitlines() if line.startswith(job.job[:8])] == [["off", "local"]], shown
    assert [file.read_text() for file in (trainer.directory / "texts").glob("local-*.txt")] == [SENTENCE * 40]
    assert (await trainer.client.status()).unaudited == (), "it is over"
    assert train(trainer, "--data", "local", *TINY, "--rounds", "500", "--name", "diary")[0] == 0
    assert (await trainer.client.status()).unaudited == ("diary",)
    await trainer.client.cancel_job((await trainer.client.jobs())[-1].job)


@pytest.mark.real("processes")
async def test_train_names_the_files_of_a_folder_that_it_leaves_out(trainer: Daemon, tmp_path: Path) -> None:
    records = "".join(json.dumps({"Body": SENTENCE * 9, "id": number}) + "\n" for number in range(9))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((records + '{"Body": ""}\n').encode()))
    (tmp_path / "b.html").write_text("<html>")
    (tmp_path / ".hidden.txt").write_text("x")
    status, out, error = train(trainer, "--data", str(tmp_path), "--column", "body", *TINY)
    assert (status, error) == (0, "")
    told = [
        "files left out: 2",
        "  .hidden.txt: hidden",
        "  b.html: HTML, which has markup; extract its text",
        "records without text left out: 1",
    ]
    assert [line for line in out.splitlines() if line in told] == told, out
    assert list((await finished(trainer)).notes) == told
    status, _, error = train(trainer, "--data", str(tmp_path), *TINY)
    assert status != 0 and "a.jsonl.gz: line 1 has no \"text\" field, only 'Body', 'id'" in error and "--column" in error


@pytest.mark.parametrize("spec, names", [(UNAUDITED, ("unaudited",)), (LANGUAGE, ()), (SAMPLED, ()), (SCRATCH, ())])
def test_running_jobs_without_any_audit_are_told_from_the_others(spec: bytes, names: tuple[str, ...]) -> None:
    world = World()
    world.start(spec=spec)
    assert unaudited_jobs(world.state) == names


def test_who_is_suspended_and_why_is_told_when_the_log_has_forgotten_it() -> None:
    court = Court(suspension_rounds=20)
    court.round(2)
    assert list_suspensions(court.state) == ()
    court.convict(A)
    (cause,) = [entry for entry in court.state.audits.log if entry.result is AuditResult.SUSPENDED]
    court.round(19, trainers=(B, C, D))
    assert cause not in court.state.audits.log
    (told,) = list_suspensions(court.state)
    assert (told.until, told.cause.trainer, told.cause.auditor) == (court.audits.suspended[A], peer_id(A), peer_id(cause.auditor))
    assert (told.cause.job, told.cause.round) == (court.key.hex(), cause.round)
    court.round(2, trainers=(B, C, D))
    assert list_suspensions(court.state) == ()


@pytest.mark.real("processes")
async def test_a_folder_of_texts_with_a_tokenizer_of_its_own_trains(trainer: Daemon, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(SENTENCE * 30)
    (tmp_path / "b.md").write_text("# A heading\n\n" + SENTENCE * 30)
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": SENTENCE}) + "\n" for _ in range(30)))
    (tmp_path / "d.bin").write_bytes(bytes(100))
    status, out, error = train(trainer, "--data", str(tmp_path), "--vocabulary", "300", *TINY)
    assert (status, error) == (0, "")
    assert "audits are off" not in out
    job = await finished(trainer)
    assert (job.audit, list(job.accepted.values())) == ("full", [1])
    assert rule_of(trainer, job.job) is AggregationRule.MEAN, "what is accepted was re-executed"
    (view,) = [view for view in await trainer.client.rounds(20) if view.job == job.job]
    assert view.stepped
    made = sorted(
        (trainer.directory / "texts").glob("*.txt.*.tokens"), key=lambda file: int(file.name.split(".")[-2].split("-")[0])
    )
    assert len(made) == 2
    named = hashlib.sha256(b"".join(file.read_bytes() for file in made)).digest()
    assert any(named in blob.read_bytes() for blob in (trainer.directory / "blobs").iterdir()), "the manifest names its tokens"
    assert not list(trainer.directory.glob("tokens-*"))


@pytest.mark.real("processes")
async def test_a_file_of_three_kilobytes_trains(trainer: Daemon, tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_bytes((SENTENCE * 40).encode()[:3_000])
    assert train(trainer, "--data", str(tmp_path / "small.txt"), *TINY)[0] == 0
    assert list((await finished(trainer)).accepted.values()) == [1]


@pytest.mark.real("processes")
async def test_token_shards_train_as_their_manifest_says(trainer: Daemon, tmp_path: Path) -> None:
    for name, start in (("0.bin", 0), ("1.bin", 2_000)):
        (tmp_path / name).write_bytes(b"".join((number % 256).to_bytes(2, "little") for number in range(start, start + 2_000)))
    status, printed, _ = command("shards", str(tmp_path))
    assert status == 0
    (tmp_path / "manifest.json").write_text(printed)
    assert train(trainer, "--data", str(tmp_path), *TINY)[0] == 0
    assert list((await finished(trainer)).accepted.values()) == [1]
    status, out, error = train(trainer, "--data", str(tmp_path), *TINY, "--set", "model.vocabulary=100")
    assert (status, out, error.count("\n")) == (2, "", 1) and "--set model.vocabulary=100: the tokens of " in error
    (tmp_path / "1.bin").unlink()
    status, out, error = train(trainer, "--data", str(tmp_path), *TINY)
    assert (status, out) == (2, "") and "1.bin is missing" in error and error.count("\n") == 1


@pytest.mark.real("processes")
@pytest.mark.parametrize(
    "settings",
    [
        ("per-step",),
        ("per-step", "memory=estimates", "audit=full"),
        ("local", "inner_state=keep", "beta1=0.9", "audit=full", "inner=muon"),
        ("local", "audit=sampled"),
    ],
    ids=str,
)
async def test_every_preset_trains_with_what_it_keeps_from_round_to_round(trainer: Daemon, settings: tuple[str, ...]) -> None:
    preset, *fields = settings
    steps = "1" if preset == "per-step" else "2"
    chosen = [word for field in fields for word in ("--set", field)]
    tiny = [f"local_steps={steps}" if word == "local_steps=1" else word for word in TINY]
    status, _, error = train(trainer, "--preset", preset, "--rounds", "3", *tiny, *chosen)
    assert (status, error) == (0, "")
    job = await finished(trainer)
    assert (job.rounds, list(job.accepted.values())) == (3, [3])
    assert [event.text for event in await trainer.client.events(-1, 0) if event.kind == "warning"] == []


@pytest.mark.real("processes")
async def test_an_adamw_of_everybody_sends_four_bits_unless_told_otherwise(trainer: Daemon) -> None:
    sent = []
    for bits in ([], ["--set", "bits=1"]):
        assert train(trainer, *TINY, "--set", "outer=adamw", *bits)[0] == 0
        job = await finished(trainer)
        with closing(PeerDisk(trainer.directory)) as disk:
            sent.append(disk.spec(job.job).bits)
    assert sent == [4, 1]


@pytest.mark.real("processes")
def test_what_cannot_be_trained_on_is_one_line_that_names_it(trainer: Daemon, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "folder").mkdir()
    for arguments, words in (
        (("--data", str(tmp_path / "empty.txt")), "empty.txt contains no text"),
        (("--data", str(tmp_path / "binary.txt")), "binary.txt is not a text file"),
        (("--data", str(tmp_path / "missing.txt")), "no such file or folder"),
        (("--data", str(tmp_path / "folder")), "folder"),
        (("--set", "local_stops=3"), "unknown job field 'local_stops'; did you mean local_steps?"),
        (("--set", "batch=many"), "batch = 'many' is not a whole number"),
        (("--set", "batch=0"), "batch"),
        (("--set", f"local_steps={'9' * 23}"), f"local_steps = {'9' * 23} is out of range"),
        (("--data", "x" * 300), "File name too long; choose another file or folder"),
        (("--set", "inner_rate=nan"), "inner_rate"),
        (("--set", "model.width=31"), "width 31"),
        (("--data", "local", "--set", "model.context=2000000000"), "own.txt is too small: "),
        (("--data", "local", "--set", "byzantine_max=1"), "use byzantine_max 0 if no trainer is faulty"),
        (("--set", "audit=off", "byzantine_max=1"), "1 bit with error feedback fails with 4 dishonest trainers of 13"),
        (("--data", "local", "--vocabulary", "512"), "--vocabulary 512: with local data the tokens are bytes; leave it out"),
    ):
        status, out, error = train(trainer, *arguments)
        assert (status, out) == (2, ""), arguments
        assert error.startswith("peer: error: ")
        assert error.count("\n") == 1
        assert words in error


@pytest.mark.real("processes")
async def test_a_trainer_without_text_of_its_own_is_told_before_the_job_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_torch_for_ever(tmp_path, monkeypatch)
    assert command("init", "--network", "lab", "--data-dir", str(tmp_path / "peer"))[0] == 0
    with daemons([tmp_path / "peer"]) as (daemon,):
        await daemon.start("run", "--listen", "127.0.0.1:0", "--threads", "1").answers()
        status, _, error = train(daemon, "--data", "local", *TINY)
        assert (status, error.count("\n")) == (2, 1)
        assert "--local-data PATH" in error
        assert await daemon.client.jobs() == ()


@pytest.mark.real("processes")
async def test_text_of_ones_own_is_looked_at_before_the_job_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_torch_for_ever(tmp_path, monkeypatch)
    own = tmp_path / "own.txt"
    own.write_text(SENTENCE)
    assert command("init", "--network", "lab", "--data-dir", str(tmp_path / "peer"))[0] == 0
    with daemons([tmp_path / "peer"]) as (daemon,):
        await daemon.start("run", "--listen", "127.0.0.1:0", "--threads", "1", "--local-data", str(own)).answers()
        own.unlink()
        for words in ("no such file or folder: ", "own.txt is too small: 4 bytes"):
            status, _, error = train(daemon, "--data", "local", *TINY)
            assert (status, error.count("\n")) == (2, 1) and words in error
            assert await daemon.client.jobs() == ()
            own.write_text("abc")


@pytest.mark.real("processes")
def test_a_trainer_whose_own_text_cannot_be_read_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_torch_for_ever(tmp_path, monkeypatch)
    assert command("init", "--network", "lab", "--data-dir", str(tmp_path / "peer"))[0] == 0
    arguments = ("run", "--data-dir", str(tmp_path / "peer"), "--listen", "127.0.0.1:0", "--local-data", str(tmp_path / "none"))
    status, _, error = peer(*arguments)
    assert status == 2 and error.startswith("peer: error: no such file or folder: ") and error.count("\n") == 1


ROLES = {"ada": TRAINER, "bea": TRAINER, "cyd": TRAINER, "dan": "voter"}
SECONDS_MAX = 300.0  # for work that takes ten seconds on an idle machine
FAST = ("--set", "local_steps=1", "batch=2")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[list[Daemon]]:
    identities = {name: Identity.generate() for name in ROLES}
    founders = {one.public: Founder(name, (TRAINER,) * (ROLES[name] == TRAINER)) for name, one in identities.items()}
    genesis = Genesis("lab", int(time.time() * 1000), secrets.token_bytes(16), dict(sorted(founders.items())), founding_modules())
    for name, identity in identities.items():
        directory = DataDirectory.create(tmp_path / name)
        directory.write_identity(identity)
        directory.write_genesis(codec.encode(genesis))
    with daemons([tmp_path / name for name in ROLES]) as made:
        yield made


async def start(network: list[Daemon]) -> None:
    bootstrap: list[str] = []
    for daemon, role in zip(network, ROLES.values(), strict=True):
        daemon.start("run", "--listen", "127.0.0.1:0", "--role", role, "--no-evaluate", *bootstrap)
        if not bootstrap:
            bootstrap = ["--bootstrap", (await daemon.answers()).address]


def train_own(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
    return command("train", "--data-dir", str(daemon.directory), *arguments)


async def finished_of(daemon: Daemon, name: str) -> JobView:
    while True:
        for view in await daemon.client.jobs():
            if view.name == name and view.state == "finished":
                return view
        await trio.sleep(0.05)


WRONG = {
    "missing": "tensor 'model.norm.weight' is missing",
    "shape": "has shape [17, 16], but config.json requires [16, 16]",
    "nan": "has a non-finite number",
    "flipped": "is damaged: its SHA-256 is not",
}


def wrong_folders(folder: Path) -> dict[str, Path]:
    values = tensors()
    missing = {name: array for name, array in values.items() if name != "model.norm.weight"}
    shape = values | {"model.layers.0.self_attn.q_proj.weight": np.ones((17, 16), "<f4")}
    nan = values | {"lm_head.weight": np.full((256, 16), np.nan, "<f4")}
    made = {name: written(folder / name, of) for name, of in (("missing", missing), ("shape", shape), ("nan", nan))}
    made["flipped"] = written(folder / "flipped", values, sums=True)
    file = made["flipped"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    return made


@pytest.mark.real("processes")
@pytest.mark.large
async def test_a_model_of_ones_own_is_trained_on_and_a_round_of_it_and_both_audit(network: list[Daemon], tmp_path: Path) -> None:
    first, values = network[0], tensors()
    own = written(tmp_path / "mine", values)
    with patience(SECONDS_MAX):
        await start(network)
        for name, folder in wrong_folders(tmp_path).items():
            status, _, told = train_own(first, "--from", str(folder))
            assert status != 0 and WRONG[name] in told and told.count("\n") == 1 and str(folder) in told
        assert await first.client.jobs() == ()
        assert train_own(first, "--from", str(own), "--name", "own", "--rounds", "2", *FAST)[0] == 0
        await finished_of(first, "own")
        told = train_own(first, "--from", "own@7")[2]
        assert told == "peer: error: --from: job 'own' has no model at round 7: it has trained 2 rounds\n"
        assert train_own(first, "--from", "own@1", "--name", "earlier", "--rounds", "1", *FAST)[0] == 0
        await finished_of(first, "earlier")
        assert train_own(first, "--from", "own@2", "--name", "later", "--rounds", "1", *FAST)[0] == 0
        examples = tmp_path / "examples.jsonl"
        examples.write_text("".join(json.dumps({"prompt": f"{n}: ", "response": "aeiou"}) + "\n" for n in range(40)))
        assert train_own(first, str(examples), "--from", str(own), "--name", "helpful", "--rounds", "1", *FAST)[0] == 0
        await finished_of(first, "helpful")
        assert (await first.client.compare_policy("7: ", 8, 0.0, 0)).round == 1
        jobs = {name: bytes.fromhex((await finished_of(first, name)).job) for name in ("own", "earlier", "later", "helpful")}
        for daemon in network:
            await finished_of(daemon, "helpful")
        export = tmp_path / "export"
        await network[3].client.export_run(str(export))
    verdict = audit_export(export)
    assert set(verdict.models) == {job.hex() for job in jobs.values()}
    own_job = jobs["own"].hex()
    assert verdict.initial_models == {jobs["earlier"].hex(): (own_job, 1)}, "the last round's model is named as such"
    assert all(daemon.terminate() == 0 for daemon in network)
    hosts = [JobModelStore(daemon.directory / "models") for daemon in network]
    for host in hosts:
        assert np.array_equal(host.open_model(jobs["own"], 1).parameters, host.open_model(jobs["earlier"], 0).parameters)
        assert np.array_equal(host.open_model(jobs["own"], 2).parameters, host.open_model(jobs["later"], 0).parameters)
    blobs = {path.read_bytes() for path in (network[3].directory / "blobs").iterdir()}
    model = hosts[3].open_model(jobs["own"], 2)
    names = huggingface_model.llama_tensor_names(model.spec.model)
    imported = b"".join(values[names[tensor.name]].tobytes() for tensor in model.layout.tensors)
    assert imported in blobs
    # The first model of `own` may be deleted by now.
    assert all(host.open_model(jobs["helpful"], 0).parameters.tobytes() == imported for host in hosts)
