"""`python -m scenarios.tinker`: unmodified programs with the SDK `tinker` tune adapters at a network of daemons.

Each trial is a network of its own, which trains a base first. A program in the SDK's environment (`make foreign`) then runs its
training loop at the pages of one peer, its gateway. A proxy between both records all calls. Without other options, the program
makes every call that the gateway serves, and one of four peers lies.

With `--parity`, the same loop in plain torch runs beside the program's. With `--pipelined`, calls take 100 ms longer, and pairs
of calls that are submitted at once are compared with pairs of which each call is awaited. With `--kill`, the gateway is killed
(`kill -9`) at random moments and restarted at the same address. In the end, another trainer is killed. With `--liar`, the gateway
proposes false updates of the program's steps (`scenarios/lying_gateway.py`), and so do all trainers in one step.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random, choice
from statistics import median
from subprocess import PIPE
from typing import Any, Final

import trio
from rich.console import Console
from rich.table import Table

from clients.gateway.http_routes import PREFIX, ROUTES
from clients.ledger.clients_module import OBJECTIVE, ClientsState
from clients.objective import ClientObjective
from demo.demo_peers import DemoPeer, PeerDisk
from demo.network_demo import last_line
from ledger.jobs import INVALID_UPDATES_MAX, Job
from peer.export.model_export import TRANSFORMERS
from protocol.api import JobView
from protocol.errors import UserError
from scenarios import network
from scenarios.http_recorder import Exchange, HttpRecorder, running_recorder
from scenarios.lying_gateway import ATTACKS
from scenarios.network import SMALL_JOB, Network
from scenarios.rlhf import based
from scenarios.trials import COUNT, WIDTH, Attempt, Trial, arguments, conduct_apart
from storage.ledger_store import StoredRound
from training.api.job_notes import rejections_text
from training.data.default_text import default_text
from training.job_spec import JobSpec

ROOT: Final = Path(__file__).parents[1]
PROGRAM: Final = ROOT / "scenarios" / "foreign" / "tuning_loop.py"
SDKS: Final = ("0.38.0", "0.25.0")
API: Final = f"{PREFIX}/api/v1"
PLACEHOLDER: Final = re.compile(r"\{\w+\}")
# Routes that the SDK does not call: the gateway tells it to cancel no samples, and 0.25 ends no session.
UNCALLED: Final = {
    "0.38.0": ("/healthz", "/cancel_future"),
    "0.25.0": ("/healthz", "/cancel_future", "/sessions/{session_id}/finish"),
}
PERIODIC: Final = ("/session_heartbeat", "/telemetry")  # The SDK calls these every ten seconds, and a program may end earlier.
HONEST: Final = ("peer.cli",)  # module of an honest peer
KEY: Final = "tml-scenario"  # While a gateway has no keys, it serves programs on its machine with any key.
STEPS: Final = 20
PAIRS: Final = 10
MANY: Final = 2_500  # examples of one call, which the SDK divides into three requests
TEXTS, TEXT_TOKENS = 8, 49  # as many as one pass of the model computes, and equally long, so that sums have one order
SHORT_TOKENS_MAX: Final = 12
RANK: Final = 8  # of the program's adapters
ROUND_TRIP_SECONDS: Final = 0.1  # with `--pipelined`
PIPELINED_SHARE_MAX: Final = 0.6
LOGPROB_DIFFERENCE_MAX: Final = 1e-4
LOSS_DIFFERENCE_MAX: Final = 1e-5  # relative, before the first step
TUNED_DIFFERENCE_MAX: Final = 1e-3  # relative, after the last step
ADAM: Final = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.01, "grad_clip_norm": 100.0}
LIED_STEPS: Final = 3  # of each kind of lie
LOST: Final = "410 to POST /retrieve_future"
PORTS: Final = range(20_000, 32_000)  # below those that systems give to outgoing connections
DOWN_SECONDS_MAX: Final = 1.0
STEP_SECONDS_MAX: Final = 120.0  # for a step of a second, and for the SDK's pauses after a broken connection, of up to 30 s
TRIAL_SECONDS_MAX: Final = 2_400.0  # for 30 kills, after each of which a busy machine needs up to a minute
SETTLED_SECONDS_MAX: Final = 30.0


@dataclass
class Program:
    """A program in an SDK's environment, with the lines that it has printed."""

    sdk: str
    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    process: trio.Process | None = None
    _printed: trio.Event = field(default_factory=trio.Event)

    async def run(self, plan: dict[str, Any], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run a loop to its end. Raises `UserError` if the program fails."""
        (place := self.folder / "plan.json").write_text(json.dumps(plan))
        command = [str(environment(self.sdk)), "-u", str(PROGRAM), str(place)]
        async with trio.open_nursery() as nursery:
            with self._log.open("wb") as log:
                start = partial(trio.run_process, command, stdout=PIPE, stderr=log, check=False)
                self.process = await nursery.start(start)
            task_status.started()
            assert self.process is not None and self.process.stdout is not None
            rest = b""
            async for data in self.process.stdout:
                *lines, rest = (rest + data).split(b"\n")
                self.lines += map(json.loads, lines)
                self._announce()
        self._announce()
        if self.process.returncode:
            raise UserError(f"the program ended with status {self.process.returncode}: {last_line(self._log)} (see {self._log})")

    @property
    def _log(self) -> Path:
        return self.folder / "program.log"

    def _announce(self) -> None:
        printed, self._printed = self._printed, trio.Event()
        printed.set()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    @property
    def steps(self) -> int:
        return len(self.of("step"))

    @property
    def unfinished_models(self) -> int:
        """Number of models whose runs go on when the program ends. Only newer SDKs end their sessions."""
        return 0 if self.sdk == SDKS[0] else len(self.of("created"))

    async def until_printed(self, event: str, number: int = 1) -> None:
        """Wait until the program has printed `number` of these events. Raises `trio.TooSlowError` if it takes too long."""
        with trio.fail_after(STEP_SECONDS_MAX):
            while len(self.of(event)) < number:
                await self._printed.wait()


def environment(sdk: str) -> Path:
    return ROOT / f".venv-foreign-{sdk}" / "bin" / "python"


def require_sdk(sdk: str) -> None:
    if not (environment(sdk).parents[1] / ".complete").exists():
        raise UserError(f"the SDK tinker {sdk} is not installed in {environment(sdk).parents[1]}: run `make foreign`")


@dataclass
class Tuning:
    """One trial: a network, its base, and a program that tunes it."""

    options: argparse.Namespace
    sdk: str
    port: int  # of the gateway's pages, also after a restart
    random: Random
    _were_down: set[str] = field(default_factory=set)  # names of killed peers

    def serve(self, peer: DemoPeer) -> None:
        """Set the start options of a peer. Peers listen at the same ports after a restart."""
        peer.address = f"127.0.0.1:{free_port()}"
        if peer.number == 0:
            peer.serves = ("--web-listen", f"127.0.0.1:{self.port}")

    async def run_every_call(self, peers: Network, trial: Trial) -> None:
        async with self._program(peers, trial) as (program, recorder, plan):
            plan |= {"loop": "every-call", "steps": STEPS, "texts": texts(self.random), "many": short_texts(self.random)}
            await program.run(plan)
        lengths = [len(text) - 1 for text in plan["many"]]
        (many,), (custom,) = program.of("many"), program.of("custom")
        forwards = {line["of"]: line for line in program.of("forward")}
        before, after = forwards["base"]["loss"], forwards["saved"]["loss"]
        trial.require(many["lengths"] == lengths, "the log-probabilities of the large batch have another order")
        trial.require(after < before, f"the loss rose from {before:.1f} to {after:.1f}")
        trial.require("mean_square" in custom["metrics"], f"the custom loss told {custom['metrics']}")
        trial.figures |= {"loss before": before, "after": after}
        judge_checkpoints(trial, program, plan["base"])
        judge_samples(trial, program, forwards)
        judge_calls(trial, recorder.exchanges)
        judge_completeness(trial, recorder.exchanges, self.sdk)

    async def run_beside_torch(self, peers: Network, trial: Trial) -> None:
        from scenarios.local_tuning import LocalTuning

        async with self._program(peers, trial) as (program, recorder, plan):
            plan |= {"loop": "beside-torch", "steps": STEPS, "texts": texts(self.random)}
            await program.run(plan)
            (run,), merged = await run_ids(peers), peers.demo.folder / "merged"
            await peers.peers[0].client.export_model(str(merged), f"{run}@newest", TRANSFORMERS)
        judge_calls(trial, recorder.exchanges)
        with closing(PeerDisk(peers.honest[0].directory)) as disk:
            base = disk.model(bytes.fromhex(plan["base"]))
            local = LocalTuning(disk.spec(plan["base"]), base, disk.spec(run), bytes.fromhex(run))
        (first,), (last,) = program.of("first"), program.of("last")
        of_base = local.base_logprobs(plan["texts"])
        trial.require(first["logprobs"] == of_base.tolist(), "before the first step the log-probabilities are not the base's")
        trial.require(first["loss"] == -float(of_base.double().sum()), "before the first step the loss is not the base's")
        there = [local.logprobs(plan["texts"])]
        for _ in range(STEPS):
            local.take_step(plan["texts"], ADAM)
        there.append(local.logprobs(plan["texts"]))
        for when, told, own, bound in (
            ("first", first, there[0], LOSS_DIFFERENCE_MAX),
            ("last", last, there[1], TUNED_DIFFERENCE_MAX),
        ):
            loss = -float(own.double().sum())
            trial.figures[f"{when} loss"], differs = loss, abs(told["loss"] - loss) / loss
            trial.figures[f"{when} difference"] = f"{differs:.1e}"
            trial.require(differs <= bound, f"{when} loss {told['loss']:.6f} instead of {loss:.6f}")
        of_merged = -float(local.folder_logprobs(merged, plan["texts"]).double().sum())
        trial.figures["merged difference"] = f"{(differs := abs(of_merged - last['loss']) / last['loss']):.1e}"
        trial.require(differs <= LOSS_DIFFERENCE_MAX, f"merged model: loss {of_merged:.6f} instead of {last['loss']:.6f}")
        differs = float((there[0] - there[0].new_tensor(first["logprobs"])).abs().max())
        trial.figures["log-probabilities"] = f"{differs:.1e}"
        trial.require(differs <= LOGPROB_DIFFERENCE_MAX, f"a log-probability differs by {differs:.1e} from that of plain torch")

    async def run_pipelined(self, peers: Network, trial: Trial) -> None:
        async with self._program(peers, trial, ROUND_TRIP_SECONDS) as (program, recorder, plan):
            plan |= {"loop": "pipelined", "pairs": PAIRS, "texts": texts(self.random)}
            await program.run(plan)
        judge_calls(trial, recorder.exchanges)
        (pairs,) = program.of("pairs")
        share = pairs["at_once"] / pairs["awaited"]
        trial.figures |= {"awaited": pairs["awaited"], "at once": pairs["at_once"], "share": share}
        trial.require(share <= PIPELINED_SHARE_MAX, f"pairs that are submitted at once take {share:.2f} of the time")

    async def run_while_killed(self, peers: Network, trial: Trial) -> None:
        gateway, other = peers.peers[:2]
        stop = peers.demo.folder / "stop"
        async with self._program(peers, trial) as (program, recorder, plan):
            plan |= {"loop": "until-told", "stop": str(stop), "texts": texts(self.random)}
            async with trio.open_nursery() as nursery:
                await nursery.start(program.run, plan)
                await program.until_printed("step", 3)
                began = trio.current_time()
                await program.until_printed("step", 7)
                cycle = (trio.current_time() - began) / 2  # two steps and a checkpoint
                usual = median(step["seconds"] for step in program.of("step"))
                waits = list[float]()
                for _ in range(self.options.trials):
                    await trio.sleep(self.random.uniform(0, cycle))
                    waits.append(-trio.current_time())
                    known = program.steps
                    self._kill(peers, gateway)
                    await trio.sleep(self.random.uniform(0, DOWN_SECONDS_MAX))
                    await peers.restart(gateway)
                    await program.until_printed("step", known + 2)  # The first of them may have been decided before the kill.
                    waits[-1] += trio.current_time()
                    print(f"kill {len(waits)}: step {program.steps} after {waits[-1]:.1f} s", file=sys.stderr, flush=True)
                self._kill(peers, other)
                await program.until_printed("step", program.steps + 5)
                await peers.restart(other)
                stop.touch()
        numbers = [step["number"] for step in program.of("step")]
        trial.require(numbers == list(range(len(numbers))), "the program's steps have gaps")
        judge_calls(trial, recorder.exchanges, is_killed=True)
        trial.figures |= {"kills": len(waits), "usual step": usual, "median until the second step": median(waits)}
        trial.figures["longest"] = max(waits)

    async def run_at_liars(self, peers: Network, trial: Trial) -> None:
        """Repeat one loop at a gateway that lies in every step, in one way after the other, and at an honest one.

        Then let all trainers lie in the first step. All runs must have the model of the honest one in the end.
        """
        trainers = [peer for peer in peers.peers if peer.trains]
        async with self._program(peers, trial) as (program, recorder, plan):
            plan |= {"loop": "beside-torch", "steps": LIED_STEPS, "texts": texts(self.random)}
            for attack in (*ATTACKS, None):
                await restart_as_liars(peers, [(trainers[0], attack)])
                known = await run_ids(peers)
                await program.run(plan)
                wanted = {trainers[0].name: {ATTACKS[attack]: LIED_STEPS}} if attack else {}
                await judge_rejections(trial, peers, attack or "honest", known, wanted)
            await self._run_among_liars(peers, trial, program, plan, trainers)
        judge_calls(trial, recorder.exchanges)
        with closing(PeerDisk(peers.peers[1].directory)) as disk:
            tuned = {disk.model(run).parameters.tobytes() for run in runs_of(disk)}
        trial.require(len(tuned) == 1, "the models of the liars' runs are not that of the honest run")

    async def _run_among_liars(
        self, peers: Network, trial: Trial, program: Program, plan: dict[str, Any], trainers: Sequence[DemoPeer]
    ) -> None:
        """Let all trainers lie for one step, each in another way, and then the gateway alone."""
        attacks = list(zip(trainers, cycle(ATTACKS), strict=False))
        await restart_as_liars(peers, attacks)
        known, go = await run_ids(peers), peers.demo.folder / "go"
        async with trio.open_nursery() as nursery:
            await nursery.start(program.run, plan | {"loop": "refused", "go": str(go)})
            await program.until_printed("refused")
            await restart_as_liars(peers, [(trainer, None) for trainer in trainers[1:]])
            go.touch()
        (refused,) = program.of("refused")
        reasons = {trainer.name: ATTACKS[attack] for trainer, attack in attacks}
        why = rejections_text(Counter(reasons.values()), ClientObjective().reason_labels)
        told = f"({why})" in refused["message"] and "the model is unchanged" in refused["message"]
        trial.require(told, f"all refused: the program was told {refused['message']!r}, without {why!r}")
        trial.require(refused["category"] == "user", f"all refused: the failure's category is {refused['category']}")
        before, after = (line["logprobs"] for line in program.of("forward") if line["of"] in ("before", "after"))
        trial.require(before == after, "all refused: the model has changed")
        # The gateway trains no longer after this number of lies.
        lies = min(1 + LIED_STEPS, INVALID_UPDATES_MAX)
        wanted = {name: {reason: lies if name == trainers[0].name else 1} for name, reason in reasons.items()}
        await judge_rejections(trial, peers, "all refused", known, wanted)

    def _kill(self, peers: Network, victim: DemoPeer) -> None:
        peers.kill(victim)
        self._were_down.add(victim.name)

    @asynccontextmanager
    async def _program(
        self, peers: Network, trial: Trial, round_trip_seconds: float = 0.0
    ) -> AsyncIterator[tuple[Program, HttpRecorder, dict[str, Any]]]:
        """Train a base, and give its plan to a program. Afterwards stop the network and require one model at all peers."""
        gateway = peers.peers[0]
        program = Program(self.sdk, peers.demo.folder)
        recording = running_recorder(("127.0.0.1", self.port), API, round_trip_seconds / 2)
        with single_error(), trio.fail_after(TRIAL_SECONDS_MAX):
            base = await based(peers, gateway, {**SMALL_JOB, "seed": str(self.options.seed)})
            before = await view(gateway, base)
            async with recording as recorder:
                url = f"http://127.0.0.1:{recorder.port}{PREFIX}"
                yield program, recorder, {"base_url": url, "key": KEY, "base": base, "rank": RANK, "adam": ADAM}
            await network.holds(partial(has_ended, peers.peers[0], program.unfinished_models), SETTLED_SECONDS_MAX)
            await settle(peers)
            trial.require((await view(gateway, base)).model_root == before.model_root, "the base has changed")
        trial.figures["steps"] = program.steps
        await trio.to_thread.run_sync(peers.stop)
        judge_runs(trial, peers, program, self._were_down)


@contextmanager
def single_error() -> Iterator[None]:
    """Raise the single error of nested nurseries without their groups."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


async def view(peer: DemoPeer, job: str) -> JobView:
    return next(view for view in await peer.client.jobs() if view.job == job)


async def settle(peers: Network) -> None:
    """Wait until all peers have applied the same blocks."""

    async def equal() -> bool:
        return len({await peers.height(peer) for peer in peers.peers}) == 1

    await network.holds(equal, SETTLED_SECONDS_MAX)


async def has_ended(gateway: DemoPeer, unfinished: int) -> bool:
    """Return whether no more than this number of runs goes on. A session's end is decided after its program has ended."""
    views = [view for view in await gateway.client.jobs() if view.objective == OBJECTIVE]
    return sum(view.state != "finished" for view in views) <= unfinished


async def run_ids(peers: Network) -> set[str]:
    return {view.job for view in await peers.peers[0].client.jobs() if view.objective == OBJECTIVE}


async def restart_as_liars(peers: Network, attacks: Sequence[tuple[DemoPeer, str | None]]) -> None:
    """Restart some peers, each with an attack, or as an honest one."""
    for peer, attack in attacks:
        peer.module = ("scenarios.lying_gateway", attack) if attack else HONEST
        await peers.end(peer)
        await peers.restart(peer)


# Judging -------------------------------------------------------------------------------------------------------------


async def judge_rejections(
    trial: Trial, peers: Network, what: str, known: Set[str], wanted: Mapping[str, Mapping[str, int]]
) -> None:
    """Require these reasons of refused updates, by trainer, in the run that is not among the `known` ones."""
    await settle(peers)
    (run,) = await run_ids(peers) - known
    rejected = {peers.name(key): reasons for key, reasons in (await view(peers.peers[0], run)).rejected.items()}
    counts = Counter[str]()
    for reasons in rejected.values():
        counts.update(reasons)
    trial.figures[what] = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "none"
    trial.require(rejected == wanted, f"{what}: rejected for {rejected} instead of {dict(wanted)}")


def judge_checkpoints(trial: Trial, program: Program, base: str) -> None:
    losses, moments = {line["way"]: line["loss"] for line in program.of("continued")}, "client with moments"
    for way in (f"new {moments}", f"same {moments}"):
        differs = abs(losses[way] - losses["unsaved"]) / losses["unsaved"]
        trial.require(differs <= LOSS_DIFFERENCE_MAX, f"{way}: the loss after a checkpoint differs by {differs:.1e}")
    new, same = (losses[f"{which} client without moments"] for which in ("new", "same"))
    trial.require(new == same, f"without moments, a new client has the loss {new}, and the same client {same}")
    trial.require(new != losses["unsaved"], "a client without moments took the step of one with moments")
    (kept,), (listed,) = program.of("checkpoints"), program.of("listed")
    path, for_samples = listed["paths"]
    trial.require(kept["listed"] == sorted((path, for_samples)), f"listed checkpoints: {kept['listed']}")
    trial.require(kept["left"] == [for_samples], f"checkpoints after one was deleted: {kept['left']}")
    trial.require(len(listed["runs"]) == 3, f"training runs: {listed['runs']}")
    trial.require(listed["runs_of_session"] == listed["runs"], f"training runs of the session: {listed['runs_of_session']}")
    trial.require(listed["sessions"] == 1, f"{listed['sessions']} sessions")
    # The weights, and the samplers of the base, the checkpoint and the present model.
    (capabilities,) = program.of("capabilities")
    names = {base, *capabilities["models"]}  # a finished job has an id and a name
    trial.require(len(listed["bases"]) == 4 and {*listed["bases"]} <= names, f"bases {listed['bases']} instead of {names}")
    trial.require(listed["rank"] == RANK, f"rank {listed['rank']}")


def judge_samples(trial: Trial, program: Program, forwards: Mapping[str, Mapping[str, Any]]) -> None:
    """Require that each sampler has the model whose log-probabilities the program has computed under the same name."""
    for line in program.of("sampled"):
        first, *scored = line["prompt_logprobs"]
        wanted = forwards[line["of"]]["logprobs"][0][: len(scored)]
        differs = max(abs(own - of_pass) for own, of_pass in zip(scored, wanted, strict=True))
        trial.require(differs <= LOGPROB_DIFFERENCE_MAX, f"sampler {line['of']}: a log-probability differs by {differs:.1e}")
        trial.require(first is None and line["computed"] == line["prompt_logprobs"], f"sampler {line['of']}: other scores")
        trial.require(line["tokens"][0] == line["tokens"][1], f"sampler {line['of']}: samples without temperature differ")


def judge_completeness(trial: Trial, exchanges: Sequence[Exchange], sdk: str) -> None:
    """Require that the program has used each route that its SDK calls."""
    uncalled = set(UNCALLED[sdk])
    for route in ROUTES.routes:
        if (path := route.path.removeprefix(API)) in PERIODIC:
            continue
        pattern = re.compile(f"{route.method} {PLACEHOLDER.sub('[^/]+', path)}")
        is_called = any(pattern.fullmatch(exchange.call) for exchange in exchanges)
        trial.require(is_called != (path in uncalled), f"{path} was {'called' if is_called else 'not called'}")


def judge_calls(trial: Trial, exchanges: Sequence[Exchange], *, is_killed: bool = False) -> None:
    """Print a table of the calls. Refused calls are problems, and so are broken ones and retries unless a gateway was killed."""
    table = Table(title=f"{trial.what}: calls")
    for column in ("call", "count", "statuses", "retries"):
        table.add_column(column, justify="left" if column in ("call", "statuses") else "right")
    counts = Counter(exchange.call for exchange in exchanges)
    for call, count in sorted(counts.items()):
        statuses = Counter(exchange.status or "broken" for exchange in exchanges if exchange.call == call)
        retries = sum(exchange.retry > 0 for exchange in exchanges if exchange.call == call)
        table.add_row(call, str(count), ", ".join(f"{status}: {times}" for status, times in statuses.items()), str(retries))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    refused = Counter(f"{each.status} to {each.call}" for each in exchanges if each.status >= 400)
    if is_killed:  # Samples are lost with the gateway, and the SDK requests them again. A lost step would end the program.
        refused.pop(LOST, None)
    trial.problems += [f"{count} × {what}" for what, count in refused.items()]
    broken = sum(exchange.status == 0 for exchange in exchanges)
    retries = sum(exchange.retry > 0 for exchange in exchanges)
    trial.figures |= {"calls": len(exchanges), "broken": broken, "retries": retries}
    if not is_killed:
        trial.require(not broken and not retries, f"{broken} calls were broken, and {retries} were retries")


def runs_of(disk: PeerDisk) -> dict[bytes, Job]:
    """Return the jobs of all runs, also of those that are over."""
    return {key: job for key, job in disk.state.jobs.jobs.items() if JobSpec.decode(job.spec).objective == OBJECTIVE}


def judge_runs(trial: Trial, peers: Network, program: Program, were_down: Set[str]) -> None:
    """Judge the runs on the disks of all stopped peers. Each step must be one accepted update, with one root.

    A peer that was down may lack rounds, since it continues from a snapshot.
    """
    closed, last = dict[str, dict[tuple[bytes, int], StoredRound]](), set[tuple[bytes, bytes]]()
    for peer in peers.peers:
        with closing(PeerDisk(peer.directory)) as disk:
            mine = runs_of(disk)
            unfinished = sum(not run.is_over for run in disk.state.module_state(ClientsState).runs.values())
            closed[peer.name] = {(round.job, round.round): round for round in disk.closed_rounds() if round.brief}
        last |= {(key, job.model_root) for key, job in mine.items()}
        problem = f"{peer.name} has {unfinished} unfinished runs instead of {program.unfinished_models}"
        trial.require(unfinished == program.unfinished_models, problem)
        if not were_down:  # A killed gateway may open a run twice, and ends one of them.
            created = len(program.of("created")) + len(program.of("loaded"))
            trial.require(len(mine) == created, f"{peer.name} has {len(mine)} runs instead of {created}")
        accepted = sum(round.stepped for round in closed[peer.name].values())
        problem = f"{peer.name}: {accepted} accepted updates, and the program knows {program.steps} steps"
        trial.require(accepted == program.steps or peer.name in were_down, problem)
    trial.require(len(last) == len({key for key, _ in last}), "the peers have different models in the end")
    rounds = sorted(set().union(*closed.values()))
    for of in rounds:
        roots = {there[of].model_root for there in closed.values() if of in there}
        trial.require(len(roots) == 1, f"the peers have different models after round {of[1]} of {of[0].hex()[:8]}")
    for name, there in closed.items():
        trial.require(len(there) == len(rounds) or name in were_down, f"{name} has {len(there)} of {len(rounds)} rounds")
    trial.figures["rounds on all disks"] = (
        f"{sum(all(of in there for there in closed.values()) for of in rounds)} of {len(rounds)}"
    )


# Texts ---------------------------------------------------------------------------------------------------------------


def texts(random: Random) -> list[list[int]]:
    """Return texts of equal length, as the bytes of a model without a tokenizer."""
    source = default_text()
    starts = [random.randrange(len(source) - TEXT_TOKENS) for _ in range(TEXTS)]
    return [list(source[start : start + TEXT_TOKENS]) for start in starts]


def short_texts(random: Random) -> list[list[int]]:
    source = default_text()
    starts = [random.randrange(len(source) - SHORT_TOKENS_MAX) for _ in range(MANY)]
    return [list(source[start : start + random.randint(2, SHORT_TOKENS_MAX)]) for start in starts]


def free_port() -> int:
    """Return a port of loopback where nobody listens, and that no outgoing connection takes until a killed peer is back."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := choice(PORTS)))
            return port


async def run(options: argparse.Namespace) -> int:
    for sdk in options.sdk:
        require_sdk(sdk)
    attempts = []
    for sdk in options.sdk:
        tuning = Tuning(options, sdk, free_port(), Random(options.seed))
        chosen: tuple[str, Attempt] = next(
            (
                attempt
                for is_chosen, attempt in (
                    (options.parity, ("parity", tuning.run_beside_torch)),
                    (options.pipelined, ("pipelined", tuning.run_pipelined)),
                    (options.kill, ("kill", tuning.run_while_killed)),
                    (options.liar, ("liar", tuning.run_at_liars)),
                )
                if is_chosen
            ),
            ("every call", tuning.run_every_call),
        )
        liars = int(chosen[0] == "every call")
        made = {"malicious": liars, "attack": "false-update", "dress": tuning.serve}
        attempts.append((f"{chosen[0]} {sdk}", chosen[1], made))
    return await conduct_apart(options, "programs with tinker", attempts)


def main() -> int:
    parser = arguments("tinker", __doc__)
    parser.add_argument("--sdk", choices=SDKS, nargs="+", default=SDKS, metavar="VERSION", help="versions of the SDK")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--parity", action="store_true", help="compare losses with those of a loop in plain torch")
    what.add_argument("--pipelined", action="store_true", help="compare pairs that are submitted at once with awaited ones")
    what.add_argument("--kill", action="store_true", help="kill the gateway again and again")
    what.add_argument("--liar", choices=("gateway",), help="let the gateway lie in every step")
    parser.add_argument("--trials", type=COUNT, default=30, metavar="N", help="kills of the gateway")
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
