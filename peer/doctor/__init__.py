"""Checks of `peer doctor`: files, machine, clock, ports, other peers."""
