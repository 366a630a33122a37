"""The page of settings: type, default, meaning, flag and environment variable of each setting, from its declaration."""

from __future__ import annotations

from peer.settings.config import describe_setting, setting_descriptions

INTRODUCTION = """\
# Settings

`python -m tools.reference` writes this page from the declarations. `peer help SETTING` prints one of these sections.

A setting has its value from the last of these sources that names it: its default, the TOML file, the environment, the command
line. The file is `peer.toml` in the data directory, or the file of `--config`. `peer config show` prints all values with their
sources, and its output is a valid file.

- An unknown setting in a file or on the command line is an error that names the nearest known setting.
- An unknown variable `PEER_…` is an error only if it is nearly a setting, because other programs use the prefix as well.
  Kubernetes sets `PEER_SERVICE_HOST`, for example.
- A file has TOML values: numbers, `true`, `false`, texts, and lists of texts. `on` and `off` mean `true` and `false`. In
  variables and on the command line, commas separate the items of a list.
- `peer join` and `peer init` store the settings of their command line in `peer.toml` for later runs.

[Events, alerts and refusals](events.md#the-log) shows the lines of the log in both formats.
"""


def render() -> str:
    parts = [INTRODUCTION]
    for name in setting_descriptions():
        parts.append(f"## `{name}`\n\n{describe_setting(name)}\n")
    return "\n".join(parts)
