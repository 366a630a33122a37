"""The report of the demo: results from the disks of the stopped peers, failed checks, and the files of the report."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from consensus.voter_set import faults_tolerated, quorum
from demo.demo_peers import Demo, PeerDisk, all_equal, count_bytes_sent, open_peer_disks
from features.text_tables import pluralize
from ledger.audits.audit_state import MemberAuditRecord
from ledger.model_anchors import format_undone_rounds
from peer.settings.data_directory import storage_errors
from protocol.errors import UserError
from protocol.identity import peer_id, short_id
from protocol.verdicts import verdict_label_by_name
from rlhf.objectives.policy_monitors import PolicyMetrics
from storage.regular_files import require_writable_kind
from training.round_context import REPLAYS

TARGET_BITS_PER_BYTE = 3.6  # largest held-out loss at the end with the default flags; with other flags, the loss must only fall


@dataclass(frozen=True)
class PeerOutcomes:
    """Decisions of the network about the peers of the demo. The keys of all tables are names of peers in the demo."""

    accepted: dict[str, int]
    rejected: dict[str, dict[str, int]]
    expelled: dict[str, int]
    audit_records: dict[str, MemberAuditRecord]  # peer -> its record in sampled audits
    suspensions: dict[str, int]  # suspended peer -> number of its suspensions, by verdicts of votes and by sampled audits

    def audit_record(self, name: str) -> MemberAuditRecord:
        return self.audit_records.get(name, MemberAuditRecord())


def check_outcomes(demo: Demo, equal: bool, finished: bool, outcome: PeerOutcomes) -> list[str]:
    options, failures = demo.options, []
    tolerated = faults_tolerated(len(demo.peers))
    if options.malicious > tolerated:
        failures.append(f"{options.malicious} of {len(demo.peers)} voters are dishonest, but they tolerate only {tolerated}")
    if not finished:
        failures.append("the job did not finish")
    if not equal:
        failures.append("honest peers have different state roots")
    for peer in demo.peers:
        failures += _of_liar(peer.name, demo, outcome) if peer.lies else _of_honest(peer.name, outcome)
    return failures


def _of_honest(name: str, outcome: PeerOutcomes) -> list[str]:
    standing, failures = outcome.audit_record(name), []
    if name in outcome.suspensions:
        failures.append(f"{name} is honest, but was suspended")
    if standing.refuted:
        failures.append(f"{name} is honest, but its challenge was refuted")
    if name in outcome.expelled:
        failures.append(f"{name} is honest, but was expelled")
    return failures


def _of_liar(name: str, demo: Demo, outcome: PeerOutcomes) -> list[str]:
    attack, failures = demo.options.attack, []
    accepted, rejected = outcome.accepted.get(name, 0), outcome.rejected.get(name, {})
    if demo.is_sampled:
        failures += _unpunished(name, attack, outcome)
    # One of its two proposals is honest: voters may accept it before they see the other one.
    elif accepted and attack != "equivocate":
        failures.append(f"the network accepted {pluralize(accepted, 'proposal')} of {name}")
    elif not (accepted or rejected):
        failures.append(f"no proposal of {name} was judged")
    if attack == "silent" and not rejected.get("absent"):
        failures.append(f"no round reports {name} as absent")
    if attack == "equivocate" and name not in outcome.expelled:
        failures.append(f"{name} was not expelled")
    return failures


def _unpunished(name: str, attack: str, outcome: PeerOutcomes) -> list[str]:
    """Return a failure if sampled audits did not find a dishonest peer.

    They follow the vote, so voters may have accepted its proposals.
    """
    standing, accepted = outcome.audit_record(name), outcome.accepted.get(name, 0)
    if attack == "false-challenge":
        return [] if standing.refuted else [f"no challenge of {name} was refuted"]
    if name in outcome.suspensions or (outcome.rejected.get(name) and not accepted):
        return []
    return [f"{name} was not suspended, and {accepted} of its proposals were accepted"]


def check_loss(demo: Demo, held_out: dict[int, float]) -> list[str]:
    if len(held_out) < 2:
        return ["the held-out loss was not measured"]
    first, last = held_out[min(held_out)], held_out[max(held_out)]
    if last >= first:
        return [f"the held-out loss did not fall: {first:.3f} → {last:.3f} bits/byte"]
    if demo.is_default and last > TARGET_BITS_PER_BYTE:
        return [f"the held-out loss of {last:.3f} bits/byte is above {TARGET_BITS_PER_BYTE}"]
    return []


def check_policy_value(rlhf: RlhfResult | None) -> list[str]:
    if rlhf is None:
        return ["the tuned policy was not measured"]
    return [] if rlhf.value > rlhf.reference_value else ["the tuned policy is no better than its reference"]


@dataclass(frozen=True, kw_only=True)
class RlhfResult(PolicyMetrics):
    """Measurements of the policy that the demo tuned. Figures that do not apply to the demo are null."""

    algorithm: str
    beta: float
    rounds: int
    # Ratio of distinct pairs of tokens; trainers of the last round declared this and the next two figures.
    distinct_2: float | None = None
    response_tokens: float | None = None  # mean number of tokens of a response
    length_correlation: float | None = None  # correlation of the length of a response and its score


@dataclass(frozen=True)
class DemoReport:
    """The contents of `report.json`. Peers have their names in the demo; `peers` maps these to peer ids."""

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
    state_roots: dict[str, str]  # peer -> state root on its disk, also of dishonest peers
    model_roots: dict[str, str]
    heights: dict[str, int]
    heldout_bits_per_byte: list[float]  # held-out loss before training, then after each measured round
    heldout_rounds: list[int]
    baseline_bits_per_byte: float | None  # loss of the single process at its best learning rate; null without `--baseline`
    baseline_rates: dict[str, float]
    accepted: dict[str, int]
    rejected: dict[str, dict[str, int]]
    decision_ms_p50: float | None
    decision_ms_p99: float | None
    # Mean over the honest peers; includes copies, votes, retries and reveals for audits.
    bytes_sent_per_peer_per_round: float | None
    # Peer -> kind of traffic -> bytes. "blobs" is the part of "bulk" that is served by digest, and "reveals" the part of "blobs"
    # for audits.
    bytes_sent: dict[str, dict[str, int]]
    # Honest peer with a worker -> mean re-executions before the vote, over rounds with re-executions.
    replays_per_round: dict[str, float]
    pss_mb_per_peer: dict[str, float]  # peer -> largest memory of its daemon and worker together
    refused: dict[str, dict[str, int]]
    evidence: dict[str, list[str]]
    expelled: dict[str, int]  # expelled peer -> height of the block with the evidence
    audit: str
    suspensions: dict[str, int]  # suspended peer -> number of its suspensions
    false_challenges: dict[str, int]  # challenger -> number of its refuted challenges
    undone: list[str]  # texts about rounds whose steps were undone after convictions, with reasons
    rlhf: RlhfResult | None  # measurements of the policy with `--rlhf`, if the last job finished
    seconds_total: float
    seconds_to_first_decision: float | None


def make_report(
    demo: Demo, job: str, finished: bool, seconds: float, baseline: dict[float, float], rlhf: RlhfResult | None = None
) -> DemoReport:
    """Make the report of a demo. `baseline` is learning rate -> held-out bits per byte of a single process with this rate."""
    with open_peer_disks(demo.peers) as disks:
        honest = [disk for peer in demo.honest if (disk := disks[peer.name]) is not None]
        watched = disks[demo.watched.name]
        assert watched is not None
        held_out, outcome = watched.figures(job, "held_out_bits_per_byte"), _outcome(demo, watched, job)
        # True if honest peers have the same state root after every height, and the same model root after every round.
        equal = len(honest) == len(demo.honest) and all_equal([disk.roots() for disk in honest])
        equal = equal and all_equal([disk.model_roots() for disk in honest])
        failures = check_outcomes(demo, equal, finished, outcome)
        failures += check_policy_value(rlhf) if demo.options.rlhf else check_loss(demo, held_out)
        stats = {peer.name: peer.stats for peer in demo.peers if peer.stats is not None}
        watching, names = stats.get(demo.watched.name), _names(demo)
        return DemoReport(
            passed=not failures,
            failures=failures,
            peers={name: key for key, name in names.items()},
            voters=len(demo.peers),
            tolerated=faults_tolerated(len(demo.peers)),
            quorum=quorum(len(demo.peers)),
            malicious=[peer.name for peer in demo.peers if peer.lies],
            attack=demo.options.attack,
            seed=demo.options.seed,
            rounds=watched.job(job).round,
            honest_roots_equal=equal,
            state_roots={name: disk.state.state_root.hex() if disk else "" for name, disk in disks.items()},
            model_roots={name: disk.job(job).model_root.hex() if disk else "" for name, disk in disks.items()},
            heights={name: disk.state.height if disk else 0 for name, disk in disks.items()},
            heldout_bits_per_byte=[value for _, value in sorted(held_out.items())],
            heldout_rounds=sorted(held_out),
            baseline_bits_per_byte=min(baseline.values(), default=None),
            baseline_rates={str(rate): bits for rate, bits in baseline.items()},
            accepted=outcome.accepted,
            rejected=outcome.rejected,
            decision_ms_p50=watching.decision_ms_p50 if watching else None,
            decision_ms_p99=watching.decision_ms_p99 if watching else None,
            bytes_sent_per_peer_per_round=_bytes_per_round(demo, watched.job(job).round),
            bytes_sent={name: dict(item.bytes_sent) for name, item in stats.items()},
            replays_per_round=replays_per_round(
                {peer.name: disk.figures(job, REPLAYS) for peer in demo.honest if peer.trains and (disk := disks[peer.name])}
            ),
            pss_mb_per_peer={peer.name: round(peer.memory_mb, 1) for peer in demo.peers},
            refused={name: dict(item.refused) for name, item in stats.items()},
            evidence={name: [names.get(key, key) for key in item.evidence] for name, item in stats.items()},
            expelled=outcome.expelled,
            audit=watched.spec(job).audit.value,
            suspensions=outcome.suspensions,
            false_challenges={name: standing.refuted for name, standing in outcome.audit_records.items() if standing.refuted},
            undone=[
                format_undone_rounds(of, lambda key: names.get(peer_id(key), short_id(key)))
                for of in watched.job(job).undone_rounds
            ],
            rlhf=rlhf,
            seconds_total=round(seconds, 2),
            seconds_to_first_decision=_first_decision(demo),
        )


def replays_per_round(replays: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return peer -> mean number of re-executions in a round. `replays` is peer -> round -> number."""
    rounds = set().union(*replays.values())
    return {name: round(sum(counts.values()) / len(rounds), 3) for name, counts in replays.items()} if rounds else {}


def _names(demo: Demo) -> dict[str, str]:
    return {peer_id(peer.identity.public): peer.name for peer in demo.peers}


def _outcome(demo: Demo, disk: PeerDisk, job: str) -> PeerOutcomes:
    names, state = _names(demo), disk.state
    view, own = disk.job(job), disk.spec(job).resolved_objective.reason_labels
    suspensions = Counter({key: standing.suspensions for key, standing in state.audits.member_records.items()})
    suspensions.update({key: record.suspensions for key, record in view.trainer_records.items()})
    return PeerOutcomes(
        accepted={names[peer_id(key)]: count for key, count in view.accepted.items()},
        rejected={
            names[peer_id(key)]: {verdict_label_by_name(reason, own): count for reason, count in reasons.items()}
            for key, reasons in view.rejected.items()
        },
        expelled={
            names[peer_id(key)]: member.expelled for key, member in state.members.members.items() if member.expelled is not None
        },
        audit_records={names[peer_id(key)]: standing for key, standing in state.audits.member_records.items()},
        suspensions={names[peer_id(key)]: count for key, count in sorted(suspensions.items()) if count},
    )


def _bytes_per_round(demo: Demo, rounds: int) -> float | None:
    spent = [count_bytes_sent(peer) - peer.bytes_sent_before for peer in demo.honest if peer.stats is not None]
    return round(mean(spent) / rounds) if spent and rounds else None


def _first_decision(demo: Demo) -> float | None:
    """Return the seconds from the start of the demo to the first decision of an honest peer."""
    times = []
    for peer in demo.honest:
        if peer.stats is not None and peer.stats.seconds_to_first_decision is not None:
            started = peer.stats_time - peer.stats.status.uptime_seconds
            times.append(started + peer.stats.seconds_to_first_decision - demo.started)
    return round(min(times), 2) if times else None


@contextmanager
def path_errors_as_user_errors(flag: str, path: Path, remedy: str) -> Iterator[None]:
    """Convert an `OSError` about the path of a flag to a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}; {remedy}") from None


def prepare_output_paths(folder: Path, json_file: str) -> None:
    """Create the folder of the report.

    Raises `UserError` if the folder or the JSON file cannot be written, so that no run is lost.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        with path_errors_as_user_errors("--report", folder, "choose a new folder that you can write to"):
            if folder.exists() and not folder.is_dir():
                raise UserError(f"--report {folder} is a file: choose a new folder")
            if folder.exists() and any(folder.iterdir()):
                raise UserError(f"--report {folder} is not empty: choose a new folder")
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        if json_file:
            _try_file(Path(json_file))
    except UserError:
        for path in made:
            with suppress(OSError):
                path.rmdir()  # removes the new folders of a demo that does not start
        raise


def _try_file(file: Path) -> None:
    with path_errors_as_user_errors("--json", file, "choose a file in an existing folder that you can write to"):
        require_writable_kind(file)
        was_there = file.exists()
        file.open("ab").close()
        if not was_there:
            file.unlink()


def write_report_files(demo: Demo, report: DemoReport, sample: str, export: str) -> None:
    demo.folder.mkdir(parents=True, exist_ok=True)
    write_report(demo, json.dumps({**asdict(report), "export": export}, indent=1) + "\n")
    if sample:
        write_text(demo.folder / "sample.txt", sample + "\n")
    if len(report.heldout_bits_per_byte) > 1:
        draw_loss(report, demo.folder / "loss.svg")
        draw_loss(report, demo.folder / "loss.png")


def write_report(demo: Demo, text: str) -> None:
    write_text(demo.folder / "report.json", text)
    if demo.options.json:
        write_text(Path(demo.options.json), text)


def write_text(file: Path, text: str) -> None:
    """Write a file. Raises `StorageError`, for example for a full disk."""
    with storage_errors(file):
        file.write_text(text)


def draw_loss(report: DemoReport, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        report.heldout_rounds,
        report.heldout_bits_per_byte,
        color="#0b6e4f",
        linewidth=2,
        label=f"{report.voters} peers, {len(report.malicious)} dishonest ({report.attack})",
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
    with storage_errors(file):
        figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
