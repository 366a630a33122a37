"""Curation as a feature: its module, and the role that serves annotators."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from features.feature import Feature, Role, Setting
from protocol.addresses import parse_address
from protocol.errors import UserError

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules


def _modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    from curation.ledger.curation_module import CurationModule

    return (CurationModule(),)


def _address_problem(value: object) -> str | None:
    try:
        parse_address(str(value))
    except UserError as error:
        return str(error)
    return None


def _proxies_problem(value: object) -> str | None:
    assert isinstance(value, tuple)
    for proxy in value:
        try:
            ip_address(proxy)
        except ValueError:
            return f"has {proxy!r}, which is no address: name each proxy by its IP address"
    return None


def _sign_up_problem(value: object) -> str | None:
    return None if value in ("open", "invited") else "is neither open nor invited"


CURATION = Feature(
    name="curation",
    about="what people said of tasks",
    modules=_modules,
    roles=(
        Role(
            "annotator",
            "serves people who annotate; it never loads torch",
            registered_roles=("annotator",),
            services=("serve",),
            needs_package="aiohttp",
        ),
    ),
    services={"serve": "curation.service.annotation_service:AnnotationService"},
    commands="curation.commands",
    rpc="curation.rpc:CurationRpc",
    rpc_handler="curation.service.curation_rpc_handler:CurationRpcHandler",
    settings=(
        Setting("web_listen", "HOST:PORT where annotators are served; port 0: a free one", "127.0.0.1:7780", _address_problem),
        Setting("web_host_names", "names of this host that browsers may say, beside its addresses and localhost", ()),
        Setting(
            "web_trusted_proxies", "addresses of reverse proxies that name their clients in X-Forwarded-For", (), _proxies_problem
        ),
        Setting("web_tls_cert", "a file with the certificate chain (PEM): annotators are served over https", ""),
        Setting("web_tls_key", "a file with the certificate's private key (PEM)", ""),
        Setting("sign_up", "who may enrol as an annotator here: open or invited", "invited", _sign_up_problem),
        Setting("sign_up_invitations", "invitations that annotators show where sign_up is invited", ()),
    ),
)
