"""A feature is a folder and a line: with the line it shows everywhere, without it nowhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import trio

from features.feature import Feature, Role, Setting
from features.lazy_import import import_object
from ledger.core.genesis import ROLES_MAX, Genesis, check_roles
from ledger.jobs import JobPhase, StartJob
from ledger.ledger_state import LedgerState, UnsupportedModuleVersion, core_modules
from ledger.row_proofs import RowProof, RowProofFile, encode_row_proof_file, make_row_proof, verify_row_proof_file
from ledger.tables import KeyProof, TableRoot
from peer import cli, features
from peer.daemon.daemon import running_daemon
from peer.export.row_proof_file import write_row_proof
from peer.features import FEATURES, founding_modules, known_modules, modules_of, rules_of
from peer.runtime.telemetry.event_kinds import event_kinds
from peer.runtime.transaction_submitter import TransactionSubmitter
from peer.settings.config import format_settings, load_settings, setting_descriptions
from peer.worker.supervisor import WorkerSupervisor
from protocol import codec
from protocol.api import EventView
from protocol.errors import FolkmootError, LocalProtocolError, RemoteProtocolError, UserError
from protocol.verdicts import Verdict, verdict_label
from storage.ledger_store import LedgerStore
from tests.fuzz.decoders import decoders
from tests.ledger.blocks import with_rows_of
from tests.ledger.snapshots import Chain, Fetch, Server
from tests.ledger.world import PEOPLE, PlainJobs, World
from tests.notes import http_routes as notes_routes
from tests.notes.feature import NOTES
from tests.notes.http_routes import NotesApi, make_handlers
from tests.notes.listing import listed
from tests.notes.module import Line, NotesState, Write
from tests.notes.objective import Sizes
from tests.notes.requests import CountParameters, ParametersCounted
from tests.peer.network import SECONDS_MAX
from tests.sim.keys import FastVerifier
from tests.test_docs import sections
from tests.waiting import patience
from tests.web.room import Room, said
from tools.reference.http_api import route_section
from training import engine_implementations, transformer, worker_protocol
from training.data.default_text import default_text
from training.engines.request_handlers import WorkerContext
from training.formats import gguf, huggingface_model
from training.job_spec import JobSpec
from training.model_store import JobModelStore
from training.objectives import registry
from training.replicated import error_feedback
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import initial_parameters, layout_of
from training.transformer import LayerPlace, ModelSpec, layer_names
from training.worker_protocol import WorkerFailed
from web.routes import ClientClass, HtmlPage, PageSet, Route, RouteReply, RouteSet, openapi_document
from web.site import Site, load_site

NOTES_PATH = "/api/notes/{member}"

LETTERS = JobSpec(name="letters", objective="letters", data=bytes(32), rounds=1, byzantine_max=0)
LANGUAGE = JobSpec(name="language", data=bytes(32))
SQUARES = JobSpec(
    name="squares",
    data=bytes(32),
    model=ModelSpec(context=16, width=16, layers=2, heads=2, kv_heads=1, hidden=24, feed_forward="squares"),
    rounds=1,
    local_steps=2,
    byzantine_max=0,
)
JOB = JobSpec(name="ones", objective="ones", rounds=1, byzantine_max=0, objective_settings=codec.encode(Sizes(5000)))


@pytest.fixture
def feature() -> Iterator[None]:
    with listed():
        features.register_features()
        yield


def objects_of(field: str) -> list[Any]:
    return [import_object(place) for feature in FEATURES if (place := getattr(feature, field))]


def seen() -> dict[str, bool]:
    """Return the places where the feature shows."""
    help_text = cli.build_parser().format_help()
    run_help = next(command for name, command in cli.build_parser().commands().items() if name == "run").format_help()
    run_help = " ".join(run_help.split())
    features.register_features()
    return {
        "modules": "notes" in {module.name for module in modules_of(PlainJobs())},
        "tables": "notes/lines" in rules_of(founded(), PlainJobs()).genesis_state().tables,
        "genesis": "notes" in {module.name for module in founding_modules()},
        "documents": any("notes/write" in title for title, _ in sections()),
        "fuzz targets": any(name.startswith("tests.notes") for name in decoders.__wrapped__()),
        "help": "what was noted" in help_text,
        "settings": "first_note" in setting_descriptions()
        and "first_note" in format_settings(load_settings({}, {"HOME": "/home/ann"})),
        "flags": "--first-note" in run_help,
        "roles": "scribe" in features.roles() and "scribe: writes a note" in run_help,
        "services": "scribe" in features.roles()["full"].services,
        "objectives": registry.find_objective("ones") is not None,
        "news": any(tells.__module__ == "tests.notes.module" for tells in objects_of("event_lines")),
        "event kinds": "scribe" in event_kinds(),
        "failures": any(find.__module__ == "tests.notes.module" for find in objects_of("failures")),
        "engines": "slate" in features.engines() and "pytorch, tinygrad, jax or slate" in run_help,
        "layers": "squares" in layer_names() and SQUARES.problem() is None,
        "worker requests": "count-parameters" in features.worker_requests(),
        **seen_on_the_web(load_site(FEATURES)),
    }


def seen_on_the_web(site: Site) -> dict[str, bool]:
    return {
        "routes": NOTES_PATH in [route.path for route in site.routes],
        "OpenAPI": openapi_document("1", site.routes, site.problem_statuses)["paths"].keys() >= {NOTES_PATH, "/notes"},
        "reference of routes": any(f"`POST {NOTES_PATH}`" in route_section(route) for route in site.routes),
        "client class": "reader" in {route.client.name for route in site.routes if route.client},
        "pages": "/notes" in [page.path for page in site.pages],
        "static files": "notes.js" in site.static_files,
    }


def founded() -> Genesis:
    """Found a network of all modules of this program."""
    return replace(World().genesis, modules=founding_modules())


def test_with_the_line_it_shows_everywhere(feature: None) -> None:
    assert [what for what, shows in seen().items() if not shows] == []


def test_without_the_line_it_shows_nowhere() -> None:
    assert [what for what, shows in seen().items() if shows] == []


def test_another_list_of_modules_is_another_network(feature: None) -> None:
    world = World()
    assert founded().chain_id != world.genesis.chain_id
    state = rules_of(genesis := founded(), PlainJobs()).genesis_state()
    assert state.module_state(NotesState).written == {} and state.state_root != world.state.state_root
    FEATURES.remove(NOTES)
    with pytest.raises(UnsupportedModuleVersion, match="this network runs notes 1; this program does not have this module"):
        rules_of(genesis, PlainJobs()).genesis_state()
    FEATURES.append(NOTES)


def test_a_setting_is_read_checked_and_refused_like_any_other(feature: None) -> None:
    home = {"HOME": "/home/ann"}
    assert load_settings({}, home).config.feature_settings["first_note"] == "hello"
    assert load_settings({}, {**home, "PEER_FIRST_NOTE": "milk"}).config.feature_settings["first_note"] == "milk"
    with pytest.raises(UserError, match=r"first_note = 'x+' \(command line\) is too long a note"):
        load_settings({"first_note": "x" * 21}, home)


def test_an_objective_s_own_record_is_part_of_what_is_checked(feature: None, tmp_path: Path) -> None:
    assert JOB.validated().decoded_settings == Sizes(5000)
    for settings, why in ((codec.encode(Sizes(9000)), "size 9000 is outside"), (b"\xc0", "Sizes")):
        with pytest.raises(RemoteProtocolError, match=why):
            JobSpec.decode(replace(JOB, objective_settings=settings).encode())
    assert JobModelStore(tmp_path).terms_of_spec(JOB.encode()).requires[0].name == "notes"
    assert JobModelStore(tmp_path).terms_of_spec(LETTERS.encode()).role == "clerk"
    with pytest.raises(RemoteProtocolError, match="has no settings"):
        JobSpec.decode(replace(JOB, objective="scratch").encode())


def test_a_job_of_an_unknown_objective_is_refused_by_name() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown objective 'ones': choose one of language, scratch"):
        JobSpec.decode(JOB.encode())


def test_all_that_features_name_is_there(feature: None) -> None:
    """Names are resolved at first use, so a wrong name would otherwise be found only by its first user."""
    for item in FEATURES:
        named_by_it = [
            item.objectives,
            item.commands,
            item.rpc,
            item.rpc_handler,
            item.failures,
            item.routes,
            item.pages,
            *item.services.values(),
            *(kind.backend for kind in item.engines.values()),
            *(place for kind in item.engines.values() for place in (kind.compiler, kind.compiler_remedy)),
            *(place for engine, place in item.implementations.items() if is_imported_here(engine)),
            item.layers,
            item.worker_requests,
        ]
        assert all(import_object(place) is not None for place in named_by_it if place)
    for name, kind in features.engines().items():
        assert import_object(kind.backend).name == name
    implementations = [
        (engine, import_object(place))
        for item in FEATURES
        for engine, place in item.implementations.items()
        if is_imported_here(engine)
    ]
    assert {engine for engine, _ in implementations} <= features.engines().keys()
    assert {name for _, found in implementations for name in found.layers} == set(layer_names()), "an engine computes each layer"
    for request in features.worker_requests().values():
        handler = import_object(request.handler)
        hints = get_type_hints(handler, {**vars(sys.modules[handler.__module__]), "WorkerContext": WorkerContext})
        assert [*hints.values()] == [WorkerContext, request.request, request.reply], request.handler
    computed = {name for _, found in implementations for name in found.objectives}
    for objective in map(registry.find_objective, registry.objective_names()):
        assert objective is not None
        assert (objective.name in computed) == objective.needs_worker, "a worker trains, or everybody knows"
        trained_by = [role for role in features.roles().values() if objective.role in role.registered_roles]
        assert trained_by and all(role.needs_worker for role in trained_by), "who registers for it can train it"
    for role in features.roles().values():
        check_roles(role.registered_roles)
        assert len(role.registered_roles) <= ROLES_MAX


def is_imported_here(engine: str) -> bool:
    """Return true if an engine's code may be imported: other libraries read their settings at the first import."""
    return features.engines()[engine].package in ("", "torch")


@pytest.mark.real("processes")
def test_a_peer_imports_no_library_of_an_engine_to_list_it() -> None:
    script = (
        "import sys\nfrom peer.api.handlers import local_peer_handler as handler\nfrom peer import features\n"
        "views = [handler._engine_view(name) for name in features.engines()]\n"
        "imported = [kind.package for kind in features.engines().values() if kind.package in sys.modules]\n"
        "print([view.engine for view in views], imported)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"{list(features.engines())} []"


@pytest.mark.parametrize(
    ("twin", "what"),
    [
        (Feature(name="twin", about="", roles=(Role("scribe", ""),)), "role 'scribe'"),
        (Feature(name="twin", about="", roles=(Role("full", ""),)), "the reserved name"),
        (Feature(name="twin", about="", roles=(Role("reader", "", services=("reader",)),)), "a service that no feature has"),
        (Feature(name="twin", about="", services={"scribe": ""}, roles=()), "service 'scribe'"),
        (Feature(name="twin", about="", settings=(Setting("listen", "", ""),)), "the peer's own"),
    ],
)
def test_no_feature_takes_the_name_of_another_one_s(feature: None, twin: Feature, what: str) -> None:
    FEATURES.append(twin)
    try:
        with pytest.raises(AssertionError, match=what):
            features.roles(), setting_descriptions()
    finally:
        FEATURES.remove(twin)


TWIN = "tests.test_features:"
TWIN_ROUTE = Route(
    handler=NotesApi.count_notes, method="GET", path="/api/twin/notes", about="", replies={200: RouteReply("notes")}
)
SAME_OPERATION = RouteSet(prefixes=("/api/twin",), routes=(TWIN_ROUTE,), make_handlers=make_handlers)
SAME_PREFIX = RouteSet(prefixes=("/api/notes",), routes=(), make_handlers=make_handlers)
INNER_PREFIX = RouteSet(prefixes=("/api/v1/events/noted",), routes=(), make_handlers=make_handlers)
SERVERS_PREFIX = RouteSet(prefixes=("/static/twin",), routes=(), make_handlers=make_handlers)
SAME_PATH = replace(
    SAME_OPERATION, routes=tuple(replace(TWIN_ROUTE, path=f"/api/twin/{{{name}}}", operation_id=name) for name in "ab")
)
SAME_CODE = replace(SAME_PREFIX, prefixes=("/api/twin",), problem_statuses={"gone": 410})
SAME_PAGE = PageSet(Path("elsewhere"), (HtmlPage("notes", "Other notes"),))
SAME_FILE = PageSet(Path(notes_routes.__file__).parent, ())
SAME_CLIENT, SAME_COOKIE = (
    replace(SAME_OPERATION, routes=(replace(TWIN_ROUTE, operation_id="twin", client=client),))
    for client in (ClientClass("reader", "other", "reader"), ClientClass("other", "folkmoot-reader", "reader"))
)


@pytest.mark.parametrize(
    ("twin", "what"),
    [
        ({"routes": f"{TWIN}SAME_PREFIX"}, "'notes' and 'twin' bring the paths /api/notes and /api/notes: one prefix each"),
        ({"routes": f"{TWIN}INNER_PREFIX"}, "'curation' and 'twin' bring the paths /api/v1 and /api/v1/events/noted"),
        ({"routes": f"{TWIN}SERVERS_PREFIX"}, "'web' and 'twin' bring the paths /static and /static/twin"),
        ({"routes": f"{TWIN}SAME_PATH"}, "a route is declared twice: 'GET /api/twin/{}'"),
        ({"routes": f"{TWIN}SAME_OPERATION"}, "an operation is declared twice: 'count_notes'"),
        ({"routes": f"{TWIN}SAME_CODE"}, "a problem code is declared twice: 'gone'"),
        ({"routes": f"{TWIN}SAME_CLIENT"}, "a client class is declared twice: 'reader'"),
        ({"routes": f"{TWIN}SAME_COOKIE"}, "a cookie is declared twice: 'folkmoot-reader'"),
        ({"pages": f"{TWIN}SAME_PAGE"}, "'notes' and 'twin' bring the paths /notes and /notes"),
        ({"pages": f"{TWIN}SAME_FILE"}, "a static file is declared twice: 'notes"),
    ],
)
def test_no_feature_takes_the_path_of_another_one_s(feature: None, twin: dict[str, str], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        load_site([*FEATURES, Feature(name="twin", about="", **twin)])


def test_a_path_outside_the_prefixes_of_its_feature_is_refused() -> None:
    with pytest.raises(AssertionError, match="/api/twin/notes is below none of"):
        RouteSet(prefixes=("/api/twi",), routes=(TWIN_ROUTE,), make_handlers=make_handlers)


@pytest.mark.real("sockets")
async def test_a_served_peer_has_its_route_and_its_page(feature: None, tmp_path: Path) -> None:
    async with Room(tmp_path).serving(first_note="milk") as (_, site):
        path = NOTES_PATH.format(member="00" * 32)
        reply = await said(site.ask, "POST", path, {"text": "bread"}, "milk")
        assert (reply.status, reply.body) == (200, {"reader": "reader of notes", "count": 0, "length": 5})
        assert (await said(site.ask, "POST", path, {"text": "bread"}, "wine")).code == "unauthorized"
        assert (await said(site.ask, "POST", path, {"text": 300 * "x"}, "milk")).code == "too-large", "the limit is its own"
        page = await said(site.get, "/notes")
        assert "&lt;what&gt; members want to remember" in page.text and 'href="/annotate"' in page.text
        assert 'href="/notes">Notes</a>' in (await said(site.get, "/annotate")).text
        assert (await said(site.get, "/static/notes.js")).status == (await said(site.get, "/static/notes.css")).status == 200
        assert NOTES_PATH in (await said(site.get, "/api/v1/openapi.json")).body["paths"]
        assert "notes_total 0" in (await said(site.get, "/metrics")).text


@pytest.mark.real("sockets")
async def test_without_the_line_no_peer_serves_its_route_or_its_page(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        for path in (NOTES_PATH.format(member="00" * 32), "/notes", "/static/notes.js"):
            assert (await said(site.get, path)).code == "not-found"
        assert (await said(site.ask, "POST", NOTES_PATH.format(member="00" * 32), {}, "hello")).code == "not-found"
        assert NOTES_PATH not in (await said(site.get, "/api/v1/openapi.json")).body["paths"]
        assert "notes" not in (await said(site.get, "/metrics")).text


# A table of the feature -----------------------------------------------------------------------------------------------

NOTE_DIGESTS = [bytes([number]) * 32 for number in range(40)]
SHOWN, MISSING = NOTE_DIGESTS[7], b"m" * 32


def noted() -> Chain:
    """Return a chain of all modules of this program with written notes, certified by an empty block."""
    core = {module.name for module in core_modules(PlainJobs())}
    chain = Chain(modules=tuple(module for module in modules_of(PlainJobs()) if module.name not in core))
    for digest in NOTE_DIGESTS:
        chain.decide(chain.tx(PEOPLE[0], "notes/write", Write(digest)))
    chain.grow(chain.state.height + 1)
    return chain


def line_of(state: LedgerState) -> Line | None:
    return state.module_state(NotesState).lines.get_record(SHOWN)


def in_root(chain: Chain, folder: Path) -> bool:
    """One row more or less changes the state root, and nothing else in the state."""
    state = chain.state
    notes = state.module_state(NotesState)
    without = state.with_modules(notes=replace(notes, lines=notes.lines.with_rows({SHOWN: None})))
    with_it = without.with_modules(
        notes=replace(notes, lines=without.module_state(NotesState).lines.with_rows({SHOWN: line_of(state)}))
    )
    return without.state_root != state.state_root == with_it.state_root


def in_snapshot(chain: Chain, folder: Path) -> bool:
    """A newcomer gets the rows from others."""
    fetched = Fetch(chain, {b"a" * 32: Server(chain.shelf())}).run().transfer.restored
    return (
        fetched is not None
        and fetched.state.state_root == chain.states[fetched.height].state_root
        and line_of(fetched.state) is not None
    )


def in_store(chain: Chain, folder: Path) -> bool:
    """Rows stored with the state are there after a restart."""
    path = folder / "ledger.sqlite"
    store = LedgerStore(path, chain.chain)
    store.append_records([chain.decided[height] for height in sorted(chain.decided)])
    # The chain's own tables stay unchanged: stored tables are read from the disk from then on.
    state = with_rows_of(chain.rules.decode_state(chain.rules.encode_state(chain.state)), chain.state)
    store.save_state(state.height, state.state_root, chain.rules.encode_state(state), tables=state.tables)
    store.close()
    again = LedgerStore(path, chain.chain)
    try:
        found = chain.rules.decode_state(again.encoded_state() or b"")
        again.rows.attach_tables(found.tables)
        return line_of(found) == line_of(chain.state) is not None
    finally:
        again.close()


def in_proof(chain: Chain, folder: Path) -> bool:
    """A file proves a row's content, or its absence, to a reader that knows the genesis."""
    shown, missing = (verify_row_proof_file(file_of(chain, key), known_modules(), FastVerifier()) for key in (SHOWN, MISSING))
    return (shown.table, shown.record, missing.value) == ("notes/lines", line_of(chain.state), None)


def in_no_forged_proof(chain: Chain, folder: Path) -> bool:
    """A row outside the table is not proven, even if all else is right."""
    content = codec.decode(RowProof, codec.decode_message(file_of(chain, SHOWN), (RowProofFile,)).content)
    try:
        verify_row_proof_file(
            encode_row_proof_file(replace(content, value=codec.encode(Line(bytes(32), 1)))), known_modules(), FastVerifier()
        )
    except RemoteProtocolError:
        return True
    return False


def file_of(chain: Chain, key: bytes) -> bytes:
    height = chain.state.height - 1
    return make_row_proof(chain.genesis, chain.states[height], chain.shelf().light_blocks_to(height), "notes/lines", key)


Demand = Callable[[Chain, Path], bool]
DEMANDS: tuple[Demand, ...] = (in_root, in_snapshot, in_store, in_proof, in_no_forged_proof)


@pytest.mark.parametrize("demand", DEMANDS)
def test_with_the_line_a_table_of_the_feature_shows_in(feature: None, tmp_path: Path, demand: Demand) -> None:
    assert demand(noted(), tmp_path)


def test_without_the_line_there_is_no_such_table(tmp_path: Path) -> None:
    state = rules_of(founded(), PlainJobs()).genesis_state()
    assert not any(name.startswith("notes/") for name in state.tables)
    with pytest.raises(UserError, match="this network has no table 'notes/lines': it has curation/projects, curation/"):
        write_row_proof(founded(), state, (), "notes/lines", SHOWN, tmp_path / "row.proof")
    with pytest.raises(UserError, match="this network has no table 'notes/lines': its modules have no tables"):
        write_row_proof(World().genesis, World().state, (), "notes/lines", SHOWN, tmp_path / "row.proof")
    assert not (tmp_path / "row.proof").exists()


# Demand -> fault planted on purpose: its place and its replacement.
FAULTS: dict[Demand, tuple[str, Any]] = {
    in_root: ("ledger.tables.table.Table.to_wire", lambda table: TableRoot(bytes(32), 0, 0)),
    in_snapshot: ("ledger.snapshots.snapshot_assembly.SnapshotAssembly._want_rows", lambda assembly, state: None),
    in_store: ("storage.sqlite_rows.SqliteBucketStore.write_changes", lambda rows, database, changes: None),
    in_proof: ("ledger.tables.table.Table.prove_key", lambda table, key: KeyProof((), None)),
    in_no_forged_proof: ("ledger.row_proofs.verify_key", lambda root, key, value, proof: True),
}


@pytest.mark.parametrize("demand", DEMANDS)
def test_each_demand_on_the_table_notices_a_planted_fault(
    feature: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demand: Demand
) -> None:
    chain = noted()
    monkeypatch.setattr(*FAULTS[demand])
    try:
        is_met = demand(chain, tmp_path)
    except (FolkmootError, AssertionError, RuntimeError):
        is_met = False
    assert not is_met


@pytest.mark.real("processes")
async def test_an_engine_of_a_feature_trains_in_a_worker_without_torch(feature: None, tmp_path: Path) -> None:
    text, model, buffer, payload = (str(tmp_path / name) for name in ("text", "model", "buffer", "payload"))
    Path(text).write_bytes(default_text()[:20_000])
    ReplicatedModel.initial(bytes(32), LETTERS).save(Path(model))
    worker = WorkerSupervisor(command=[sys.executable, "-m", "tests.notes.worker"], engine="slate")
    with patience():
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            assert worker.description is not None and worker.description.engine == "slate alone"
            with pytest.raises(WorkerFailed, match="'slate' cannot compute the objective 'language': it computes letters"):
                await worker.ask(
                    worker_protocol.OpenJobRequest(bytes(32), replace(LETTERS, objective="language").encode(), text, None)
                )
            opened = await worker.ask(worker_protocol.OpenJobRequest(bytes(32), LETTERS.encode(), text, None))
            assert opened.parameters == 256
            folder = tmp_path / "declared"
            propose = worker_protocol.ProposeRequest(bytes(32), 0, b"t" * 32, model, None, None, buffer, declared_out=str(folder))
            proposed = await worker.ask(propose)
            Path(propose.payload_out).rename(payload)
            update = error_feedback.read_buffer(Path(buffer), LETTERS).dequantize()
            assert update.argmin() == ord(" "), "of its share there is most to learn"
            declared = worker_protocol.DeclarationFiles(
                proposed.declaration, {bytes.fromhex(file.name): str(file) for file in folder.iterdir()}
            )
            audit = worker_protocol.AuditRequest(bytes(32), 0, b"t" * 32, model, payload, buffer, None, None, declared=declared)
            assert (await worker.ask(audit)).verdict is Verdict.ACCEPT
            theirs = await worker.ask(replace(audit, trainer=b"u" * 32))
            assert verdict_label(theirs.verdict, LETTERS.resolved_objective.reason_labels) == "miscounted", (
                "another trainer draws other sequences"
            )
            file = next(folder.iterdir())
            counts = np.fromfile(file, "<i8")
            np.roll(counts, 1).tofile(file)
            assert (await worker.ask(audit)).verdict is Verdict.OWN_0, "steps of invented counts are not even re-executed"
            counts.tofile(file)
            other = tmp_path / "other"
            doubled = error_feedback.make_buffer(
                update * np.float32(2), ReplicatedModel.open(Path(model)).header(b"t" * 32), LETTERS
            )
            assert doubled is not None
            other.write_bytes(doubled.encode())
            assert (await worker.ask(replace(audit, buffer=str(other)))).verdict is Verdict.REPLAY
            assert 0 < (await worker.ask(worker_protocol.EvaluateRequest(bytes(32), model))).figures["distance_from_all"] < 2
            nursery.cancel_scope.cancel()


# A layer and a request of the feature ---------------------------------------------------------------------------------


def test_a_model_with_a_layer_has_the_tensors_and_bounds_of_the_layer(
    feature: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(SQUARES.validated())
    names = [tensor.name for tensor in layout.tensors if tensor.name.startswith("layers.1.")]
    assert names[-4:] == [f"layers.1.{name}.weight" for name in ("squares_norm", "rise", "scale", "fall")]
    assert layout.size == SQUARES.model.parameters
    views = layout.tensor_views(initial_parameters(SQUARES))
    assert (views["layers.0.squares_norm.weight"] == 1).all() and (views["layers.0.scale.weight"] == 0.5).all()
    assert views["layers.0.fall.weight"].std() == pytest.approx(0.5 * 24**-0.5 * 4**-0.5, rel=0.2)
    with pytest.raises(UserError, match="hidden 65 is more than 64 squares"):
        replace(SQUARES, model=replace(SQUARES.model, hidden=65)).validated()
    with monkeypatch.context() as bounded:
        bounded.setattr("training.transformer.LAYER_TENSORS_MAX", 17)
        assert SQUARES.problem() == "18 tensors in 2 layers are more than 17"
    requires = JobModelStore(tmp_path).terms_of_spec(SQUARES.encode()).requires
    assert "notes" in {module.name for module in requires}, "voters that do not know the layer train no model with it"
    with pytest.raises(UserError, match=r"the Llama model of transformers has no tensor for 'layers\.0\.scale\.weight'"):
        huggingface_model.llama_tensor_names(SQUARES.model)
    with pytest.raises(UserError, match=r"does not support the tensor 'layers\.0\.scale\.weight'"):
        gguf.write_gguf(BytesIO(), {}, SQUARES.model, list(views.items()), is_half=False)


@pytest.mark.real("processes")
async def test_the_engine_trains_a_layer_of_the_feature_and_its_worker_serves_the_feature_s_request(
    feature: None, tmp_path: Path
) -> None:
    text, model, buffer = (str(tmp_path / name) for name in ("text", "model", "buffer"))
    Path(text).write_bytes(default_text()[:20_000])
    ReplicatedModel.initial(bytes(32), SQUARES).save(Path(model))
    opening = worker_protocol.OpenJobRequest(bytes(32), SQUARES.encode(), text, None)
    with patience():
        async with trio.open_nursery() as nursery:
            worker = WorkerSupervisor(command=[sys.executable, "-m", "tests.notes.worker"])
            await nursery.start(worker.run)
            await worker.ask(opening)
            assert await worker.ask(CountParameters(bytes(32))) == ParametersCounted(SQUARES.model.parameters)
            await worker.ask(worker_protocol.ProposeRequest(bytes(32), 0, b"t" * 32, model, None, None, buffer))
            assert (
                await worker.ask(
                    worker_protocol.AuditRequest(bytes(32), 0, b"t" * 32, model, f"{buffer}.payload", buffer, None, None)
                )
            ).verdict is Verdict.ACCEPT
            update = layout_of(SQUARES).tensor_views(error_feedback.read_buffer(Path(buffer), SQUARES).dequantize())
            assert update["layers.0.scale.weight"].any() and update["layers.1.rise.weight"].any()
            # A program with the line asks the worker of a program without it.
            other = WorkerSupervisor()
            await nursery.start(other.run)
            with pytest.raises(WorkerFailed, match=r"'count-parameters'.*: this worker has .*open-job, propose"):
                await other.ask(CountParameters(bytes(32)))
            with pytest.raises(WorkerFailed, match=r"unknown layer model\.feed_forward 'squares': choose one of swiglu, experts"):
                await other.ask(opening)
            nursery.cancel_scope.cancel()


async def test_without_the_line_an_unknown_layer_or_request_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"unknown layer model\.feed_forward 'squares': choose one of swiglu, experts"):
        SQUARES.validated()
    with pytest.raises(RemoteProtocolError, match=r"unknown layer model\.feed_forward 'squares': choose one of swiglu, experts"):
        JobSpec.decode(SQUARES.encode())
    with pytest.raises(LocalProtocolError, match="worker request 'count-parameters': this program has open-job, propose"):
        await WorkerSupervisor().ask(CountParameters(bytes(32)))


def test_a_layer_in_another_place_than_its_own_is_refused() -> None:
    for place, name in ((LayerPlace.LINEAR, "swiglu"), (LayerPlace.ATTENTION, "dense"), (LayerPlace.FEED_FORWARD, "attention")):
        with pytest.raises(UserError, match=rf"unknown layer model\.{place.value} '{name}'"):
            replace(LANGUAGE, model=replace(LANGUAGE.model, **{place.value: name})).validated()


def test_an_engine_without_an_implementation_of_a_layer_names_it(feature: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine_implementations._places, "pytorch", engine_implementations._places["pytorch"][:1])
    with pytest.raises(
        UserError,
        match="'pytorch' cannot compute the layer 'squares': it computes dense, ternary, attention, sliding-window, swiglu",
    ):
        engine_implementations.layer_implementation("pytorch", "squares")


@pytest.mark.real("processes")
async def test_a_running_peer_has_its_role_its_part_its_blob_its_objective_and_its_table(
    feature: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real daemon in this process: the part writes, the module names the blob, a job trains, a row is proven."""
    directory = tmp_path / "peer"
    said = ["--data-dir", str(directory)]
    assert await trio.to_thread.run_sync(cli.main, ["init", "--network", "lab", "--listen", "127.0.0.1:0", *said]) == 0
    config = load_settings({"data_directory": directory, "role": "scribe", "first_note": "milk"}, {"HOME": str(tmp_path)}).config
    with patience():
        async with running_daemon(config) as daemon:
            driver = daemon.driver
            told: tuple[EventView, ...] = ()
            while "the first note is decided" not in [event.text for event in told]:
                told += await daemon.api.events(len(told), SECONDS_MAX)
            notes, me = driver.state.module_state(NotesState), driver.signer.public
            assert notes.written == {me: 1} and notes.last is not None and driver.blobs.read_range(notes.last) == b"milk"
            assert driver.state.members.members[me].roles == ("scribe",)
            assert (directory / "services" / "scribe" / "written").exists()
            author = TransactionSubmitter(driver)
            await author.submit("job/start", StartJob(JOB.encode()))
            while any(job.phase is not JobPhase.FINISHED for job in driver.state.jobs.jobs.values()):
                await driver.block_applied.wait()
            (closed,) = await daemon.api.rounds(1)
            assert list(closed.verdicts.values()) == ["accept"] and closed.stepped
            await author.submit("notes/write", Write(notes.last))
            assert driver.state.module_state(NotesState).written == {me: 2}
            while driver.state.certified_roots[driver.state.height - 1] != driver.state.state_root:
                await driver.block_applied.wait()
            assert (
                await trio.to_thread.run_sync(
                    cli.main, ["prove", "notes/lines", f"0x{notes.last.hex()}", "-o", str(tmp_path / "row.proof"), *said]
                )
                == 0
            )
            proven_at = driver.state.height - 1
    said_there = capsys.readouterr().out
    assert "the row after height" in said_there and f"peer verify {tmp_path / 'row.proof'}" in said_there
    (tmp_path / "genesis").write_bytes((directory / "genesis").read_bytes())
    shutil.rmtree(directory)
    checking = ["verify", str(tmp_path / "row.proof"), "--genesis", str(tmp_path / "genesis")]
    assert await trio.to_thread.run_sync(cli.main, [*checking, "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["table"], verdict["rows"], verdict["record"]["author"]) == ("notes/lines", 1, me.hex())
    assert verdict["network"] == "lab" and verdict["height"] <= proven_at and (verdict["signatures"], verdict["voters"]) == (1, 1)
    honest = (tmp_path / "row.proof").read_bytes()
    for at in range(0, len(honest), 41):
        (tmp_path / "changed.proof").write_bytes(honest[:at] + bytes([honest[at] ^ 1]) + honest[at + 1 :])
        assert cli.main(["verify", str(tmp_path / "changed.proof")]) == 2
    refusals = capsys.readouterr().err.splitlines()
    assert refusals and all(re.match(r"peer: error: .*changed.proof is invalid: [a-z-]+: .", line) for line in refusals)
    FEATURES.remove(NOTES)
    assert await trio.to_thread.run_sync(cli.main, checking) == 2
    assert await trio.to_thread.run_sync(cli.main, [*checking, "--unknown-module"]) == 0
    FEATURES.append(NOTES)
    out, err = capsys.readouterr()
    assert "this program does not know notes 1 and cannot tell whether its field 2 is a table" in err
    assert "notes/2, 1 row (unverified: this program does not know the module" in out and "does not know its type" in out


def test_a_peer_that_lacks_the_package_counts_for_nothing_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "annotator" in features.roles()["full"].registered_roles
    monkeypatch.setattr("peer.features.find_spec", lambda name: None if name == "aiohttp" else object())
    assert features.roles()["full"].registered_roles == ("rlhf", "trainer")


def test_a_layer_of_a_feature_names_the_module_by_which_networks_know_it(feature: None) -> None:
    """Otherwise peers with the feature would start a job that the others refuse."""
    unknown = type("Unknown", (transformer.LAYERS[0].__class__,), {"name": "unknown", "module": ""})()
    with pytest.raises(AssertionError, match="no ledger module declares the layer 'unknown'"):
        transformer.register_layers([unknown])
