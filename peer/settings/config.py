"""Settings of one peer. Sources, with later ones taking precedence: default, TOML file, environment, command line."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from features.nearest_names import suggest_nearest
from peer import features
from protocol.addresses import NO_LISTEN_ADDRESS, check_dialable_address, parse_listen_addresses
from protocol.errors import UserError
from protocol.limits import ADVERTISED_MAX, NAME_CHARACTERS_MAX
from protocol.name_validation import name_problem
from storage.regular_files import read_regular
from training.engine_resources import AUTO, EngineResources, ParallelMode, device_problem, parallel_problem
from transport.discovery.reachability import RelayMode
from transport.wire.failure_detector import PING_SECONDS, SUSPECT_SECONDS, KeepaliveConfig

FILE_NAME = "peer.toml"
COMPILED_PROGRAMS = "programs"  # folder of the data directory in which an engine keeps its compiled programs
ENVIRONMENT_PREFIX = "PEER_"
PING_SECONDS_MAX = 25  # longest setting `ping_seconds`: some routers forget a quiet connection after 30 seconds
SUSPECT_SECONDS_MAX = 600  # longest setting `suspect_seconds`: a longer silence would make `peer reach` useless
PINGS_SUSPECTED_MIN = 3  # least number of unanswered pings before a peer is suspected: any link loses one or two
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
THREADS_MAX = 256  # largest setting `threads`: more than any known machine gives one process is a typing error
MEMORY_MB_MAX = 100_000_000  # largest setting of a memory size: 100 TB, more than any known machine has
APPROVALS_MAX = 10_000  # largest setting `approve_invited`, equal to the largest number of members
PAYLOADS_GB_MAX = 1_000_000  # largest setting `payloads_gb`, a petabyte: more is a typing error
BATCHES_GB_MAX = PAYLOADS_GB_MAX  # largest setting `keep_batches_gb`, for the same reason
RETIRE_DAYS_MAX = 3_650  # largest setting `retire_after_days`, ten years: more is a typing error


# Default of the data directory, as help and documents show it.
DEFAULT_DATA_DIRECTORY = "$XDG_DATA_HOME/folkmoot, or ~/.local/share/folkmoot"


def default_data_directory(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_DATA_HOME") or os.path.join(environment.get("HOME", "~"), ".local/share")
    return Path(base).expanduser() / "folkmoot"


def _about(text: str, default: Any, details: str = "") -> Any:
    """Declare a setting: a noun phrase with its unit for a line of the help, and details as further sentences."""
    return field(default=default, metadata={"about": text, "details": details})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    data_directory: Path = field(
        metadata={
            "about": "Directory with all data of this peer: key, ledger, blobs, models",
            "details": "The file `peer.toml` in the directory cannot set it.",
        }
    )
    name: str = _about(
        "Name of this peer for other people",
        "",
        "People see it beside the peer id and may type it instead. Without a name they see the peer id. A member that starts "
        "with another name than the network knows asks the network to change it.",
    )
    role: str = _about("Work of this peer", "full", "Other members may have roles that this program does not know.")
    listen: str = _about(
        "Addresses where this peer accepts connections, or `none`",
        "0.0.0.0:7700",
        "Port 0 takes any free port. Commas separate several addresses: `0.0.0.0:7700,[::]:7700` accepts IPv4 and IPv6. With "
        "`none` this peer only dials others, and needs `bootstrap` or `mdns`. Every link is authenticated and encrypted.",
    )
    advertise: tuple[str, ...] = _about(
        "Addresses or host names that other peers dial",
        (),
        f"At most {ADVERTISED_MAX}. Without one, this peer announces the addresses of `listen`; for a wildcard these are all "
        "addresses of this machine except loopback. Behind a router, set the forwarded address.",
    )
    bootstrap: tuple[str, ...] = _about(
        "Addresses to dial first", (), "`PEERID@HOST:PORT` accepts only the peer with this id at the address."
    )
    relay: RelayMode = _about(  # noqa: RUF009 - a call of `field`, as for the other settings
        "Forwarding of encrypted links between members that cannot dial each other",
        RelayMode.AUTO,
        "`on` forwards if this peer accepts connections, `off` never, and `auto` while other peers can dial this one "
        "(`reachable: direct` in `peer status`). `true` and `false` are accepted for `on` and `off`.",
    )
    upnp: bool = _about(
        "Request to the router to forward a port to this peer",
        False,
        "Needs the extra `upnp`. If the package is missing or the router refuses, the log says so and the peer runs without it.",
    )
    mdns: bool = _about(
        "Discovery of peers on the local network, and visibility there",
        False,
        "Needs the extra `mdns`. It shows everybody on the local network that a peer of some network is here, without its name.",
    )
    ping_seconds: int = _about("Seconds between pings of an idle connection", int(PING_SECONDS))
    suspect_seconds: int = _about(
        "Seconds of silence after which a peer counts as not heard",
        int(SUSPECT_SECONDS),
        f"Three pings to {SUSPECT_SECONDS_MAX}. A link that is often silent for nearly as long gets up to twice the time. "
        "A link without any message for 2.5 times as long is closed.",
    )
    engine: str = _about(
        "Library with which the worker computes",
        "pytorch",
        "If an engine has no loss for a job's objective, this peer does not train that job and the log says so.",
    )
    threads: int = _about(
        "Threads of the worker, or 0 for automatic",
        0,
        "The daemon uses as many for models of more than 4M parameters. With 0 the engine chooses, and the daemon uses one "
        "thread per core, at most four. Set 1 if several peers run on one machine.",
    )
    device: str = _about(
        "Device of the worker: `cpu`, `cuda`, `cuda:1` or `auto`",
        AUTO,
        "`auto` takes the first GPU if there is one. A peer does not start without the named device.",
    )
    memory_mb_max: int = _about(
        "Estimated memory of a job in the worker in MB, or 0 without a limit",
        0,
        "The estimate covers parameters, moments and activations. The worker makes micro-batches smaller until they fit, and "
        "the log says so. The result is the same to rounding.",
    )
    compile: bool = _about(
        "Compilation of losses for the device",
        False,
        "The first step of a job takes a minute or more, and later steps are faster. If compilation fails, the log says so and "
        "the worker computes without it. Cannot be combined with `parallel`.",
    )
    recompute: bool = _about(
        "Recomputation of activations for the gradient",
        False,
        "Needs far less memory and about a third more time, for the same result.",
    )
    gpus: int = _about(
        "Number of worker processes that train together, or 0 for one",
        0,
        "Each process takes a GPU; on a machine without GPUs all of them use the processor. They are one member of the network.",
    )
    parallel: str = _about(
        "Distribution of a model over worker processes: `off`, `ddp` or `fsdp`",
        "off",
        "With `ddp` each process has the whole model and a share of the batch. With `fsdp` each process also has only a share "
        "of every tensor.",
    )
    evaluate: bool = _about(
        "Measurement of held-out loss",
        True,
        "A trainer measures every round if that takes at most a quarter of the worker's time, and otherwise some rounds. "
        "`peer rounds` shows `–` for a round without a measurement.",
    )
    local_data: str = _about("File or folder with this trainer's own text", "", "Jobs with `data: local` train on it.")
    approve_invited: int = _about(
        "Number of invited members that this voter approves as voters automatically",
        0,
        "It counts members that voters invited. Approvals decide how many votes one person can get: give them with care.",
    )
    payloads_gb: int = _about(
        "Disk space in GB for payloads of closed rounds, for each job",
        20,
        "The payloads of the last 256 rounds stay in any case. With 0 all payloads stay, as `peer export` needs them.",
    )
    keep_batches_gb: int = _about(
        "Disk space in GB for the data of all client runs, or 0 to delete the data of a step after its round",
        0,
        "With kept data, `peer export` writes them, and `peer audit` re-executes their steps. The oldest steps are deleted "
        "first. 0 also deletes the data that an earlier start kept. The data are texts of the programs that tune models.",
    )
    retire_after_days: int = _about(
        "Days of silence after which this voter asks to retire a member, or 0 for never",
        0,
        "The voter counts only silence that it has observed itself. A quorum of voters with such a setting retires the member.",
    )
    stand: bool = _about(
        "Request for a vote once this peer is a member and has caught up", True, "With `--no-stand` it stays without a vote."
    )
    log_level: str = _about("Least severity of log lines", "info", "`debug` also logs every block, proposal and ballot.")
    log_format: str = _about(
        "Format of log lines",
        "text",
        "`json` writes one object per line with the keys `at`, `level`, `kind` and `text`. Further keys depend on `kind`. A "
        "traceback has the key `traceback`.",
    )
    log_file: str = _about(
        "Log file",
        "",
        "Without one, the log goes to standard error, or to `peer.log` in the data directory while the prompt uses the "
        "terminal. After SIGHUP a daemon opens the file again, for logrotate.",
    )
    control_socket: str = _about(
        "Socket where `peer console` and other commands attach", "", "Without one, it is `control.sock` in the data directory."
    )
    # Values of the settings that features declare, by name.
    feature_settings: Mapping[str, Any] = field(default_factory=dict, metadata={})

    @property
    def keepalive(self) -> KeepaliveConfig:
        return KeepaliveConfig(self.ping_seconds, self.suspect_seconds)

    @property
    def resources(self) -> EngineResources:
        said = {name: getattr(self, name) for name in RESOURCE_SETTINGS}
        programs = Path(self.data_directory) / COMPILED_PROGRAMS
        return EngineResources(**said | {"parallel": ParallelMode(self.parallel), "cache_folder": str(programs)})


# Settings of a peer with the names of fields of `EngineResources`.
RESOURCE_SETTINGS = tuple(field.name for field in dataclasses.fields(EngineResources) if field.name != "cache_folder")
_HINTS = {name: kind for name, kind in typing.get_type_hints(Config).items() if name != "feature_settings"}
_DECLARED = {field.name: field for field in dataclasses.fields(Config) if field.metadata}
_ABOUT: dict[str, str] = {name: field.metadata["about"] for name, field in _DECLARED.items()}


def setting_descriptions() -> dict[str, str]:
    """Return setting -> its description in one line. Settings of features come last."""
    of_features = {name: setting.about for name, setting in features.feature_settings().items()}
    assert not of_features.keys() & _ABOUT.keys(), "a feature declares a setting with the name of one of the peer's own"
    return _ABOUT | of_features


def setting_details(name: str) -> str:
    """Return further sentences about a setting, or an empty text."""
    if name == "role":
        works = (f"`{role.name}` ({role.about})" for role in features.roles().values())
        return f"There are {', '.join(works)}. {_DECLARED[name].metadata['details']}"
    return str(_DECLARED[name].metadata["details"]) if name in _DECLARED else features.feature_settings()[name].details


def setting_type(name: str) -> str:
    """Return a text with the type of a setting and its range or choices."""
    if choices := _choices().get(name):
        return " or ".join((", ".join(choices[:-1]), choices[-1])) if len(choices) > 1 else choices[0]
    if name in _RANGES:
        return f"{_KINDS[int].removeprefix('a ')}, {' to '.join(map(str, _RANGES[name]))}"
    return "list, with commas between the items" if _kind(name) == tuple[str, ...] else _KINDS[_kind(name)].removeprefix("a ")


def setting_flag(name: str) -> str:
    """Return the flag of a setting on the command line, such as `--ping-seconds`."""
    aliases = {setting: alias for alias, setting in FLAG_ALIASES.items()}
    return f"--{aliases.get(name, name).replace('_', '-')}"


def describe_setting(name: str) -> str:
    """Return the description of a setting in Markdown, without its name."""
    flag, default = setting_flag(name), setting_default(name)
    flags = f"`{flag}`, `--no-{flag.removeprefix('--')}`" if _kind(name) is bool else f"`{flag}`"
    about = " ".join(filter(None, (f"{setting_descriptions()[name]}.", setting_details(name))))
    return "\n".join(
        (
            about,
            "",
            f"- Type: {setting_type(name)}",
            f"- Default: `{default}`" if default else "- Default: empty",
            f"- Flag: {flags}",
            f"- Variable: `{ENVIRONMENT_PREFIX}{name.upper()}`",
        )
    )


def setting_default(name: str) -> str:
    """Return the default value of a setting for people. An empty text or list gives an empty text."""
    if name == "data_directory":
        return DEFAULT_DATA_DIRECTORY
    value = _DECLARED[name].default if name in _DECLARED else features.feature_settings()[name].default
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value == () else str(value)


def _kind(name: str) -> Any:
    if name in _HINTS:
        return _HINTS[name]
    default = features.feature_settings()[name].default
    return tuple[str, ...] if isinstance(default, tuple) else type(default)


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The configuration and the origin of each setting's value."""

    config: Config
    origins: dict[str, str]


def load_settings(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> ResolvedSettings:
    """Return the settings merged from all sources.

    Values in `flags` have the setting's type or are text; None means a missing flag. Raises `UserError` for an unknown setting,
    an invalid value, or an unreadable file.
    """
    from_flags = {name: value for name, value in flags.items() if value is not None}
    from_environment = _environment(environment)
    from_file, file = _file_layer(file, {**from_environment, **from_flags}, environment)
    values: dict[str, Any] = {"data_directory": default_data_directory(environment)}
    origins = dict.fromkeys(setting_descriptions(), "default")
    of_features = {name: setting.default for name, setting in features.feature_settings().items()}
    layers: list[tuple[Mapping[str, Any], Callable[[str], str]]] = [
        (from_file, lambda name: str(file)),
        (from_environment, lambda name: ENVIRONMENT_PREFIX + name.upper()),
        (from_flags, lambda name: "command line"),
    ]
    for layer, origin in layers:
        for name, value in layer.items():
            into = of_features if name in of_features else values
            into[name] = _convert(name, value, origin(name), typed=layer is from_file)
            origins[name] = origin(name)
    config = Config(**values, feature_settings=of_features)
    _check(config, origins)
    return ResolvedSettings(config, origins)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in the environment.

    An unknown name is an error only if it resembles a setting, since other programs use the prefix `PEER_`, too. For example,
    Kubernetes sets PEER_SERVICE_HOST for a service named `peer`.
    """
    named = {key.removeprefix(ENVIRONMENT_PREFIX).lower(): key for key in environment if key.startswith(ENVIRONMENT_PREFIX)}
    for name, key in named.items():
        meant = FLAG_ALIASES.get(name) or next((known for known in setting_descriptions() if _is_slip(name, known)), None)
        if name not in setting_descriptions() and meant:
            raise UserError(f"environment variable {key} is not a setting; did you mean {ENVIRONMENT_PREFIX}{meant.upper()}?")
    return {name: environment[key] for name, key in named.items() if name in setting_descriptions()}


FLAG_ALIASES = {"data_dir": "data_directory"}  # name of a flag on the command line -> name of the setting
# Numbers of letters up to which a setting's name is short, and from which it is long. Many short names differ from other words in
# one letter; long names do not.
SHORT_NAME_MAX, LONG_NAME_MIN = 5, 12


def _is_slip(typed: str, name: str) -> bool:
    """Return True if `typed` is probably a misspelled `name`.

    For a short name, only swapped letters or a missing letter count.
    """
    slips = _slips(typed, name)
    if len(name) <= SHORT_NAME_MAX:
        return slips == 1 and (len(typed) < len(name) or sorted(typed) == sorted(name))
    return slips <= (2 if len(name) >= LONG_NAME_MIN else 1)


def _slips(typed: str, name: str) -> int:
    """Return the edit distance of the two words, with transpositions of adjacent letters (optimal string alignment)."""
    rows = [list(range(len(name) + 1))]
    for i, letter in enumerate(typed, 1):
        rows.append([i])
        for j, other in enumerate(name, 1):
            fewest = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (letter != other))
            if i > 1 and j > 1 and typed[i - 2 : i] == name[j - 2 : j][::-1]:
                fewest = min(fewest, rows[i - 2][j - 2] + 1)
            rows[i].append(fewest)
    return rows[-1][-1]


def _file_layer(file: Path | None, later: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[dict[str, Any], Path]:
    """Return (values, path) of the settings file: of `file` if one is named, otherwise of `peer.toml` in the data directory."""
    if file is not None:
        return _read(file), file
    file = Path(later.get("data_directory") or default_data_directory(environment)).expanduser() / FILE_NAME
    if not file.is_file():
        return {}, file
    values = _read(file)
    if "data_directory" in values:
        raise UserError(f"{file}: data_directory cannot be set inside the data directory; use --data-dir or --config FILE")
    return values, file


def _read(file: Path) -> dict[str, Any]:
    import tomllib  # imported late, because most peers have no settings file

    try:
        values = tomllib.loads(read_regular(file).decode())
    except OSError as error:
        raise UserError(f"settings file {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"settings file {file} is not valid TOML: {error}") from None
    for key in values:
        if key not in setting_descriptions():
            raise UserError(f"{file}: unknown setting {key!r}{suggest_nearest(key, setting_descriptions())}")
    return values


def _convert(name: str, value: Any, origin: str, *, typed: bool) -> Any:
    """Return the value in the type of its setting. A file must use TOML's types; environment and flags may use text."""
    kind = _kind(name)
    try:
        if name == "listen" and isinstance(value, list):  # a settings file has a TOML list
            value = ",".join(_texts(value, typed))
        return _READERS[kind](value, typed)
    except (ValueError, TypeError, RuntimeError):  # a RuntimeError comes from a path `~name` of an unknown user
        raise UserError(f"{name} = {value!r} ({origin}) is not {_KINDS[kind]}") from None


def _path(value: Any, typed: bool) -> Path:
    if not isinstance(value, Path) and (not isinstance(value, str) or not value):
        raise TypeError
    return Path(value).expanduser().absolute()


def _text(value: Any, typed: bool) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _integer(value: Any, typed: bool) -> int:
    if isinstance(value, str) and not typed:
        return int(value)
    if type(value) is not int:
        raise TypeError
    return value


def _boolean(value: Any, typed: bool) -> bool:
    words = {"on": True, "off": False}
    if not typed:
        words |= {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise TypeError
    return value


def _relaying(value: Any, typed: bool) -> RelayMode:
    if value == RelayMode.AUTO:
        return RelayMode.AUTO
    return RelayMode.ON if _boolean(value, typed) else RelayMode.OFF


def _texts(value: Any, typed: bool) -> tuple[str, ...]:
    if isinstance(value, str) and not typed:
        value = [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise TypeError
    return tuple(value)


_READERS: dict[Any, Callable[[Any, bool], Any]] = {
    Path: _path,
    str: _text,
    int: _integer,
    bool: _boolean,
    RelayMode: _relaying,
    tuple[str, ...]: _texts,
}
_KINDS = {
    Path: "a path",
    str: "text",
    int: "a whole number",
    bool: "true or false",
    RelayMode: "auto, on or off",
    tuple[str, ...]: "a list of addresses",
}


_RANGES = {
    "threads": (0, THREADS_MAX),
    "memory_mb_max": (0, MEMORY_MB_MAX),
    "approve_invited": (0, APPROVALS_MAX),
    "payloads_gb": (0, PAYLOADS_GB_MAX),
    "keep_batches_gb": (0, BATCHES_GB_MAX),
    "retire_after_days": (0, RETIRE_DAYS_MAX),
    "ping_seconds": (1, PING_SECONDS_MAX),
}


def _check(config: Config, origins: Mapping[str, str]) -> None:
    for name, why in _problems(config):
        value = setting_value(config, name)
        shown = repr(", ".join(value) if isinstance(value, tuple) else value)
        raise UserError(f"{name} = {shown} ({origins[name]}) {why.removeprefix(f'{shown} ')}")
    if problem := parallel_problem(config.resources):
        raise UserError(f"{problem} (parallel: {origins['parallel']}, gpus: {origins['gpus']})")
    parse_listen_addresses(config.listen, f"listen ({origins['listen']}): ")
    for address in config.advertise:
        check_dialable_address(address, f"advertise ({origins['advertise']})")
    for text in config.bootstrap:
        _check_bootstrap(text, f"bootstrap ({origins['bootstrap']})")


def _choices() -> dict[str, tuple[str, ...]]:
    """Return the values of each setting that has a fixed set of them. Settings of features check their values themselves."""
    return {
        "role": tuple(features.roles()),
        "relay": tuple(RelayMode),
        "engine": tuple(features.engines()),
        "log_level": LOG_LEVELS,
        "log_format": LOG_FORMATS,
        "parallel": tuple(ParallelMode),
    }


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name of each invalid setting and its problem."""
    for name, choices in _choices().items():
        if setting_value(config, name) not in choices:
            yield name, f"is not a valid {name.replace('_', ' ')}; choose one of {', '.join(choices)}"
    for name, setting in features.feature_settings().items():
        if problem := setting.problem(config.feature_settings[name]):
            yield name, problem
    for name, (least, most) in _RANGES.items():
        if not least <= setting_value(config, name) <= most:
            yield name, f"is outside {least}..{most}"
    if not (least := PINGS_SUSPECTED_MIN * config.ping_seconds) <= config.suspect_seconds <= SUSPECT_SECONDS_MAX:
        yield "suspect_seconds", f"is outside {least}..{SUSPECT_SECONDS_MAX}: at least {PINGS_SUSPECTED_MIN} pings"
    if problem := device_problem(config.device):
        yield "device", problem
    if len(config.name) > NAME_CHARACTERS_MAX:
        yield "name", f"is longer than {NAME_CHARACTERS_MAX} characters"
    if problem := name_problem(config.name):
        yield "name", problem
    if config.advertise and config.listen == NO_LISTEN_ADDRESS:
        yield (
            "advertise",
            "announces addresses, but this peer accepts no connections (listen is none); remove one of both settings",
        )
    if len(config.advertise) > ADVERTISED_MAX:
        yield "advertise", f"has {len(config.advertise)} addresses; at most {ADVERTISED_MAX} are announced"


def _check_bootstrap(text: str, where: str) -> None:
    peer, at, address = text.rpartition("@")
    check_dialable_address(address, where)
    if at:
        from protocol.identity import parse_peer_id  # a slow import that `--help` does not need

        try:
            parse_peer_id(peer)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def why_unlinked(config: Config, remembered: Iterable[str]) -> str:
    """Return a text with the reason why this peer can never have a link and, after `; `, a remedy, or "".

    `remembered` is its address book.
    """
    if config.listen != NO_LISTEN_ADDRESS or config.bootstrap or config.mdns or any(remembered):
        return ""
    way = "add a member with --bootstrap HOST:PORT, search the local network with --mdns, or accept connections"
    return f"listen is none, and this peer knows no address to dial; {way}"


def setting_value(config: Config, name: str) -> Any:
    return config.feature_settings[name] if name in config.feature_settings else getattr(config, name)


def format_settings(settings: ResolvedSettings) -> str:
    """Return all settings as a TOML file, with descriptions and origins as comments."""
    lines = ["# Settings of this peer. Each source overrides the ones before: default, file, environment (PEER_…), command line."]
    for name, about in setting_descriptions().items():
        comment = "# " if name == "data_directory" else ""  # `peer.toml` in the data directory must not set it
        lines += [
            "",
            f"# {about}",
            f"{comment}{name} = {format_toml_value(setting_value(settings.config, name))}  # {settings.origins[name]}",
        ]
    return "\n".join(lines) + "\n"


def format_toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(format_toml_value(item) for item in value) + "]"
    # TOML has the escapes of JSON and, in addition, requires that DEL is escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
