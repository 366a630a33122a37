"""The card of a model that somebody takes home: README.md, as model hubs show it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from peer.export.model_provenance import ExportableModel
from training.api.job_notes import preparation_notes
from training.data.tokenizer import END_OF_TEXT, BpeVocabulary
from training.job_spec import AggregationRule, AuditMode, JobSpec
from training.transformer import FIRST_TOKEN_VECTOR

TRANSFORMERS, GGUF = "transformers", "gguf"
NOT_NAMED: Final = "not named"

FULL_AUDIT_TEXT: Final = (
    "k voters re-executed each update before the vote and signed for it, and the others relied on these signatures (k is the "
    "number of liars that the votes tolerate, one more for a trainer without a vote)"
)
_SNIPPET: Final = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForCausalLM.from_pretrained("DIR")
prompt = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```"""
_SCORING: Final = """```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForSequenceClassification.from_pretrained("DIR")
print(model(**tokenizer("a prompt and a response", return_tensors="pt")).logits)
```"""
_LLAMA_CPP: Final = """    llama-cli --model model.gguf --prompt "The " --n-predict 64 --no-conversation"""


def model_card(found: ExportableModel, vocabulary: BpeVocabulary, format: str, left_out: tuple[str, ...]) -> str:
    """In Markdown. `left_out` are the job's vectors that the files do not have."""
    spec = found.spec
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _rows(found, vocabulary, left_out))
    how = _LLAMA_CPP if format != TRANSFORMERS else _SNIPPET if spec.resolved_objective.makes_text else _SCORING
    where = "" if format != TRANSFORMERS else ", where `DIR` is this folder"
    return f"""---
{_front_matter(found, format)}
---

# {_cell(spec.name)}, round {found.round}

Trained with Folkmoot by people who need not trust each other: two thirds of the voters decided every round.

| | |
|---|---|
{rows}

Open it{where}:

{how}
"""


def _front_matter(found: ExportableModel, format: str) -> str:
    licence = [f"license: {json.dumps(found.spec.licence)}"] if found.spec.licence else []
    kind = "text-generation" if found.spec.resolved_objective.makes_text else "text-classification"
    library = "transformers" if format == TRANSFORMERS else "gguf"
    return "\n".join([*licence, f"library_name: {library}", f"pipeline_tag: {kind}", "tags: [folkmoot]"])


def _rows(found: ExportableModel, vocabulary: BpeVocabulary, left_out: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    spec = found.spec
    yield "job", f"{spec.name}, `{found.job.hex()}`"
    yield "objective", f"{spec.objective}: {spec.resolved_objective.description}"
    yield "round", f"{found.round if found.rounds_in_model is None else found.rounds_in_model} of {spec.rounds}"
    yield "model root", f"`{found.root.hex()}`"
    yield "network", f"{found.network}, chain id `{found.chain_id}`"
    yield "taken from", found.source_text
    yield "parameters", f"{spec.model.parameters:,}"
    yield "tokens", _tokens(spec, vocabulary)
    yield "data", _data(found)
    yield "licence", spec.licence or NOT_NAMED
    if found.accepted is not None:
        yield "proposals", f"{found.accepted} accepted, {found.rejected} rejected, {found.absent} absent"
    yield "audit", _audit(spec)
    missing = "not measured by this peer" if found.accepted is not None else "an export has no measurements"
    yield from spec.resolved_objective.metric_rows(found.figures, missing)
    stop = stop_token(spec, vocabulary)
    if stop is not None:
        yield "a text ends with", f"token {stop}{f', `{END_OF_TEXT}`' if stop == vocabulary.end_of_text else ''}"
    for note in preparation_notes(spec):
        yield "set", note
    if left_out:
        yield "left out", f"{', '.join(left_out)}: vectors that the objective trained beside the transformer{_of_first(left_out)}"


def stop_token(spec: JobSpec, vocabulary: BpeVocabulary) -> int | None:
    """The token that ends a text: that of the job, or else that of its tokenizer."""
    stop = spec.resolved_objective.stop_token(spec)
    return vocabulary.end_of_text if stop is None else stop


def _tokens(spec: JobSpec, vocabulary: BpeVocabulary) -> str:
    if spec.tokenizer is not None:
        return f"{spec.model.vocabulary}, tokenizer `{spec.tokenizer.hex()}`"
    return "the 256 bytes" if vocabulary.end_of_text is None else "the 256 bytes and the end of a text"


def _of_first(left_out: tuple[str, ...]) -> str:
    added = "the job added it to the embedding of the first token, so that these files give other logits than the job's model"
    return f"; {FIRST_TOKEN_VECTOR} changes what the model says: {added}" if FIRST_TOKEN_VECTOR in left_out else ""


def _data(found: ExportableModel) -> str:
    spec = found.spec
    if spec.data is None:
        return "each trainer's own text" if spec.resolved_objective.reads_text else "none beside the prompts"
    return f"`{spec.data.hex()}` (SHA-256 of its manifest){f', {found.data_origin}' if found.data_origin else ''}"


def _audit(spec: JobSpec) -> str:
    against = "" if spec.rule is AggregationRule.MEAN else f" against {spec.byzantine_max} liars"
    rule = f"updates were aggregated by {spec.rule.value}{against}"
    match spec.audit:
        case AuditMode.FULL:
            return f"full: {FULL_AUDIT_TEXT}; {rule}"
        case AuditMode.SAMPLED:
            replays = spec.audit_rate * spec.auditors
            closing = f"; in the last {spec.final_full_audit_rounds} rounds as with full" if spec.final_full_audit_rounds else ""
            return f"sampled: {replays:g} replays of each accepted proposal on average{closing}; {rule}"
        case _:
            return f"off: nobody re-executed anything; {rule}"


def _cell(text: str) -> str:
    """One line of Markdown: names may hold what means something there."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
