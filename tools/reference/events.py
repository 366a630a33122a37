"""The page of events, alerts and refusals, from their declarations in the code."""

from __future__ import annotations

from collections.abc import Iterable

from peer.api.alerts import ALERT_KINDS, HOLD_MS
from peer.runtime.telemetry.event_kinds import EVENT_FIELDS, event_kinds
from protocol.refusal_reasons import REASON_MEANINGS
from tools.reference import table

LOG = """\
# Events, alerts and refusals

`python -m tools.reference` writes this page from the declarations in the code.

## The log

`peer log` shows the newest events of a running peer, and the log has the same lines. The log goes to standard error or to the
file of `log_file`. While the console uses the terminal, it goes to `peer.log` in the data directory. The setting `log_level`
selects lines by level. The level `debug` adds every block, proposal and ballot. Times have a zone:

```text
2026-11-24T10:15:04.120+01:00 INFO round 3: accepted 2yhk6q3a, rejected q7xp5e4d (replay)
```

With `log_format = "json"`, each line is one object:

```text
{"at": "2026-11-24T10:15:04.120+01:00", "level": "info", "kind": "round", "text": "round 3: accepted …", "round": 2, …}
```

| key | value |
|---|---|
| `at` | Time with its zone. |
| `level` | `debug`, `info`, `warning`, `error` or `critical`. |
| `kind` | A kind of the next table, or `log` for a line without an event. |
| `text` | The line for people, with the names of members. |
| `traceback` | Traceback of a bug or a crash; otherwise missing. |
| others | The fields of the kind. Some events omit fields that do not apply. |
"""

ALERTS = """\
`peer alerts` and the page `/live` show each cause once, for as long as it lasts, the most severe first. `peer doctor` prints the
remedy. `/live` omits the alerts that only the operator needs: `disk-low`, `no-room` and `worker-gone`. With `--json`, each alert
is an object with `cause`, `about` (a peer id, or empty), `severity`, `text` and `since_ms`.
"""

REFUSALS = """\
`peer stats` counts by reason the connections, messages and data of other peers that this peer does not accept. Some refusals
happen in every network. Many of one reason mean a fault or an attack.
"""


def code(names: Iterable[str]) -> str:
    """Return the names as code, with commas between them."""
    return ", ".join(f"`{name}`" for name in names)


def capitalize(text: str) -> str:
    """Return a remedy as a sentence. Unlike `str.capitalize`, this keeps later capitals."""
    return f"{text[0].upper()}{text[1:]}."


def render() -> str:
    """Return the page."""
    kinds = ((f"`{kind.name}`", kind.meaning, code(kind.levels), code(kind.fields)) for kind in event_kinds().values())
    alerts = (
        (f"`{cause}`", kind.meaning, code(kind.severities), f"{HOLD_MS.get(cause, 0) // 1_000} s", capitalize(kind.remedy))
        for cause, kind in ALERT_KINDS.items()
    )
    parts = [
        LOG,
        "## Events\n",
        *table(("kind", "event", "level", "fields"), kinds),
        *table(("field", "value"), ((f"`{name}`", meaning) for name, meaning in EVENT_FIELDS.items())),
        "## Alerts\n",
        ALERTS,
        *table(("cause", "meaning", "severity", "shown after", "remedy"), alerts),
        "## Refusals\n",
        REFUSALS,
        *table(("reason", "meaning"), ((f"`{reason}`", meaning) for reason, meaning in REASON_MEANINGS.items())),
    ]
    return "\n".join(parts)
