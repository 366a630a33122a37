"""`python -m tools.sbom FILE`: writes the bill of materials of the installed product as CycloneDX JSON.

It lists the packages that Folkmoot requires with all extras for users, and the libraries in `web/vendor`. Tools of developers are
left out.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from tools.installed import PRODUCT_EXTRAS, ROOT, required_distributions, requirements_of

VENDOR_ROW = re.compile(
    r"\| `(?P<file>\S+)` \| (?P<name>\S+) (?P<version>[\d.]+),.*? \| (?P<licence>\S+) \| `(?P<digest>\w{64})` \|"
)


def make_bom() -> Bom:
    """Return the bill of the installed product: its packages, the libraries of `web/vendor`, and who requires which."""
    product = make_component("folkmoot", metadata.distribution("folkmoot"), ComponentType.APPLICATION)
    found = required_distributions(PRODUCT_EXTRAS)
    components = {name: make_component(name, distribution) for name, distribution in found.items()}
    vendored = vendored_components()
    bom = Bom(components=[*components.values(), *vendored])
    bom.metadata.component = product
    bom.register_dependency(product, [*(components[name] for name in direct_requirements() if name in components), *vendored])
    for name, distribution in found.items():
        needed = {canonicalize_name(requirement.name) for requirement in requirements_of(distribution)}
        bom.register_dependency(components[name], [components[each] for each in sorted(needed & components.keys())])
    return bom


def direct_requirements() -> list[str]:
    """Return the names of the packages that Folkmoot itself requires with all extras for users."""
    product = metadata.distribution("folkmoot")
    found = (requirement.name for extra in PRODUCT_EXTRAS for requirement in requirements_of(product, extra))
    return sorted(set(map(canonicalize_name, found)))


def make_component(name: str, distribution: metadata.Distribution, kind: ComponentType = ComponentType.LIBRARY) -> Component:
    """Return the entry of an installed package, with its version, licence and package URL."""
    licence = licence_of(distribution)
    return Component(
        name=name,
        version=distribution.version,
        type=kind,
        bom_ref=f"{name}=={distribution.version}",
        purl=PackageURL("pypi", name=name, version=distribution.version),
        licenses=[LicenseFactory().make_from_string(licence)] if licence else (),
    )


def licence_of(distribution: metadata.Distribution) -> str:
    """Return the licence that a package declares: its expression, short text, classifier, or the first line of its text."""
    fields = distribution.metadata.get_all
    [expression], [text] = (fields(name) or [""] for name in ("License-Expression", "License"))
    classifiers = (line.rpartition(" :: ")[2] for line in fields("Classifier") or () if line.startswith("License ::"))
    first_line, _, more = text.strip().partition("\n")
    return next(filter(None, (expression, "" if more else first_line, *classifiers, first_line)), "")


def vendored_components() -> list[Component]:
    """Return the vendored JavaScript libraries that `web/vendor/README.md` lists."""
    return [
        Component(
            name=row["name"],
            version=row["version"],
            bom_ref=f"{row['name']}@{row['version']}",
            purl=PackageURL("npm", name=row["name"], version=row["version"]),
            licenses=[LicenseFactory().make_from_string(row["licence"])],
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=row["digest"])],
        )
        for row in VENDOR_ROW.finditer((ROOT / "web" / "vendor" / "README.md").read_text())
    ]


def main() -> int:
    [file] = sys.argv[1:]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    make_outputter(make_bom(), OutputFormat.JSON, SchemaVersion.V1_6).output_to_file(file, allow_overwrite=True, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
