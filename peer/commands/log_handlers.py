"""The lines of the log: for people, or one JSON object each for programs. Times carry their zone."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from datetime import datetime
from logging.handlers import WatchedFileHandler
from typing import Any

from features.json_output import to_json_value


class LogStreamHandler(logging.StreamHandler):
    """To standard error. A log that cannot be written must not stop a peer.

    It is told once, and again after something could be written.
    """

    _fails = _is_told = False

    @property
    def place(self) -> str:
        return "standard error"

    def emit(self, record: logging.LogRecord) -> None:
        self._fails = False
        try:
            super().emit(record)
        except OSError:  # a file that was moved away cannot be made anew
            self.handleError(record)
        self._is_told = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)  # a line that cannot be formatted is a bug
            return
        self._fails = True
        if not self._is_told:
            told = f"peer: the log cannot be written to {self.place}: {error.strerror}; the peer goes on without it"
            with contextlib.suppress(OSError):
                print(told, file=sys.stderr, flush=True)


class LogFileHandler(LogStreamHandler, WatchedFileHandler):
    """To a file, which may be moved away meanwhile. Raises `OSError` where it cannot be opened."""

    @property
    def place(self) -> str:
        return self.baseFilename

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what was told when it was written
            super().close()


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(sep="T", timespec="milliseconds")


class TextLines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)


class JsonLines(logging.Formatter):
    """`kind` and the further keys are those of the event (`peer.runtime.telemetry.event_log`); what is no event is of the kind
    `log`.
    """

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
        return json.dumps(
            to_json_value(line | {name: value for name, value in fields.items() if name not in line}), ensure_ascii=False
        )
