"""Values as JSON, for programs. Fields of an object become keys, and bytes become hex digits."""

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
    """Print the result of `answer` as JSON, or its `FolkmootError` on stderr, and return the exit status of the process."""
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
        return None  # JSON has no NaN or infinity, such as the loss of a diverged model.
    return value
