"""A check that a module's new state can be encoded and decoded again. Its cost grows with the changes, not with the state.

A step may return a state of the right type that contains a value without an encoding: a number outside its bounds, or a text in
place of bytes. All peers would find this only when they hash the state, which is too late to skip the step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Final, cast, get_args, get_origin, get_type_hints

from ledger.tables import Table, table_fields
from protocol.codec import decode, encode
from protocol.errors import RemoteProtocolError

SIZE_MAX = 512 << 20  # maximum bytes of an encoded part of a state; a store accepts the same size for a whole module
ABSENT: Final = object()  # marker of a missing old value: None is unsuitable, because a faulty step may return it


def check_encodable(of: Any, new: Any, old: Any) -> None:
    """Raise a deterministic error (`ledger.core.deterministic_failures`) if the state `new` cannot be encoded as the type `of`.

    The caller guarantees that `old` can. Parts that are the same objects in both states are skipped if both have this type.
    """
    if new is old:
        return
    hint, length = get_args(of)[:2] if get_origin(of) is Annotated else (of, None)
    if get_origin(hint) is dict and type(new) is type(old) is dict:
        if length is not None and not length.low <= len(new) <= length.high:
            raise RemoteProtocolError("oversized", f"{len(new)} entries, allowed {length.low}..{length.high}")
        key_kind, item_kind = get_args(hint)
        for key, item in new.items():
            before = old.get(key, ABSENT)
            if before is ABSENT:
                check_encodable(key_kind, key, ABSENT)
            if item is not before:
                check_encodable(item_kind, item, before)
    elif get_origin(hint) is Table and isinstance(new, Table) and new.kind == get_args(hint)[0]:
        new.check_changes(old if isinstance(old, Table) else None)
    elif dataclasses.is_dataclass(hint) and type(new) is hint and (type(old) is hint or table_fields(hint)):
        known = old if type(old) is hint else ABSENT
        for name, part in _hints(cast(Any, hint)).items():
            check_encodable(part, getattr(new, name), getattr(known, name, ABSENT))
    elif decode(of, encode(new), SIZE_MAX) != new:
        raise TypeError(f"a {type(new).__name__} that decodes to a different value")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
