"""Circuits through relays: reservations, forwarding, sessions, and the watchdog of relays."""
