from __future__ import annotations

import contextlib
import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.addresses import (
    check_dialable_address,
    format_address,
    format_listen_addresses,
    host_subnet,
    is_loopback,
    parse_address,
)
from protocol.errors import RemoteProtocolError, UserError
from protocol.name_validation import check_name, name_problem


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.b:1", ("a.b", 1)),
        ("[::1]:7700", ("::1", 7700)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("example.org:1", ("example.org", 1)),
        ("peer-1.lab:65535", ("peer-1.lab", 65535)),
        ("x" * 63 + ".org:80", ("x" * 63 + ".org", 80)),
    ],
)
def test_an_address_survives_parsing(text: str, parts: tuple[str, int]) -> None:
    assert parse_address(text) == parts
    assert format_address(*parts) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "host:", ":1", "a:b", "a:65536", "a:-1", "::1:7700", "a:1:2", "a:\u00b2", "host:\u0663", "a:000001"),
        *("a b:1", "a/b:1", "a..b:1", "-a:1", "a\x1b[2J:1", "\u212a:1", "ü.org:1", "999.1.1.1:1", "1.2.3:1", "[1.2.3.4]:1"),
        *("x" * 64 + ".org:1", "a." * 127 + "org:7700"),
        *("[fe80::1%é]:7700", "[fe80::1%a b]:7700", "[fe80::1%eth0]:7700", "[fe80::1%]:1"),
    ],
)
def test_what_is_no_address_is_named_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="is not an address") as caught:
        parse_address(text, "listen: ")
    assert str(caught.value).startswith("listen: ")
    assert len(str(caught.value)) < 256


@pytest.mark.parametrize(("text", "why"), [("a:0", "port 0"), ("0.0.0.0:7700", "every interface"), ("[::]:1", "every interface")])
def test_nobody_is_told_to_dial_what_nobody_can_dial(text: str, why: str) -> None:
    with pytest.raises(UserError, match=f"advertise: .*{why}"):
        check_dialable_address(text, "advertise")


@pytest.mark.parametrize(
    ("listening", "told", "words"),
    [
        ((), (), "accepts no connections, only dials other peers"),
        (("a:1", "[::1]:2"), ("a:1", "[::1]:2"), "listens on a:1, [::1]:2"),
        (("0.0.0.0:1",), (), "listens on 0.0.0.0:1"),
        (("a:4711",), ("b:1", "c:2"), "listens on a:4711 (announced as b:1, c:2)"),
    ],
)
def test_where_a_peer_listens_and_what_others_are_told_are_said_apart(
    listening: tuple[str, ...], told: tuple[str, ...], words: str
) -> None:
    assert format_listen_addresses(listening, told) == words


def test_loopback_is_known_by_address_and_by_name() -> None:
    assert [host for host in ("127.0.0.2", "::1", "LocalHost", "10.0.0.1", "fe80::1", "a.org") if is_loopback(host)] == [
        "127.0.0.2",
        "::1",
        "LocalHost",
    ]


HOSTS = st.one_of(
    st.text(max_size=70),
    st.from_regex(r"\[[0-9a-f:.%]{1,45}.{0,4}\]"),
    st.from_regex(r"[a-z0-9_.-]{1,70}"),
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)


@settings(max_examples=500)
@given(HOSTS, st.integers(0, 70_000))
def test_whatever_is_accepted_is_an_ip_address_or_a_name_that_a_resolver_takes(host: str, port: int) -> None:
    """Peers dial addresses from others. A name that no resolver accepts would raise an error that no dial expects."""
    with contextlib.suppress(UserError):
        found, _ = parse_address(f"{host}:{port}")
        assert found.isascii() and "%" not in found
        if ":" in found:
            ipaddress.IPv6Address(found)
        else:
            found.encode("idna")


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
        ("2001:db8:1:3::1", "2001:db8:1:3::"),
        ("example.org", "example.org"),
    ],
)
def test_the_hosts_of_a_network_of_ipv6_are_one_for_budgets(host: str, site: str) -> None:
    assert host_subnet(host) == site


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["anna", "Ö. Ünal-Çelik 2", "עברית", "東京", "[bold]ben", "a b", "'\"\\", "🦊"])
def test_names_of_all_languages_are_fine(name: str) -> None:
    assert name_problem(name) is None
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "a\x1b[2Jb",
        "a\nb",
        "\x9b31m",
        "a\x7f",
        "a\u202eb",
        "a\u2066b",
        "a\u200bb",
        "\ufeffa",
        "a\u00a0b",
        "a\u2028b",
        "a\U000e0041",
        "\udcff",
    ],
)
def test_what_commands_a_terminal_turns_the_line_or_hides_is_refused_and_named(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=r"bad-name: .* contains the character U\+[0-9A-F]{4,}") as caught:
        check_name(name)
    assert str(caught.value).isascii()


@pytest.mark.parametrize("name", [" anna", "anna ", " "])
def test_spaces_that_nobody_sees_are_refused(name: str) -> None:
    assert name_problem(name) == "begins or ends with a space"
