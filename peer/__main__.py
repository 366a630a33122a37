"""The command `peer`. Ctrl-C ends it in one line also while its modules are imported, which takes tenths of a second."""

from __future__ import annotations

import contextlib
import sys

from peer import VERSION


def main() -> int:
    """Run one command and return its exit status."""
    try:
        if sys.argv[1:] == ["--version"]:
            with contextlib.suppress(OSError):  # the command line fails at it again, and says why
                print(f"folkmoot {VERSION}", flush=True)
                return 0
        from peer import cli
    except KeyboardInterrupt:
        print("peer: interrupted", file=sys.stderr)
        return 130  # as `peer.commands.standard_streams.EXIT_INTERRUPTED`: its import may be the interrupted one
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
