"""Answers with line breaks: a tiny model learns them, says them whole, and ends; the exported model names its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from peer import features
from peer.export.model_export import write_model_files as exported
from peer.export.model_provenance import ExportableModel
from protocol import codec
from protocol.sampling import SamplingOptions
from rlhf.data.preference_sets import InstructionExample, PreferencePair
from rlhf.data.tokenized_records import open_examples, tokenize_responses
from rlhf.objectives.supervised_objectives import DpoTerms, InstructTerms
from tests.rlhf.seat import JOB, TRAINER, write
from training.data.tokenizer import ByteTokenizer
from training.engines.engine import Engine
from training.engines.pytorch.backend import BACKEND
from training.job_spec import InnerStatePolicy, JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array
from training.text_generation import StopSequenceDecoder, TextGeneration
from training.transformer import BYTES, BYTES_WITH_END, ModelSpec

MODEL = ModelSpec(vocabulary=BYTES_WITH_END, context=48, width=32, layers=1, heads=2, kv_heads=2, hidden=64)
ANSWERS = {"list": "- one\n- two\n\n- three", "lead": "\n\nSure.\n", "name": "say <|endoftext|>\nnow", "plain": "no more"}
SPEC = JobSpec(
    name="lines",
    objective="instruct",
    data=bytes(32),
    model=MODEL,
    held_out_permille=0,
    local_steps=120,
    batch=8,
    inner_rate=1e-2,
    warmup_rounds=0,
    inner_state=InnerStatePolicy.RESET,
    beta1=0.9,
    objective_settings=codec.encode(InstructTerms(stop_token=BYTES)),
)


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    features.register_features()


@pytest.fixture(scope="module")
def examples() -> list[InstructionExample]:
    return [
        InstructionExample(number.to_bytes(8, "big"), f"{asked}: ", said)
        for number, (asked, said) in enumerate(ANSWERS.items(), 1)
    ]


@pytest.fixture(scope="module")
def learned(examples: list[InstructionExample], tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Float32Array]:
    """An engine, and the parameters after two rounds of one trainer."""
    file = write(tmp_path_factory.mktemp("learned") / "set", examples)
    tokenizer = ByteTokenizer(BYTES_WITH_END)
    parameters = ReplicatedModel.initial(JOB, SPEC).parameters
    engine = BACKEND.open_engine(SPEC, open_examples(SPEC, Path(file), tokenizer), tokenizer, parameters)
    for number in range(2):
        delta, _ = engine.local_steps(parameters, JOB, number, TRAINER)
        parameters = parameters - delta
    return engine, parameters


def said(learned: tuple[Engine, Float32Array], prompt: str, beams: int = 0, stop: tuple[str, ...] = ()) -> str:
    engine, parameters = learned
    how = SamplingOptions(max_tokens=40, temperature=0.0, beams=beams, stop=stop)
    pieces = engine.generate_text(parameters, prompt.encode(), how, stop=SPEC.resolved_objective.stop_token(SPEC))
    text = TextGeneration(pieces, StopSequenceDecoder(stop), 0)
    return "".join(iter(lambda: text.make_slice(0.0) if not text.is_over else None, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ANSWERS)
@pytest.mark.parametrize("beams", [0, 2])
def test_an_answer_comes_out_whole_with_its_line_breaks_and_ends(
    learned: tuple[Engine, Float32Array], prompt: str, beams: int
) -> None:
    assert said(learned, f"{prompt}: ", beams) == ANSWERS[prompt]


def test_a_newline_ends_an_answer_where_somebody_asks(learned: tuple[Engine, Float32Array]) -> None:
    assert said(learned, "list: ", stop=("\n",)) == "- one"


@pytest.mark.parametrize("format", ["transformers", "gguf"])
def test_the_exported_model_says_with_which_token_it_ends(
    learned: tuple[Engine, Float32Array], tmp_path: Path, format: str
) -> None:
    found = ExportableModel("lab", "", JOB, SPEC, 2, bytes(32), learned[1], None, "a test")
    exported(found, tmp_path / "out", format)
    if format == "gguf":
        return
    end = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = [*theirs.encode(ANSWERS["list"]).ids, end]
    assert theirs.decode(ids) == ANSWERS["list"], "a program that reads the files shows no end either"
    tokens = tokenize_responses(SPEC, [InstructionExample(b"1", "list: ", ANSWERS["list"])], ByteTokenizer(BYTES_WITH_END)).train
    assert tokens[-len(ids) :].tolist() == ids, "the files' tokens are those that the model has learned"


@pytest.mark.parametrize("terms", [InstructTerms(stop_token=BYTES), DpoTerms(stop_token=BYTES)])
def test_every_response_ends_with_the_token_and_none_holds_it(terms: InstructTerms | DpoTerms) -> None:
    is_pair = isinstance(terms, DpoTerms)
    spec = replace(SPEC, objective="dpo" if is_pair else "instruct", objective_settings=codec.encode(terms))
    texts = ("a\n", "<|endoftext|>")
    records = (
        [PreferencePair(b"1", "q", *texts, 1000)]
        if is_pair
        else [InstructionExample(bytes([n]), "q", text) for n, text in enumerate(texts)]
    )
    found = tokenize_responses(spec, records, ByteTokenizer(BYTES_WITH_END))  # type: ignore[type-var]
    made = np.split(found.train, found.train_split.starts[1:-1])
    assert [bytes(text[:-1].tolist()) for text in made] == [f"q{text}".encode() for text in texts]
    assert [int(text[-1]) for text in made] == [BYTES, BYTES]
