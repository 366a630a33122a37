"""`peer demo`: a whole network on this machine, with real processes, sockets and votes, and with dishonest peers.

It starts peers, watches them through their control sockets like a console, and finally reads their disks for the report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import trio

from demo import rlhf_demo
from demo.demo_peers import TEXT, Demo, DemoPeer, PeerDisk, count_bytes_sent, derive_identity
from demo.demo_report import DemoReport, make_report, path_errors_as_user_errors, prepare_output_paths, write_report_files
from demo.live_display import DemoDisplay
from demo.shutdown_signals import is_interrupt, map_signals_to_interrupt, run_until_hangup
from features import exit_statuses
from ledger.core.genesis import TRAINER, Founder, Genesis
from peer.features import founding_modules, register_features, roles
from peer.settings.data_directory import DataDirectory, storage_errors
from protocol import codec
from protocol.api import JobView, RoundView, TrainRequest
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from protocol.sampling import SamplingOptions
from rlhf.objectives.ppo import ROLE
from rlhf.rpc import PolicyMetricsView, RlhfRpc
from training import corpus as data
from training import rate_sweep
from training.api.job_builder import parse_overrides
from training.data import text_files, token_shards
from training.engine_implementations import USUAL_ENGINE
from training.job_spec import JobSpec, complete_fields
from web.web_service import SERVED_AT_PREFIX

ANY_PORT_FLAGS = ("--web-listen", "127.0.0.1:0")
START_SECONDS_MAX = 60.0  # longest start of a peer until it answers, with Python and numpy on a cold disk
POLL_SECONDS = 0.5
SERVED_SECONDS_MAX = 60.0
STALL_SECONDS_MAX = 180.0  # time without a decided round after which the demo ends
CERTIFY_SECONDS_MAX = 20.0  # longest wait after the last round until the slowest peer has applied the next block
IDLE_SECONDS = 5.0  # time without a decision after which open audits are ignored
# Longest wait for audits after the last round: withheld buffers take 30 s to a report, and 30 s to a judgement.
AUDITS_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 10.0
ROUNDS_MAX = 10_000  # rounds that one call fetches
MEASURE_INTERVAL_SECONDS = 5.0  # seconds between measurements of all peers' memory and traffic
# All instruction sets beyond the baseline for which numpy has code. Since numpy 2.4, X86_V3 is its name of AVX2 with FMA, and
# X86_V4 of AVX-512.
WIDE_CPU_FEATURES = "X86_V3 X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR AVX2 FMA3"


def main(options: argparse.Namespace) -> int:
    """Run the demo and return the exit status: 0 if all checks passed. Raises `UserError` for invalid options."""
    if getattr(options, "preferences", None):
        options.preferences = str(Path(options.preferences).expanduser().absolute())
    if options.data:
        options.data = str(Path(options.data).expanduser().absolute())
        _require_usable(Path(options.data))
    folder = Path(options.report or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).expanduser().absolute()
    demo = Demo(options, folder, assign_roles(options, folder))
    if options.attack in ("false-challenge", "lazy") and not demo.is_sampled:
        raise UserError(f"--attack {options.attack}: only sampled audits have auditors and challenges; add --audit sampled")
    # Invalid settings of the job are reported before a peer starts, too.
    register_features()
    rounds = {"rounds": str(options.rounds)} if options.rounds else {}
    if options.rlhf:
        rlhf_demo.check_demo(demo)
    else:
        replace(JobSpec(name="demo", data=bytes(32)), **complete_fields(parse_overrides(demo.overrides | rounds))).validated()
    options.json = str(Path(options.json).expanduser().absolute()) if options.json else ""
    prepare_output_paths(folder, options.json)
    return run_until_stopped(demo, partial(_run, demo))


def run_until_stopped(demo: Demo, run: Callable[[], Awaitable[int]]) -> int:
    """Return the result of `run`, or the exit status of Ctrl-C. All peers are stopped in any case."""
    map_signals_to_interrupt()
    try:
        return trio.run(run_until_hangup, run)
    except BaseException as error:
        if not is_interrupt(error):
            raise
        stop_peers(demo)
        print(f"\npeer demo: interrupted; {_all_stopped(demo)}", file=sys.stderr)
        return exit_statuses.INTERRUPTED
    finally:
        stop_peers(demo)


def _require_usable(path: Path) -> None:
    """Raise `UserError` if a path has no usable training data. The check comes before a peer starts."""
    with path_errors_as_user_errors("--data", path, "give a readable text file or folder"):
        if token_shards.is_token_folder(path):
            token_shards.open_token_folder(path)
        else:
            findings = text_files.TextFileReport()
            data.require_enough_text(
                JobSpec(name="demo"), sum(map(len, text_files.read_text(path, findings=findings))), str(path)
            )
            for note in findings.report_lines():
                print(f"peer demo: {note}", file=sys.stderr)


def assign_roles(options: argparse.Namespace, folder: Path) -> list[DemoPeer]:
    """Return the peers of the demo with their roles. All peers vote, and the last trainers are dishonest.

    At least n − f peers train and re-execute, which is not less than the 2f + 1 that audits need. To judge a false challenge,
    f + 1 honest trainers are needed besides the accused trainer and the dishonest ones.
    """
    # In the RLHF demo on text, a peer trains the base model and tunes it. The role `full` does both kinds of work, and also
    # serves annotators.
    count, liars, rlhf = options.peers, options.malicious, getattr(options, "rlhf", None)  # callers may lack this flag
    faults = (count - 1) // 3
    engines = getattr(options, "engines", None) or ()  # callers may lack this flag and the next one
    asked = max(getattr(options, "trainers", None) or 0, len(engines) + liars if engines else 0)
    trainers = max(count - faults, min(count, liars + 1), 2 * faults + 2 if options.attack == "false-challenge" else 0, asked)
    peers = []
    for number in range(count):
        trains = number < trainers
        threads = 1 + number % 2 if options.mixed else 1
        restricted = options.mixed and number == 1
        peers.append(
            DemoPeer(
                number,
                derive_identity(options.seed, number),
                folder / "peers" / str(number),
                trains,
                trains and number >= trainers - liars,
                threads,
                restricted,
                trains_as=ROLE if rlhf else TRAINER,
                serves=ANY_PORT_FLAGS if trains and rlhf == TEXT else (),
                engine=engines[min(number, len(engines) - 1)] if engines and trains else USUAL_ENGINE,
            )
        )
    if getattr(options, "web", False):  # callers may lack this flag
        first = next(peer for peer in peers if peer.trains and not peer.lies)
        first.serves = ("--web-listen", f"127.0.0.1:{options.web_port or 0}")
    return peers


async def _run(demo: Demo) -> int:
    display = DemoDisplay(demo)
    with display:
        make_directories(demo)
        await start_peers(demo)
        display.print_line(f"{len(demo.peers)} peers are running, with data in", demo.folder)
        if demo.options.web:
            try:
                demo.page = f"{await wait_for_web_address(demo.watched)}live"
                display.print_line(f"watch it at {demo.page}")
            except UserError as error:  # the demo continues without the page `live`
                display.print_line(str(error))
        job = await begin_job(demo)
        rounds, finished = await watch_job(demo, job, display)
        while finished and (then := await rlhf_demo.wait_for_next_job(demo, job)):
            display.print_line(f"job {job[:8]} is finished, {then[:8]} continues from its model")
            job = then
            rounds, finished = await watch_job(demo, job, display)
        report = await make_final_report(demo, job, rounds, finished, display)
    display.print_summary(report)
    if demo.options.keep:
        await keep_running(demo)
    return exit_statuses.SUCCESS if report.passed else exit_statuses.FAILURE


# Starting and stopping -----------------------------------------------------------------------------------------------


async def wait_for_web_address(peer: DemoPeer) -> str:
    """Return the address of a peer's pages, for which an event is awaited. Raises `UserError` if the peer serves no pages."""
    seen = 0
    with trio.move_on_after(SERVED_SECONDS_MAX):
        while True:
            for event in await peer.client.events(seen, POLL_SECONDS):
                seen = event.number
                if event.text.startswith(SERVED_AT_PREFIX):
                    return event.text.removeprefix(SERVED_AT_PREFIX)
                if event.text.startswith("web pages are not served"):
                    raise UserError(f"{peer.name}: {event.text}")
    raise UserError(f"{peer.name} serves no annotators; its log is {peer.directory / 'peer.log'}")


def make_directories(demo: Demo) -> None:
    founders = {peer.identity.public: Founder(peer.name, roles()[peer.role].registered_roles) for peer in demo.peers}
    genesis = Genesis(
        "demo", int(time.time() * 1000), secrets.token_bytes(16), dict(sorted(founders.items())), founding_modules()
    )
    for peer in demo.peers:
        directory = DataDirectory.create(peer.directory)
        directory.write_identity(peer.identity)
        directory.write_genesis(codec.encode(genesis))


async def start_peers(demo: Demo) -> None:
    first, *others = demo.peers
    launch_peer(demo, first, bootstrap="")
    await wait_until_ready(first)
    for peer in others:
        launch_peer(demo, peer, first.address)
    async with trio.open_nursery() as nursery:
        for peer in others:
            nursery.start_soon(wait_until_ready, peer)


def launch_peer(demo: Demo, peer: DemoPeer, bootstrap: str, command: Sequence[str] = ("run",)) -> None:
    accomplices = ",".join(peer_id(p.identity.public) for p in demo.peers if p.lies) or "-"
    lies = (*peer.module[:-1], "demo.lying_trainer", demo.options.attack, accomplices)
    module = lies if peer.lies else peer.module
    settings = [
        *("--data-dir", str(peer.directory), "--role", peer.role, "--name", peer.name, *peer.serves),
        *("--listen", peer.address, "--threads", str(peer.threads), "--engine", peer.engine),
        *("--log-level", "info", "--no-console"),
        "--evaluate" if peer is demo.watched and peer.trains and peer.evaluates else "--no-evaluate",
        *(("--bootstrap", bootstrap) if bootstrap else ()),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PEER_")} | peer.environment
    if peer.without_avx:
        environment |= {"NPY_DISABLE_CPU_FEATURES": WIDE_CPU_FEATURES, "ATEN_CPU_CAPABILITY": "avx2"}
    with (peer.directory / "peer.log").open("ab") as log:
        # Each peer has a session of its own, so that Ctrl-C reaches only this process, which then stops its peers in order.
        peer.process = subprocess.Popen(
            [sys.executable, "-m", *module, *command, *settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


async def wait_until_ready(peer: DemoPeer) -> None:
    """Wait until the peer answers on its control socket. Raises `UserError` if the peer does not start."""
    deadline = trio.current_time() + START_SECONDS_MAX
    while trio.current_time() < deadline:
        if peer.process is None or peer.process.poll() is not None:
            raise UserError(f"{peer.name} did not start: {last_line(peer.directory / 'peer.log')}")
        with contextlib.suppress(UserError):
            peer.address = (await peer.client.status()).address
            return
        await trio.sleep(0.05)
    raise UserError(f"{peer.name} does not answer after {START_SECONDS_MAX:.0f} s; its log is {peer.directory / 'peer.log'}")


def last_line(file: Path) -> str:
    """Return the last line of a log with a letter or digit: the traceback of an exception group ends with a line of dashes."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if any(map(str.isalnum, line))]
    return lines[-1].strip(" |") if lines else "its log is empty"


def stop_peers(demo: Demo) -> None:
    """Stop all peers that still run: send SIGTERM, wait, and kill peers that do not end."""
    running = [peer.process for peer in demo.peers if peer.process is not None and peer.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS_MAX
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# The job -------------------------------------------------------------------------------------------------------------


async def begin_job(demo: Demo) -> str:
    options = demo.options
    for peer in demo.peers:
        await measure_peer(peer)
        peer.bytes_sent_before = count_bytes_sent(peer)
    if options.rlhf:
        return await rlhf_demo.start_first_job(demo)
    # The demo shows how dishonest peers are found, so it accepts settings with which they are found late.
    request = TrainRequest("demo", options.data or "", options.rounds or 0, 0, demo.overrides, accept_risk=True)
    return await demo.watched.client.start_job(request)


async def watch_job(demo: Demo, job: str, display: DemoDisplay) -> tuple[tuple[RoundView, ...], bool]:
    """Watch the job to its end. Returns (rounds of the job, whether it finished): it may stall, or an honest peer may end."""
    rounds: tuple[RoundView, ...] = ()
    last_progress = measured = trio.current_time()
    while True:
        view = await job_view(demo, job)
        fresh = await demo.watched.client.rounds(ROUNDS_MAX)
        if len(fresh) > len(rounds):
            last_progress = trio.current_time()
        rounds = fresh
        if trio.current_time() - measured >= MEASURE_INTERVAL_SECONDS or view.state == "finished":
            measured = trio.current_time()
            await measure_peers(demo)
            display.print_expulsions()
        display.update(view, rounds)
        if view.state == "finished":
            return rounds, True
        gone = [peer.name for peer in demo.honest if peer.process is None or peer.process.poll() is not None]
        if gone or trio.current_time() - last_progress > STALL_SECONDS_MAX:
            display.print_line(
                f"{', '.join(gone)} ended unexpectedly" if gone else f"no round was decided for {STALL_SECONDS_MAX:.0f} s"
            )
            return rounds, False
        await trio.sleep(POLL_SECONDS)


async def job_view(demo: Demo, job: str) -> JobView:
    return next(item for item in await demo.watched.client.jobs() if item.job == job)


async def measure_peers(demo: Demo) -> None:
    async with trio.open_nursery() as nursery:
        for peer in demo.peers:
            nursery.start_soon(measure_peer, peer)


async def measure_peer(peer: DemoPeer) -> None:
    with contextlib.suppress(UserError):
        peer.stats = await peer.client.stats()
        peer.stats_time = time.time()
        peer.memory_mb = max(peer.memory_mb, peer.stats.memory_mb)


async def make_final_report(
    demo: Demo, job: str, rounds: tuple[RoundView, ...], finished: bool, display: DemoDisplay
) -> DemoReport:
    display.print_line("waiting for the last block, then checking the disk of each peer")
    patience = AUDITS_SECONDS_MAX if demo.is_sampled else CERTIFY_SECONDS_MAX
    with trio.move_on_after(patience if finished else 1.0):
        await _settled(demo, job)
    await measure_peers(demo)
    if finished:
        rounds = await demo.watched.client.rounds(ROUNDS_MAX)
        display.update(await job_view(demo, job), rounds)
    text = export = ""
    watched: tuple[PolicyMetricsView, ...] = ()
    if finished:
        if demo.options.rlhf:
            watched = await cast(RlhfRpc, demo.watched.client).policy_metrics()
        else:
            how = SamplingOptions(max_tokens=400, seed=demo.options.seed)
            async with contextlib.aclosing(demo.watched.client.sample_text("The ", how)) as pieces:
                text = "".join([piece.text async for piece in pieces])
        export = (await demo.watched.client.export_run(str(demo.folder / "export"))).path
    seconds = time.time() - demo.started
    if not demo.options.keep:
        await trio.to_thread.run_sync(stop_peers, demo)
    baseline: dict[float, float] = {}
    if demo.options.baseline and finished:
        display.print_line("training the same model in one process, on the same number of samples")
        baseline = await train_baseline(demo, job, rounds)
    tuned = await rlhf_demo.evaluate_policy(demo, job, watched) if demo.options.rlhf and finished else None
    report = await trio.to_thread.run_sync(make_report, demo, job, finished, seconds, baseline, tuned)
    write_report_files(demo, report, text, export)
    return report


async def _settled(demo: Demo, job: str) -> None:
    """Wait until all honest peers have the same state after the last round, the last model is measured, and audits have ended.

    An audit that waits for a dishonest trainer never ends. Open audits are ignored after `IDLE_SECONDS` without a new block.
    """
    height, since = 0, trio.current_time()
    while True:
        states = [await peer.client.status() for peer in demo.honest]
        jobs = [item for peer in demo.honest for item in await peer.client.jobs() if item.job == job]
        views = await demo.watched.client.rounds(1)
        same = len({(state.height, state.state_root) for state in states}) == 1
        if states[0].height != height:
            height, since = states[0].height, trio.current_time()
        audited = not any(view.audits_open for view in jobs) or trio.current_time() - since > IDLE_SECONDS
        closed = all(view.state == "finished" for view in jobs) and states[0].height > views[-1].height and audited
        if same and closed and (demo.options.rlhf or views[-1].held_out_bits_per_byte is not None):
            return
        await trio.sleep(0.1)


async def keep_running(demo: Demo) -> None:
    print("\nThe network keeps running. In another terminal, use:")
    for peer in demo.peers:
        command = shlex.join([sys.argv[0], "console", "--data-dir", str(peer.directory)])
        print(f"  {command}    # {peer.name}, {short_id(peer.identity.public)}")
    if demo.page:
        print(f"  {demo.page}")
    print("Ctrl-C stops the network.", flush=True)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            break
    await trio.to_thread.run_sync(stop_peers, demo)
    print(f"peer demo: {_all_stopped(demo)}")


def _all_stopped(demo: Demo) -> str:
    return f"all {len(demo.peers)} peers are stopped; their data is in {shlex.quote(str(demo.folder))}"


# The baseline --------------------------------------------------------------------------------------------------------


# Learning rates of the baseline. All are tried, and more if the best rate is at an edge. The best result counts, because an
# untuned baseline proves nothing.
# Rates for the default model and rate: among rates from 0.012 to 0.048, 0.012 and 0.024 were best.
BASELINE_RATES = (1e-2, 1.6e-2, 2.6e-2)
BASELINE_FACTORS = (1 / 2, 1, 2)  # rates for other settings, as multiples of the job's rate


def baseline_rates(spec: JobSpec) -> tuple[float, ...]:
    default = replace(JobSpec(name="demo"), **complete_fields({}))
    if (spec.model, spec.inner, spec.inner_rate) == (default.model, default.inner, default.inner_rate):
        return BASELINE_RATES
    return tuple(factor * spec.inner_rate for factor in BASELINE_FACTORS)


async def train_baseline(demo: Demo, job: str, rounds: tuple[RoundView, ...]) -> dict[float, float]:
    """Train the same model in one process on as many samples as the network accepted.

    Returns learning rate -> held-out bits per byte.
    """
    with contextlib.closing(PeerDisk(demo.watched.directory)) as disk:
        spec = disk.spec(job)
    spec_file = demo.folder / "job.spec"
    with storage_errors(spec_file):
        spec_file.write_bytes(spec.encode())
    accepted = [sum(verdict == "accept" for verdict in view.verdicts.values()) for view in rounds]
    trainers = max(1, round(sum(accepted) / max(1, len(accepted))))
    batch = trainers * spec.batch
    steps = sum(accepted) * spec.local_steps * spec.batch // batch
    text = next((demo.watched.directory / "texts").glob("*.txt"))
    command = [
        *(
            sys.executable,
            "-m",
            "training.engines.pytorch.single_process_baseline",
            "--spec",
            str(spec_file),
            "--text",
            str(text),
        ),
        *("--steps", str(steps), "--batch", str(batch), "--threads", "2"),
    ]
    line = rate_sweep.RateSweep(baseline_rates(spec))
    while (rate := line.next_value()) is not None:
        done = await trio.run_process([*command, "--rate", str(rate)], capture_stdout=True)
        line.losses[rate] = json.loads(done.stdout)[-1]
    return dict(sorted(line.losses.items()))
