"""RPC calls of RLHF, and the views that these calls return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# states of a job whose rounds are all closed: this peer has measured the last model, or will measure it
FINISHED, MEASURING = "finished", "measuring"


@dataclass(frozen=True, slots=True)
class PreferencesView:
    """Origin of the preference set of a job."""

    set: str
    decided_by_annotators: bool  # True: a quorum of the voters has derived the set from the project
    project: str = ""  # project that the tuning plan names as origin; empty: none
    height: int = 0
    redacted: int = 0  # number of pairs of the set that were redacted later
    attesting_voters: int = 0  # number of voters that have derived this set; 0 after the decision
    dissenting_voters: int = 0  # number of voters that have derived another set or none


@dataclass(frozen=True, slots=True)
class StageView:
    objective: str
    job: str
    state: str  # state of the stage: waiting, running, paused, measuring, finished or failed
    round: int  # number of rounds in the model
    rounds: int
    model_root: str
    # pair accuracy of a reward model or of `dpo` on held-out pairs, measured by this peer or decided by the voters
    held_out_accuracy: float | None = None
    calibration_error: float | None = None  # expected calibration error of the model's probabilities on the held-out pairs
    preferences: PreferencesView | None = None  # origin of the preference set of a reward model or of `dpo`
    start_refusal: str = ""  # reason why the stage's job was refused; the start is retried at each block
    held_out_nats: float | None = None  # objective `instruct`: nats per token of the held-out responses
    notes: tuple[str, ...] = ()  # sentences for people, about lines that were left out or shortened
    measured_rounds: int | None = None  # number of rounds in the measured model; None: no model was measured
    held_out_pairs: int | None = None  # number of held-out pairs in the accuracy, without ties
    held_out_interval: tuple[float, float] | None = None  # 95 % interval of the accuracy
    word_count_accuracy: float | None = None  # accuracy of a word-count model on the same held-out pairs
    identical_pairs: int | None = None  # number of pairs in the set with two identical responses
    contradictory_pairs: int | None = None  # number of pairs in the set that other pairs contradict
    failure: str = ""  # reason why the stage failed; empty: it has not failed


@dataclass(frozen=True, slots=True)
class RlhfView:
    state: str  # `none`; of a plan: running, paused, measuring, finished, failed or cancelled; of a single job: the job's state
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
    kl_stop: float | None = None  # KL limit in nats if it ended the job early; None: it did not
    warning: str = ""  # sentence if the score rises while responses become alike; else empty
    blocked: float = 0.0  # share of responses that the job's blocklist blocks

    @property
    def summary_line(self) -> str:
        """Text of the figures in one line, for people."""
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
    withheld: tuple[str, ...] = ()  # fields, `policy` or `reference`, whose responses the job's blocklist blocks


@dataclass(frozen=True, slots=True)
class PairDrawView:
    job: str
    round: int
    trainer: str
    step: int
    accepted: bool  # the trainer's proposal of this round was accepted


@dataclass(frozen=True, slots=True)
class PairTraceView:
    """Trace of a pair: the trainers' steps in which the pair was drawn."""

    pair: str
    height: int | None  # height at which the set was derived from a project's labels; None: no project is known as its origin
    set: str  # digest of the newest preference set with this pair
    held_out: bool  # the pair is held out: no model is trained on it
    draws: tuple[PairDrawView, ...]
    unknown_rounds: int = 0  # number of rounds of which this peer has no record, such as rounds before its snapshot


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
        """Start a plan that tunes the model of the finished job `base`.

        Returns the id of the plan's first job after its decision. Exactly one of `reward` (a rule), `preferences` (a file) and
        `project` is given. A rule with its own vocabulary needs no base. The algorithm `dpo` needs no reward model. Otherwise the
        policy starts only if its reward model is better than chance, or if `ignore_accuracy` is set. `blocklist` is a file of
        words that block a response. `skip_bad` leaves out invalid lines of a file. `truncate` cuts long texts to the context, at
        the `left` or `right`. Raises `UserError` for invalid arguments.
        """

    async def cancel_rlhf_training(self, job: str = "") -> str:
        """End this member's tuning plan and its current job. With `job`, vote to end the plan whose current job is `job`."""

    async def pause_rlhf_training(self) -> str:
        """Pause this member's tuning plan: its open round closes, and no further round or stage begins."""

    async def resume_rlhf_training(self) -> str:
        """Resume this member's paused tuning plan."""

    async def rlhf_status(self) -> RlhfView:
        """Return the progress of the newest tuning plan, or of a newer single job of RLHF."""

    async def measure_last_model(self, job: str, asked: bool) -> StageView:
        """Return figures of a finished job's last model, and measure the model first if necessary.

        With `asked`, the peer measures the model even if it does not measure models of this objective by itself. Raises
        `UserError` at a peer without a worker, for a job that is not finished, or if the measurement fails.
        """

    async def policy_metrics(self) -> tuple[PolicyMetricsView, ...]:
        """Return the figures of the newest job of RLHF if the job trains a policy.

        Before its first accepted proposal there are none.
        """

    async def trace_pair(self, pair: str) -> PairTraceView:
        """Return the steps in which a pair was drawn, in all jobs that the network still has.

        `pair`: a task's id, or the number of a line in a file of preferences.
        """

    async def compare_policy(self, prompt: str, tokens: int, temperature: float, seed: int) -> CompareView:
        """Return the responses of the newest tuned model and of its reference to a prompt."""
