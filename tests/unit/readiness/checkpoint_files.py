"""Checkpoints as the frameworks write them, small: parts of real ones (tests/data/checkpoints), and made-up ones."""

from __future__ import annotations

import pickle
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = "iter_0000020"
WEIGHT = bytes(900_000)  # a checkpoint of so few bytes would be another model's
OFFSET = 61789  # of the common state in the file whose .metadata is in DATA


def archive(content: Any) -> bytes:
    """Return the begin of a file of torch.save: a record that holds a pickle as it is, without tensors."""
    name, data = b"archive/data.pkl", content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
    return (
        struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 2056, 0, 0, 0, 0, 0, 0, len(name), 4) + name + b"FB\0\0" + data
    )


def common_state(arguments: dict[str, Any], sharding: str | None = "dp_reshardable", **more: Any) -> dict[str, Any]:
    """Return what Megatron-LM keeps beside the tensors; `sharding` None is without a distributed optimizer."""
    content = {} if sharding is None else {"distrib_optim_sharding_type": sharding}
    return {"args": Namespace(**arguments), "iteration": 20, "content_metadata": content, **more}


def megatron_folder(folder: Path, state: Any, old: bool = True) -> Path:
    """Write a checkpoint of the format torch_dist: with common.pt, as cores before 0.19 do, else with an object among
    the tensors."""
    saved = folder / ITERATION
    saved.mkdir(parents=True)
    (folder / TRACKER).write_text("20")
    (saved / "__1_0.distcp").write_bytes(WEIGHT)
    (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    if old:
        (saved / "common.pt").write_bytes(archive(state))
        (saved / ".metadata").write_bytes(b"x")
    else:
        (saved / ".metadata").write_bytes((DATA / "megatron-0.19-tp2.metadata").read_bytes())
        content = (DATA / "megatron-0.19-tp2.common_state").read_bytes() if state is None else archive([state])
        (saved / "__0_0.distcp").write_bytes(bytes(OFFSET) + content)
    return saved


def bridge_folder(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write a checkpoint of Megatron-Bridge, with changes of its settings."""
    saved = folder / ITERATION
    saved.mkdir(parents=True)
    (folder / TRACKER).write_text("20")
    text = (DATA / "bridge-0.6.run_config.yaml").read_text()
    for before, after in (("save_optim: false", "save_optim: true"), *changes):
        assert before in text
        text = text.replace(before, after)
    (saved / "run_config.yaml").write_text(text)
    (saved / "metadata.json").write_text("{}")
    (saved / "__0_0.distcp").write_bytes(WEIGHT)
    return saved


def deepspeed_folder(folder: Path, *names: str, tag: str = "step-20", model: bytes = b"x") -> Path:
    """Write a checkpoint of DeepSpeed: files of these names, those of models with the content `model`."""
    saved = folder / tag
    saved.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    (saved / "weight.bin").write_bytes(WEIGHT)
    for name in names:
        (saved / name).write_bytes(model if name.endswith("model_states.pt") else b"x")
    return saved


def zero_names(ranks: int, tensor: int = 1, sharded: bool = False) -> list[str]:
    """Return the files of so many data parallel ranks; `sharded` is ZeRO's stage 3."""
    places = [f"zero_pp_rank_{rank}_mp_rank_{part:02d}" for part in range(tensor) for rank in range(ranks)]
    whole = [f"mp_rank_{part:02d}_model_states.pt" for part in range(tensor)]
    models = [f"{place}_model_states.pt" for place in places] if sharded else whole
    return [*models, *(f"bf16_{place}_optim_states.pt" for place in places)]
