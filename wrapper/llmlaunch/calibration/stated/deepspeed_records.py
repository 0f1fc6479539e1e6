"""The options of a measured DeepSpeed run that decide its bytes, and its script and machine, from its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from llmlaunch.calibration.records import CPU, UNFUSED, Record
from llmlaunch.facts import Gathering, MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import (
    BUCKET_ELEMENTS,
    HUGGING_FACE_KINDS,
    DeepSpeedOptions,
    bucket_bytes,
    deepspeed_facts,
    resident_facts,
    script_facts,
)
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.frameworks.deepspeed.zero_settings import ZeroSettings
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from llmlaunch.workload import ELEMENT_BYTES


def deepspeed_record_facts(record: Record, techniques: Techniques, assumed: dict[str, Any]) -> MemoryFacts:
    """Return the facts of a complete record of DeepSpeed.

    Liger's Hugging Face model brings all its kernels, the gated activation and the norms among them, whatever the
    record says of those (AutoLigerKernelForCausalLM, liger_kernel/transformers/auto_model.py, 0.8)."""
    optimizer, implementation = record["optimizer"], record["implementation"]
    share = techniques.offload_optimizer
    options = DeepSpeedOptions(
        reduce_bucket_elements=implementation.get("reduce_bucket_elements") or BUCKET_ELEMENTS,
        zero=_zero_settings(implementation),
        split_from_start="live_elements" in implementation,  # our own runs make the model in shards
        precision=record["precision"]["compute"],
        accumulation=optimizer["gradient_dtype"],
        offload_optimizer=share == 1.0,
        fused_optimizer=implementation.get("fused_optimizer") is not False,
        offloaded_share=share % 1.0,
        sequence_ranks=record["parallelism"].get("context") or 1,
        eager_attention=implementation.get("attention") in UNFUSED,
        liger=implementation["cross_entropy_fusion"] == "liger",
        expandable_segments=bool(implementation.get("expandable_segments")),
    )
    return deepspeed_facts(options)


def as_deepspeed_ran(record: Record, shape: ModelShape, facts: MemoryFacts, assumed: dict[str, Any]) -> MemoryFacts:
    """Return the facts with what the record's script and its machine change: records of our own runs name the kind of
    script and the size of its buckets, those of a CPU-only machine the idle trainer that was measured there."""
    return _on_its_machine(record, _as_we_run_it(record, shape, facts), assumed)


def _as_we_run_it(record: Record, shape: ModelShape, facts: MemoryFacts) -> MemoryFacts:
    implementation, precision = record["implementation"], record["precision"]["compute"]
    elements, trainer = implementation.get("reduce_bucket_elements"), implementation.get("trainer")
    if not elements:
        return facts
    if trainer:
        facts = script_facts(facts, trainer)
    width = ELEMENT_BYTES[precision]  # in which gradients travel, with Ulysses too
    zero = replace(
        facts.zero,
        bucket_bytes=bucket_bytes(elements, precision, implementation.get("overlap_comm") is not False),
        lasting_bucket_bytes=elements * width,
    )
    facts = replace(facts, states=replace(facts.states, pad_vocabulary=False), zero=zero)
    return with_family(facts, shape, record["sequence_length"]) if trainer in HUGGING_FACE_KINDS else facts


def _on_its_machine(record: Record, facts: MemoryFacts, assumed: dict[str, Any]) -> MemoryFacts:
    if record["gpu"] != CPU:
        return facts
    baseline = record.get("baseline_bytes")
    facts = resident_facts(facts, baseline)
    if baseline is None:
        assumed["baseline_bytes"] = int(facts.allocator.context_bytes)
    return facts


def _zero_settings(implementation: Mapping[str, Any]) -> ZeroSettings:
    """Return the settings of a record's `implementation`: DeepSpeed's defaults where it says nothing, and what
    llmlaunch renders in a record of a run of its own, which names the kind of script."""
    ours, rendered = bool(implementation.get("trainer")), dict[str, Any]()
    if ours:
        rendered["reuse_elements"] = implementation.get("live_elements")
        rendered["prefetch_elements"] = implementation.get("reduce_bucket_elements")
    stated = {**rendered, **{f.name: implementation.get(f.name) for f in fields(Gathering)}}
    gathering = replace(Gathering(), **{name: value for name, value in stated.items() if value is not None})
    names = [f.name for f in fields(ZeroSettings) if f.name != "gathering"]
    others = {name: implementation[name] for name in names if implementation.get(name) is not None}
    return ZeroSettings(gathering=gathering, **{"overlap_comm": ours, **others})
