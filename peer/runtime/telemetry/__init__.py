"""Event log, health, and warnings of risks, for people. Alerts are in `peer.api.alerts`."""
