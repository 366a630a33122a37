"""Invariants of client runs, checked after every decided block.

| invariant | what holds in every history |
|---|---|
| `client owner` | only the owner of a run requests, saves, expires and ends |
| `client order` | each step is requested once, in order, while no other step of its run is open, and not of a run that is over |
| `client idle` | a run without an open step has no open round, and at most one run has one |
| `client trainer` | a round of a run begins with one trainer, the next one of the step's order, and with the step's brief |
| `client turns` | a training job waits for one round of runs at most, and a step for two rounds of training jobs at most |
| `client late` | owners lose the time of their rounds that accept nothing; steps of who has lost too much wait for all others |
| `client steps` | a step ends with its update, or after its last trainer, and then its run can go on; a run ends with its job |
| `client model` | the model of a run is that of its accepted updates: a round that accepts nothing changes nothing |
| `client checkpoints` | a checkpoint is the model of a decided round, and is kept until it expires |

Written apart from the module `clients`: steps, attempts and checkpoints are read from the blocks alone. All honest peers have the
same runs, because they have the same state roots (`tests.sim.invariants`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from protocol import codec
from protocol.identity import short_id
from tests.sim.invariants import Violation
from tests.sim.progress import ROUND_SECONDS_MAX, Demand

ATTEMPTS_MAX = 8  # rounds of a step
TRAINING_ROUNDS_MAX = 2  # closed rounds of training jobs while a step waits
# From one event of the waiting steps to the next one: those rounds, and the step's own.
STEP_SECONDS_MAX = (TRAINING_ROUNDS_MAX + 1) * ROUND_SECONDS_MAX
LONG_SECONDS = 5.0  # of an open round: a trainer is waited for 4 s
LOST_MS_MAX = 120_000  # lost time of an owner whose steps are not late
LOST_MS_KEPT_MAX = 30 * 60_000
LOST_PART = 10  # a tenth of the time that passes is forgiven


@dataclass
class StepSeen:
    """An open step."""

    number: int
    brief: bytes
    since: int  # height of the request
    tried: list[bytes] = field(default_factory=list)  # trainer of each round that accepted nothing
    opened_ms: int = 0  # time of the block that opened the open round


@dataclass
class RunSeen:
    """One run, as derived from the decided blocks."""

    owner: bytes
    rounds: int
    next_step: int = 0
    step: StepSeen | None = None
    may_be_over: bool = False  # somebody ended it
    is_over: bool = False
    checkpoints: dict[str, tuple[int, bytes, int]] = field(default_factory=dict)  # name -> (round, root, expiry in ms)

    @property
    def saved(self) -> list[tuple[int, bytes]]:
        return sorted({(number, root) for number, root, _ in self.checkpoints.values()})


@dataclass
class LostTime:
    """The time that the rounds of an owner took without an accepted update."""

    ms: int
    at_ms: int
    opened_ms: int = 0  # time of the block that opened the round which the last block ended; 0: it ended none

    def left_ms(self, now_ms: int) -> int:
        """Return the lost time with the round that the last block ended, of which a part is forgiven."""
        added = now_ms - self.opened_ms if self.opened_ms else 0
        return min(LOST_MS_KEPT_MAX, max(0, self.ms - (now_ms - self.at_ms) // LOST_PART) + added)

    def move_on(self, now_ms: int) -> None:
        self.ms, self.at_ms, self.opened_ms = self.left_ms(now_ms), now_ms, 0


@dataclass
class ClientRuns:
    """Checks of the states before and after each block."""

    lost_ms_max: int = LOST_MS_MAX
    runs: dict[bytes, RunSeen] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _successors: dict[bytes, bytes] = field(default_factory=dict)  # a key that was rotated -> the next one
    _roots: dict[tuple[bytes, int], bytes] = field(default_factory=dict)  # (run, round) -> its model
    _known: set[bytes] = field(default_factory=set)  # all runs, also those that are over
    _saved: set[tuple[bytes, int, bytes]] = field(default_factory=set)  # before this block: (run, round, root)
    _first_roots: dict[bytes, bytes] = field(default_factory=dict)  # run that has not begun -> the model with which it begins
    _training_rounds: int = 0  # closed rounds of training jobs in a row, while a step waits
    _has_round: bool = False  # whether a round of a step is open
    _closed: float = 0.0  # time at which a round of a step closed last
    _moved: float = 0.0  # time of the last event by which a step went on
    _is_due: bool = False  # whether a step waits that nothing but rounds may hold up
    _lost: dict[bytes, LostTime] = field(default_factory=dict)  # owner -> lost time
    _late: set[bytes] = field(default_factory=set)  # owners whose steps are late in this block

    def on_block(self, height: int, body: bytes, before: Any, after: Any, now: float) -> None:
        """Process each decided block once, in order. `before` and `after` are whole states."""
        if "clients" not in after.modules:
            return
        closings, _, transactions = codec.unpack(body, len(body))
        self._saved = {(key, *model) for key, run in self.runs.items() for model in run.saved}
        had_steps = self._is_due
        rounds = {key: run.step.opened_ms for key, run in self.runs.items() if run.step is not None and _is_running(before, key)}
        for data, signer, _ in transactions:
            self._on_transaction(height, data, signer, before)
        closed = {key: proposals for key, _, _, _, proposals, _ in closings}
        for key in sorted(closed.keys() & self.runs.keys()):
            self._on_closing(height, key, closed[key], before, after)
        for key, run in self.runs.items():
            expired = [name for name, (_, _, until) in run.checkpoints.items() if 0 < until <= before.time_ms]
            self.counts["checkpoints expired"] += len(expired)
            for name in expired:
                del run.checkpoints[name]
            self._note_end(height, key, run, after)
        self._note_lost(rounds, closed, before.time_ms)
        self.runs = {key: run for key, run in self.runs.items() if not run.is_over or run.checkpoints}
        self._check_state(height, after)
        self._check_lost(height, after)
        opened = self._check_rounds(height, closed.keys(), before, after)
        self._check_turns(height, set(closed), opened, before, after)
        self._has_round = any(_is_running(after, key) for key in self.runs)
        if closed.keys() & self._known:
            self._closed = now
        if opened or closed.keys() & self._known or not had_steps:
            self._moved = now

    # What blocks say -------------------------------------------------------------------------------------------------

    def _current(self, key: bytes) -> bytes:
        while key in self._successors:
            key = self._successors[key]
        return key

    def _on_transaction(self, height: int, data: bytes, signer: bytes, before: Any) -> None:
        _, _, _, kind, content = codec.unpack(data, len(data))
        fields = codec.unpack(content, len(content)) if content else []
        match kind:
            case "member/rotate":
                self._successors[signer] = fields[0]
            case "job/stop" if fields[0] in self.runs:
                self.runs[fields[0]].may_be_over = True
            case "client/open":
                key = hashlib.sha256(b"folkmoot/job\x00" + signer + data).digest()
                self._known.add(key)
                _, rounds, *named = fields[0].split(b":")
                self.runs[key] = RunSeen(signer, int(rounds))
                self.counts["runs opened"] += 1
                if named:
                    self._continue(height, key, *named)
            case "client/step" | "client/save" | "client/expire" | "client/end":
                self._on_request(height, kind, fields, signer, before)

    def _continue(self, height: int, key: bytes, job: bytes, number: bytes, root: bytes) -> None:
        """Note that a run begins with the model of a checkpoint, which must be there."""
        model = (bytes.fromhex(job.decode()), int(number), bytes.fromhex(root.decode()))
        if model not in self._saved:
            raise Violation("client checkpoints", f"height {height}: a run continues from a model that nobody saved")
        self._first_roots[key] = model[2]
        self.counts["runs continued"] += 1

    def _on_request(self, height: int, kind: str, fields: list[Any], signer: bytes, before: Any) -> None:
        key, run = fields[0], self.runs.get(fields[0])
        if run is None or (run.is_over and kind != "client/expire"):
            raise Violation("client order", f"height {height} holds a {kind} of a run that is over")
        if self._current(run.owner) != signer:
            raise Violation("client owner", f"height {height}: {kind} by {short_id(signer)}, who does not own the run")
        match kind:
            case "client/step":
                number = fields[1][0]
                if run.step is not None or number != run.next_step:
                    what = f"{run.step.number} is open" if run.step is not None else f"{run.next_step} is next"
                    raise Violation("client order", f"height {height} requests step {number}, and {what}")
                run.step = StepSeen(number, codec.encode(fields[1]), height)
                self.counts["steps requested"] += 1
            case "client/save":
                if run.step is not None:
                    raise Violation("client order", f"height {height} saves the model of a run with an open step")
                job = before.jobs.jobs[key]
                run.checkpoints[fields[1]] = (job.round, self._roots[key, job.round], fields[2])
                self.counts["checkpoints saved"] += 1
            case "client/expire":
                if fields[1] not in run.checkpoints:
                    raise Violation("client checkpoints", f"height {height}: there is no checkpoint {fields[1]!r}")
                run.checkpoints[fields[1]] = (*run.checkpoints[fields[1]][:2], fields[2])
            case "client/end":
                run.may_be_over = run.is_over = True
                run.step = None
                self.counts["runs ended"] += 1

    def _on_closing(self, height: int, key: bytes, proposals: list[Any], before: Any, after: Any) -> None:
        run, root = self.runs[key], before.jobs.jobs[key].model_root
        if len(proposals) > 1:
            raise Violation("client trainer", f"height {height} accepts {len(proposals)} updates of one step")
        self.counts["rounds of steps"] += 1
        if run.step is None:
            if not run.is_over:
                raise Violation("client idle", f"height {height} closes a round of a run without an open step")
        elif proposals:
            self.counts["steps accepted"] += 1
            self.counts["steps accepted later"] += bool(run.step.tried)
            run.step, run.next_step = None, run.next_step + 1
        else:
            job = before.jobs.jobs[key]
            run.step.tried.append((*job.awaited, *job.trainers)[0])
            if len(run.step.tried) == ATTEMPTS_MAX or not self._untried(key, before, after):
                self.counts["steps failed"] += 1
                run.step, run.next_step = None, run.next_step + 1
        job = after.jobs.jobs.get(key)
        if job is not None and job.round == before.jobs.jobs[key].round + 1 and not _is_undone(job, height):
            digests = [hashlib.sha256(data).digest() for data, _, _ in proposals]
            expected = hashlib.sha256(root + digests[0]).digest() if digests else root
            if job.model_root != expected:
                raise Violation("client model", f"height {height}: the model is not that of the accepted updates")

    def _note_end(self, height: int, key: bytes, run: RunSeen, after: Any) -> None:
        """Note that a run is over with its job, which has a reason to end."""
        job = after.jobs.jobs.get(key)
        if job is not None and str(job.phase) != "finished":
            if run.is_over:
                raise Violation(
                    "client steps", f"height {height}: the job of run {key.hex()[:6]} goes on, although the run is over"
                )
            return
        is_trained = job is not None and job.rounds_in_model >= run.rounds
        is_left = job is not None and not any(map(after.members.may_be_awaited, job.trainers))
        owner, members = self._current(run.owner), after.members
        votes = owner in map(self._current, members.upcoming)  # also with its former key
        is_gone = members.is_departed_key(owner) and not (members.is_current_key(owner) and votes)
        if not (run.may_be_over or is_trained or is_left or is_gone):
            raise Violation("client steps", f"height {height} ends the run {key.hex()[:6]}, which nobody ended")
        run.is_over, run.step = True, None

    def _note_lost(self, rounds: dict[bytes, int], closed: dict[bytes, list[Any]], now_ms: int) -> None:
        """Note the time that owners lose, and who is late. `rounds` were open, since these times."""
        self._lost = {self._current(owner): time for owner, time in self._lost.items() if time.left_ms(now_ms)}
        for time in self._lost.values():
            if time.opened_ms:
                time.move_on(now_ms)
        for key, opened_ms in rounds.items():
            run = self.runs[key]
            if not closed.get(key) and (key in closed or run.is_over):
                time = self._lost.setdefault(self._current(run.owner), LostTime(0, now_ms))
                time.move_on(now_ms)
                time.opened_ms = opened_ms
                self.counts["rounds lost"] += 1
        self._late = {owner for owner, time in self._lost.items() if time.left_ms(now_ms) > self.lost_ms_max}

    # States ----------------------------------------------------------------------------------------------------------

    def _check_state(self, height: int, after: Any) -> None:
        """Compare the runs of the state with those of the blocks."""
        jobs, known = after.jobs.jobs, after.modules["clients"].runs
        for key, job in jobs.items():
            if key in self.runs:
                self._roots.setdefault((key, job.round), job.model_root)
                if self._first_roots.pop(key, job.model_root) != job.model_root:
                    raise Violation(
                        "client model", f"height {height}: run {key.hex()[:6]} begins with another model than it names"
                    )
        if known.keys() != self.runs.keys():
            raise Violation("client steps", f"height {height} has {len(known)} runs, {len(self.runs)} are expected")
        for key, run in self.runs.items():
            has, step = known[key], run.step
            found = has.open_step and (
                codec.encode(has.open_step.brief),
                has.open_step.since,
                [*map(self._current, has.open_step.tried)],
            )
            if (has.next_step, found) != (run.next_step, step and (step.brief, step.since, [*map(self._current, step.tried)])):
                raise Violation(
                    "client steps", f"height {height}: step {run.next_step} of run {key.hex()[:6]} is not as it was left"
                )
            if has.is_over != run.is_over or self._current(has.owner) != self._current(run.owner):
                raise Violation("client steps", f"height {height}: run {key.hex()[:6]} has another owner, or another end")
            kept = {name: (of.model.round, of.model.root, of.expires_ms) for name, of in has.checkpoints.items()}
            models = [(of.round, of.root) for of in jobs[key].saved_models] if key in jobs else None
            if kept != run.checkpoints or models != run.saved:
                raise Violation(
                    "client checkpoints", f"height {height}: run {key.hex()[:6]} keeps other checkpoints than were saved"
                )

    def check_kept(self, state: Any, has_model: Callable[[bytes, int, bytes], bool]) -> None:
        """Check that a peer with this state has the models of all checkpoints."""
        for key, job in state.jobs.jobs.items():
            for saved in job.saved_models:
                if not has_model(key, saved.round, saved.root):
                    raise Violation("client checkpoints", f"a peer has no model of round {saved.round} of run {key.hex()[:6]}")

    def _check_lost(self, height: int, after: Any) -> None:
        """Compare the lost times of the state with those of the rounds."""
        known = {self._current(owner): (of.ms, of.at_ms, of.opened_ms) for owner, of in after.modules["clients"].lost.items()}
        lost = {owner: (of.ms, of.at_ms, of.opened_ms) for owner, of in self._lost.items()}
        if known != lost:
            raise Violation("client late", f"height {height}: the lost times are {known}, expected are {lost}")

    def _order(self, key: bytes, before: Any, after: Any) -> list[bytes]:
        """Return the members that may train a run's open step, in the order of its attempts."""
        return order(key, self.runs[key].next_step, self._current(self.runs[key].owner), before, after)

    def _untried(self, key: bytes, before: Any, after: Any) -> list[bytes]:
        step = self.runs[key].step
        tried = {*map(self._current, step.tried)} if step is not None else set[bytes]()
        return [of for of in self._order(key, before, after) if of not in tried]

    def _check_rounds(self, height: int, closed: Collection[bytes], before: Any, after: Any) -> list[bytes]:
        """Check the open rounds of runs, and return those that this block opened."""
        running = [key for key in sorted(self.runs) if _is_running(after, key)]
        if len(running) > 1:
            raise Violation("client idle", f"height {height}: {len(running)} runs have an open round")
        opened = [key for key in running if not _is_running(before, key) or key in closed]
        for key in running:
            step, job = self.runs[key].step, after.jobs.jobs[key]
            if step is None:
                raise Violation("client idle", f"height {height}: an idle run has an open round")
            if job.brief != step.brief or len(set(map(self._current, job.awaited))) > 1:
                raise Violation(
                    "client trainer", f"height {height}: a round of a run has no brief, or waits for several trainers"
                )
            if key not in opened:
                continue
            step.opened_ms = after.time_ms
            turn = self._untried(key, before, after) or self._order(key, before, after)  # all others may have left
            expected = tuple(turn[:1])
            if not job.trainers == job.awaited == expected:
                raise Violation("client trainer", f"height {height}: attempt {len(step.tried)} has not its one trainer")
            if min(self._in_line(before)) != (self._is_late(key), step.since, key):
                raise Violation("client turns", f"height {height}: a step begins before an older one")
            self.counts["late rounds"] += self._is_late(key)
        return opened

    def _is_late(self, key: bytes) -> bool:
        return self._current(self.runs[key].owner) in self._late

    def _in_line(self, before: Any) -> list[tuple[bool, int, bytes]]:
        """Return each open step whose run has its job: whether it is late, the height of its request, and the run."""
        steps = {key: run.step for key, run in self.runs.items() if key in before.jobs.jobs}
        return [(self._is_late(key), step.since, key) for key, step in steps.items() if step is not None]

    def _check_turns(self, height: int, closed: Collection[bytes], opened: list[bytes], before: Any, after: Any) -> None:
        """Check that steps and training jobs take turns. Rounds are counted, because their durations depend on the faults."""
        training = {key: job for key, job in after.jobs.jobs.items() if key not in self._known and b":alone" not in job.spec}
        phases = Counter(str(job.phase) for job in training.values())
        is_paused = phases["paused"] > 0
        had_round = any(_is_running(before, key) for key in self._known)
        if opened and had_round and (is_paused or _has_startable_job(before, after)):
            raise Violation("client turns", f"height {height}: a second step begins, and a training job waits")
        if any(map(self._is_late, opened)) and (is_paused or _has_startable_job(before, after)):
            raise Violation("client late", f"height {height}: a late step begins, and a training job waits")
        line = self._in_line(before)
        is_waiting = bool(line) and not opened
        self.counts["blocks for which late steps waited"] += is_waiting and all(is_late for is_late, _, _ in line)
        # A late step waits for all rounds of training jobs.
        self._is_due = any(not is_late for is_late, _, _ in line) or (bool(line) and not training)
        if not (is_waiting and self._is_due):
            self._training_rounds = 0
        elif closed & training.keys():
            self._training_rounds += 1
        is_at_work = phases["running"] or any(_is_running(after, key) for key in self.runs)
        stands = (is_waiting or (is_paused and not phases["settling"])) and not is_at_work
        # A block that undoes the open round lets no step begin.
        stands = stands and not any(_is_undone(job, height) for job in after.jobs.jobs.values())
        is_overdue = self._training_rounds > TRAINING_ROUNDS_MAX or stands
        if is_overdue and (not line or any(self._order(key, before, after) for *_, key in line)):  # somebody may train
            waits = "although no round is open" if stands else f"for {self._training_rounds} rounds"
            raise Violation("client turns", f"height {height}: a step or a training job waits {waits}")

    # Progress --------------------------------------------------------------------------------------------------------

    def demands(self, now: float, began: float) -> Iterator[Demand]:
        """Yield what must happen to the open steps.

        A history goes on while a round is open for long, and with an open round until one has closed after `began`.
        """
        if self._is_due or self._has_round:
            age = now - max(self._moved, began)
            is_awaited = self._has_round and (self._closed <= began or now - self._moved > LONG_SECONDS)
            yield Demand("steps", "no round of a step begins or closes", age, STEP_SECONDS_MAX, is_awaited)

    def came_about(self) -> dict[str, int]:
        """Return counts for the figures of a campaign."""
        return dict(self.counts)


def order(key: bytes, step: int, owner: bytes, before: Any, after: Any) -> list[bytes]:
    """Return the members that may train a step, in the order of its attempts: the owner, then those that failed less often."""
    members, failures = after.members, Counter[bytes]()
    for of, reasons in before.jobs.jobs[key].rejected.items():
        failures[members.current_key(of)] += sum(reasons.values())
    trains = [of for of, member in members.members.items() if "trainer" in member.roles and members.may_be_awaited(of)]
    able = [of for of in trains if of not in before.jobs.jobs[key].suspended_trainers] or trains
    return sorted(able, key=lambda of: (of != owner, failures[of], hashlib.sha256(codec.encode([key, step, of])).digest()))


def _is_running(state: Any, key: bytes) -> bool:
    job = state.jobs.jobs.get(key)
    return job is not None and str(job.phase) == "running"


def _is_undone(job: Any, height: int) -> bool:
    return bool(job.undone_rounds) and job.undone_rounds[-1].height == height


def _has_startable_job(before: Any, after: Any) -> bool:
    """Return True if a job stays queued although it certainly could start: all voters train, and its author is there."""
    members, queued = after.members, {waiting.job for waiting in before.jobs.queue}
    all_train = all("trainer" in members.members[voter].roles for voter in members.round_voters)
    return all_train and any(
        waiting.job in queued and b":alone" not in waiting.spec and members.is_current_key(members.current_key(waiting.author))
        for waiting in after.jobs.queue
    )
