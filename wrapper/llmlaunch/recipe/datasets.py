"""What a model is trained on: made-up tokens, one dataset, or a blend of several, and how it was tokenized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from llmlaunch.documents.keys import key, name_or_mapping, section
from llmlaunch.documents.text import Line, PathText
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.recipe.frameworks import FrameworkTraits

Problem = tuple[KeyPath, str]
SHARES = re.compile(r"(?:[1-9]\d*(?:\.\d+)?|0\.\d*[1-9]\d*)(?:,\d+(?:\.\d+)?){2}")  # something to train on
# Megatron's types that need no `tokenizer` beside them, and those whose `tokenizer` is a file
WITHOUT_MODEL = ("NullTokenizer", "GPT2BPETokenizer")
OF_A_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
OF_MEGATRON = ("cache_path", "tokenizer_type")
OF_ANSWERS = ("chat", "prompt-completion")  # formats of rows of which answers alone are learned
ROW_FILES = (".jsonl", ".json", ".ndjson", ".parquet")
HUB_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::[\w.-]+)?")  # a configuration after the colon
DEFAULT_SPLIT = "99,1,0"


def _shares(text: str) -> str:
    if not SHARES.fullmatch(text):
        raise ValueError("must be three shares, for training (not 0), validation and test, such as 99,1,0")
    return text


Shares = Annotated[str, AfterValidator(_shares), WithJsonSchema({"type": "string", "pattern": f"^{SHARES.pattern}$"})]
TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
]


@section
class BlendPart:
    """An indexed dataset and its weight beside the others'."""

    path: PathText = key("Indexed dataset: the prefix of its .bin and .idx files")
    weight: float = key("Share of the samples that come from it, in any unit", gt=0, le=10**12)


def _parts(value: list[BlendPart] | str) -> tuple[BlendPart, ...]:
    return (BlendPart(value, 1.0),) if isinstance(value, str) else tuple(value)


@section
class Data:
    """What it is trained on: exactly one of mock, path, blend and python_source. None is the backend's choice."""

    mock: bool = key("Made-up tokens of the framework: for measuring speed and memory", default=False)
    path: PathText | None = key(
        "The framework's own format, a text file, a folder of text files, or what `format` says", default=None
    )
    # nothing is downloaded
    python_source: bool = key("Source files of Python's standard library, byte by byte", default=False)
    tokenizer: Line | None = key(
        "Tokenizer of `path` or `blend`: a Hugging Face one, or a file as `tokenizer_type` says", default=None
    )
    blend: tuple[BlendPart, ...] = key(
        "Several indexed datasets and their weights, instead of `path`",
        default=(),
        written=tuple[BlendPart, ...] | None,
        min_length=1,
        max_length=10_000,
    )
    validation: tuple[BlendPart, ...] = key(
        "What training.evaluation reads instead of a share of `path` or `blend`: a dataset, or several and their "
        "weights",
        default=(),
        written=lambda: Annotated[
            name_or_mapping(PathText, Annotated[list[BlendPart], Field(min_length=1, max_length=10_000)]),
            AfterValidator(_parts),
        ],
    )
    split: Shares | None = key(
        "Shares of `path` or `blend` for training, validation and test; absent = 99,1,0 (deepspeed: where "
        "training.evaluation needs one)",
        default=None,
    )
    cache_path: PathText | None = key("megatron-lm: folder for the indexes; absent = beside the dataset", default=None)
    format: str | None = key(
        "`path` has rows: a conversation each (chat), or a prompt and its completion, and answers alone are learned; "
        "or a text each (deepspeed), all of it learned. deepspeed: a .jsonl, .json, .ndjson or .parquet file, a folder "
        "of them or a name on the Hugging Face hub; megatron-bridge: a folder with training.jsonl, and "
        "validation.jsonl for training.evaluation. Absent = no rows",
        default=None,
        written=Literal["chat", "prompt-completion", "text"] | None,
    )
    packed: bool = key(
        "A sequence holds as many rows of `format` as fit into it, each attending to itself alone; "
        "training.global_batch_size counts such sequences",
        default=False,
    )
    chat_template: PathText | None = key(
        "deepspeed: Jinja template of conversations; absent = the tokenizer's own", default=None
    )
    attention_masks: bool = key(
        "megatron-lm: the loader makes an attention mask of sequence x sequence bytes of every sample, which fused "
        "attention does not read",
        default=False,
    )
    tokenizer_type: str | None = key(
        "megatron-lm: what `tokenizer` is; absent = HuggingFaceTokenizer, and NullTokenizer without one",
        default=None,
        written=TokenizerType | None,
    )

    @property
    def datasets(self) -> tuple[str, ...]:
        """Paths that data is read from; those of the hub are downloaded."""
        named = (self.path, *(part.path for part in (*self.blend, *self.validation)), self.chat_template)
        return tuple(path for path in named if path is not None and not self.is_hub_name(path))

    def is_hub_name(self, path: str) -> bool:
        """Return whether a dataset is named as on the Hugging Face hub; all else is absolute in a loaded recipe."""
        return self.format is not None and HUB_DATASET.fullmatch(path) is not None

    @property
    def learns_answers(self) -> bool:
        """Whether answers of its rows alone are learned."""
        return self.format in OF_ANSWERS

    @property
    def shares(self) -> str:
        """Return the shares for training, validation and test."""
        return self.split or DEFAULT_SPLIT

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError unless there is exactly one source of data, and a tokenizer where its type needs one."""
        sources = [keys.get("mock"), keys.get("python_source"), keys.get("path"), keys.get("blend")]
        if sum(bool(source) for source in sources) != 1:
            raise ValueError("give exactly one of mock: true, path: ..., blend: ... or python_source: true")
        tokenizer, kind = keys.get("tokenizer"), keys.get("tokenizer_type")
        if keys.get("format") is None:
            for name in ("packed", "chat_template"):
                if keys.get(name):
                    raise ValueError(f"{name} is for rows; add format: chat or format: prompt-completion, or remove it")
        elif keys.get("path") is None:
            raise ValueError("format: rows are read from path; name them there")
        elif keys["format"] == "text" and keys.get("chat_template") is not None:
            raise ValueError("chat_template is for conversations, and format: text has none; remove one of the two")
        for name in ("tokenizer", "tokenizer_type", "split", "validation", "cache_path"):
            if keys.get(name) is not None and not (keys.get("path") or keys.get("blend")):
                raise ValueError(f"{name} belongs to path or blend; remove it")
        if keys.get("split") is not None and keys.get("validation") is not None:
            raise ValueError("split cuts a share for validation off, and validation names other data; remove one")
        if kind is None or (tokenizer is None) == (kind in WITHOUT_MODEL):
            return
        if tokenizer is None:
            raise ValueError(f"tokenizer_type {kind} needs tokenizer; name it, or remove the type")
        raise ValueError(f"tokenizer_type {kind} reads no tokenizer; remove one of the two")


def data_problems(data: Data, framework: FrameworkTraits, starts_from_weights: bool) -> Iterator[Problem]:
    """Yield the keys that the framework does not read, and what it needs beside rows. Weights to start from may bring
    their tokenizer."""
    if data.format is not None:
        if framework.takes_settings:
            yield from _bridge_row_problems(data)
        elif framework.on_megatron_core:
            yield ("data", "format"), "is for deepspeed and megatron-bridge; remove it, or take one of these backends"
        else:
            yield from _row_problems(data, starts_from_weights)
    if data.attention_masks and (framework.takes_settings or not framework.on_megatron_core):
        yield ("data", "attention_masks"), "is a key of megatron-lm; remove it, or take backend: megatron-lm"
    if framework.on_megatron_core:
        return
    for name in OF_MEGATRON:
        if getattr(data, name) is not None:
            yield ("data", name), "is a word of megatron-lm; remove it for deepspeed"


def _bridge_row_problems(data: Data) -> Iterator[Problem]:
    """Rows of Megatron-Bridge are in files of known names, and are tokenized while the job runs."""
    if data.format == "text":
        yield (
            ("data", "format"),
            "text: Megatron-Bridge has rows of chat and prompt-completion; build an indexed dataset of the texts "
            "(tools/preprocess_data.py of Megatron-LM), or take backend: deepspeed",
        )
    for name in ("split", "validation", "cache_path"):
        if getattr(data, name):
            yield (
                ("data", name),
                "rows to train on and to evaluate with are in training.jsonl and validation.jsonl of data.path; "
                f"remove {name}",
            )
    if data.chat_template is not None:
        yield ("data", "chat_template"), "is a key of deepspeed: Megatron-Bridge has the tokenizer's own; remove it"
    if data.tokenizer is None:
        yield ("data", "format"), "rows are text; name the tokenizer in data.tokenizer"


def _row_problems(data: Data, starts_from_weights: bool) -> Iterator[Problem]:
    if len(data.validation) > 1:
        yield ("data", "validation"), "rows to evaluate with are one dataset; name one"
    if data.tokenizer is None and not starts_from_weights:
        yield (
            ("data", "format"),
            "rows are text; name the tokenizer in data.tokenizer, or weights that have one in training.start_from",
        )


def evaluation_problems(data: Data, evaluated: bool) -> Iterator[Problem]:
    """Yield validation data that nothing reads, and an evaluation without any."""
    if data.validation and not evaluated:
        yield ("data", "validation"), "is read by training.evaluation alone; add that, or remove it"
    if evaluated and data.split is not None and float(data.split.split(",")[1]) == 0:
        yield (
            ("data", "split"),
            f"{data.split} leaves nothing for training.evaluation; give the second share, such as 99,1,0, or name "
            "data.validation",
        )


def may_be_of_the_hub(path: str) -> bool:
    """Return whether a dataset of rows may be named as on the Hugging Face hub: `organisation/name`."""
    return HUB_DATASET.fullmatch(path) is not None and not path.lower().endswith(ROW_FILES)


def with_absolute_paths(data: Data, absolute: Callable[[str], str], hub: bool) -> Data:
    """Return `data` with `absolute` of every path. A tokenizer is a path where its type reads a file; else it may be a
    name. With `hub`, so may rows of which no file or folder is there."""
    in_a_file = data.tokenizer is not None and data.tokenizer_type in OF_A_FILE
    downloads = hub and data.format is not None

    def located(path: str) -> str:
        named = downloads and may_be_of_the_hub(path) and not Path(absolute(path)).exists()
        return path if named else absolute(path)

    return replace(
        data,
        path=None if data.path is None else located(data.path),
        blend=tuple(BlendPart(absolute(part.path), part.weight) for part in data.blend),
        validation=tuple(BlendPart(located(part.path), part.weight) for part in data.validation),
        chat_template=None if data.chat_template is None else absolute(data.chat_template),
        cache_path=None if data.cache_path is None else absolute(data.cache_path),
        tokenizer=absolute(str(data.tokenizer)) if in_a_file else data.tokenizer,
    )
