"""`python -m scenarios.determinism`: peers that compute differently hold the same bits and reject no honest proposal.

Torch runs with 1 and 2 threads in one network. numpy, OpenBLAS, torch, MKL and oneDNN use other instruction sets at each trainer.
Each peer computes its own roots, which are read from its disk after it stopped. All trainers are honest, and another trainer
re-executes each proposal: no verdict and no vouch may reject the contents of one. With `--audit sampled` two others re-execute
each accepted proposal, and no peer may be challenged. Three of four peers train: `--rounds 340 --accepted-min 1000` gives a
thousand proposals if at most twenty are late. With `--gpu` the first trainer computes on the first GPU and the others on
processors: each audits the other kind's work.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import trio

from benchmarks import dispatch
from benchmarks.dispatch import Environment
from demo.demo_peers import DemoPeer, PeerDisk
from ledger.audits.audit_state import AuditResult
from peer.commands.view_tables import NEUTRAL_REASONS
from protocol.errors import UserError
from protocol.verdicts import Verdict, verdict_label
from scenarios import network
from scenarios.network import Network
from scenarios.rlhf import based, calls, tunes
from scenarios.trials import COUNT, arguments, report
from training.job_spec import AuditMode

TERMS = {"prompt_tokens": "8", "response_tokens": "16", "epochs": "2", "local_steps": "4", "batch": "8"}
BASE_SECONDS_MAX = 300.0  # for the few rounds of the base model
ROUND_SECONDS_MAX = 60.0  # on a busy machine; a default round takes one or two
# Prints the instruction sets and threads of a process with a peer's environment. If torch is imported, its settings are included.
PROBE = "import json, torch; from benchmarks import dispatch; print(json.dumps(dispatch.seen()))"
# Less work than in a default round, so that trainers without AVX are in time: the wait for proposals is at least 2 s.
WORK = {"local_steps": "4", "batch": "4", "micro_batch": "4"}
AUDITS = {"full": {"audit": "full"}, "sampled": {"audit": "sampled", "audit_rate": "1"}}
ACCUSED = (AuditResult.CHALLENGED, AuditResult.SUSPENDED, AuditResult.SHUNNED)
LIBRARIES = {"units": "numpy", "core": "OpenBLAS", "aten": "torch"}  # names of libraries in `dispatch.seen`
GPU, PROCESSOR = "cuda", "cpu"  # values of the setting `device`: the first GPU, no GPU


def levels() -> list[Environment]:
    """Return environments with all instructions, with AVX2, and with the baseline. Each library has its own variables."""
    units = dispatch.numpy_units()
    baseline = {
        "OPENBLAS_CORETYPE": "Prescott",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    }
    avx2 = {
        "OPENBLAS_CORETYPE": "Haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
    return [
        Environment("as it is"),
        Environment("baseline", dispatch.without_units(units) | baseline),
        Environment("AVX2", dispatch.without_units(units[1:]) | avx2),
    ]


def dress(options: argparse.Namespace, peer: DemoPeer) -> None:
    known = levels()
    peer.threads = 1 + peer.number % 2
    peer.environment = dict(known[peer.number % len(known)].variables) | dispatch.WAITING  # two threads must be in time, too
    if options.gpu and peer.trains:
        peer.environment["PEER_DEVICE"] = PROCESSOR if peer.number else GPU
    if options.objective == "ppo":
        tunes(peer)


async def run(options: argparse.Namespace) -> int:
    if options.gpu:
        require_gpu()
    dressed = partial(dress, options)
    async with network.running(options.peers, seed=options.seed, folder=options.keep, dress=dressed) as peers:
        seen = {peer.name: await computes_with(peer) for peer in peers.peers}
        devices = {peer.name: await device_of(peer) for peer in peers.peers if peer.trains}
        said = {"seed": str(options.seed), **AUDITS[options.audit]}
        if options.objective == "ppo":
            with trio.fail_after(BASE_SECONDS_MAX):
                base = await based(peers, peers.demo.watched, WORK)
            job = await calls(peers.demo.watched).start_rlhf_training(base, "rule:vowels", options.rounds, "", TERMS | said)
        else:
            job = await peers.train({**WORK, **said}, rounds=options.rounds)

        async def over() -> bool:
            """Return whether all peers have applied the block after the last round, and no audit is open.

            That block certifies the root of the round.
            """
            states = [await peer.client.status() for peer in peers.peers]
            views = [view for peer in peers.peers for view in await peer.client.jobs() if view.job == job]
            last = await peers.peers[0].client.rounds(1)
            closed = len({state.height for state in states}) == 1 and last != () and states[0].height > last[0].height
            return closed and all(view.state == "finished" and not view.audits_open for view in views)

        finished = await network.holds(over, ROUND_SECONDS_MAX * options.rounds)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(peers.stop)
        return conclude(options, peers, seen, devices, job, finished)


async def computes_with(peer: DemoPeer) -> dict[str, Any]:
    """Return the libraries' choices in a process with this peer's environment."""
    assert peer.process is not None
    words = Path(f"/proc/{peer.process.pid}/environ").read_bytes().split(b"\0")
    environment = dict(word.decode().split("=", 1) for word in words if b"=" in word)
    command = [sys.executable, "-c", PROBE]
    done = await trio.run_process(command, capture_stdout=True, env=environment, cwd=dispatch.REPOSITORY)
    found: dict[str, Any] = dispatch.last_json(done.stdout.decode())
    return found


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("--gpu: torch finds no GPU; leave it out, or use a machine with a GPU and a build of torch for it")


async def device_of(peer: DemoPeer) -> str:
    """Return the device that this trainer's worker reports, once it has started."""
    found = ""

    async def known() -> bool:
        nonlocal found
        views = [view for engine in await peer.client.engines() for view in engine.devices if view.in_use]
        found = " ".join(f"{view.device}: {view.about}" for view in views)
        return bool(found)

    await network.holds(known, ROUND_SECONDS_MAX)
    return found


def alike(seen: Sequence[Mapping[str, Any]], threads: set[int]) -> list[str]:
    """Return the names of the settings that do not differ between the trainers, although they should."""
    same = [library for name, library in LIBRARIES.items() if len({str(choice.get(name)) for choice in seen}) == 1]
    return same + ["torch's threads"] * (len(threads) == 1)


def not_both(devices: Iterable[str]) -> list[str]:
    """Return the problem if trainers did not compute on GPUs as well as on processors."""
    kinds = {name.partition(":")[0] for name in devices}
    return (
        [] if kinds == {GPU, PROCESSOR} else ["trainers did not compute on both a GPU and processors, so they cannot be compared"]
    )


@dataclass(frozen=True)
class Judged:
    """Verdicts on honest proposals, of all trainers together."""

    accepted: int
    rejected: dict[str, int]  # by reason
    not_judged: dict[str, int]  # by reason, where the reason does not concern the work: no payload came, or no voter had time

    @classmethod
    def of(cls, accepted: Mapping[Any, int], rejected: Mapping[Any, Mapping[str, int]]) -> Self:
        reasons: Counter[str] = sum(map(Counter, rejected.values()), Counter())
        said = {reason: count for reason, count in sorted(reasons.items()) if reason not in NEUTRAL_REASONS}
        return cls(sum(accepted.values()), said, {reason: reasons[reason] for reason in NEUTRAL_REASONS if reasons[reason]})

    def failures(self) -> list[str]:
        return [f"{count} honest proposals were rejected: {reason}" for reason, count in self.rejected.items()]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.not_judged.items())
        return f"{self.accepted} honest proposals accepted, {sum(self.rejected.values())} rejected" + f", {counts}" * bool(counts)


def doubts(vouches: Iterable[Verdict]) -> list[str]:
    """Return the problems with vouches for honest proposals. An unsure vouch may only mean that a file did not arrive."""
    reasons = Counter(verdict for verdict in vouches if verdict not in (Verdict.ACCEPT, Verdict.UNJUDGED))
    return [
        f"{count} vouches rejected an honest proposal: {verdict_label(verdict, ())}" for verdict, count in sorted(reasons.items())
    ]


def conclude(
    options: argparse.Namespace,
    peers: Network,
    seen: dict[str, dict[str, Any]],
    devices: dict[str, str],
    job: str,
    finished: bool,
) -> int:
    failures = [f"roots differ at {where}" for where in peers.differences()]
    failures += [] if finished else ["the job did not finish"]
    trainers = [peer for peer in peers.peers if peer.trains]
    same = alike([seen[peer.name] for peer in trainers], {peer.threads for peer in trainers})
    failures += [f"{what} computed the same way on all trainers, so the run shows no difference" for what in same]
    failures += not_both(devices.values()) if options.gpu else []
    columns = ("peer", "device", "torch threads", *LIBRARIES.values(), "heights", "rounds", "accepted", "state root")
    heights, rows = set(), []
    for peer in peers.peers:
        disk = PeerDisk(peer.directory)
        roots, rounds, found = disk.roots(), disk.model_roots(), disk.job(job)
        heights.add((len(roots), len(rounds)))
        units, core, aten = (seen[peer.name].get(name) for name in LIBRARIES)
        computes = (" ".join(units or ()) or "baseline", str(core), str(aten) if peer.trains else "none")
        held = (len(roots), len(rounds), found.accepted.get(peer.identity.public, 0))
        threads = str(peer.threads) if peer.trains else "none"
        rows.append(
            [peer.name, devices.get(peer.name, "none"), threads, *computes, *map(str, held), disk.state.state_root.hex()[:16]]
        )
        audits, vouches = disk.state.audits, disk.vouches(job)
        disk.close()
    judged = Judged.of(found.accepted, found.rejected)  # part of the state, whose roots are compared
    results = Counter(entry.result.value for entry in audits.log)
    reports = sum(standing.reports for standing in audits.member_records.values())
    idle = [peer.name for peer in trainers if not found.accepted.get(peer.identity.public)]
    failures += [] if judged.accepted >= options.accepted_min else [f"fewer than {options.accepted_min} proposals were accepted"]
    if options.audit != AuditMode.FULL:
        failures += [] if reports else ["no proposal was audited"]
        failures += [f"{count} audits of honest work ended as {said}" for said, count in results.items() if said in ACCUSED]
        known = ((peer.name, audits.member_records.get(peer.identity.public)) for peer in trainers)
        failures += [
            f"{name} was suspended, or a challenge refuted" for name, it in known if it and (it.suspensions or it.refuted)
        ]
    failures += doubts(judgement.verdict for _, judgement in vouches)
    failures += judged.failures() + [f"nothing of {name} was accepted: nothing was shown of it" for name in idle]
    failures += [] if len(heights) == 1 else ["some peers lack blocks"]
    title = f"{options.peers} peers that compute differently, {options.rounds} rounds, seed {options.seed}: {judged}"
    blocks, rounds_held = max(heights)
    result = {"computes_with": seen, "devices": devices, "blocks": blocks, "rounds": rounds_held, **asdict(judged)}
    pairs = {(voter, judgement.trainer) for voter, judgement in vouches}
    result |= {"vouches": Counter(judgement.verdict.name for _, judgement in vouches), "vouching_pairs": len(pairs)}
    result |= {"audit": options.audit, "audit_reports": reports, "last_audit_results": dict(results)}
    return report(options, title, columns, rows, failures, result)


def main() -> int:
    parser = arguments("determinism", __doc__)
    parser.add_argument("--rounds", type=COUNT, default=12, metavar="N", help="rounds of training, whose roots are compared")
    parser.add_argument(
        "--audit", choices=AUDITS, default="full", help="full: re-execution before the ballot; sampled: after it, by other peers"
    )
    parser.add_argument(
        "--objective", choices=("language", "ppo"), default="language", help="objective of the job; ppo tunes a small model"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="compute on the first GPU in the first trainer, and on processors in the others"
    )
    parser.add_argument(
        "--accepted-min", type=COUNT, default=1, metavar="N", help="number of honest proposals that must be accepted"
    )
    return network.main(partial(run, parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
