"""`python -m scenarios.homes`: peers in a home network. One joins a neighbour by mDNS alone; a router maps and unmaps a port.

Three machines are network namespaces on one bridge, as `scenarios/lan.py` makes them, beside a router with UPnP
(`scenarios/gateway.py`). The invitation has an unused address, so a peer without discovery stays alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import trio

from protocol.errors import UserError
from scenarios.lan import PORT, Lan, Machine, answer, in_namespaces, ip, lan, linked, timed, until
from scenarios.trials import Trial, report, table_of

NOBODY = "10.77.0.99:7700"
OUTSIDE = "1.1.1.1"  # of the router; unused in these namespaces
JOINED_SECONDS_MAX = 60.0  # from `join` to a member with a link; on a busy machine Python alone starts in tens of seconds
ALONE_SECONDS = 10.0  # for a peer without discovery
FORWARDED_SECONDS_MAX = 60.0  # from the start
ENDED_SECONDS_MAX = 20.0


@contextmanager
def router(machine: Machine, file: Path) -> Iterator[None]:
    command = [*machine.command[:-1], "scenarios.gateway", machine.host, str(file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(ENDED_SECONDS_MAX)


async def run(options: argparse.Namespace) -> int:
    folder = options.keep or Path(tempfile.mkdtemp(prefix="folkmoot-homes-"))
    folder.mkdir(parents=True, exist_ok=True)
    trials = [Trial("mDNS alone"), Trial("a router forwards")]
    try:
        with lan(folder, 4) as made:
            for trial, step in zip(trials, (neighbours, forwarded), strict=True):
                try:
                    await step(made, trial)
                except UserError as error:
                    trial.problems.append(str(error))
                except trio.TooSlowError:
                    trial.problems.append("it took too long")
                print(f"{trial.what}: {'; '.join(trial.problems) or trial.figures}", file=sys.stderr, flush=True)
                if trial.problems:
                    break
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    failures = [f"{trial.what}: {problem}" for trial in trials for problem in trial.problems]
    result = {"trials": [asdict(trial) for trial in trials]}
    return report(options, "three peers at home; seconds", *table_of(trials), failures, result)


async def neighbours(made: Lan, trial: Trial) -> None:
    first, second, alone, _ = made.machines
    await first.ask("init", "--network", "home", "--listen", f"0.0.0.0:{PORT}")
    first.run("run", "--mdns", "--role", "voter")
    await answer([first])
    invitations = [(await first.ask("invite", "--address", NOBODY)).strip() for _ in range(2)]
    second.run("join", invitations[0], "--mdns", "--role", "voter", "--listen", "none")
    alone.run("join", invitations[1], "--role", "voter")
    async with timed(trial, "joined", JOINED_SECONDS_MAX):
        await answer([second, alone])
        await linked([first, second])
        await until(partial(_is_member, second))
    await trio.sleep(ALONE_SECONDS)
    trial.require(not (await alone.client.status()).links, "a peer is linked that knows nobody")


async def forwarded(made: Lan, trial: Trial) -> None:
    *_, alone, gateway = made.machines
    table = gateway.home / "table"
    alone.stop()
    assert alone.process is not None
    await trio.to_thread.run_sync(alone.process.wait, ENDED_SECONDS_MAX)
    ip("-n", alone.name, "route", "add", "default", "via", gateway.host)
    with router(gateway, table):
        alone.run("run", "--upnp", "--role", "voter")
        async with timed(trial, "forwarded", FORWARDED_SECONDS_MAX):
            await answer([alone])
            await until(partial(_is_outside, alone))
        trial.require(json.loads(table.read_text()).get(str(PORT), [])[:2] == [alone.host, PORT], "the router's table lacks it")
        command = [*alone.command, "doctor", "--json", "--role", "voter", "--upnp"]
        said = await trio.run_process(command, capture_stdout=True, check=False, env=alone.environment)  # other checks may warn
        found = {item["check"]: item["level"] for item in json.loads(said.stdout)}
        trial.require(found.get("upnp") == "ok", "the doctor does not say so")
        alone.stop()
        async with timed(trial, "taken back", ENDED_SECONDS_MAX):
            await trio.to_thread.run_sync(alone.process.wait, ENDED_SECONDS_MAX)
        trial.require(json.loads(table.read_text()) == {}, "the router still forwards")


async def _is_member(machine: Machine) -> bool:
    key = (await machine.client.status()).peer
    return any(view.me and view.peer == key and view.member for view in await machine.client.peers())


async def _is_outside(machine: Machine) -> bool:
    return (await machine.client.status()).address == f"{OUTSIDE}:{PORT}"


def main() -> int:
    return in_namespaces("homes", __doc__, run)


if __name__ == "__main__":
    sys.exit(main())
