"""Asks DeepSpeed's own code whether it takes a job. A program that lives as long as its input: one JSON object a line
in, one out.

in    {"config": {...}, "data": 2}                          DeepSpeedConfig and the engine's own sanity checks
      beside it, any of
      {"total": 16}         train_batch_size, where the config leaves it to DeepSpeed
      {"gpu": true}         as on an accelerator that has every precision
      {"model": {...}}      a Hugging Face configuration: what AutoTP and Ulysses make of it
      {"sequence": 2048}    tokens of a sequence
      {"pipeline": true}    of a script that builds a PipelineModule
      {"machine_fp16": true} as if this machine's CPU computed fp16 in hardware
out   {"refused": null or "why"}

{"reads": true} is answered with {"refused": [names]}: the keys DeepSpeedConfig looks for in a ds_config, by section.

Nothing is trained and no group is made: DeepSpeed's own classes and functions are called, with a process mesh that
says what size each group has.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from deepspeed.runtime.zero.config import ZeroStageEnum
from transformers import AutoConfig, AutoModelForCausalLM

Json = dict[str, Any]
Refusal = str | None


class Mesh:
    """The process mesh DeepSpeed asks for its data parallel size."""

    def __init__(self, data: int) -> None:
        self.data = data

    def get_data_parallel_world_size(self) -> int:
        return self.data


class Unmade(DeepSpeedEngine):  # type: ignore[misc]
    """An engine of a configuration alone: enough for the checks that look at nothing else."""

    def __init__(self, config: DeepSpeedConfig, pipeline: bool) -> None:
        torch.nn.Module.__init__(self)
        self._config = config
        self.client_optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        self.client_lr_scheduler = None
        self.pipeline_parallelism = pipeline
        self.global_rank = 0

    def destroy(self) -> None:
        """Nothing was made."""


def configuration(case: Json) -> DeepSpeedConfig:
    config = dict(case["config"])
    if "total" in case:
        config["train_batch_size"] = case["total"]
    taken = DeepSpeedConfig(config, mpu=Mesh(case["data"]))
    if taken.world_size != case["data"]:
        raise AssertionError(f"judged for {taken.world_size} ranks instead of {case['data']}")
    if taken.zero_optimization_stage != config["zero_optimization"]["stage"]:
        raise AssertionError(f"ZeRO stage {taken.zero_optimization_stage} was understood")
    return taken


def engine(case: Json, taken: DeepSpeedConfig) -> None:
    """DeepSpeedEngine's checks, and the one of PipelineEngine.__init__ (runtime/pipe/engine.py, 0.19.8)."""
    unmade = Unmade(taken, case.get("pipeline", False))
    hardware = torch.ops.mkldnn._is_mkldnn_fp16_supported
    machine = case.get("machine_fp16", hardware())
    asked = mock.patch.object(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", return_value=machine)
    with asked, fp16_answer(supported=case.get("gpu", False)):
        unmade._do_sanity_check()
    unmade._do_optimizer_sanity_check(unmade.client_optimizer)
    if case.get("pipeline"):
        assert unmade.zero_optimization_stage() < ZeroStageEnum.gradients, "pipeline with ZeRO-2 or ZeRO-3"


@contextlib.contextmanager
def fp16_answer(supported: bool) -> Iterator[None]:
    """Set what the accelerator answers about fp16. Of the machine itself it would depend on the CPU: one with
    avx512_fp16 takes it (accelerator/cpu_accelerator.py is_fp16_supported, 0.19.8), and most do not."""
    kind = type(get_accelerator())
    machines_own = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: supported
    try:
        yield
    finally:
        kind.is_fp16_supported = machines_own


@lru_cache(maxsize=64)
def bare_model(said: str) -> torch.nn.Module:
    """One layer, without a single number in memory."""
    config = AutoConfig.for_model(**{**json.loads(said), "num_hidden_layers": 1, "layer_types": None})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tensor_parallel(case: Json, taken: DeepSpeedConfig) -> None:
    """The model's own plan, as _apply_autotp_partitioning reads it (runtime/engine.py, 0.19.8)."""
    if taken.tensor_parallel_config.autotp_size > 1 and "model" in case:
        plan = _get_hf_tp_plan(bare_model(json.dumps(case["model"], sort_keys=True)))
        assert TPPlanConverter.convert(plan), "no plan"


def sequence_parallel(case: Json, taken: DeepSpeedConfig) -> None:
    """Heads of the model and tokens of the sequence, over a group of that size."""
    ranks = case["config"].get("sequence_parallel_size", 1)
    if ranks == 1 or "model" not in case:
        return
    said = case["model"]
    group = SimpleNamespace(size=ranks)
    heads = said["num_attention_heads"]
    ulysses_sp.UlyssesSPAttentionHF(
        attn=None,
        batch_size=1,
        attn_head_count=heads,
        attn_head_size=said.get("head_dim") or said["hidden_size"] // heads,
        kv_head_count=said["num_key_value_heads"],
        num_hidden_layers=1,
        process_group=group,
        seq_length_is_variable=True,
    )
    tokens = torch.zeros(1, case["sequence"], dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens.clone(), "position_ids": tokens.clone()}
    next(iter(ulysses_sp.UlyssesSPDataLoaderAdapter([batch], 0, group, ranks, torch.device("cpu"))))


class Listening(dict[str, Any]):
    """A section that remembers which keys it was asked for."""

    asked: set[str]

    def __init__(self, name: str, held: Json) -> None:
        super().__init__(held)
        self.name, self.asked = name, set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.name}{key}")
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(f"{self.name}{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(f"{self.name}{key}")
        return super().get(key, default)

    def __copy__(self) -> Listening:
        return self


def read_keys() -> list[str]:
    checkpointing = Listening("activation_checkpointing.", {"profile": False})
    types = Listening("data_types.", {})
    plain = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    config = Listening("", {**plain, "activation_checkpointing": checkpointing, "data_types": types})
    DeepSpeedConfig(config, mpu=Mesh(1))
    return sorted(config.asked | checkpointing.asked | types.asked)


def judge(case: Json) -> Refusal | list[str]:
    if case.get("reads"):
        return read_keys()
    checks: tuple[Callable[[Json, DeepSpeedConfig], None], ...] = (engine, tensor_parallel, sequence_parallel)
    try:
        taken = configuration(case)
        for check in checks:
            check(case, taken)
    except Exception as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return None


def copied(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    """An all-gather among ranks that all hold the same."""
    for part in parts:
        part.copy_(mine)


def main() -> None:
    # Without a process group DeepSpeedConfig would silently judge for one rank, and Ulysses not at all.
    comm.get_rank = lambda group=None: 0
    comm.get_world_size = lambda group=None: group.size
    comm.all_gather = copied
    ulysses_sp.register_all_to_all_group = lambda group: None
    for line in sys.stdin:
        print(json.dumps({"refused": judge(json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
