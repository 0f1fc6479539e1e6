"""Records that state their job by sections as inputs of the estimator: which facts apply, what was assumed, or why a
record cannot be priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from llmlaunch.calibration.cases import Case, Unsupported
from llmlaunch.calibration.evidence import JobClass
from llmlaunch.calibration.records import CPU, UNFUSED, Record, machine_of
from llmlaunch.calibration.stated.completion import (
    brings_recipes,
    complete,
    in_performance_summary,
    with_every_field,
)
from llmlaunch.calibration.stated.trainers import TRAINERS, Trainer, refuse_unread
from llmlaunch.cluster.cards import capability_of_card
from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.facts import MemoryFacts
from llmlaunch.layout import AMOUNTS, OFFLOAD_LAYERS, RECOMPUTE_NAMES, Layout
from llmlaunch.memory.job import Job
from llmlaunch.models.sections import section_from, sections_of
from llmlaunch.models.shape import (
    OF_FAMILIES,
    OF_MEMORY,
    OF_TIME,
    MlaShape,
    ModelShape,
    MoeShape,
    Router,
)
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.switches import CudaGraphs, GraphScope, TensorOverlap, TokenDispatch
from llmlaunch.techniques.technique import key_of
from llmlaunch.workload import Workload

NO_MACHINES: Mapping[str, Cluster] = {}
NARROW = ("fp8", "mxfp8", "nvfp4")
# Bytes a second that each device has of its node's adapters, by family. Said of ABCI's A nodes: four HDR adapters of
# 200 Gb/s for eight A100s. Not confirmed by a page of the site or a measurement; the profile's figure is for one each.
# Jean Zay's A100 nodes have four Omni-Path adapters of 100 Gb/s for eight devices (BigScience's chronicles), ATorch's
# machines 800 Gb/s a node (its README).
FABRICS = {"fujii-grid-A100-40GB": 12.5e9, "bigscience-steps": 6.25e9, "atorch-steps": 12.5e9}
# Trainers whose loader makes an s x s attention mask for every sample, by version: this fork's launch scripts say
# --reset-attention-mask and do not turn the mask off (megatron/core/datasets/gpt_dataset.py).
MASKS = ("okoge-kaz/Megatron-LM fork, Oct 2024",)
# Megatron-Bridge's performance recipes overlap tensor parallelism wherever it is used, but not with this format
# (src/megatron/bridge/perf_recipes/llama/*/llama3*.py, 2026-08); NVIDIA's tables do not say so.
NOT_OVERLAPPED = "nvfp4"
UNSPECIFIC_RECIPES = ("fp8", "fp4")  # of published tables: a width, not a recipe
ROUTER_FIELDS = (*OF_MEMORY, *OF_TIME)
OF_THE_LAYOUT = (*AMOUNTS, "layers_by_stage")  # keys of `techniques` that Layout holds
SHAPE_SIZES = (  # the same in a record and in ModelShape
    *("name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim"),
    *("normalization", "position_embedding"),
)
SHAPE_FLAGS = ("tied_embeddings", "gated_mlp", "linear_bias", "qk_layernorm")
SPLITS = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor")
SIZES = (*SPLITS, "virtual_pipeline", "micro_batch_size")


def case_of(
    record: Record, clusters: Mapping[str, Cluster] = NO_MACHINES, trainers: Mapping[str, Trainer] = TRAINERS
) -> Case:
    """Return the estimator's inputs for a record of one of the `trainers`. `clusters` are the machines of known
    accelerators (`cluster.cards.machines`). If its batch is not known, a full pipeline of micro-batches is
    assumed. Raises Unsupported with the reason if it cannot be priced."""
    record = with_every_field(record)
    trainer = trainers.get(record["backend"])
    if trainer is None:
        priced = ", ".join(trainers)
        raise Unsupported(
            f"backend {record['backend']!r} is shown as it was measured, and not priced; priced are {priced}"
        )
    _refuse(record, trainer)
    refuse_unread(record, trainer.unread)
    record, assumed = complete(record, trainer.defaults)
    shape, layout, techniques = _shape(record), _layout(record), _techniques(record, trainer)
    facts = _with_kernels(record, trainer.facts(record, techniques, assumed))
    facts = trainer.as_ran(record, shape, facts, assumed)
    shape, layout = trainer.adapted(record, shape, layout, assumed)
    microbatches = record.get("num_microbatches")
    batch = record.get("global_batch_size")
    if not microbatches and batch:
        microbatches = batch // (layout.data * layout.micro_batch_size)
    if not microbatches:
        microbatches = assumed["num_microbatches"] = layout.pipeline
    workload = Workload(
        sequence_length=record["sequence_length"],
        global_batch_size=batch or microbatches * layout.data * layout.micro_batch_size,
        precision=record["precision"]["compute"],
    )
    layout = replace(layout, layers_by_stage=_stages(record, trainer, shape, layout))
    group = record["parallelism"].get("microbatch_group") if layout.virtual_pipeline > 1 else None
    job = Job(shape, workload, facts, group, techniques)
    return Case(
        job,
        layout,
        int(microbatches),
        job_class(record, trainer),
        _on_its_fabric(record, clusters),
        timed_job=_timed_job(record, job, layout),
        batch_known=bool(batch),
        assumed=assumed,
    )


def _stages(record: Record, trainer: Trainer, shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Return the layers of each virtual stage, nothing if they are even. A record has those of each rank: with several
    chunks the embedding takes the place of a layer in the first chunk of the first rank, the head in the last of the
    last (`--account-for-embedding-in-pipeline-split`, core 0.19); other ranks spread theirs."""
    by_stage = (record.get("techniques") or {}).get("layers_by_stage")
    if by_stage:
        return tuple(by_stage)
    uneven = record["parallelism"].get("layers_per_pipeline_rank") or trainer.split(shape, layout)
    if not uneven:
        return _ends_for_layers(shape, layout) if trainer.ends_count else ()
    ranks, p, v = [int(n) for n in uneven], layout.pipeline, layout.virtual_pipeline
    if len(ranks) != p or sum(ranks) != shape.num_layers:
        raise Unsupported(f"layers_per_pipeline_rank {uneven} does not add up to {shape.num_layers} layers")
    chunks = [[-(-layers // v)] * v for layers in ranks]
    for rank, layers in enumerate(ranks):
        if 0 < rank < p - 1:
            chunks[rank] = [layers // v + (chunk < layers % v) for chunk in range(v)]
            continue
        missing = sum(chunks[rank]) - layers
        order = range(v) if rank == 0 else range(v - 1, -1, -1)
        for chunk in order:
            removed = min(missing, chunks[rank][chunk])
            chunks[rank][chunk] -= removed
            missing -= removed
    return tuple(chunks[rank][chunk] for chunk in range(v) for rank in range(p))


def _ends_for_layers(shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Return the split in which the embedding and the head each stand for a layer, so that the first and the last
    virtual stage have one layer less. Megatron refuses layers that its stages do not divide otherwise
    (`--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split`; arguments.py validate_args,
    core 0.19). Llama 3.1 405B and Qwen3 235B, with 126 and 94 layers, are split so in NVIDIA's perf recipes."""
    stages = layout.pipeline * layout.virtual_pipeline
    if stages == 1 or not shape.num_layers % stages:
        return ()
    each, left = divmod(shape.num_layers + 2, stages)
    return () if left else (each - 1, *(each,) * (stages - 2), each - 1)


def _refuse(record: Record, trainer: Trainer) -> None:
    backend = record["backend"]
    if record["gpu"] == CPU and not trainer.runs_on_cpus:
        raise Unsupported(f"what a process of {backend} holds on a CPU-only machine is not known; DeepSpeed's is")
    if record["peak_kind"] == "resident" and record["gpu"] != CPU:
        raise Unsupported(
            "resident memory is predicted on CPU-only machines; beside a GPU, the node's is (peak kind host)"
        )
    optimizer = record["optimizer"]
    if optimizer["name"] not in ("adam", *trainer.optimizers):
        raise Unsupported(f"optimizer.name {optimizer['name']!r}: the states it keeps are not modelled for {backend}")
    recipe = record["precision"].get("fp8_recipe")
    if recipe and recipe not in trainer.formats:
        raise Unsupported(
            f"precision.fp8_recipe {recipe!r}: {_why_not_priced(recipe, tuple(trainer.formats), backend)}"
        )
    graphs = key_of(CudaGraphs)
    unknown = set((record.get("techniques") or {}).get(graphs) or ()) - set(get_args(GraphScope))
    if unknown:
        raise Unsupported(f"techniques.{graphs} {sorted(unknown)}: what these graphs keep is not modelled")
    amount_known = record.get("techniques") or _offloads_checkpoints(record, trainer)
    if record["implementation"].get("cpu_activation_offload") and not amount_known:
        raise Unsupported(
            "implementation.cpu_activation_offload: of how many layers the activations leave the device is not recorded"
        )


def _why_not_priced(recipe: str, formats: Sequence[str], backend: str) -> str:
    if formats and recipe in UNSPECIFIC_RECIPES:
        return f"does not say how it scales, which decides the copies kept; known are {', '.join(formats)}"
    return f"not modelled for {backend}, whose known ones are {', '.join(formats) or 'none'}"


def _shape(record: Record) -> ModelShape:
    m, moe, mla = record["model"], record["model"].get("moe"), record["model"].get("mla")
    flags: Record = {name: bool(m.get(name)) for name in SHAPE_FLAGS}
    rates: Record = {name: m.get(name) or 0.0 for name in ("attention_dropout", "hidden_dropout")}
    return ModelShape(
        **{name: m[name] for name in SHAPE_SIZES},
        **flags,
        **rates,
        vocab_size=m["padded_vocab_size"],
        max_position_embeddings=record["sequence_length"],
        mtp_num_layers=m.get("mtp_num_layers") or 0,
        moe=_moe(moe, m["num_layers"], m["ffn_hidden_size"]) if moe else None,
        mla=MlaShape(**{"q_lora_rank": None, **mla}) if mla else None,
        **_family_fields(m),
    )


def _family_fields(model: Record) -> dict[str, Any]:
    """Return the fields that only records of our own runs have."""
    values = {name: model[name] for name in OF_FAMILIES if model.get(name) is not None}
    sections = {
        name: section_from(cls, values[name]) for name, cls in sections_of(ModelShape).items() if name in values
    }
    return values | sections


def _moe(moe: Mapping[str, Any], layers: int, ffn_hidden_size: int) -> MoeShape:
    return MoeShape(
        num_experts=moe["num_experts"],
        topk=moe["topk"],
        ffn_hidden_size=moe.get("ffn_hidden_size") or ffn_hidden_size,
        shared_expert_ffn_hidden_size=moe.get("shared_expert_ffn_hidden_size") or 0,
        layer_pattern=tuple(moe.get("layer_pattern") or (1,) * layers),
        capacity_factor=moe.get("capacity_factor"),
        grouped_gemm=moe.get("grouped_gemm"),
        shared_expert_gate=bool(moe.get("shared_expert_gate")),
        latent_size=moe.get("latent_size"),
        router=Router(**{name: value for name, value in (moe.get("router") or {}).items() if name in ROUTER_FIELDS}),
    )


def _with_kernels(record: Record, facts: MemoryFacts) -> MemoryFacts:
    """Return the facts with the kernels that a record names, whatever its trainer."""
    implementation = record["implementation"]
    attention = replace(
        facts.attention,
        attention_scores_saved=implementation.get("attention") in UNFUSED,
        attention_narrow=bool(implementation.get("fp8_attention")),
    )
    mixture = replace(facts.mixture, experts_fused=bool(implementation.get("fused_grouped_mlp")))
    if implementation.get("forced_load_balancing"):  # random scores in place of the router's
        mixture = replace(mixture, expert_imbalance=1.0)
    states = replace(facts.states, pad_vocabulary=False)  # the record's own padded size is used
    return replace(facts, states=states, attention=attention, mixture=mixture)


def _offloads_checkpoints(record: Record, trainer: Trainer) -> bool:
    """Whether everything that full recompute keeps is offloaded: the only amount that a record of one trainer tells."""
    implementation, full = record["implementation"], record["recompute"]["granularity"] == "full"
    return bool(implementation.get("cpu_activation_offload")) and full and trainer.offloads_all


def _techniques(record: Record, trainer: Trainer) -> Techniques:
    """Return a record's techniques: of our own runs from a section for them, of others from the fields that tell. The
    dispatcher of tokens is recorded with the experts."""
    dispatch = key_of(TokenDispatch)
    dispatcher = (record["model"].get("moe") or {}).get(dispatch)
    if record.get("techniques"):
        stated = {dispatch: dispatcher, **record["techniques"]}
        return Techniques.from_json({name: value for name, value in stated.items() if name not in OF_THE_LAYOUT})
    recompute = record["recompute"]
    return Techniques(
        token_dispatcher=dispatcher,
        recompute_modules=tuple(recompute.get("modules") or ()),
        recompute_method=recompute["method"] if recompute.get("method") in ("uniform", "block") else "uniform",
        offload_checkpoints=_offloads_checkpoints(record, trainer),
        offload_optimizer=1.0 if record["optimizer"].get("offload") else 0.0,
        cuda_graphs=trainer.graphs(record),
    )


def _layout(record: Record) -> Layout:
    p = record["parallelism"]
    return Layout(
        **{name: p[name] for name in SPLITS},
        virtual_pipeline=p["virtual_pipeline"] or 1,
        micro_batch_size=record["micro_batch_size"],
        sequence_parallel=int(bool(p.get("sequence_parallel")) and p["tensor"] > 1),
        zero_stage=int(record["optimizer"]["zero_stage"] or 0),
        recompute=RECOMPUTE_NAMES.index(record["recompute"]["granularity"]),
        recompute_layers=record["recompute"].get("num_layers") or 0,
        offload_layers=(record.get("techniques") or {}).get(OFFLOAD_LAYERS, 0),
    )


def job_class(record: Record, trainer: Trainer) -> JobClass:
    """Return the class of jobs that a record belongs to."""
    precision = record["precision"]
    narrow = precision.get("fp8_recipe") is not None or str(precision.get("compute")).startswith(NARROW)
    capability = capability_of_card(record["gpu"])
    return JobClass(
        backend=trainer.table,
        mixture=bool(record["model"].get("moe")),
        narrow=narrow,
        capability=None if capability is None else str(capability),
        whole_segments=_switched_off(record),
    )


def _switched_off(record: Record) -> bool:
    """Whether segments do not expand where its trainer's runs have them expand: Megatron-Bridge's benchmarks."""
    expand = record["implementation"].get("expandable_segments")
    return brings_recipes(record) and (expand is False or (expand is None and not in_performance_summary(record)))


def _on_its_fabric(record: Record, clusters: Mapping[str, Cluster]) -> Cluster | None:
    cluster, fabric = machine_of(record, clusters), FABRICS.get(record["family"])
    if cluster is None or fabric is None:
        return cluster
    return replace(cluster, fabric_link=Link(fabric, cluster.fabric_link.latency_seconds))


def _timed_job(record: Record, job: Job, layout: Layout) -> Job:
    """Return the job whose step is timed."""
    facts = job.facts
    if record.get("backend_version") in MASKS:
        facts = replace(facts, host=replace(facts.host, loader_mask=True))
    overlap_unknown = record["implementation"].get(key_of(TensorOverlap)) is None
    if brings_recipes(record) and overlap_unknown and layout.tensor > 1:
        overlapped = (record["precision"] or {}).get("fp8_recipe") != NOT_OVERLAPPED
        facts = replace(facts, exchange=replace(facts.exchange, user_buffers=int(overlapped)))
    return replace(job, facts=facts)
