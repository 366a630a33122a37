"""The command `peer demo`: its arguments, the choice of the demo, and the demo as a shell script."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from features.command_arguments import parse_integer_in
from peer.commands.definitions.job_commands import PRESET, SET
from protocol.errors import UserError

ATTACKS = (
    *("sign-flip", "scale", "nan", "garbage", "stale", "copy", "free-rider", "silent", "equivocate"),
    *("false-update", "withhold", "false-pass", "false-challenge", "lazy"),
    *("fabricate-rollouts", "choose-tokens", "false-figures", "other-reward"),
)
AUDITS = ("full", "sampled")  # as in `training.job_spec`, which is not imported here because that takes long
DEMO_PEERS_MIN, DEMO_PEERS_MAX = 4, 10  # fewer do not tolerate a liar; more are too many for two cores of a laptop
DEMO_CROWD, DEMO_CROWD_MAX = 12, 100  # simulated people, one thread each
DEMO_ON_TEXT = ("data", "preset", "baseline")
DEMO_WITH_PEOPLE = ("crowd",)  # flags that need --annotate
RLHF_DEMOS = ("toy", "text")
RLHF_ALGORITHMS = ("ppo", "grpo")
DEMO_WITH_EITHER = ("annotate", "peers", "seed", "json", "report", "keep", "web", "web_port")
DEMO_AS_COMMANDS = ("commands", "peers", "rounds", "data", "seed", "keep", "web")


def add_arguments(demo: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "--peers",
        type=parse_integer_in(DEMO_PEERS_MIN, DEMO_PEERS_MAX),
        default=4,
        metavar="N",
        help="number of peers, 4 to 10 (default 4); all of them vote",
    )
    demo.add_argument(
        "--malicious", type=parse_integer_in(0), default=1, metavar="K", help="number of dishonest peers (default 1)"
    )
    about = "number of trainers (default: all but the f faulty ones that the voters tolerate)"
    demo.add_argument("--trainers", type=parse_integer_in(1, DEMO_PEERS_MAX), metavar="T", help=about)
    demo.add_argument(
        "--attack",
        choices=ATTACKS,
        default="sign-flip",
        metavar="ATTACK",
        help=f"attack of the dishonest peers: {', '.join(ATTACKS)}",
    )
    demo.add_argument("--audit", choices=AUDITS, metavar="MODE", help=f"audits of the job: {', '.join(AUDITS)} (default full)")
    PRESET.add_to(demo)
    SET.add_to(demo)
    about = (
        "tune by rewards. toy: responses of five tokens, with a known best policy; "
        "text: a base model, a reward model and a policy, one after another"
    )
    demo.add_argument("--rlhf", choices=RLHF_DEMOS, metavar="NAME", help=about)
    about = "with --rlhf: ppo with a value head, or grpo with groups of responses to one prompt (default ppo)"
    demo.add_argument("--algorithm", choices=RLHF_ALGORITHMS, metavar="NAME", help=about)
    about = "with --rlhf text: JSONL with prompt, chosen, rejected, and optionally p (default: pairs made from a text in Python)"
    demo.add_argument("--preferences", metavar="FILE", help=about)
    about = "number of rounds (default 60, a minute or two; with --rlhf toy 40, with --rlhf text 20 of the policy)"
    demo.add_argument("--rounds", type=parse_integer_in(1), metavar="R", help=about)
    demo.add_argument(
        "--seed",
        type=parse_integer_in(0),
        default=0,
        metavar="S",
        help="seed of the initial values and the data order (default 0)",
    )
    demo.add_argument("--data", metavar="PATH", help="text file or folder of text files (default: a text in Python)")
    demo.add_argument("--json", metavar="FILE", help="file for report.json")
    demo.add_argument("--report", metavar="DIR", help="folder for the report, the picture and the sample")
    demo.add_argument("--baseline", action="store_true", help="train the same model afterwards in one process, for comparison")
    demo.add_argument(
        "--mixed", action="store_true", help="use 1 and 2 torch threads at different peers, and numpy without AVX at one"
    )
    demo.add_argument("--keep", action="store_true", help="keep the network running until Ctrl-C")
    demo.add_argument(
        "--commands", action="store_true", help="only print the commands of the same network by hand, without a dishonest peer"
    )
    demo.add_argument("--beyond-bound", action="store_true", help="allow more dishonest peers than the voters tolerate")
    demo.add_argument(
        "--annotate", action="store_true", help="label tasks with people instead of training, without a dishonest peer"
    )
    demo.add_argument(
        "--crowd",
        type=parse_integer_in(0, DEMO_CROWD_MAX),
        metavar="N",
        help="with --annotate: number of simulated people (default 12); 0: only tasks",
    )
    about = "port of the page; with --annotate, of the first peer's page, and the following ports (default 0: free ports)"
    demo.add_argument("--web-port", type=parse_integer_in(0, 65_535), metavar="P", help=about)
    demo.add_argument("--no-web", dest="web", action="store_false", help="serve no page of the progress")


def run_demo(options: argparse.Namespace) -> Any:
    if options.commands:
        return _demo_as_commands(options)
    if options.annotate:
        return _demo_with_people(options)
    for name in DEMO_WITH_PEOPLE:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: it needs --annotate")
    for name in DEMO_ON_TEXT:
        if options.rlhf and getattr(options, name) and (name, options.rlhf) != ("data", "text"):
            raise UserError(f"--{name} has no effect with --rlhf {options.rlhf}: leave it out")
    if options.preferences and options.rlhf != "text":
        raise UserError(f"--preferences {options.preferences}: it needs --rlhf text")
    if options.algorithm and not options.rlhf:
        raise UserError(f"--algorithm {options.algorithm}: it needs --rlhf")
    tolerated = (options.peers - 1) // 3
    if options.malicious > tolerated and not options.beyond_bound:
        raise UserError(
            f"--malicious {options.malicious}: {options.peers} voters tolerate {tolerated} (n ≥ 3f + 1); "
            f"use --peers {min(3 * options.malicious + 1, DEMO_PEERS_MAX)} or add --beyond-bound"
        )
    if options.malicious >= options.peers:
        raise UserError(f"--malicious {options.malicious}: at least one of the {options.peers} peers must be honest")
    fewest = options.peers - tolerated
    if options.trainers and not fewest <= options.trainers <= options.peers:
        raise UserError(f"--trainers {options.trainers}: with {options.peers} peers, {fewest} to {options.peers} must train")
    from demo import network_demo

    return network_demo.main(options)


def _demo_as_commands(options: argparse.Namespace) -> None:
    for name, default in _defaults().items():
        if name not in DEMO_AS_COMMANDS and getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')}: leave it out with --commands, which shows honest training")
    from peer.commands.standard_streams import program_name

    print(make_demo_script(options, program_name()), end="")


def _demo_with_people(options: argparse.Namespace) -> Any:
    for name, default in _defaults().items():
        if name not in (*DEMO_WITH_EITHER, *DEMO_WITH_PEOPLE) and getattr(options, name) != default:
            raise UserError(f"--{name.replace('_', '-')} has no effect with --annotate: leave it out")
    options.crowd = DEMO_CROWD if options.crowd is None else options.crowd
    if options.crowd == 1:
        raise UserError("--crowd 1: a task needs at least two votes; use 0, or 2 and more")
    from demo import annotation_demo

    return annotation_demo.main(options)


def _defaults() -> Mapping[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return vars(parser.parse_args([]))


# The demo as commands ---------------------------------------------------------------------------------------------------

NAMES: Final = ("anna", "ben", "carl", "dora", "emil", "fay", "gus", "hana", "ivo", "jo")  # DEMO_PEERS_MAX names
FOLDER: Final = "folkmoot-lab"
PORT, WEB_PORT = 7701, 7781  # ports of the first peer; the next peers have the next ports
ROUNDS: Final = 10  # default of `--rounds`, which takes a minute or two


def make_demo_script(options: argparse.Namespace, program: str = "peer") -> str:
    """Return the demo as a script for bash or zsh. `program` is the command that runs this program."""
    return "\n".join(_lines(options, NAMES[: options.peers], program)) + "\n"


def _lines(options: argparse.Namespace, names: Sequence[str], peer: str) -> Iterator[str]:
    first, *others = names
    voters = " ".join(f'--voter "$({peer} identity --data-dir {FOLDER}/{name})"' for name in others)
    yield f"# {len(names)} peers on this machine; each has a folder in {FOLDER}, and its log beside it"
    yield f"{peer} init --network lab --name {first} --data-dir {FOLDER}/{first} {voters}"
    yield "PEERS=()"
    yield f"{peer} run {_place(first, 0)} & PEERS+=($!)"
    yield "# one string for all founders, as soon as the first one runs"
    yield f'until INVITATION="$({peer} invite --data-dir {FOLDER}/{first} 2> {FOLDER}/waits)"; do sleep 1; done'
    for number, name in enumerate(others, start=1):
        yield f'{peer} join "$INVITATION" --name {name} {_place(name, number)} & PEERS+=($!)'
    yield "# until all are registered as trainers"
    registered = f"{peer} peers --json --data-dir {FOLDER}/{first} | grep -o '\"trainer\"' | wc -l"
    yield f'until [ "$({registered})" -ge {len(names)} ]; do sleep 1; done'
    said = f" --data {shlex.quote(options.data)}" if options.data else ""
    said += f" --set seed={options.seed}" if options.seed else ""
    yield f"{peer} train --name demo --rounds {options.rounds or ROUNDS}{said} --data-dir {FOLDER}/{first}"
    yield f"{peer} watch demo --data-dir {FOLDER}/{first}  # until the job is finished"
    yield f"{peer} rounds --data-dir {FOLDER}/{names[-1]}  # the same model roots as at the others"
    yield f'{peer} sample "The " --data-dir {FOLDER}/{first}'
    if options.keep:
        yield f"# they go on running: http://127.0.0.1:{WEB_PORT}/live shows them"
        yield '# kill "${PEERS[@]}" ends them; `peer run --data-dir …` goes on from there'
    else:
        yield 'kill "${PEERS[@]}"; wait "${PEERS[@]}"'


def _place(name: str, number: int) -> str:
    ports = f"--listen 127.0.0.1:{PORT + number} --web-listen 127.0.0.1:{WEB_PORT + number}"
    return f"--data-dir {FOLDER}/{name} {ports} --threads 1 --no-console --log-file {FOLDER}/{name}.log"
