"""The page of modules: each folder of the product with its files and the first sentence of their docstrings."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from tools.reference import table

ROOT = Path(__file__).parents[2]


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring as one line."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def product_folders() -> list[Path]:
    """Return the folders of the product that have modules, in alphabetical order."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    return sorted({file.parent for package in packages for file in (ROOT / package.rstrip("*")).rglob("*.py")})


def render() -> str:
    parts = [
        "# Modules\n",
        "Every module of the product with the first sentence of its docstring. `python -m tools.reference` writes this page.",
        "[Architecture](../architecture.md) shows how the folders fit together.\n",
    ]
    for folder in product_folders():
        parts.append(f"## {folder.relative_to(ROOT)}/\n")
        files = {file.name: ast.get_docstring(ast.parse(file.read_text())) or "" for file in sorted(folder.glob("*.py"))}
        if package := files.pop("__init__.py", ""):
            parts.append(package.split("\n\n")[0] + "\n")
        if files:
            parts += table(("module", "contents"), ((f"`{name}`", first_sentence(text)) for name, text in files.items()))
    return "\n".join(parts).rstrip() + "\n"
