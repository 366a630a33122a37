"""The safety filter: it finds words of a list in a text, disguised spellings included.

A piece is a run of adjacent characters that look like letters. Its readings combine, in lower case, the readings of its
characters (`rlhf.moderation.confusables`). An entry of a list is one word, where `*` stands for any letters. An entry matches a
whole piece. Without its stars, an entry also matches adjacent pieces that look like one word that was split.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, BinaryIO, Final

from protocol.errors import UserError
from rlhf.data.dataset_files import read_rows
from rlhf.moderation import confusables

ENTRIES_MAX: Final = 10_000  # entries per list: every word is compared with all entries that begin with a star
ENTRY_CHARACTERS_MAX: Final = 64
READINGS_MAX: Final = 64  # readings tried per piece: otherwise a text of ambiguous letters would take minutes
PIECES_MAX: Final = ENTRY_CHARACTERS_MAX  # pieces that may form one split word
GAP_MAX: Final = 3  # characters between two pieces of a split word
APART_MIN: Final = 3  # least letters of a split word: shorter words would match everywhere
MASKED_MIN: Final = 4  # least letters of a word that has masked letters
ANY: Final = "\ufffd"  # reading of a masked letter, which may be any letter
MASKS: Final = "*#"
PICTURES: Final = 0x2190  # code point from which on marks are pictures; below it they are punctuation
WORD_MIN: Final = 5  # letters from which on a piece counts as an English word
SHORT_WORDS: Final = frozenset(confusables.SHORT_WORDS.split())
# Endings after an apostrophe in English, which do not begin a word.
SUFFIXES: Final = ("s", "t", "d", "m", "ll", "re", "ve", "em")
APOSTROPHES: Final = "'’ʼ`´‘＇"
INNER_SYMBOLS: Final = "@$€£¥¢§"  # symbols that are no punctuation between letters
REPEATED_LETTERS: Final = re.compile(r"(.)\1\1+", re.DOTALL)
LINES_MAX: Final = 10_000_000  # lines per file of texts, which is read line by line
EXAMPLE: Final = '{"id": 1, "text": "…"}'


# Lists --------------------------------------------------------------------------------------------------------------------


def parse_word_list(name: str, data: bytes) -> tuple[str, ...]:
    """Parse a list with one entry per line. Returns distinct entries in ascending order.

    Empty lines and lines that begin with # are ignored. Raises `UserError` for an invalid or empty list.
    """
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}:{data[: error.start].count(10) + 1}: not UTF-8 text: save the file as UTF-8") from None
    entries = set[str]()
    for number, line in enumerate(lines, 1):
        entry = line.strip()
        if entry and not entry.startswith("#"):
            if problem := entry_problem(entry):
                raise UserError(f"{name}:{number}: {problem}")
            entries.add(entry)
    if not entries:
        raise UserError(f"{name}: the file has no words: write one per line, with * for any letters")
    if len(entries) > ENTRIES_MAX:
        raise UserError(f"{name}: {len(entries)} words are more than {ENTRIES_MAX}: keep the most important ones")
    return tuple(sorted(entries))


def entry_problem(entry: str) -> str | None:
    if len(entry) > ENTRY_CHARACTERS_MAX:
        return f"{entry[:ENTRY_CHARACTERS_MAX]!r}… is longer than {ENTRY_CHARACTERS_MAX} characters"
    parts = entry.split("*")
    kinds = {unit.kind for part in parts for unit in _units(part)}
    if not any(parts) or not kinds <= {_CharacterKind.LETTER, _CharacterKind.DIGIT}:
        return f"{entry!r} is not a valid entry: use letters and digits, and * for any letters"
    return None


# Reading ------------------------------------------------------------------------------------------------------------------


class _CharacterKind(enum.Enum):
    LETTER = enum.auto()
    DIGIT = enum.auto()
    SYMBOL = enum.auto()  # punctuation that stands for a letter in leetspeak
    MASK = enum.auto()  # a star, # or a picture: stands for any letter in leetspeak
    STRANGE = enum.auto()  # a letter that looks like no Latin letter: stands for any letter in leetspeak
    SPACE = enum.auto()
    MARK = enum.auto()


DOUBTFUL: Final = {_CharacterKind.DIGIT, _CharacterKind.SYMBOL, _CharacterKind.MASK, _CharacterKind.STRANGE}


@dataclass(frozen=True, slots=True)
class _Character:
    """A character with its kind and its readings, the likeliest first."""

    raw: str
    kind: _CharacterKind
    readings: tuple[str, ...] = ()


class _LeetReading(enum.Enum):
    """The three ways to read digits and symbols in a text that may be leetspeak."""

    NUMBERS = enum.auto()  # A digit is a character of a word, and a symbol is punctuation.
    NOISE = enum.auto()  # A digit is punctuation, and so is a symbol.
    LETTERS = enum.auto()  # A digit or symbol stands for a letter.


@dataclass(slots=True)
class _WordPiece:
    before: list[_Character]  # characters between the previous piece and this one
    units: list[_Character] = field(default_factory=list)

    @property
    def raw(self) -> str:
        return "".join(unit.raw for unit in self.units)

    @property
    def gap(self) -> str:
        return "".join(unit.raw for unit in self.before)

    @property
    def is_single(self) -> bool:
        return len(self.units) == 1

    @property
    def is_near(self) -> bool:
        return len(self.before) <= GAP_MAX

    @property
    def is_glued(self) -> bool:
        return self.is_near and all(unit.kind is not _CharacterKind.SPACE for unit in self.before)

    @property
    def is_after_space(self) -> bool:
        return all(unit.kind is _CharacterKind.SPACE for unit in self.before)

    @property
    def is_suffix(self) -> bool:
        return len(self.before) == 1 and self.before[0].raw in APOSTROPHES and self.raw.lower() in SUFFIXES

    def words(self) -> Iterator[str]:
        """Return the readings of the piece, the likeliest first. A piece longer than any entry has only its likeliest reading."""
        if len(self.units) > ENTRY_CHARACTERS_MAX:
            return iter(["".join(unit.readings[0] for unit in self.units)])
        has_small = any("a" <= unit.raw <= "z" and unit.raw != "l" for unit in self.units)
        has_capital = any("A" <= unit.raw <= "Z" and unit.raw != "I" for unit in self.units)
        readings = [unit.readings for unit in self.units]
        for place, unit in enumerate(self.units):
            if unit.raw == "I" and place and has_small:
                readings[place] = ("i", "l")
            elif unit.raw == "l" and has_capital and not has_small:
                readings[place] = ("l", "i")
        return map("".join, itertools.islice(itertools.product(*readings), READINGS_MAX))

    def trimmed(self) -> Iterator[_WordPiece]:
        """Yield the piece, and the piece without symbols at its ends, because these may be punctuation, as in `hit!`."""
        yield self
        inner = [place for place, unit in enumerate(self.units) if unit.kind not in (_CharacterKind.SYMBOL, _CharacterKind.MASK)]
        if inner and inner[-1] + 1 < len(self.units):
            yield _WordPiece(self.before, self.units[: inner[-1] + 1])
        if inner and inner[0]:
            yield _WordPiece(self.before, self.units[inner[0] : inner[-1] + 1])


_READINGS = confusables.letter_readings()
_DIGITS = {chr(first + digit): str(digit) for first in (ord("0"), *confusables.DIGIT_RUNS) for digit in range(10)}


@lru_cache(maxsize=1 << 16)
def _unit(character: str) -> _Character | None:
    """Classify a character. Returns None for an invisible one."""
    if character in confusables.SPACES:
        return _Character(character, _CharacterKind.SPACE)
    if character in _READINGS:
        return _Character(character, _CharacterKind.LETTER, _READINGS[character])
    number, digit = ord(character), _DIGITS.get(character)
    if digit is not None:
        return _Character(character, _CharacterKind.DIGIT, (digit, *confusables.DIGITS[digit]))
    if character in confusables.SYMBOLS:
        return _Character(character, _CharacterKind.SYMBOL, tuple(confusables.SYMBOLS[character]))
    if _is_in(number, confusables.INVISIBLE):
        return None
    if _is_in(number, confusables.MARKS):
        return _Character(
            character, _CharacterKind.MASK if character in MASKS or number >= PICTURES else _CharacterKind.MARK, (ANY,)
        )
    # `lower` depends on Python's version of Unicode. Scripts with cases below U+0600 are complete in all supported versions, so
    # `lower` gives the same result there.
    return _Character(character, _CharacterKind.STRANGE, (character.lower() if number < 0x600 else character,))


def _read(unit: _Character, leet: _LeetReading) -> _Character:
    """Return the character as one way of reading sees it.

    In leetspeak, a strange letter is any letter. In the other ways, a digit has one reading.
    """
    if leet is _LeetReading.LETTERS:
        return replace(unit, kind=_CharacterKind.MASK, readings=(ANY,)) if unit.kind is _CharacterKind.STRANGE else unit
    return replace(unit, readings=unit.readings[:1]) if unit.kind is _CharacterKind.DIGIT else unit


def _is_in(number: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(first <= number <= last for first, last in ranges)


def _units(text: str) -> Iterator[_Character]:
    return (unit for unit in map(_unit, text) if unit is not None)


def _pieces(units: Iterable[_Character], leet: _LeetReading) -> list[_WordPiece]:
    pieces, between, is_open = list[_WordPiece](), list[_Character](), False
    for unit in units:
        is_letter = _is_letter(unit, leet)
        if not is_letter:
            between.append(unit)
        elif not is_open:
            pieces.append(_WordPiece(between, [unit]))
            between = []
        else:
            pieces[-1].units.append(unit)
        is_open = is_letter
    return pieces


def _is_letter(unit: _Character, leet: _LeetReading) -> bool:
    match unit.kind:
        case _CharacterKind.LETTER | _CharacterKind.STRANGE:
            return True
        case _CharacterKind.DIGIT:
            return leet is not _LeetReading.NOISE
        case _CharacterKind.SYMBOL | _CharacterKind.MASK:
            return leet is _LeetReading.LETTERS
    return False


# Finding ------------------------------------------------------------------------------------------------------------------


class WordMatcher:
    def __init__(self, entries: Sequence[str]) -> None:
        """Build the tables for matching `entries`, which must be valid (`entry_problem`)."""
        self._whole: dict[str, str] = {}  # reading of an entry without a star -> entry
        # Part of an entry before its first star -> (all its parts, entry).
        self._starred: dict[str, list[tuple[list[str], str]]] = {}
        self._taken_apart: dict[str, str] = {}  # reading of an entry with its stars removed -> entry
        self._of_length: dict[int, list[str]] = {}  # length -> keys of `_taken_apart` of this length
        self._goes_on: dict[str, None] = {}  # keys of `_taken_apart` whose entry ends with a star
        self._starts: set[str] = {""}  # all prefixes of the keys of `_taken_apart`
        for entry in entries:
            parts = ["".join(unit.readings[0] for unit in _units(part)) for part in entry.split("*")]
            if len(parts) == 1:
                self._whole.setdefault(parts[0], entry)
            else:
                self._starred.setdefault(parts[0], []).append((parts, entry))
            bare = "".join(parts)
            if bare not in self._taken_apart:
                self._taken_apart[bare] = entry
                self._of_length.setdefault(len(bare), []).append(bare)
            self._starts.update(bare[:end] for end in range(1, len(bare) + 1))
            if not parts[-1]:
                self._goes_on[bare] = None

    def find_entry(self, text: str) -> str | None:
        """Return an entry that the text contains, or None."""
        units = list(_units(text))
        kinds = {unit.kind for unit in units}
        return next(
            (
                found
                for leet in _LeetReading
                if leet is _LeetReading.NUMBERS or kinds & DOUBTFUL
                for found in self._found(units, leet)
            ),
            None,
        )

    def _found(self, units: Sequence[_Character], leet: _LeetReading) -> Iterator[str]:
        pieces = _pieces((_read(unit, leet) for unit in units), leet)
        for place, piece in enumerate(pieces):
            if leet is _LeetReading.LETTERS:
                whole = [read for read in piece.trimmed() if _is_leetspeak(read.units)]
            else:
                whole = [] if _is_part(pieces, place) else [piece]
            for read in whole:
                yield from filter(None, map(self._entry, read.words()))
        for run in _runs(pieces):
            yield from filter(None, map(self._entry, run.words()))
        for first in range(len(pieces)):
            yield from self._joined(pieces, first)

    def _entry(self, word: str) -> str | None:
        if ANY in word:
            shorter = (bare for bare in self._goes_on if len(bare) < len(word) and ANY not in word[len(bare) :])
            alike = itertools.chain(self._of_length.get(len(word), ()), shorter)
            return next((self._taken_apart[bare] for bare in alike if _is_masked(word, bare)), None)
        for read in dict.fromkeys((word, *_shortened(word))):
            if read in self._whole:
                return self._whole[read]
            for end in range(min(len(read), ENTRY_CHARACTERS_MAX) + 1):
                for parts, entry in self._starred.get(read[:end], ()):
                    if _fits(parts, read):
                        return entry
        return None

    def _joined(self, pieces: Sequence[_WordPiece], first: int) -> Iterator[str]:
        """Yield entries that consist of the piece at `first` and pieces after it.

        Only a star at the end of an entry allows more letters.
        """
        window, read = list[_WordPiece](), {"": None}
        for piece in pieces[first : first + PIECES_MAX]:
            if window and not (piece.is_near and not piece.is_suffix and not window[-1].is_suffix):
                return
            open_ = (start for start in read if piece.is_glued or start not in self._goes_on)
            grown = (self._grown(start, word) for start in open_ for word in piece.words())
            read = dict.fromkeys(found for found in grown if found)
            if not read:
                return
            window.append(piece)
            if len(window) > 1 and _was_one_word(pieces, first, first + len(window)):
                yield from (self._taken_apart[word] for word in read if word in self._taken_apart)

    def _grown(self, start: str, word: str) -> str | None:
        """Append a piece's reading `word` to `start`, a prefix of an entry.

        Return the longer prefix, or None if no entry begins with it.
        """
        whole = start + word
        if start in self._goes_on:
            return start
        if whole in self._starts:
            return whole
        return next((whole[:end] for end in range(len(start) + 1, len(whole)) if start and whole[:end] in self._goes_on), None)


def _is_masked(word: str, bare: str) -> bool:
    return all(read in (letter, ANY) for read, letter in zip(word, bare, strict=False))


def _is_part(pieces: Sequence[_WordPiece], place: int) -> bool:
    """Return True if only digits or inner symbols separate the piece at `place` from a neighbour, as with `tit` in `tit1e`."""
    return any(
        bool(piece.before) and all(unit.kind is _CharacterKind.DIGIT or unit.raw in INNER_SYMBOLS for unit in piece.before)
        for piece in pieces[max(place, 1) : place + 2]
    )


def _runs(pieces: Sequence[_WordPiece]) -> Iterator[_WordPiece]:
    """Yield each run of separated single letters as one piece.

    If an `a` or `I` is at an end, also yield the run without it, because it may be a word.
    """
    first = 0
    while first < len(pieces):
        end = first + 1
        while end < min(len(pieces), first + PIECES_MAX) and _is_run(pieces[first : end + 1]):
            end += 1
        # A run does not count if no space separates it from the piece before or after it.
        is_whole = not (first and pieces[first].is_glued) and not (end < len(pieces) and pieces[end].is_glued)
        starts = (first, first + 1) if pieces[first].raw in "aAiI" else (first,)
        stops = (end, end - 1) if pieces[end - 1].raw in "aAiI" else (end,)
        for start, stop in itertools.product(starts, stops):
            units = [unit for piece in pieces[start:stop] for unit in piece.units]
            if is_whole and len(units) >= APART_MIN and _is_leetspeak(units):
                yield _WordPiece(pieces[start].before, units)
        first = end


def _is_run(pieces: Sequence[_WordPiece]) -> bool:
    """Return True if all pieces are single letters, and their gaps are equal or consist of marks alone."""
    inner = pieces[1:]
    alike = inner[1:] if pieces[0].raw in "aAiI" else inner
    if not all(piece.is_single for piece in pieces) or not all(piece.is_near for piece in inner):
        return False
    return len({piece.gap for piece in alike}) <= 1 or all(piece.is_glued for piece in alike)


def _was_one_word(pieces: Sequence[_WordPiece], first: int, end: int) -> bool:
    """Return True if the pieces from `first` to `end` look like one split word, and not like separate words.

    False for single letters alone.
    """
    window, inner = pieces[first:end], pieces[first + 1 : end]
    units = [unit for piece in window for unit in piece.units]
    if len(units) < APART_MIN or len(units) == len(window) or any(unit.kind is _CharacterKind.DIGIT for unit in units):
        return False
    if (first and pieces[first].is_glued) or (end < len(pieces) and pieces[end].is_glued):
        return False
    if all(piece.is_glued for piece in inner):
        return True
    if first and pieces[first - 1].is_single and pieces[first].is_near and pieces[first - 1].raw not in "aAiI":
        return False
    raw = [piece.raw for piece in window]
    if not all(piece.is_glued or piece.is_after_space for piece in inner) or not _is_of_one_case("".join(raw)):
        return False
    return any(len(piece) < WORD_MIN and piece.lower() not in SHORT_WORDS for piece in raw)


def _is_of_one_case(raw: str) -> bool:
    return not (any("a" <= letter <= "z" for letter in raw) and any("A" <= letter <= "Z" for letter in raw))


def _is_leetspeak(units: Sequence[_Character]) -> bool:
    """Return True if enough characters are letters for a word in leetspeak.

    With more digits, they are a number, or a name such as A55.
    """
    digits, masks = (sum(unit.kind is kind for unit in units) for kind in (_CharacterKind.DIGIT, _CharacterKind.MASK))
    if masks and (len(units) < MASKED_MIN or 2 * masks > len(units) or not any(unit.raw.isascii() for unit in units)):
        return False
    return any(unit.kind in (_CharacterKind.LETTER, _CharacterKind.STRANGE) for unit in units) and 5 * digits <= 3 * len(units)


def _fits(parts: Sequence[str], word: str) -> bool:
    """Return True if the word begins with the first part, ends with the last, and has the others between them in order."""
    head, *middle, tail = parts
    at, stop = len(head), len(word) - len(tail)
    if at > stop or not word.startswith(head) or not word.endswith(tail):
        return False
    for part in middle:
        found = word.find(part, at, stop)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _shortened(word: str) -> tuple[str, ...]:
    """Return the word with each letter that is repeated three times or more reduced to one, and to two.

    English words have no such repetition.
    """
    return (REPEATED_LETTERS.sub(r"\1", word), REPEATED_LETTERS.sub(r"\1\1", word)) if REPEATED_LETTERS.search(word) else ()


# Files --------------------------------------------------------------------------------------------------------------------


def filter_jsonl(entries: Sequence[str], name: str, stream: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield `id`, `blocked` and `word`, the entry found, for each line of JSONL with `id` and `text`.

    Raises `UserError` for an invalid line.
    """
    words = WordMatcher(entries)
    for number, row in read_rows(name, stream, EXAMPLE, LINES_MAX):
        text = row.get("text")
        if not isinstance(text, str) or "id" not in row:
            raise UserError(f"{name}:{number}: a line needs an id and a text, such as {EXAMPLE}")
        found = words.find_entry(text)
        yield {"id": row["id"], "blocked": found is not None, "word": found}
