"""Cells of CSV files that a spreadsheet would run as formulas."""

from __future__ import annotations

import re
from typing import Final

# OWASP's list for CSV injection, with the full-width forms that spreadsheets in Japanese and Chinese accept.
FORMULA_STARTS: Final = frozenset("=+-@\t\r\n＝＋－＠")
_PLAIN_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def quote_cell(text: str) -> str:
    """The text, with an apostrophe before it where it could be a formula. A plain number such as -1 needs none."""
    # Apostrophes of the text itself count too, so that `unquote_cell` can take exactly one away.
    is_formula = text.lstrip("'")[:1] in FORMULA_STARTS and not _PLAIN_NUMBER.fullmatch(text)
    return f"'{text}" if text and is_formula else text


def unquote_cell(cell: str) -> str:
    """The inverse of `quote_cell`."""
    return cell[1:] if cell.startswith("'") and quote_cell(cell[1:]) == cell else cell
