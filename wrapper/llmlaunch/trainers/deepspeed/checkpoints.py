"""Checkpoints that are whole or not named, and going on from the last."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adapters import is_quantized, save_adapters
from group import refuse, report

CHECKPOINT = re.compile(r"step-\d+")
MOST_CONVERTERS = 8  # each holds the optimizer states of one rank in host memory
CONVERTING = timedelta(hours=12)  # the watchdog has its own limit, watchdog.first_step_seconds


def save(engine: Any, folder: Path, step: int, evaluation: dict[str, Any]) -> None:
    """Writes a checkpoint, and names it in `latest` once it is whole. `evaluation` is what the evaluator knows by then.

    Not by DeepSpeed: its rank 0 writes `latest` before the other ranks have written theirs (save_checkpoint,
    runtime/engine.py, 0.19.8), and a power cut between the two leaves no checkpoint that loads.
    """
    report(f"saving step {step}")
    tag = f"step-{step}"
    engine.save_checkpoint(
        str(folder),
        tag=tag,
        client_state={"step": step, "evaluation": evaluation},
        save_latest=False,
        exclude_frozen_parameters=is_quantized(engine.module),
    )
    save_adapters(engine.module, folder / tag / "adapter")
    for path in written(engine, folder / tag):
        flush(path)
    dist.barrier()
    name_checkpoint(folder, "latest", tag)


def name_checkpoint(folder: Path, file: str, tag: str) -> None:
    """Has a file name a checkpoint: `latest`, or `best`, which is not removed when newer ones are there."""
    if dist.get_rank() == 0:
        fresh = folder / f"{file}.new"
        fresh.write_text(tag)
        flush(fresh)
        fresh.replace(folder / file)
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


def resume(engine: Any, folder: Path | None) -> dict[str, Any]:
    """Loads the checkpoint `latest` names, if there is one; returns the step it was saved after and what else the job
    knew then."""
    if folder is None or not (folder / "latest").exists():
        return {"step": 0}
    state = load(engine, folder, (folder / "latest").read_text().strip())
    report(f"resumed after step {state['step']}")
    return state


def load(engine: Any, folder: Path, tag: str, file: str = "latest") -> dict[str, Any]:
    """Loads the checkpoint that a file names; returns what else was saved."""
    refuse_torn(folder, file, tag, split=engine.zero_optimization())
    saved_by = states_of(folder / tag)
    if engine.zero_optimization() and saved_by != dist.get_world_size():
        state = load_converted(engine, folder, tag, saved_by)
    else:
        strict = not is_quantized(engine.module)
        _, state = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=strict)
    return {**state, "step": int(state["step"])}


def states_of(path: Path) -> int:
    """How many ranks have written optimizer states of ZeRO."""
    return len(list(path.glob("*zero_pp_rank_*_optim_states.pt")))


def refuse_torn(folder: Path, file: str, tag: str, split: bool) -> None:
    """DeepSpeed goes on without optimizer states, and says nothing, where a rank's file is missing."""
    path = folder / tag
    states = states_of(path)
    if not path.is_dir():
        wrong = "which is missing"
    elif split and not states:
        wrong = "which holds no optimizer states of ZeRO"
    elif split and states not in (dist.get_world_size(), saved_ranks(path)):
        wrong = f"which holds the optimizer states of {states} ranks; {saved_ranks(path)} have saved it"
    else:
        return
    others = ", ".join(sorted(p.name for p in folder.glob("step-*") if CHECKPOINT.fullmatch(p.name) and p != path))
    refuse(
        f"{folder}/{file} names {tag}, {wrong}. Write the name of a whole checkpoint into it"
        + (f" (there are {others})" if others else "")
        + ", or move the folder away to begin again at step 1"
    )


def saved_ranks(path: Path) -> int:
    """How many ranks saved a checkpoint: those that share its parameters out, times those that split each."""
    models = sorted(path.glob("*mp_rank_*_model_states.pt"))
    if not models:
        return 0
    state = torch.load(models[0], map_location="cpu", weights_only=False, mmap=True)
    return int(state["dp_world_size"]) * int(state["mp_world_size"])


def load_converted(engine: Any, folder: Path, tag: str, saved_by: int) -> Any:
    """Loads a checkpoint that another number of ranks has saved: DeepSpeed writes each parameter and its optimizer
    states into a file, from which every rank reads its share. Returns what else was saved."""
    frozen = any(not parameter.requires_grad for parameter in engine.module.parameters())
    if engine.mp_world_size > 1 or frozen:
        refuse(
            f"{folder}/{tag} was saved by {saved_by} ranks, and this job has {dist.get_world_size()}: with tensor "
            "parallelism or frozen weights it is not converted; train on as many ranks as before"
        )
    report(f"converting {tag} of {saved_by} ranks for {dist.get_world_size()}")
    converted = folder / f"{tag}-universal"
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        shutil.rmtree(converted, ignore_errors=True)  # of a job that was ended meanwhile
        convert(folder / tag, converted)
        store.set("converted", "")
    store.wait(["converted"], CONVERTING)  # a barrier would give up long before
    if not (converted / "zero").is_dir():
        refuse(f"{folder}/{tag} could not be converted for {dist.get_world_size()} ranks; why is above")
    engine._config.load_universal_checkpoint = True
    _, state = engine.load_checkpoint(str(folder), tag=converted.name)
    engine._config.load_universal_checkpoint = False
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(converted, ignore_errors=True)
    return state


def convert(source: Path, target: Path) -> None:
    """Has DeepSpeed convert a checkpoint, in a process that sees no GPU. Its words go to the log where it fails."""
    workers = str(min(MOST_CONVERTERS, len(os.sched_getaffinity(0))))
    words = ["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]
    words += ["--num_extract_workers", workers, "--num_merge_workers", workers]
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        report(done.stdout[-4000:])
        shutil.rmtree(target, ignore_errors=True)
