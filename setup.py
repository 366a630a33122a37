"""The build: `peer --version` of a wheel and an sdist shows the commit that they were built from."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).parent))  # an isolated build has only the build tools there

from peer.source_commit import FILE_NAME, source_commit


def write_commit(root: str) -> None:
    """Write the commit into the package under this folder, or remove the file of an earlier build if the commit is unknown."""
    file = Path(root, "peer", FILE_NAME)
    if commit := source_commit():
        file.write_text(f"{commit}\n")
    else:
        file.unlink(missing_ok=True)


class BuildWithCommit(build_py):
    """A build of the modules for a wheel, with the commit."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout asks git
            write_commit(self.build_lib)


class SdistWithCommit(sdist):
    """A build of an archive of the sources, with the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
