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
COMMAND_MODULES = (status_commands, member_commands, job_commands, model_commands, network_commands)


def commands_by_topic() -> dict[str, list[Command]]:
    """Return all commands, grouped by the `TOPIC` of their module. Commands of features come last."""
    modules = [(module.TOPIC, module) for module in COMMAND_MODULES]
    for feature in FEATURES:
        if feature.commands:
            module = import_object(feature.commands)
            modules.append((getattr(module, "TOPIC", feature.name), module))
    found: dict[str, list[Command]] = {}
    for topic, module in modules:
        found.setdefault(topic, []).extend(commands_in(module))
    return found


def all_commands() -> dict[str, Command]:
    """Return all commands by name. Commands that exist only at the prompt come last."""
    found: dict[str, Command] = {}
    for commands in commands_by_topic().values():
        for word in commands:
            assert word.name not in found, f"two declarations of the command {word.name!r}"
            found[word.name] = word
    return dict(sorted(found.items(), key=lambda item: item[1].only_at_prompt))
