"""Commands of RLHF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from features.command_arguments import JSON, SKIP_BAD, TRUNCATE, Argument, parse_integer_in, parse_non_negative, parse_set_options
from features.commands import CommandContext, command
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

SHORT = 8
NOTHING = "(no text: the model ended its answer at once)"
ACTIONS = ("start", "status", "pause", "resume", "cancel", "compare", "trace", "filter", "score")

ALGORITHMS = ("ppo", "grpo", "dpo")
ABOUT_ALGORITHMS = "of `rlhf start`: ppo (default); grpo: without a value head; dpo: by the preferences alone, without samples"


@command(
    'tune a model: start --base JOB; status; pause; resume; cancel; compare "PROMPT"; trace PAIR; filter FILE; score MODEL FILE',
    Argument("do", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS)),
    Argument(
        "what",
        nargs="?",
        default="",
        metavar="PROMPT|FILE|PAIR|JOB",
        help="text to go on from; JSONL to filter; a model that scores; a pair; the job of another's plan to cancel",
    ),
    Argument(
        "pairs",
        nargs="?",
        default="",
        metavar="PAIRS|FOLDER",
        help="of `rlhf score`: JSONL with pairs; of `rlhf trace`: an export",
    ),
    Argument("--tokenizer", default="", metavar="FILE", help="of `rlhf score`: the model's, if it has one"),
    Argument("--base", default="", metavar="JOB", help="of `rlhf start`: the finished job whose model is tuned, by name or id"),
    Argument("--reward", default="", metavar="rule:NAME", help="of `rlhf start`: a rule of the program, such as rule:vowels"),
    Argument("--preferences", default="", metavar="FILE", help="of `rlhf start`: JSONL with prompt, chosen, rejected, perhaps p"),
    SKIP_BAD,
    TRUNCATE,
    Argument("--project", default="", metavar="PROJECT", help="of `rlhf start`: preferences that people decided in it"),
    Argument(
        "--reward-epochs",
        type=parse_integer_in(1),
        default=3,
        metavar="N",
        help="of `rlhf start`: how often the pairs are gone through (default 3)",
    ),
    Argument("--ppo-iterations", type=parse_integer_in(0), default=10, metavar="N", help="of `rlhf start`: rounds (default 10)"),
    Argument("--algorithm", choices=ALGORITHMS, default="", metavar="NAME", help=ABOUT_ALGORITHMS),
    Argument(
        "--ignore-accuracy",
        action="store_true",
        help="of `rlhf start`: tune by a reward model even where chance is as good",
    ),
    Argument("--beta", type=parse_non_negative, default=None, metavar="B", help="of `rlhf start`: weight of the reference"),
    Argument("--name", default="", metavar="NAME", help="of `rlhf start`: what people call the job"),
    Argument("--set", action="extend", nargs="+", default=[], metavar="FIELD=VALUE", help="of `rlhf start`: other fields"),
    Argument("--tokens", type=parse_integer_in(1, TOKENS_MAX), default=64, metavar="N", help="of `rlhf compare` (default 64)"),
    Argument(
        "--temperature", type=parse_non_negative, default=1.0, metavar="T", help="of `rlhf compare`: 0: the likeliest (default 1)"
    ),
    Argument(
        "--seed", type=parse_integer_in(0), default=0, metavar="S", help="of `rlhf compare`: of the choice of tokens (default 0)"
    ),
    Argument(
        "--blocklist",
        default="",
        metavar="FILE",
        help="of `rlhf filter` and `start`: words that block a text, one a line, * for any letters",
    ),
    JSON,
    alias=("train", "rlhf"),
    alias_target=("rlhf", "start"),
)
async def rlhf(asked: CommandContext[RlhfRpc]) -> None:
    options = asked.options
    match options.do:
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
        raise UserError(f"rlhf start: {options.what!r} is no part of it: only `compare` and `filter` take a text")
    if not (options.reward or (options.base and (options.preferences or options.project))):  # the peer may need a base
        what = "--reward rule:NAME, --project PROJECT or --preferences FILE"
        raise UserError(f"rlhf start: say --base JOB, a finished job that `jobs` lists, and {what}")
    said = parse_set_options(options.set)
    if "rounds" in said:
        instead = "--reward-epochs N" if options.algorithm == "dpo" else f"--ppo-iterations {said['rounds']}"
        raise UserError(f"rlhf start: rounds follow from something else: say {instead} instead")
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
    asked.show(f"job {job} is decided; `rlhf status` shows how it goes")
    for stage in (await asked.api.rlhf_status()).stages:
        if stage.job == job:
            for line in (*_notes(stage), *odd_pair_lines(stage)):
                asked.show(line)
    if options.preferences:
        asked.show("its preferences are those of a file, not decided by annotators")
    if options.project:
        asked.show("it begins when a quorum of the voters has derived the same preferences from the project")


def _absolute(file: str) -> str:
    """The peer has another working directory."""
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
    """Without a peer: whoever has the list finds the same."""
    if not words or not texts:
        raise UserError("rlhf filter: say --blocklist FILE, with a word a line, and a file of JSONL with `id` and `text`")
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
        raise UserError("rlhf trace: say PAIR, the id of a task as `tasks export` has it, or the number of a file's line")
    if folder:  # without a peer, and in a process of its own: it checks the whole export
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
    whose = "of a file" if traced.height is None else f"decided by annotators up to height {traced.height}"
    asked.show(f"pair {traced.pair} is in the set {traced.set[: 2 * SHORT]}, {whose}")
    if traced.held_out:
        asked.show("it is held out: reward models are measured with it, and none is trained on it")
    table = TextTable("job", Column("round", is_number=True), "trainer", Column("step", is_number=True), "proposal")
    names = PeerNames({}) if folder else await asked.load_names()
    for draw in traced.draws:
        told = "accepted" if draw.accepted else "rejected"
        table.add_row(draw.job[:SHORT], str(display_round_number(draw.round)), names[draw.trainer], str(draw.step), told)
    if traced.draws:
        asked.show(table)
    elif not traced.held_out:
        asked.show("nobody has drawn it yet")
    if traced.unknown_rounds:
        asked.show(f"of {pluralize(traced.unknown_rounds, 'round')} this peer has seen nothing: it restored a snapshot")


async def _score(asked: CommandContext[RlhfRpc]) -> None:
    """Without a peer, and in a process of its own: no daemon imports torch."""
    options = asked.options
    if not options.what or not options.pairs:
        raise UserError("rlhf score: say MODEL, a .safetensors that `export` wrote, and a file of JSONL with preferences")
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
        since = f", {pluralize(of.redacted, 'pair')} of them redacted since" if of.redacted else ""
        return f"preferences decided by annotators, of {project}{since}"
    if not of.project:
        return "preferences of a file, not decided by annotators"
    if state == "cancelled":
        others = f"{pluralize(of.dissenting_voters, 'voter')} derived others"
        return f"preferences said to be of {project}: {others}; `rlhf start` begins again"
    heard = f"{pluralize(of.attesting_voters, 'voter')} derived these so far, {of.dissenting_voters} others"
    return f"it waits until a quorum of the voters has derived its preferences from {project}: {heard}"


def _measured(stage: StageView) -> Iterator[str]:
    """The figures of a stage, each with the round after which the model had it."""
    from rlhf.pair_accuracy import PairAccuracy

    job, after = stage.job[:SHORT], f"after round {stage.measured_rounds}" if stage.measured_rounds else "before round 1"
    if stage.held_out_accuracy is not None and stage.held_out_pairs is not None:
        accuracy = PairAccuracy.from_share(stage.held_out_accuracy, stage.held_out_pairs)
        error = stage.calibration_error
        sure = "" if error is None else f"; its chances are off by {error:.0%} on average"
        yield f"{job}, {after}: the better response scores higher in {accuracy}{sure}"
        if (words := stage.word_count_accuracy) is not None and words > stage.held_out_accuracy:
            way = "more pairs, more epochs (`--reward-epochs`) or another base may help"
            yield f"{job}, warning: a word-count model ranks {words:.2f} of the same pairs as people do, more than this model"
            yield f"{job}: {way}"
        elif words is not None:
            yield f"{job}, beside it a word-count model: {words:.2f} of the same pairs"
    elif stage.state == FINISHED and stage.preferences is not None:
        yield f"{job}: this peer has not measured it"
    if stage.held_out_nats is not None:
        yield f"{job}, {after}: {stage.held_out_nats:.3f} nats for a token of the held-out responses"
    if stage.state == MEASURING:
        yield f"{job}: the model after round {stage.round} is being measured"
    yield from odd_pair_lines(stage)


def _notes(stage: StageView) -> list[str]:
    return [f"{stage.job[:SHORT]}: {note}" for note in stage.notes]


def odd_pair_lines(stage: StageView) -> Iterator[str]:
    identical, contradictory = stage.identical_pairs or 0, stage.contradictory_pairs or 0
    counts = [f"{pluralize(identical, 'pair')} {'has' if identical == 1 else 'have'} identical responses"] if identical else []
    counts += [f"{pluralize(contradictory, 'pair')} contradict one another"] if contradictory else []
    if counts:
        yield f"{stage.job[:SHORT]}: of its set {' and '.join(counts)}"


def _show_status(asked: CommandContext[RlhfRpc], view: RlhfView, figures: tuple[PolicyMetricsView, ...]) -> None:
    if not view.stages:
        asked.show("nothing is tuned yet: `rlhf start --base JOB --reward rule:NAME` begins")
        return
    table = TextTable("objective", "job", "state", Column("round", is_number=True), Column("of", is_number=True), "model root")
    for stage in view.stages:
        round = "–" if stage.state == "waiting" else str(min(display_round_number(stage.round), stage.rounds))
        table.add_row(stage.objective, stage.job[:SHORT], stage.state, round, str(stage.rounds), stage.model_root[: 2 * SHORT])
    asked.show(table)
    if view.state == "paused":
        asked.show("the plan is paused: `rlhf resume`, said by its author, lets it go on")
    if view.state == "failed" and len(view.stages) > 1:
        asked.show("the plan failed: no other stage begins")
    if view.state == "cancelled":
        asked.show("the plan is cancelled: no other stage begins")
    for stage in view.stages:
        if stage.start_refusal:
            asked.show(
                f"{stage.job[:SHORT]} does not begin yet: {stage.start_refusal}; each block tries again, `rlhf cancel` gives up"
            )
        if stage.failure:
            asked.show(f"{stage.job[:SHORT]} failed: {stage.failure}")
        for line in (*_measured(stage), *_notes(stage)):
            asked.show(line)
        if stage.preferences is not None:
            asked.show(f"{stage.job[:SHORT]}: {_whose(stage.preferences, view.state)}")
    for of in figures:
        asked.show(
            f"a response of round {display_round_number(of.round)} (the median of "
            f"{pluralize(of.accepted, 'trainer')}): {of.summary_line}"
        )
        if of.kl_stop is not None:
            asked.show(f"the job ended there, before all its rounds: kl_stop is {of.kl_stop:g} nats")
        elif of.beta is not None:
            asked.show(f"beta of the next round: {of.beta:.4g}")
        if of.warning:
            asked.show(of.warning)
