"""Checkpoints that are whole or not named, and going on from the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adapters import save_adapters
from group import refuse, report


def save(engine: Any, folder: Path, step: int) -> None:
    """Writes a checkpoint, and names it in `latest` once it is whole.

    Not by DeepSpeed: its rank 0 writes `latest` before the other ranks have written theirs (save_checkpoint,
    runtime/engine.py, 0.19.8), and a power cut between the two leaves no checkpoint that loads.
    """
    report(f"saving step {step}")
    tag = f"step-{step}"
    engine.save_checkpoint(str(folder), tag=tag, client_state={"step": step}, save_latest=False)
    save_adapters(engine.module, folder / tag / "adapter")
    for path in written(engine, folder / tag):
        flush(path)
    dist.barrier()
    if dist.get_rank() == 0:
        fresh = folder / "latest.new"
        fresh.write_text(tag)
        flush(fresh)
        fresh.replace(folder / "latest")
    dist.barrier()


def written(engine: Any, folder: Path) -> list[Path]:
    """The files this rank wrote (runtime/engine.py `_get_zero_ckpt_prefix` and `_get_ckpt_name`, 0.19.8)."""
    data = dist.get_rank(engine.seq_data_parallel_group)
    model = engine.checkpoint_mp_rank
    files = list(folder.glob(f"*zero_pp_rank_{data}_mp_rank_{model:02d}_*"))
    if data == 0:
        files += folder.glob(f"mp_rank_{model:02d}_*")
    if dist.get_rank() == 0:
        files += (folder / "adapter").glob("*")
    return files


def flush(path: Path) -> None:
    """Returns when the file system has it."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def resume(engine: Any, folder: Path | None) -> int:
    """Loads the checkpoint `latest` names, if there is one; returns the steps already done."""
    if folder is None or not (folder / "latest").exists():
        return 0
    tag = (folder / "latest").read_text().strip()
    refuse_torn(folder, tag, split=engine.zero_optimization())
    _, state = engine.load_checkpoint(str(folder), tag=tag)
    done = int(state["step"])
    report(f"resumed after step {done}")
    return done


def refuse_torn(folder: Path, tag: str, split: bool) -> None:
    """DeepSpeed goes on without optimizer states, and says nothing, where a rank's file is missing."""
    path, ranks = folder / tag, dist.get_world_size()
    states = len(list(path.glob("*zero_pp_rank_*_optim_states.pt")))
    if not path.is_dir():
        wrong = "which is missing"
    elif split and not states:
        wrong = "which holds no optimizer states of ZeRO"
    elif split and states != ranks:
        wrong = f"which holds the optimizer states of {states} ranks; this job has {ranks}"
    else:
        return
    others = ", ".join(sorted(p.name for p in folder.glob("step-*") if p.is_dir() and p != path))
    refuse(
        f"{folder}/latest names {tag}, {wrong}. Write the name of a whole checkpoint into it"
        + (f" (there are {others})" if others else "")
        + ", or move the folder away to begin again at step 1"
    )
