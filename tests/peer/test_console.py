from __future__ import annotations

import argparse
import io
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.base import PipeInput
from prompt_toolkit.output import DummyOutput

from features.text_tables import TextChunk, Verbatim
from peer.commands import command_line_parser, console
from peer.commands.command_line_parser import option_names
from peer.commands.definitions import all_commands, job_commands
from peer.commands.line_editor import CommandCompleter, LineEditor
from peer.commands.table_renderer import make_printer
from protocol.api import AuditsView, ModelFilesView, ModuleView, PeerView, StatusView, TrainRequest
from protocol.errors import UserError
from protocol.sampling import Activations, SamplingOptions
from tests.peer import fake_api
from tests.peer.fake_api import ME, OTHER, FakeApi
from training.api.job_builder import parse_overrides
from training.job_spec import ESTIMATES, MUON_RATE, PRESETS, AggregationRule, InnerOptimizerKind, complete_fields

WORDS = all_commands()


def parse(line: str) -> argparse.Namespace | None:
    return command_line_parser.parse_line(WORDS, line)


def parsed(line: str) -> argparse.Namespace:
    options = parse(line)
    assert options is not None
    return options


def request(line: str) -> TrainRequest:
    return job_commands.build_train_request(parsed(line))


@pytest.mark.parametrize("line", ["", "   ", "# a remark"])
def test_an_empty_line_is_no_command(line: str) -> None:
    assert parse(line) is None


def test_a_leading_peer_is_dropped_since_texts_name_commands_as_in_a_shell() -> None:
    assert parsed("peer approve erin") == parsed("approve erin")
    assert parsed("peer help approve") == parsed("help approve")
    with pytest.raises(UserError, match="unknown command 'peer'"):
        parse("peer")


def test_train_without_arguments_leaves_everything_to_the_defaults() -> None:
    assert request("train") == TrainRequest("", "", 0, 0, {})
    assert request("train --accept-risk") == TrainRequest("", "", 0, 0, {}, accept_risk=True)


def test_train_takes_what_a_job_needs() -> None:
    line = "train --rounds 5 --data local --name 'my job' --vocabulary 512 --set seed=4 --set name=a=b"
    assert request(line) == TrainRequest("my job", "local", 5, 512, {"seed": "4", "name": "a=b"})


def test_several_fields_may_stand_behind_one_set() -> None:
    assert request("train --set seed=4 batch=2 --rounds 3 --set bits=8").overrides == {"seed": "4", "batch": "2", "bits": "8"}


def test_the_path_of_the_data_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert request("train --data a.txt").data == str(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sttas", "unknown command 'sttas'; did you mean stats?"),
        ("train --round 3", "unknown argument '--round'; did you mean --rounds?"),
        ("train --rounds x", "'x' is not a whole number"),
        ("train --rounds 0", "0 is less than 1"),
        ("train --vocabulary 255", "255 is less than 256"),
        ("train --rounds", "expected one argument"),
        ("log 0", "0 is less than 1"),
        ("rounds 99999999999999999999999", "99999999999999999999999 is outside 1..9007199254740991"),
        ("sample x --seed 18446744073709551615", "18446744073709551615 is outside 0..9007199254740991"),
        ("train --name \udcff", "'\\udcff' is not UTF-8"),
        ("stats now", "unknown argument 'now'"),
        ("approve", "PEER"),
        ("retire --lower-tolerance", "PEER"),
        ("invite --days 91", "91 is outside 1..90"),
        ("revoke", "TOKEN"),
        ("challenge", "TRAINER"),
        ("challenge abce first", "'first'"),
        ("sample 'open", "close the quotation"),
        ("sample a --tokens 0", "0 is outside 1..4096"),
        ("sample a --tokens 4097", "4097 is outside 1..4096"),
        ("sample a --top-k -1", "-1 is outside 0..65536"),
        ("sample a --top-p 0", "0 is not a probability above 0 and at most 1"),
        ("sample a --top-p 1.1", "1.1 is not a probability above 0 and at most 1"),
        ("sample a --beams 17", "17 is outside 1..16"),
        ("sample a --stop ''", "the text is empty"),
    ],
)
def test_what_is_not_understood_is_named_with_the_way_out(line: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(line)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("item", ["seed", "=4"])
def test_a_field_without_a_value_is_refused(item: str) -> None:
    with pytest.raises(UserError, match="is not FIELD=VALUE"):
        request(f"train --set {item}")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rounds 10 --set rounds=5", "--rounds 10 and --set rounds=5 contradict each other: leave one out"),
        ("--set rounds=5 rounds=6", "--set rounds=5 and --set rounds=6 contradict each other: leave one out"),
        (
            "--vocabulary 512 --set model.vocabulary=300",
            "--vocabulary 512 and --set model.vocabulary=300 contradict each other: leave one out",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(words: str, told: str) -> None:
    with pytest.raises(UserError, match=f"^{told}$"):
        request(f"train {words}")
    assert request("train --rounds 5 --set rounds=5 rounds=5").rounds == 5
    assert request("train --preset per-step --rounds 5").overrides["rounds"] == "600", "what a person says comes after the preset"


@pytest.mark.parametrize("name", WORDS)
async def test_each_command_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for line in (f"{name} --help", f"help {name}"):
        printed, status, api = await said(monkeypatch, capsys, line + "\n")
        assert status == 0 and f"usage: {name}" in printed and WORDS[name].about.split(":")[0] in printed
        assert all(option in printed for option in option_names(WORDS[name]))
        assert not api.asked, "and is not carried out"


def test_a_preset_stands_for_its_fields_and_what_is_set_beside_it_comes_after() -> None:
    assert list(PRESETS) == list(job_commands.PRESETS)
    for preset, fields in PRESETS.items():
        overrides = request(f"train --preset {preset}").overrides
        follows = (
            {"rule": AggregationRule.MEAN, "inner": InnerOptimizerKind.MUON, "inner_rate": MUON_RATE} if preset == "local" else {}
        )
        assert complete_fields(parse_overrides(overrides)) == fields | follows
    changed = request("train --set audit=full --preset per-step --set bits=8 --rounds 7")
    assert (changed.overrides["audit"], changed.overrides["bits"], changed.overrides["outer"]) == ("full", "8", "adamw")
    assert changed.rounds == 7 and "rule" not in changed.overrides, "it follows from who re-executes"
    with pytest.raises(UserError, match="argument --preset: invalid choice: 'fast'"):
        request("train --preset fast")


def test_estimates_beside_a_preset_are_those_that_were_measured() -> None:
    def fields(words: str) -> dict[str, Any]:
        return complete_fields(parse_overrides(request(f"train {words}").overrides))

    assert fields("--preset per-step --set memory=estimates audit=off") == PRESETS["per-step"] | ESTIMATES
    assert fields("--preset per-step --set memory=estimates bits=2 beta1=0.5").items() >= {"bits": 2, "beta1": 0.5}.items()
    local = fields("--preset local --set memory=estimates audit=off")
    assert local == PRESETS["local"] | {name: ESTIMATES[name] for name in ("memory", "feedback_decay", "rule", "audit")}


async def test_every_command_is_in_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in (await said(monkeypatch, capsys, "help\n"))[0].splitlines()] == list(WORDS)


def test_the_options_of_a_command_are_known() -> None:
    of_file = ("--skip-bad", "--truncate")
    known = (*of_file, "--preset", "--rounds", "--data", "--column", "--name", "--from", "--vocabulary", "--accept-risk", "--set")
    assert option_names(WORDS["train"]) == known


async def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *, attached: bool = True
) -> tuple[str, int, FakeApi]:
    """Run the console with commands from a pipe, and return its output, its exit status and the peer."""
    api = FakeApi()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    status = await console.run_console(api, attached=attached)
    return capsys.readouterr().out, status, api


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("status", [ME, "lab", "(tolerates 1 faulty, quorum 3)", "1 min 1 s"]),
        (
            "stats",
            ["p50 41 ms, p99 – ms", "bad-signature 2", "vote 1.00 MB", "3 rewards, 0 lost", "1 challenges upheld, 0 refuted"],
        ),
        ("peers", ["anna (me)", "abcdaaaa", "[bold]ben", "1 approval ", "2.5 ms", "1 s"]),
        ("jobs", ["4 of 80", "accepted: anna 3", "rejected: [bold]ben (replay 2)", "suspended: [bold]ben until 24"]),
        ("audits", ["lapsed", "challenged", "mismatch", "2.5e-01", "suspensions", "refuted"]),
        ("audits 1", ["suspended until", "false in round", "mismatch"]),
        ("rounds", ["accept: anna; replay: [bold]ben (plain mean)", "anna [bold]ben", "2.500", "40 ms"]),
        ("train --rounds 3", ["1" * 64]),
        ("challenge abce", ["no false step of abce"]),
        ("invite", ["invitation-string"]),
        ("invitations", ["abcdaaaa", "used", "abcebbbb", "open", "2023-11-", "192.0.2.7:7700 [::1]:2"]),
        ("revoke abce", ["abce is revoked"]),
        ("rollback abce 8", ["1 of 3 needed votes to roll back abce to @8"]),
        ("retire ben --lower-tolerance", ["1 of 3 needed votes"]),
        ("export out", ["7 files", "peer audit"]),
        ("model out --job tiny@12 --format gguf", ["job 'tiny' at round 12, 6 files, 1.2 MB, without heads.value", "f" * 64]),
        ("prove notes/lines here -o x.proof", ["x.proof: the row after height 12", "peer verify", "690 prove it"]),
        ("prove notes/lines 0xff", ["notes-lines-ff.proof: no row with this key"]),
        ("sample 'Once upon' --tokens 5", ["Once upon goes on\n"]),
        (
            "sample secret",
            ["a text is shown after the check of the whole text\n", "withheld: the text contains a word on the job's blocklist"],
        ),
        ("help", ["approve", "quit"]),
    ],
)
async def test_each_command_shows_what_the_peer_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, words: list[str]
) -> None:
    printed, status, _ = await said(monkeypatch, capsys, line + "\n")
    assert status == 0
    for word in words:
        assert word in printed


async def test_an_invitation_stands_alone_on_standard_output_and_where_it_leads_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("invite --address a:1 b:2 --address c:3\n"))
    assert await console.run_console(FakeApi(), attached=True) == 0
    printed = capsys.readouterr()
    assert printed.out == "invitation-string\n"
    assert printed.err == f"the new peer dials {' '.join(fake_api.INVITATIONS[-1].addresses)}\n"


async def test_an_address_that_is_not_reached_keeps_no_other_from_being_dialed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, status, api = await said(monkeypatch, capsys, "connect a:1 b:2 c:1 b:2\n")
    assert status == 1
    assert printed.count("connected to b:2") == 1
    assert sorted(api.asked) == ["a:1", "b:2", "c:1"]
    (line,) = [line for line in printed.splitlines() if "cannot reach" in line]
    assert "a:1: no route" in line and "c:1: no route" in line


def test_a_word_without_options_names_none_as_known() -> None:
    with pytest.raises(UserError, match=r"unknown argument '--json'$"):
        parse("resign --json")


async def test_answers_and_complaints_speak_of_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Api(FakeApi):
        async def peers(self) -> tuple[PeerView, ...]:
            return tuple(replace(view, name=name) for view, name in zip(fake_api.PEERS, ("anna", "erin"), strict=True))

        async def approve_voter(self, peer: str) -> str:
            return f"{OTHER[:8]} has 1 of 3 approvals"

        async def retire_member(self, peer: str, lower_tolerance: bool) -> str:
            raise UserError(f"{OTHER[:8]} is already a voter")

        async def dial_address(self, address: str) -> str:
            return f"connected to {OTHER[:8]} at {address}"

    for line, answer in (
        ("approve erin", "erin has 1 of 3 approvals"),
        ("retire erin", "error: erin is already a voter"),
        ("connect h:1", "connected to erin at h:1"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
        await console.run_console(Api(), attached=True)
        assert capsys.readouterr().out == f"{answer}\n"


async def test_who_is_suspended_sees_until_when_and_why_in_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "suspended until round 23: replay mismatch found by abce"
    monkeypatch.setattr(fake_api, "STATUS", replace(fake_api.STATUS, suspended=why))
    assert why in (await said(monkeypatch, capsys, "status\n"))[0]
    monkeypatch.setattr(fake_api, "STATUS", replace(fake_api.STATUS, waiting="waiting for a quorum"))
    assert why not in (await said(monkeypatch, capsys, "status\n"))[0], "what keeps everything from going on comes first"


async def test_a_dispute_among_histories_is_shown_beside_whatever_the_peer_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for waiting in ("", "waiting for a quorum"):
        monkeypatch.setattr(fake_api, "STATUS", replace(fake_api.STATUS, fork="DISPUTED: block 12", waiting=waiting))
        assert f"{waiting or 'working'}; DISPUTED: block 12" in (await said(monkeypatch, capsys, "status\n"))[0]


@pytest.mark.parametrize("command", ["status", "stats"])
async def test_jobs_that_nobody_re_executes_are_named_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert "unaudited jobs" in (await said(monkeypatch, capsys, f"{command}\n"))[0]
    status = replace(fake_api.STATUS, unaudited=("[own]", "diary"))
    monkeypatch.setattr(fake_api, "STATUS", status)
    monkeypatch.setattr(fake_api, "STATS", replace(fake_api.STATS, status=status))
    assert "[own], diary: no peer re-executes" in (await said(monkeypatch, capsys, f"{command}\n"))[0]


async def test_without_any_sampled_audit_the_console_says_how_to_get_some(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fake_api, "AUDITS", AuditsView((), ()))
    assert "audit=sampled" in (await said(monkeypatch, capsys, "audits\n"))[0]


async def test_who_re_executes_in_a_job_that_is_fully_audited_is_told_beside_the_sampled_audits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "audit=full: `rounds` shows verdicts, ballots and vouches"
    assert where in (await said(monkeypatch, capsys, "audits\n"))[0]
    monkeypatch.setattr(fake_api, "AUDITS", AuditsView((), ()))
    assert where in (await said(monkeypatch, capsys, "audits\n"))[0]
    monkeypatch.setattr(fake_api, "JOBS", (replace(fake_api.JOBS[0], audit="sampled"),))
    assert where not in (await said(monkeypatch, capsys, "audits\n"))[0]


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "warm"])
def test_no_temperature_below_zero_or_beyond_numbers(value: str) -> None:
    with pytest.raises(UserError, match=re.escape(value)):
        parse(f"sample hello --temperature={value}")


def test_other_activations_than_those_of_eight_bits_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"--quantise: invalid choice: 'int4' \(choose from 'int8'\)"):
        parse("sample hello --quantise int4")


async def test_what_a_text_is_drawn_by_is_handed_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = r"sample Hi --job base@3 --tokens 9 --temperature 0.5 --top-k 4 --top-p .9 --stop '\n\n' --stop 'a\\b' --seed 7"
    _, _, api = await said(monkeypatch, capsys, line + "\nsample Hi --beams 3\nsample Hi --quantise int8\n")
    first, second, third = api.asked
    assert first == ("Hi", SamplingOptions(9, 0.5, 4, 0.9, ("\n\n", "a\\b"), 7), "base@3", None)
    assert second == ("Hi", SamplingOptions(200, 0.0, beams=3), "", None)
    assert third == ("Hi", SamplingOptions(activations=Activations.INT8), "", None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--beams 2 --temperature 0.5", "beams 2 cannot be combined with temperature 0.5: beam search draws no tokens"),
        ("--beams 2 --top-k 5", "beams 2 cannot be combined with top_k 5"),
        ("--beams 2 --stream", "--stream cannot be combined with --beams 2"),
        ("--stop a " * 9, "--stop is given 9 times: at most 8 are allowed"),
    ],
)
async def test_ways_to_draw_that_exclude_each_other_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, told: str
) -> None:
    printed, status, api = await said(monkeypatch, capsys, f"sample Hi {options}\n")
    assert status == 1 and told in printed and printed.count("\n") == 1 and not api.asked


async def test_a_chat_takes_its_turns_along_until_it_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, status, api = await said(
        monkeypatch, capsys, "\n".join((r"chat --template 'Q: {}\nA:'", "one", "", "secret", "two", "quit", "invite")) + "\n"
    )
    assert status == 0 and "invitation-string" in printed, "the chat ends, and the prompt goes on"
    how = SamplingOptions()
    first = "Q: one\nA:"
    assert api.asked[:3] == [
        (first, how, "", ()),
        ("Q: secret\nA:", how, "", (f"{first}{first} goes on",)),
        ("Q: two\nA:", how, "", (f"{first}{first} goes on",)),
    ]
    api.asked.clear()
    assert "error: --template 'Q' must contain {} once" in (await said(monkeypatch, capsys, "chat --template Q\n"))[0]


async def test_control_c_ends_a_text_and_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the prompt, Ctrl-C is the running command's signal. On the command line it has the same effect."""
    shown = list[str]()
    interrupts = console._Interrupts(shown.append, "stops the peer")  # type: ignore[arg-type]

    class AtPrompt(console._AtPrompt):
        async def read_line(self, prompt: str) -> str | None:
            return lines.pop(0) if lines else None

    async with trio.open_nursery() as nursery:
        await nursery.start(interrupts.follow, nursery.cancel_scope)
        for at_prompt in (AtPrompt(None, interrupts), None):  # type: ignore[arg-type]
            lines, api, options = ["wait", "go"], FakeApi(), parsed("chat")
            typed = io.StringIO("wait\ngo\n")
            typed.isatty = lambda: True  # type: ignore[method-assign]
            monkeypatch.setattr(sys, "stdin", typed)
            nursery.start_soon(_interrupt, api)
            with trio.fail_after(90):
                assert await console.execute_command(api, options, shown.append, at_prompt) == 0  # type: ignore[arg-type]
            assert api.cancelled.is_set() and [asked[0] for asked in api.asked] == ["wait", "go"]  # type: ignore[index]
            assert api.asked[1][3] == ("waitonce",), "what was said is a turn"  # type: ignore[index]
        nursery.cancel_scope.cancel()
    assert "".join(shown) == "once\ngo goes on\n" * 2


async def _interrupt(api: FakeApi) -> None:
    await api.waiting.wait()
    signal.raise_signal(signal.SIGINT)


def test_parts_of_a_text_stand_in_one_line_and_move_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    show = make_printer(out)
    for what in (TextChunk("a\x1b[2J"), TextChunk("b"), "an event", TextChunk("c\n"), "another"):
        show(what)
    assert out.getvalue() == "a\x1b[2Jb\nan event\nc\nanother\n"
    monkeypatch.setattr(out, "isatty", lambda: True)
    make_printer(out)(TextChunk("\x1b[2J\x07\x9b\tü\n"))
    make_printer(out)(Verbatim("\x1b[2J"))
    assert out.getvalue().endswith("another\n\ufffd[2J\ufffd\ufffd\tü\n\ufffd[2J\n")


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("--set outer=adamw --set local_steps=1 --set bits=1", True),
        ("--preset per-step --set bits=1", True),
        ("--preset per-step", False),
        ("--set outer=adamw --set local_steps=1", False),
        ("--set bits=1", False),
    ],
)
async def test_who_asks_for_one_bit_under_adamw_is_told_what_that_does_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, warned: bool
) -> None:
    printed, status, _ = await said(monkeypatch, capsys, f"train {words}\n")
    assert status == 0 and ("bits=1" in printed and "set bits=4" in printed) is warned


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--set audit=off byzantine_max=0", True),
        ("--data local --set byzantine_max=0", True),
        ("--set byzantine_max=0", False),
        ("--preset per-step --set audit=off", True),  # the peer refuses it, or its network tolerates no faulty voter
        ("--set audit=off byzantine_max=1", False),
    ],
)
async def test_who_says_that_nobody_lies_is_told_what_one_liar_could_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, told: bool
) -> None:
    printed, status, _ = await said(monkeypatch, capsys, f"train {words}\n")
    assert status == 0 and ("a single faulty one can change the model at will" in " ".join(printed.split())) is told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--preset per-step --set outer_rate=0.3", "outer_rate=0.3 has no effect with outer=adamw"),
        ("--set outer=sgd outer_momentum=0.9", "outer_momentum=0.9 has no effect with outer=sgd, only with nesterov or sign"),
        ("--set audit_rate=0.3", "audit_rate=0.3 has no effect with audit=full"),
        ("--data local --set audit=sampled audit_rate=0.3", "audit_rate=0.3 has no effect with audit=off"),
        ("--preset per-step --set audit=full", ""),
        ("--set outer=sgd outer_rate=0.9 audit=sampled audit_rate=0.3", ""),
        (
            "--set byzantine_max=2",
            "byzantine_max=2 has no effect with rule=mean, only with arc-nnm-trim or trimmed-mean or krum",
        ),
        ("--preset per-step --set byzantine_max=2", "byzantine_max=2 has no effect with rule=centered-clipping"),
        ("--set byzantine_max=2 audit=sampled", ""),
        ("--set byzantine_max=2 --data local", ""),
        ("--set byzantine_max=2 rule=arc-nnm-trim", ""),
    ],
)
async def test_who_sets_what_does_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    printed, status, _ = await said(monkeypatch, capsys, f"train {words}\n")
    assert status == 0 and told in printed and ("has no effect" in printed) is bool(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--set audit=sampled", True),
        ("--preset per-step", True),
        ("--preset per-step --set byzantine_max=0", True),
        ("", False),
        ("--preset per-step --set audit=full", False),
        ("--data local --set audit=sampled", False),  # audits are off there
    ],
)
async def test_who_starts_sampled_audits_is_told_that_they_are_not_for_slow_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, told: bool
) -> None:
    printed, status, _ = await said(monkeypatch, capsys, f"train {words}\n")
    printed = " ".join(printed.split())
    assert status == 0 and ("each trainer needs a steady uplink" in printed) is told
    assert ("a false update may be found too late" in printed) is ("byzantine_max=0" in words and told)


async def test_a_test_shows_its_own_phases_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, status, _ = await said(monkeypatch, capsys, "test\n")
    assert status == 0
    phases = [line.split("phase ")[1].strip() for line in printed.splitlines() if "phase " in line]
    assert phases == ["proposal", "ballot", "decided: abcd", "round", "applied"]
    assert "somebody else" not in printed
    assert f"model root {'f' * 16} unchanged" in printed


async def test_who_waits_for_a_decision_is_told_for_what_and_what_comes_of_it_is_shown_all_the_same(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Slow(FakeApi):
        seconds: float = 0.0

        async def cancel_job(self, job: str) -> str:
            await trio.sleep(self.seconds)
            return await super().cancel_job(job)

        async def resign_as_voter(self) -> str:
            await trio.sleep(self.seconds)
            return await super().resign_as_voter()

    waiting = "waiting for a quorum: 1 of 2 voters are connected, 2 are needed"
    monkeypatch.setattr(fake_api, "STATUS", replace(fake_api.STATUS, waiting=waiting))
    for seconds, told in ((console.DECISION_NOTICE_SECONDS / 2, []), (2 * console.DECISION_NOTICE_SECONDS, [waiting])):
        shown: list[object] = []
        await console.execute_command(Slow(seconds=seconds), parse(f"cancel {'1' * 64}"), shown.append)  # type: ignore[arg-type]
        assert shown[-1] == "1 of 3 needed votes"
        assert [text for text in shown if "may be decided even after" in str(text)] == shown[:-1]
        assert len(shown) == 1 + len(told) and all(words in str(text) for words, text in zip(told, shown, strict=False))
        with pytest.raises(UserError, match="the last voter cannot resign"):
            await console.execute_command(Slow(seconds=seconds), parse("resign"), shown.append)  # type: ignore[arg-type]


async def test_a_peer_that_answers_nothing_is_said_to_and_a_slow_answer_is_shown(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass
    class Frozen(FakeApi):
        seconds: float = 0.0
        slow: tuple[str, ...] = ("status", "features")

        async def status(self) -> StatusView:
            await trio.sleep(self.seconds if "status" in self.slow else 0)
            return await super().status()

        async def modules(self) -> tuple[ModuleView, ...]:
            await trio.sleep(self.seconds)
            return await super().modules()

    for seconds, slow, told in ((1.0, "status features", 0), (60.0, "status features", 1), (60.0, "features", 0)):
        shown: list[object] = []
        api = Frozen(seconds=seconds, slow=tuple(slow.split()))
        assert await console.execute_attached(api, parse("features"), shown.append) == 0  # type: ignore[arg-type]
        assert len(shown) == 1 and capsys.readouterr().err.count("has not answered for 10 s") == told


async def test_a_test_that_is_never_decided_says_so(autojump_clock: trio.testing.MockClock) -> None:
    class Silent(FakeApi):
        async def run_test_round(self) -> str:
            return "4" * 64

        async def events(self, after: int, wait_seconds: float) -> tuple[()]:
            await trio.sleep(wait_seconds)
            return ()

    with pytest.raises(UserError, match="is not decided after 180 s"):
        await console.execute_command(Silent(), parsed("test"), lambda what: None)


async def test_the_round_of_a_challenge_may_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, status, api = await said(monkeypatch, capsys, "challenge abce\nchallenge abce 1\n")
    assert (status, api.asked) == (0, [("abce", None), ("abce", 0)])


async def test_a_line_at_which_the_peer_itself_fails_does_not_stop_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: object) -> None:
        raise OverflowError("Integer value out of range")

    monkeypatch.setattr(FakeApi, "stats", fail)
    printed, status, _ = await said(monkeypatch, capsys, "stats\ninvite\n")
    assert status == 1
    assert "error: 'stats' failed because of a bug; the peer's log has the traceback" in printed
    assert "invitation-string" in printed


def test_a_text_named_by_nothing_is_not_the_built_in_one() -> None:
    with pytest.raises(UserError, match="--data is empty"):
        request("train --data ''")


@pytest.mark.parametrize(
    ("value", "words"), [("9" * 23, f"seed = {'9' * 23} is out of range"), ("1.5", "seed = '1.5' is not a whole number")]
)
def test_a_field_that_no_message_can_carry_is_refused_by_name(value: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_overrides({"seed": value})


async def test_one_failed_command_does_not_stop_the_next_but_shows_in_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, status, _ = await said(monkeypatch, capsys, "resign\nnonsense\n\ninvite\n")
    assert status == 1
    assert "error: the last voter cannot resign" in printed
    assert "error: unknown command 'nonsense'" in printed
    assert "invitation-string" in printed


@pytest.mark.parametrize(("attached", "stopped"), [(True, False), (False, True)])
async def test_quit_stops_the_peer_only_from_its_own_console(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], attached: bool, stopped: bool
) -> None:
    printed, _, api = await said(monkeypatch, capsys, "quit\ninvite\n", attached=attached)
    assert api.stopped is stopped
    assert "invitation-string" not in printed


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def go_on(dropped: str) -> bool:
    return False


async def test_a_typed_line_is_returned_and_remembered(keys: PipeInput, tmp_path: Path) -> None:
    prompt = LineEditor("> ", tmp_path / "history", {"stats": ()})
    keys.send_text("stats\rsecond\r")
    assert [await prompt.read_line(go_on), await prompt.read_line(go_on)] == ["stats", "second"]
    assert "+stats" in (tmp_path / "history").read_text()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", ["train", "stats"]),
        ("tr", ["train"]),
        ("train ", ["--rounds", "--data"]),
        ("train --rounds 5 --", ["--data"]),
        ("stats -", []),
        ("nothing -", []),
    ],
)
def test_commands_and_then_their_options_are_completed(typed: str, offered: list[str]) -> None:
    completer = CommandCompleter({"train": ("--rounds", "--data"), "stats": ()})
    assert [found.text for found in completer.get_completions(Document(typed), CompleteEvent())] == offered


async def test_control_d_on_an_empty_line_ends_the_prompt(keys: PipeInput) -> None:
    keys.send_text("\x04")
    assert await LineEditor("> ", None, {}).read_line(go_on) is None


async def test_control_c_drops_what_was_typed_and_ends_the_prompt_where_that_is_wanted(keys: PipeInput) -> None:
    dropped: list[str] = []

    def note(typed: str) -> bool:
        dropped.append(typed)
        return len(dropped) == 3

    keys.send_text("\x03sta\x03\x03")
    assert await LineEditor("> ", None, {}).read_line(note) is None
    assert dropped == ["", "sta", ""]


def test_only_a_second_control_c_in_a_row_with_nothing_typed_ends_the_prompt() -> None:
    shown: list[object] = []
    interrupts = console._Interrupts(shown.append, "stops the peer")
    assert [interrupts.dropped(typed) for typed in ("", "sta", "", "")] == [False, False, False, True]
    assert shown == ["`quit`, Ctrl-D or a second Ctrl-C stops the peer"] * 2


async def test_control_c_while_a_command_runs_ends_that_command_and_no_other() -> None:
    shown: list[str] = []
    interrupts = console._Interrupts(shown.append, "stops the peer")  # type: ignore[arg-type]
    api = FakeApi()

    async def wait() -> str:
        await console.execute_command(api, parsed("sample wait"), lambda what: None)
        return "sample"

    async def nothing() -> str:
        return "stats"

    async with trio.open_nursery() as nursery:
        await nursery.start(interrupts.follow, nursery.cancel_scope)
        nursery.start_soon(_interrupt, api)
        with trio.fail_after(90):
            assert await interrupts.run("sample wait", wait) == ""
        assert api.cancelled.is_set() and shown == ["interrupted: 'sample wait'; its request may still be decided"]
        assert await interrupts.run("stats", nothing) == "stats"
        nursery.cancel_scope.cancel()


@pytest.mark.real("processes")
async def test_a_cancelled_prompt_ends_and_gives_the_terminal_back(keys: PipeInput) -> None:
    prompt = LineEditor("> ", None, {})
    for _ in range(20):  # independent of the thread's progress
        with trio.CancelScope() as scope:
            scope.cancel()
            await prompt.read_line(go_on)
        assert not prompt._session.app.is_running
    async with trio.open_nursery() as nursery:
        nursery.start_soon(prompt.read_line, go_on)
        while not prompt._session.app.is_running:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert not prompt._session.app.is_running
    keys.send_text("on\r")
    assert await prompt.read_line(go_on) == "on"


async def test_features_names_what_runs_what_is_known_and_what_is_due(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("features\nupgrade curation 3 --at 900\n"))
    api = FakeApi()
    assert await console.run_console(api, attached=True) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "curation" in line)
    assert row.split()[:6] == ["curation", "–", "1", "–", "2", "from"] and "votes for version 3 from height 900" in row
    assert api.asked == [("curation", 3, 900)]


async def test_evaluate_takes_a_folder_or_writes_a_jobs_model_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = '{"bits_per_byte": 2.0, "nats_per_token": 1.5, "perplexity": 4.4817, "tokens": 128, "of_tokens": 200}\n'
    asked: list[tuple[str, ...]] = []

    async def run(module: str, *arguments: str) -> str:
        asked.append(arguments)
        return measured

    class Holding(FakeApi):
        async def export_model(self, path: str, job: str, format: str) -> ModelFilesView:
            self.asked.append((Path(path).name, job, format))
            return await super().export_model(path, job, format)

    monkeypatch.setattr("peer.commands.definitions.model_commands.run_module", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    api, shown = Holding(), list[Any]()

    async def evaluate(line: str) -> None:
        await console.execute_command(api, parsed(f"evaluate {line}"), shown.append)  # type: ignore[arg-type]

    await evaluate("mine a.txt --tokens 9")
    assert asked.pop() == (str(tmp_path / "mine"), str(tmp_path / "a.txt"), "9") and not api.asked
    assert shown == ["2.000 bits per byte, 1.500 nats per token, perplexity 4.482", "measured on 128 of 200 tokens"]
    await evaluate("story@9 a.txt --json")
    assert api.asked == [("model", "story@9", "transformers")] and shown[-1] == measured.strip()
    with pytest.raises(UserError, match=r"other is not a folder with a config\.json"):
        await evaluate("./other a.txt")
