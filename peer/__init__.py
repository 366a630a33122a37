"""The `peer` daemon and everything a person touches: commands, configuration, console, control socket, demo."""
