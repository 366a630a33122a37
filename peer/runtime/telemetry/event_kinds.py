"""The kinds of events in the log of a peer, with their meanings, levels and fields. docs/reference/events.md shows them."""

from __future__ import annotations

from typing import Final

from features.feature import EventKind
from peer import features

ROUND_FIELDS: Final = ("peer", "job", "round")

CORE_EVENT_KINDS: Final = (
    EventKind("round", "A round closed: accepted, rejected and absent trainers.", fields=("job", "round", "root", "height")),
    EventKind("job", "A job began, paused, continued, ended, lost rounds or got other voters.", fields=("job", "round")),
    EventKind(
        "member",
        "A member was admitted, named, approved, retired or expelled, got or lost its vote, or changed its key.",
        fields=("peer",),
    ),
    EventKind("network", "A voter voted for an upgrade or a limit, or a quorum decided one."),
    EventKind("peer", "A link opened or closed, a dial failed, or a peer became silent.", fields=("peer",)),
    EventKind("snapshot", "This peer requested a snapshot, or restored its state from one.", fields=("height", "seconds")),
    EventKind(
        "audit",
        "An audit ended, was challenged or settled, or this peer volunteered for one. `debug`: the audit passed.",
        ("info", "debug"),
        ROUND_FIELDS,
    ),
    EventKind("evidence", "A member signed two statements that exclude each other.", ("warning",), ("peer",)),
    EventKind(
        "warning",
        "A condition that the operator should know. `peer alerts` shows the lasting ones.",
        ("warning", "debug"),
        ("peer", "job", "round", "author", "reason"),
    ),
    EventKind("proposal", "A trainer proposed an update.", ("debug",), ROUND_FIELDS),
    EventKind("vouch", "A voter re-executed proposals of a round and signed the results.", ("debug",), ROUND_FIELDS),
    EventKind("ballot", "A voter signed its verdicts on the proposals of a round.", ("debug",), ROUND_FIELDS),
    EventKind("cut-off", "A voter signed that it waits for no further proposals of a round.", ("debug",), ROUND_FIELDS),
    EventKind("measured", "This peer measured a value of a round.", ("debug",), ("job", "round", "name", "value")),
    EventKind("decided", "A quorum decided a block.", ("debug",), ("height", "signers", "seen")),
    EventKind("applied", "This peer applied a decided block.", ("debug",), ("height", "root")),
)

# Field of an event in JSON lines -> its meaning.
EVENT_FIELDS: Final = {
    "peer": "Whole id of the peer that the event is about.",
    "job": "Id of the job, hexadecimal.",
    "round": "Number of the round; the first is 0. `text` counts from 1.",
    "root": "Root of the job's model (`round`) or of the state (`applied`), hexadecimal.",
    "height": "Height of the block.",
    "signers": "Short ids of the voters that signed the decision.",
    "seen": "`true` if this peer had the block before its decision.",
    "seconds": "Duration of the restore.",
    "name": "Name of the measurement.",
    "value": "The measurement, as a number.",
    "author": "Id of the member that started the job.",
    "reason": "Reason of a [refusal](#refusals).",
}


def event_kinds() -> dict[str, EventKind]:
    """Return all kinds of events by name. Kinds of this package come first, then those of features."""
    of_features = (kind for feature in features.FEATURES for kind in feature.event_kinds)
    found = dict[str, EventKind]()
    for kind in (*CORE_EVENT_KINDS, *of_features):
        assert kind.name not in found, f"the kind of event {kind.name!r} is declared twice"
        found[kind.name] = kind
    return found
