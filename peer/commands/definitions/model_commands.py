"""Commands about what was trained and decided: texts of a model, a chat, models and exports as files, proofs of rows."""

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
    SamplingOptions,
)
from protocol.units import display_round_number

EVALUATED_TOKENS = 65_536  # some seconds with the default model
MODEL_FORMATS = ("transformers", "gguf", "gguf-f32")  # of `peer.export.model_export`, which is imported only where it is used

TEMPERATURE_DEFAULT: Final = 0.8
ESCAPED: Final = {"n": "\n", "t": "\t", "\\": "\\"}
TEMPLATE_SLOT: Final = "{}"  # of a template: where what is typed goes
CHAT_PROMPT: Final = "you> "
CHAT_CHARACTERS_MAX: Final = 64 << 10  # of turns that go along with the next one; few models see that far
BLOCKLIST_NOTICE: Final = "this job names words that block a text, so the text is shown when all of it was checked"

HEX = "0x"


def _text(typed: str) -> str:
    r"""A type for argparse: `\n`, `\t` and `\\` stand for what they stand for elsewhere."""
    text = re.sub(r"\\([nt\\])", lambda found: ESCAPED[found[1]], typed)
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    if len(text) > STOP_CHARACTERS_MAX:
        raise argparse.ArgumentTypeError(f"{len(text)} characters are more than {STOP_CHARACTERS_MAX}")
    return text


def _probability(text: str) -> float:
    """A type for argparse."""
    value = parse_non_negative(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no probability above 0 and at most 1")
    return value


JOB = Argument("--job", default="", metavar="JOB[@ROUND]", help="whose model, and before which round (default: the newest final)")
NEWEST_MODEL = Argument("--newest", action="store_true", help="the newest model, also if audits may still undo it")
TOKENS = Argument(
    "--tokens", type=parse_integer_in(1, TOKENS_MAX), default=200, metavar="N", help="at most so many (default 200)"
)
TEMPERATURE = Argument("--temperature", type=parse_non_negative, metavar="T", help="0: the likeliest (default 0.8)")
TOP_K = Argument(
    "--top-k", type=parse_integer_in(0, TOP_K_MAX), default=0, metavar="K", help="of the K likeliest (0, the default: of all)"
)
TOP_P = Argument(
    "--top-p", type=_probability, default=1.0, metavar="P", help="of the fewest that have probability P together (default 1)"
)
STOP = Argument(
    "--stop",
    type=_text,
    action="append",
    default=[],
    metavar="TEXT",
    help=r"ends the text; \n is a line break; several times: each",
)
SEED = Argument("--seed", type=parse_integer_in(0), default=0, metavar="S", help="of the choice of tokens (default 0)")
SAMPLING_ARGUMENTS = (JOB, NEWEST_MODEL, TOKENS, TEMPERATURE, TOP_K, TOP_P, STOP, SEED)


def model_argument(options: argparse.Namespace) -> str:
    """The job as the peer is asked for its model."""
    return options.job + NEWEST * options.newest


def describe_final_round(round: int, newer: int, way: str = "--newest") -> str:
    """`way`: how a person gets the newer one."""
    undo = f"audits may still undo the newer one at round {newer}, which {way} takes"
    return f"the model at round {round} is the newest final one: {undo}"


def _sampling(options: argparse.Namespace, beams: int = 0) -> SamplingOptions:
    """Raises `UserError`."""
    if len(options.stop) > STOPS_MAX:
        raise UserError(f"--stop: {len(options.stop)} texts are more than {STOPS_MAX}")
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if beams else TEMPERATURE_DEFAULT
    how = SamplingOptions(options.tokens, temperature, options.top_k, options.top_p, tuple(options.stop), options.seed, beams)
    return how.validated()


@command(
    'text from a model: sample "PROMPT"',
    Argument("prompt", metavar="PROMPT", help="text to go on from"),
    *SAMPLING_ARGUMENTS,
    Argument("--stream", action="store_true", help="shows the text as it is made, as the prompt `peer>` always does"),
    Argument(
        "--beams", type=parse_integer_in(1, BEAMS_MAX), default=0, metavar="B", help="the best text of B beams; nothing is drawn"
    ),
)
async def sample(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    how = _sampling(options, options.beams)
    if options.stream and how.beams:
        raise UserError(f"--stream and --beams {how.beams}: a beam search knows its text at the end, so leave one of them out")
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
    """`said` gets what was shown; of a text that is withheld it stays empty."""
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
    "talk with a model, turn by turn, until `quit` or Ctrl-D",
    *SAMPLING_ARGUMENTS,
    Argument(
        "--template",
        type=_text,
        default=TEMPLATE_SLOT,
        metavar="TEXT",
        help=r"how the model was taught to be asked, with {} for what you type: 'Q: {}\nA:' (default {})",
    ),
)
async def chat(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    if options.template.count(TEMPLATE_SLOT) != 1:
        raise UserError(f"--template {options.template!r}: write {TEMPLATE_SLOT} once, where what you type goes")
    how, turns = _sampling(options), list[str]()
    while (line := await asked.user.read_line(CHAT_PROMPT)) is not None and line.strip() != "quit":
        if not line.strip():
            continue
        prompt, said = options.template.replace(TEMPLATE_SLOT, line), list[str]()
        await asked.user.run_interruptible(partial(_stream, asked, prompt, how, tuple(turns), said))
        if said:  # a turn that is withheld would withhold all that follow it
            turns.append(prompt + "".join(said))
        while len(turns) > TURNS_MAX or sum(map(len, turns)) > CHAT_CHARACTERS_MAX:
            del turns[0]


async def _show_samples(asked: CommandContext[PeerApi], samples: tuple[SampleView, ...]) -> None:
    if not samples:
        asked.show("this peer keeps no text: it measures no models, or none has trained for ten rounds")
    for kept in samples:
        asked.show(f"before round {display_round_number(kept.round)}:")
        asked.show(Verbatim(kept.text))


@listing_command("text that this peer kept of its models, one each ten rounds", _show_samples)
async def samples(asked: CommandContext[PeerApi]) -> tuple[SampleView, ...]:
    return await asked.api.saved_samples()


@command(
    "everything decided so far, for `peer audit`: export DIR",
    Argument("directory", metavar="DIR", help="a new directory"),
)
async def export(asked: CommandContext[PeerApi]) -> None:
    view = await asked.api.export_run(str(Path(asked.options.directory).expanduser().absolute()))
    model_root = view.model_root or "none: no job was started yet"
    asked.show(
        f"{view.path}: {view.files} files, {view.bytes / 1e6:.1f} MB, up to height {view.height}\n"
        f"state root {view.state_root}\nmodel root of the last job {model_root}\n"
        f"check it anywhere with `peer audit {shlex.quote(view.path)}`"
    )


@command(
    "how well a model foretells a text: evaluate FOLDER|JOB FILE",
    Argument("model", metavar="FOLDER|JOB", help="a folder as `peer model` writes it, or JOB[@ROUND] of this peer"),
    Argument("text", metavar="FILE", help="a text file, or a folder of .txt, .md and .jsonl"),
    Argument(
        "--tokens",
        type=parse_integer_in(1),
        default=EVALUATED_TOKENS,
        metavar="N",
        help=f"in windows spread evenly over the text (default {EVALUATED_TOKENS}; more take longer)",
    ),
    JSON,
)
async def evaluate(asked: CommandContext[PeerApi]) -> None:
    from training.formats.huggingface_model import is_model_folder

    options = asked.options
    folder, text = (Path(said).expanduser().absolute() for said in (options.model, options.text))
    with tempfile.TemporaryDirectory(prefix="folkmoot-evaluate-") as scratch:
        if not is_model_folder(folder):
            if "/" in options.model or folder.is_dir():
                raise UserError(f"{folder} is no folder with a config.json, as `peer model` writes it")
            folder = Path(scratch) / "model"
            view = await asked.api.export_model(str(folder), options.model, MODEL_FORMATS[0])
            if view.newer_round and not options.json:
                asked.show(describe_final_round(view.round, view.newer_round, f"{options.model}@newest"))
        printed = await run_module("training.engines.pytorch.model_evaluation", str(folder), str(text), str(options.tokens))
    if options.json:
        asked.show(Verbatim(printed.rstrip("\n")))
        return
    found = json.loads(printed)
    token = f"{found['nats_per_token']:.3f} nats a token, a perplexity of {found['perplexity']:.4g}"
    asked.show(f"{found['bits_per_byte']:.3f} bits a byte, {token}")
    asked.show(f"measured in {found['tokens']} of {found['of_tokens']} tokens")


@command(
    "a model as files for other programs: model DIR --job JOB@ROUND --format gguf",
    Argument("directory", metavar="DIR", help="a new directory"),
    Argument(
        "--job", default="", metavar="JOB[@ROUND]", help="which job, and after how many rounds (default: the latest of text)"
    ),
    Argument(
        "--format",
        choices=MODEL_FORMATS,
        default=MODEL_FORMATS[0],
        metavar="FORMAT",
        help="transformers: safetensors and tokenizer; gguf: float16 for llama.cpp; gguf-f32 (default transformers)",
    ),
    NEWEST_MODEL,
    Argument("--export", default="", metavar="FOLDER", help="take it from what `peer export` wrote; no peer has to run"),
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
        f"model root {view.model_root}\nREADME.md says where it comes from, and how to open it"
    )
    if view.newer_round:
        asked.show(describe_final_round(view.round, view.newer_round))


async def run_module(module: str, *arguments: str) -> str:
    """What `python -m MODULE …` prints. `UserError` with the last line of its complaints if it fails.

    No daemon imports torch, and at the prompt commands run in the daemon.
    """
    import trio

    command = [sys.executable, "-m", module, *arguments]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip() or f"{module} ended with {done.returncode}"
        raise UserError(told.splitlines()[-1])
    return done.stdout.decode()


def row_key(text: str) -> bytes:
    """A type for argparse."""
    if not text.startswith(HEX):
        return text.encode()
    try:
        return bytes.fromhex(text.removeprefix(HEX))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no hex: two digits a byte follow 0x") from None


@command(
    "one row of a table, or that there is none, as a file for `peer verify`: prove TABLE KEY -o FILE",
    Argument("table", metavar="TABLE", help="module/field"),
    Argument("key", type=row_key, metavar="KEY", help="text, or bytes in hex behind 0x"),
    Argument("-o", "--output", metavar="FILE", help="a new file (default: named by table and key, in this directory)"),
)
async def prove(asked: CommandContext[PeerApi]) -> None:
    options = asked.options
    file = options.output or f"{options.table.replace('/', '-')}-{options.key.hex()[:32]}.proof"
    view = await asked.api.prove_row(options.table, options.key, str(Path(file).expanduser().absolute()))
    what = "the row" if view.has_row else "there is no row of this key"
    asked.show(
        f"{view.path}: {what} after height {view.height}, {view.bytes} bytes, of which {view.row_bytes} show it in its table\n"
        f"check it anywhere with `peer verify {shlex.quote(view.path)}`"
    )
