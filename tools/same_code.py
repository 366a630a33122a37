"""`python -m tools.same_code OLD [NEW]`: checks that two revisions differ in comments and docstrings alone.

It compares the syntax trees of all Python files without their docstrings, and prints the files whose code differs. NEW is the
working tree by default. The exit status is 1 if a file differs, was added or was removed.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.prose import DOCUMENTED


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def list_files(revision: str | None) -> list[str]:
    names = git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files")
    return sorted(name for name in names.splitlines() if name.endswith(".py") and (revision or Path(name).exists()))


def read_file(revision: str | None, name: str) -> str:
    return git("show", f"{revision}:{name}") if revision else Path(name).read_text(encoding="utf-8")


def dump_code(source: str) -> str:
    """Return the syntax tree as text, without docstrings and positions. A body with a docstring alone counts as `pass`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the code of two revisions without comments and docstrings.")
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", help="by default the working tree")
    options = parser.parse_args(arguments)
    old, new = (set(list_files(revision)) for revision in (options.old, options.new))
    different = sorted(old ^ new)
    for name in sorted(old & new):
        before, after = (read_file(revision, name) for revision in (options.old, options.new))
        if before != after and dump_code(before) != dump_code(after):
            different.append(name)
    for name in different:
        print(f"{name}: {'code differs' if name in old & new else 'added' if name in new else 'removed'}")
    print(f"{len(old | new)} files, {len(different)} with other code")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
