"""Commands of the console and the command line, by topic."""

from __future__ import annotations

from features.commands import Command, commands_in
from features.lazy_import import import_object
from peer.commands.definitions import (
    job_commands,
    member_commands,
    model_commands,
    network_commands,
    status_commands,
)
from peer.features import FEATURES

# The help lists commands in this order.
COMMAND_MODULES = (status_commands, job_commands, member_commands, model_commands, network_commands)


def all_commands() -> dict[str, Command]:
    """Return all commands by name. Commands that exist only at the prompt come last."""
    found: dict[str, Command] = {}
    of_features = (import_object(feature.commands) for feature in FEATURES if feature.commands)
    for topic in (*COMMAND_MODULES, *of_features):
        for word in commands_in(topic):
            assert word.name not in found, f"two declarations of the command {word.name!r}"
            found[word.name] = word
    return dict(sorted(found.items(), key=lambda item: item[1].only_at_prompt))
