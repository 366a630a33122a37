"""The command `peer`. Ctrl-C prints one line and no traceback, even during imports of modules, which take 0.1 seconds or more."""

from __future__ import annotations

import contextlib
import sys


def main() -> int:
    """Run one command and return its exit status."""
    try:
        if sys.argv[1:] == ["--version"]:
            from peer.source_commit import describe_version

            with contextlib.suppress(OSError):  # the full command line below fails as well and prints the reason
                print(describe_version(), flush=True)
                return 0
        from peer import cli
    except KeyboardInterrupt:
        print("peer: interrupted", file=sys.stderr)
        return 130  # equals `features.exit_statuses.INTERRUPTED`: Ctrl-C may have interrupted the import of that module
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
