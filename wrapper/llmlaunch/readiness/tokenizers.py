"""The tokenizer a job loads: its files, whether a name is in the cache of Hugging Face's hub, and how many tokens it
knows beside the rows of the model's embedding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmlaunch.findings import (
    Finding,
    doubtful,
    file_problem,
    first_bytes,
    host_path,
    missing,
    note,
    path_state,
    read_json,
    unseen,
)
from llmlaunch.frozen import frozen
from llmlaunch.recipe.datasets import OF_A_FILE
from llmlaunch.recipe.types import Recipe

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
