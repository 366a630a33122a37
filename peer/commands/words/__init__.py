"""The words of this program: those that every peer understands, a module for each topic, and those of its features."""

from __future__ import annotations

from features.lazily import named
from features.words import Word, words_of
from peer.commands.words import audits, jobs, joining, members, models, network, prompt, tables, texts, this_peer
from peer.features import FEATURES

TOPICS = (this_peer, jobs, audits, members, joining, texts, models, tables, network)  # in the order in which the help lists them


def words() -> dict[str, Word]:
    """All words, by name; last those that are about the prompt itself."""
    found: dict[str, Word] = {}
    of_features = (named(feature.words) for feature in FEATURES if feature.words)
    for topic in (*TOPICS, *of_features, prompt):
        for word in words_of(topic):
            assert word.name not in found, f"two declarations of the word {word.name!r}"
            found[word.name] = word
    return found
