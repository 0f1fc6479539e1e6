"""What a measured record of Megatron-LM, Megatron-Bridge or Megatron-FSDP says of the options that decide its bytes,
and what only the source of a published record says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.calibration.records import Record
from llmlaunch.calibration.stated.completion import is_bridge_benchmark
from llmlaunch.cluster.cards import capability_of_card
from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.framework_version import minor
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.sharding_facts import megatron_fsdp_facts
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import OptimizerInstances
from llmlaunch.techniques.switches import FULL_ITERATION, TensorOverlap
from llmlaunch.techniques.technique import key_of
from llmlaunch.workload import OptimizerFormats

# Names of number formats in records and recipes -> Transformer Engine's recipes. A format without a recipe has one
# scale to a tensor: that of many steps is Megatron's default, that of the step Megatron-Bridge's, and both keep as many
# bytes.
FP8_RECIPES = {
    "fp8": "delayed",
    "delayed": "delayed",
    "fp8_ds": "delayed",
    "tensorwise": "tensorwise",
    "fp8_cs": "tensorwise",
    "blockwise": "blockwise",
    "fp8_sc": "blockwise",
    "mxfp8": "mxfp8",
    "fp8_mx": "mxfp8",
    "nvfp4": "nvfp4",
}
# Records of Megatron-Bridge's benchmarks have the flag of its model, which says false; what decides is the number
# format, and those gather narrow parameters (src/megatron/bridge/training/mixed_precision.py, perf_recipes/_common.py,
# 2026-08), fp4 from a release on, but for the runs whose own recipe says false (perf_recipes/deepseek,
# perf_recipes/kimi). Any other record means what it says.
BRIDGE_GATHERS = ("delayed", "tensorwise", "mxfp8")
BRIDGE_GATHERS_FP4_SINCE = "release 26.06"
BRIDGE_KEEPS_WIDE = (("deepseek_v3", "H100"), ("kimi_k2", "GB200"))
# Bytes of the optimizer a version shards over data parallelism alone, by (version, card); elsewhere none. Every branch
# of this fork reads `get_data_parallel_group(with_context_parallel=True)`, and its 94 GB grid agrees. Its 40 GB grid
# does not: so priced, two runs that died need 29 and 30 GiB of 40. With 12 or 8 of the 12 bytes over data alone, runs
# that fitted are priced above the card. Four bytes (one fp32 copy) contradict neither; what in that build does it is
# not known.
OVER_DATA = {("okoge-kaz/Megatron-LM fork, Oct 2024", "A100-40GB"): 4.0}
# Versions of Megatron core that records name otherwise: FlagPerf's cases pin core_v0.6.0 and, for Llama 2, a FlagScale
# of 2023 (training/benchmarks/llama3_8B/megatron/README.md, training/nvidia/*-megatron/README.md, FlagPerf 1b5a030).
PINNED = {"NGC-era Megatron-LM pinned in FlagPerf case Dockerfile (not extracted)": "0.6"}
# Builds whose torch recorded streams. The page of the fork says that some of its runs were made
# again with TORCH_NCCL_AVOID_RECORD_STREAMS=1 (scripts/abci/Llama-3.1-8B/4d_parallelism.md, f06b3a1), not which. Its
# runs of 16,384 tokens on H100 are among them: two of them ran that need as much as two of 8,192 tokens that died, and
# could not have with streams recorded.
# FlagPerf's images have torch 2.1 and 2.3 (NGC 23.09 and 24.02; training/nvidia/docker_image/megatron*/Dockerfile,
# 1b5a030) and set no such variable. With streams recorded its tensor-parallel runs need 2 GiB more than predicted, 5
# without, and the margins they decide fall, that of a 40 GB card to 1.8 GiB and 0.9 %: less than four deaths of other
# families need that nothing explains yet. So they are priced without, until those are explained.
BEFORE_TORCH_2_7 = frozenset({"okoge-kaz/Megatron-LM fork, Oct 2024"})
MADE_AGAIN = {("okoge-kaz/Megatron-LM fork, Oct 2024", "H100-94GB", 16384)}
TWO_LOSS_COPIES_UNTIL = (0, 7)
# That FlagScale (26cd664) trains the model in megatron/model, by its own layers, whatever its records say.
FLAGSCALE_LLAMA = "FlagOpen/FlagPerf@1b5a030:training/nvidia/llama2_70B-megatron/"


def megatron_record_facts(record: Record, techniques: Techniques, assumed: dict[str, Any]) -> MemoryFacts:
    """Return the facts of a complete record of Megatron-LM or Megatron-Bridge."""
    return _activation_as_recorded(record, megatron_facts(megatron_options(record, assumed)))


def fsdp_record_facts(record: Record, techniques: Techniques, assumed: dict[str, Any]) -> MemoryFacts:
    """Return the facts of a complete record of Megatron-FSDP."""
    return _activation_as_recorded(record, megatron_fsdp_facts(megatron_options(record, assumed)))


def _activation_as_recorded(record: Record, facts: MemoryFacts) -> MemoryFacts:
    fused = facts.layer.gated_activation_fused and bool(record["implementation"].get("gated_activation_fused"))
    return replace(facts, layer=replace(facts.layer, gated_activation_fused=fused))


def megatron_options(record: Record, assumed: dict[str, Any]) -> MegatronOptions:
    """Return what a complete record of Megatron says, or what its source says, which is put into `assumed`."""
    optimizer, implementation, precision = record["optimizer"], record["implementation"], record["precision"]
    legacy = _trains_legacy_model(record, assumed)
    local = legacy or implementation.get("transformer_impl") == "local"
    recipe = FP8_RECIPES[precision["fp8_recipe"]] if precision.get("fp8_recipe") else None
    return MegatronOptions(
        precision=precision["compute"],
        gradient_dtype=optimizer["gradient_dtype"],
        optimizer_bytes=optimizer.get("state_bytes_per_parameter"),
        optimizer=OptimizerFormats(**optimizer["formats"]) if optimizer.get("formats") else None,
        muon="muon" in optimizer["name"],
        matrices_whole=str(record.get("backend_version")).startswith(("0.19", "core_v0.19", "core_r0.19")),
        optimizer_instances=optimizer.get(key_of(OptimizerInstances)) or 1,
        loss=implementation["cross_entropy_fusion"],
        eager_layers=legacy and record["model"]["normalization"] == "RMSNorm",
        two_loss_copies=_two_loss_copies(record),
        compiled=(record.get("source") or {}).get("evidence") != "traced",  # under fake tensors nothing is
        fp8_recipe=recipe,
        fp8_parameters=_gathers_narrow(record, recipe, assumed),
        optimizer_bytes_over_data=OVER_DATA.get((str(record.get("backend_version")), record["gpu"]), 0.0),
        transformer_engine=not local,
        gradient_accumulation_fusion=implementation["gradient_accumulation_fusion"],
        # --wgrad-deferral-limit is not recorded with the runs we have; Megatron's own tests set 2
        deferred_head_gradients=2 if implementation.get("defer_embedding_wgrad") else 0,
        context_all_to_all=implementation.get("cp_comm_type") == "a2a" and record["parallelism"]["context"] > 1,
        tp_comm_overlap=bool(implementation.get(key_of(TensorOverlap))),
        expandable_segments=bool(implementation.get("expandable_segments")),
        streams_recorded=_streams_recorded(record, assumed),
        compute_capability=capability_of_card(record["gpu"]),
    )


def _trains_legacy_model(record: Record, assumed: dict[str, Any]) -> bool:
    if str((record.get("source") or {}).get("citation")).startswith(FLAGSCALE_LLAMA):
        assumed["implementation.legacy_models"] = True
        return True
    return bool(
        record["implementation"].get("legacy_models") and record["implementation"]["transformer_impl"] == "local"
    )


def _streams_recorded(record: Record, assumed: dict[str, Any]) -> bool:
    recorded = record["implementation"].get("streams_recorded")
    version = str(record.get("backend_version"))
    if recorded is None and version in BEFORE_TORCH_2_7:
        recorded = (version, record["gpu"], record["sequence_length"]) not in MADE_AGAIN
        assumed["implementation.streams_recorded"] = recorded
    return bool(recorded)


def _two_loss_copies(record: Record) -> bool:
    version = str(record.get("backend_version"))
    number = minor(PINNED.get(version, version))
    return number is not None and number <= TWO_LOSS_COPIES_UNTIL


def _gathers_narrow(record: Record, recipe: str | None, assumed: dict[str, Any]) -> bool:
    """Whether parameters are kept and gathered in the narrow format."""
    flag = "fp4_param_gather" if recipe == "nvfp4" else "fp8_param_gather"
    if record["precision"].get(flag) or not is_bridge_benchmark(record):
        return bool(record["precision"].get(flag))
    fp4 = recipe == "nvfp4" and str(record.get("backend_version")) >= BRIDGE_GATHERS_FP4_SINCE
    if not (fp4 or recipe in BRIDGE_GATHERS) or (record["model"]["name"], record["gpu"]) in BRIDGE_KEEPS_WIDE:
        return False
    assumed[f"precision.{flag}"] = True
    return True


def captured_graphs(record: Record) -> tuple[str, ...]:
    """Return what a published record captures, where it says by which implementation: of NVIDIA's perf recipes the
    local one captures the iteration, Transformer Engine's the MLPs of dense models and of mixtures what runs before
    tokens travel (Megatron-Bridge, perf_recipes/llama, deepseek, qwen, gpt_oss, 2026-08). A peak that torch allocated
    does not count the tensors of a pool that is replayed, so such records are priced without graphs."""
    implementation = record["implementation"].get("cuda_graph")
    if implementation in (None, "none", False) or record["peak_kind"] == "allocated":
        return ()
    if implementation in ("local", FULL_ITERATION) and not record["model"].get("moe"):
        return (FULL_ITERATION,)
    return ("attn", "moe_router", "moe_preprocess") if record["model"].get("moe") else ("mlp",)
