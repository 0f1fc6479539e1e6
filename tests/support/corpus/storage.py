"""The files of the corpus: a case on a line, as JSON, compressed. Cases of a file are much alike, often a megabyte
apart, so that LZMA makes a hundredth of them."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "data" / "corpus"
PARTS = ("gallery", "megatron-lm", "megatron-bridge", "deepspeed", "scripts")
FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2**26},)

Row = dict[str, Any]


def read_part(part: str, folder: Path = FOLDER) -> list[Row]:
    """Return the rows of one part: the case, and under `answer` what was answered when the corpus was written."""
    text = lzma.decompress((folder / f"{part}.jsonl.xz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def write_part(part: str, rows: Iterable[Row], folder: Path = FOLDER) -> None:
    """Write the rows of one part; the same rows give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
    (folder / f"{part}.jsonl.xz").write_bytes(lzma.compress(text.encode(), lzma.FORMAT_XZ, filters=list(FILTERS)))
