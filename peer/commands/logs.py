"""The lines of the log: for people, or one JSON object each for programs. Times carry their zone."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

from features.as_json import plain


def formatter(log_format: str) -> logging.Formatter:
    """For one of `peer.settings.config.LOG_FORMATS`."""
    return _JsonLines() if log_format == "json" else _TextLines("%(asctime)s %(levelname)s %(message)s")


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(sep="T", timespec="milliseconds")


class _TextLines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)


class _JsonLines(logging.Formatter):
    """`kind` and the further keys are those of the event (`peer.driver.eventlog`); what is no event is of the kind `log`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": _time(record),
            "level": record.levelname.lower(),
            "kind": getattr(record, "kind", "log"),
            "text": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        fields: dict[str, Any] = getattr(record, "fields", {})
        return json.dumps(plain(line | {name: value for name, value in fields.items() if name not in line}), ensure_ascii=False)
