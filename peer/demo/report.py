"""What the demo found, read from every peer's disk after it stopped: `report.json`, a picture, a sample of text."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from consensus.quorum import faults_tolerated, quorum
from features.tables import counted
from ledger.audits.state import Standing
from ledger.core.genesis import Genesis
from ledger.jobs import Job
from ledger.state import State
from peer.demo.cast import Demo, DemoPeer, sent
from peer.features import rules_of
from peer.settings.datadir import DataDirectory
from protocol.api import RoundView
from protocol.errors import FolkmootError, UserError
from protocol.identity import peer_id
from protocol.reasons import shown
from storage.store import Store
from training.data.corpus import Manifest, text_path
from training.host import ModelHost, directory_of
from training.replicated.model import ReplicatedModel
from training.spec import JobSpec

TARGET_BITS_PER_BYTE = 3.6  # with the default flags; otherwise the loss must end below its start


class Disk:
    """A stopped peer's data directory."""

    def __init__(self, path: Path) -> None:
        self._directory = DataDirectory(path)
        genesis = Genesis.decode(self._directory.read_genesis())
        self._rules = rules_of(genesis, ModelHost(self._directory.models))
        self._store = Store(self._directory.ledger, genesis.chain_id)

    def close(self) -> None:
        self._store.close()

    @property
    def state(self) -> State:
        return self._rules.restored(self._store.state())

    def state_with_rows(self) -> State:
        state = self.state
        self._store.rows.attach(state.tables)
        return state

    def roots(self) -> dict[int, str]:
        return {height: root.hex() for height, root in self._store.roots().items()}

    def model_roots(self) -> dict[tuple[str, int], str]:
        return {(item.job.hex(), item.round): item.model_root.hex() for item in self._store.rounds(1_000_000)}

    def job(self, job: str) -> Job:
        return self.state.jobs.jobs[bytes.fromhex(job)]

    def spec(self, job: str) -> JobSpec:
        return JobSpec.decode(self.job(job).spec)

    def model(self, job: bytes) -> ReplicatedModel:
        """The newest one."""
        return ReplicatedModel.open(directory_of(self._directory.models, job, self.state.jobs.jobs[job].round))

    def blob(self, digest: bytes) -> bytes:
        return (self._directory.blobs / digest.hex()).read_bytes()

    def text(self, spec: JobSpec) -> Path:
        """The file of what the job is trained on, as the peer assembled it."""
        assert spec.data is not None
        return text_path(self._directory.path / "texts", Manifest.decode(self.blob(spec.data)))

    def held_out(self, job: str) -> dict[int, float]:
        return self.figures(job, "held_out_bits_per_byte")

    def figures(self, job: str, name: str) -> dict[int, float]:
        """By round, what this peer has measured under this name."""
        measured = self._store.measured(bytes.fromhex(job))
        return {number: figures[name] for number, figures in measured.items() if name in figures}


@dataclass(frozen=True, kw_only=True)
class Rlhf:
    """What was tuned. A value is J = E r − β·KL; null is what has no meaning for this demo."""

    algorithm: str
    beta: float
    rounds: int
    reference_value: float
    value: float
    kl: float  # nats
    score: float
    optimum: float | None = None
    gap_closed: float | None = None  # (value − reference_value) / (optimum − reference_value)
    distinct_2: float | None = None  # of the last round, as its trainers declared it; as the next two
    tokens: float | None = None  # of a response
    length_correlation: float | None = None  # with the score
    pair_accuracy: float | None = None
    linear_accuracy: float | None = None


@dataclass(frozen=True)
class Report:
    """`report.json`. Peers are named as in the demo; the peer ids are in `peers`."""

    passed: bool
    failures: list[str]
    peers: dict[str, str]
    voters: int
    tolerated: int
    quorum: int
    malicious: list[str]
    attack: str
    seed: int
    rounds: int
    honest_roots_equal: bool
    state_roots: dict[str, str]  # read from each peer's disk, liars included
    model_roots: dict[str, str]
    heights: dict[str, int]
    heldout_bits_per_byte: list[float]  # before training, then after each measured round
    heldout_rounds: list[int]
    baseline_bits_per_byte: float | None  # at the best of the rates tried; null without --baseline
    baseline_rates: dict[str, float]
    accepted: dict[str, int]
    rejected: dict[str, dict[str, int]]
    decision_ms_p50: float | None
    decision_ms_p99: float | None
    bytes_sent_per_peer_per_round: float | None  # mean over the honest peers: every copy, vote and retry, and audit reveals
    bytes_sent: dict[
        str, dict[str, int]
    ]  # by kind; "blobs" is the part of "bulk" that is served by digest, "reveals" of that what audits ask for
    pss_mb_per_peer: dict[str, float]  # the most seen: daemon and worker
    refused: dict[str, dict[str, int]]
    evidence: dict[str, list[str]]
    expelled: dict[str, int]  # by decided evidence; at which height
    audit: str
    suspensions: dict[str, int]  # after sampled audits; of those that had any, as the next
    false_challenges: dict[str, int]
    rlhf: Rlhf | None  # with --rlhf, of a job that ended
    seconds_total: float
    seconds_to_first_decision: float | None


def make_report(
    demo: Demo,
    job: str,
    rounds: tuple[RoundView, ...],
    finished: bool,
    seconds: float,
    baseline: dict[float, float],
    rlhf: Rlhf | None = None,
) -> Report:
    disks: dict[str, Disk | None] = {peer.name: _open(peer) for peer in demo.peers}
    names = {peer_id(peer.identity.public): peer.name for peer in demo.peers}
    honest = {peer.name: disk for peer in demo.honest if (disk := disks[peer.name]) is not None}
    watched = honest[demo.watched.name]
    held_out = watched.held_out(job)
    view = watched.job(job)
    accepted = {names[peer_id(key)]: count for key, count in view.accepted.items()}
    own = watched.spec(job).kind.labels
    rejected = {
        names[peer_id(key)]: {shown(reason, own): count for reason, count in reasons.items()}
        for key, reasons in view.rejected.items()
    }
    equal = len(honest) == len(demo.honest) and roots_equal(list(honest.values()))
    stats = {peer.name: peer.stats for peer in demo.peers if peer.stats is not None}
    watching = stats.get(demo.watched.name)
    members = watched.state.members.members
    expelled = {names[peer_id(key)]: member.expelled for key, member in members.items() if member.expelled is not None}
    standings = {names[peer_id(key)]: standing for key, standing in watched.state.audits.standings.items()}
    failures = find_failures(demo, equal, finished, accepted, rejected, expelled, standings)
    failures += _loss_failures(demo, held_out) if not demo.options.rlhf else _value_failures(rlhf)
    report = Report(
        passed=not failures,
        failures=failures,
        peers={name: key for key, name in names.items()},
        voters=len(demo.peers),
        tolerated=faults_tolerated(len(demo.peers)),
        quorum=quorum(len(demo.peers)),
        malicious=[peer.name for peer in demo.peers if peer.lies],
        attack=demo.options.attack,
        seed=demo.options.seed,
        rounds=view.round,
        honest_roots_equal=equal,
        state_roots={name: disk.state.root.hex() if disk else "" for name, disk in disks.items()},
        model_roots={name: disk.job(job).model_root.hex() if disk else "" for name, disk in disks.items()},
        heights={name: disk.state.height if disk else 0 for name, disk in disks.items()},
        heldout_bits_per_byte=[value for _, value in sorted(held_out.items())],
        heldout_rounds=sorted(held_out),
        baseline_bits_per_byte=min(baseline.values(), default=None),
        baseline_rates={str(rate): bits for rate, bits in baseline.items()},
        accepted=accepted,
        rejected=rejected,
        decision_ms_p50=watching.decision_ms_p50 if watching else None,
        decision_ms_p99=watching.decision_ms_p99 if watching else None,
        bytes_sent_per_peer_per_round=_bytes_per_round(demo, view.round),
        bytes_sent={name: dict(item.bytes_sent) for name, item in stats.items()},
        pss_mb_per_peer={peer.name: round(peer.memory_mb, 1) for peer in demo.peers},
        refused={name: dict(item.refused) for name, item in stats.items()},
        evidence={name: [names.get(key, key) for key in item.evidence] for name, item in stats.items()},
        expelled=expelled,
        audit=watched.spec(job).audit.value,
        suspensions={name: standing.suspensions for name, standing in standings.items() if standing.suspensions},
        false_challenges={name: standing.refuted for name, standing in standings.items() if standing.refuted},
        rlhf=rlhf,
        seconds_total=round(seconds, 2),
        seconds_to_first_decision=_first_decision(demo),
    )
    for disk in disks.values():
        if disk is not None:
            disk.close()
    return report


def _open(peer: DemoPeer) -> Disk | None:
    try:
        return Disk(peer.directory)
    except (FolkmootError, sqlite3.Error):
        return None


def roots_equal(disks: list[Disk]) -> bool:
    """Whether all computed the same state root after every height, and the same model root after every round."""
    return all(same(tables) for tables in ([disk.roots() for disk in disks], [disk.model_roots() for disk in disks]))


def same(tables: list[dict[int, str]] | list[dict[tuple[str, int], str]]) -> bool:
    return bool(tables[0]) and all(table == tables[0] for table in tables)


def find_failures(
    demo: Demo,
    equal: bool,
    finished: bool,
    accepted: dict[str, int],
    rejected: dict[str, dict[str, int]],
    expelled: Container[str],
    standings: Mapping[str, Standing],
) -> list[str]:
    options, failures = demo.options, []
    tolerated = faults_tolerated(len(demo.peers))
    if options.malicious > tolerated:
        failures.append(
            f"{options.malicious} liars of {len(demo.peers)} voters are beyond the bound f = {tolerated}: nothing is promised"
        )
    if not finished:
        failures.append("the job did not finish")
    if not equal:
        failures.append("honest peers hold different roots")
    for peer in demo.peers:
        standing = standings.get(peer.name, Standing())
        if peer.lies and demo.is_sampled:
            failures += _unpunished(peer.name, options.attack, standing, accepted, rejected)
        elif peer.lies and accepted.get(peer.name):
            failures.append(f"the network accepted {counted(accepted[peer.name], 'proposal')} of {peer.name}")
        elif peer.lies and not rejected.get(peer.name):
            failures.append(f"{peer.name} was never named")
        if not peer.lies and standing.suspensions:
            failures.append(f"{peer.name} is honest and was suspended")
        if not peer.lies and standing.refuted:
            failures.append(f"{peer.name} is honest and its challenge was found false")
        if peer.lies and options.attack == "silent" and not rejected.get(peer.name, {}).get("absent"):
            failures.append(f"{peer.name} was not named absent")
        if peer.lies and options.attack == "equivocate" and peer.name not in expelled:
            failures.append(f"{peer.name} was not expelled")
        if not peer.lies and peer.name in expelled:
            failures.append(f"{peer.name} is honest and was expelled")
    return failures


def _unpunished(
    name: str, attack: str, standing: Standing, accepted: dict[str, int], rejected: dict[str, dict[str, int]]
) -> list[str]:
    """Sampled audits come after the vote: a lie may be accepted, but then it must be found out."""
    if attack == "false-challenge":
        return [] if standing.refuted else [f"no challenge of {name} was found false"]
    if standing.suspensions or (rejected.get(name) and not accepted.get(name)):
        return []
    return [f"{name} was not suspended, {accepted.get(name, 0)} of its proposals were accepted"]


def _loss_failures(demo: Demo, held_out: dict[int, float]) -> list[str]:
    if len(held_out) < 2:
        return ["the held-out loss was not measured"]
    first, last = held_out[min(held_out)], held_out[max(held_out)]
    if last >= first:
        return [f"held-out loss did not fall: {first:.3f} → {last:.3f} bits/byte"]
    if demo.is_default and last > TARGET_BITS_PER_BYTE:
        return [f"held-out loss {last:.3f} bits/byte is above {TARGET_BITS_PER_BYTE}"]
    return []


def _value_failures(rlhf: Rlhf | None) -> list[str]:
    if rlhf is None:
        return ["what was tuned was not measured"]
    return [] if rlhf.value > rlhf.reference_value else ["the tuned policy is no better than its reference"]


def _bytes_per_round(demo: Demo, rounds: int) -> float | None:
    spent = [sent(peer) - peer.traffic_before for peer in demo.honest if peer.stats is not None]
    return round(mean(spent) / rounds) if spent and rounds else None


def _first_decision(demo: Demo) -> float | None:
    """Since the demo's own start; the processes tell their start by how long they are up."""
    times = []
    for peer in demo.honest:
        if peer.stats is not None and peer.stats.seconds_to_first_decision is not None:
            started = peer.looked - peer.stats.status.uptime_seconds
            times.append(started + peer.stats.seconds_to_first_decision - demo.started)
    return round(min(times), 2) if times else None


# Files ---------------------------------------------------------------------------------------------------------------


@contextmanager
def usable(flag: str, path: Path, remedy: str) -> Iterator[None]:
    """What the operating system says about the path of a flag becomes a line for a person."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}; {remedy}") from None


def make_places(folder: Path, json_file: str) -> None:
    """Makes the folder of the report and tries whether both places can be written: the end of a run would be too late."""
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        _make_folder(folder)
        if json_file:
            _try_file(Path(json_file))
    except UserError:
        for path in made:
            with suppress(OSError):
                path.rmdir()  # nothing is left of a demo that never started
        raise


def _make_folder(folder: Path) -> None:
    with usable("--report", folder, "name a new folder where you may write"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--report {folder} is a file: name a new folder")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--report {folder} is not empty: name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _try_file(file: Path) -> None:
    with usable("--json", file, "name a file in a folder that is there, where you may write"):
        was_there = file.exists()
        file.open("ab").close()
        if not was_there:
            file.unlink()


def write_files(demo: Demo, report: Report, sample: str, export: str) -> None:
    demo.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**asdict(report), "export": export}, indent=1) + "\n"
    (demo.folder / "report.json").write_text(text)
    if demo.options.json:
        Path(demo.options.json).write_text(text)
    if sample:
        (demo.folder / "sample.txt").write_text(sample + "\n")
    if len(report.heldout_bits_per_byte) > 1:
        draw_loss(report, demo.folder / "loss.svg")
        draw_loss(report, demo.folder / "loss.png")


def draw_loss(report: Report, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        report.heldout_rounds,
        report.heldout_bits_per_byte,
        color="#0b6e4f",
        linewidth=2,
        label=f"{report.voters} peers, {len(report.malicious)} lying ({report.attack})",
    )
    if report.baseline_bits_per_byte is not None:
        axes.axhline(report.baseline_bits_per_byte, color="#8a8a8a", linestyle="--", label="one process, same accepted samples")
    axes.set_xlabel("rounds decided")
    axes.set_ylabel("held-out bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    last = report.heldout_bits_per_byte[-1]
    axes.annotate(f"{last:.2f}", (report.heldout_rounds[-1], last), textcoords="offset points", xytext=(0, 8), ha="right")
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
