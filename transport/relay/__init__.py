"""Circuits through relays: reservations, forwarding, migration, and the watchdog of relays."""
