"""The data a job reads: indexed datasets, text, and the tokenizer that goes with them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.findings import (
    MOST_ENTRIES,
    Finding,
    doubtful,
    file_problem,
    first_bytes,
    folder_entries,
    host_path,
    missing,
    note,
    path_state,
    read_json,
    unseen,
)
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.recipe.datasets import OF_A_FILE, ROW_FILES
from llmlaunch.recipe.types import Recipe

TAIL = "_text_document"  # what tools/preprocess_data.py appends to its --output-prefix

# Of megatron/core/datasets/indexed_dataset.py, core 0.16 to 0.19: magic, then version, type of the tokens, sequences
# and documents; then 4 bytes for the length and 8 for the place of each sequence, and 8 for each document.
MAGIC, HEADER = b"MMIDIDX\x00\x00", "<9sQBQQ"
HEADER_BYTES = struct.calcsize(HEADER)
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
ROW_KEY = re.compile(r'"([A-Za-z_]{1,40})"\s{0,8}:')
MOST_ROW_BYTES = 64 * 2**10
BUILD = "build it with tools/preprocess_data.py of Megatron-LM"


def data_findings(recipe: Recipe, _: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    if not recipe.backend.reads_data_keys:
        return
    for key, path in datasets(recipe):
        if recipe.data.format is not None and recipe.backend.on_megatron_core:
            yield from _rows(recipe, key, path)
        elif recipe.data.format is not None and not _plain_text(recipe, path):
            from llmlaunch.readiness.rows import row_findings

            yield from row_findings(recipe, key, path)
        elif _is_indexed(recipe, path):
            yield from _indexed(recipe, key, path)
        else:
            yield from _text(recipe, key, path)
    if recipe.data.tokenizer is not None:
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
            yield missing(key, f"{file} is not there; data.format reads a row of each of its lines")
        elif state == "unseen":
            yield unseen(key, file)


def _plain_text(recipe: Recipe, path: str) -> bool:
    """Whether data.format: text names plain text: a file, or a folder without a file of rows
    (trainers/deepspeed/rows.py)."""
    place = host_path(recipe, path)
    if recipe.data.format != "text" or path_state(place) != "here":
        return False
    files = [place] if not place.is_dir() else [Path(entry.path) for entry in folder_entries(place)]
    return not any(file.suffix in ROW_FILES for file in files)


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
    if not file.name.lower().endswith(ROW_FILES) or recipe.data.format is not None:
        return None
    start = (first_bytes(file, MOST_ROW_BYTES) or b"").decode("utf-8", "replace")
    names = list(dict.fromkeys(ROW_KEY.findall(start)))
    if not names:
        return None
    from llmlaunch.readiness.rows import format_of

    fields, kind = format_of(names) or ((), None)
    as_text = f"which the {recipe.backend.framework} trainer would learn as plain text, keys and braces included"
    if fields in ((), ("text",)):
        remedy = "add data.format: text" if fields else "write the text of its rows into a file of plain text"
        return doubtful(key, f"{file} has rows of JSON, {as_text}; {remedy}")
    remedy = (
        f"add data.format: {kind}" if kind else "write rows of messages, or of prompt and completion, and data.format"
    )
    return missing(key, f"{file} has rows of {' and '.join(fields)}, {as_text}; {remedy} to learn their answers alone")


KEY = ("data", "tokenizer")
HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
# Files from which transformers' AutoTokenizer makes a tokenizer (tokenization_utils_base.py and the slow tokenizers'
# vocab_files_names, transformers 5.0).
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
MOST_MODEL_BYTES = 16 * 2**20
OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE_WORDS = ("1", "ON", "YES", "TRUE")


@frozen
class TokenIds:
    """The largest token id of the vocabulary itself, and of the tokens added to it; None where there are none."""

    vocabulary: int | None
    added: int | None


def tokenizer_findings(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with `data.tokenizer`."""
    name, kind = str(recipe.data.tokenizer), recipe.data.tokenizer_type
    if kind not in OF_A_FILE and not name.startswith(("/", "~")):
        yield from _by_name(recipe, name, environment)
        return
    place = host_path(recipe, name)
    state = path_state(place)
    if state == "absent":
        yield missing(KEY, f"{place} is not there; name what is, or make it first")
    elif state == "unseen":
        yield unseen(KEY, place)
    elif kind in OF_A_FILE:
        problem = file_problem(place)
        if problem is not None:
            yield missing(KEY, f"{place} {problem}; name the file of a {kind}")
        else:
            yield from _vocabulary(recipe, token_ids(place))
    else:
        yield from _folder(recipe, place)


def _folder(recipe: Recipe, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield missing(KEY, f"{folder} is a file; name the folder of a Hugging Face tokenizer, or set tokenizer_type")
        return
    names = [name for name in VOCABULARIES if (folder / name).exists()]
    if not names:
        yield missing(KEY, f"{folder} holds no tokenizer: none of {', '.join(VOCABULARIES)}; name the folder that does")
    elif names[0] == "vocab.json" and not (folder / "merges.txt").exists():
        yield missing(KEY, f"{folder} holds vocab.json without merges.txt, which go together; copy it there, too")
    else:
        problem = file_problem(folder / names[0])
        if problem is not None:
            yield missing(KEY, f"{folder / names[0]} {problem}")
        else:
            yield from _vocabulary(recipe, token_ids(folder / names[0]))


def _vocabulary(recipe: Recipe, ids: TokenIds) -> Iterator[Finding]:
    """Yield that ids of the tokenizer have no row in the embedding: the first such token ends the training."""
    rows = recipe.model.vocab_size
    for ids_of, largest, kind in (("", ids.vocabulary, missing), ("added ", ids.added, doubtful)):
        if largest is not None and largest >= rows:
            yield kind(
                KEY,
                f"its {ids_of}tokens have ids up to {largest}, and the embedding of {recipe.model.name} has {rows} "
                f"rows; set model.vocab_size to at least {largest + 1}, or name the tokenizer of this model",
            )
            return


def token_ids(path: Path) -> TokenIds:
    """Return the largest ids of a tokenizer's file, and of added_tokens.json beside it; None where it does not tell."""
    beside = read_json(path.parent / "added_tokens.json")
    added = list(_numbers(beside))
    if path.suffix == ".model":
        pieces = _sentence_pieces(path)
        return TokenIds(pieces - 1 if pieces else None, max(added, default=None))
    if path.name == "vocab.txt":
        text = first_bytes(path, MOST_MODEL_BYTES) or b""
        return TokenIds(len(text.splitlines()) - 1 if text else None, max(added, default=None))
    value = read_json(path)
    if path.name == "vocab.json":
        return TokenIds(max(_numbers(value), default=None), max(added, default=None))
    model = value.get("model") if isinstance(value, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    largest = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(_numbers(vocabulary), default=None)
    listed = value.get("added_tokens") if isinstance(value, dict) else None
    added += [token["id"] for token in listed or [] if isinstance(token, dict) and isinstance(token.get("id"), int)]
    return TokenIds(largest, max(added, default=None))


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        yield from (number for number in value.values() if isinstance(number, int))


def _sentence_pieces(path: Path) -> int | None:
    """Return the number of pieces of a SentencePiece model, which is a message of protobuf whose first field repeats;
    None for a file that is none."""
    data = first_bytes(path, MOST_MODEL_BYTES) or b""
    pieces, at = 0, 0
    while at < len(data) and data[at] == 0x0A:
        size, shift, at = 0, 0, at + 1
        while at < len(data) and data[at] & 0x80:
            size |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
        if at >= len(data):
            return None
        at += 1 + (size | data[at] << shift)
        pieces += 1
    return pieces or None


def _by_name(recipe: Recipe, name: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """A tokenizer by the name it has on Hugging Face's hub."""
    beside = Path(recipe.path).parent / name
    if HUB_NAME.fullmatch(name) is None or name.startswith("."):
        yield missing(KEY, f"{name} is no name on Hugging Face's hub; write a folder by its absolute path")
        return
    if beside.is_dir():
        yield doubtful(
            KEY,
            f"{name} is looked for on Hugging Face's hub; the folder beside the recipe is {beside.absolute()}",
        )
    variables = {**environment, **recipe.cluster.environment, **recipe.environment}
    cache = _hub_cache(variables)
    if cache is None or any((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/*")):
        return
    offline = any(variables.get(switch, "").upper() in TRUE_WORDS for switch in OFFLINE_SWITCHES)
    where = f"{name} is not in the cache of Hugging Face's hub here ({cache})"
    fetch = f"fetch it first (hf download {name}), or name a folder by its absolute path"
    if offline:
        yield missing(KEY, f"{where}, and HF_HUB_OFFLINE keeps the job from fetching it; {fetch}")
    else:
        yield note(KEY, f"{where}: a node without access to huggingface.co cannot load it; {fetch}")


def _hub_cache(variables: Mapping[str, str]) -> Path | None:
    """Return where huggingface_hub keeps what it fetched (constants.py, huggingface_hub 1.0); None without a home."""
    if variables.get("HF_HUB_CACHE"):
        return Path(variables["HF_HUB_CACHE"])
    if variables.get("HF_HOME"):
        return Path(variables["HF_HOME"]) / "hub"
    home = variables.get("XDG_CACHE_HOME") or (f"{variables['HOME']}/.cache" if variables.get("HOME") else "")
    return Path(home) / "huggingface" / "hub" if home else None
