"""What may be a name: nothing that a screen shows otherwise than it is."""

from __future__ import annotations

import pytest

from protocol.errors import RemoteProtocolError
from protocol.name_validation import check_name, name_problem


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
    with pytest.raises(RemoteProtocolError, match=r"bad-name: .* holds the character U\+[0-9A-F]{4,}") as caught:
        check_name(name)
    assert str(caught.value).isascii()


@pytest.mark.parametrize("name", [" anna", "anna ", " "])
def test_spaces_that_nobody_sees_are_refused(name: str) -> None:
    assert name_problem(name) == "begins or ends with a space"
