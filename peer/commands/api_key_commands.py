"""The command `peer key`: API keys of programs. It changes the data directory, and a running peer notices that at once."""

from __future__ import annotations

import argparse
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final

from features.command_arguments import JSON, Argument, parse_count, parse_integer_in
from features.commands import Action
from features.nearest_names import suggest_nearest
from peer.commands.command_line_parser import settings_from_options
from protocol.codec import COUNT_MAX
from protocol.errors import UserError
from protocol.limits import NAME_CHARACTERS_MAX
from protocol.name_validation import name_problem

if TYPE_CHECKING:
    from features.text_tables import TextTable
    from storage.api_key_store import ApiKey, ApiKeyStore

MEGABYTE: Final = 10**6
MODELS_DEFAULT: Final = 8  # open runs: some experiments side by side
MEGABYTES_DEFAULT: Final = 1_000  # hundreds of checkpoints of adapters
TOKENS_PER_MINUTE_DEFAULT: Final = 1_000_000  # more than small machines train on in a minute

ABOUT: Final = "Create, list and revoke API keys of programs"
DETAILS: Final = """
    Programs show such a key in their HTTP requests to this peer, for example with the SDK `tinker`. Once a key was created, no
    program is served without one. The command works with and without a running peer. A running peer notices changes at once.

        peer key new ben --models 2 --tokens-per-minute 100K
        peer key list
        peer key revoke ben
    """
# The name is not called `name`: that is a setting of the peer.
ARGUMENTS: Final = (Argument("key_name", nargs="?", default=None, metavar="NAME", help="Name of the key"),)
ACTIONS: Final = (
    Action(
        "new NAME",
        "Create a key and print it in the last line",
        (
            Argument(
                "--models",
                type=parse_integer_in(1),
                default=None,
                metavar="N",
                help=f"Most open runs (default {MODELS_DEFAULT})",
            ),
            Argument(
                "--mb",
                type=parse_integer_in(1, COUNT_MAX // MEGABYTE),
                default=None,
                metavar="N",
                help=f"Most megabytes of stored requests and checkpoints (default {MEGABYTES_DEFAULT})",
            ),
            Argument(
                "--tokens-per-minute",
                type=parse_count,
                default=None,
                metavar="N",
                help=f"Most tokens in a minute, such as 100K (default {TOKENS_PER_MINUTE_DEFAULT})",
            ),
        ),
        "The peer stores only a hash of the key, and cannot print the key again.",
    ),
    Action("list", "Show names, dates, quotas and last uses of all keys", (JSON,)),
    Action("revoke NAME", "Revoke a key: the peer refuses its next request"),
)
# Options of one action only, by their names in the parsed options.
_ACTION_OF_OPTION: Final = {"models": "new", "mb": "new", "tokens_per_minute": "new", "json": "list"}


def manage_api_keys(options: argparse.Namespace) -> None:
    """Run `peer key`. Raises `UserError` for invalid arguments, a name in use, or an unknown name."""
    from peer.settings.data_directory import DataDirectory
    from storage.api_key_store import ApiKeyStore

    action, name = options.action_name, options.key_name
    for option, its_action in _ACTION_OF_OPTION.items():
        if getattr(options, option) and action != its_action:
            flag = f"--{option.replace('_', '-')}"
            raise UserError(f"{flag} is an option of `peer key {its_action}`: leave it out of `peer key {action}`")
    store = ApiKeyStore(DataDirectory.open(settings_from_options(options).config.data_directory).api_keys)
    if action == "list":
        if name is not None:
            raise UserError(f"`peer key list` shows all keys: leave out {name!r}")
        _list_keys(store, options.json)
    elif name is None:
        raise UserError(f"a name is missing: write `peer key {action} NAME`")
    elif action == "new":
        _create_key(store, name, options)
    else:
        _revoke_key(store, name)


def _create_key(store: ApiKeyStore, name: str, options: argparse.Namespace) -> None:
    from storage.api_key_store import ApiKey

    if not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise UserError(f"the name {name!r} has {len(name)} characters: give it 1 to {NAME_CHARACTERS_MAX}")
    if problem := name_problem(name):
        raise UserError(f"the name {name!r} {problem}: choose another name")
    key = ApiKey(
        name,
        time.time_ns() // 1_000_000,
        options.models or MODELS_DEFAULT,
        (options.mb or MEGABYTES_DEFAULT) * MEGABYTE,
        options.tokens_per_minute or TOKENS_PER_MINUTE_DEFAULT,
    )
    is_first = not store.exists()
    secret = store.create_key(key)
    print(f"quotas      {key.models_max:,} open runs, {_megabytes(key)} MB, {key.tokens_per_minute_max:,} tokens a minute")
    if is_first:
        print("access      programs on this machine need a key from now on, too")
    print(f"key         of {name}; it is not stored, so save it now")
    print(secret)


def _list_keys(store: ApiKeyStore, as_json: bool) -> None:
    keys = store.list_keys()
    if as_json:
        from features.json_output import to_json

        print(to_json(keys))
    elif keys:
        from peer.commands.table_renderer import make_printer

        make_printer()(_key_table(keys))
    else:
        served = (
            "all keys are revoked, and no program is served" if store.exists() else "no keys: programs on this machine need none"
        )
        print(f"{served}; `peer key new NAME` creates a key")


def _revoke_key(store: ApiKeyStore, name: str) -> None:
    if not store.revoke_key(name):
        hint = suggest_nearest(name, [key.name for key in store.list_keys()])
        hint = hint if "did you mean" in hint else "; `peer key list` shows all keys"
        raise UserError(f"there is no key {name!r}{hint}")
    print(f"revoked {name}" + ("" if store.list_keys() else "; no key is left, and no program is served"))


def _key_table(keys: tuple[ApiKey, ...]) -> TextTable:
    from features.text_tables import Column, TextTable

    numbers = (Column(title, is_number=True) for title in ("open runs", "MB", "tokens a minute"))
    table = TextTable(Column("name", truncates=True), "created", *numbers, "last use")
    for key in keys:
        last_use = "never" if key.last_use_ms is None else _time(key.last_use_ms)
        quotas = f"{key.models_max:,}", _megabytes(key), f"{key.tokens_per_minute_max:,}"
        table.add_row(key.name, _time(key.created_ms), *quotas, last_use)
    return table


def _megabytes(key: ApiKey) -> str:
    return f"{key.stored_bytes_max // MEGABYTE:,}"


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000).astimezone():%Y-%m-%d %H:%M}"
