"""The generated pages of docs/reference/ are current."""

import pytest

from tools.reference import render_pages, table

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("page", "text"), [pytest.param(page, text, id=page.stem) for page, text in render_pages()])
def test_generated_page_is_current(page, text):
    assert page.exists() and page.read_text() == text, "run `python -m tools.reference`"


def test_vertical_bars_in_cells_are_escaped():
    lines = table(("name", "values"), [("`how`", "a|b"), ("`x`", "–")])
    assert lines == ["| name | values |", "|---|---|", "| `how` | a\\|b |", "| `x` | – |", ""]
