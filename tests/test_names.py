"""Names of the product: what a file, a class and a public method may be called. CONTRIBUTING.md has the rules."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.packages import PACKAGES, ROOT

MODULES_OF_FOLDER_MAX = 20
# Files are named by nouns. These words end as participles do, and are nouns of the field.
NOUNS = {
    "framing": "of messages on a stream",
    "sampling": "of tokens, prompts or tasks",
}
# Verbs that say nothing alone. `hold` is of a lock.
VAGUE = {
    *("do", "find", "give", "go", "hear", "judge", "keep", "learn", "look", "make"),
    *("note", "of", "read", "say", "see", "settle", "show", "take", "tell"),
}


def product() -> list[Path]:
    """Modules of the product, by their paths in the repository."""
    return [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ClassDef))


def test_a_class_name_means_one_thing() -> None:
    found = defaultdict(list)
    for path in product():
        for node in classes(path):
            found[node.name].append(str(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_files_are_named_by_nouns() -> None:
    ends = {path: path.stem.rpartition("_")[2] for path in product()}
    assert {str(path) for path, end in ends.items() if re.fullmatch(r"\w+(ing|ed)", end) and end not in NOUNS} == set()
    assert NOUNS.keys() <= set(ends.values()), "a reason for a name that is not there"


def test_folders_are_small() -> None:
    counts = Counter(path.parent for path in product())
    assert {str(folder): count for folder, count in counts.items() if count > MODULES_OF_FOLDER_MAX} == {}


def test_methods_say_what_they_do() -> None:
    public = [
        f"{path}: {node.name}.{method.name}"
        for path in product()
        for node in classes(path)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_") and method.name in VAGUE
    ]
    assert public == []
