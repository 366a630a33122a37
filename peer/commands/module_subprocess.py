"""A subprocess for commands that need modules which no daemon may import: at the prompt, commands run in the daemon."""

from __future__ import annotations

import sys

import trio

from protocol.errors import UserError


async def run_module(module: str, *arguments: str) -> str:
    """What `python -m MODULE …` prints. `UserError` with the last line of its complaints if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip() or f"{module} ended with {done.returncode}"
        raise UserError(told.splitlines()[-1])
    return done.stdout.decode()
