"""Commands about what was trained: texts that were kept of a model, and everything decided as files."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from features.command_arguments import JSON, Argument, parse_integer_in
from features.commands import CommandContext, command, listing_command
from features.text_tables import Verbatim
from peer.commands.definitions.generation_commands import NEWEST_MODEL, describe_final_round, model_argument
from protocol.api import ModelFilesView, PeerApi, SampleView
from protocol.errors import NotRunningError, UserError
from protocol.units import display_round_number

EVALUATED_TOKENS = 65_536  # some seconds with the default model
MODEL_FORMATS = ("transformers", "gguf", "gguf-f32")  # of `peer.export.model_export`, which is imported only where it is used


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
