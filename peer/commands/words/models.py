"""Words about what was trained: texts that were kept of a model, and everything decided as files."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from features.arguments import Argument
from features.tables import Verbatim
from features.words import Asked, listing, word
from protocol.api import ModelFilesView, PeerApi, SampleView
from protocol.errors import NotRunningError

MODEL_FORMATS = ("transformers", "gguf", "gguf-f32")  # of `peer.export.taking`, which is imported only where it is used


async def _show_samples(asked: Asked[PeerApi], samples: tuple[SampleView, ...]) -> None:
    if not samples:
        asked.show("this peer keeps no text: it measures no models, or none has trained for ten rounds")
    for kept in samples:
        asked.show(f"before round {kept.round}:")
        asked.show(Verbatim(kept.text))


@listing("text that this peer kept of its models, one each ten rounds", _show_samples)
async def samples(asked: Asked[PeerApi]) -> tuple[SampleView, ...]:
    return await asked.api.samples()


@word(
    "everything decided so far, for `peer audit`: export DIR",
    Argument("directory", metavar="DIR", help="a new directory"),
)
async def export(asked: Asked[PeerApi]) -> None:
    view = await asked.api.export(str(Path(asked.options.directory).expanduser().absolute()))
    model_root = view.model_root or "none: no job was started yet"
    asked.show(
        f"{view.path}: {view.files} files, {view.bytes / 1e6:.1f} MB, up to height {view.height}\n"
        f"state root {view.state_root}\nmodel root of the last job {model_root}\n"
        f"check it anywhere with `peer audit {shlex.quote(view.path)}`"
    )


@word(
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
    Argument("--export", default="", metavar="FOLDER", help="take it from what `peer export` wrote; no peer has to run"),
)
async def model(asked: Asked[PeerApi]) -> None:
    import trio

    from peer.export import found, taking

    options = asked.options
    path = Path(options.directory).expanduser().absolute()

    async def without_a_peer(source: Callable[[Path, str], found.Found], place: Path) -> ModelFilesView:
        return await trio.to_thread.run_sync(taking.take, source, place, options.job, path, options.format)

    if options.export:
        view = await without_a_peer(found.of_export, Path(options.export).expanduser().absolute())
    else:
        try:
            view = await asked.api.model(str(path), options.job, options.format)
        except NotRunningError as error:
            view = await without_a_peer(found.at_rest, error.directory)
    without = f", without {', '.join(view.left_out)}" if view.left_out else ""
    asked.show(
        f"{view.path}: job {view.name!r} at round {view.round}, {view.files} files, {view.bytes / 1e6:.1f} MB{without}\n"
        f"model root {view.model_root}\nREADME.md says where it comes from, and how to open it"
    )
