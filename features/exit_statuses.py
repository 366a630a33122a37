"""Exit statuses of `peer` and their meanings. Commands with further meanings declare them beside their arguments."""

from __future__ import annotations

from typing import Final

SUCCESS: Final = 0
FAILURE: Final = 1  # exit status: the command ran, and its result is negative
USER_ERROR: Final = 2
DEGRADED: Final = 3  # exit status: the peer works only in part, or will soon fail
UNUSABLE: Final = 4  # exit status: the peer does not work until a person helps it
INTERRUPTED: Final = 130  # exit status after Ctrl-C: 128 + SIGINT, the convention of shells

COMMON_EXIT_STATUSES: Final = {
    SUCCESS: "The command succeeded",
    FAILURE: "The reader of standard output has closed it, as `head` does after its last line",
    USER_ERROR: "An error: one line on standard error names the value and the remedy",
    INTERRUPTED: "Ctrl-C ended the command",
}
