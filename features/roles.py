"""Roles: what `--role NAME` makes of a peer. Each is declared once, by the feature that brings it along."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    name: str
    about: str  # for people, in one line
    registers: tuple[str, ...] = ()  # roles in the ledger, by which the others count on this peer
    parts: tuple[str, ...] = ()  # what runs here beside agreement, by name
    needs_worker: bool = False  # a process that computes
    needs_package: str = ""  # without it the parts do nothing, and `full` does not register these roles
