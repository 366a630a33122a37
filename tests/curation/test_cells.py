"""Cells that a spreadsheet would run as formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.import_export.csv_injection import FORMULA_STARTS, quote_cell, unquote_cell


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "＝1", "--1", "-", "+49 170", "-1.", "'=1"]
)
def test_a_formula_gets_an_apostrophe(text: str) -> None:
    assert quote_cell(text) == f"'{text}"


@pytest.mark.parametrize("text", ["", "-1", "+1", "-0.5", "1", "a=b", "'quoted'", "it's", " =1", "'"])
def test_other_texts_and_plain_numbers_stay(text: str) -> None:
    assert quote_cell(text) == text


@given(st.one_of(st.text(), st.text("'=+-@1.\t\ra", max_size=6)))
def test_the_quoting_can_be_undone_exactly(text: str) -> None:
    quoted = quote_cell(text)
    assert unquote_cell(quoted) == text
    assert quoted[:1] not in FORMULA_STARTS or quoted.lstrip("+-").replace(".", "").isdecimal()
