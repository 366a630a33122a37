"""Event log, health, alerts and warnings for people."""
