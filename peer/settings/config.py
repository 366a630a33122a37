"""Settings of one peer. Each comes from the last of these that names it: default, TOML file, environment, command line."""

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
ENVIRONMENT_PREFIX = "PEER_"
PING_SECONDS_MAX = 25  # below the 30 seconds after which the first routers forget a quiet connection
SUSPECT_SECONDS_MAX = 600  # whoever waits longer asks in vain what `peer reach` is for
PINGS_SUSPECTED_MIN = 3  # that went unanswered: one or two are lost on any link
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
THREADS_MAX = 256  # more than any machine we know of gives one process; a typing error is likelier
MEMORY_MB_MAX = 100_000_000  # 100 TB, more than any machine we know of has
APPROVALS_MAX = 10_000  # equals the largest member table
PAYLOADS_GB_MAX = 1_000_000  # a petabyte; a typing error is likelier
RETIRE_DAYS_MAX = 3_650  # ten years; a typing error is likelier


def default_data_directory(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_DATA_HOME") or os.path.join(environment.get("HOME", "~"), ".local/share")
    return Path(base).expanduser() / "folkmoot"


def _about(text: str, default: Any) -> Any:
    return field(default=default, metadata={"about": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    data_directory: Path = field(metadata={"about": "everything this peer keeps: key, ledger, blobs, models"})
    name: str = _about("what other people see beside the peer id; empty: the peer id alone", "")
    role: str = _about("trainer, voter (never imports torch), full, or one of a feature, which `peer run --help` lists", "full")
    listen: str = _about("where this peer accepts connections, or none: it dials only; port 0: any free one", "0.0.0.0:7700")
    advertise: tuple[str, ...] = _about("where others reach this peer, names too; empty: where it listens", ())
    bootstrap: tuple[str, ...] = _about("addresses to dial first", ())
    relay: RelayMode = _about(  # noqa: RUF009 - a field, as the others are
        "forward, sealed, between members that cannot dial one another: on, off, or auto: while others can dial this peer",
        RelayMode.AUTO,
    )
    upnp: bool = _about("ask the router to forward a port to this peer (the extra `upnp`)", False)
    mdns: bool = _about("find peers on the local network, and show this one there (the extra `mdns`)", False)
    ping_seconds: int = _about("between pings of a quiet link", int(PING_SECONDS))
    suspect_seconds: int = _about(
        "of silence until a peer counts as not heard, unless its link was often silent", int(SUSPECT_SECONDS)
    )
    engine: str = _about("what the worker process computes with", "pytorch")
    threads: int = _about("threads of the worker, and of the daemon where a model is large; 0: each chooses", 0)
    device: str = _about("where the worker computes: cpu, cuda, cuda:1, or auto: cuda where there is one", AUTO)
    memory_mb_max: int = _about(
        "MB that a job may take in the worker, by an estimate: it makes micro-batches smaller; 0: no bound", 0
    )
    compile: bool = _about("compile losses for the device: minutes at the first step, faster ones afterwards", False)
    recompute: bool = _about(
        "keep the inputs of layers alone and compute them again for the gradient: less memory, a third slower", False
    )
    gpus: int = _about("processes of the worker that train together, on a GPU each, or all on the processor; 0: one", 0)
    parallel: str = _about("how they do: ddp, each with the whole model, or fsdp, each with a piece; off: there is one", "off")
    evaluate: bool = _about("measure held-out loss after every round", True)
    local_data: str = _about("this trainer's own text, for jobs with `data: local`", "")
    approve_invited: int = _about("how many members invited by voters this voter approves as voters by itself", 0)
    payloads_gb: int = _about(
        "GB of payloads of old rounds that stay of each job, 256 rounds at least; 0: all, as `peer export` needs them", 20
    )
    retire_after_days: int = _about("of silence, seen by this voter itself, until it wants a member retired; 0: never", 0)
    stand: bool = _about("ask to become a voter once this peer is a member and has caught up", True)
    log_level: str = _about("debug, info, warning or error", "info")
    log_format: str = _about("text, or json: one object a line", "text")
    log_file: str = _about("where the log goes; empty: standard error, or peer.log while the prompt has the terminal", "")
    control_socket: str = _about("where consoles attach; empty: control.sock in the data directory", "")
    feature_settings: Mapping[str, Any] = field(default_factory=dict, metadata={})  # their settings, by name

    @property
    def keepalive(self) -> KeepaliveConfig:
        return KeepaliveConfig(self.ping_seconds, self.suspect_seconds)

    @property
    def resources(self) -> EngineResources:
        said = {name: getattr(self, name) for name in RESOURCE_SETTINGS}
        return EngineResources(**said | {"parallel": ParallelMode(self.parallel)})


RESOURCE_SETTINGS = tuple(field.name for field in dataclasses.fields(EngineResources))  # settings by the same names
_HINTS = {name: kind for name, kind in typing.get_type_hints(Config).items() if name != "feature_settings"}
_ABOUT: dict[str, str] = {field.name: field.metadata["about"] for field in dataclasses.fields(Config) if field.metadata}


def setting_descriptions() -> dict[str, str]:
    """What each setting is about, those of features last."""
    of_features = {name: setting.about for name, setting in features.feature_settings().items()}
    assert not of_features.keys() & _ABOUT.keys(), "a feature calls a setting as the peer's own is called"
    return _ABOUT | of_features


def _kind(name: str) -> Any:
    if name in _HINTS:
        return _HINTS[name]
    default = features.feature_settings()[name].default
    return tuple[str, ...] if isinstance(default, tuple) else type(default)


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The configuration and, for each setting, where its value came from."""

    config: Config
    origins: dict[str, str]


def load_settings(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> ResolvedSettings:
    """Merges all layers. `flags` holds typed or textual values; None means not given. Raises `UserError`."""
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
    """Others use the prefix, too (Kubernetes: PEER_SERVICE_HOST, of a service called `peer`): only a near miss is an error."""
    named = {key.removeprefix(ENVIRONMENT_PREFIX).lower(): key for key in environment if key.startswith(ENVIRONMENT_PREFIX)}
    for name, key in named.items():
        meant = FLAG_ALIASES.get(name) or next((known for known in setting_descriptions() if _is_slip(name, known)), None)
        if name not in setting_descriptions() and meant:
            raise UserError(
                f"environment variable {key} is no setting of a peer; did you mean {ENVIRONMENT_PREFIX}{meant.upper()}?"
            )
    return {name: environment[key] for name, key in named.items() if name in setting_descriptions()}


FLAG_ALIASES = {"data_dir": "data_directory"}  # called otherwise on the command line
# letters of a setting's name: of short ones many are one letter away from other words, of long ones none
SHORT_NAME_MAX, LONG_NAME_MIN = 5, 12


def _is_slip(typed: str, name: str) -> bool:
    """Whether somebody who typed this meant the setting. Of a short name only a swap or a missing letter counts."""
    slips = _slips(typed, name)
    if len(name) <= SHORT_NAME_MAX:
        return slips == 1 and (len(typed) < len(name) or sorted(typed) == sorted(name))
    return slips <= (2 if len(name) >= LONG_NAME_MIN else 1)


def _slips(typed: str, name: str) -> int:
    """How many letters are missing, too many, wrong, or swapped with the next one (optimal string alignment)."""
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
    """The values of the file that was named, else of `peer.toml` in the data directory if there is one."""
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
    import tomllib  # most peers have no file of settings

    try:
        values = tomllib.loads(read_regular(file).decode())
    except OSError as error:
        raise UserError(f"configuration {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"configuration {file} is not valid TOML: {error}") from None
    for key in values:
        if key not in setting_descriptions():
            raise UserError(f"{file}: unknown setting {key!r}{suggest_nearest(key, setting_descriptions())}")
    return values


def _convert(name: str, value: Any, origin: str, *, typed: bool) -> Any:
    """A file must use TOML's types; environment and flags may give text."""
    kind = _kind(name)
    try:
        if name == "listen" and isinstance(value, list):  # in a file lists are lists, as with `advertise`
            value = ",".join(_texts(value, typed))
        return _READERS[kind](value, typed)
    except (ValueError, TypeError, RuntimeError):  # the last: `~somebody` who has no home here
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


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    """Each with the name of the setting that has it."""
    choices = (
        ("role", features.roles(), f"is no role; there are {', '.join(features.roles())}"),
        (
            "engine",
            features.engines(),
            f"is no engine of this program; there are {', '.join(features.engines())}",
        ),
        ("log_level", LOG_LEVELS, f"is no log level; choose one of {', '.join(LOG_LEVELS)}"),
        ("log_format", LOG_FORMATS, f"is no format of a log; choose one of {', '.join(LOG_FORMATS)}"),
        ("parallel", list(ParallelMode), f"is none of {', '.join(ParallelMode)}"),
    )
    yield from ((name, why) for name, there_are, why in choices if setting_value(config, name) not in there_are)
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
        way = "leave advertise empty, or let it accept connections"
        yield "advertise", f"tells others to dial this peer, which accepts no connections: listen is none; {way}"
    if len(config.advertise) > ADVERTISED_MAX:
        yield "advertise", f"names {len(config.advertise)} addresses, at most {ADVERTISED_MAX} are told to others"


def _check_bootstrap(text: str, where: str) -> None:
    peer, at, address = text.rpartition("@")
    check_dialable_address(address, where)
    if at:
        from protocol.identity import parse_peer_id  # loads a library: `--help` answers without it

        try:
            parse_peer_id(peer)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def why_unlinked(config: Config, remembered: Iterable[str]) -> str:
    """Why this peer would never have a link, and behind `; ` what to do; empty if it may. `remembered`: by its address book."""
    if config.listen != NO_LISTEN_ADDRESS or config.bootstrap or config.mdns or any(remembered):
        return ""
    way = "name a member with --bootstrap HOST:PORT, look for one on the local network with --mdns, or accept connections"
    return f"listen is none, and this peer knows nobody to dial; {way}"


def setting_value(config: Config, name: str) -> Any:
    return config.feature_settings[name] if name in config.feature_settings else getattr(config, name)


def format_settings(settings: ResolvedSettings) -> str:
    """Every value with its meaning and where it came from, as TOML that a configuration file may hold."""
    lines = ["# Settings of this peer. Stronger last: default, file, environment (PEER_…), command line."]
    for name, about in setting_descriptions().items():
        comment = "# " if name == "data_directory" else ""  # the data directory's own file may not set it
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
    # JSON's escapes are TOML's, save that TOML also wants DEL escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
