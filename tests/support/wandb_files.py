"""W&B's offline files read back: records of its own protobuf schema in LevelDB's log format.

wandb-core, which writes them, reads them only to upload them. Format: a head of seven bytes (`:W&B`, a number, a
version), then blocks of 32 KiB that begin with the file; in them pieces of records, each with a checksum (4 bytes), a
length (2) and whether it is whole (1), the first (2), a middle (3) or the last (4) piece.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD, PIECE = 32768, 7, struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4


def read_back(folder: Path) -> dict[str, Any]:
    """Of one offline run: its id, project, name, settings, the last summary and its exit code."""
    from wandb.proto import wandb_internal_pb2  # late: all who collect the tests import this module

    (path,) = folder.glob("*.wandb")
    contents: dict[str, Any] = {"summary": {}, "exit": None}
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            contents |= {"id": record.run.run_id, "project": record.run.project, "name": record.run.display_name}
            contents["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "summary":
            for item in record.summary.update:
                contents["summary"][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        elif kind == "exit":
            contents["exit"] = record.exit.exit_code
    return contents


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    at, whole = HEAD, b""
    while at + PIECE.size <= len(data):
        if BLOCK - at % BLOCK < PIECE.size:  # no piece begins here
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = PIECE.unpack_from(data, at)
        assert kind in (WHOLE, FIRST, 3, LAST), f"no piece of a record at byte {at}"
        at += PIECE.size
        whole = (b"" if kind in (WHOLE, FIRST) else whole) + data[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            yield whole
