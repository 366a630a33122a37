"""Each event of the product has a declared kind, with the levels and fields that the reference page shows."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from features.feature import EventKind
from peer import features
from peer.node.future_messages import ROUND_MESSAGES
from peer.runtime.telemetry.event_kinds import CORE_EVENT_KINDS, EVENT_FIELDS, event_kinds
from tests.packages import PACKAGES

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
CALLS = ("add", "add_detail", "tell", "_log_about_peer", "EventLine")  # they take the kind and the text of an event


def event_calls() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield kind, called function and names of fields of each event that the product adds with a literal kind."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or len(node.args) < 2 or not isinstance(node.args[0], ast.Constant):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in CALLS and isinstance(kind := node.args[0].value, str):
                yield kind, name, tuple(keyword.arg for keyword in node.keywords if keyword.arg)


def test_each_added_event_has_a_declared_kind() -> None:
    used = {kind for kind, _, _ in event_calls()}
    assert {"warning", "round", "applied", "network", "figures"} < used, "the search no longer finds the events"
    services = {name for name in features.services() if name in event_kinds()}
    assert used | {message.TAG for message in ROUND_MESSAGES} | services == event_kinds().keys()


def test_each_service_that_logs_has_a_declared_kind() -> None:
    places = {
        name: ROOT / Path(*place.split(":")[0].split(".")).with_suffix(".py") for name, place in features.services().items()
    }
    logs = {name for name, path in places.items() if "log_event(" in _class_source(path, features.services()[name])}
    assert logs == {"serve", "metrics", "sets"}
    assert logs <= event_kinds().keys()


def _class_source(path: Path, place: str) -> str:
    source = path.read_text()
    (found,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == place.rpartition(":")[2]
    )
    return ast.get_source_segment(source, found) or ""


def test_declared_levels_and_fields_are_those_of_the_code() -> None:
    levels, fields = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for kind, call, names in event_calls():
        levels[kind].add("debug" if call == "add_detail" else "warning" if kind in ("warning", "evidence") else "info")
        fields[kind].update(names)
    for declared in CORE_EVENT_KINDS:
        if declared.name in levels:
            assert levels[declared.name] <= set(declared.levels), declared.name
        assert fields[declared.name] <= set(declared.fields), declared.name
    assert {name for kind in event_kinds().values() for name in kind.fields} == EVENT_FIELDS.keys()


def test_a_kind_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.runtime.telemetry.event_kinds.CORE_EVENT_KINDS", (EventKind("serve", "A second one."),))
    with pytest.raises(AssertionError, match="declared twice"):
        event_kinds()
