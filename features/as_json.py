"""Values for programs: one JSON document, whose names are those of the fields. Bytes are in hex."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


def as_json(view: Any) -> str:
    return json.dumps(plain(view), indent=2, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # the loss of a model that diverged: JSON has no word for it
    return value
