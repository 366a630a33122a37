"""A model as files for other programs: from a peer's disk, from a data directory at rest, from an export with its start."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ledger.jobs import AttestStartModel
from peer import features
from peer.export import model_provenance as finding
from peer.export.export_replay import audit_export
from peer.export.model_export import TRANSFORMERS, export_model, model_card, write_model_files
from peer.export.model_provenance import ExportableModel, model_from_state
from peer.export.run_export import export_run, initial_model_digests, payload_path
from peer.settings.data_directory import DataDirectory
from protocol import codec
from protocol.errors import UserError
from rlhf.objectives.ppo import PpoSettings
from tests.peer.chain import LANGUAGE, Chain
from training.data.tokenizer import load_vocabulary, train_bpe
from training.formats import huggingface_model
from training.formats.huggingface_model import llama_tensor_names
from training.job_spec import JobSpec
from training.replicated.tensor_layout import layout_of
from training.transformer import ModelSpec

SMALL = ModelSpec(context=8, width=8, layers=1, heads=2, kv_heads=1, hidden=8)
BYTES = JobSpec(name="bytes", data=bytes(32), model=SMALL, rounds=2, byzantine_max=0)
FIGURES = {"held_out_bits_per_byte": 2.5, "seconds": 7.25}  # of the model, and of the round that begins with it


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """Return a chain with a job of bytes and two rounds, and a job with a BPE and one round. `test` trains nothing."""
    made = Chain(tmp_path_factory.mktemp("chain"))
    first = made.start(BYTES)
    made.play(first, rejected=1)
    made.play(first)
    bpe = made.blobs.add_bytes(train_bpe([b"one two three, one two three\n" * 9], 260))
    second = made.start(
        replace(BYTES, name="bpe", tokenizer=bpe, rounds=1, licence="CC-BY-4.0", model=replace(SMALL, vocabulary=260))
    )
    made.play(second)
    made.play(made.start(JobSpec(name="test", objective="scratch", rounds=1, byzantine_max=0)))
    made.settle()
    made.store.save_measurements(first, 2, FIGURES)
    yield made
    made.close()


def of_chain(chain: Chain, text: str = "") -> ExportableModel:
    def read(digest: bytes) -> bytes:
        return chain.blobs.read_blob(digest, 1 << 20)

    return model_from_state(chain.ledger.state, chain.genesis, chain.store, chain.host, read, text)


BYTE_VOCABULARY = load_vocabulary(None, 256)
MEASURED = {
    "held_out_accuracy": 136 / 192,
    "held_out_pairs": 96.0,
    "calibration_error": 0.05,
    "word_count_accuracy": 0.6875,
    "identical_pairs": 3.0,
    "contradictory_pairs": 2.0,
    "evaluation_seconds": 1.5,
}


def test_the_card_of_a_reward_model_says_of_how_many_pairs_its_accuracy_is(chain: Chain) -> None:
    found = of_chain(chain, "bytes")
    found = replace(found, spec=replace(found.spec, objective="reward"), figures=MEASURED)
    told = model_card(found, BYTE_VOCABULARY, TRANSFORMERS, ())
    assert "| held out | accuracy 0.71 of 96 pairs, interval 0.61–0.79, calibration error 0.05 |" in told
    assert "| word-count model | 0.69 of the same pairs |" in told
    assert "| odd pairs | 3 of identical responses, 2 that contradict one another |" in told
    warned = model_card(replace(found, figures=MEASURED | {"word_count_accuracy": 0.945}), BYTE_VOCABULARY, TRANSFORMERS, ())
    assert "| word-count model | 0.94 of the same pairs: more than this model, which is worse than counting words |" in warned
    plain = model_card(replace(found, figures=FIGURES), BYTE_VOCABULARY, TRANSFORMERS, ())
    assert "word-count" not in plain and "odd pairs" not in plain


def test_the_latest_model_of_text_is_written_with_tokenizer_and_card(chain: Chain, tmp_path: Path) -> None:
    view = write_model_files(of_chain(chain), tmp_path / "out", "transformers")
    names = [
        "README.md",
        "SHA256SUMS",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert (view.name, view.round, view.files, view.omitted_tensors) == ("bpe", 1, 7, ())
    card = (tmp_path / "out" / "README.md").read_text()
    for said in (
        view.job,
        view.model_root,
        'license: "CC-BY-4.0"',
        "1 of 1",
        "full: k voters re-executed each update before the vote and signed for it",
        bytes(32).hex(),
        "4 accepted, 0 rejected, 0 absent",
    ):
        assert said in card, said


def test_the_card_tells_absent_trainers_from_rejected_updates(chain: Chain) -> None:
    found = of_chain(chain, "bytes")
    assert (found.rejected, found.absent) == (1, 0)
    state = chain.ledger.state
    job = replace(state.jobs.jobs[found.job], rejected={bytes(32): {"absent": 3, "replay": 1}, bytes([1]) * 32: {"absent": 2}})
    modules = state.modules | {"jobs": replace(state.jobs, jobs=state.jobs.jobs | {found.job: job})}
    told = model_from_state(replace(state, modules=modules), chain.genesis, chain.store, chain.host, lambda digest: b"", "bytes")
    assert f"| {told.accepted} accepted, 1 rejected, 5 absent |" in model_card(told, BYTE_VOCABULARY, TRANSFORMERS, ())


def test_the_tensors_are_those_of_the_decided_model_bit_for_bit(chain: Chain, tmp_path: Path) -> None:
    found = of_chain(chain, "bytes")
    write_model_files(found, tmp_path / "out", "transformers")
    ours = layout_of(found.spec).tensor_views(chain.host.open_model(found.job, 2).parameters)
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    names = llama_tensor_names(found.spec.model)
    assert {names[name] for name in ours} == set(theirs)
    assert all(np.array_equal(values, theirs[names[name]]) for name, values in ours.items())
    assert "| held out | bits per byte 2.5 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_what_was_taken_comes_in_again_with_the_same_bytes(chain: Chain, tmp_path: Path, name: str) -> None:
    found, folder, stream = of_chain(chain, name), tmp_path / "out", io.BytesIO()
    write_model_files(found, folder, "transformers")
    own = huggingface_model.open_huggingface_model(folder)
    own.write_parameters(found.spec, stream)
    assert own.model == found.spec.model and stream.getvalue() == found.parameters.tobytes()
    assert (own.tokenizer is None) == (found.tokenizer is None)
    if own.tokenizer is not None and found.tokenizer is not None:
        assert load_vocabulary(own.tokenizer, own.model.vocabulary) == load_vocabulary(found.tokenizer, own.model.vocabulary)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match="is damaged: its SHA-256"):
        huggingface_model.open_huggingface_model(folder)


def test_a_round_that_is_kept_is_taken_and_another_one_is_told_with_those_that_are(chain: Chain) -> None:
    assert of_chain(chain, "bytes@1").root != of_chain(chain, "bytes@2").root
    with pytest.raises(UserError, match=r"does not have the model of job 'bytes' at round 7: it has @0, @1, @2$"):
        of_chain(chain, "bytes@7")


def test_a_model_that_is_not_the_decided_one_is_not_taken(chain: Chain, tmp_path: Path) -> None:
    last = chain.host.round_directory(of_chain(chain, "bytes").job, 2)
    last.rename(tmp_path / "last")
    last.symlink_to(last.with_name("00000001"))
    try:
        with pytest.raises(UserError, match="a model that differs from the decided one"):
            of_chain(chain, "bytes")
    finally:
        last.unlink()
        (tmp_path / "last").rename(last)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("nix", "matches no jobs"), ("bytes@", "JOB@ROUND"), ("bytes@x", "JOB@ROUND"), ("test", "trains no model")],
)
def test_what_names_no_model_is_told_in_one_line(chain: Chain, tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        write_model_files(of_chain(chain, text), tmp_path / "out", "transformers")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_stays_as_it_is(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        write_model_files(of_chain(chain), tmp_path, "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_an_empty_folder_is_filled_and_nothing_is_left_beside_it(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_model_files(of_chain(chain), tmp_path / "out", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "SHA256SUMS", "model.gguf"]


def test_a_data_directory_at_rest_gives_the_same_files(chain: Chain, tmp_path: Path) -> None:
    directory = DataDirectory.create(tmp_path / "peer")
    directory.write_genesis(codec.encode(chain.genesis))
    folder = chain.store.path.parent
    for file in folder.glob("ledger.db*"):
        (directory.path / file.name.replace("ledger.db", directory.ledger.name)).write_bytes(file.read_bytes())
    for name in ("models", "blobs"):
        (directory.path / name).rmdir()
        (directory.path / name).symlink_to(folder / name)
    export_model(finding.model_from_data_directory, directory.path, "bpe@1", tmp_path / "rest", "transformers")
    write_model_files(of_chain(chain, "bpe"), tmp_path / "live", "transformers")
    for file in (tmp_path / "live").iterdir():
        assert (tmp_path / "rest" / file.name).read_bytes() == file.read_bytes()


def test_an_export_gives_the_same_model_and_its_tokenizer_is_checked(chain: Chain, tmp_path: Path) -> None:
    export_run(chain.store, chain.blobs, chain.host, chain.genesis, tmp_path / "run")
    audit_export(tmp_path / "run")
    export_model(finding.model_from_export, tmp_path / "run", "bpe", tmp_path / "exported", "transformers")
    write_model_files(of_chain(chain, "bpe"), tmp_path / "live", "transformers")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "live" / name).read_bytes()
    with pytest.raises(UserError, match="at round 0 is not in the export, which has @1"):
        finding.model_from_export(tmp_path / "run", "bpe@0")
    (tokenizer,) = (tmp_path / "run" / "tokenizers").iterdir()
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"tokenizers/{tokenizer.name}"):
        audit_export(tmp_path / "run")


def tuned(objective: str, **more: object) -> ExportableModel:
    """Return a model of an objective that adds vectors."""
    spec = replace(BYTES, name="tuned", objective=objective, **more)  # type: ignore[arg-type]
    size = layout_of(spec).size
    return ExportableModel(
        "lab",
        "c" * 64,
        bytes(32),
        spec,
        3,
        bytes(32),
        np.arange(size, dtype=np.float32) / size,
        None,
        "a test",
        accepted=0,
        rejected=0,
        absent=0,
    )


def test_vectors_of_the_objective_are_left_out_and_the_card_says_so(tmp_path: Path) -> None:
    terms = PpoSettings(reward="rule:vowels", prompt_tokens=2, response_tokens=4)
    view = write_model_files(tuned("ppo", data=None, objective_settings=codec.encode(terms)), tmp_path / "out", "transformers")
    assert view.omitted_tensors == ("heads.value", "heads.first")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "left out | heads.value, heads.first" in card and "other logits than the job's model" in card
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == terms.stop_token
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "heads" in name]


def test_a_reward_model_gives_scores_in_transformers_and_has_no_place_in_gguf(tmp_path: Path) -> None:
    found = tuned("reward")
    with pytest.raises(UserError, match="produces scores, which format 'gguf' cannot store"):
        write_model_files(found, tmp_path / "out", "gguf")
    write_model_files(found, tmp_path / "out", "transformers")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["LlamaForSequenceClassification"], 1)
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["score.weight"][0], found.parameters[-SMALL.width :])


def test_tokens_that_stand_for_no_text_are_told(tmp_path: Path) -> None:
    terms = PpoSettings(reward="rule:bigram", prompt_tokens=1, response_tokens=4, stop_token=None)
    found = tuned("ppo", data=None, objective_settings=codec.encode(terms), model=replace(SMALL, vocabulary=6))
    with pytest.raises(UserError, match="job 'tuned' has 6 tokens without texts"):
        write_model_files(found, tmp_path / "out", "transformers")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def based(tmp_path: Path) -> Iterator[Chain]:
    made = Chain(tmp_path / "chain")
    yield made
    made.close()


def started(based: Chain, seed: int) -> tuple[bytes, bytes]:
    """Start a job that waits. Return its id and the digest of its initial model."""
    start = based.blobs.add_bytes(np.random.default_rng(seed).normal(size=layout_of(LANGUAGE).size).astype("<f4").tobytes())
    return based.start(replace(LANGUAGE, name=f"own {seed}", initial_model=start)), start


def exported(based: Chain, folder: Path) -> Path:
    export_run(based.store, based.blobs, based.host, based.genesis, folder)
    return folder


def test_the_first_root_is_computed_again_from_the_blob_and_another_byte_is_named(based: Chain, tmp_path: Path) -> None:
    key, start = started(based, 1)
    never, absent = started(based, 2)
    based.blobs.delete_blob(absent)
    for person in based.people[:3]:
        based.say(person, "job/attest-start-model", AttestStartModel(key))
    based.play(key)
    based.play(key)
    based.settle()
    folder = exported(based, tmp_path / "run")
    verdict = audit_export(folder)
    assert verdict.models.keys() == {key.hex()} and never in {waiting.job for waiting in based.ledger.state.jobs.queue}
    file = folder / payload_path(start)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{start.hex()}: its bytes do not have the digest"):
        audit_export(folder)
    file.unlink()
    with pytest.raises(UserError, match=f"{start.hex()}: it is missing"):
        audit_export(folder)


def test_what_a_waiting_job_starts_from_is_exported_if_it_is_here(based: Chain, tmp_path: Path) -> None:
    _, start = started(based, 3)
    based.settle()
    folder = exported(based, tmp_path / "run")
    assert (folder / payload_path(start)).is_file() and audit_export(folder).models == {}
    decided = based.store.get_decision(1)
    assert decided is not None and initial_model_digests(decided.decode().body) == {start: 4 * layout_of(LANGUAGE).size}
