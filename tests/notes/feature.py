"""A feature that exists only in tests. It consists of this folder and one line of `peer.features.FEATURES`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from features.feature import EngineKind, EventKind, Feature, Role, Setting

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules


def _modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    from tests.notes.module import NotesModule

    return (NotesModule(),)


def _long(value: object) -> str | None:
    return "is too long a note" if len(str(value)) > 20 else None


NOTES = Feature(
    name="notes",
    about="what members want to remember",
    modules=_modules,
    objectives="tests.notes.objective:OBJECTIVES",
    engines={"slate": EngineKind(backend="tests.notes.engine:KIND")},
    layers="tests.notes.layers:LAYERS",
    implementations={"slate": "tests.notes.engine:IMPLEMENTATIONS", "pytorch": "tests.notes.torch_layers:IMPLEMENTATIONS"},
    worker_requests="tests.notes.requests:REQUESTS",
    roles=(
        Role("scribe", "writes a note", registered_roles=("scribe",), services=("scribe",)),
        Role("clerk", "counts letters", registered_roles=("clerk",), needs_worker=True),
    ),
    services={"scribe": "tests.notes.part:Scribe"},
    settings=(Setting("first_note", "what the scribe writes first", "hello", _long),),
    event_lines="tests.notes.module:news",
    event_kinds=(EventKind("scribe", "The first note was decided."),),
    failures="tests.notes.module:find_full_books",
    commands="tests.notes.words",
    rpc="tests.notes.words:NoteCalls",
    rpc_handler="tests.notes.words:NoteAnswers",
    routes="tests.notes.http_routes:ROUTES",
    pages="tests.notes.http_routes:PAGES",
)
