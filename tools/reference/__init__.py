"""Pages of docs/reference/ that are generated from the code. Each module of this package renders the page of its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def render_pages() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each generated page. The module `exit_codes` renders `docs/reference/exit-codes.md`."""
    for module in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text: str = import_module(f"tools.reference.{module.stem}").render()
        yield REFERENCE / f"{module.stem.replace('_', '-')}.md", text


def table(heading: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty line behind them. Vertical bars in cells are escaped."""
    first, *others = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in (heading, *rows))
    return [first, "|" + "---|" * len(heading), *others, ""]
