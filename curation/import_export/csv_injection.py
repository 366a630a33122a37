"""Quotation of CSV cells that a spreadsheet would run as formulas."""

from __future__ import annotations

import re
from typing import Final

# Characters that begin a formula: OWASP's list for CSV injection, with the full-width forms that Japanese and Chinese
# spreadsheets accept.
FORMULA_STARTS: Final = frozenset("=+-@\t\r\n＝＋－＠")
_PLAIN_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def quote_cell(text: str) -> str:
    """Return the cell's text, with an apostrophe before it if a spreadsheet could run it as a formula.

    A number such as -1 needs none.
    """
    # A formula behind apostrophes is quoted, too, so that `unquote_cell` can remove exactly one apostrophe.
    is_formula = text.lstrip("'")[:1] in FORMULA_STARTS and not _PLAIN_NUMBER.fullmatch(text)
    return f"'{text}" if text and is_formula else text


def unquote_cell(cell: str) -> str:
    """Return the text of a quoted cell: the inverse of `quote_cell`."""
    return cell[1:] if cell.startswith("'") and quote_cell(cell[1:]) == cell else cell
