"""What a model is trained on: made-up tokens, one dataset, or a blend of several, and how it was tokenized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from llmlaunch.documents.keys import key, name_or_mapping, section
from llmlaunch.documents.text import Line, PathText
from llmlaunch.documents.yaml_strict import KeyPath

Problem = tuple[KeyPath, str]
SHARES = re.compile(r"(?:[1-9]\d*(?:\.\d+)?|0\.\d*[1-9]\d*)(?:,\d+(?:\.\d+)?){2}")  # something to train on
# Megatron's types that need no `tokenizer` beside them, and those whose `tokenizer` is a file
WITHOUT_MODEL = ("NullTokenizer", "GPT2BPETokenizer")
OF_A_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
OF_MEGATRON = ("cache_path", "tokenizer_type")
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
    path: PathText | None = key("The framework's own format, a text file or a folder of text files", default=None)
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
    sft: str | None = key(
        "megatron-bridge: `path` is a folder whose training.jsonl (and validation.jsonl for training.evaluation) has a "
        "conversation or a prompt with its completion in each line; answers alone are learned",
        default=None,
        written=Literal["chat", "prompt-completion"] | None,
    )
    packed: bool = key(
        "megatron-bridge: a sequence holds as many rows of `sft` as fit into it, each attending to itself alone; "
        "training.global_batch_size counts such sequences",
        default=False,
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
        """Paths that data is read from."""
        return (*(() if self.path is None else (self.path,)), *(part.path for part in (*self.blend, *self.validation)))

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
        if keys.get("sft") is not None:
            Data._check_sft(keys)
        elif keys.get("packed"):
            raise ValueError("packed: rows of sft are packed; add sft: chat or sft: prompt-completion, or remove it")
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

    @staticmethod
    def _check_sft(keys: Mapping[str, Any]) -> None:
        """Rows lie in files of known names, and are tokenized while the job runs."""
        if keys.get("path") is None:
            raise ValueError("sft: reads one folder; name it in path")
        for name in ("split", "validation", "cache_path"):
            if keys.get(name) is not None:
                raise ValueError(
                    f"sft: what is trained on and evaluated with lies in training.jsonl and validation.jsonl of path; "
                    f"remove {name}"
                )
        if keys.get("tokenizer") is None:
            raise ValueError("sft: rows are text; name the tokenizer")


def data_problems(data: Data, megatron: bool, bridge: bool) -> Iterator[Problem]:
    """Yield the keys that only scripts with Megatron's arguments read, or Bridge alone, where the job's is none of
    them."""
    if data.sft is not None and not bridge:
        yield ("data", "sft"), "is a word of megatron-bridge; remove it, or take backend: megatron-bridge"
    if data.attention_masks and (bridge or not megatron):
        yield ("data", "attention_masks"), "is a key of megatron-lm; remove it, or take backend: megatron-lm"
    if megatron:
        return
    for name in OF_MEGATRON:
        if getattr(data, name) is not None:
            yield ("data", name), "is a word of megatron-lm; remove it for deepspeed"


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


def with_absolute_paths(data: Data, absolute: Callable[[str], str]) -> Data:
    """Return `data` with `absolute` of every path. A tokenizer is a path where its type reads a file; else it may be a
    name."""
    in_a_file = data.tokenizer is not None and data.tokenizer_type in OF_A_FILE
    return replace(
        data,
        path=None if data.path is None else absolute(data.path),
        blend=tuple(BlendPart(absolute(part.path), part.weight) for part in data.blend),
        validation=tuple(BlendPart(absolute(part.path), part.weight) for part in data.validation),
        cache_path=None if data.cache_path is None else absolute(data.cache_path),
        tokenizer=absolute(str(data.tokenizer)) if in_a_file else data.tokenizer,
    )
