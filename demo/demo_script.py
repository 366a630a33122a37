"""The demo as commands that a person gives: a network of peers on one machine, all of them founders and honest."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

NAMES: Final = ("anna", "ben", "carl", "dora", "emil", "fay", "gus", "hana", "ivo", "jo")  # DEMO_PEERS_MAX of them
FOLDER: Final = "folkmoot-lab"
PORT, WEB_PORT = 7701, 7781  # of the first peer; those of the others follow
ROUNDS: Final = 10  # unless `--rounds` says another number: a minute or two


def make_demo_script(options: argparse.Namespace, program: str = "peer") -> str:
    """For one shell, bash or zsh, that runs this program as `program`."""
    return "\n".join(_lines(options, NAMES[: options.peers], program)) + "\n"


def _lines(options: argparse.Namespace, names: Sequence[str], peer: str) -> Iterator[str]:
    first, *others = names
    voters = " ".join(f'--voter "$({peer} identity --data-dir {FOLDER}/{name})"' for name in others)
    yield f"# {len(names)} peers on this machine; each has a folder in {FOLDER}, and its log beside it"
    yield f"{peer} init --network lab --name {first} --data-dir {FOLDER}/{first} {voters}"
    yield "PEERS=()"
    yield f"{peer} run {_place(first, 0)} & PEERS+=($!)"
    yield "# one string for all founders, as soon as the first one runs"
    yield f'until INVITATION="$({peer} invite --data-dir {FOLDER}/{first} 2> {FOLDER}/waits)"; do sleep 1; done'
    for number, name in enumerate(others, start=1):
        yield f'{peer} join "$INVITATION" --name {name} {_place(name, number)} & PEERS+=($!)'
    yield "# until all are registered as trainers"
    registered = f"{peer} peers --json --data-dir {FOLDER}/{first} | grep -o '\"trainer\"' | wc -l"
    yield f'until [ "$({registered})" -ge {len(names)} ]; do sleep 1; done'
    said = f" --data {shlex.quote(options.data)}" if options.data else ""
    said += f" --set seed={options.seed}" if options.seed else ""
    yield f"{peer} train --name demo --rounds {options.rounds or ROUNDS}{said} --data-dir {FOLDER}/{first}"
    yield f"{peer} watch demo --data-dir {FOLDER}/{first}  # until the job is finished"
    yield f"{peer} rounds --data-dir {FOLDER}/{names[-1]}  # the same model roots as at the others"
    yield f'{peer} sample "The " --data-dir {FOLDER}/{first}'
    if options.keep:
        yield f"# they go on running: http://127.0.0.1:{WEB_PORT}/live shows them"
        yield '# kill "${PEERS[@]}" ends them; `peer run --data-dir …` goes on from there'
    else:
        yield 'kill "${PEERS[@]}"; wait "${PEERS[@]}"'


def _place(name: str, number: int) -> str:
    ports = f"--listen 127.0.0.1:{PORT + number} --web-listen 127.0.0.1:{WEB_PORT + number}"
    return f"--data-dir {FOLDER}/{name} {ports} --threads 1 --no-console --log-file {FOLDER}/{name}.log"
