"""Files as a job needs them, small: datasets, tokenizers, checkpoints, a checkout of Megatron-LM."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from llmlaunch.layout import Layout
from llmlaunch.readiness.readiness import Readiness, readiness_of
from llmlaunch.recipe.load import load_recipe


def readiness(
    folder: Path, text: str, *overrides: str, layout: Layout | None = None, environment: Mapping[str, str] | None = None
) -> Readiness:
    """Return what a recipe in `folder` lacks, with a checkout of Megatron-LM where the environment names none."""
    path = folder / "recipe.yaml"
    path.write_text(text)
    variables = {"MEGATRON_LM_PATH": str(checkout(folder / "Megatron-LM")), **(environment or {})}
    before = Path.cwd()
    os.chdir(folder)  # where a person would type the overrides
    try:
        return readiness_of(load_recipe(path, overrides), Layout() if layout is None else layout, variables)
    finally:
        os.chdir(before)


def checkout(folder: Path, version: tuple[int, int, int] = (0, 19, 0)) -> Path:
    """Write what marks a checkout of Megatron-LM."""
    numbers = "".join(f"{name} = {part}\n" for name, part in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True))
    return write(folder, {"pretrain_gpt.py": "x", "megatron/core/package_info.py": numbers})


def write(folder: Path, files: Mapping[str, str | bytes | object]) -> Path:
    """Write files below `folder`: text, bytes, or a value as JSON."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, (str, bytes)) else json.dumps(content)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def index(lengths: list[int], token_type: int = 4, version: int = 1) -> bytes:
    """Return an .idx as megatron/core/datasets/indexed_dataset.py writes it, one document a sequence."""
    size = {1: 1, 4: 4, 8: 2}.get(token_type, 4)
    starts = [size * sum(lengths[:place]) for place in range(len(lengths))]
    count = len(lengths)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, token_type, count, count + 1)
    return head + struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *starts, *range(count + 1))


def dataset(folder: Path, prefix: str, lengths: tuple[int, ...] = (3, 4)) -> Path:
    """Write an indexed dataset of such sequences."""
    return write(folder, {f"{prefix}.bin": bytes(4 * sum(lengths)), f"{prefix}.idx": index(list(lengths))})


def sentence_pieces(count: int) -> bytes:
    """Return a SentencePiece model of so many pieces, which is a message of protobuf, and a field that follows."""
    pieces = [b"\x0a" + bytes([len(text)]) + text for text in (b"piece %d" % number for number in range(count))]
    return b"".join(pieces) + b"\x12\x02\x18\x01"
