"""`tools.run_pages` executes the blocks of a page, and fails if the output differs from the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.run_pages import PageError, main, matches, read_blocks, run_page

pytestmark = pytest.mark.real("shells")


def write_page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_blocks_run_in_their_order_on_the_machine_of_their_title(tmp_path: Path) -> None:
    text = """
```toml title="peer.toml"
name = "anna"
```

```sh
cat peer.toml > copy
echo one
```

```text
o…e
```

<!-- value: WORD -->
```sh title="Ben"
test ! -e copy
echo prints a-longer-word
```

<!-- skip: it would fail -->
```sh
false
```

```sh
test WORD = a-longer-word && grep anna copy
```
"""
    assert run_page(write_page(tmp_path, text)) == 5


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```sh\necho seen; false\n```\n", r"page.md:1: exit status 1:\nseen"),
        ("```sh\necho one\n```\n\n```text\ntwo\n```\n", r"page.md:5: the page says\ntwo\nbut the command printed\none"),
        ("```sh\nfalse | true\n```\n", "exit status 1"),
        ("```sh\necho $UNSET_VARIABLE\n```\n", "exit status 1"),
    ],
)
def test_a_block_that_fails_is_named_with_what_it_printed(block: str, error: str, tmp_path: Path) -> None:
    page = write_page(tmp_path, block)
    with pytest.raises(PageError, match=error):
        run_page(page)
    assert main([str(page)]) == 1


def test_each_block_of_the_pages_has_a_language_and_its_title_where_it_needs_one() -> None:
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*/*.md"))
    checked = [page for page in pages if page.parent.name in ("tutorials", "how-to")]
    assert checked
    for page in checked:
        blocks = list(read_blocks(page.read_text()))
        assert 2 * len(blocks) == page.read_text().count("```"), f"{page} has a block without a language"
        assert all(block.title for block in blocks if block.language not in ("sh", "text")), page
        assert page.stat().st_size <= 12_000, page


def test_expected_lines_are_whole_and_in_order() -> None:
    assert matches("a …\nc d", "x\na  b\nc   d\n")
    assert not matches("c d\na …", "a b\nc d\n")
    assert not matches("a", "a b\n")
