"""The `peer` daemon, its commands, console, control socket and demo."""
