"""`python -m tools.lock`: writes the lists of packages with hashes from `constraints.txt`.

| list | packages |
|---|---|
| `requirements-hashed.txt` | all of `constraints.txt` |
| `requirements-light.txt` | those of a peer that does not train |
| `requirements-train.txt` | those of a peer that trains |

Each entry has a package's version in `constraints.txt` and the hashes of its files in the package index. The lists leave out
torch and the packages of its CUDA build, because each build of the right version of torch is allowed. Run this program with
Python 3.11: later versions require fewer packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename

from tools.installed import LIGHT_EXTRAS, ROOT, required_distributions

CONSTRAINTS = ROOT / "constraints.txt"
HASHED, LIGHT, TRAIN = (ROOT / f"requirements-{name}.txt" for name in ("hashed", "light", "train"))
TRAIN_EXTRAS = (*LIGHT_EXTRAS, "train")
OF_TORCH = re.compile(r"torch|triton|(cuda|nvidia)-.*")
PYTHON = (3, 11)  # the version that writes the lists
PYTHONS = {"py3", "cp311", "cp312", "cp313"}
HEADER = "# `python -m tools.lock` writes this file. Install it with `pip install --require-hashes -r {name}`.\n"
# pip has no command that prints the hashes of all files of a release, so this program runs pip's own functions.
LINKS = """
import sys
from pip._internal.commands import create_command
from pip._internal.index.collector import parse_links
from pip._internal.models.link import Link

command = create_command("download")
options, _ = command.parse_args([])
with command.main_context():
    finder = command._build_package_finder(options, command.get_default_session(options))
    for name in sys.argv[1:]:
        for location in finder.search_scope.get_index_urls_locations(name):
            content = None if location.startswith("file:") else finder._link_collector.fetch_response(Link(location))
            for link in parse_links(content) if content else ():
                if link.hash_name == "sha256":
                    print(name, link.filename, link.hash)
"""


def read_constraints() -> dict[str, str]:
    """Return the packages' versions in `constraints.txt`, by name."""
    lines = (line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    return dict(line.split("==") for line in lines)


def is_of_use(file: str, version: str) -> bool:
    """Return whether a file of the index has this version and is for a supported Python on Linux or macOS."""
    try:
        if not file.endswith(".whl"):
            return str(parse_sdist_filename(file)[1]) == version
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:  # old releases have file names and formats that packaging does not know
        return False
    return str(found) == version and any(
        (tag.interpreter in PYTHONS or (tag.abi == "abi3" and re.fullmatch(r"cp3(\d|1[0-3])", tag.interpreter)))
        and not tag.platform.startswith("win")
        for tag in tags
    )


def fetch_hashes(versions: dict[str, str]) -> dict[str, set[str]]:
    """Return the hashes of each package's usable files, by name, from the package index that pip uses."""
    done = subprocess.run([sys.executable, "-c", LINKS, *versions], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, set[str]] = {name: set() for name in versions}
    for line in done.stdout.splitlines():
        name, file, digest = line.split()
        if is_of_use(file, versions[name]):
            found[name].add(digest)
    return found


def write_lock(path: Path, names: Iterable[str], versions: dict[str, str], hashes: dict[str, set[str]]) -> None:
    """Write a list of these packages, each with its version and hashes."""
    lines = [HEADER.format(name=path.name)]
    for name in sorted(names):
        lines.append(" \\\n    ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{each}" for each in sorted(hashes[name]))]))
        lines.append("\n")
    path.write_text("".join(lines))


def main() -> int:
    """Write all lists and return the exit status."""
    if sys.version_info[:2] != PYTHON:
        here, wanted = (".".join(map(str, version)) for version in (sys.version_info[:2], PYTHON))
        print(
            f"this is Python {here}, but the lists are made with Python {wanted}, which requires more packages", file=sys.stderr
        )
        return 1
    versions = {name: version for name, version in read_constraints().items() if not OF_TORCH.fullmatch(name)}
    hashes = fetch_hashes(versions)
    if missing := [name for name, found in hashes.items() if not found]:
        print(f"the index shows no hash of {', '.join(missing)}: is that version in the index?", file=sys.stderr)
        return 1
    write_lock(HASHED, versions, versions, hashes)
    write_lock(LIGHT, required_distributions(LIGHT_EXTRAS), versions, hashes)
    write_lock(TRAIN, required_distributions(TRAIN_EXTRAS).keys() & versions, versions, hashes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
