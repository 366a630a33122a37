"""The `peer` daemon and everything a person touches: commands, settings, console, control socket, demo."""
