"""Rows to fine-tune on, as the DeepSpeed trainer will read them: their fields, what is learned of them, and how long
they are. Of a file a bounded beginning is read."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import (
    Finding,
    doubtful,
    file_problem,
    first_bytes,
    folder_entries,
    host_path,
    missing,
    note,
    path_state,
    unseen,
)
from llmlaunch.frozen import frozen
from llmlaunch.recipe.datasets import ROW_FILES, may_be_of_the_hub
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import counted, shortened, with_escapes

# Fields by which data sets are known (OpenAI's and Transformers', ShareGPT, TRL, Alpaca, Dolly) and the format that
# reads them; None where none does.
FIELDS: Mapping[tuple[str, ...], str | None] = {
    ("messages",): "chat",
    ("conversations",): "chat",
    ("prompt", "completion"): "prompt-completion",
    ("prompt", "response"): "prompt-completion",
    ("instruction", "output"): "prompt-completion",
    ("question", "answer"): "prompt-completion",
    ("chosen", "rejected"): None,
    ("instruction", "response"): None,
    ("conversation",): None,
    ("text",): "text",
}
ANSWERING = ("assistant", "gpt")
TRAINING_FILES, VALIDATION_FILES, TEST_FILES = ("training", "train"), ("validation", "valid", "val"), ("test",)
MOST_BYTES, MOST_ROWS = 2 * 2**20, 2000
CHARACTERS_PER_TOKEN = 4.0
MANY_CUT = 0.01  # the share of rows
PREVIEWED = 3
_BETWEEN_ROWS = re.compile(r"[ \t\r\n,]*")


@frozen
class Sample:
    """The first rows of a file. `problem` says why no more of them could be read; `count` is the number of all rows,
    `exact` where all were read."""

    file: Path
    rows: tuple[Any, ...]
    count: int
    exact: bool
    problem: str | None = None


def row_findings(recipe: Recipe, key: KeyPath, path: str) -> Iterator[Finding]:
    """Yield what is wrong with the rows at `path`, and how long they are."""
    training = key == ("data", "path")
    if recipe.data.is_hub_name(path):
        yield note(
            key,
            f"{path} is no file or folder here: the nodes download the dataset of this name from the Hugging Face hub",
        )
        return
    place = host_path(recipe, path)
    state = path_state(place)
    if state != "here":
        yield unseen(key, path) if state == "unseen" else missing(key, f"{path} is not there{_hub_hint(recipe, path)}")
        return
    files = _files(place, TRAINING_FILES if training else VALIDATION_FILES)
    if not files:
        yield missing(key, f"{path} has no file of rows ({', '.join(ROW_FILES)}); name one, or a folder of them")
        return
    if training and place.is_dir() and _wants_part(recipe) and not _named(place, VALIDATION_FILES):
        yield missing(
            key,
            f"{path} has no validation.* file for training.evaluation; name rows in data.validation, or give a "
            "share in data.split, such as 98,2,0",
        )
    yield from _judged(recipe, key, files[0])


def preview(recipe: Recipe, width: int | None) -> list[str]:
    """Return the first rows of `data.path` in lines of at most `width` columns: what is asked, and what is learned.
    Nothing where they cannot be read here."""
    data, most = recipe.data, (width or 160) - 12
    if data.format is None or data.path is None or data.is_hub_name(data.path):
        return []
    place = host_path(recipe, data.path)
    files = _files(place, TRAINING_FILES) if path_state(place) == "here" else []
    if not files or file_problem(files[0]) is not None:
        return []
    lines = []
    for number, row in enumerate(islice(read_sample(files[0]).rows, PREVIEWED), 1):
        pieces = pieces_of(row, str(data.format))
        if pieces:
            lines.append(f"Row {number} of {with_escapes(files[0].name)}")
        lines += [f"  {'learned' if learned else 'prompt':<8}  {_in_one_line(text, most)}" for learned, text in pieces]
    return lines


def _in_one_line(text: str, most: int) -> str:
    shown = with_escapes(shortened(text, 4 * most)).replace("\n", "\\n").replace("\t", "\\t")
    return shortened(shown, most)


def format_of(names: Sequence[str]) -> tuple[tuple[str, ...], str | None] | None:
    """Return the fields by which rows with these are known, and the format that reads them; None for unknown ones."""
    fields = next((fields for fields in FIELDS if all(name in names for name in fields)), None)
    return None if fields is None else (fields, FIELDS[fields])


def _hub_hint(recipe: Recipe, path: str) -> str:
    """An override's path is absolute, whatever was meant."""
    tail = "/".join(Path(path).parts[-2:])
    if may_be_of_the_hub(tail) and not Path(path).parent.exists():
        return (
            f"; name what is, or, for {tail} of the Hugging Face hub, write data.format beside it in the same override"
        )
    return "; name what is, or make it first"


def _wants_part(recipe: Recipe) -> bool:
    """Whether the job evaluates with the folder's own part. A share of texts is split off."""
    data = recipe.data
    named = bool(data.validation) or data.split is not None
    return recipe.training.evaluation is not None and data.learns_answers and not named


def _named(folder: Path, names: Sequence[str]) -> list[Path]:
    files = [Path(entry.path) for entry in folder_entries(folder) if Path(entry.name).suffix in ROW_FILES]
    return [file for name in names for file in files if file.name.split(".")[0] == name]


def _files(place: Path, names: Sequence[str]) -> list[Path]:
    """Return the files that the trainer reads (trainers/deepspeed/rows.py): of a folder those of their name, else all
    but those of other parts."""
    if not place.is_dir():
        return [place] if place.suffix in ROW_FILES else []
    others = {*TEST_FILES, *VALIDATION_FILES} if names is TRAINING_FILES else set()
    everything = [Path(entry.path) for entry in folder_entries(place) if Path(entry.name).suffix in ROW_FILES]
    return _named(place, names) or [file for file in everything if file.name.split(".")[0] not in others]


def _judged(recipe: Recipe, key: KeyPath, file: Path) -> Iterator[Finding]:
    problem = file_problem(file)
    if problem is not None:
        yield missing(key, f"{file} {problem}; name a file of rows")
        return
    if file.suffix == ".parquet":
        yield note(key, f"{file} is Parquet, which is not looked into here; its fields are seen on the nodes")
        return
    sample, wanted = read_sample(file), str(recipe.data.format)
    for number, row in enumerate(sample.rows, 1):
        if not pieces_of(row, wanted):
            yield missing(key, f"{file}: row {number} {_why_not(row, wanted)}")
            return
    if sample.problem is not None:
        yield missing(key, f"{file}: row {len(sample.rows) + 1} {sample.problem}; write one JSON object on each line")
    elif not sample.rows:
        yield missing(key, f"{file} has no row; name a file of rows")
    elif key == ("data", "path"):
        yield _lengths(recipe, key, sample)


def _why_not(row: Any, wanted: str) -> str:
    if not isinstance(row, dict):
        return "is no JSON object; write one on each line"
    names = [name for name in row if row[name] is not None]
    shown = ", ".join(with_escapes(shortened(str(name), 40)) for name in names[:8]) or "no field"
    accepted = "; ".join(" and ".join(fields) for fields, kind in FIELDS.items() if kind == wanted)
    known = format_of(names)
    if known is not None and known[1] not in (None, wanted):
        return f"has {shown}, which data.format: {known[1]} reads, not {wanted}; write that"
    return f"has {shown}; data.format: {wanted} reads text or messages of {accepted}"


def read_sample(file: Path) -> Sample:
    """Return the first rows of a file of JSON: a list, or an object on each line."""
    size = file.stat().st_size
    text = (first_bytes(file, MOST_BYTES) or b"").decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    whole, listed = size <= MOST_BYTES, text.startswith("[")
    decoder, at, problem = json.JSONDecoder(), int(listed), None
    rows: list[Any] = []
    while True:
        at = _skipped(text, at)
        ended = at >= len(text) or text[at] == "]"
        if ended or len(rows) == MOST_ROWS:
            break
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # the last one may be cut
            problem = "is no JSON" if whole or (not listed and "\n" in text[at:]) else None
            break
        rows.append(row)
    exact = whole and ended
    read = max(len(text[:at].encode()), 1)
    return Sample(file, tuple(rows), len(rows) if exact else round(len(rows) * size / read), exact, problem)


def _skipped(text: str, at: int) -> int:
    match = _BETWEEN_ROWS.match(text, at)
    return at if match is None else match.end()


def pieces_of(row: Any, wanted: str) -> list[tuple[bool, str]]:
    """Return the texts of a row, each with whether it is learned; nothing for a row that the format does not read."""
    if not isinstance(row, dict):
        return []
    for fields in (fields for fields, kind in FIELDS.items() if kind == wanted):
        values = [row.get(name) for name in fields]
        if any(value is None for value in values):
            continue
        if wanted == "text":
            return [(True, values[0])] if isinstance(values[0], str) else []
        if wanted == "chat":
            return _messages(values[0])
        asked, answered = values
        if fields[0] == "instruction" and row.get("input"):
            asked = f"{asked}\n\n{row['input']}"
        prompt, completion = (
            [(False, each)] if isinstance(each, str) else _messages(each) for each in (asked, answered)
        )
        return [(False, text) for _, text in prompt] + [(True, text) for _, text in completion] if completion else []
    return []


def _messages(value: Any) -> list[tuple[bool, str]]:
    """Return who says what in a conversation: `role` and `content`, or ShareGPT's `from` and `value`."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return []
    pieces = []
    for message in value:
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str):
            return []
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        pieces.append((role in ANSWERING, text))
    return pieces


def _lengths(recipe: Recipe, key: KeyPath, sample: Sample) -> Finding:
    """Return how many rows there are, how long they are and how many of them would be cut."""
    texts = ["".join(text for _, text in pieces_of(row, str(recipe.data.format))) for row in sample.rows]
    counted_tokens = _tokens(recipe, texts)
    tokens = counted_tokens or [round(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
    most = recipe.workload.sequence_length
    cut = sum(length > most for length in tokens)
    how = "by the tokenizer, without a template's own" if counted_tokens else "as characters / 4"
    rows = counted(sample.count, "row", ",") if sample.exact else f"about {counted(sample.count, 'row', ',')}"
    part = "" if sample.exact else f" (the first {len(texts):,} were looked at)"
    sentence = (
        f"{sample.file} has {rows}{part}: median {round(statistics.median(tokens)):,}, longest {max(tokens):,} tokens "
        f"({how})"
    )
    if cut:
        sentence += f"; {cut / len(tokens):.1%} are longer than training.sequence_length, {most}, and are cut there"
    if not recipe.data.packed:
        epochs = recipe.training.steps * recipe.workload.global_batch_size / max(sample.count, 1)
        times = f"{epochs:,.1f}" if epochs >= 1 else f"{epochs:.2g}"
        sentence += f"; {counted(recipe.training.steps, 'step', ',')} see them {times} times"
    return doubtful(key, sentence) if cut > MANY_CUT * len(tokens) else note(key, sentence)


def _tokens(recipe: Recipe, texts: Sequence[str]) -> list[int] | None:
    """Return the tokens of each text where the tokenizer's file is on this machine and its package is installed."""
    name = recipe.data.tokenizer or recipe.training.start_from
    if name is None or not name.startswith(("/", "~")):
        return None
    file = host_path(recipe, name) / "tokenizer.json"
    if path_state(file) != "here" or file_problem(file) is not None:
        return None
    try:
        from tokenizers import Tokenizer

        return [len(each) for each in Tokenizer.from_file(str(file)).encode_batch(list(texts))]
    except Exception:  # of a package that is no dependency, whatever is wrong with it or the file
        return None
