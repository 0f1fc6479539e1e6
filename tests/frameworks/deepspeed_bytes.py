"""Counts what DeepSpeed's optimizer classes hold, for test_deepspeed_bytes.py; trainer_cases.py starts its ranks.

A case has "name", "precision" and "config", and "fused": false for an AdamW that is not. Every engine trains a stack of
square linear layers, or, where a case has a "model", the Llama it describes with AutoTP or Ulysses as the config says
(such a case must be the last: its groups stay). Counted are live tensors after every phase of step three, and the most
allocated while the last backward and the step ran, all in bytes per parameter and beyond what was held before the
engine was made. Copies gloo makes of its own are left out. Of a case with a model to be "gathered", the elements that
ZeRO 3 gathers are counted.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

WIDTH, LAYERS = 256, 16
PARAMETERS = WIDTH * WIDTH * LAYERS
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALL = 1024  # bytes: step counters, losses
STEPS = 3  # states exist from the first, ZeRO 3 knows its order of modules from the second


def tensors() -> list[torch.Tensor]:
    gc.collect()
    found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return found + [thing.grad for thing in found if thing.is_leaf and thing.grad is not None]


def held() -> int:
    """Bytes of distinct live storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
    return sum(size for size in storages.values() if size >= SMALL)


def most_added(run: Callable[[], object]) -> int:
    """The most bytes allocated at once, beyond those at the start, while `run` goes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events: list[tuple[int, int]] = []

    def collect(node: Any, of_gloo: bool) -> None:
        of_gloo = of_gloo or node.name.startswith(("c10d::", "gloo:"))
        if hasattr(node.typed[1], "alloc_size") and not of_gloo:
            events.append((node.start_time_ns, node.typed[1].alloc_size))
        for child in node.children:
            collect(child, of_gloo)

    for root in profiled.profiler.kineto_results.experimental_event_tree():
        collect(root, of_gloo=False)
    now = most = 0
    for _, size in sorted(events):
        now += size
        most = max(most, now)
    return most


def counted(case: dict[str, Any]) -> dict[str, Any]:
    left = tensors()  # what earlier engines let go of late stays until this case is counted
    before = held()
    torch.manual_seed(1)
    dtype = DTYPES[case["precision"]]
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = torch.nn.Sequential(*layers).to(dtype)
    fused = case.get("fused", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=case["config"]
    )
    del model, optimizer
    microbatches = engine.gradient_accumulation_steps()
    batch = torch.ones(1, WIDTH, dtype=dtype)
    found: dict[str, int] = {}
    for step in range(STEPS):
        last_step = step == STEPS - 1
        for number in range(microbatches):
            loss = engine(batch).float().sum()
            if not last_step:
                engine.backward(loss)
                engine.step()
                continue
            if number < microbatches - 1:
                engine.backward(loss)
                engine.step()
                del loss
                found["accumulated"] = held()
                continue
            start = held()
            found["final"] = start + most_added(lambda loss=loss: engine.backward(loss))
            del loss
            start = held()
            found["step"] = start + most_added(engine.step)
            found["lasting"] = held()
    result: dict[str, Any] = {phase: (value - before) / PARAMETERS for phase, value in found.items()}
    result["class"] = type(engine.optimizer).__name__
    engine.destroy()
    left.clear()
    return result


def split(case: dict[str, Any]) -> dict[str, Any]:
    """The parameters of one rank, and bytes of all that lasts."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaConfig, LlamaForCausalLM

    config, left, before = case["config"], tensors(), held()
    model = LlamaForCausalLM(LlamaConfig(**case["model"], attn_implementation="sdpa")).to(DTYPES[case["precision"]])
    ranks = config.get("sequence_parallel_size", 1)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, micro_batch_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config, mpu=mpu
    )
    del model, optimizer
    length = case["tokens"] // ranks
    place = torch.arange(length)[None] + length * (dist.get_rank() if ranks > 1 else 0)
    for _ in range(STEPS):
        logits = engine(input_ids=torch.ones_like(place), position_ids=place, use_cache=False).logits
        engine.backward(logits.float().mean())
        engine.step()
        width = logits.shape[-1]
        del logits
    engine.optimizer.zero_grad()
    found = {"parameters": sum(p.numel() for p in engine.module.parameters()), "logits": width}
    found["lasting"] = held() - before
    left.clear()
    return found


def gathered(case: dict[str, Any]) -> dict[str, int]:
    """The most elements of gathered parameters, and of the buffers they arrive in, while the third step runs forward
    and backward, and those that are left behind it: looked at after each fetch of a module and each copy."""
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle as Handle
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.for_model(**case["gathered"])
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with deepspeed.zero.Init(config_dict_or_path=case["config"]):
        model = model_class(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case["config"])
    fetch, wait = Coordinator.fetch_sub_module, Handle.wait
    waiting: dict[Any, Any] = {}
    counts: list[int] = []

    def count(*more: Any) -> None:
        held = {p.data for p in model.parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE}
        handles = [handle for each in waiting.values() for handle in getattr(each, "handles", [each])]
        held |= {part for handle in (*handles, *more) for part in getattr(handle, "partitions", None) or ()}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t.numel()}
        counts.append(sum(storages.values()) // 2)

    def fetched(self: Any, module: Any, forward: bool) -> None:
        nonlocal waiting
        waiting = self._PartitionedParameterCoordinator__inflight_param_registry
        fetch(self, module, forward)
        count()

    def waited(self: Any, **options: Any) -> None:
        wait(self, **options)
        count(self)

    Coordinator.fetch_sub_module, Handle.wait = fetched, waited
    try:
        for _ in range(STEPS):
            counts.clear()
            tokens = torch.ones(1, 8, dtype=torch.long)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            most = max(counts)
            engine.step()
    finally:
        Coordinator.fetch_sub_module, Handle.wait = fetch, wait
    counts.clear()
    count()
    engine.destroy()
    return {"most": most, "persistent": counts[0]}


def print_counts(cases: list[dict[str, Any]]) -> None:
    """As one JSON line, by the names of the cases."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    kinds = {"model": split, "gathered": gathered}
    results = {case["name"]: next((kinds[k] for k in kinds if k in case), counted)(case) for case in cases}
    if dist.get_rank() == 0:
        print("COUNTED " + json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()
