"""What a recipe says of its data: made up, one dataset, or a blend of several, and how it was tokenized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from llmlaunch.documents.text import Line, PathText
from llmlaunch.documents.validate import StrictModel
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.recipe.types import BlendPart, Data, Recipe

__all__ = ["DataFile", "data", "data_problems", "hub_tokenizer", "with_places_found"]

Problem = tuple[KeyPath, str]
SHARES = re.compile(r"(?:[1-9]\d*(?:\.\d+)?|0\.\d*[1-9]\d*)(?:,\d+(?:\.\d+)?){2}")  # something to train on
# Megatron's types that need no `tokenizer` beside them, and those whose `tokenizer` is a file
WITHOUT_MODEL = ("NullTokenizer", "GPT2BPETokenizer")
OF_A_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
OF_MEGATRON = ("split", "cache_path", "tokenizer_type")


def _shares(text: str) -> str:
    if not SHARES.fullmatch(text):
        raise ValueError("must be three shares, for training (not 0), validation and test, such as 99,1,0")
    return text


Shares = Annotated[str, AfterValidator(_shares), WithJsonSchema({"type": "string", "pattern": f"^{SHARES.pattern}$"})]


class BlendPartFile(StrictModel):
    """One dataset of a blend."""

    path: PathText = Field(description="Indexed dataset: the prefix of its .bin and .idx files")
    weight: Annotated[float, Field(gt=0, le=10**12)] = Field(
        description="Share of the samples that come from it, in any unit"
    )


class DataFile(StrictModel):
    """What it is trained on: exactly one of mock, path, blend and python_source."""

    mock: bool = Field(False, description="Made-up tokens of the framework: for measuring speed and memory")
    path: PathText | None = Field(None, description="The framework's own format, a text file or a folder of text files")
    blend: Annotated[list[BlendPartFile], Field(min_length=1, max_length=10_000)] | None = Field(
        None, description="Several indexed datasets and their weights, instead of `path`"
    )
    python_source: bool = Field(False, description="Source files of Python's standard library, byte by byte")
    split: Shares | None = Field(
        None, description="megatron-lm: shares for training, validation and test; absent = 99,1,0"
    )
    cache_path: PathText | None = Field(
        None, description="megatron-lm: folder for the indexes; absent = beside the dataset"
    )
    tokenizer: Line | None = Field(
        None, description="Tokenizer of `path` or `blend`: a Hugging Face one, or a file as `tokenizer_type` says"
    )
    tokenizer_type: (
        Literal[
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "GPT2BPETokenizer",
            "NullTokenizer",
        ]
        | None
    ) = Field(
        None,
        description="megatron-lm: what `tokenizer` is; absent = HuggingFaceTokenizer, and NullTokenizer without one",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> DataFile:
        if self.mock + self.python_source + (self.path is not None) + (self.blend is not None) != 1:
            raise ValueError("give exactly one of mock: true, path: ..., blend: ... or python_source: true")
        return self

    @model_validator(mode="after")
    def _what_belongs_to_files(self) -> DataFile:
        if self.path is not None or self.blend is not None:
            return self
        for name in ("tokenizer", "tokenizer_type", "split", "cache_path"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} belongs to path or blend; remove it")
        return self

    @model_validator(mode="after")
    def _type_and_model(self) -> DataFile:
        if self.tokenizer_type is None or (self.tokenizer is None) == (self.tokenizer_type in WITHOUT_MODEL):
            return self
        if self.tokenizer is None:
            raise ValueError(f"tokenizer_type {self.tokenizer_type} needs tokenizer; name it, or remove the type")
        raise ValueError(f"tokenizer_type {self.tokenizer_type} reads no tokenizer; remove one of the two")


def data(file: DataFile) -> Data:
    """The same in plain values."""
    return Data(
        mock=file.mock,
        path=file.path,
        blend=tuple(BlendPart(part.path, float(part.weight)) for part in file.blend or ()),
        python_source=file.python_source,
        split=file.split,
        cache_path=file.cache_path,
        tokenizer=file.tokenizer,
        tokenizer_type=file.tokenizer_type,
    )


def data_problems(file: DataFile, backend: str) -> Iterator[Problem]:
    """What only the other backend reads."""
    if backend == "megatron-lm":
        return
    for name in OF_MEGATRON:
        if getattr(file, name) is not None:
            yield ("data", name), f"is a word of megatron-lm; remove it for {backend}"


def with_places_found(said: Data, found: Callable[[str], str]) -> Data:
    """Every path as `found` says. A tokenizer is one where its type reads a file; else it may be a name."""
    in_a_file = said.tokenizer is not None and said.tokenizer_type in OF_A_FILE
    return replace(
        said,
        path=None if said.path is None else found(said.path),
        blend=tuple(BlendPart(found(part.path), part.weight) for part in said.blend),
        cache_path=None if said.cache_path is None else found(said.cache_path),
        tokenizer=found(str(said.tokenizer)) if in_a_file else said.tokenizer,
    )


def hub_tokenizer(recipe: Recipe) -> str | None:
    """Return the name by which each rank would ask Hugging Face's hub for its tokenizer. None if no rank would: it is
    named by its path, of another kind, or the script is a person's own."""
    name, kind = recipe.data.tokenizer, recipe.data.tokenizer_type
    of_ours = recipe.backend.script is None and not recipe.data.mock and kind in (None, "HuggingFaceTokenizer")
    return name if name is not None and of_ours and not name.startswith("/") else None
