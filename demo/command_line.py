"""The command `peer demo`: its arguments, the choice of the demo, and the demo as a shell script."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from features import exit_statuses
from features.command_arguments import parse_integer_in
from peer.commands.definitions.job_commands import PRESET, SET
from peer.features import engines, require_engine
from protocol.errors import UserError

ATTACKS = (
    *("sign-flip", "scale", "nan", "garbage", "stale", "copy", "free-rider", "silent", "equivocate"),
    *("false-update", "withhold", "false-pass", "false-challenge", "lazy"),
    *("fabricate-rollouts", "choose-tokens", "false-figures", "other-reward"),
)
AUDITS = ("full", "sampled")  # the audit modes of `training.job_spec`, which is not imported because the import takes long
# Number of peers: fewer tolerate no faulty peer; more are too many for the two cores of a laptop.
DEMO_PEERS_MIN, DEMO_PEERS_MAX = 4, 10
DEMO_CROWD, DEMO_CROWD_MAX = 12, 100  # default and largest number of simulated annotators, each with a thread
DEMO_ON_TEXT = ("data", "preset", "baseline", "engines")
DEMO_WITH_PEOPLE = ("crowd",)  # flags that need --annotate
RLHF_DEMOS = ("toy", "text")
RLHF_ALGORITHMS = ("ppo", "grpo")
DEMO_WITH_EITHER = ("annotate", "peers", "seed", "json", "report", "keep", "web", "web_port")
DEMO_AS_COMMANDS = ("commands", "peers", "rounds", "data", "seed", "keep", "web")


ABOUT: Final = "Run a network of several peers on this machine, one of them dishonest"
DETAILS: Final = """
    The peers are real daemons with real connections on loopback. All of them vote. N − ⌊(N−1)/3⌋ of them train, and the others
    are lightweight voters. The demo prints the address of a page that shows the training.

        peer demo
        peer demo --data book.txt --rounds 100
        peer demo --audit sampled --attack false-update
        peer demo --rlhf toy --attack choose-tokens
        peer demo --annotate --crowd 0 --web-port 7780

    Attacks of `--attack`:

    - `sign-flip`, `scale`, `nan`, `garbage`, `stale`, `copy`, `free-rider`, `silent`, `equivocate`: with all audit modes.
    - `false-update`: updates that go backwards, with `--audit sampled`, like the next four.
    - `withhold`: auditors get no buffers.
    - `false-pass`: updates that go backwards, and audits that pass every update.
    - `false-challenge`: challenges of honest updates.
    - `lazy`: audits that pass every update without re-execution.
    - `fabricate-rollouts`: with `--rlhf`, training on responses that were never sampled. Without `--rlhf` this attack and the
      next three flip signs.
    - `choose-tokens`: the best last token for each response.
    - `false-figures`: a higher score than the true one.
    - `other-reward`: another reward table, without the penalty.

    With `--rlhf text`, `--set base.FIELD=VALUE` sets a field of the base, `--set reward.FIELD=VALUE` one of the reward model, and
    `--set FIELD=VALUE` one of the policy.

    With `--annotate` all peers have the role `annotator`, and everybody may enrol. Simulated people answer 85 to 95 percent of
    40 tasks correctly. Among five or more people, one answers only half of them correctly. The demo ends when each task is
    settled or waits for its author, or after five minutes. With `--crowd 0` the peers run until Ctrl-C.
    """
EXIT_STATUSES: Final = {
    exit_statuses.SUCCESS: "All honest peers hold the same bytes, each dishonest peer was found, none of its work remained in "
    "the model, and the model learned. With `--annotate`: all tasks ended, and 90 percent of the settled tasks are right",
    exit_statuses.FAILURE: "One of these checks failed",
}


def add_arguments(demo: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "--peers",
        type=parse_integer_in(DEMO_PEERS_MIN, DEMO_PEERS_MAX),
        default=4,
        metavar="N",
        help=f"Number of peers, {DEMO_PEERS_MIN} to {DEMO_PEERS_MAX} (default 4)",
    )
    demo.add_argument(
        "--malicious", type=parse_integer_in(0), default=1, metavar="K", help="Number of dishonest peers (default 1)"
    )
    about = "Number of trainers (default all peers but ⌊(N−1)/3⌋)"
    demo.add_argument("--trainers", type=parse_integer_in(1, DEMO_PEERS_MAX), metavar="T", help=about)
    about = f"Attack of the dishonest peers: {', '.join(ATTACKS)} (default sign-flip)"
    demo.add_argument("--attack", choices=ATTACKS, default="sign-flip", metavar="ATTACK", help=about)
    about = f"Audit mode of the job: {' or '.join(AUDITS)} (default full, or sampled with --preset per-step)"
    demo.add_argument("--audit", choices=AUDITS, metavar="MODE", help=about)
    PRESET.add_to(demo)
    SET.add_to(demo)
    about = (
        "Tuning by rewards in place of training on text alone. toy: a model of six tokens, whose best policy is known; "
        "text: a base, a reward model and a policy in turn"
    )
    demo.add_argument("--rlhf", choices=RLHF_DEMOS, metavar="NAME", help=about)
    about = "Algorithm of --rlhf: ppo with a value head, or grpo, which compares responses to one prompt (default ppo)"
    demo.add_argument("--algorithm", choices=RLHF_ALGORITHMS, metavar="NAME", help=about)
    about = "Preferences of --rlhf text: JSONL with prompt, chosen, rejected and perhaps p (default invented pairs)"
    demo.add_argument("--preferences", metavar="FILE", help=about)
    about = "Number of rounds (default 60, 600 with --preset per-step, 40 with --rlhf toy, 20 of the policy with --rlhf text)"
    demo.add_argument("--rounds", type=parse_integer_in(1), metavar="R", help=about)
    about = "Seed of the initial parameters and of the data order (default 0)"
    demo.add_argument("--seed", type=parse_integer_in(0), default=0, metavar="S", help=about)
    about = "Text file or folder, or - for standard input (default the built-in text)"
    demo.add_argument("--data", metavar="PATH", help=about)
    demo.add_argument("--json", metavar="FILE", help="File for the report as JSON")
    demo.add_argument(
        "--report", metavar="DIR", help="Folder for the report, the loss curve, the last screen, a sample and an export"
    )
    about = "Train the same model alone afterwards, at the best of several rates, for comparison"
    demo.add_argument("--baseline", action="store_true", help=about)
    about = "Mix one and two threads of torch, and disable vector instructions of numpy at one peer"
    demo.add_argument("--mixed", action="store_true", help=about)
    about = "Engines of the honest trainers, such as torch,torch,tinygrad; other trainers use the last one (default torch)"
    demo.add_argument("--engines", type=parse_engines, metavar="LIST", help=about)
    demo.add_argument("--keep", action="store_true", help="Keep the network running until Ctrl-C")
    about = "Print shell commands for the same network without a dishonest peer, and run nothing"
    demo.add_argument("--commands", action="store_true", help=about)
    demo.add_argument("--beyond-bound", action="store_true", help="Allow more dishonest peers than the voters tolerate")
    demo.add_argument("--annotate", action="store_true", help="Label tasks in place of training")
    demo.add_argument(
        "--crowd",
        type=parse_integer_in(0, DEMO_CROWD_MAX),
        metavar="N",
        help=f"Number of simulated people with --annotate, 2 to {DEMO_CROWD_MAX}, or 0 for none (default {DEMO_CROWD})",
    )
    about = "Port of the page. With --annotate the peers take ports from it on (default 0, any free ports)"
    demo.add_argument("--web-port", type=parse_integer_in(0, 65_535), default=0, metavar="P", help=about)
    demo.add_argument("--no-web", dest="web", action="store_false", help="Serve no page")


def parse_engines(text: str) -> tuple[str, ...]:
    """Return the names of engines in a list with commas. An engine may also be named by its package."""
    by_name = {name: name for name in engines()} | {kind.package: name for name, kind in engines().items() if kind.package}
    named = text.split(",")
    if unknown := [name for name in named if name not in by_name]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not an engine: choose from {', '.join(by_name)}")
    return tuple(by_name[name] for name in named)


def run_demo(options: argparse.Namespace) -> Any:
    if options.commands:
        return _demo_as_commands(options)
    if options.annotate:
        return _demo_with_people(options)
    for name in DEMO_WITH_PEOPLE:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs --annotate")
    for name in DEMO_ON_TEXT:
        if options.rlhf and getattr(options, name) and (name, options.rlhf) != ("data", "text"):
            raise UserError(f"--{name} cannot be combined with --rlhf {options.rlhf}: leave one out")
    if options.preferences and options.rlhf != "text":
        raise UserError(f"--preferences {options.preferences} needs --rlhf text")
    if options.algorithm and not options.rlhf:
        raise UserError(f"--algorithm {options.algorithm} needs --rlhf")
    tolerated = (options.peers - 1) // 3
    if options.malicious > tolerated and not options.beyond_bound:
        raise UserError(
            f"--malicious {options.malicious}: {options.peers} voters tolerate {tolerated} faulty: "
            f"set --peers {min(3 * options.malicious + 1, DEMO_PEERS_MAX)} or add --beyond-bound"
        )
    if options.malicious >= options.peers:
        raise UserError(f"--malicious {options.malicious}: at least one of the {options.peers} peers must be honest")
    fewest = options.peers - tolerated
    if options.trainers and not fewest <= options.trainers <= options.peers:
        raise UserError(f"--trainers {options.trainers}: {options.peers} peers need {fewest} to {options.peers} trainers")
    named = options.engines or ()
    if len(named) + options.malicious > options.peers:
        raise UserError(
            f"--engines names {len(named)} honest trainers, but only {options.peers - options.malicious} of "
            f"{options.peers} peers are honest: leave some out or set --peers"
        )
    if not named:
        require_engine("pytorch", "the demo trains", "label tasks with --annotate")
    for engine in named:
        require_engine(engine, f"the demo trains with the engine {engine}", "leave it out of --engines")
    from demo import network_demo

    return network_demo.main(options)


def _demo_as_commands(options: argparse.Namespace) -> None:
    for name, default in _defaults().items():
        if name not in DEMO_AS_COMMANDS and getattr(options, name) != default:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be combined with --commands, which prints honest training: leave one out"
            )
    from peer.commands.standard_streams import program_name

    print(make_demo_script(options, program_name()), end="")


def _demo_with_people(options: argparse.Namespace) -> Any:
    for name, default in _defaults().items():
        if name not in (*DEMO_WITH_EITHER, *DEMO_WITH_PEOPLE) and getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')} cannot be combined with --annotate, which trains nothing: leave one out")
    options.crowd = DEMO_CROWD if options.crowd is None else options.crowd
    if options.crowd == 1:
        raise UserError(f"--crowd 1: a task needs at least two votes: set 2 to {DEMO_CROWD_MAX}, or 0 for none")
    from demo import annotation_demo

    return annotation_demo.main(options)


def _defaults() -> Mapping[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args([]))


# The demo as commands ---------------------------------------------------------------------------------------------------

# Names of the peers, DEMO_PEERS_MAX of them.
NAMES: Final = ("anna", "ben", "carl", "dora", "emil", "fay", "gus", "hana", "ivo", "jo")
FOLDER: Final = "folkmoot-lab"
PORT, WEB_PORT = 7701, 7781  # peer port and web port of the first peer; the next peers have the next ports
ROUNDS: Final = 10  # default of `--rounds` in the script: a minute or two


def make_demo_script(options: argparse.Namespace, program: str = "peer") -> str:
    """Return the demo as a script for bash or zsh. `program` is the command that the script calls in place of `peer`."""
    return "\n".join(_lines(options, NAMES[: options.peers], program)) + "\n"


def _lines(options: argparse.Namespace, names: Sequence[str], peer: str) -> Iterator[str]:
    first, *others = names
    voters = " ".join(f'--voter "$({peer} identity --data-dir {FOLDER}/{name})"' for name in others)
    yield f"# {len(names)} peers on this machine; each has a folder and a log file in {FOLDER}"
    yield f"{peer} init --network lab --name {first} --data-dir {FOLDER}/{first} {voters}"
    yield "PEERS=()"
    yield f"{peer} run {_place(first, 0)} & PEERS+=($!)"
    yield "# one invitation for all founders, as soon as the first peer runs"
    yield f'until INVITATION="$({peer} invite --data-dir {FOLDER}/{first} 2> {FOLDER}/waits)"; do sleep 1; done'
    for number, name in enumerate(others, start=1):
        yield f'{peer} join "$INVITATION" --name {name} {_place(name, number)} & PEERS+=($!)'
    yield "# wait until all peers are registered as trainers"
    registered = f"{peer} peers --json --data-dir {FOLDER}/{first} | grep -o '\"trainer\"' | wc -l"
    yield f'until [ "$({registered})" -ge {len(names)} ]; do sleep 1; done'
    said = f" --data {shlex.quote(options.data)}" if options.data else ""
    said += f" --set seed={options.seed}" if options.seed else ""
    yield f"{peer} train --name demo --rounds {options.rounds or ROUNDS}{said} --data-dir {FOLDER}/{first}"
    yield f"{peer} watch demo --data-dir {FOLDER}/{first}  # ends with the job"
    yield f"{peer} rounds --data-dir {FOLDER}/{names[-1]}  # shows the same model roots as the other peers"
    yield f'{peer} sample "The " --data-dir {FOLDER}/{first}'
    if options.keep:
        yield f"# the peers keep running: http://127.0.0.1:{WEB_PORT}/live shows them"
        yield '# kill "${PEERS[@]}" stops them; `peer run --data-dir …` continues'
    else:
        yield 'kill "${PEERS[@]}"; wait "${PEERS[@]}"'


def _place(name: str, number: int) -> str:
    ports = f"--listen 127.0.0.1:{PORT + number} --web-listen 127.0.0.1:{WEB_PORT + number}"
    return f"--data-dir {FOLDER}/{name} {ports} --threads 1 --no-console --log-file {FOLDER}/{name}.log"
