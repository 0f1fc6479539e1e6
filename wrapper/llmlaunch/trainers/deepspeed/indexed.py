"""Tokens of an indexed dataset, as Megatron-LM's tools/preprocess_data.py writes it: PREFIX.bin and PREFIX.idx.

The layout is that of megatron/core/datasets/indexed_dataset.py (core 0.16 to 0.19): PREFIX.bin holds the tokens of all
documents one after the other; PREFIX.idx says their type and how many there are.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch

from group import refuse

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
FIELDS = "<QBQQ"  # version, type of the tokens, sequences, documents
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class IndexedTokens:
    """The tokens of one dataset, in the order they are stored in. Nothing is read before it is asked for."""

    def __init__(self, prefix: Path) -> None:
        index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        with index.open("rb") as stream:
            header = stream.read(len(HEADER))
            fields = stream.read(struct.calcsize(FIELDS))
            if header != HEADER or len(fields) < struct.calcsize(FIELDS):
                refuse(f"{index}: is no index of a Megatron dataset")
            version, kind, sequences, _ = struct.unpack(FIELDS, fields)
            if version != VERSION or kind not in TYPES:
                refuse(f"{index}: version {version} with token type {kind} is unknown; version {VERSION} is read")
            lengths = np.frombuffer(stream.read(4 * sequences), dtype="<i4")
        self.type = np.dtype(TYPES[kind])
        self.total = int(lengths.sum(dtype=np.int64))
        if not data.exists() or data.stat().st_size < self.total * self.type.itemsize:
            refuse(f"{data}: is missing or shorter than the {self.total} tokens {index.name} counts")
        self.tokens = np.memmap(data, dtype=self.type, mode="r") if self.total else np.empty(0, self.type)

    def __len__(self) -> int:
        return self.total

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(self.tokens[start:stop].astype(np.int64))
