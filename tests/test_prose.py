"""`tools.prose` counts sentences that are read twice; `tools.same_code` sees code, and neither comments nor docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import prose, same_code


@pytest.mark.parametrize(
    ("sentence", "counted"),
    [
        ("Who may not train in running jobs.", True),
        ("Of each proposal the digest is kept.", True),
        ("The reply says who has asked for it.", True),
        ("The peer asks as many as there are.", True),
        ("Return the trainers that are suspended.", False),
        ("Who may not train in running jobs?", False),
        ("What it costs.", False),  # a label: fewer words than a sentence has
    ],
)
def test_a_sentence_is_counted_in_docstrings_comments_and_pages(sentence: str, counted: bool, tmp_path: Path) -> None:
    texts = {"docstring.py": f'"""{sentence}"""\n', "comment.py": f"x = 1\n# {sentence}\n", "page.md": f"# Title\n\n{sentence}\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert any(found.habits for found in prose.read_sentences(tmp_path / name)) is counted, name
        assert prose.main([str(tmp_path / name)]) == counted


def test_code_blocks_and_strings_are_no_prose(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("```\nWho may not train in running jobs.\n```\n\n    Who may not train in running jobs.\n")
    module.write_text('x = "Who may not train in running jobs."\n')
    assert prose.read_sentences(page) == prose.read_sentences(module) == []


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ('def f():\n    """Another docstring."""\n    return 1\n', True),
        ("def f():\n    return 1  # a comment\n", True),
        ('def f():\n    """A docstring."""\n    return 2\n', False),
        ('def f():\n    """A docstring."""\n    "a string"\n    return 1\n', False),
    ],
)
def test_code_is_the_same_without_comments_and_docstrings(source: str, same: bool) -> None:
    original = 'def f():\n    """A docstring."""\n    return 1\n'
    assert (same_code.dump_code(source) == same_code.dump_code(original)) is same
