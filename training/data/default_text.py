"""The text of a job that names none: the language reference that ships inside every Python, so that nothing is downloaded."""

from __future__ import annotations

from pydoc_data import topics  # type: ignore[import-untyped,unused-ignore]


def default_text() -> bytes:
    """About 465 kB of English and Python, the same bytes on every installation of one Python release."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
