"""Calls of RLHF: jobs that tune a model, how far they are, what came of it."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, replace
from typing import Any

import trio

from ledger.jobs import Job, Start, Waiting, job_id
from ledger.network import NetworkState
from peer.api.new_job import base_of, fetched_tokenizer, parse_overrides, tolerated, typed
from peer.api.running import RunningPeer
from protocol import codec
from protocol.errors import UserError
from rlhf import presets
from rlhf.calls import CompareView, FiguresView, RlhfCalls, RlhfView, StageView
from rlhf.module import Medians, RlhfState
from rlhf.objective import MILLIONTHS, MODULE, PPO, ROLE, PpoTerms
from training import tasks
from training.data.tokenizer import BpeTokenizer, Tokenizer
from training.spec import JobSpec, completed

OWN = {field.name for field in dataclasses.fields(PpoTerms)} - {"reward"}  # what `--set` may say of the objective


@dataclass(frozen=True)
class RlhfAnswers(RlhfCalls):
    peer: RunningPeer

    async def start_rlhf_training(
        self, base: str, reward: str, ppo_iterations: int = 10, name: str = "", overrides: dict[str, str] | None = None
    ) -> str:
        self.peer.require_member()
        if not self._is_run():
            raise UserError(f"this network does not run the module {MODULE}: `upgrade {MODULE} 1`, said by a quorum, brings it")
        spec = await trio.to_thread.run_sync(self._spec, base, reward, ppo_iterations, name or "ppo", overrides or {})
        transaction = await self.peer.author.submit("job/start", Start(spec.encode()))
        return job_id(self.peer.me, transaction).hex()

    def _spec(self, base: str, reward: str, rounds: int, name: str, overrides: dict[str, str]) -> JobSpec:
        """Raises `UserError` for a base or values that cannot be used."""
        start, _, before = base_of(self.peer, base, "--base")
        if before.data is None:
            raise UserError(f"--base {base!r}: that job's text is local, so no prompts can be drawn that everybody knows")
        kinds = typing.get_type_hints(PpoTerms)
        said_of_own = {key: typed(kinds[key], key, text) for key, text in overrides.items() if key in OWN}
        if before.tokenizer is not None and "stop" not in said_of_own:
            said_of_own["stop"] = newline(BpeTokenizer(fetched_tokenizer(self.peer, before.tokenizer)))
        own = PpoTerms(reward=reward, **said_of_own)
        said = parse_overrides({key: text for key, text in overrides.items() if key not in OWN})
        if "model" in said:
            raise UserError("--set model.…: the model is that of the base; leave it out")
        spec = JobSpec(
            name=name,
            objective="ppo",
            base=start,
            model=before.model,
            tokenizer=before.tokenizer,
            data=before.data,
            held_out_permille=before.held_out_permille,
            settings=codec.encode(own),
            liars=tolerated(self.peer, ROLE),
        )
        return replace(spec, **completed(presets.PPO | {"rounds": rounds} | said)).checked()

    async def rlhf_status(self) -> RlhfView:
        stages = [_stage(key, job) for key, job in self._tuned()[-1:]]
        return RlhfView(stages[-1].state if stages else "none", tuple(stages))

    async def rlhf_figures(self) -> tuple[FiguresView, ...]:
        if not self._is_run():
            return ()
        known = self.peer.driver.state.of(RlhfState).jobs
        return tuple(_figures(key, job, known[key]) for key, job in self._tuned()[-1:] if key in known)

    def _is_run(self) -> bool:
        return self.peer.driver.state.of(NetworkState).version(MODULE) > 0

    def _tuned(self) -> list[tuple[bytes, Job | Waiting]]:
        """Jobs of this feature's objectives, the newest last."""
        jobs = self.peer.driver.state.jobs
        started = sorted(jobs.jobs.items(), key=lambda item: item[1].started)
        found: list[tuple[bytes, Job | Waiting]] = [*started, *((waiting.job, waiting) for waiting in jobs.line)]
        return [(key, job) for key, job in found if JobSpec.decode(job.spec).kind.module == MODULE]

    async def compare_policy(self, prompt: str, tokens: int, temperature: float, seed: int) -> CompareView:
        workshop, host = self.peer.driver.workshop, self.peer.driver.host
        if workshop.role.computing is None:
            raise UserError("this peer has no worker to generate with: ask one with --role rlhf or full")
        tuned = [(key, job) for key, job in self._tuned() if isinstance(job, Job)]
        if not tuned:
            raise UserError("no model has been tuned yet: begin with `rlhf start`")
        key, job = tuned[-1]
        opened = workshop.view((key, job.round), job)
        how: tuple[Any, ...] = (prompt, tokens, temperature, seed, opened.spec.own.stop)
        told = []
        for directory in (str(host.directory(key, job.round)), None):
            done = await workshop.role.computing.ask(opened, tasks.Generate(key, directory, *how))
            told.append(done.text.decode(errors="replace"))
        return CompareView(key.hex(), job.round, *told)


def newline(tokenizer: Tokenizer) -> int | None:
    """The token of a newline; None where it is several."""
    ids = tokenizer.encode(b"\n")
    return int(ids[0]) if len(ids) == 1 else None


def _stage(key: bytes, job: Job | Waiting) -> StageView:
    spec = JobSpec.decode(job.spec)
    if isinstance(job, Waiting):
        return StageView(spec.objective, key.hex(), "waiting", 0, spec.rounds, "")
    return StageView(spec.objective, key.hex(), job.phase.value, job.round, job.rounds, job.model_root.hex())


def _figures(key: bytes, job: Job | Waiting, medians: Medians) -> FiguresView:
    spec = JobSpec.decode(job.spec)
    responses = PPO.responses(spec, spec.own)
    sums = (medians.score / MILLIONTHS, medians.k1 / MILLIONTHS, medians.tokens, medians.unfinished)
    return FiguresView(key.hex(), medians.round, medians.accepted, *(total / responses for total in sums))
