"""Words about what was trained: text from a model, and everything decided as files."""

from __future__ import annotations

import shlex
from pathlib import Path

from features.arguments import Argument, not_negative, whole_number
from features.tables import Verbatim
from features.words import Asked, listing, word
from protocol.api import PeerApi, SampleView

TOKENS = Argument("--tokens", type=whole_number(1, 100_000), default=200, metavar="N", help="how many (default 200)")
TEMPERATURE = Argument("--temperature", type=not_negative, default=0.8, metavar="T", help="0: the likeliest (default 0.8)")
SEED = Argument("--seed", type=whole_number(0), default=0, metavar="S", help="of the choice of tokens (default 0)")


@word(
    'text from the current model: sample "PROMPT"',
    Argument("prompt", metavar="PROMPT", help="text to go on from"),
    TOKENS,
    TEMPERATURE,
    SEED,
)
async def sample(asked: Asked[PeerApi]) -> None:
    options = asked.options
    asked.show(Verbatim(await asked.api.sample(options.prompt, options.tokens, options.temperature, options.seed)))


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
