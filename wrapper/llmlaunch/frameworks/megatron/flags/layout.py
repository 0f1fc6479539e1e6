"""How the job is split: the sizes of the groups, stages, and what the optimizer and Megatron-FSDP shard."""

from __future__ import annotations

from functools import partial

from llmlaunch.frameworks.megatron.flags.model import PATTERN_FLAGS
from llmlaunch.frameworks.megatron.flags.row import (
    HEADS,
    MODEL,
    PARSED,
    STAGES,
    Explained,
    Flag,
    PlannedJob,
    SinceThen,
    Space,
    alias,
    chosen,
    flag,
    within,
)
from llmlaunch.frameworks.megatron.flags.stages import (
    CHUNKS,
    EMBEDDING,
    FIRST,
    LAST,
    LAYERS_OF_A_CHUNK,
    LOSS,
    WRITTEN,
    stage_flags,
)
from llmlaunch.frameworks.megatron.parser import dest_of
from llmlaunch.frameworks.megatron.sharding import (
    FIRST_STAGE,
    STRATEGIES,
    asks_for_sharding,
    gradient_format,
    made_in_shards,
)

ADAM, DDP = "optimizer", "ddp"  # sections of Bridge
SPLIT, STAGE = "layout.layers_by_stage", "layout.zero_stage"
HIDES = "hides communication"
OF_SPLIT = "split of the job"
SHARDING_STAGES = {strategy: stage for stage, strategy in STRATEGIES.items()}


def _size(name: str, key: str) -> Flag:
    return flag(name, key, read=lambda space: space.get(dest_of(name)) or 1, subject=OF_SPLIT)


def _stages(name: str, job: PlannedJob) -> object:
    if job.shape.mamba is not None:
        return None
    before_loss = job.techniques.heads_before_loss
    value = stage_flags(job.layout, job.shape.mtp_num_layers, before_loss).get(name)
    keys = (SPLIT, "layout.mtp_stage") if before_loss and name != CHUNKS else None
    return value if value is None else Explained(value, keys)


def _stage_flag(name: str, field: str | None = None) -> Flag:
    bridge = MODEL if field is None else ((f"{MODEL}.{field}", PARSED),)
    return flag(name, SPLIT, bridge, write=partial(_stages, name), reads={})


STAGE_ROWS: tuple[Flag, ...] = (
    flag(
        FIRST,
        SPLIT,
        ((f"{MODEL}.num_layers_in_first_pipeline_stage", PARSED),),
        write=partial(_stages, FIRST),
        read=lambda space: list(space[STAGES]) or "even",
    ),
    _stage_flag(LAST, "num_layers_in_last_pipeline_stage"),
    _stage_flag(EMBEDDING),
    _stage_flag(LOSS),
    flag(WRITTEN, SPLIT, write=partial(_stages, WRITTEN), reads={"layout.mtp_stage": lambda space: space.get(HEADS)}),
    flag(
        CHUNKS,
        "layout.virtual_pipeline",
        ((f"{MODEL}.virtual_pipeline_model_parallel_size", PARSED),),
        write=partial(_stages, CHUNKS),
        read=lambda space: space.get("num_virtual_stages_per_pipeline_rank") or 1,
        decides=SPLIT,
    ),
    alias(LAYERS_OF_A_CHUNK, "layout.virtual_pipeline", decides=SPLIT),
)


def _distributed(job: PlannedJob) -> bool:
    return job.layout.zero_stage == 1


def _sharded(job: PlannedJob) -> bool:
    return job.layout.zero_stage >= FIRST_STAGE


def _zero_stage(space: Space) -> int:
    """Megatron-FSDP with a strategy that shards the optimizer alone is the distributed optimizer's stage."""
    if space.get("use_torch_fsdp2"):
        return max(STRATEGIES)
    if space.get("use_megatron_fsdp"):
        return SHARDING_STAGES.get(str(space.get("data_parallel_sharding_strategy")), 1)
    return int(bool(space.get("use_distributed_optimizer")))


OPTIMIZER_FIELDS = ((f"{ADAM}.use_distributed_optimizer", True), (f"{DDP}.use_distributed_optimizer", True))
GATHER_FIELDS = ((f"{DDP}.overlap_param_gather", True), (f"{ADAM}.overlap_param_gather", True))
OVERLAPPED = "hides communication of the distributed optimizer"


def _has_experts(space: Space) -> bool:
    return bool(space.get("num_experts"))


def _expert(name: str, key: str, why: str = "") -> Flag:
    size = within(_has_experts, _size(name, key))[0]
    return flag(name, key, when=lambda job: job.shape.moe is not None, reads=size.reads, why=why, decides=True)


GROUP_ROWS: tuple[Flag, ...] = (
    _size("--tensor-model-parallel-size", "layout.tensor"),
    alias("--model-parallel-size", "layout.tensor", subject=OF_SPLIT),
    _size("--pipeline-model-parallel-size", "layout.pipeline"),
    _size("--context-parallel-size", "layout.context"),
    *STAGE_ROWS,
    *PATTERN_FLAGS,
    flag(
        "--sequence-parallel",
        "layout.sequence_parallel",
        form=bool,
        read=lambda space: bool(space.get("sequence_parallel")),
    ),
    _expert("--expert-model-parallel-size", "layout.expert"),
    _expert("--expert-tensor-parallel-size", "layout.expert_tensor", "its default is the tensor parallel size, not 1"),
    flag("--use-distributed-optimizer", STAGE, OPTIMIZER_FIELDS, write=_distributed, read=_zero_stage),
    chosen(
        "--overlap-grad-reduce",
        bridge=((f"{DDP}.overlap_grad_reduce", True),),
        keys=STAGE,
        why=HIDES,
        when=_distributed,
        added=OVERLAPPED,
        only_helps=True,
        subject="buckets and order of gradients",
    ),
    chosen(
        "--overlap-param-gather",
        bridge=GATHER_FIELDS,
        keys=STAGE,
        why=HIDES,
        when=_distributed,
        added=OVERLAPPED,
        only_helps=True,
        subject="buckets and order of gradients",
    ),
)

SHARDING_ROWS: tuple[Flag, ...] = (
    flag(
        "--use-megatron-fsdp",
        STAGE,
        (("dist.use_megatron_fsdp", True), (f"{DDP}.use_megatron_fsdp", True)),
        write=_sharded,
        reads={},
    ),
    flag("--data-parallel-sharding-strategy", STAGE, DDP, form=STRATEGIES.get, when=_sharded, reads={}),
    chosen(
        "--use-distributed-optimizer",
        bridge=OPTIMIZER_FIELDS,
        keys=STAGE,
        why="Megatron-FSDP switches it on anyway",
        when=_sharded,
    ),
    chosen(
        "--overlap-grad-reduce",
        keys=STAGE,
        why=HIDES,
        when=_sharded,
        subject="buckets and order of gradients",
        bridge=None,
    ),
    chosen(
        "--overlap-param-gather",
        keys=STAGE,
        why=HIDES,
        when=_sharded,
        subject="buckets and order of gradients",
        bridge=None,
    ),
    chosen(
        "--megatron-fsdp-main-grads-dtype",
        lambda job: gradient_format(job.recipe),
        DDP,
        keys="training.gradient_dtype",
        why="Megatron-FSDP does not read --accumulate-allreduce-grads-in-fp32; by itself it accumulates in bf16 with "
        "bf16",
        when=_sharded,
        added="Megatron-FSDP accumulates in bf16 by itself",
        since=SinceThen(
            "sharding-since-0.19",
            asks_for_sharding,
            "2 and 3 are Megatron-FSDP, whose gradients core 0.16 cannot be told the format of "
            "(--megatron-fsdp-main-grads-dtype); pin 0 or 1, or name a newer backend.version",
            STAGE,
        ),
        subject="Megatron-FSDP",
    ),
    chosen(
        "--no-gradient-accumulation-fusion",
        keys=STAGE,
        why="fused, it needs Transformer Engine 2.10",
        when=_sharded,
        added="fused, Megatron-FSDP needs Transformer Engine 2.10",
        subject="fused weight gradients",
    ),
    chosen(
        "--init-model-with-meta-device",
        keys=STAGE,
        why="no device ever holds the whole model",
        when=lambda job: _sharded(job) and made_in_shards(job.shape),
        added=True,
        subject="Megatron-FSDP",
    ),
    alias("--use-torch-fsdp2", STAGE),
)

LAYOUT_FLAGS: tuple[Flag, ...] = (*GROUP_ROWS, *SHARDING_ROWS)
