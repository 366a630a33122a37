"""Seconds of a program's step through a gateway, beside the same loop in plain torch: `python -m benchmarks.tinker --json FILE`.

A program with the SDK `tinker` (`make foreign`) tunes adapters of a base. Each pair of `forward_backward` and `optim_step` is
submitted at once and awaited, as the SDK's own recipes do. Real daemons on loopback, each with a worker, serve it: one alone, and
a network of which all others re-execute each step. The loop in torch has the same base, adapters, texts and optimizer, without a
network.

Each worker writes down when it computes a request (`benchmarks.request_times`). A pair is *outside the workers* while no worker
computes a request of its round.

The second part opens as many runs as one gateway may have, and takes no step. It counts blocks, rounds and requests to workers of
this network, and compares its processor time and memory with those before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
import trio
from rich.console import Console
from rich.table import Table

from benchmarks import dispatch
from benchmarks.provenance import write
from benchmarks.request_times import FILE, RequestTimes, read_times
from benchmarks.verdicts import conclude, verdict
from clients.gateway.http_routes import PREFIX
from demo.demo_peers import DemoPeer, PeerDisk
from peer.settings.process_resources import process_memory_mb
from scenarios import network
from scenarios.idle import measured, processor_seconds
from scenarios.local_tuning import LocalTuning
from scenarios.network import Network, children
from scenarios.rlhf import based
from scenarios.tinker import ADAM as LARGE_STEPS
from scenarios.tinker import KEY, SDKS, Program, free_port, require_sdk, runs_of
from scenarios.trials import COUNT, Parser, duration
from training.data.default_text import default_text
from training.transformer import ModelSpec

SDK: Final = SDKS[0]
MODEL: Final = ModelSpec(width=128, layers=5, heads=4, kv_heads=4, hidden=344)  # 1,022,336 parameters
BASE_JOB: Final = {"local_steps": "1", "batch": "8", "audit": "full"}
RANK, TEXTS, TOKENS = 16, 8, 128
PAIRS_WARM: Final = 3  # not counted: workers open the job, and records are new
PAIR_SECONDS_MAX: Final = 60.0  # for a busy machine; a longer pair hangs
START_SECONDS_MAX: Final = 300.0  # for the base and its held-out loss, and for the runs of idle models
SETTLE_SECONDS: Final = 10.0  # for imports and last messages
SECONDS_MAX, OUTSIDE_SECONDS_MAX = 1.5, 0.6
TORCH, ALONE = "plain torch", "network of 1"
LOSS_DIFFERENCE_MAX: Final = 1e-3  # relative, between the two after the last step: payloads have 16-bit levels
PASS, PROPOSAL, REEXECUTION = "pass", "propose", "audit"  # requests to workers
UNASKED: Final = ("ping", "describe")  # requests of a daemon that looks after its worker
# A tenth of the scenario's rate: after 30 pairs with that rate, rounded payloads and plain torch are no longer alike.
ADAM: Final = LARGE_STEPS | {"learning_rate": 2e-4}
IDLE_MODELS: Final = 32  # as many as one gateway may have while it is alone


@dataclass(frozen=True, slots=True)
class Pair:
    """A `forward_backward` and an `optim_step` of the program, in seconds of the machine's monotonic clock."""

    began: float
    ended: float
    round: int
    refused_rounds: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Row:
    """Measurements of one loop. None: not measured."""

    name: str
    seed: int
    pairs: int
    seconds: float  # median, like the next ones
    seconds_least: float
    outside_seconds: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0  # sum over the tokens of the texts, after the last step
    refused_rounds: int = 0  # in all pairs


@dataclass
class IdleRow:
    """Measurements of a network with models that take no step. Lists have one value for each peer, the gateway's first."""

    seed: int
    models: int
    seconds: float
    rounds: int
    requests: int
    pings: int
    blocks: int
    seconds_a_minute: list[float]  # processor seconds of daemon and worker
    seconds_a_minute_without: list[float]
    daemon_growth_mb: list[float]  # resident memory, since before the first model
    worker_growth_mb: list[float]


def texts(seed: int) -> list[list[int]]:
    """Return texts of equal length, as the bytes of a model without a tokenizer."""
    source, random = default_text(), Random(seed)
    starts = [random.randrange(len(source) - TOKENS) for _ in range(TEXTS)]
    return [list(source[start : start + TOKENS + 1]) for start in starts]


# Pairs ---------------------------------------------------------------------------------------------------------------


async def measure_pairs(peers: int, pairs: int, seed: int, *, beside_torch: bool) -> list[Row]:
    """Return the row of a network, and with `beside_torch` the row of the loop in plain torch, which repeats its run."""
    port = free_port()
    async with network.running(peers, seed=seed, dress=partial(dress, port)) as running:
        program = Program(SDK, running.demo.folder)
        plan = await make_plan(running, port, seed)
        steps = PAIRS_WARM + pairs
        with trio.fail_after(START_SECONDS_MAX + steps * PAIR_SECONDS_MAX):
            await program.run(plan | {"loop": "beside-torch", "steps": steps, "texts": texts(seed)})
        await trio.to_thread.run_sync(running.stop)
        (last,) = program.of("last")
        found = [pair_of(line) for line in program.of("step")[PAIRS_WARM:]]
        gateway, *others = [read_times(times_file(peer)) for peer in running.peers]
        row = network_row(f"network of {peers}", seed, found, last["loss"], gateway, list(chain(*others)))
        if not beside_torch:
            return [row]
        return [await trio.to_thread.run_sync(measure_torch, running.peers[0], plan["base"], pairs, seed), row]


def dress(port: int, peer: DemoPeer) -> None:
    """Let a peer train and write down the times of its worker. The first one is the gateway."""
    peer.trains, peer.module = True, ("benchmarks.request_times",)
    peer.environment = {"PYTHONPATH": str(dispatch.REPOSITORY), FILE: str(times_file(peer))}
    if peer.number == 0:
        peer.serves = ("--web-listen", f"127.0.0.1:{port}")


def times_file(peer: DemoPeer) -> Path:
    return peer.directory / "request-times.jsonl"


async def make_plan(running: Network, port: int, seed: int) -> dict[str, Any]:
    """Train the base, and return the values of all loops."""
    model = {f"model.{name}": str(value) for name, value in asdict(MODEL).items()}
    with trio.fail_after(START_SECONDS_MAX):
        base = await based(running, running.peers[0], {**model, **BASE_JOB, "seed": str(seed)})
    return {"base_url": f"http://127.0.0.1:{port}{PREFIX}", "key": KEY, "base": base, "adam": ADAM, "rank": RANK}


def pair_of(line: dict[str, Any]) -> Pair:
    """Return a pair from the program's report."""
    metrics = line["metrics"]
    began, ended = line["began"], line["began"] + line["seconds"]
    return Pair(began, ended, int(metrics["round:max"]), int(metrics["refused_rounds:max"]))


def network_row(
    name: str, seed: int, pairs: Sequence[Pair], loss: float, gateway: Sequence[RequestTimes], others: Sequence[RequestTimes]
) -> Row:
    phases = [phases_of(pair, gateway, others) for pair in pairs]
    seconds = [pair.seconds for pair in pairs]
    return Row(
        name,
        seed,
        len(pairs),
        statistics.median(seconds),
        min(seconds),
        statistics.median(outside_seconds(pair, (*gateway, *others)) for pair in pairs),
        {phase: statistics.median(each[phase] for each in phases) for phase in phases[0]},
        loss,
        sum(pair.refused_rounds for pair in pairs),
    )


def outside_seconds(pair: Pair, times: Sequence[RequestTimes]) -> float:
    """Return the time of a pair in which no worker computes a request of its round."""
    outside, until = 0.0, pair.began
    for each in sorted((each for each in times if each.round == pair.round), key=lambda each: each.began):
        outside += max(0.0, min(each.began, pair.ended) - until)
        until = max(until, min(each.ended, pair.ended))
    return outside + pair.ended - until


def phases_of(pair: Pair, gateway: Sequence[RequestTimes], others: Sequence[RequestTimes]) -> dict[str, float]:
    """Return the parts of a pair, whose sum is its time. A part of several requests ends with the last one of them."""
    moments = [pair.began]
    for kind, times in ((PASS, gateway), (PROPOSAL, gateway), (REEXECUTION, others)):
        of_pair = [each for each in times if each.request == kind and each.round == pair.round and each.began < pair.ended]
        began = min((each.began for each in of_pair), default=moments[-1])
        moments += [began, min(pair.ended, max((each.ended for each in of_pair), default=began))]
    moments.append(pair.ended)
    names = ("until the pass", "pass", "until the proposal", "proposal", "until re-execution", "re-execution", "until the result")
    return {name: moments[number + 1] - moments[number] for number, name in enumerate(names)}


def measure_torch(gateway: DemoPeer, base: str, pairs: int, seed: int) -> Row:
    """Measure the loop in plain torch, on one thread as a worker, with the base and the first adapters of a stopped network."""
    torch.set_num_threads(gateway.threads)
    with closing(PeerDisk(gateway.directory)) as disk:
        (run,) = runs_of(disk)
        local = LocalTuning(disk.spec(base), disk.model(bytes.fromhex(base)), disk.spec(run.hex()), run)
    batch, seconds = texts(seed), list[float]()
    for _ in range(PAIRS_WARM + pairs):
        began = time.monotonic()
        local.take_step(batch, ADAM)
        seconds.append(time.monotonic() - began)
    counted, loss = seconds[PAIRS_WARM:], -float(local.logprobs(batch).double().sum())
    return Row(TORCH, seed, pairs, statistics.median(counted), min(counted), loss=loss)


# Idle models ---------------------------------------------------------------------------------------------------------


async def measure_idle(peers: int, models: int, seconds: float, seed: int) -> IdleRow:
    port = free_port()
    async with network.running(peers, seed=seed, dress=partial(dress, port)) as running:
        program, stop = Program(SDK, running.demo.folder), running.demo.folder / "stop"
        plan = await make_plan(running, port, seed)
        with trio.fail_after(START_SECONDS_MAX):
            while not await measured(running):  # noqa: ASYNC110 - it is another process
                await trio.sleep(network.POLL_SECONDS)
        await trio.sleep(SETTLE_SECONDS)
        without = await seconds_a_minute(running, seconds)
        daemons, workers = memory(running)
        async with trio.open_nursery() as nursery:
            await nursery.start(program.run, plan | {"loop": "idle", "models": models, "stop": str(stop)})
            with trio.fail_after(START_SECONDS_MAX):
                while len(program.of("created")) < models:  # noqa: ASYNC110 - it is another process
                    await trio.sleep(network.POLL_SECONDS)
            await trio.sleep(SETTLE_SECONDS)
            blocks, rounds, requests = await running.height(running.peers[0]), await rounds_of(running), requests_of(running)
            used = await seconds_a_minute(running, seconds)
            blocks, rounds = await running.height(running.peers[0]) - blocks, await rounds_of(running) - rounds
            requests = requests_of(running)[len(requests) :]
            grown = memory(running)
            stop.touch()
    pings = sum(each.request in UNASKED for each in requests)
    return IdleRow(
        seed=seed,
        models=models,
        seconds=seconds,
        rounds=rounds,
        requests=len(requests) - pings,
        pings=pings,
        blocks=blocks,
        seconds_a_minute=used,
        seconds_a_minute_without=without,
        daemon_growth_mb=[after - before for before, after in zip(daemons, grown[0], strict=True)],
        worker_growth_mb=[after - before for before, after in zip(workers, grown[1], strict=True)],
    )


async def seconds_a_minute(running: Network, seconds: float) -> list[float]:
    """Return the processor seconds a minute of each peer, daemon and worker."""
    before, began = [processor_seconds(peer) for peer in running.peers], trio.current_time()
    await trio.sleep(seconds)
    minutes = (trio.current_time() - began) / 60
    return [(processor_seconds(peer) - of) / minutes for peer, of in zip(running.peers, before, strict=True)]


def memory(running: Network) -> tuple[list[float], list[float]]:
    """Return the resident memory of each daemon, and of each worker."""
    daemons = [peer.process.pid for peer in running.peers if peer.process]
    workers = [sum(process_memory_mb(worker, "Rss") for worker in children(daemon)) for daemon in daemons]
    return [process_memory_mb(daemon, "Rss") for daemon in daemons], workers


async def rounds_of(running: Network) -> int:
    """Return the number of rounds that were opened, as the gateway sees it."""
    return sum(view.round + (view.state == "running") for view in await running.peers[0].client.jobs())


def requests_of(running: Network) -> list[RequestTimes]:
    """Return all requests to workers so far, in the order of their ends."""
    return sorted((each for peer in running.peers for each in read_times(times_file(peer))), key=lambda each: each.ended)


# Report --------------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row], idle: Sequence[IdleRow]) -> None:
    if rows:
        table = Table(title=f"pairs of {TEXTS} × {TOKENS} tokens, {MODEL.parameters:,} parameters, rank {RANK}")
        for heading in ("", "p50 ms", "least", f"× {TORCH}", f"× {ALONE}", "outside the workers, ms"):
            table.add_column(heading, justify="right")
        for row in rows:
            ratios = [ratio(row, row_of(rows, name, row.seed)) for name in (TORCH, ALONE)]
            table.add_row(row.name, ms(row.seconds), ms(row.seconds_least), *ratios, ms(row.outside_seconds))
        Console(width=130).print(table)
        table = Table(title="parts of a pair, ms")
        table.add_column("")
        of_networks = [row for row in rows if row.phases]
        for row in of_networks:
            table.add_column(row.name, justify="right")
        for phase in of_networks[0].phases:
            table.add_row(phase, *(ms(row.phases[phase]) for row in of_networks))
        Console(width=130).print(table)
    for each in idle:
        table = Table(title=f"{each.models} idle models, {each.seconds:g} s", show_header=False)
        of_network = {
            "rounds": str(each.rounds),
            "requests to workers": f"{each.requests}, and {each.pings} pings",
            "blocks": str(each.blocks),
            "processor seconds a minute, each peer": listed(each.seconds_a_minute, 2),
            "the same without models": listed(each.seconds_a_minute_without, 2),
            "growth of each daemon, MB": listed(each.daemon_growth_mb, 1),
            "growth of each worker, MB": listed(each.worker_growth_mb, 1),
        }
        for name, value in of_network.items():
            table.add_row(name, value)
        Console(width=130).print(table)


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def ratio(row: Row, other: Row | None) -> str:
    return "" if other is None else f"{row.seconds / other.seconds:.2f}"


def row_of(rows: Sequence[Row], name: str, seed: int) -> Row | None:
    return next((row for row in rows if (row.name, row.seed) == (name, seed)), None)


def listed(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def verdicts(rows: Sequence[Row], idle: Sequence[IdleRow]) -> Iterator[str]:
    for row in rows:
        if row.name == ALONE and (torch_row := row_of(rows, TORCH, row.seed)):
            differs = abs(row.loss - torch_row.loss) / abs(torch_row.loss)
            text = f"{row.name}: the last loss differs from that of {TORCH} by ≤ {LOSS_DIFFERENCE_MAX:g}: {differs:.1e}"
            yield verdict(differs <= LOSS_DIFFERENCE_MAX, text)
        if row.outside_seconds is not None and row.name != ALONE:
            yield verdict(row.seconds <= SECONDS_MAX, f"{row.name}: a pair: p50 ≤ {SECONDS_MAX:g} s: {row.seconds:.3f}")
            text = f"{row.name}: of it outside the workers: p50 ≤ {OUTSIDE_SECONDS_MAX:g} s: {row.outside_seconds:.3f}"
            yield verdict(row.outside_seconds <= OUTSIDE_SECONDS_MAX, text)
            yield verdict(row.refused_rounds == 0, f"{row.name}: no round accepts nothing: {row.refused_rounds}")
    for each in idle:
        text = f"{each.models} idle models: no round, no request to a worker: {each.rounds}, {each.requests}"
        yield verdict(each.rounds == each.requests == 0, text)


async def run(options: argparse.Namespace) -> int:
    require_sdk(SDK)
    started, rows, idle = time.time(), list[Row](), list[IdleRow]()

    def save() -> None:
        figures = {"rows": [asdict(row) for row in rows], "idle": [asdict(row) for row in idle]}
        about = {"processor": dispatch.processor(), "seeds": list(options.seeds), "sdk": SDK}
        write(options.json, started, {**about, **figures})

    for seed in options.seeds:
        for peers in (1, options.peers):
            rows += await measure_pairs(peers, options.pairs, seed, beside_torch=peers == 1)
            save()
        idle.append(await measure_idle(options.peers, IDLE_MODELS, options.seconds, seed))
        save()
    show(rows, idle)
    return conclude(verdicts(rows, idle))


def main() -> int:
    parser = Parser("tinker", __doc__.splitlines()[0], package="benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--peers", type=COUNT, default=4, metavar="N", help="peers of the network, which all train and vote")
    parser.add_argument("--pairs", type=COUNT, default=30, metavar="N", help="measured pairs of each loop")
    parser.add_argument("--seconds", type=duration, default=60.0, metavar="S", help="duration of each measurement of idle peers")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=(0,), metavar="S", help="seeds of networks, bases and texts, with rows for each"
    )
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
