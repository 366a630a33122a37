"""Calls of RLHF: what people ask their own peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FINISHED, MEASURING = "finished", "measuring"  # its last model is measured, as far as the peer measures any; or will be


@dataclass(frozen=True, slots=True)
class PreferencesView:
    """Where the preferences of a reward model come from."""

    set: str
    decided_by_annotators: bool  # a quorum of the voters has derived them from the project; else nobody vouches for them
    project: str = ""  # of which they are said to be
    height: int = 0
    redacted: int = 0  # pairs of it that were redacted since
    attesting_voters: int = 0  # voters that have derived this set so far, and others; once it is decided they are forgotten
    dissenting_voters: int = 0


@dataclass(frozen=True, slots=True)
class StageView:
    objective: str
    job: str
    state: str  # waiting, running, paused, measuring, finished or failed
    round: int  # how many are in the model
    rounds: int
    model_root: str
    held_out_accuracy: float | None = None  # of a reward model or `dpo`, as this peer or else the voters measured it
    calibration_error: float | None = None  # of these: how far its chances are from people's, in the mean
    preferences: PreferencesView | None = None  # of these
    start_refusal: str = ""  # why its job, which is due, does not begin; each block tries again
    held_out_nats: float | None = None  # of `instruct`: for a token of the held-out responses
    notes: tuple[str, ...] = ()  # counts of the file that its set was made of, for people
    measured_rounds: int | None = None  # that the measured model was trained for; None: nothing is measured
    held_out_pairs: int | None = None  # with a better response, of which the accuracy is
    held_out_interval: tuple[float, float] | None = None  # of the accuracy, 95 %
    word_count_accuracy: float | None = None  # of a word-count model on the same pairs
    identical_pairs: int | None = None  # of the set: pairs of two identical responses
    contradictory_pairs: int | None = None  # of the set: pairs that others contradict
    failure: str = ""  # why the stage failed


@dataclass(frozen=True, slots=True)
class RlhfView:
    state: str  # none; of a plan running, paused, measuring, finished, failed or cancelled; else that of the job
    stages: tuple[StageView, ...]


@dataclass(frozen=True, slots=True)
class PolicyMetricsView:
    """Of the last round in which something was accepted: medians over its trainers, for one response."""

    job: str
    round: int
    accepted: int
    score: float
    kl_nats: float  # log π − log π_ref: how far the policy is from the reference
    response_tokens: float
    unfinished: float  # share of responses without the stop token
    distinct_2: float  # share of different pairs among all pairs of neighbouring tokens
    length_correlation: float  # of responses' lengths with their scores
    beta: float | None = None  # of the next round; None: there is none, or this peer has no model of the job
    kl_stop: float | None = None  # at which the job ended, before all its rounds
    warning: str = ""  # the score rises while responses become alike
    blocked: float = 0.0  # share of responses that hold a word of the job's list

    @property
    def summary_line(self) -> str:
        """In one line."""
        length = (
            f"{self.response_tokens:.1f} tokens ({self.length_correlation:+.2f} with the score), {self.unfinished:.0%} unfinished"
        )
        blocked = f", {self.blocked:.0%} blocked" if self.blocked else ""
        nats = f"{self.kl_nats:.2f} nats from the reference"
        return f"score {self.score:.3f}, {nats}, {length}, distinct-2 {self.distinct_2:.3f}{blocked}"


@dataclass(frozen=True, slots=True)
class CompareView:
    """Two answers to one prompt."""

    job: str
    round: int
    policy: str
    reference: str
    withheld: tuple[str, ...] = ()  # which of them is not shown, since the job's list of words blocks it


@dataclass(frozen=True, slots=True)
class PairDrawView:
    job: str
    round: int
    trainer: str
    step: int
    accepted: bool  # the proposal that was made with it


@dataclass(frozen=True, slots=True)
class PairTraceView:
    """Of one pair."""

    pair: str
    height: int | None  # up to which annotators decided the set; None: they did not, as far as the network knows
    set: str  # the newest one that has it
    held_out: bool  # nothing is trained on it
    draws: tuple[PairDrawView, ...]
    unknown_rounds: int = 0  # rounds that this peer has not seen, as before a snapshot that it restored


class RlhfRpc(Protocol):
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
        blocklist: str = "",
        algorithm: str = "",
        skip_bad: bool = False,
        truncate: str = "",
        ignore_accuracy: bool = False,
    ) -> str:
        """Tunes the model of a finished job, by a rule, by preferences that people decided in a project, or by those in a file;
        with an empty base a first model, where the reward has a vocabulary of its own. `blocklist` is a file with a list of words
        that no text of the policy may hold. The algorithm `dpo` learns from preferences without a reward model. `skip_bad` leaves
        out lines of a file that cannot be used. `truncate` cuts texts to the context, at the `left` or `right`. The policy starts
        `ignore_accuracy`, or only if its reward model is better than chance. Returns the id of the first job, once it is decided.
        """

    async def cancel_rlhf_training(self, job: str = "") -> str:
        """Ends this member's plan, and the job that it has come to. Of another's, named by its job: a voter wants it to end."""

    async def pause_rlhf_training(self) -> str:
        """Once the open round of this member's plan is closed, no other round and no stage of it begins."""

    async def resume_rlhf_training(self) -> str:
        """This member's plan goes on."""

    async def rlhf_status(self) -> RlhfView:
        """How far the newest tuning is."""

    async def measure_last_model(self, job: str, asked: bool) -> StageView:
        """The figures of a finished job's last model. It is measured now if this peer has not done so, and either that is `asked`
        or the peer measures models anyway. Raises `UserError` at a peer without a worker.
        """

    async def policy_metrics(self) -> tuple[PolicyMetricsView, ...]:
        """Of the newest tuning; nothing before its first round is closed."""

    async def trace_pair(self, pair: str) -> PairTraceView:
        """Where a pair was drawn, by its task or its line, in all jobs that the network still knows."""

    async def compare_policy(self, prompt: str, tokens: int, temperature: float, seed: int) -> CompareView:
        """What the newest policy and its reference say."""
