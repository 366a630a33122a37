"""The C compiler that tinygrad needs for a processor: clang, which the variable CC may name. gcc does not work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Final

PROGRAM: Final = "clang"
REMEDY: Final = "install clang (Debian: `apt install clang`), or name one in the variable CC"
# Major versions that are looked for under their own names, since Debian's `clang-14` has no other name.
VERSIONS: Final = range(22, 11, -1)


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of clang, or None if there is none. A variable CC that names another compiler is ignored."""
    named = environment.get("CC", "")
    names = [named] if PROGRAM in os.path.basename(named) else [PROGRAM, *(f"{PROGRAM}-{version}" for version in VERSIONS)]
    return next((path for name in names if (path := shutil.which(name, path=environment.get("PATH")))), None)
