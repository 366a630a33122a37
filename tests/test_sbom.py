"""The bill of materials has the installed product, without the tools of developers."""

from __future__ import annotations

from tools import sbom
from tools.installed import PRODUCT_EXTRAS, required_distributions


def test_the_bill_has_each_package_of_the_product_with_version_licence_and_requirements() -> None:
    bom = sbom.make_bom()
    found = {component.name: component for component in bom.components}
    assert found.keys() == {*required_distributions(PRODUCT_EXTRAS), "htm", "preact"}
    assert {"numpy", "torch", "multidict"} < found.keys() and not {"pytest", "ruff", "hypothesis"} & found.keys()
    assert all(component.version and component.licenses and component.purl for component in found.values())
    requirements = {str(item.ref): {str(needed.ref) for needed in item.dependencies} for item in bom.dependencies}
    assert str(found["multidict"].bom_ref) in requirements[str(found["aiohttp"].bom_ref)]
    assert bom.metadata.component is not None and bom.metadata.component.name == "folkmoot"
    of_product = requirements[str(bom.metadata.component.bom_ref)]
    assert {str(found[name].bom_ref) for name in ("torch", "trio", "preact")} < of_product
