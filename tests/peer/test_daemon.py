"""One daemon as a process: its imports, GPUs and addresses, its exit, and its messages when the disk fails."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import trio

from peer.daemon import host_addresses
from peer.daemon.host_addresses import own_addresses
from protocol.api import TextPieceView, TrainRequest
from protocol.errors import UserError
from protocol.limits import ADVERTISED_MAX
from protocol.sampling import TOKENS_MAX, Activations, SamplingOptions
from tests.peer.processes import Daemon, children, command, daemons, has_aiohttp, has_torch, peer, wait
from tests.waiting import in_time, patience, patience_seconds
from training.model_store import JobModelStore


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    directory = tmp_path / "peer"
    assert command("init", "--network", "lab", "--data-dir", str(directory))[0] == 0
    with daemons([directory]) as made:
        yield made[0]


RUN = ("run", "--role", "voter", "--listen", "127.0.0.1:0")


@pytest.mark.real("processes")
async def test_it_answers_stops_on_sigterm_and_comes_back_to_its_root(daemon: Daemon) -> None:
    await daemon.start(*RUN, "--retire-after-days", "9").answers()
    await daemon.client.run_test_round()
    before = await daemon.until(height=3)  # the job, its round, and the block that certifies the last root
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.log
    after = await daemon.start(*RUN).answers()
    assert (after.height, after.state_root) == (before.height, before.state_root)


@pytest.mark.real("processes")
async def test_with_its_default_settings_it_trains(daemon: Daemon) -> None:
    await daemon.start("run", "--listen", "127.0.0.1:0").answers()
    tiny = {"model.width": "16", "model.layers": "1", "model.hidden": "16", "local_steps": "1", "batch": "1"}
    await daemon.client.start_job(TrainRequest("tiny", "", 1, 0, tiny))
    with patience():
        while not (rounds := await daemon.client.rounds(1)):
            await daemon.client.events(-1, 0.1)
            await trio.sleep(0.05)
    assert list(rounds[0].verdicts.values()) == ["accept"]
    assert (await daemon.client.stats()).worker.startswith("torch")
    await assert_it_says_what_it_is_asked(daemon)
    with pytest.raises(UserError, match="matches no finished jobs"):
        await daemon.client.start_job(TrainRequest("more", "", 1, 0, {}, "huge"))
    with pytest.raises(UserError, match="starts from the model of job 'tiny'"):
        await daemon.client.start_job(TrainRequest("more", "", 1, 0, tiny | {"model.width": "32"}, "tiny"))
    await daemon.client.start_job(TrainRequest("more", "", 1, 0, {"local_steps": "1", "batch": "1"}, "tiny"))
    with patience():
        while len(await daemon.client.rounds(2)) < 2:
            await daemon.client.events(-1, 0.1)
            await trio.sleep(0.05)
    more = next(bytes.fromhex(view.job) for view in await daemon.client.jobs() if view.name == "more")
    export = str(daemon.directory.parent / "export")
    await daemon.client.export_run(export)
    assert daemon.terminate() == 0
    host = JobModelStore(daemon.directory / "models")
    assert (host.open_model(bytes.fromhex(rounds[0].job), 1).parameters == host.open_model(more, 0).parameters).all(), (
        "it starts where the other one ended"
    )
    assert command("audit", export)[0] == 0, "whoever replays the run comes to the same models"


async def assert_it_says_what_it_is_asked(daemon: Daemon) -> None:
    def asked(how: SamplingOptions, job: str = "", prompt: str = "The ") -> AsyncGenerator[TextPieceView, None]:
        return daemon.client.sample_text(prompt, how, job)

    async def text(pieces: AsyncGenerator[TextPieceView, None]) -> str:
        async with aclosing(pieces):
            return "".join([piece.text async for piece in pieces])

    long = SamplingOptions(max_tokens=TOKENS_MAX, temperature=1.0)
    async with aclosing(asked(long)) as pieces:
        begun = (await anext(pieces)).text  # the model may end its text soon
    short = await text(asked(replace(long, max_tokens=40)))
    assert begun.startswith(short) or short.startswith(begun), "a piece is as long as a slice of time allows"
    assert short == await text(asked(replace(long, max_tokens=40), "tiny@1"))
    assert short != await text(asked(replace(long, max_tokens=40, seed=1), "tiny@0"))
    stop = next(character for character in short[3:] if character.isascii())  # other characters may be bytes that are no text
    assert await text(asked(replace(long, max_tokens=40, stop=(stop,)))) == short.partition(stop)[0]
    greedy = SamplingOptions(max_tokens=9, temperature=0.0)
    assert await text(asked(greedy)) == await text(asked(replace(greedy, beams=1)))
    for pieces, told in (
        (asked(long, "tiny@7"), "this peer does not have the model of job 'tiny' at round 7: it has @0, @1"),
        (asked(long, "huge"), "'huge' matches no "),
        (asked(long, prompt=""), "the prompt is empty"),
        (asked(long, prompt="x" * 70_000), "the prompt has 70000 characters, at most 65536 are allowed"),
        (asked(replace(long, top_p=1.5)), "top_p 1.5 is not a probability"),
        (asked(replace(long, activations=Activations.INT8)), "job 'tiny': quantise int8 needs ternary matrices"),
        (asked(replace(long, max_tokens=0)), "tokens: 0 .* is outside 1..4096"),
    ):
        with pytest.raises(UserError, match=told):
            await text(pieces)


@pytest.mark.real("processes")
async def test_killed_at_any_time_it_comes_back_to_a_root_it_had(daemon: Daemon) -> None:
    await daemon.start(*RUN).answers()
    await daemon.client.run_test_round()
    daemon.kill()
    await daemon.start(*RUN).answers()
    await daemon.until(height=3)
    (job,) = await daemon.client.jobs()
    assert (job.state, list(job.accepted.values())) == ("finished", [1])


@pytest.mark.real("processes")
async def test_a_voter_loads_no_torch_not_even_after_a_round(daemon: Daemon) -> None:
    await daemon.start(*RUN).answers()
    await daemon.client.run_test_round()
    await daemon.until(height=3)
    assert not has_torch(daemon.pid) and not has_aiohttp(daemon.pid)
    assert children(daemon.pid) == []  # no helper process that could load them


async def said(daemon: Daemon, beginning: str) -> str:
    """Return the event of the part `serve` that begins with this text."""
    with patience():
        while True:
            texts = [event.text for event in await daemon.client.events(0, 0.1) if event.kind == "serve"]
            if texts:
                assert texts[0].startswith(beginning)
                return texts[0]


SERVE = ("run", "--role", "annotator", "--listen", "127.0.0.1:0")


@pytest.mark.real("processes")
async def test_a_peer_that_serves_annotators_loads_no_torch_and_alone_needs_aiohttp(daemon: Daemon) -> None:
    await daemon.start(*SERVE, "--web-listen", "127.0.0.1:0").answers()
    address = (await said(daemon, "web pages are served at http://127.0.0.1:")).rsplit(" ", 1)[1]

    def get() -> bytes:
        with in_time(), urlopen(f"{address}healthz", timeout=patience_seconds()) as reply:
            return bytes(reply.read())

    assert await trio.to_thread.run_sync(get) == b"ok\n"
    assert has_aiohttp(daemon.pid) and not has_torch(daemon.pid) and children(daemon.pid) == []
    assert daemon.terminate() == 0 and "Traceback" not in daemon.log


@pytest.mark.real("sockets")
async def test_where_the_port_for_annotators_is_taken_the_peer_says_so_and_goes_on(daemon: Daemon) -> None:
    """Two peers on one machine have the same default port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        await daemon.start(*SERVE, "--web-listen", f"127.0.0.1:{other.getsockname()[1]}").answers()
        told = await said(daemon, "web pages are not served at 127.0.0.1:")
    assert told.endswith(": address already in use; choose another address with --web-listen, or port 0")
    assert f" WARNING {told}" in daemon.log
    await daemon.client.run_test_round()
    assert daemon.terminate() == 0 and "Traceback" not in daemon.log


@pytest.mark.real("processes")
def test_what_every_peer_imports_has_one_event_loop_and_neither_torch_nor_aiohttp() -> None:
    """The service `serve` is imported before it runs, and so are the declarations of routes and pages."""
    script = (
        "import sys, peer.daemon.daemon, web.web_service, curation.service.curation_rpc_handler\n"
        "import curation.service.http_routes, curation.pages.annotation_pages\n"
        "print([name for name in ('torch', 'aiohttp', 'asyncio', 'jinja2', 'web.app') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.real("processes")
async def test_a_full_disk_ends_it_with_one_line_and_nothing_lost(daemon: Daemon) -> None:
    before = await daemon.start(*RUN).answers()
    size = (daemon.directory / "ledger.sqlite-wal").stat().st_size
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    assert daemon.process is not None
    with patience():
        try:
            await daemon.client.run_test_round()
        except Exception as error:  # any error that a client gets from a stopping peer
            assert "peer" in str(error)
    assert await trio.to_thread.run_sync(wait, daemon.process) == 2, daemon.log
    assert "Traceback" not in daemon.log
    last = daemon.log.strip().splitlines()[-1]
    assert last.startswith("peer: error: ")
    assert "ledger.sqlite" in last
    assert (await daemon.start(*RUN).answers()).state_root == before.state_root
    await daemon.client.run_test_round()
    await daemon.until(height=before.height + 3)


@pytest.mark.real("processes")
async def test_what_cannot_start_says_so_in_one_line(daemon: Daemon, tmp_path: Path) -> None:
    place = ("--data-dir", str(daemon.directory), "--no-console", "--role", "voter")
    address = (await daemon.start(*RUN).answers()).address
    other = tmp_path / "other"
    assert command("init", "--network", "lab", "--data-dir", str(other))[0] == 0
    for arguments, words in (
        (("run", *place), "runs on"),
        (("run", "--no-console", "--role", "voter", "--data-dir", str(other), "--listen", address), address),
        (("run", "--no-console", "--data-dir", str(tmp_path / "none")), "none"),
        (("run", "--no-console", "--role", "voter", "--data-dir", str(other), "--listen", "none"), "knows no address to dial"),
    ):
        status, _, error = peer(*arguments)
        assert status == 2, (arguments, error)
        assert error.startswith("peer: error: ")
        assert error.count("\n") == 1
        assert words in error
    daemon.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]


@pytest.mark.real("processes")
async def test_a_damaged_genesis_or_ledger_is_named(daemon: Daemon) -> None:
    place = ("--data-dir", str(daemon.directory), "--no-console", "--role", "voter", "--listen", "127.0.0.1:0")
    ledger, genesis = daemon.directory / "ledger.sqlite", daemon.directory / "genesis"
    whole = genesis.read_bytes()
    genesis.write_bytes(whole[:-1])
    status, _, error = peer("run", *place)
    assert (status, error.count("\n")) == (2, 1)
    assert f"{genesis} is damaged" in error
    genesis.write_bytes(whole)
    ledger.write_bytes(b"this is no database" * 100)
    status, _, error = peer("run", *place)
    assert (status, error.count("\n")) == (2, 1)
    assert str(ledger) in error


SECONDS_MAX = 300.0  # for work that takes fifteen seconds on an idle machine
ROUNDS = 12
JOB = ("--rounds", str(ROUNDS), "--set", "local_steps=5", "batch=4", "audit=off", "byzantine_max=0", "proposal_seconds=5")


@pytest.mark.real("processes")
@pytest.mark.large
async def test_the_round_after_a_process_was_killed_has_the_trainer_again(tmp_path: Path) -> None:
    assert command("init", "--data-dir", str(tmp_path / "ada"), "--network", "alone")[0] == 0
    with daemons([tmp_path / "ada"]) as (ada,), patience():
        ada.start("run", "--listen", "127.0.0.1:0", "--role", "full", "--device", "cpu", "--gpus", "2", "--parallel", "ddp")
        await ada.answers()
        status, _, told = command("train", "--data-dir", str(ada.directory), *JOB)
        assert status == 0, told
        while not (await ada.client.jobs())[0].round:  # noqa: ASYNC110
            await trio.sleep(0.05)
        (worker,) = children(ada.pid)
        (rank,) = children(worker)
        os.kill(rank, signal.SIGKILL)
        while (job := (await ada.client.jobs())[0]).state != "finished":  # noqa: ASYNC110
            await trio.sleep(0.05)
        rounds = await ada.client.rounds(ROUNDS)
        assert children(ada.pid) != [worker]
    absent = [of.round for of in rounds if "absent" in of.verdicts.values()]
    assert len(absent) <= 1, f"the trainer was away in rounds {absent}"
    assert sum(job.accepted.values()) == ROUNDS - len(absent)


def test_what_the_operator_advertises_is_said_as_it_is() -> None:
    assert own_addresses(("0.0.0.0:7700",), ("home.example.org:9000",)) == ("home.example.org:9000",)


@pytest.mark.real("sockets")
def test_who_listens_on_one_host_is_reached_there_also_on_loopback() -> None:
    assert own_addresses(("127.0.0.1:7700",), ()) == ("127.0.0.1:7700",)


def test_a_wildcard_becomes_all_hosts_of_this_machine_but_loopback_the_routed_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_addresses, "_routed", lambda: iter(["10.0.1.5"]))
    monkeypatch.setattr(host_addresses, "_of_interfaces", lambda: iter(["127.0.0.1", "192.168.7.2", "10.0.1.5"]))
    assert own_addresses(("0.0.0.0:7700",), ()) == ("10.0.1.5:7700", "192.168.7.2:7700")


def test_a_wildcard_on_a_machine_with_loopback_alone_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_addresses, "_routed", lambda: iter([]))
    monkeypatch.setattr(host_addresses, "_of_interfaces", lambda: iter(["127.0.0.1"]))
    assert own_addresses(("0.0.0.0:7700",), ()) == ()


@pytest.mark.real("sockets")
def test_no_more_addresses_are_said_than_an_invitation_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_addresses, "_of_interfaces", lambda: (f"10.0.0.{n}" for n in range(1, 40)))
    assert len(own_addresses(("0.0.0.0:7700",), ())) == ADVERTISED_MAX


@pytest.mark.real("sockets")
def test_the_interfaces_of_this_machine_are_read() -> None:
    assert "127.0.0.1" in list(host_addresses._of_interfaces())


@pytest.mark.real("sockets")
def test_the_address_outside_is_the_first_that_others_are_told() -> None:
    assert own_addresses(["10.0.0.1:7700"], [], "1.1.1.1:7701") == ("1.1.1.1:7701", "10.0.0.1:7700")
    assert own_addresses(["0.0.0.0:7700"], ["1.1.1.1:7701"], "1.1.1.1:7701") == ("1.1.1.1:7701",)
