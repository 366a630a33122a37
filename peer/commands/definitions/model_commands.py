"""Commands about trained models and decided blocks: text, chat, model files, exports, proofs of rows."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Final

from features.command_arguments import JSON, Argument, parse_integer_in, parse_non_negative
from features.commands import CommandContext, command, listing_command
from features.text_tables import TextChunk, Verbatim
from protocol.api import NEWEST, ModelFilesView, PeerApi, SampleView
from protocol.errors import NotRunningError, UserError
from protocol.sampling import (
    BEAMS_MAX,
    STOP_CHARACTERS_MAX,
    STOPS_MAX,
    TOKENS_MAX,
    TOP_K_MAX,
    TURNS_MAX,
    WITHHELD_TEXT,
    Activations,
    SamplingOptions,
)
from protocol.units import display_round_number

TOPIC = "Models and text"

EVALUATED_TOKENS = 65_536  # tokens of an evaluation: some seconds of compute with the default model
# Names as in `peer.export.model_export`, whose import is slow.
MODEL_FORMATS = ("transformers", "packed", "gguf", "gguf-f32")

TEMPERATURE_DEFAULT: Final = 0.8
ESCAPED: Final = {"n": "\n", "t": "\t", "\\": "\\"}
TEMPLATE_SLOT: Final = "{}"  # marks the place of the user's text in a template
CHAT_PROMPT: Final = "you> "
CHAT_CHARACTERS_MAX: Final = 64 << 10  # characters of earlier turns in a prompt: few models have room for more
BLOCKLIST_NOTICE: Final = "this job has a blocklist, so a text is shown after the check of the whole text"

HEX = "0x"


def _text(typed: str) -> str:
    r"""Return the text with `\n`, `\t` and `\\` unescaped (a type for argparse)."""
    text = re.sub(r"\\([nt\\])", lambda found: ESCAPED[found[1]], typed)
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    if len(text) > STOP_CHARACTERS_MAX:
        raise argparse.ArgumentTypeError(f"the text has {len(text)} characters; at most {STOP_CHARACTERS_MAX} are allowed")
    return text


def _probability(text: str) -> float:
    """Return a probability above 0 and at most 1 (a type for argparse)."""
    value = parse_non_negative(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability above 0 and at most 1")
    return value


JOB = Argument(
    "--job",
    default="",
    metavar="JOB[@ROUND]",
    help="Job by name or id, and its number of rounds (default the newest final model of the last job)",
)
NEWEST_MODEL = Argument("--newest", action="store_true", help="Take the newest model, although audits may still undo it")
TOKENS = Argument(
    "--tokens", type=parse_integer_in(1, TOKENS_MAX), default=200, metavar="N", help="Largest number of tokens (default 200)"
)
TEMPERATURE = Argument(
    "--temperature", type=parse_non_negative, metavar="T", help="Divisor of logits; 0 takes the likeliest token (default 0.8)"
)
TOP_K = Argument(
    "--top-k",
    type=parse_integer_in(0, TOP_K_MAX),
    default=0,
    metavar="K",
    help="Number of likeliest tokens to draw from, or 0 for all (default 0)",
)
TOP_P = Argument(
    "--top-p", type=_probability, default=1.0, metavar="P", help="Probability of the likeliest tokens to draw from (default 1.0)"
)
STOP = Argument(
    "--stop",
    type=_text,
    action="append",
    default=[],
    metavar="TEXT",
    help=rf"Text that ends the output; up to {STOPS_MAX} times; \n, \t and \\ are escapes",
)
SEED = Argument("--seed", type=parse_integer_in(0), default=0, metavar="S", help="Seed of the choice of tokens (default 0)")
QUANTISE = Argument(
    "--quantise",
    choices=(Activations.INT8.value,),
    default=Activations.FLOAT32.value,
    metavar="int8",
    help="Activations of eight bits, for models with ternary matrices (default float32)",
)
SAMPLING_ARGUMENTS = (JOB, NEWEST_MODEL, TOKENS, TEMPERATURE, TOP_K, TOP_P, STOP, SEED, QUANTISE)


def model_argument(options: argparse.Namespace) -> str:
    """Return the argument that names a job's model in a call."""
    return options.job + NEWEST * options.newest


def describe_final_round(round: int, newer: int, way: str = "--newest") -> str:
    """Return a note that the model of round `newer` is not final.

    `way` is the command's argument that chooses this newer model.
    """
    return f"used the newest final model, of round {round}; {way} uses the model of round {newer}, which audits may undo"


def _sampling(options: argparse.Namespace, beams: int = 0) -> SamplingOptions:
    """Return the sampling options of a command. Raises `UserError` if they are invalid."""
    if len(options.stop) > STOPS_MAX:
        raise UserError(f"--stop is given {len(options.stop)} times: at most {STOPS_MAX} are allowed")
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if beams else TEMPERATURE_DEFAULT
    drawn = options.tokens, temperature, options.top_k, options.top_p, tuple(options.stop), options.seed, beams
    return SamplingOptions(*drawn, activations=Activations(options.quantise)).validated()


@command(
    "Generate text with a model",
    Argument("prompt", metavar="PROMPT", help="Beginning of the text"),
    *SAMPLING_ARGUMENTS,
    Argument("--stream", action="store_true", help="Print the text while it is generated, as the prompt `peer>` always does"),
    Argument(
        "--beams",
        type=parse_integer_in(1, BEAMS_MAX),
        default=0,
        metavar="B",
        help=f"Number of beams of a beam search, 1 to {BEAMS_MAX} (default no search)",
    ),
    description="""
        It needs a peer with a worker, and also works while the job trains. `--temperature` applies first, then `--top-k`, then
        `--top-p`. The same seed draws the same text on the same machine with the same number of threads. A beam search draws
        nothing and returns the text with the largest mean log-probability per token; it excludes `--stream`, `--top-k`,
        `--top-p` and a temperature. The text of a tuned model ends at its stop token.

            peer sample "The import statement " --tokens 60 --temperature 0.7 --stop "\\n"
            peer sample "The import statement " --job base@16 --temperature 0

        A text of a job with a blocklist is shown after the check of the whole text, or withheld. Ctrl-C ends the text. A peer
        generates four texts at once, and training goes first.
        """,
)
async def sample(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    how = _sampling(options, options.beams)
    if options.stream and how.beams:
        raise UserError(f"--stream cannot be combined with --beams {how.beams}, which has no text before its end: leave one out")
    if asked.is_at_prompt:
        await asked.user.run_interruptible(partial(_stream, asked, options.prompt, how))
    elif options.stream:
        await _stream(asked, options.prompt, how)
    else:
        async with aclosing(asked.api.sample_text(options.prompt, how, model_argument(options))) as pieces:
            made = [piece async for piece in pieces]
        if made and made[0].newer_round:
            asked.show(describe_final_round(made[0].round, made[0].newer_round))
        asked.show(Verbatim("".join(piece.text for piece in made)) if not made or not made[-1].is_withheld else WITHHELD_TEXT)


async def _stream(
    asked: CommandContext[PeerApi],
    prompt: str,
    how: SamplingOptions,
    turns: tuple[str, ...] | None = None,
    said: list[str] | None = None,
) -> None:
    """Generate a text and show it piece by piece. The shown pieces are appended to `said`; a withheld text has none."""
    is_shown = False
    try:
        async with aclosing(asked.api.sample_text(prompt, how, model_argument(asked.options), turns)) as pieces:
            async for piece in pieces:
                if piece.newer_round and not turns:
                    asked.show(describe_final_round(piece.round, piece.newer_round))
                if piece.is_checked and not turns:
                    asked.show(BLOCKLIST_NOTICE)
                if piece.is_withheld:
                    asked.show(WITHHELD_TEXT)
                if piece.text:
                    asked.show(TextChunk(piece.text))
                    is_shown = True
                    if said is not None:
                        said.append(piece.text)
    finally:
        if is_shown:
            asked.show(TextChunk("\n"))


@command(
    "Chat with a model",
    *SAMPLING_ARGUMENTS,
    Argument(
        "--template",
        type=_text,
        default=TEMPLATE_SLOT,
        metavar="TEXT",
        help=r"Prompt with {} in place of your text, such as 'Q: {}\nA:' (default {})",
    ),
    description="""
        `quit` and Ctrl-D end the chat, and Ctrl-C ends an answer. The model sees earlier turns as far as they fit into its
        context. An answer ends at the model's stop token, at `--stop`, or at a line break if the model has learned no stop
        token. A withheld turn is forgotten.

            peer chat --job helpful --template "User: {}\\nAssistant: " --temperature 0.5
        """,
)
async def chat(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    if options.template.count(TEMPLATE_SLOT) != 1:
        raise UserError(f"--template {options.template!r} must contain {TEMPLATE_SLOT} once, in place of your text")
    how, turns = _sampling(options), list[str]()
    while (line := await asked.user.read_line(CHAT_PROMPT)) is not None and line.strip() != "quit":
        if not line.strip():
            continue
        prompt, said = options.template.replace(TEMPLATE_SLOT, line), list[str]()
        await asked.user.run_interruptible(partial(_stream, asked, prompt, how, tuple(turns), said))
        if said:  # a withheld turn is dropped: as part of later prompts, it would cause all later turns to be withheld
            turns.append(prompt + "".join(said))
        while len(turns) > TURNS_MAX or sum(map(len, turns)) > CHAT_CHARACTERS_MAX:
            del turns[0]


async def _show_samples(asked: CommandContext[PeerApi], samples: tuple[SampleView, ...]) -> None:
    if not samples:
        asked.show("no samples: this peer does not evaluate models, or none has trained for ten rounds")
    for kept in samples:
        asked.show(f"before round {display_round_number(kept.round)}:")
        asked.show(Verbatim(kept.text))


@listing_command(
    "Show texts that models generated during training",
    _show_samples,
    description="A trainer with the setting `evaluate` keeps a text every ten rounds, and the last two of each job.",
)
async def samples(asked: CommandContext[PeerApi]) -> tuple[SampleView, ...]:
    return await asked.api.saved_samples()


@command(
    "Export the chain, payloads and models for an audit",
    Argument("directory", metavar="DIR", help="New folder"),
    description="""
        The folder holds the genesis, all blocks with certificates, accepted payloads, parameters as safetensors, tokenizers,
        and the preferences of reward models, with a hash of each file. Missing payloads are fetched from other peers. A peer
        that joined by a snapshot has no older blocks and cannot export: the error names founders that can. `peer audit DIR`
        checks the folder.
        """,
)
async def export(asked: CommandContext[PeerApi]) -> None:
    view = await asked.api.export_run(str(Path(asked.options.directory).expanduser().absolute()))
    model_root = view.model_root or "none (no job yet)"
    asked.show(
        f"{view.path}: {view.files} files, {view.bytes / 1e6:.1f} MB, up to height {view.height}\n"
        f"state root {view.state_root}\nmodel root of the last job {model_root}\n"
        f"verify it anywhere with `peer audit {shlex.quote(view.path)}`"
    )


@command(
    "Measure the loss of a model on a text",
    Argument("model", metavar="FOLDER|JOB", help="Folder from `peer model`, or JOB, JOB@ROUND or JOB@newest of the running peer"),
    Argument("text", metavar="FILE", help="Text file, or folder of .txt, .md and .jsonl"),
    Argument(
        "--tokens",
        type=parse_integer_in(1),
        default=EVALUATED_TOKENS,
        metavar="N",
        help=f"Number of tokens, in windows that are spread evenly over the text (default {EVALUATED_TOKENS})",
    ),
    JSON,
    description="""
        It prints bits per byte, which compare models with different tokenizers, and the perplexity of a token. Use a text that
        the model has not learned. A folder needs no running peer, and may hold any model in Llama's shape.
        """,
)
async def evaluate(asked: CommandContext[PeerApi]) -> None:
    from peer.features import require_engine
    from training.formats.huggingface_model import is_model_folder

    require_engine("pytorch", "evaluate runs a model")
    options = asked.options
    folder, text = (Path(said).expanduser().absolute() for said in (options.model, options.text))
    with tempfile.TemporaryDirectory(prefix="folkmoot-evaluate-") as scratch:
        if not is_model_folder(folder):
            if "/" in options.model or folder.is_dir():
                raise UserError(f"{folder} is not a folder with a config.json, as `peer model` writes it")
            folder = Path(scratch) / "model"
            view = await asked.api.export_model(str(folder), options.model, MODEL_FORMATS[0])
            if view.newer_round and not options.json:
                asked.show(describe_final_round(view.round, view.newer_round, f"{options.model}@newest"))
        printed = await run_module("training.engines.pytorch.model_evaluation", str(folder), str(text), str(options.tokens))
    if options.json:
        asked.show(Verbatim(printed.rstrip("\n")))
        return
    found = json.loads(printed)
    token = f"{found['nats_per_token']:.3f} nats per token, perplexity {found['perplexity']:.4g}"
    asked.show(f"{found['bits_per_byte']:.3f} bits per byte, {token}")
    asked.show(f"measured on {found['tokens']} of {found['of_tokens']} tokens")


@command(
    "Export a model for transformers or llama.cpp",
    Argument("directory", metavar="DIR", help="New or empty folder"),
    Argument(
        "--job",
        default="",
        metavar="JOB[@ROUND]",
        help="Job by name or id, and its number of rounds (default the newest final model of the latest job on text)",
    ),
    Argument(
        "--format",
        choices=MODEL_FORMATS,
        default=MODEL_FORMATS[0],
        metavar="FORMAT",
        help="Format: transformers (safetensors and tokenizer), packed (also a file of ternary matrices with two bits for each "
        "element), gguf (float16 for llama.cpp) or gguf-f32 (default transformers)",
    ),
    NEWEST_MODEL,
    Argument("--export", default="", metavar="FOLDER", help="Export from `peer export` to read in place of a peer"),
    description="""
        `transformers` gets config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.
        README.md is the model card, and SHA256SUMS has the hashes. The model is a Llama, and a reward model a
        LlamaForSequenceClassification, which GGUF cannot represent. Tensors that only training needs are left out. Ternary
        matrices are written as the weights with which the model computes, and `packed` adds packed.safetensors. Without a
        running peer the command reads the data directory. The error of an unknown round lists the rounds that the peer keeps.

            peer model story --job story@9 --format gguf
        """,
)
async def model(asked: CommandContext[PeerApi]) -> None:
    import trio

    from peer.export import model_export, model_provenance

    options = asked.options
    path = Path(options.directory).expanduser().absolute()

    async def without_a_peer(source: Callable[[Path, str], model_provenance.ExportableModel], place: Path) -> ModelFilesView:
        return await trio.to_thread.run_sync(
            model_export.export_model, source, place, model_argument(options), path, options.format
        )

    if options.export:
        view = await without_a_peer(model_provenance.model_from_export, Path(options.export).expanduser().absolute())
    else:
        try:
            view = await asked.api.export_model(str(path), model_argument(options), options.format)
        except NotRunningError as error:
            view = await without_a_peer(model_provenance.model_from_data_directory, error.directory)
    without = f", without {', '.join(view.omitted_tensors)}" if view.omitted_tensors else ""
    asked.show(
        f"{view.path}: job {view.name!r} at round {view.round}, {view.files} files, {view.bytes / 1e6:.1f} MB{without}\n"
        f"model root {view.model_root}\nREADME.md has its origin and how to load it"
    )
    if view.newer_round:
        asked.show(describe_final_round(view.round, view.newer_round))


async def run_module(module: str, *arguments: str) -> str:
    """Run `python -m MODULE …` and return its output.

    Raises `UserError` with the last line of standard error if the process fails. A process of its own is needed because commands
    of the prompt run in the daemon, which must not import torch.
    """
    import trio

    command = [sys.executable, "-m", module, *arguments]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip() or f"{module} failed with exit status {done.returncode}"
        raise UserError(told.splitlines()[-1])
    return done.stdout.decode()


def row_key(text: str) -> bytes:
    """Return the bytes of a key typed as text, or as hex after `0x` (a type for argparse)."""
    if not text.startswith(HEX):
        return text.encode()
    try:
        return bytes.fromhex(text.removeprefix(HEX))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal: write 0x and two digits for each byte") from None


@command(
    "Write a proof of a row in a table of the ledger",
    Argument("table", metavar="TABLE", help="Table as MODULE/FIELD"),
    Argument("key", type=row_key, metavar="KEY", help="Key as text, or as 0x and hexadecimal digits"),
    Argument("-o", "--output", metavar="FILE", help="New file (default TABLE-KEY.proof in this folder)"),
    description="""
        The file proves the row, or that the key has no row, at the newest height that a decided block certifies. The error of an
        unknown table lists all tables. `peer verify FILE` checks the file.
        """,
)
async def prove(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    file = options.output or f"{options.table.replace('/', '-')}-{options.key.hex()[:32]}.proof"
    view = await asked.api.prove_row(options.table, options.key, str(Path(file).expanduser().absolute()))
    what = "the row" if view.has_row else "no row with this key"
    asked.show(
        f"{view.path}: {what} after height {view.height}, {view.bytes} bytes, of which {view.row_bytes} prove it in its table\n"
        f"verify it anywhere with `peer verify {shlex.quote(view.path)}`"
    )
