"""RPC calls of RLHF, and the views that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# States: all rounds are closed, and this peer has measured the last model, or has yet to measure it.
FINISHED, MEASURING = "finished", "measuring"


@dataclass(frozen=True, slots=True)
class PreferencesView:
    """Origin of the preferences of a job."""

    set: str
    decided_by_annotators: bool  # a quorum of the voters has derived them from the project
    project: str = ""  # project that the plan names as the origin; empty: a file
    height: int = 0
    redacted: int = 0  # pairs of the set that were redacted after its decision
    attesting_voters: int = 0  # voters that have derived this set so far; 0 again after the decision
    dissenting_voters: int = 0  # voters that derived another set or no set


@dataclass(frozen=True, slots=True)
class StageView:
    objective: str
    job: str
    state: str  # "waiting", "running", "paused", "measuring", "finished", "failed" or "forgotten"
    round: int  # number of rounds that the model includes
    rounds: int
    model_root: str
    # Accuracy of a reward model or of `dpo`, measured by this peer or decided by the voters.
    held_out_accuracy: float | None = None
    calibration_error: float | None = None  # expected calibration error of the model's probabilities
    preferences: PreferencesView | None = None  # origin of the preferences, for a reward model or `dpo`
    start_refusal: str = ""  # reason for which the due job was refused; each block tries the start again
    held_out_nats: float | None = None  # for the objective `instruct`: nats per token of held-out responses
    notes: tuple[str, ...] = ()  # notes for people, such as how many lines were left out or shortened
    measured_rounds: int | None = None  # number of rounds that the measured model includes; None: no model was measured
    held_out_pairs: int | None = None  # pairs in the accuracy, without ties
    held_out_interval: tuple[float, float] | None = None  # 95 % interval of the accuracy
    word_count_accuracy: float | None = None  # accuracy of a word-count model on the same pairs
    identical_pairs: int | None = None  # pairs of the set with two identical responses
    contradictory_pairs: int | None = None  # pairs of the set that another pair contradicts
    failure: str = ""  # reason for which the stage failed


@dataclass(frozen=True, slots=True)
class RlhfView:
    state: str  # "none"; of a plan: "running", "paused", "measuring", "finished", "failed", "cancelled"; or a single job's state
    stages: tuple[StageView, ...]


@dataclass(frozen=True, slots=True)
class PolicyMetricsView:
    """The figures of a policy in its last round with an accepted proposal: medians over the accepted proposals, per response."""

    job: str
    round: int
    accepted: int
    score: float
    kl_nats: float  # mean of log π − log π_ref: the distance of the policy from the reference
    response_tokens: float
    unfinished: float  # share of responses without the stop token
    distinct_2: float  # distinct bigrams of tokens divided by all bigrams
    length_correlation: float  # correlation of a response's length and score
    beta: float | None = None  # β of the next round; None: no round follows, or this peer lacks the model
    kl_stop: float | None = None  # limit of the distance in nats, if this limit ended the job early
    warning: str = ""  # warning if the score rises while responses become alike; empty: none
    blocked: float = 0.0  # share of responses that the job's blocklist blocks

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
    withheld: tuple[str, ...] = ()  # names of the fields whose responses the job's blocklist blocks


@dataclass(frozen=True, slots=True)
class PairDrawView:
    job: str
    round: int
    trainer: str
    step: int
    accepted: bool  # whether the trainer's proposal was accepted


@dataclass(frozen=True, slots=True)
class PairTraceView:
    """The trace of a pair: the training steps that drew it."""

    pair: str
    height: int | None  # height up to which the project's pairs are in the set; None: no project is known as its origin
    set: str  # digest of the newest set that has this pair
    held_out: bool  # The pair only measures models, and no model is trained on it.
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
        """Start a plan that tunes the model of the finished job `base`. Return the id of its first job after the plan is decided.

        Exactly one of `reward` (a rule), `preferences` (a file) and `project` is given. A rule with its own vocabulary needs no
        `base`. The algorithm `dpo` needs no reward model. A policy with a reward model starts only if that model is better than
        chance, or if `ignore_accuracy` is set. `blocklist` is a file of words that block a response. `skip_bad` leaves out
        invalid lines of a file. `truncate` (`left` or `right`) is the end at which texts longer than the context are cut. Raises
        `UserError` for invalid arguments.
        """

    async def cancel_rlhf_training(self, job: str = "") -> str:
        """End this member's plan and its current job, or vote to end the plan whose current job is `job`."""

    async def pause_rlhf_training(self) -> str:
        """Pause this member's plan: its open round closes, and no further round or stage begins."""

    async def resume_rlhf_training(self) -> str:
        """End the pause of this member's plan."""

    async def rlhf_status(self) -> RlhfView:
        """Return the progress of the newest tuning plan, or of a newer job of RLHF without a plan."""

    async def measure_last_model(self, job: str, asked: bool) -> StageView:
        """Return figures of a finished job's last model, and measure the model first if necessary.

        With `asked`, a peer that does not measure models by itself measures this one. Raises `UserError` at a peer without a
        worker, for a job that is not finished, or if the measurement fails.
        """

    async def policy_metrics(self) -> tuple[PolicyMetricsView, ...]:
        """Return the figures of the newest job of RLHF. Empty: the job is no policy, or none of its proposals is accepted yet."""

    async def trace_pair(self, pair: str) -> PairTraceView:
        """Return the training steps that drew a pair, in all jobs that the ledger still has.

        `pair` is a task's id or a line of a file.
        """

    async def compare_policy(self, prompt: str, tokens: int, temperature: float, seed: int) -> CompareView:
        """Return the responses of the newest tuned model and of its reference to a prompt."""
