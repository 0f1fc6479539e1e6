"""The facts and defaults that price each trainer's measured runs, and the fields of a record that decide bytes although
its formula does not read them.

A record is priced while such a field has the value that the formula assumes. With any other value the prediction would
be that of another run, so the record is refused, and the refusal names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from llmlaunch.calibration.cases import Unsupported
from llmlaunch.calibration.records import CPU, UNFUSED, Record
from llmlaunch.calibration.stated.completion import Default, defaults_of, is_bridge_benchmark
from llmlaunch.cluster.cards import capability_of_card
from llmlaunch.facts import Gathering, MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import (
    BUCKET_ELEMENTS,
    HUGGING_FACE_KINDS,
    MEGATRON_FORK_KIND,
    DeepSpeedOptions,
    ZeroSettings,
    bucket_bytes,
    deepspeed_facts,
    resident_facts,
    script_facts,
)
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.frameworks.framework_version import minor
from llmlaunch.frameworks.megatron.facts import LOSSES, MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.sharding_rules import megatron_fsdp_facts
from llmlaunch.frameworks.recorded import MEGATRON_FSDP, RECORDED_TRAINERS, RecordedTrainer
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import OptimizerInstances
from llmlaunch.techniques.switches import FULL_ITERATION, TensorOverlap
from llmlaunch.techniques.technique import key_of
from llmlaunch.workload import ELEMENT_BYTES, OptimizerFormats

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


Assumed = dict[str, Any]
"""Values that are assumed because a record does not have them, by field. Pricing a record adds to them."""


@dataclass(frozen=True)
class Unread:
    """A field, "section.name", that the formula of `tables` does not read. `expected` tells whether a known value is
    what the formula takes for granted, `why` what that is."""

    tables: tuple[str, ...]
    field: str
    expected: Callable[[Any, Record], bool]
    why: str


def expects(*values: Any) -> Callable[[Any, Record], bool]:
    return lambda value, record: value in values


def _the_precision(value: Any, record: Record) -> bool:
    return bool(value == record["precision"]["compute"])


def _stages(value: Any, record: Record) -> bool:
    return bool(value == 1 or record["implementation"].get("trainer") == "pipeline")


def _whole_sequence(value: Any, record: Record) -> bool:
    return not value or (record["parallelism"]["tensor"] or 1) == 1


def _no_wider_than_tensor(value: Any, record: Record) -> bool:
    return value in (1, record["parallelism"]["tensor"])


def _bytes_recorded(value: Any, record: Record) -> bool:
    optimizer = record["optimizer"]
    return bool(value == "fp32" or optimizer.get("formats") or optimizer.get("state_bytes_per_parameter"))


# The tables of facts with which Megatron core trains, and those of DeepSpeed with a Hugging Face model.
CORE = tuple(dict.fromkeys(t.table for t in RECORDED_TRAINERS.values() if t.framework.on_megatron_core))
DEEPSPEED = tuple(dict.fromkeys(t.table for t in RECORDED_TRAINERS.values() if t.table not in CORE))
OFF = expects(False, 0, "none")
ONE = expects(1)

UNREAD: tuple[Unread, ...] = (
    Unread(
        DEEPSPEED,
        "implementation.trainer",
        lambda trainer, record: trainer != MEGATRON_FORK_KIND,
        "Megatron-DeepSpeed trains another model than Hugging Face's, and is shown as it was measured",
    ),
    Unread(
        DEEPSPEED,
        "optimizer.state_bytes_per_parameter",
        expects(12),
        "masters and moments are counted in fp32, 12 bytes",
    ),
    Unread(DEEPSPEED, "optimizer.state_dtype", expects("fp32"), "moments are counted in fp32"),
    Unread(CORE, "optimizer.state_dtype", _bytes_recorded, "state_bytes_per_parameter must say their bytes"),
    Unread(DEEPSPEED + CORE, "optimizer.parameter_dtype", _the_precision, "parameters are counted in the precision"),
    Unread(DEEPSPEED, "optimizer.optimizer_instances", ONE, "all ranks share the states that are counted"),
    Unread(DEEPSPEED, "parallelism.pipeline", _stages, "a Hugging Face model is not split into stages"),
    Unread(DEEPSPEED, "parallelism.virtual_pipeline", ONE, "DeepSpeed's pipeline has one chunk to a stage"),
    Unread(DEEPSPEED, "parallelism.expert", ONE, "experts are counted as whole on every rank"),
    Unread(DEEPSPEED, "parallelism.expert_tensor", _no_wider_than_tensor, "experts are split as the layers are"),
    Unread(
        DEEPSPEED, "parallelism.sequence_parallel", _whole_sequence, "tensor ranks are counted with whole sequences"
    ),
    Unread(DEEPSPEED, "recompute.granularity", expects("none", "full"), "checkpoints are of whole layers"),
    Unread(DEEPSPEED, "recompute.num_layers", expects(0, 1), "every layer is a checkpoint of its own"),
    Unread(DEEPSPEED, "precision.fp8_param_gather", OFF, "parameters are gathered as they are"),
    Unread(
        DEEPSPEED,
        "implementation.cross_entropy_fusion",
        expects("none", "liger"),
        "of fused losses, Liger's is counted",
    ),
    Unread(
        CORE, "implementation.cross_entropy_fusion", expects(*LOSSES), f"the losses counted are {', '.join(LOSSES)}"
    ),
    Unread(DEEPSPEED, "implementation.torch_compile", OFF, "what compiled kernels spare is not counted"),
    Unread(DEEPSPEED, "implementation.cuda_graph", OFF, "the pool of a CUDA graph is not counted"),
    Unread(
        DEEPSPEED + CORE,
        "implementation.optimizer_in_backward",
        OFF,
        "gradients are counted until the optimizer's step",
    ),
    Unread(DEEPSPEED, "implementation.tp_comm_overlap", OFF, "user buffers are not counted"),
)


def unread_of(table: str) -> tuple[Unread, ...]:
    """Return the fields that the facts of a table do not read."""
    return tuple(unread for unread in UNREAD if table in unread.tables)


def refuse_unread(record: Record, fields: Sequence[Unread]) -> None:
    """Refuse a record with one of the fields that its trainer's facts do not read, unless the value is null, which is
    not known, or what the formula takes for granted.

    Raises:
        Unsupported: there is such a field.
    """
    for unread in fields:
        section, name = unread.field.split(".")
        value = record[section].get(name)
        if value is not None and not unread.expected(value, record):
            raise Unsupported(f"{unread.field} {value!r} is not priced for {record['backend']}: {unread.why}")


def _as_priced(record: Record, shape: ModelShape, facts: MemoryFacts, assumed: Assumed) -> MemoryFacts:
    return facts


def _as_recorded(record: Record, shape: ModelShape, layout: Layout, assumed: Assumed) -> tuple[ModelShape, Layout]:
    return shape, layout


def _no_graphs(record: Record) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Trainer:
    """How the records of one backend are priced.

    `table` names its facts: runs of trainers that share a table say something of one another. `facts` returns them for
    a complete record, and `as_ran` what its kind of script and its machine change about them. `adapted` returns model
    and layout as they are trained where that is not what the record says, and `split` the layers of each pipeline rank
    where the trainer has a split of its own. `formats` are the narrow number formats that are priced, and `optimizers`
    those besides Adam. `ends_count` is whether embedding and head stand for a layer each where only so the stages come
    out even, and `offloads_all` whether activation offload moves everything that is kept.
    """

    table: str
    facts: Callable[[Record, Techniques, Assumed], MemoryFacts]
    defaults: tuple[Default, ...]
    unread: tuple[Unread, ...]
    as_ran: Callable[[Record, ModelShape, MemoryFacts, Assumed], MemoryFacts] = _as_priced
    adapted: Callable[[Record, ModelShape, Layout, Assumed], tuple[ModelShape, Layout]] = _as_recorded
    split: Callable[[ModelShape, Layout], Sequence[int] | None] = lambda shape, layout: None
    graphs: Callable[[Record], tuple[str, ...]] = _no_graphs
    formats: Collection[str] = ()
    optimizers: tuple[str, ...] = ()
    runs_on_cpus: bool = False
    ends_count: bool = False
    offloads_all: bool = False


MUON = ("muon", "dist_muon")  # the second is the first with its layers' states spread over data parallel ranks


def _trainer(recorded: RecordedTrainer) -> Trainer:
    """Return how the records of a trainer are priced."""
    defaults, unread = defaults_of(recorded.name), unread_of(recorded.table)
    if not recorded.framework.on_megatron_core:
        return Trainer(
            recorded.table,
            deepspeed_record_facts,
            defaults,
            unread,
            as_ran=as_deepspeed_ran,
            runs_on_cpus=True,
        )
    if recorded.name == MEGATRON_FSDP:
        return Trainer(recorded.table, fsdp_record_facts, defaults, unread, formats=FP8_RECIPES, ends_count=True)
    return Trainer(
        recorded.table,
        megatron_record_facts,
        defaults,
        unread,
        graphs=captured_graphs,
        formats=FP8_RECIPES,
        optimizers=MUON,
        ends_count=True,
    )


TRAINERS: Mapping[str, Trainer] = {name: _trainer(recorded) for name, recorded in RECORDED_TRAINERS.items()}
"""The trainers that a recipe can choose, by the backend of their records."""
