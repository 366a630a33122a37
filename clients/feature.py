"""Client runs as a feature: its ledger module, its objective, its computations, its gateway and its command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from features.feature import Feature

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules


def _modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    from clients.ledger.clients_module import ClientsModule

    return (ClientsModule(rules),)


CLIENTS = Feature(
    name="clients",
    about="training loops of people's own programs, each step of which is a voted round",
    modules=_modules,
    objectives="clients.objective:OBJECTIVES",
    implementations={"pytorch": "clients.pytorch.implementations:IMPLEMENTATIONS"},
    worker_requests="clients.worker_requests:REQUESTS",
    commands="clients.commands",
    rpc="clients.rpc:ClientsRpc",
    rpc_handler="clients.rpc_handler:ClientsRpcHandler",
    routes="clients.gateway.http_routes:ROUTES",
)
