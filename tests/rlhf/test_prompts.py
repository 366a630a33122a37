"""Prompts of a set, and answers: batching does not change an answer, and line breaks and ends of text are kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from ledger.jobs import ModelReference
from peer.export.model_export import write_model_files as exported
from peer.export.model_provenance import ExportableModel
from peer.worker.main import WorkerRequestHandler
from protocol import codec
from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from protocol.verdicts import Verdict, verdict_label
from rlhf.data import tokenized_records
from rlhf.data.preference_sets import InstructionExample, PreferencePair, encode_records, split_held_out
from rlhf.data.tokenized_records import open_examples, tokenize_responses
from rlhf.moderation import blocklist
from rlhf.moderation.blocklist import Blocklist
from rlhf.moderation.word_matcher import parse_word_list
from rlhf.objectives import rollouts
from rlhf.objectives.ppo import MODEL_REWARD, PPO, VALUE_HEAD, PpoSettings, PromptSourceKind, RolloutDeclaration
from rlhf.objectives.rollouts import PreferenceSetPrompts, RolloutId, TokenIds, draw_prompts
from rlhf.objectives.supervised_objectives import DpoTerms, InstructTerms
from rlhf.pytorch import rollout_passes
from tests.rlhf.seat import whole, write
from training import worker_protocol
from training.data.tokenizer import ByteTokenizer
from training.engines.engine import Engine
from training.engines.pytorch.backend import BACKEND
from training.engines.pytorch.model import GPT
from training.engines.request_handlers import WorkerContext
from training.job_spec import AuditMode, InnerStatePolicy, JobSpec
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array, initial_parameters
from training.text_generation import StopSequenceDecoder, TextGeneration
from training.transformer import BYTES, BYTES_WITH_END, ModelSpec

JOB, READ, TRAINER = bytes([1]) * 32, bytes([3]) * 32, bytes([2]) * 32
PLACE = RolloutId(JOB, 0, TRAINER)
TINY = ModelSpec(context=32, width=16, layers=2, hidden=16)
REWARD = JobSpec(
    name="reward", objective="reward", model=TINY, data=bytes(32), rounds=1, held_out_permille=300, audit=AuditMode.FULL
)
OWN = PpoSettings(
    reward=MODEL_REWARD,
    reward_model=ModelReference(READ, 1, bytes(32)),
    prompts=PromptSourceKind.SET,
    prompt_tokens=12,
    response_tokens=6,
    epochs=2,
)
SPEC = replace(REWARD, name="ppo", objective="ppo", data=None, objective_settings=codec.encode(OWN), local_steps=4, batch=8)


def some_pairs() -> list[PreferencePair]:
    """Return two pairs for each prompt length of 1 to 20 bytes, and one pair without a prompt."""
    texts = ["", *("abcdefghijklmnopqrst"[:length] for length in range(1, 21) for _ in range(2))]
    return [PreferencePair(number.to_bytes(8, "big"), text, "yes", "no", 1000) for number, text in enumerate(texts, start=1)]


def test_prompts_are_those_of_the_pairs_that_are_trained_on_each_once_and_their_ends() -> None:
    trained = dict.fromkeys(pair.prompt for pair in split_held_out(some_pairs(), 300)[0] if pair.prompt)
    source = PreferenceSetPrompts(tokenized_records.tokenize_pairs(REWARD, some_pairs(), ByteTokenizer()), 12)
    assert 1 < len(trained) < 20, "some are held out"
    assert [bytes(source.prompt_at(number)).decode() for number in range(len(source))] == list(trained)
    asked = draw_prompts(PLACE, 1_000, source)
    assert {bytes(prompt.astype(np.uint8)).decode() for prompt in asked} == {text[-12:] for text in trained}
    other = draw_prompts(PLACE._replace(trainer=bytes(32)), 1_000, source)
    assert [prompt.tolist() for prompt in asked] != [prompt.tolist() for prompt in other]


def asked_and_noise() -> tuple[list[TokenIds], rollout_passes.Noise]:
    asked = [np.arange(97, 97 + length) for length in (5, 12, 1, 5, 7)]
    return asked, partial(rollouts.gumbel_noise, PLACE, vocabulary=TINY.vocabulary)


def model() -> GPT:
    made = GPT(SPEC)
    with torch.no_grad():
        made.parameters.copy_(torch.from_numpy(initial_parameters(SPEC)))
    return made


def test_each_prompt_is_answered_as_if_it_were_alone() -> None:
    """Plant: shorter prompts are padded. The model then sees the padding, and gives another answer."""
    asked, noise = asked_and_noise()
    bounds = PPO.rollout_limits(SPEC, OWN)
    found = rollout_passes.sample_responses(model(), asked, noise, bounds, lambda: None)
    alone = [
        rollout_passes.sample_responses(
            model(), [prompt], lambda tokens, row=row: noise((row, t) for _, t in tokens), bounds, lambda: None
        )[0]
        for row, prompt in enumerate(asked)
    ]
    padded = [np.pad(prompt, (12 - len(prompt), 0)) for prompt in asked]
    assert found == alone != rollout_passes.sample_responses(model(), padded, noise, bounds, lambda: None)


def test_a_pass_finds_of_each_response_what_a_pass_over_it_alone_finds() -> None:
    asked, noise = asked_and_noise()
    responses = rollout_passes.sample_responses(model(), asked, noise, PPO.rollout_limits(SPEC, OWN), lambda: None)
    lengths = [len(response) for response in responses]
    whole = [np.concatenate(row) for row in zip(asked, responses, strict=True)]

    def over(rows: list[int], pad: int) -> rollout_passes.ForwardPassResult:
        x = torch.from_numpy(np.stack([np.pad(whole[row], (0, 18 - len(whole[row])), constant_values=pad) for row in rows]))
        tokens = torch.from_numpy(np.stack([np.pad(responses[row], (0, 6 - lengths[row])) for row in rows]))
        begin = torch.tensor([len(asked[row]) for row in rows])
        of = lambda tokens: noise((rows[row], t) for row, t in tokens)  # noqa: E731
        return rollout_passes.forward_pass(
            model(), x[:, :-1], tokens, [lengths[row] for row in rows], VALUE_HEAD, lambda: None, of, begin
        )

    together = over(list(range(len(asked))), 0)
    assert together.excess_BT is not None
    for row, length in enumerate(lengths):
        assert torch.allclose(together.logp_BT[row, :length], over([row], 255).logp_BT[0, :length], atol=1e-5)
        assert (together.excess_BT[row, :length] <= 1e-4).all()


@dataclass
class World:
    """A trainer's round, and its auditors."""

    folder: Path
    words: str = ""

    def __post_init__(self) -> None:
        (self.folder / "set").write_bytes(b"".join(encode_records(some_pairs())))
        (self.folder / "words").write_text(self.words)
        read = ReplicatedModel.initial(READ, REWARD)
        read.save(self.folder / "read")
        digest = hashlib.sha256(self.words.encode()).digest() if self.words else None
        self.spec = replace(
            SPEC, objective_settings=codec.encode(replace(OWN, reward_model=ModelReference(READ, 1, read.root), blocklist=digest))
        ).validated()
        ReplicatedModel.initial(JOB, self.spec).save(self.folder / "model")

    def worker(self, text: str = "set", named: bytes | None = None, words: str = "words") -> WorkerRequestHandler:
        jobs = WorkerRequestHandler(WorkerContext(BACKEND, lambda: None, 1 << 30))
        other = {"required_model": str(self.folder / "read"), "other_text": str(self.folder / text), "other_tokens": named}
        files = dict.fromkeys(PPO.required_files(self.spec), str(self.folder / words))
        jobs.handle_request(worker_protocol.OpenJobRequest(JOB, self.spec.encode(), None, None, **other, files=files))
        return jobs

    def propose(self, jobs: WorkerRequestHandler) -> worker_protocol.ProposeReply:
        out = {"buffer_out": str(self.folder / "m"), "declared_out": str(self.folder / "declared")}
        done = jobs.handle_request(worker_protocol.ProposeRequest(JOB, 0, TRAINER, str(self.folder / "model"), None, None, **out))
        assert isinstance(done, worker_protocol.ProposeReply)
        (self.folder / "m.payload").rename(self.folder / "payload")
        return done

    def audited(self, jobs: WorkerRequestHandler, done: worker_protocol.ProposeReply) -> worker_protocol.AuditReply:
        declared = {bytes.fromhex(file.name): str(file) for file in (self.folder / "declared").iterdir()}
        files = (str(self.folder / "payload"), str(self.folder / "m"), None, None)
        said = worker_protocol.DeclarationFiles(done.declaration, declared)
        found = jobs.handle_request(
            worker_protocol.AuditRequest(JOB, 0, TRAINER, str(self.folder / "model"), *files, declared=said)
        )
        assert isinstance(found, worker_protocol.AuditReply)
        return found


def test_auditors_find_the_same_prompts_and_whoever_answers_others_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    done = world.propose(world.worker())
    found = world.audited(world.worker(), done)
    assert (found.verdict, found.relative_error) == (Verdict.ACCEPT, 0)
    (tmp_path / "others").write_bytes(
        b"".join(encode_records([replace(pair, prompt=pair.prompt.upper()) for pair in some_pairs()]))
    )
    said = world.propose(world.worker("others"))
    assert codec.decode(RolloutDeclaration, said.declaration).blob != codec.decode(RolloutDeclaration, done.declaration).blob
    assert verdict_label(world.audited(world.worker(), said).verdict, PPO.reason_labels) == "rollout"


def test_the_set_of_a_reward_model_has_the_tokens_that_were_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(Exception, match="other tokens"):
        world.worker(named=hashlib.sha256(b"others").digest())


@pytest.mark.parametrize(
    ("own", "other", "why"),
    [
        ({"reward": "rule:vowels", "reward_model": None}, {}, "prompts 'set' needs a reward model, whose pairs have the prompts"),
        ({}, {"data": bytes(32)}, "its prompts come from a preference set: leave data out"),
    ],
)
def test_a_job_whose_prompts_cannot_be_is_told_why(own: dict[str, object], other: dict[str, object], why: str) -> None:
    assert why in (replace(SPEC, objective_settings=codec.encode(replace(OWN, **own)), **other).problem() or "")


# Words --------------------------------------------------------------------------------------------------------------------


def test_no_prompt_has_a_listed_word_neither_whole_nor_as_it_is_taken() -> None:
    source = PreferenceSetPrompts(tokenized_records.tokenize_pairs(REWARD, some_pairs(), ByteTokenizer()), 12)
    texts = {bytes(source.prompt_at(number)).decode() for number in range(len(source))}

    def asked(*blocked: str) -> set[str]:
        found = draw_prompts(PLACE, 1_000, source, lambda tokens: bytes(tokens.tolist()).decode() in blocked)
        return {bytes(prompt.tolist()).decode() for prompt in found}

    longest = max(texts, key=len)
    assert asked() == {text[-12:] for text in texts}
    assert asked(longest) == asked(longest[-12:]) == {text[-12:] for text in texts - {longest}}
    assert asked(*texts) == {"\0"}, "where all are blocked, nothing is asked"


EVERYTHING = "\n".join(sorted(f"{letter}*" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"))


def test_a_response_with_a_listed_word_has_the_lowest_score_and_is_not_shown(tmp_path: Path) -> None:
    world = World(tmp_path, EVERYTHING)
    worker = world.worker()
    said = codec.decode(RolloutDeclaration, world.propose(worker).declaration)
    assert said.score <= -10 * OWN.score_clip * 1e6, "of 16 bytes that a model without training says, most hold a letter"
    asked = worker_protocol.GenerateRequest(JOB, str(tmp_path / "model"), "abc", SamplingOptions(max_tokens=5, temperature=1.0))
    assert whole(worker, asked) == worker_protocol.GenerateReply("", is_over=True, is_withheld=True)
    shown = whole(World(tmp_path).worker(), asked)
    assert shown.text and not shown.is_withheld


def test_whoever_leaves_the_list_out_is_named(tmp_path: Path) -> None:
    world = World(tmp_path, EVERYTHING)
    assert world.audited(world.worker(), world.propose(world.worker())).verdict is Verdict.ACCEPT
    (tmp_path / "other").write_text("zzz")
    assert (
        verdict_label(world.audited(world.worker(), world.propose(world.worker(words="other"))).verdict, PPO.reason_labels)
        == "rollout"
    ), "it answered what was not asked"


def test_a_word_is_not_divided_between_prompt_and_response() -> None:
    known = Blocklist(b"scum")
    assert known.blocks_response(b"this sc", b"um here") and known.blocks_response(b"x", b"scum")
    assert not known.blocks_text(b"um here") and not known.blocks_response(b"this ", b"classic")


@pytest.mark.parametrize("wrong", [b"", b"b\na", b"a\na", b"a\n", b" a", b"# a\nb", b"\xff", b"a b", b"a" * 65])
def test_other_bytes_are_no_list(wrong: bytes) -> None:
    packed = blocklist.pack_entries(("a1", "b*"))
    assert Blocklist(packed) and parse_word_list("", packed) == ("a1", "b*")
    with pytest.raises(UserError):
        Blocklist(wrong)


def test_the_toy_has_no_words() -> None:
    own = PpoSettings(reward="rule:bigram", prompt_tokens=1, response_tokens=5, stop_token=None, blocklist=bytes(32))
    spec = replace(SPEC, model=replace(TINY, vocabulary=6), objective_settings=codec.encode(own))
    assert "a vocabulary of 6 tokens generates no text" in (spec.problem() or "")


MODEL = ModelSpec(vocabulary=BYTES_WITH_END, context=48, width=32, layers=1, heads=2, kv_heads=2, hidden=64)
ANSWERS = {"list": "- one\n- two\n\n- three", "lead": "\n\nSure.\n", "name": "say <|endoftext|>\nnow", "plain": "no more"}
LINES = JobSpec(
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


@pytest.fixture(scope="module")
def examples() -> list[InstructionExample]:
    return [
        InstructionExample(number.to_bytes(8, "big"), f"{asked}: ", said)
        for number, (asked, said) in enumerate(ANSWERS.items(), 1)
    ]


@pytest.fixture(scope="module")
def learned(examples: list[InstructionExample], tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Float32Array]:
    """Return an engine, and the parameters after two rounds of one trainer."""
    file = write(tmp_path_factory.mktemp("learned") / "set", examples)
    tokenizer = ByteTokenizer(BYTES_WITH_END)
    parameters = ReplicatedModel.initial(JOB, LINES).parameters
    engine = BACKEND.open_engine(LINES, open_examples(LINES, Path(file), tokenizer), tokenizer, parameters)
    for number in range(2):
        delta, _ = engine.local_steps(parameters, JOB, number, TRAINER)
        parameters = parameters - delta
    return engine, parameters


def said(learned: tuple[Engine, Float32Array], prompt: str, beams: int = 0, stop: tuple[str, ...] = ()) -> str:
    engine, parameters = learned
    how = SamplingOptions(max_tokens=40, temperature=0.0, beams=beams, stop=stop)
    text = TextGeneration(
        engine.generate_text(parameters, prompt.encode(), how, stop=LINES.resolved_objective.stop_token(LINES)),
        StopSequenceDecoder(stop),
        0,
    )
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
    exported(ExportableModel("lab", "", JOB, LINES, 2, bytes(32), learned[1], None, "a test"), tmp_path / "out", format)
    if format == "gguf":
        return
    end = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = [*theirs.encode(ANSWERS["list"]).ids, end]
    assert theirs.decode(ids) == ANSWERS["list"], "a program that reads the files shows no end either"
    tokens = tokenize_responses(LINES, [InstructionExample(b"1", "list: ", ANSWERS["list"])], ByteTokenizer(BYTES_WITH_END)).train
    assert tokens[-len(ids) :].tolist() == ids, "the files' tokens are those that the model has learned"


@pytest.mark.parametrize("terms", [InstructTerms(stop_token=BYTES), DpoTerms(stop_token=BYTES)])
def test_every_response_ends_with_the_token_and_none_holds_it(terms: InstructTerms | DpoTerms) -> None:
    is_pair = isinstance(terms, DpoTerms)
    spec = replace(LINES, objective="dpo" if is_pair else "instruct", objective_settings=codec.encode(terms))
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
