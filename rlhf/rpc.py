"""RPC calls of RLHF, and the views that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FINISHED, MEASURING = "finished", "measuring"  # all rounds are closed; this peer has measured the last model, or will


@dataclass(frozen=True, slots=True)
class PreferencesView:
    """Origin of the preferences of a job."""

    set: str
    decided_by_annotators: bool  # a quorum of the voters has derived them from the project
    project: str = ""  # project that the plan claims, if any
    height: int = 0
    redacted: int = 0  # pairs of the set that were redacted since
    attesting_voters: int = 0  # voters that derived this set so far; 0 again after the decision
    dissenting_voters: int = 0  # voters that derived another set or none


@dataclass(frozen=True, slots=True)
class StageView:
    objective: str
    job: str
    state: str  # waiting, running, paused, measuring, finished or failed
    round: int  # rounds in the model
    rounds: int
    model_root: str
    held_out_accuracy: float | None = None  # accuracy of a reward model or `dpo`, measured by this peer or decided by the voters
    calibration_error: float | None = None  # expected calibration error of these probabilities
    preferences: PreferencesView | None = None  # origin of the preferences of a reward model or `dpo`
    start_refusal: str = ""  # why a due job was refused; each block tries again
    held_out_nats: float | None = None  # objective `instruct`: nats per token of the held-out responses
    notes: tuple[str, ...] = ()  # notes for people: numbers of lines that were left out or shortened
    measured_rounds: int | None = None  # rounds in the measured model; None: no model was measured
    held_out_pairs: int | None = None  # pairs behind the accuracy, without ties
    held_out_interval: tuple[float, float] | None = None  # 95 % interval of the accuracy
    word_count_accuracy: float | None = None  # accuracy of a word-count model on the same pairs
    identical_pairs: int | None = None  # pairs of the set with two identical responses
    contradictory_pairs: int | None = None  # pairs of the set that other pairs contradict
    failure: str = ""  # why the stage failed


@dataclass(frozen=True, slots=True)
class RlhfView:
    state: str  # none; a plan is running, paused, measuring, finished, failed or cancelled; a single job has its own state
    stages: tuple[StageView, ...]


@dataclass(frozen=True, slots=True)
class PolicyMetricsView:
    """Figures of a policy in its last round with an accepted proposal: medians over the trainers, per response."""

    job: str
    round: int
    accepted: int
    score: float
    kl_nats: float  # log π − log π_ref: distance of the policy from the reference
    response_tokens: float
    unfinished: float  # share of responses without the stop token
    distinct_2: float  # distinct bigrams divided by all bigrams
    length_correlation: float  # correlation of length and score
    beta: float | None = None  # β of the next round; None: no next round, or this peer lacks the model
    kl_stop: float | None = None  # the limit in nats, if it ended the job early
    warning: str = ""  # not empty if the score rises while responses become alike
    blocked: float = 0.0  # share of responses that the blocklist of the job blocks

    @property
    def summary_line(self) -> str:
        """The figures in one line, for people."""
        length = (
            f"{self.response_tokens:.1f} tokens ({self.length_correlation:+.2f} with the score), {self.unfinished:.0%} unfinished"
        )
        blocked = f", {self.blocked:.0%} blocked" if self.blocked else ""
        nats = f"{self.kl_nats:.2f} nats from the reference"
        return f"score {self.score:.3f}, {nats}, {length}, distinct-2 {self.distinct_2:.3f}{blocked}"


@dataclass(frozen=True, slots=True)
class CompareView:
    """Responses of the policy and of its reference to one prompt."""

    job: str
    round: int
    policy: str
    reference: str
    withheld: tuple[str, ...] = ()  # names of the responses that the blocklist of the job blocks


@dataclass(frozen=True, slots=True)
class PairDrawView:
    job: str
    round: int
    trainer: str
    step: int
    accepted: bool  # whether the trainer's proposal was accepted


@dataclass(frozen=True, slots=True)
class PairTraceView:
    """Steps of trainers in which one pair was drawn."""

    pair: str
    height: int | None  # height up to which annotators decided the set; None: the set is not known to come from a project
    set: str  # the newest set with this pair
    held_out: bool  # no model is trained on it
    draws: tuple[PairDrawView, ...]
    unknown_rounds: int = 0  # rounds without a record at this peer, such as those before its snapshot


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
        """Start a plan that tunes the model of the finished job `base`. Returns the id of its first job, once it is decided.

        Exactly one of `reward` (a rule), `preferences` (a file) and `project` is given. A rule with its own vocabulary needs no
        base. The algorithm `dpo` needs no reward model. Otherwise the policy starts only if its reward model is better than
        chance, or if `ignore_accuracy` is set. `blocklist` is a file of words that block a response. `skip_bad` leaves out
        invalid lines of a file. `truncate` cuts long texts to the context, at the `left` or `right`. Raises `UserError` for
        invalid arguments.
        """

    async def cancel_rlhf_training(self, job: str = "") -> str:
        """End this member's plan and its current job, or vote to end the plan whose current job is `job`."""

    async def pause_rlhf_training(self) -> str:
        """Pause this member's plan: its open round closes, and no further round or stage begins."""

    async def resume_rlhf_training(self) -> str:
        """Resume this member's plan."""

    async def rlhf_status(self) -> RlhfView:
        """Return the progress of the newest plan or job of RLHF."""

    async def measure_last_model(self, job: str, asked: bool) -> StageView:
        """Return figures of a finished job's last model, and measure the model first if necessary.

        With `asked` the peer measures even if it does not usually measure models. Raises `UserError` at a peer without a worker,
        for a job that is not finished, or if the measurement fails.
        """

    async def policy_metrics(self) -> tuple[PolicyMetricsView, ...]:
        """Return the figures of the newest job of RLHF if it is a policy, or nothing before a proposal of it is accepted."""

    async def trace_pair(self, pair: str) -> PairTraceView:
        """Trace the draws of a pair in all jobs that the network still knows. `pair` is a task's id or a line of a file."""

    async def compare_policy(self, prompt: str, tokens: int, temperature: float, seed: int) -> CompareView:
        """Return the responses of the newest tuned model and of its reference to a prompt."""
