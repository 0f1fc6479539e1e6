"""The tracer (llmlaunch/tracing/trace_ranks.py) for jobs that may have "adapters", the settings of Megatron-Bridge's
own LoRA: their model is then what this makes of Megatron core's, as its pre-wrap hook does before DDP. With "packed" a
sequence holds several rows."""

# ruff: noqa: E402 (the tracer lies in another folder)
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "wrapper" / "llmlaunch" / "tracing"))

import muon_stand_in

import trace_ranks

ROWS, LONGEST = 16, 2048
SITE = Path(sys.prefix) / "bridge-0.6"


def traced(job: trace_ranks.Job) -> dict[str, Any]:
    settings = job.get("adapters")
    if settings:
        import megatron_rank

        lora, own = lora_of_bridge()(**settings), megatron_rank.build_model
        megatron_rank.build_model = lambda *sizes, **options: lora(own(*sizes, **options))
    if job.get("packed"):
        import megatron_rank

        whole = megatron_rank.build_model
        megatron_rank.build_model = lambda *sizes, **options: of_packed_rows(whole(*sizes, **options))
    return own_tracer(job)


def of_packed_rows(model: Any) -> Any:
    """The model as Bridge's forward_step calls it where a sequence holds several rows (training/gpt_step.py, 0.6)."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    def forward(*tensors: Any, **options: Any) -> Any:
        ends = torch.zeros(ROWS + 1, dtype=torch.int32, device="cuda")
        lengths = {"max_seqlen_q": LONGEST, "max_seqlen_kv": LONGEST}
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **lengths)
        return own(*tensors, **options, packed_seq_params=packed)

    own, model.forward = model.forward, forward
    return model


def lora_of_bridge() -> Any:
    import absent_packages
    import megatron
    import only_what_is_asked

    sys.path.insert(0, str(SITE))
    megatron.__path__.append(str(SITE / "megatron"))
    absent_packages.install()
    only_what_is_asked.install(SITE)
    from megatron.bridge.peft.lora import LoRA

    return LoRA


own_tracer = trace_ranks.TRACERS["megatron"]
trace_ranks.TRACERS["megatron"] = traced

if __name__ == "__main__":
    import fake_cuda

    fake_cuda.install()
    muon_stand_in.install()
    trace_ranks.main()
