"""`python -m scenarios`: list the scenarios. Each takes `--help`; scenarios/README.md has their requirements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def scenarios() -> Iterator[str]:
    """Return the command and the first paragraph of each module that is a scenario."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        about = (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n\n")[0]
        if about.startswith(f"`python -m scenarios.{file.stem}"):
            yield " ".join(about.replace("`", "").split())


if __name__ == "__main__":
    print(*scenarios(), sep="\n")
