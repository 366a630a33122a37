"""Commands of RLHF: `peer rlhf start`, `status`, `compare`, `filter`, `trace`, `score` and others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from features.command_arguments import JSON, SKIP_BAD, TRUNCATE, Argument, parse_integer_in, parse_non_negative, parse_set_options
from features.commands import Action, CommandContext, command
from features.json_output import to_json
from features.lazy_import import import_object
from features.peer_names import PeerNames
from features.text_tables import Column, TextTable, Verbatim, pluralize
from protocol.errors import UserError
from protocol.sampling import TOKENS_MAX, WITHHELD_TEXT
from protocol.units import display_round_number
from rlhf.rpc import (
    FINISHED,
    MEASURING,
    PairDrawView,
    PairTraceView,
    PolicyMetricsView,
    PreferencesView,
    RlhfRpc,
    RlhfView,
    StageView,
)
from storage.regular_files import open_regular, read_regular

TOPIC = "Tuning"

SHORT = 8
NOTHING = "(empty: the model ended its response at once)"
ALGORITHMS = ("ppo", "grpo", "dpo")

BLOCKLIST = Argument(
    "--blocklist", default="", metavar="FILE", help="File with one blocked word per line, where * stands for any letters"
)
START_OPTIONS = (
    Argument("--base", default="", metavar="JOB", help="Finished job with the model to tune, by name or id"),
    Argument("--reward", default="", metavar="rule:NAME", help="Reward rule of the program, such as rule:vowels"),
    Argument("--project", default="", metavar="PROJECT", help="Project whose decided pairs are the preferences"),
    Argument("--preferences", default="", metavar="FILE", help="File of preferences, or - for standard input"),
    SKIP_BAD,
    TRUNCATE,
    Argument(
        "--reward-epochs",
        type=parse_integer_in(1),
        default=3,
        metavar="N",
        help="Number of epochs over the preferences (default 3)",
    ),
    Argument(
        "--ppo-iterations",
        type=parse_integer_in(0),
        default=10,
        metavar="N",
        help="Number of rounds of the policy, or 0 for a reward model alone (default 10)",
    ),
    Argument(
        "--algorithm",
        choices=ALGORITHMS,
        default="",
        metavar="NAME",
        help="Algorithm: ppo, grpo (no value head) or dpo (preferences without samples) (default ppo)",
    ),
    Argument("--ignore-accuracy", action="store_true", help="Tune although the reward model is not better than chance"),
    Argument(
        "--beta",
        type=parse_non_negative,
        default=None,
        metavar="B",
        help="Weight of the KL penalty (default 0.05; 0.02 with a base and a rule, 0.1 for the toy)",
    ),
    Argument("--name", default="", metavar="NAME", help="Name of the job"),
    Argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="Further fields of the policy, or with reward.FIELD=VALUE of the reward model",
    ),
    BLOCKLIST,
)
COMPARE_OPTIONS = (
    Argument("--tokens", type=parse_integer_in(1, TOKENS_MAX), default=64, metavar="N", help="Number of tokens (default 64)"),
    Argument(
        "--temperature",
        type=parse_non_negative,
        default=1.0,
        metavar="T",
        help="Divisor of logits; 0 takes the likeliest token (default 1.0)",
    ),
    Argument("--seed", type=parse_integer_in(0), default=0, metavar="S", help="Seed of the choice of tokens (default 0)"),
)
TOKENIZER = Argument("--tokenizer", default="", metavar="FILE", help="Tokenizer of the model, if it has one")


@command(
    "Tune a model by rewards or preferences",
    Argument("what", nargs="?", default="", metavar="PROMPT|FILE|PAIR|JOB|MODEL", help="Argument of the action"),
    Argument("pairs", nargs="?", default="", metavar="PAIRS|FOLDER", help="Second argument of score and trace"),
    description="""
        A plan begins with a finished job. Its model is tuned by a rule, or by a reward model that learns from preferences.
        Trainers and auditors of a plan need the role `rlhf` or `full`. A member has one plan at a time, and the network four.

            peer rlhf start --base base --reward rule:vowels --ppo-iterations 10
            peer rlhf start --base base --project pairs
            peer rlhf start --base helpful --preferences pairs.jsonl --algorithm dpo
            peer rlhf status
        """,
    actions=(
        Action(
            "start",
            "Start a plan",
            START_OPTIONS,
            """
            Give `--base` and one of `--reward`, `--project` and `--preferences`. Preferences of a project are the pairs that
            people have decided, except redacted ones and pairs whose responses are both bad. Each voter derives them itself,
            and training begins when a quorum has derived the same ones. Preferences of a file are not decided by annotators.
            The file has one object per line: `{"prompt": "…", "chosen": "…", "rejected": "…"}`, and perhaps `"p"`, the
            probability that the chosen response is better. A tenth of the prompts is held out.

            At the prompt, `train rlhf` is the same command.
            """,
        ),
        Action(
            "status",
            "Show the stages of the newest plan, and the measurements of each model",
            (JSON,),
            "`measuring` means that the last model is not measured yet. A failed plan has its reason.",
        ),
        Action(
            "pause", "Pause your plan after its open round", (), "All pauses of a plan last for at most 10,000 blocks together."
        ),
        Action("resume", "Resume your plan"),
        Action(
            "cancel [JOB]",
            "Cancel your plan and its present job",
            (),
            "With JOB it votes to cancel the plan of another member, which needs a quorum of voters. `rlhf status` shows JOB.",
        ),
        Action("compare PROMPT", "Show responses of the policy and of its reference", (*COMPARE_OPTIONS, JSON)),
        Action(
            "trace PAIR [FOLDER]",
            "Show the steps of jobs that drew a pair",
            (JSON,),
            "PAIR is the id of a task, or the number of a line in the file. FOLDER is an export, and then no peer needs to run.",
        ),
        Action(
            "filter FILE",
            "Show the texts that a blocklist blocks",
            (BLOCKLIST, JSON),
            "Each line of FILE has `id` and `text`. `--json` prints `id`, `blocked` and `word`. No peer needs to run.",
        ),
        Action(
            "score MODEL PAIRS",
            "Score the responses of a file of preferences with a reward model",
            (TOKENIZER, JSON),
            "MODEL is a `.safetensors` file from `peer export`. `--json` prints `chosen_score` and `rejected_score` per line.",
        ),
    ),
    alias=("train", "rlhf"),
    alias_target=("rlhf", "start"),
)
async def rlhf(asked: CommandContext[RlhfRpc]) -> None:
    options = asked.options
    match options.action_name:
        case "start":
            await _start(asked)
        case "status":
            view = await asked.api.rlhf_status()
            if options.json:
                asked.show(Verbatim(to_json(view)))
            else:
                _show_status(asked, view, await asked.api.policy_metrics())
        case "cancel":
            asked.show(await asked.wait_for_decision(asked.api.cancel_rlhf_training(options.what)))
        case "pause":
            asked.show(await asked.wait_for_decision(asked.api.pause_rlhf_training()))
        case "resume":
            asked.show(await asked.wait_for_decision(asked.api.resume_rlhf_training()))
        case "compare":
            await _compare(asked)
        case "trace":
            await _trace(asked, options.what, options.pairs, options.json)
        case "filter":
            _filter(asked, options.blocklist, options.what, options.json)
        case "score":
            await _score(asked)


async def _start(asked: CommandContext[RlhfRpc]) -> None:
    options = asked.options
    if options.what:
        raise UserError(f"rlhf start: unexpected argument {options.what!r}")
    if not (options.reward or (options.base and (options.preferences or options.project))):  # a rule may work without a base
        what = "--reward rule:NAME, --project PROJECT or --preferences FILE"
        raise UserError(f"rlhf start: missing options: give --base JOB, a finished job from `jobs`, and {what}")
    said = parse_set_options(options.set)
    if "rounds" in said:
        instead = "--reward-epochs N" if options.algorithm == "dpo" else f"--ppo-iterations {said['rounds']}"
        raise UserError(f"rlhf start: rounds cannot be set: use {instead}")
    if options.beta is not None:
        said["beta"] = str(options.beta)
    job = await asked.wait_for_decision(
        asked.api.start_rlhf_training(
            options.base,
            options.reward,
            options.ppo_iterations,
            options.name,
            said,
            _absolute(options.preferences),
            options.reward_epochs,
            options.project,
            _absolute(options.blocklist),
            options.algorithm,
            options.skip_bad,
            options.truncate,
            options.ignore_accuracy,
        )
    )
    asked.show(f"job {job} is decided; follow it with `rlhf status`")
    for stage in (await asked.api.rlhf_status()).stages:
        if stage.job == job:
            for line in (*_notes(stage), *odd_pair_lines(stage)):
                asked.show(line)
    if options.preferences:
        asked.show("its preferences come from a file and were not decided by annotators")
    if options.project:
        asked.show("it starts when a quorum of voters has derived the same preferences from the project")


def _absolute(file: str) -> str:
    """Return the absolute path of a file, because the peer has another working directory. An empty path stays empty."""
    return str(Path(file).expanduser().absolute()) if file else ""


async def _compare(asked: CommandContext[RlhfRpc]) -> None:
    options = asked.options
    compared = await asked.api.compare_policy(options.what, options.tokens, options.temperature, options.seed)
    if options.json:
        asked.show(Verbatim(to_json(compared)))
        return
    policy = f"policy (job {compared.job[:SHORT]} after {compared.round} rounds):"
    for head, name, text in ((policy, "policy", compared.policy), ("reference:", "reference", compared.reference)):
        asked.show(head)
        asked.show(WITHHELD_TEXT if name in compared.withheld else Verbatim(text or NOTHING))


def _filter(asked: CommandContext[RlhfRpc], words: str, texts: str, is_json: bool) -> None:
    """Filter texts by a list of words. The result depends only on the two files, so no peer is asked."""
    if not words or not texts:
        raise UserError(
            "rlhf filter: missing arguments: give --blocklist FILE with a word per line, and a JSONL file with `id` and `text`"
        )
    from rlhf.moderation.word_matcher import filter_jsonl, parse_word_list

    entries = parse_word_list(words, read_regular(Path(words).expanduser()))
    blocked = count = 0
    with open_regular(Path(texts).expanduser()) as stream:
        for line in filter_jsonl(entries, texts, stream):
            count, blocked = count + 1, blocked + line["blocked"]
            if is_json:
                asked.show(Verbatim(json.dumps(line, ensure_ascii=False)))
            elif line["blocked"]:
                asked.show(Verbatim(f"{line['id']}: {line['word']}"))
    if not is_json:
        asked.show(f"{blocked} of {pluralize(count, 'text')} are blocked")


async def _trace(asked: CommandContext[RlhfRpc], pair: str, folder: str, is_json: bool) -> None:
    if not pair:
        raise UserError(
            "rlhf trace: missing PAIR: give the id of a task from `tasks export`, or the number of a line in the file"
        )
    if folder:  # An export needs no peer: another process verifies all of it.
        run = import_object("peer.commands.definitions.model_commands:run_module")
        found = json.loads(
            await run("peer.export.export_replay", "rlhf.api.pair_trace:ExportedPairTrace", _absolute(folder), pair)
        )
        traced = PairTraceView(**found | {"draws": tuple(PairDrawView(**draw) for draw in found["draws"])})
    else:
        traced = await asked.api.trace_pair(pair)
    if is_json:
        asked.show(Verbatim(to_json(traced)))
        return
    whose = "from a file" if traced.height is None else f"decided by annotators up to height {traced.height}"
    asked.show(f"pair {traced.pair} is in the preference set {traced.set[: 2 * SHORT]}, {whose}")
    if traced.held_out:
        asked.show("it is held out: reward models are measured on it, not trained")
    table = TextTable("job", Column("round", is_number=True), "trainer", Column("step", is_number=True), "proposal")
    names = PeerNames({}) if folder else await asked.load_names()
    for draw in traced.draws:
        told = "accepted" if draw.accepted else "rejected"
        table.add_row(draw.job[:SHORT], str(display_round_number(draw.round)), names[draw.trainer], str(draw.step), told)
    if traced.draws:
        asked.show(table)
    elif not traced.held_out:
        asked.show("no trainer has drawn it yet")
    if traced.unknown_rounds:
        asked.show(f"{pluralize(traced.unknown_rounds, 'round')} before this peer's snapshot are unknown")


async def _score(asked: CommandContext[RlhfRpc]) -> None:
    """Score pairs with an exported model, in a separate process. A command's process must not import torch."""
    options = asked.options
    if not options.what or not options.pairs:
        raise UserError(
            "rlhf score: missing arguments: give MODEL, a .safetensors file from `export`, and a JSONL file of preferences"
        )
    import_object("peer.features:require_engine")("pytorch", "rlhf score runs a model")
    run = import_object("peer.commands.definitions.model_commands:run_module")
    files = filter(None, (options.what, options.pairs, options.tokenizer))
    printed: str = await run("rlhf.pytorch.score_pairs", *map(_absolute, files))
    if options.json:
        asked.show(Verbatim(printed.rstrip("\n")))
        return
    found = [json.loads(line) for line in printed.splitlines()]
    right = sum(line["chosen_score"] > line["rejected_score"] for line in found)
    asked.show(f"the chosen response scores higher in {right} of {pluralize(len(found), 'pair')}")


def _whose(of: PreferencesView, state: str) -> str:
    project = f"project {of.project[:SHORT]} up to height {of.height}"
    if of.decided_by_annotators:
        since = f", {pluralize(of.redacted, 'pair')} redacted since" if of.redacted else ""
        return f"preferences decided by annotators in {project}{since}"
    if not of.project:
        return "preferences from a file, not decided by annotators"
    if state == "cancelled":
        others = f"{pluralize(of.dissenting_voters, 'voter')} derived other preferences"
        return f"preferences of {project} are not confirmed: {others}; start again with `rlhf start`"
    heard = f"{pluralize(of.attesting_voters, 'voter')} derived the same so far, {of.dissenting_voters} others"
    return f"waiting for a quorum of voters that derive the same preferences from {project}: {heard}"


def _measured(stage: StageView) -> Iterator[str]:
    """Yield a line for each figure of a stage, with the round after which the model was measured."""
    from rlhf.pair_accuracy import PairAccuracy

    job, after = stage.job[:SHORT], f"after round {stage.measured_rounds}" if stage.measured_rounds else "before round 1"
    if stage.held_out_accuracy is not None and stage.held_out_pairs is not None:
        accuracy = PairAccuracy.from_share(stage.held_out_accuracy, stage.held_out_pairs)
        error = stage.calibration_error
        sure = "" if error is None else f"; mean error of its probabilities {error:.0%}"
        yield f"{job}, {after}: the better response scores higher in {accuracy}{sure}"
        if (words := stage.word_count_accuracy) is not None and words > stage.held_out_accuracy:
            way = "more pairs, more epochs (`--reward-epochs`) or another base may help"
            yield f"{job}, warning: a word-count model is better: it agrees with people on {words:.2f} of the same pairs"
            yield f"{job}: {way}"
        elif words is not None:
            yield f"{job}, for comparison a word-count model: {words:.2f} of the same pairs"
    elif stage.state == FINISHED and stage.preferences is not None:
        yield f"{job}: not measured by this peer"
    if stage.held_out_nats is not None:
        yield f"{job}, {after}: {stage.held_out_nats:.3f} nats per token of held-out responses"
    if stage.state == MEASURING:
        yield f"{job}: measuring the model of round {stage.round}"
    yield from odd_pair_lines(stage)


def _notes(stage: StageView) -> list[str]:
    return [f"{stage.job[:SHORT]}: {note}" for note in stage.notes]


def odd_pair_lines(stage: StageView) -> Iterator[str]:
    identical, contradictory = stage.identical_pairs or 0, stage.contradictory_pairs or 0
    counts = [f"{pluralize(identical, 'pair')} {'has' if identical == 1 else 'have'} identical responses"] if identical else []
    counts += [f"{pluralize(contradictory, 'pair')} contradict one another"] if contradictory else []
    if counts:
        yield f"{stage.job[:SHORT]}: in its preference set {' and '.join(counts)}"


def _show_status(asked: CommandContext[RlhfRpc], view: RlhfView, figures: tuple[PolicyMetricsView, ...]) -> None:
    if not view.stages:
        asked.show("no plan yet; start one with `rlhf start --base JOB --reward rule:NAME`")
        return
    table = TextTable("objective", "job", "state", Column("round", is_number=True), Column("of", is_number=True), "model root")
    for stage in view.stages:
        round = "–" if stage.state == "waiting" else str(min(display_round_number(stage.round), stage.rounds))
        table.add_row(stage.objective, stage.job[:SHORT], stage.state, round, str(stage.rounds), stage.model_root[: 2 * SHORT])
    asked.show(table)
    if view.state == "paused":
        asked.show("the plan is paused; its author resumes it with `rlhf resume`")
    if view.state == "failed" and len(view.stages) > 1:
        asked.show("the plan failed: no further stage starts")
    if view.state == "cancelled":
        asked.show("the plan is cancelled: no further stage starts")
    for stage in view.stages:
        if stage.start_refusal:
            asked.show(
                f"{stage.job[:SHORT]} cannot start yet: {stage.start_refusal}; it is retried at each block, until `rlhf cancel`"
            )
        if stage.failure:
            asked.show(f"{stage.job[:SHORT]} failed: {stage.failure}")
        for line in (*_measured(stage), *_notes(stage)):
            asked.show(line)
        if stage.preferences is not None:
            asked.show(f"{stage.job[:SHORT]}: {_whose(stage.preferences, view.state)}")
    for of in figures:
        asked.show(
            f"responses of round {display_round_number(of.round)}, median of "
            f"{pluralize(of.accepted, 'trainer')}: {of.summary_line}"
        )
        if of.kl_stop is not None:
            asked.show(f"the job ended there, because kl_stop is {of.kl_stop:g} nats")
        elif of.beta is not None:
            asked.show(f"beta of the next round: {of.beta:.4g}")
        if of.warning:
            asked.show(of.warning)
