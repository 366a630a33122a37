"""The words that every peer understands, a module for each topic, in the order in which the help lists them."""

from __future__ import annotations

from features.words import Word, words_of
from peer.commands.words import audits, jobs, joining, members, models, prompt, this_peer

TOPICS = (this_peer, jobs, audits, members, joining, models)


def words() -> dict[str, Word]:
    """All words, by name; last those that are about the prompt itself."""
    found: dict[str, Word] = {}
    for topic in (*TOPICS, prompt):
        for word in words_of(topic):
            assert word.name not in found, f"two declarations of the word {word.name!r}"
            found[word.name] = word
    return found
