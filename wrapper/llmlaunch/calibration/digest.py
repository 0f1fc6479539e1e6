"""A digest of all that prices: the formula, its constants, the facts of the backends and how records are read."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

import llmlaunch

__all__ = ["MODULES", "ROOMS", "digest_of", "estimator_digest"]

ROOMS = ("memory", "models")
MODULES = (
    *("layout.py", "techniques.py", "workload.py", "number_formats.py"),
    *(
        f"backends/{name}.py"
        for name in ("deepspeed/facts", "deepspeed/megatron_deepspeed_facts", "fsdp", "megatron/facts")
    ),
    *(f"calibration/{name}.py" for name in ("complete", "defaults", "pricing", "records", "trainers", "unread")),
)


@cache
def estimator_digest() -> str:
    """sha256 over names and contents of this program's sources. Scores of predictions hold for predictions of one
    digest."""
    return digest_of(Path(llmlaunch.__file__).parent)


def digest_of(root: Path) -> str:
    """The same of the sources below another folder."""
    found = [path for room in ROOMS for path in (root / room).rglob("*") if path.suffix in (".py", ".json")]
    digest = sha256()
    for path in sorted([*found, *(root / name for name in MODULES)]):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
