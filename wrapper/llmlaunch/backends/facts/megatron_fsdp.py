"""What Megatron-FSDP keeps in memory: ZeRO stages 2 and 3 of Megatron-LM."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.backends.facts.elements import ELEMENT_BYTES
from llmlaunch.backends.facts.megatron import MegatronOptions, megatron_facts
from llmlaunch.memory.facts import FullSharding, MemoryFacts

__all__ = ["megatron_fsdp_facts"]

PREFETCHED_ELEMENTS = 5e8
QUEUED_ELEMENTS = 1e9
MXFP8_SCALE_BYTES = 2.0 / 32.0  # a byte for every 32 elements, in both orientations


def megatron_fsdp_facts(options: MegatronOptions) -> MemoryFacts:
    """Megatron core 0.19 with --use-megatron-fsdp: optim_grads_params is ZeRO stage 3, optim_grads stage 2, which
    leaves the parameters whole (param_and_grad_buffer.py `_init_each_parameter_group_buffers`).

    The shards of parameters, main gradients and fp32 main parameters are persistent buffers; a transformer layer is one
    unit, gathered before it runs and released after (megatron_fsdp/megatron_fsdp.py, mcore_fsdp_adapter.py, core 0.19).
    Gathering runs ahead by whole units until half of max(1e9, two units) elements are on their way, gradients wait for
    their reduction up to max(1e9, two units) elements (`suggested_AG_prefetch_size`, `suggested_RS_queue_capacity`).
    The embedding and the head are no units and stay gathered. A linear's gradient is copied into the unit's bucket
    unless it is accumulated there.

    Narrow parameters rest in shards of one byte an element, mxfp8 in a second orientation too, which other recipes make
    when a unit is gathered (`_init_each_parameter_group_buffers`, `transpose_weight_buffer`); the buffers hold raw data
    alone, and scales stay whole beside the parameters (mixed_precision.py `fp8_set_raw_data`). Without narrow
    parameters, narrow weights are Transformer Engine's cache, which knows of no unit.
    """
    base = megatron_facts(options)
    copies = 0.0 if base.quantized is None else base.quantized.weight_copy_bytes
    narrow = base.quantized is not None and base.quantized.replaces_parameters
    made = 0.0 if options.gradient_accumulation_fusion else ELEMENT_BYTES[options.precision]
    return replace(
        base,
        backend="megatron-fsdp",
        source="megatron/core/distributed/fsdp/src/megatron_fsdp, core 0.19",
        moved_to_buffers=False,
        full_sharding=FullSharding(
            gathered_bytes=copies if narrow else base.parameter_bytes,
            root_bytes=base.parameter_bytes,
            gradient_bytes=made,
            reduced_bytes=base.gradient_bytes,
            gathered_blocks=2.0,
            gathered_elements=PREFETCHED_ELEMENTS,
            reduced_blocks=2.0,
            reduced_elements=QUEUED_ELEMENTS,
            first_stage=3,
            narrow_bytes=2.0 if options.fp8_recipe == "mxfp8" else 1.0,
            narrow_scale_bytes=MXFP8_SCALE_BYTES if options.fp8_recipe == "mxfp8" else 0.0,
        ),
        weight_gradient_fused=True,
        weight_gradient_stubs=options.gradient_accumulation_fusion and base.weight_gradient_stubs,
    )
