"""`python -m tools.prose`: sentences of docstrings, comments and Markdown that a reader has to read twice.

    python -m tools.prose                 checks PLAIN, as `make lint` does; exit status 1 above the limit
    python -m tools.prose --list PATH...  prints each counted sentence with its file and line

A sentence is counted if it begins with a relative clause, puts its "of …" first, or hides its noun in a clause. Sentences of more
than WORDS_MAX words are listed, and not counted. A low rate does not prove that a text is clear; a high rate proves the opposite.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
# Packages and pages in which the counted sentences must not exceed PER_HUNDRED_MAX.
PLAIN: Final = (
    *(
        "benchmarks",
        "clients",
        "consensus",
        "curation",
        "demo",
        "features",
        "ledger",
        "peer",
        "protocol",
        "rlhf",
        "rounds",
        "scenarios",
    ),
    *("storage", "tests", "tools", "training", "transport", "web", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("docs/tutorials", "docs/how-to", "docs/reference", "docs/explanation", "docs/protocol", "docs/model"),
    *("docs/index.md", "docs/experiments.md", "docs/architecture.md", "docs/benchmarks.md"),
)
# largest number of counted sentences in 100: the sources of trio, hypothesis and h11 have 0.5 to 1.5
PER_HUNDRED_MAX: Final = 1.5
WORDS_MIN, WORDS_MAX = 4, 32  # shortest and longest sentence in words: a shorter text is a label
DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HABITS: Final = {
    "begins with a clause": r"^(Who|What|Whoever|Whatever|Whose|Whom|Whether|Of (which|those|what|whom))\b(?!.*\?$)",
    "begins with its object": r"^(Of|(For|To|With|From) whom|In whose)\s",
    "a clause in place of a noun": (
        r"\b(says? (who|what|whether)|(of|for|to) whoever|of whom|whoever|(than|by|with|from|of|about|as) what"
        r"|what is (?!this|that)"
        r"|what (it|they|a \w+|others?|people|was|were|comes?|came|has|had|stands?|follows?|grows?)\b)"
    ),
    "vague": r"\b(so many|so much|such a one|what there is|the ones that|as many as|as it is|so long as|in the place of)\b",
}


class Sentence(NamedTuple):
    line: int
    text: str

    @property
    def habits(self) -> list[str]:
        return [habit for habit, pattern in HABITS.items() if re.search(pattern, self.text)]

    @property
    def is_long(self) -> bool:
        return len(self.text.split()) > WORDS_MAX


def split_sentences(line: int, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a text.

    A code span counts as one word, a link as its text. List items and cells of tables are split.
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", text))
    for block in re.split(r"\n\s*\n|\n\s*[-*|#]\s*|\|", text):
        for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])", " ".join(block.split())):
            if len((part := part.strip(" *_>#")).split()) >= WORDS_MIN:
                yield Sentence(line, part)


def python_sentences(source: str) -> Iterator[Sentence]:
    """Yield the sentences of a module: docstrings, then comments. Comments on adjacent lines are one text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield from split_sentences(node.body[0].lineno, text)
    first, comments = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            first = first if comments else token.start[0]
            comments.append(token.string.lstrip("#: "))
        elif comments and token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield from split_sentences(first, " ".join(comments))
            comments = []


def markdown_sentences(source: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown page, without its code blocks."""
    fenced, first, paragraph = False, 0, list[str]()
    for number, line in enumerate([*source.split("\n"), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            if line.strip():
                first = first if paragraph else number
                paragraph.append(line)
            else:
                yield from split_sentences(first, "\n".join(paragraph))
                paragraph = []


def read_sentences(path: Path) -> list[Sentence]:
    source = path.read_text(encoding="utf-8")
    return list((python_sentences if path.suffix == ".py" else markdown_sentences)(source))


def find_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for kind in ("*.py", "*.md") for file in path.rglob(kind))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Find sentences that a reader has to read twice.")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; by default those of `make lint`")
    parser.add_argument("--list", action="store_true", help="print each sentence")
    options = parser.parse_args(arguments)
    status = 0
    for path in options.paths or [ROOT / name for name in PLAIN]:
        found = [(file, sentence) for file in find_files(path) for sentence in read_sentences(file)]
        counted = sum(bool(sentence.habits) for _, sentence in found)
        rate = 100 * counted / max(len(found), 1)
        print(f"{path}: {counted} of {len(found)} sentences, {rate:.1f} in 100 (at most {PER_HUNDRED_MAX})")
        status |= rate > PER_HUNDRED_MAX
        for file, sentence in found if options.list or rate > PER_HUNDRED_MAX else ():
            if reasons := sentence.habits + ["long"] * (sentence.is_long and options.list):
                print(f"  {file}:{sentence.line}: {', '.join(reasons)}: {sentence.text[:200]}")
    return status


if __name__ == "__main__":
    sys.exit(main())
