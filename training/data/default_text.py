"""The default text of a job: the language reference inside every Python, so that no download is needed."""

from __future__ import annotations

from pydoc_data import topics  # type: ignore[import-untyped,unused-ignore]


def default_text() -> bytes:
    """Return about 465 kB of English prose and Python code, the same on all installations of one Python release."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
