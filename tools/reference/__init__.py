"""Pages of docs/reference/ that are generated from the code. Each module of this package renders the page of its name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def render_pages() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each generated page. The module `exit_codes` renders `docs/reference/exit-codes.md`."""
    for module in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text: str = import_module(f"tools.reference.{module.stem}").render()
        yield REFERENCE / f"{module.stem.replace('_', '-')}.md", text
