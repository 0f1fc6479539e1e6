"""The data a job reads: indexed datasets, text, and the tokenizer that goes with them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import (
    MOST_ENTRIES,
    Finding,
    doubtful,
    file_problem,
    first_bytes,
    host_path,
    missing,
    path_state,
    unseen,
)
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

TAIL = "_text_document"  # what tools/preprocess_data.py appends to its --output-prefix

# Of megatron/core/datasets/indexed_dataset.py, core 0.16 to 0.19: magic, then version, type of the tokens, sequences
# and documents; then 4 bytes for the length and 8 for the place of each sequence, and 8 for each document.
MAGIC, HEADER = b"MMIDIDX\x00\x00", "<9sQBQQ"
HEADER_BYTES = struct.calcsize(HEADER)
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
# Rows of JSON, and the fields by which data sets of conversations are known: those of OpenAI and Transformers,
# ShareGPT, TRL, Alpaca and Dolly.
ROW_FILES = (".jsonl", ".json", ".ndjson")
ROW_KEY = re.compile(r'"([A-Za-z_]{1,40})"\s{0,8}:')
MOST_ROW_BYTES = 64 * 2**10
CHAT_FIELDS = (
    ("messages",),
    ("conversations",),
    ("conversation",),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("chosen", "rejected"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
)
BUILD = "build it with tools/preprocess_data.py of Megatron-LM"


def data_findings(recipe: Recipe, _: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the datasets and their tokenizer."""
    if not recipe.backend.reads_data_keys:
        return
    for key, path in datasets(recipe):
        if recipe.data.sft is not None:
            yield from _rows(recipe, key, path)
        elif _is_indexed(recipe, path):
            yield from _indexed(recipe, key, path)
        else:
            yield from _text(recipe, key, path)
    if recipe.data.tokenizer is not None:
        from llmlaunch.readiness.tokenizers import tokenizer_findings

        yield from tokenizer_findings(recipe, environment)


def datasets(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    """Yield every dataset by the key that names it."""
    if recipe.data.path is not None:
        yield ("data", "path"), recipe.data.path
    for index, part in enumerate(recipe.data.blend):
        yield ("data", "blend", index, "path"), part.path
    for index, part in enumerate(recipe.data.validation):
        alone = len(recipe.data.validation) == 1
        yield ("data", "validation") if alone else ("data", "validation", index, "path"), part.path


def _rows(recipe: Recipe, key: KeyPath, folder: str) -> Iterator[Finding]:
    """Megatron-Bridge reads files of known names (GPTSFTDatasetBuilder, data/builders/gpt_sft.py, 0.6)."""
    names = ["training.jsonl", *(["validation.jsonl"] if recipe.training.evaluation is not None else [])]
    for name in names:
        file = f"{folder}/{name}"
        state = path_state(host_path(recipe, file))
        if state == "absent":
            yield missing(key, f"{file} is not there; data.sft reads a row of each of its lines")
        elif state == "unseen":
            yield unseen(key, file)


def _is_indexed(recipe: Recipe, path: str) -> bool:
    """Megatron-LM reads an indexed dataset; the DeepSpeed trainer does where there is an index, and text otherwise."""
    if recipe.backend.on_megatron_core or recipe.backend.script is not None:
        return True
    return path_state(host_path(recipe, f"{path}.idx")) == "here"


def _indexed(recipe: Recipe, key: KeyPath, prefix: str) -> Iterator[Finding]:
    files = [f"{prefix}{ending}" for ending in (".bin", ".idx")]
    places = [host_path(recipe, file) for file in files]
    states = [path_state(place) for place in places]
    absent = [file for file, state in zip(files, states, strict=True) if state == "absent"]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        yield missing(key, f"{' and '.join(absent)} {verb} not there; {_nearest_prefix(recipe, prefix)}")
    elif "unseen" in states:
        yield unseen(key, files[0])
    else:
        data, index = places
        problem = file_problem(index)
        about = index if problem is not None else data
        problem = problem or file_problem(data)
        sentence = f"{about} {problem}; {BUILD}" if problem is not None else _index_problem(index, data)
        if sentence is not None:
            yield missing(key, sentence)


def _nearest_prefix(recipe: Recipe, prefix: str) -> str:
    """Return what to write where the files of a prefix are not there."""
    for ending in (".bin", ".idx"):
        if prefix.endswith(ending) and path_state(host_path(recipe, prefix)) == "here":
            return f"write the prefix that both files share, {prefix[: -len(ending)]}"
    if path_state(host_path(recipe, f"{prefix}{TAIL}.idx")) == "here":
        return f"tools/preprocess_data.py appends {TAIL}: write {prefix}{TAIL}"
    return "name what is, or make it first"


def _index_problem(index: Path, data: Path) -> str | None:
    """Return what is wrong with the two files of a dataset, by the index's first and last entries."""
    head = first_bytes(index, HEADER_BYTES) or b""
    if head[: len(MAGIC)] != MAGIC or len(head) < HEADER_BYTES:
        return f"{index} is no index of a Megatron dataset (one begins with MMIDIDX); {BUILD}"
    _, version, kind, sequences, documents = struct.unpack(HEADER, head)
    if version != 1 or kind not in TOKEN_BYTES:
        return f"{index} has version {version} and token type {kind}, which no Megatron-LM reads; {BUILD}"
    if not sequences:
        return f"{index} counts no sequence, so there is nothing to train on; {BUILD} from text that is not empty"
    index_bytes, data_bytes = index.stat().st_size, data.stat().st_size
    if index_bytes < HEADER_BYTES + 12 * sequences + 8 * documents:
        return f"{index} ends before its {sequences} sequences do, as after an interrupted copy; copy it again"
    length = first_bytes(index, 4, HEADER_BYTES + 4 * (sequences - 1)) or b""
    start = first_bytes(index, 8, HEADER_BYTES + 12 * sequences - 8) or b""
    if len(length) < 4 or len(start) < 8:
        return f"{index} cannot be read to its end; copy it again"
    needed = struct.unpack("<q", start)[0] + struct.unpack("<i", length)[0] * TOKEN_BYTES[kind]
    if data_bytes < needed:
        return (
            f"{data} has {data_bytes} bytes, and {index.name} counts {needed}: one of the two belongs to another "
            "dataset, or was cut short; copy both again"
        )
    return None


def _text(recipe: Recipe, key: KeyPath, path: str) -> Iterator[Finding]:
    """Text of the DeepSpeed trainer: a file, or every file below a folder."""
    place = host_path(recipe, path)
    state = path_state(place)
    if state == "absent":
        yield missing(key, f"{path} is not there; {_nearest_prefix(recipe, path)}")
    elif state == "unseen":
        yield unseen(key, path)
    elif place.is_dir():
        files = [file for file in islice(place.rglob("*"), MOST_ENTRIES) if file.is_file()]
        if not any(file.stat().st_size for file in files):
            what = "only empty files" if files else "no file"
            yield missing(key, f"the folder {path} holds {what}; name a folder of text files")
        yield from islice(filter(None, (_rows_as_text(recipe, key, file) for file in sorted(files))), 1)
    else:
        problem = file_problem(place)
        rows = _rows_as_text(recipe, key, place)
        if problem is not None:
            yield missing(key, f"{path} {problem}; name a text file, a folder of them or an indexed dataset")
        elif place.suffix in (".idx", ".bin"):
            yield doubtful(key, f"{path} would be read as text, byte by byte; write it without {place.suffix}")
        elif rows is not None:
            yield rows


def _rows_as_text(recipe: Recipe, key: KeyPath, file: Path) -> Finding | None:
    """Return what is wrong with a file of JSON rows, which the DeepSpeed trainer reads as plain text, keys and braces
    included (trainers/deepspeed/data.py); None for a file without them. Only its first bytes are looked at."""
    if not file.name.lower().endswith(ROW_FILES):
        return None
    start = (first_bytes(file, MOST_ROW_BYTES) or b"").decode("utf-8", "replace")
    names = dict.fromkeys(ROW_KEY.findall(start))
    fields = next((pair for pair in CHAT_FIELDS if all(name in names for name in pair)), None)
    if fields is not None:
        what = " and ".join(fields)
        return missing(
            key,
            f"{file} has chat rows ({what}), which the DeepSpeed trainer would learn as plain text, keys and braces "
            "included. Train them with backend: megatron-bridge and data.sft, or write the conversations out as plain "
            "text",
        )
    if not names:
        return None
    return doubtful(
        key,
        f"{file} has rows of JSON, which the {recipe.backend.framework} trainer reads as plain text, keys and braces "
        "included; write the text of its rows into a file of plain text",
    )
