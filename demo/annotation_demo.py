"""`peer demo --annotate`: peers that serve annotators, a project of tasks, and a simulated crowd that answers them over HTTP."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import trio

from curation.ledger.curation_state import CurationState, TaskStage
from curation.limits import VOTES_MAX
from curation.rpc import CurationRpc, ImportRequest, ImportView
from curation.simulated_annotators import OPTIONS, ServingPeerClient, SimulatedAnnotator, make_annotators, make_tasks
from demo.demo_peers import Demo, DemoPeer, PeerDisk, all_equal, derive_identity
from demo.demo_report import prepare_output_paths, write_report, write_text
from demo.network_demo import (
    keep_running,
    make_directories,
    measure_peers,
    run_until_stopped,
    start_peers,
    stop_peers,
    wait_for_web_address,
)
from features.text_tables import Column, TextTable, pluralize
from peer.commands.table_renderer import make_printer
from protocol.errors import UserError
from protocol.identity import peer_id
from training.data.default_text import default_text

TASKS = 40
PROJECT = "sentences"
# Further tasks with `--keep`, for people who come after the crowd has answered all tasks.
KEPT_TASKS, KEPT_PROJECT = 200, "more sentences"
ACCURACY_MIN = 0.9  # least fraction of right labels among settled tasks
SETTLE_SECONDS_MAX = 300.0  # longest time in which the crowd must settle all tasks; then the demo ends
CONVERGENCE_SECONDS_MAX = 20.0  # longest wait until all peers have the same height and state root
POLL_SECONDS = 0.25
PORT_MAX = 65_535


@dataclass(frozen=True)
class AnnotationOutcome:
    """Results of the annotation: the entry `annotate` of the demo's report."""

    tasks: int
    settled: int
    right: int
    review: int
    votes: float  # mean number of answers per settled task
    # Name of a simulated annotator -> its accuracy, number of annotations, number of accepted ones.
    annotators: dict[str, dict[str, float]] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)  # name of a peer -> state root on the peer's disk

    @property
    def share_right(self) -> float:
        return self.right / self.settled if self.settled else 0.0


def main(options: argparse.Namespace) -> int:
    """Run the demo and return the exit status: 0 if all state roots are equal and enough labels are right."""
    if options.web_port and options.web_port + options.peers - 1 > PORT_MAX:
        raise UserError(f"--web-port {options.web_port}: the last of {options.peers} peers would have a port above {PORT_MAX}")
    folder = Path(options.report or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).expanduser().absolute()
    demo = Demo(options, folder, make_demo_peers(options, folder))
    options.json = str(Path(options.json).expanduser().absolute()) if options.json else ""
    prepare_output_paths(folder, options.json)
    return run_until_stopped(demo, partial(_run, demo))


def make_demo_peers(options: argparse.Namespace, folder: Path) -> list[DemoPeer]:
    """Return the peers of the demo. All peers serve annotators and vote, and all are honest."""
    peers = []
    for number in range(options.peers):
        port = options.web_port + number if options.web_port else 0
        settings = ("--web-listen", f"127.0.0.1:{port}", "--sign-up", "open")
        directory = folder / "peers" / str(number)
        peers.append(DemoPeer(number, derive_identity(options.seed, number), directory, False, False, 1, False, serves=settings))
    return peers


async def _run(demo: Demo) -> int:
    options = demo.options
    people = f"{options.crowd} simulated annotators" if options.crowd else "no simulated annotators"
    print(f"folkmoot demo: {len(demo.peers)} peers serve annotators, {people}", flush=True)
    make_directories(demo)
    await start_peers(demo)
    sites = [await _served(peer) for peer in demo.peers]
    for peer, site in zip(demo.peers, sites, strict=True):
        _say(demo, f"{peer.name} serves annotators at {site.address}")
    truth = make_tasks(default_text().decode(), TASKS, options.seed)
    # A task needs no more answers than the crowd has people.
    project = await _import(demo, PROJECT, truth, min(VOTES_MAX, options.crowd or VOTES_MAX))
    _say(
        demo, f"{demo.watched.name} imported {pluralize(project.tasks, 'task')}: is a sentence intact, or are its words shuffled?"
    )
    if not options.crowd:
        print("Open one of the addresses in a browser to label the tasks.")
        await keep_running(demo)
        return 0
    crowd = make_annotators(options.crowd, sites, truth, options.seed)
    is_finished = await _answered(demo, crowd)
    if is_finished:
        await _alike(demo)
    await measure_peers(demo)
    seconds = time.time() - demo.started
    if not options.keep:
        await trio.to_thread.run_sync(stop_peers, demo)
    report = await trio.to_thread.run_sync(_report, demo, truth, crowd, is_finished, seconds)
    if options.keep:
        kept = make_tasks(default_text().decode(), KEPT_TASKS, options.seed + 1)
        await _import(demo, KEPT_PROJECT, [text for text in kept if text not in truth], 1)
        print(f"\nThe simulated annotators have finished. Label new tasks at {sites[0].address}join")
        await keep_running(demo)
    return 0 if report else 1


def _say(demo: Demo, text: str) -> None:
    print(f"{time.time() - demo.started:6.1f} s  {text}", flush=True)


async def _served(peer: DemoPeer) -> ServingPeerClient:
    host, _, port = (await wait_for_web_address(peer)).removeprefix("http://").rstrip("/").rpartition(":")
    return ServingPeerClient(host, int(port))


async def _import(demo: Demo, name: str, texts: Iterable[str], votes: int) -> ImportView:
    file = demo.folder / f"{name}.jsonl"
    write_text(file, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    request = ImportRequest(str(file), name, "", "label", OPTIONS, False, votes, 1, "", False)
    return await cast(CurationRpc, demo.watched.client).import_tasks(request)


async def _answered(demo: Demo, crowd: list[SimulatedAnnotator]) -> bool:
    """Let the crowd answer until no task is open. Returns False after a timeout, or if the process of a peer ended."""
    limiter = trio.CapacityLimiter(len(crowd))
    finished, shown = False, 0
    async with trio.open_nursery() as nursery:
        for person in crowd:
            nursery.start_soon(person.take_part, limiter)
        with trio.move_on_after(SETTLE_SECONDS_MAX) as patience:
            while not finished:
                gone = [peer.name for peer in demo.peers if peer.process is None or peer.process.poll() is not None]
                if gone:
                    _say(demo, f"{', '.join(gone)} ended unexpectedly")
                    break
                try:
                    (view,) = await cast(CurationRpc, demo.watched.client).projects()
                except UserError:
                    # The peer is stopping: the next pass of this loop finds that its process has ended.
                    await trio.sleep(POLL_SECONDS)
                    continue
                done = view.settled + view.review
                finished = done == view.tasks
                if done >= shown + max(1, view.tasks // 8) or (finished and done > shown):
                    shown = done
                    _say(demo, f"{view.settled} of {pluralize(view.tasks, 'task')} settled, {view.review} for review")
                await trio.sleep(POLL_SECONDS)
        if patience.cancelled_caught:
            _say(demo, f"not all tasks were settled in {SETTLE_SECONDS_MAX:.0f} s")
        nursery.cancel_scope.cancel()
    return finished


async def _alike(demo: Demo) -> None:
    """Wait until all peers have had the same height and state root for a second, or until the timeout."""
    before: set[tuple[int, str]] = set()
    with trio.move_on_after(CONVERGENCE_SECONDS_MAX):
        while True:
            states = {(state.height, state.state_root) for state in [await peer.client.status() for peer in demo.peers]}
            if len(states) == 1 and states == before:
                return
            before = states
            await trio.sleep(1.0)


# The report ----------------------------------------------------------------------------------------------------------


def _report(demo: Demo, truth: Mapping[str, int], crowd: list[SimulatedAnnotator], is_finished: bool, seconds: float) -> bool:
    """Write and print the report of the demo. Returns True if all checks passed."""
    with ExitStack() as opened:
        disks = {peer.name: opened.enter_context(closing(PeerDisk(peer.directory))) for peer in demo.peers}
        states = {name: disk.state_with_rows() for name, disk in disks.items()}
        roots = {name: state.state_root.hex() for name, state in states.items()}
        outcome = score_labels(states[demo.watched.name].module_state(CurationState), list(truth.values()), crowd, roots)
        equal = all_equal([disk.roots() for disk in disks.values()]) and len(set(roots.values())) == 1
    failures = [] if is_finished else ["not all tasks were settled or reviewed"]
    failures += [] if equal else ["peers have different state roots"]
    if outcome.share_right < ACCURACY_MIN:
        failures.append(
            f"only {outcome.right} of {pluralize(outcome.settled, 'settled task')} are right, expected {ACCURACY_MIN:.0%}"
        )
    report = {
        "passed": not failures,
        "failures": failures,
        "peers": {peer.name: peer_id(peer.identity.public) for peer in demo.peers},
        "seed": demo.options.seed,
        "honest_roots_equal": equal,
        "state_roots": roots,
        "heights": {name: state.height for name, state in states.items()},
        "pss_mb_per_peer": {peer.name: round(peer.memory_mb, 1) for peer in demo.peers},
        "seconds_total": round(seconds, 2),
        "annotate": asdict(outcome),
    }
    write_report(demo, json.dumps(report, indent=1) + "\n")
    _show(demo, outcome, failures, seconds)
    return not failures


def score_labels(
    state: CurationState, truth: list[int], crowd: list[SimulatedAnnotator], roots: dict[str, str]
) -> AnnotationOutcome:
    """Return the results of the annotation. `truth` has the right labels, in the order of the tasks."""
    ((_, project),) = state.projects.items()
    settled = [row for _, row in state.tasks.items() if row.stage is TaskStage.SETTLED]
    people = {}
    for person in crowd:
        row = state.annotators.get_record(person.identity.public)
        counts = (row.annotations, row.accepted) if row is not None else (0, 0)
        people[person.name] = {"accuracy": person.accuracy, "annotations": counts[0], "accepted": counts[1]}
    return AnnotationOutcome(
        tasks=project.tasks,
        settled=len(settled),
        right=sum(row.label == (truth[row.number],) for row in settled),
        review=project.review,
        votes=round(sum(row.opened for row in settled) / max(1, len(settled)), 2),
        annotators=people,
        roots=roots,
    )


def _show(demo: Demo, outcome: AnnotationOutcome, failures: list[str], seconds: float) -> None:
    show = make_printer()
    table = TextTable(
        Column("annotator"),
        Column("is right", is_number=True),
        Column("answers", is_number=True),
        Column("accepted", is_number=True),
    )
    for name, row in outcome.annotators.items():
        table.add_row(name, f"{row['accuracy']:.0%}", str(row["annotations"]), str(row["accepted"]))
    show(table)
    right = f"{outcome.right} of them right ({outcome.share_right:.1%})" if outcome.settled else "none of them right"
    print(f"\n{outcome.settled} of {pluralize(outcome.tasks, 'task')} settled, {right}; {outcome.review} for review")
    print(f"{outcome.votes} votes for a settled task, {seconds:.1f} s in all")
    for name, root in outcome.roots.items():
        print(f"state root of {name}  {root}")
    print(f"report: {shlex.quote(str(demo.folder))}")
    print(
        "FAILED: " + "; ".join(failures) if failures else "all peers have equal state roots, and the labels are right", flush=True
    )
