"""The installed packages that Folkmoot requires, directly or through other packages."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LIGHT_EXTRAS = ("web", "upnp", "mdns")  # extras of `pyproject.toml` for a peer that does not train
PRODUCT_EXTRAS = (*LIGHT_EXTRAS, "data", "train")


def required_distributions(extras: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that `pyproject.toml` requires with these extras, by canonical name.

    Raises `PackageNotFoundError` if a package that `pyproject.toml` names is not installed. Missing requirements of other
    packages are left out.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = (text for extra in extras for text in project["optional-dependencies"][extra])
    waiting = [Requirement(text) for text in (*project["dependencies"], *of_extras)]
    direct = {canonicalize_name(requirement.name) for requirement in waiting}
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in direct:
                raise
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += requirements_of(found[name], extra)
    return found


def requirements_of(distribution: metadata.Distribution, extra: str = "") -> Iterator[Requirement]:
    """Yield the requirements of a distribution on this machine, including those of the extra `extra`."""
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def public_version(distribution: metadata.Distribution) -> str:
    """Return a distribution's version without its local part, such as `+cpu`."""
    return Version(distribution.version).public
