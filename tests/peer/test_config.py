from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from features.nearest_names import suggest_nearest
from peer.settings.config import describe_setting, format_settings, load_settings, setting_descriptions
from protocol.errors import UserError


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return file


def test_the_data_directory_follows_the_desktop_convention(tmp_path: Path) -> None:
    assert load_settings({}, {"HOME": "/h"}).config.data_directory == Path("/h/.local/share/folkmoot")
    assert load_settings({}, {"HOME": "/h", "XDG_DATA_HOME": "/x"}).config.data_directory == Path("/x/folkmoot")


def test_each_layer_overrules_the_one_before(tmp_path: Path, home: dict[str, str]) -> None:
    file = write(tmp_path, 'name = "file"\nthreads = 1\nrole = "voter"\n')
    settings = load_settings({"name": "flag"}, {**home, "PEER_NAME": "env", "PEER_THREADS": "2"}, file)
    assert (settings.config.name, settings.config.threads, settings.config.role) == ("flag", 2, "voter")
    assert settings.origins["name"] == "command line"
    assert settings.origins["threads"] == "PEER_THREADS"
    assert settings.origins["role"] == str(file)
    assert settings.origins["listen"] == "default"


@pytest.mark.parametrize(
    ("text", "relay"), [("true", "on"), ("false", "off"), ('"auto"', "auto"), ('"on"', "on"), ('"off"', "off")]
)
def test_relaying_is_said_in_a_word_or_as_older_files_say_it(tmp_path: Path, home: dict[str, str], text: str, relay: str) -> None:
    settings = load_settings({}, home, write(tmp_path, f"relay = {text}\n"))
    assert settings.config.relay == relay == load_settings({"relay": text.strip('"')}, home).config.relay
    assert tomllib.loads(format_settings(settings))["relay"] == relay
    with pytest.raises(UserError, match=r"relay = 'perhaps'.*is not auto, on or off"):
        load_settings({"relay": "perhaps"}, home)


def test_what_is_off_by_default_is_switched_on_by_that_word(tmp_path: Path, home: dict[str, str]) -> None:
    before, config = load_settings({}, home).config, load_settings({"mdns": True}, {**home, "PEER_UPNP": "on"}).config
    assert (before.relay, before.upnp, before.mdns) == ("auto", False, False) and config.upnp and config.mdns
    assert load_settings({}, home, write(tmp_path, 'upnp = "on"\nmdns = "off"\n')).config.upnp


def test_a_flag_that_was_not_given_overrules_nothing(tmp_path: Path, home: dict[str, str]) -> None:
    assert load_settings({"role": None}, home, write(tmp_path, 'role = "voter"')).config.role == "voter"


def test_the_file_in_the_data_directory_is_read_wherever_the_directory_is_named(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "peer.toml").write_text('name = "here"')
    assert load_settings({"data_directory": str(tmp_path)}, home).config.name == "here"
    assert load_settings({}, {**home, "PEER_DATA_DIRECTORY": str(tmp_path)}).config.name == "here"


def test_the_file_in_the_data_directory_cannot_move_it(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "peer.toml").write_text('data_directory = "/elsewhere"')
    with pytest.raises(UserError, match="cannot be set inside the data directory"):
        load_settings({"data_directory": str(tmp_path)}, home)
    assert load_settings({}, home, write(tmp_path, 'data_directory = "/elsewhere"')).config.data_directory == Path("/elsewhere")


def test_an_unknown_key_in_a_file_names_key_file_and_the_nearest_one(tmp_path: Path, home: dict[str, str]) -> None:
    file = write(tmp_path, 'bootstap = ["a:1"]')
    with pytest.raises(UserError, match=f"{file}: unknown setting 'bootstap'; did you mean bootstrap?"):
        load_settings({}, home, file)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LISTN", "LISTEN"),
        ("LSITEN", "LISTEN"),
        ("NMAE", "NAME"),
        ("ROL", "ROLE"),
        ("LOGLEVEL", "LOG_LEVEL"),
        ("DATA_DIR", "DATA_DIRECTORY"),
        ("CONTOL_SOKET", "CONTROL_SOCKET"),
    ],
)
def test_a_variable_that_is_nearly_a_setting_is_an_error(home: dict[str, str], name: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"PEER_{name} is not a setting; did you mean PEER_{meant}\?"):
        load_settings({}, {**home, f"PEER_{name}": "x"})


def test_variables_that_others_set_with_our_prefix_are_none_of_our_business(home: dict[str, str]) -> None:
    port = ("PORT", *(f"PORT_7700_TCP{more}" for more in ("", "_ADDR", "_PORT", "_PROTO")))
    kubernetes = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_P2P", *port)
    names = (
        *kubernetes,
        *(f"LISTEN_{name}" for name in kubernetes),
        "ID",
        "HOME",
        "ADDRESS",
        "GAME",
        "STANDBY",
        "NAMES",
        "ROLL",
        "LISTENERS",
    )
    assert load_settings({}, {**home, **{f"PEER_{name}": "tcp://10.0.0.1:7700" for name in names}}) == load_settings({}, home)


@pytest.mark.parametrize(
    "line",
    [
        "threads = '2'",
        "threads = true",
        "threads = 1.5",
        "evaluate = 1",
        "evaluate = 'yes'",
        "name = 5",
        "bootstrap = 'a:1'",
        "bootstrap = [1]",
        "data_directory = 3",
        "threads = -1",
        "threads = 1000",
        "approve_invited = -1",
        "retire_after_days = 3651",
        "role = 'boss'",
        "engine = 'caffe'",
        "log_level = 'loud'",
        "log_format = 'xml'",
        "listen = 'nowhere'",
        "listen = '127.0.0.1:1,'",
        "listen = 'none,127.0.0.1:1'",
        f"listen = '{','.join(['127.0.0.1:0'] * 9)}'",
        "web_listen = 'nowhere'",
        "sign_up = 'closed'",
        "bootstrap = ['a:0']",
        "advertise = ['0.0.0.0:7700']",
        "advertise = ['peer.lab']",
        "advertise = ['a b:1']",
        "name = 'a\\u0007'",
        f"name = '{'n' * 65}'",
    ],
)
def test_a_bad_value_is_named_with_its_origin(tmp_path: Path, home: dict[str, str], line: str) -> None:
    file = write(tmp_path, line.replace("'", '"'))
    with pytest.raises(UserError) as caught:
        load_settings({}, home, file)
    assert line.split()[0] in str(caught.value)

    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_peer_that_accepts_no_connections_tells_nobody_to_dial_it(tmp_path: Path, home: dict[str, str]) -> None:
    assert load_settings({"listen": "none"}, home).config.listen == "none"
    assert load_settings({}, home, write(tmp_path, 'listen = ["127.0.0.1:1", "[::1]:1"]')).config.listen == "127.0.0.1:1,[::1]:1"
    with pytest.raises(UserError, match=r"advertise = .* accepts no connections"):
        load_settings({"listen": "none", "advertise": "example.org:7700"}, home)


@pytest.mark.parametrize(("name", "text"), [("PEER_THREADS", "two"), ("PEER_EVALUATE", "maybe"), ("PEER_DATA_DIRECTORY", "")])
def test_a_bad_variable_is_named(home: dict[str, str], name: str, text: str) -> None:
    with pytest.raises(UserError, match=name):
        load_settings({}, {**home, name: text})


def test_text_of_variables_becomes_typed_values(home: dict[str, str]) -> None:
    config = load_settings(
        {}, {**home, "PEER_EVALUATE": "no", "PEER_BOOTSTRAP": "a:1, [::1]:2", "PEER_APPROVE_INVITED": "3"}
    ).config
    assert (config.evaluate, config.bootstrap, config.approve_invited) == (False, ("a:1", "[::1]:2"), 3)


def test_what_is_no_role_is_refused_with_those_that_there_are(home: dict[str, str]) -> None:
    with pytest.raises(UserError, match="is not a valid role; choose one of voter, trainer, annotator, rlhf, full"):
        load_settings({"role": "judge"}, home)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, home: dict[str, str]) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_settings({}, home, tmp_path / "missing.toml")
    with pytest.raises(UserError, match="is not valid TOML"):
        load_settings({}, home, write(tmp_path, "name ="))


def test_what_is_shown_is_toml_that_gives_the_same_settings(tmp_path: Path, home: dict[str, str]) -> None:
    settings = load_settings(
        {"name": 'quo"te \\ ü', "bootstrap": "a:1,b:2", "evaluate": False, "threads": 3, "local_data": "/a b"}, home
    )
    text = format_settings(settings)
    assert set(tomllib.loads(text)) == set(setting_descriptions()) - {"data_directory"}
    assert load_settings({}, home, write(tmp_path, text)).config == settings.config
    assert "threads = 3  # command line" in text
    assert 'role = "full"  # default' in text


def test_without_a_near_name_all_are_listed() -> None:
    assert suggest_nearest("zzzz", ["alpha", "beta"]) == "; known: alpha, beta"


def test_an_empty_default_is_not_shown_as_a_value_of_listen() -> None:
    assert "\n- Default: empty\n" in describe_setting("advertise")
    assert "\n- Default: `auto`\n" in describe_setting("relay")
