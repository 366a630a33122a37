"""Values for programs: one JSON document, whose names are those of the fields. Bytes are in hex."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from protocol.errors import FolkmootError


def to_json(view: Any) -> str:
    return json.dumps(to_json_value(view), indent=2, ensure_ascii=False, allow_nan=False)


def print_json_result(answer: Callable[[], Any]) -> int:
    """What a process prints that answers one question, and its exit status: the answer, or on stderr why there is none."""
    try:
        print(to_json(answer()))
    except FolkmootError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def to_json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: to_json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # the loss of a model that diverged: JSON has no word for it
    return value
