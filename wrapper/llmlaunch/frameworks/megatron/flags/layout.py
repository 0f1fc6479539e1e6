"""How the job is split: the sizes of the groups, stages, and what the optimizer and Megatron-FSDP shard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import groupby

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
from llmlaunch.frameworks.megatron.parser import dest_of
from llmlaunch.frameworks.megatron.sharding import (
    FIRST_STAGE,
    STRATEGIES,
    asks_for_sharding,
    gradient_format,
    made_in_shards,
)
from llmlaunch.layout import Layout

Split = tuple[int, ...]

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"
CHUNKS, WRITTEN = "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout"
LAYERS_OF_A_CHUNK = "--num-layers-per-virtual-pipeline-stage"
STAGE_FLAGS = (FIRST, LAST, EMBEDDING, LOSS, CHUNKS, WRITTEN, LAYERS_OF_A_CHUNK)


def stage_flags(layout: Layout, mtp_layers: int = 0, before_loss: bool = False) -> Mapping[str, object]:
    """Return the flags of the stages of `layout` with their values. `mtp_layers` heads of multi-token prediction stand
    before the loss, on the last stage, where Megatron puts them without a layout too, or on the stage before it
    (`before_loss`)."""
    chunks = {CHUNKS: layout.virtual_pipeline} if layout.virtual_pipeline > 1 else {}
    if before_loss and layout.uneven:
        return {WRITTEN: written_layout(layout.layers_by_stage, mtp_layers, before_loss)}
    if len(set(layout.layers_by_stage)) <= 1:
        return chunks
    for notation in (_first_and_last, _slots):
        flags = notation(layout)
        if flags is not None:
            return {**flags, **chunks}
    return {WRITTEN: written_layout(layout.layers_by_stage, mtp_layers)}


def _first_and_last(layout: Layout) -> dict[str, object] | None:
    """Layers of the first and the last rank, where all its chunks are alike and so are the ranks between."""
    p, split = layout.pipeline, layout.layers_by_stage
    ranks = split[:p]
    if split != ranks * layout.virtual_pipeline or not all(ranks):
        return None
    first, last = ranks[0] * layout.virtual_pipeline, ranks[-1] * layout.virtual_pipeline
    if p == 2:  # both counts leave no rank between, which transformer_layer.py divides by where ranks have chunks
        return {FIRST: first}
    middle = set(ranks[1:-1])
    if len(middle) != 1:
        return None
    usual = middle.pop()
    flags: dict[str, object] = {FIRST: first} if ranks[0] != usual else {}
    return flags | ({LAST: last} if ranks[-1] != usual else {})


def _slots(layout: Layout) -> dict[str, object] | None:
    """The first virtual stage holds one layer less for the embedding, the last one for the loss."""
    split = layout.layers_by_stage
    usual = max(split)
    embedding, loss = split[0] < usual, split[-1] < usual
    if split != (usual - embedding, *(usual,) * (len(split) - 2), usual - loss):
        return None
    return {flag: True for flag, present in ((EMBEDDING, embedding), (LOSS, loss)) if present}


def written_layout(split: Split, mtp_layers: int = 0, before_loss: bool = False) -> str:
    """The stages written out: E embedding, t layer, m prediction head, L loss, | between stages, *n repeats
    (core/transformer/pipeline_parallel_layer_layout.py parse_str_to_list): "Et*3|(t*4|)*2t*3mL"."""
    stages = [_repeated("t", count) for count in split]
    stages[0] = "E" + stages[0]
    stages[-2 if before_loss else -1] += _repeated("m", mtp_layers)
    *before, last = stages
    runs = ((stage, len(list(run))) for stage, run in groupby(before))
    text = "".join(f"{stage}|" if times == 1 else f"({stage}|)*{times}" for stage, times in runs)
    return text + last + "L"


def _repeated(letter: str, times: int) -> str:
    return letter * times if times < 3 else f"{letter}*{times}"


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
