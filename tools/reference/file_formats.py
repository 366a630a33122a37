"""The page of file formats: the data directory, and the files that people give to a peer or take from it."""

# ruff: noqa: E501 - rows of tables cannot be wrapped

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from curation.import_export import export_proofs
from curation.import_export.task_import import TASKS_MAX
from curation.limits import TEXT_CHARACTERS_MAX
from peer.export import run_export
from peer.settings.data_directory import FILES, DataDirectory
from rlhf.data import dataset_files, preference_sets
from tools.reference import table
from training.data import pretokenizers, token_shards
from training.formats import huggingface_model
from training.transformer import VOCABULARY_MAX

INTRODUCTION = """\
# File formats

`python -m tools.reference` writes this page.

| file | made or read by |
|---|---|
| [data directory](#the-data-directory) | `peer run` |
| text: `.txt`, `.md`, JSON, tables, Parquet | [`peer train --data`](commands.md) |
| [token shards](#token-shards) | `peer train --data`, `peer shards` |
| [model folder](#model-folders) | `peer model`, `peer train --from` |
| [responses and preferences](#responses-and-preferences) | `peer train --from JOB FILE`, `peer rlhf start --preferences FILE` |
| [blocklist](#blocklists) | `peer rlhf start --blocklist` |
| [task file](#task-files) | `peer tasks import` |
| [labels](#labels) | `peer tasks export`, `peer tasks verify` |
| [exported run](#exported-runs) | `peer export`, `peer audit` |
| [row proof](#row-proofs) | `peer prove`, `peer verify` |

A file that a person names must be a regular file. `-` reads standard input of `train --data`, `tasks import`, `rlhf start --preferences`
and `rlhf start --blocklist`.
"""

DIRECTORY = """\
## The data directory

The directory belongs to one user and has mode 0700. A peer corrects another mode, and refuses a directory of another user.
[Back up and move a peer](../how-to/back-up-and-move.md) says which files to save.
"""

DISK = """\
### Disk space

For a job with P parameters:

| data | bytes | kept |
|---|---|---|
| a model | 8P; 12P with `outer=adamw`, 4P with `sgd` | the last 6 to 10, and 4 more while peers download snapshots |
| the same with sampled audits | as above | also the last 2 × `audit_window` rounds, and anchors since the newest final one, at most 16 |
| a trainer's buffer | P; 0 with `feedback_decay=0` | as long as the models |
| estimates | P for each trainer | with `memory=estimates`, beside the model |
| payload of a trainer and round | P/8 with one bit | the newest 20 GB (`payloads_gb`), and always those of the last 256 rounds |
| blocks | 4 to 5 kB in a round of three trainers and four voters, 0.7 kB for each further trainer | for ever |

`peer train` prints the bytes of a job, and `peer jobs --json` has them as `disk_bytes`. A job whose sampled audits would keep more than
64 GiB is refused. The last models of a finished job stay: delete their folder in `models/` once `peer jobs` lists the job no more.
`peer export` needs all payloads, so set `payloads_gb = 0` on one peer.

To get the space of blocks back, give a peer a new key and directory, as after a
[lost disk](../how-to/back-up-and-move.md#recover-from-a-lost-disk). One peer after the other, and one peer must keep all blocks.
"""

SHARDS = """\
## Token shards

A folder with text that is tokenized already. `peer shards DIR` prints its `manifest.json`.
"""

MODELS = """\
## Model folders

`peer train --from FOLDER` reads a folder of `transformers` with the architecture `LlamaForCausalLM` or `MistralForCausalLM`.
Nothing in it is executed.

| file | read |
|---|---|
| `config.json` | sizes, `rope_theta`, `rms_norm_eps`, `tie_word_embeddings`, `eos_token_id`, and `sliding_window` of a Mistral |
| `model.safetensors`, or several with an index | float32, float16 and bfloat16, all converted to float32 |
| `packed.safetensors` | a ternary model; it is read in place of `model.safetensors` |
| `generation_config.json` | `eos_token_id`, which takes precedence; of several the first |
| `tokenizer.json` | a [tokenizer](#tokenizers). Without it, or with `--vocabulary 256`, tokens are bytes: `vocab_size` must be 256, or 257 with `eos_token_id` 256 |
| `SHA256SUMS`, or digests of `huggingface_hub` | the digest of each file that is read |

Refused by name:

- other architectures and activations, biases, `rope_scaling`, the window of a Llama, quantized types;
- a `head_dim` other than width / heads;
- missing tensors, other shapes, numbers that are not finite;
- pickle files (`.bin`, `.pt`), since opening one can run a program.

`peer model DIR` writes these files:

| format | files |
|---|---|
| `transformers` (default) | `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json` |
| `packed` | those, and `packed.safetensors` |
| `gguf`, `gguf-f32` | `model.gguf`, with matrices in float16 or float32 |
| all | `README.md`, the model card; `SHA256SUMS` |

A model with attention `sliding-window` is written as a `MistralForCausalLM`, with its window. The Llama of GGUF has no window, so
`gguf` refuses such a model. All of these formats refuse feed_forward `experts`; `peer export` writes the parameters.

Parameters are the same bit for bit. Vectors that only training needed (`heads.value`, `heads.first`) are left out, and the card names them.
A reward model is a `LlamaForSequenceClassification` with one score; GGUF cannot hold it. GGUF has names for the tokenizers of GPT-2, SmolLM,
Llama 3 and Qwen 2 only. `eos_token_id` is the token that ends a text.

### Packed models

`config.json` of a model with ternary matrices has `"folkmoot_linear": "ternary"`, which `transformers` ignores. All files have the ternary
weights, 0 and ±γ. `packed.safetensors` is a safetensors file with the names of `transformers`:

| tensor | content |
|---|---|
| matrix of a layer | U8, ⌈elements / 4⌉: two bits for each element, the first one in the lowest bits; 0, 1 and 2 stand for 0, 1 and −1 |
| its name with `_scale` | F32, one element: γ |
| others | F32 |

The metadata are one entry, `sha256`: the SHA-256 of the whole file with 64 zeros in its place. Refused are another digest, the code 3, codes
other than 0 behind the last element, and a scale that no matrix with these levels has. Latent weights are made from γ and the levels: they have
one size in each matrix, (γ − 10⁻⁵) / the share of levels other than 0, up to a unit of rounding, so that mean and levels are exact.

### Tokenizers
"""

DATA_SETS = """\
## Responses and preferences

JSONL with an object in each line, or one JSON array of at most {array} MB. A text has at most {characters:,} characters. These forms of
public data sets are read:
"""

AFTER_DATA_SETS = """
`p` is the probability that `chosen` is the better response: 1 by default, 0.5 for a tie. Messages become `User: …`, and on the next line
`Assistant: `; `system` and former answers are a line each. `peer chat --template 'User: {}\\nAssistant: '` asks a model in this form.

An invalid line refuses the file, and the error names up to 20 of them. `--skip-bad` leaves them out, `--truncate left` shortens long
prompts and `--truncate right` long responses. The counts are a part of the job, and its model card shows them. Invalid are:

- an empty response, tool calls, images, a text longer than the context;
- among preferences also two equal responses, and transcripts that differ before the last turn.

## Blocklists

A word in each line, `*` for any letters; lines that begin with `#` are comments. Every member can read the list of a job.
"""

TASKS = """\
## Task files

JSONL, a JSON array, a table (comma, semicolon, tab, vertical bar, or Excel's `sep=`), or Label Studio's JSON. The ending names the
format; other files are JSON if they begin with `[` or `{{`, and a table otherwise. Tables and JSON are in UTF-8, UTF-16, UTF-32 or
Windows-1252. A project has at most {tasks:,} tasks, and a text at most {characters:,} characters.

| field | content |
|---|---|
| `text` | the text; of a pair or a ranking the prompt |
| `items`, or columns `item1`, `item2`, … | two items of a pair, three to nine of a ranking |
| `suggestion` | a model's answer |
| `gold` | the right answer. It stays at the author's peer until the project is closed |

Names of fields are recognized in any letter case. `--columns text=sentence,gold=label` maps others. Answers are read in this order:

| answer | read as |
|---|---|
| the text of an option, also as a number or a boolean in JSON | that option |
| another form of one option: `TRUE` for `true`, `1.0` for `1` | that option |
| a whole number, if no option is a number | the number of an option from 0 on, of a rating from 1 on |
| of a pair: `the first`, `the second`, `a tie`, `both bad`, or 0 to 3 | that answer |
| of a ranking: numbers of items, the best first, from 0 or from 1 on | that order |
| with `--many`: a list, or text with `;`, `,` or vertical bars; `none of them` | these options |

An answer with two readings is an error. Labels of other programs become suggestions, or gold with `--gold-from FIELD`:

| program | fields |
|---|---|
| doccano, tables | `label`, `labels` |
| Prodigy | `label`, `accept` |
| Label Studio | annotations and predictions |
| preference sets | `chosen`, `rejected` |

In a file with gold, no label becomes a suggestion: it could reveal the gold.

## Labels

`peer tasks export PROJECT --format FORMAT` writes `jsonl`, `csv`, `label-studio` or `preferences`. The
[protocol](../protocol/curation.md#exports) has each field. Every format can be imported again. With `--proofs` a folder also has:
"""

RUNS = """\
## Exported runs

`peer export DIR` writes a folder that `peer audit DIR` checks without a network:
"""

PROOFS = """\
## Row proofs

`peer prove` writes one file with a row, its proof and the signatures of a quorum. The [protocol](../protocol/tables.md#the-file-of-one-row)
has its bytes. The file of a key without a row proves that there is none.
"""


def render() -> str:
    characters = TEXT_CHARACTERS_MAX
    parts = [
        INTRODUCTION,
        DIRECTORY,
        *_directory_table(),
        DISK,
        SHARDS,
        *_table_of(token_shards),
        "The manifest's SHA-256 of each file is checked, and so is each token. The last tokens, by `held_out_permille`, are not trained on.\n",
        MODELS,
        *_tokenizer_table(),
        DATA_SETS.format(array=dataset_files.ARRAY_BYTES_MAX >> 20, characters=characters),
        *_table_of(dataset_files)[:-1],
        AFTER_DATA_SETS,
        TASKS.format(tasks=TASKS_MAX, characters=characters),
        *_table_of(export_proofs),
        RUNS,
        *_table_of(run_export),
        PROOFS,
    ]
    return "\n".join(parts).rstrip() + "\n"


def _directory_table() -> list[str]:
    known = {name.split("/")[0] for name in FILES}
    declared = {path.name for path in vars(DataDirectory(Path("data"))).values()} - {"data"}
    assert declared <= known, f"no description of {declared - known} in FILES"
    return table(("file", "content"), ((f"`{name}`", text) for name, text in FILES.items()))


def _tokenizer_table() -> list[str]:
    assert preference_sets.PAIRS_MAX == TASKS_MAX, "this page has one number of records"
    normalizers = ", ".join(pretokenizers.NORMALIZERS)
    return [
        f"`{huggingface_model.TOKENIZER}` is a byte-level BPE of at most {VOCABULARY_MAX:,} tokens, since token ids have 16 bits. The models of",
        "Llama 3 and Qwen have more, and are refused. It makes the same tokens as the package `tokenizers`, but no text becomes a special token.\n",
        *table(
            ("part", "read", "refused by name"),
            (
                ("`normalizer`", f"{normalizers}, and sequences of them", "others"),
                (
                    "`pre_tokenizer`",
                    "`ByteLevel`, alone or after `Digits` and `Split`",
                    "others; `add_prefix_space`; patterns with alternatives that GPT-2, Llama 3 and Qwen lack",
                ),
                ("`added_tokens`", "special ones, and others by their content", "`lstrip`, `rstrip` and `single_word` of others"),
                ("`post_processor`", "those that add nothing", "templates that add tokens, such as the begin of a text"),
                ("`model`", "BPE, also with `ignore_merges`", "other types, `byte_fallback`, `dropout`, affixes"),
            ),
        ),
        "A larger `vocab_size` than the tokenizer's gives special tokens `[PAD…]`.\n",
    ]


def _table_of(module: ModuleType) -> list[str]:
    """Return the table in a module's docstring."""
    return [line for line in (module.__doc__ or "").splitlines() if line.startswith("|")] + [""]
