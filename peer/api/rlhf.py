"""Calls of RLHF: jobs that tune a model, how far they are, what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from consensus.voters import VoterSet
from curation.module import is_run
from curation.state import CurationState
from ledger.jobs import Job, Phase, Waiting, job_id
from ledger.network import NetworkState
from peer.api.new_job import FETCHING_SECONDS_MAX, fetched, typed
from peer.api.preferences import preferences_of
from peer.api.running import RunningPeer
from peer.api.tracing import learned
from peer.api.tuning import Tuning, read_words
from peer.driver.deriving import derived
from peer.roles import texts
from peer.serving.projects import find_project
from peer.worker.supervisor import WorkerFailed
from protocol.errors import StorageError, UserError
from protocol.sampling import Sampling
from rlhf import guards, plans
from rlhf.calls import CompareView, FiguresView, RlhfCalls, RlhfView, StageView, TraceView
from rlhf.controller import beta_of
from rlhf.fitting import Truncate, notes
from rlhf.guards import Course
from rlhf.module import RlhfModule, RlhfState
from rlhf.objective import MODULE, PpoTerms
from rlhf.objectives import OF_PAIRS
from rlhf.preferences import Pair
from rlhf.reward import ACCURACY, CALIBRATION
from rlhf.sets import Source
from rlhf.supervised import DPO, NATS
from rlhf.tracing import traced
from training import tasks
from training.replicated.model import ReplicatedModel
from training.spec import JobSpec

SETS = "sets"  # the part at whose desk sets are derived
PAUSED = "paused"  # a plan that goes on later


@dataclass(frozen=True)
class RlhfAnswers(RlhfCalls):
    peer: RunningPeer

    async def start_rlhf_training(
        self,
        base: str,
        reward: str = "",
        ppo_iterations: int = 10,
        name: str = "",
        overrides: dict[str, str] | None = None,
        preferences: str = "",
        reward_epochs: int = 3,
        project: str = "",
        words: str = "",
        algorithm: str = "",
        skip_bad: bool = False,
        truncate: str = "",
    ) -> str:
        self.peer.require_member()
        if not self._is_run():
            raise UserError(f"this network does not run the module {MODULE}: `upgrade {MODULE} 1`, said by a quorum, brings it")
        if [reward, preferences, project].count("") != 2:
            raise UserError("say what is rewarded: --reward rule:NAME, --project PROJECT or --preferences FILE, one of them")
        said, is_dpo = dict(overrides or {}), algorithm == DPO.name
        if is_dpo and (reward or words):
            raise UserError(f"dpo takes no {'--reward' if reward else '--words'}: it learns from pairs, and samples nothing")
        if algorithm and not is_dpo:
            said["algorithm"] = algorithm
        listed = await trio.to_thread.run_sync(read_words, words) if words else b""
        cut = typed(Truncate, "--truncate", truncate)
        if (skip_bad or cut) and not preferences:
            raise UserError("--skip-bad and --truncate are about a file: say them with --preferences FILE")
        tuning = Tuning(self.peer, base, name, ppo_iterations, reward_epochs, said, listed, skip_bad, cut)
        if reward:
            tuning.check_rule(reward)
            return await self._begun(tuning.by_rule, reward)
        if not is_dpo:
            tuning.check_preferences()
        source, found = await self._decided(project) if project else (None, preferences)
        return await self._begun(tuning.by_dpo if is_dpo else tuning.by_preferences, found, source)

    async def _begun(self, make: Callable[..., plans.Begin], *how: Any) -> str:
        """The first job of a plan that is made in a thread, once it is decided."""
        begin = await trio.to_thread.run_sync(make, *how)
        transaction = await self.peer.author.submit("rlhf/start", begin)
        return plans.stage_job(job_id(self.peer.me, transaction), 0).hex()

    async def cancel_rlhf_training(self, job: str = "") -> str:
        key, plan = self._plan_of(job) if job else self._own_plan()
        await self.peer.author.submit("rlhf/cancel", plans.Cancel(key))
        after = self.peer.driver.state.of(RlhfState).plans.get(key)
        if after is None or after.phase is not plans.Phase.RUNNING:
            return f"ended; {plan.current.objective} was its last stage"
        needed = VoterSet(self.peer.driver.state.members.voters).quorum
        return f"{len(after.stops)} of the {needed} voters needed want the plan to end; the others have to say the same"

    async def pause_rlhf_training(self) -> str:
        key, plan = self._own_plan()
        await self.peer.author.submit("rlhf/pause", plans.Pause(key))
        return f"paused: once the open round of {plan.current.objective} is closed, none begins; `rlhf resume` lets it go on"

    async def resume_rlhf_training(self) -> str:
        key, plan = self._own_plan()
        await self.peer.author.submit("rlhf/resume", plans.Resume(key))
        return f"{plan.current.objective} goes on"

    def _own_plan(self) -> tuple[bytes, plans.Plan]:
        """This member's. Raises `UserError`."""
        running = self.peer.driver.state.of(RlhfState).running() if self._is_run() else {}
        members = self.peer.driver.state.members
        for key, plan in running.items():
            if members.current(plan.author) == self.peer.me:
                return key, plan
        raise UserError("no plan of yours goes on: `cancel JOB` ends a job, said by its author")

    def _plan_of(self, job: str) -> tuple[bytes, plans.Plan]:
        """The one that has come to this job, which may not have begun. Raises `UserError`."""
        running = self.peer.driver.state.of(RlhfState).running() if self._is_run() else {}
        found = [(key, plan) for key, plan in running.items() if plan.current.job.hex().startswith(job)]
        if len(found) != 1:
            there = ", ".join(plan.current.job.hex()[:8] for plan in running.values()) or "none"
            raise UserError(f"{job!r} fits {len(found) or 'no'} plans that go on (their jobs are: {there})")
        return found[0]

    async def _decided(self, text: str) -> tuple[Source, list[Pair]]:
        """What people have decided of a project's pairs up to now. Raises `UserError`."""
        state = self.peer.driver.state
        if not is_run(state):
            raise UserError("this network does not run the module curation: `upgrade curation 1`, said by a quorum, brings it")
        curation = state.of(CurationState)
        project, row = find_project(text, curation)
        if project in curation.closing:
            raise UserError(f"--project {text!r} is being closed, which may change its labels: say it again when that is done")
        source = Source(project, state.height)
        with trio.move_on_after(FETCHING_SECONDS_MAX):
            found = await derived(self.peer.desk(SETS), source)
            if not found:
                raise UserError(f"--project {text!r}: no pair of it is decided yet, but for redacted and bad ones")
            return source, found
        raise UserError(f"--project {text!r}: nobody who is here has all tasks of {row.asked.name!r}")

    async def rlhf_status(self) -> RlhfView:
        known = self.peer.driver.state.of(RlhfState).plans.values() if self._is_run() else ()
        plan = max(known, key=lambda plan: plan.decided, default=None)
        planned = {stage.job for plan in known for stage in plan.stages}
        lone = [(key, job) for key, job in self._tuned() if key not in planned]
        if plan is not None and (not lone or plan.decided >= _began(lone[-1][1])):
            state = PAUSED if plan.phase is plans.Phase.RUNNING and plan.paused is not None else plan.phase.value
            return RlhfView(state, tuple([await self._measured(self._planned(plan, stage)) for stage in plan.stages]))
        stages = [await self._measured(_stage(key, job)) for key, job in lone[-1:]]
        return RlhfView(stages[-1].state if stages else "none", tuple(stages))

    def _planned(self, plan: plans.Plan, stage: plans.Stage) -> StageView:
        jobs = self.peer.driver.state.jobs
        live = jobs.jobs.get(stage.job) or next((waiting for waiting in jobs.line if waiting.job == stage.job), None)
        if live is not None:
            return _stage(stage.job, live)
        if stage.root is not None:  # the job is forgotten
            return StageView(stage.objective, stage.job.hex(), "finished", stage.rounds, stage.rounds, stage.root.hex())
        view = StageView(stage.objective, stage.job.hex(), "waiting" if stage.spec else "forgotten", 0, stage.rounds, "")
        if plan.phase is not plans.Phase.RUNNING or stage != plan.current:
            return view
        state = self.peer.driver.state
        return replace(view, refused=RlhfModule(self.peer.driver.host).refusal(plan, state, state.height + 1))

    async def _measured(self, stage: StageView) -> StageView:
        """With the newest figures that this peer has measured, and where its preferences come from."""
        found = await trio.to_thread.run_sync(self.peer.driver.store.measured, bytes.fromhex(stage.job))
        newest = {name: value for _, figures in sorted(found.items()) for name, value in figures.items()}
        accuracy, error, nats = (newest.get(name) for name in (ACCURACY, CALIBRATION, NATS))
        told = replace(stage, held_out_accuracy=accuracy, calibration_error=error, held_out_nats=nats)
        if stage.objective not in OF_PAIRS:
            return told
        return replace(told, preferences=preferences_of(self.peer.driver.state, bytes.fromhex(stage.job)))

    async def rlhf_figures(self) -> tuple[FiguresView, ...]:
        if not self._is_run():
            return ()
        known = self.peer.driver.state.of(RlhfState).jobs
        found = [(key, job) for key, job in self._tuned()[-1:] if isinstance(job, Job) and key in known]
        return tuple([await trio.to_thread.run_sync(self._figures, key, job, known[key]) for key, job in found])

    def _figures(self, key: bytes, job: Job, course: Course) -> FiguresView:
        spec, found = JobSpec.decode(job.spec), guards.view(key, job.spec, course.rounds[-1])
        own: PpoTerms = spec.own
        beta = None
        if job.phase is not Phase.FINISHED:
            with contextlib.suppress(StorageError):  # the job went on meanwhile
                beta = beta_of(ReplicatedModel.open(self.peer.driver.host.directory(key, job.round)).state.steering, own.beta)
        stop = own.kl_stop if job.rounds < spec.rounds else None
        return replace(found, beta=beta, kl_stop=stop, warning=guards.warning(course, job.spec))

    def _is_run(self) -> bool:
        return self.peer.driver.state.of(NetworkState).version(MODULE) > 0

    def _tuned(self) -> list[tuple[bytes, Job | Waiting]]:
        """Jobs of this feature's objectives, the newest last."""
        jobs = self.peer.driver.state.jobs
        started = sorted(jobs.jobs.items(), key=lambda item: item[1].started)
        found: list[tuple[bytes, Job | Waiting]] = [*started, *((waiting.job, waiting) for waiting in jobs.line)]
        return [(key, job) for key, job in found if JobSpec.decode(job.spec).kind.module == MODULE]

    async def trace_pair(self, pair: str) -> TraceView:
        def read(digest: bytes, size_max: int) -> bytes:
            return fetched(self.peer, digest, size_max, "the set")

        def trace() -> TraceView:
            return traced(list(learned(state.jobs, self.peer.driver.store)), state.of(RlhfState).sets, read, pair)

        if not self._is_run():
            raise UserError("this network tunes no models, so nobody has drawn a pair")
        state = self.peer.driver.state
        return await trio.to_thread.run_sync(trace)

    async def compare_policy(self, prompt: str, tokens: int, temperature: float, seed: int) -> CompareView:
        workshop, host = self.peer.driver.workshop, self.peer.driver.host
        if workshop.role.computing is None:
            raise UserError("this peer has no worker to generate with: ask one with --role rlhf or full")
        begun = self._tuned()
        tuned = [(key, job) for key, job in begun if isinstance(job, Job) and JobSpec.decode(job.spec).kind.makes_text]
        if not tuned:
            way = "`rlhf status` says how far the plan is" if begun else "begin with `rlhf start`"
            raise UserError(f"no model has been tuned yet: {way}")
        key, job = tuned[-1]
        opened = workshop.view((key, job.round), job)
        how = Sampling(tokens=tokens, temperature=temperature, seed=seed).checked()
        ask = partial(workshop.role.computing.ask, opened)
        told: dict[str, str] = {}
        withheld: list[str] = []
        for name, directory in (("policy", str(host.directory(key, job.round))), ("reference", None)):
            try:
                done = await texts.whole(
                    ask, tasks.Generate(key, directory, prompt, how, opened.spec.kind.ends_text(opened.spec))
                )
            except WorkerFailed:
                if opened.base_directory is None or opened.base_directory.exists():
                    raise
                base = opened.base_directory.parent.name[:8]
                raise UserError(f"the reference is gone: the model of job {base} was kept until the tuning was over") from None
            told[name] = done.text
            withheld += [name] * done.is_withheld
        return CompareView(key.hex(), job.round, **told, withheld=tuple(withheld))


def _began(job: Job | Waiting) -> int:
    """The height at which it was decided."""
    return job.started if isinstance(job, Job) else job.since


def _stage(key: bytes, job: Job | Waiting) -> StageView:
    spec = JobSpec.decode(job.spec)
    if isinstance(job, Waiting):
        return StageView(spec.objective, key.hex(), "waiting", 0, spec.rounds, "", notes=notes(spec))
    root = job.model_root.hex()
    return StageView(spec.objective, key.hex(), job.phase.value, job.round, spec.rounds, root, notes=notes(spec))
