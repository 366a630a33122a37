"""The shipped packages, as pyproject.toml lists them for the import contracts."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: tuple[str, ...] = tuple(PROJECT["tool"]["importlinter"]["root_packages"])
