"""Sets of preferences or of instruction examples: their bytes, their parsing from files, and their held-out part.

A set is a sequence of records with ascending ids. Each record is preceded by its length in bytes (u32, big-endian). Peers
exchange a set like a training text: in shards under a `training.corpus.DataManifest`. The manifest's digest is the name of the
set.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, BinaryIO, Final, TypeVar

from curation.limits import PAGE_TASKS_MAX, PAGES_MAX, TEXT_CHARACTERS_MAX
from curation.tasks.task_pages import Text
from protocol import codec
from protocol.codec import Between, Length
from protocol.errors import RemoteProtocolError, UserError
from rlhf.data.dataset_files import LINE_BYTES_MAX, InvalidLines, is_positive_example, read_records, to_plain_texts

PERMILLE: Final = 1_000
HELD_OUT_PERMILLE: Final = 100  # of 1,000 prompts, the number used only for measurements
PAIRS_MAX: Final = PAGES_MAX * PAGE_TASKS_MAX  # pairs of a set: the maximum number of tasks of a project, a million
UTF8_BYTES_MAX: Final = 4  # largest number of bytes of a character in UTF-8
PAIR_BYTES_MAX: Final = 3 * UTF8_BYTES_MAX * TEXT_CHARACTERS_MAX + 64  # three texts, and less than 64 bytes for id and `p`
assert 3 * 2 * len(r"\uXXXX") * TEXT_CHARACTERS_MAX < LINE_BYTES_MAX, "a line holds any three texts, however they are escaped"
LENGTH_BYTES: Final = 4
RESPONSE_EXAMPLE: Final = '{"prompt": "…", "response": "…"}'
PAIR_EXAMPLE: Final = '{"prompt": "…", "chosen": "…", "rejected": "…"}'


@dataclass(frozen=True, slots=True)
class PreferencePair:
    id: Annotated[bytes, Length(1, 32)]  # id of the pair's task in a project, or line number in a file as u64, big-endian
    prompt: Text
    first: Text
    second: Text
    p: Annotated[int, Between(0, PERMILLE)]  # probability, in permille, that the first response is better; 500: a tie

    @property
    def responses(self) -> tuple[str, ...]:
        return self.first, self.second


@dataclass(frozen=True, slots=True)
class InstructionExample:
    id: Annotated[bytes, Length(1, 32)]  # line number in a file as u64, big-endian
    prompt: Text
    response: Text

    @property
    def responses(self) -> tuple[str, ...]:
        return (self.response,)


PromptRecord = PreferencePair | InstructionExample  # a prompt with its responses
R = TypeVar("R", bound=PromptRecord)


# A set as bytes -----------------------------------------------------------------------------------------------------------


def encode_records(records: Iterable[PromptRecord]) -> Iterator[bytes]:
    """Yield the bytes of a set in pieces. The ids of the records must ascend."""
    for record in records:
        data = codec.encode(record)
        yield len(data).to_bytes(LENGTH_BYTES, "big") + data


def decode_records(stream: BinaryIO, kind: type[R]) -> list[R]:
    """Return the records of a set. Raises `RemoteProtocolError` for invalid bytes."""
    records: list[R] = []
    while head := stream.read(LENGTH_BYTES):
        size = int.from_bytes(head, "big")
        data = stream.read(size) if len(head) == LENGTH_BYTES and size <= PAIR_BYTES_MAX else b""
        if not data or len(data) < size:
            raise _bad("it ends within a record")
        record = codec.decode(kind, data, PAIR_BYTES_MAX)
        if not all(record.responses):
            raise _bad("a response is empty")
        if records and records[-1].id >= record.id:
            raise _bad("its ids do not ascend")
        if len(records) == PAIRS_MAX:
            raise _bad(f"it has more than {PAIRS_MAX} records")
        records.append(record)
    if not records:
        raise _bad("it is empty")
    return records


def _bad(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("bad-preferences", detail)


# From a file --------------------------------------------------------------------------------------------------------------


def read_preference_file(name: str, stream: BinaryIO, misfits: InvalidLines | None = None) -> list[PreferencePair]:
    """Read pairs from JSONL with `prompt`, `chosen`, `rejected` and optionally `p`, or in another form of `dataset_files`.

    `p` is the probability that the chosen response is better, by default 1. Empty lines and other fields are ignored. Raises
    `UserError` with the first invalid lines, unless `misfits` leaves them out.
    """

    def make(number: int, row: dict[str, Any]) -> PreferencePair:
        where = f"{name}:{number}"
        row = to_plain_texts(where, row)
        prompt, chosen, rejected = (checked_text(where, row, field) for field in ("prompt", "chosen", "rejected"))
        return PreferencePair(number.to_bytes(8, "big"), prompt, chosen, rejected, _permille(where, row.get("p", 1)))

    return read_records(name, stream, "pair", PAIR_EXAMPLE, PAIRS_MAX, make, misfits or InvalidLines())


def read_examples(name: str, stream: BinaryIO, misfits: InvalidLines | None = None) -> list[InstructionExample]:
    """Read examples from JSONL with `prompt` and `response`, or in another form of `dataset_files`.

    Examples with a bad label are left out. Raises `UserError` with the first invalid lines, unless `misfits` leaves them out.
    """

    def make(number: int, row: dict[str, Any]) -> InstructionExample | None:
        where = f"{name}:{number}"
        if not is_positive_example(where, row):
            return None
        row = to_plain_texts(where, row)
        return InstructionExample(
            number.to_bytes(8, "big"), checked_text(where, row, "prompt"), checked_text(where, row, "response")
        )

    return read_records(name, stream, "response", RESPONSE_EXAMPLE, PAIRS_MAX, make, misfits or InvalidLines())


def checked_text(where: str, row: dict[str, Any], field: str) -> str:
    text = row.get(field)
    if not isinstance(text, str) or not (text or field == "prompt"):
        what = "a text" if field == "prompt" else "a text that is not empty"
        raise UserError(f"{where}: {field} must be {what}, not {json.dumps(text)[:64]}")
    if len(text) > TEXT_CHARACTERS_MAX:
        raise UserError(f"{where}: {field} has {len(text)} characters, more than {TEXT_CHARACTERS_MAX}")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where}: {field} has half a surrogate pair, which is not a character")
    return text


def _permille(where: str, p: Any) -> int:
    if not isinstance(p, int | float) or isinstance(p, bool) or not 0 <= p <= 1:  # NaN fails the comparison
        raise UserError(f"{where}: p must be a number in 0..1, not {json.dumps(p)[:64]}")
    return round(PERMILLE * p)


# Held-out records ---------------------------------------------------------------------------------------------------------


def is_held_out(prompt: str, permille: int = HELD_OUT_PERMILLE) -> bool:
    """Return True if a hash of the prompt selects it for measurements.

    So, in every set, all records with one prompt are on the same side of the split.
    """
    digest = hashlib.sha256(b"folkmoot/held-out/1" + prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") % PERMILLE < permille


def split_held_out(records: Sequence[R], permille: int = HELD_OUT_PERMILLE) -> tuple[list[R], list[R]]:
    """Split a set into training records and held-out records. Raises `UserError` if no training record is left.

    The split is by prompt. If one side would be empty, because there are few prompts, the split is by record.
    """
    sides = [is_held_out(record.prompt, permille) for record in records]
    if 0 < permille < PERMILLE and len(set(sides)) == 1:
        sides = _held_out_alone(records, permille)
    train, held_out = (
        [record for record, side in zip(records, sides, strict=True) if side is wanted] for wanted in (False, True)
    )
    if not train:
        raise UserError(
            "all pairs are held out, since prompts are held out as a whole: give more prompts, or a smaller held_out_permille"
        )
    return train, held_out


def _held_out_alone(records: Sequence[R], permille: int) -> list[bool]:
    """Return for each record whether it is held out, by a hash of the record's texts. In a small set, no record is held out."""
    texts = (("folkmoot/held-out/2", record.prompt, *record.responses) for record in records)
    keys = [hashlib.sha256(codec.encode(text)).digest() for text in texts]
    distinct = sorted(set(keys))  # equal records stay on one side
    held_out = set(distinct[: len(distinct) * permille // PERMILLE])
    return [key in held_out for key in keys]


def rounds_for_epochs(epochs: int, pairs: int, *, trainers: int, steps: int, batch: int) -> int:
    """Return the number of rounds in which `trainers` trainers together draw at least `epochs` · `pairs` pairs."""
    return math.ceil(Fraction(epochs * pairs, trainers * steps * batch))
