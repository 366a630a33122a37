"""Reads the sets of responses that supervised objectives learn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from rlhf.data.preference_sets import PreferencePair
from rlhf.data.tokenized_records import InstructionExample, TokenizedResponses, open_preference_set, tokenize_responses
from rlhf.objectives.supervised_objectives import DPO, INSTRUCT
from training.data.tokenizer import Tokenizer
from training.job_spec import JobSpec

# By the name of the objective, a record of its set.
RECORD_TYPES: Final[dict[str, type[InstructionExample] | type[PreferencePair]]] = {
    INSTRUCT.name: InstructionExample,
    DPO.name: PreferencePair,
}


def open_responses(
    spec: JobSpec,
    path: Path,
    tokenizer: Tokenizer,
    on_block: Callable[[], None] = lambda: None,
    tokenized: bool = False,
    named: bytes | None = None,
) -> TokenizedResponses:
    """As `training.corpus.open_tokens`, of a file with a set."""
    return open_preference_set(
        path,
        RECORD_TYPES[spec.objective],
        lambda records: tokenize_responses(spec, records, tokenizer, on_block),
        tokenized,
        named,
    )
