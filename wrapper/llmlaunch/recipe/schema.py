"""What a recipe may say: every key, its type, range, default and meaning. The docs and editors read it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from llmlaunch.cluster.schema import ClusterFile, inline_or_name
from llmlaunch.documents.text import (
    EnvironmentName,
    EnvironmentValue,
    Line,
    Name,
    PathText,
    PluginOptions,
    SecretName,
    SetupLine,
    SlurmOptions,
)
from llmlaunch.documents.validate import StrictModel
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.models.schema import ShapeFile
from llmlaunch.recipe.amounts import TOKENS, token_count
from llmlaunch.recipe.containers import ContainerFile
from llmlaunch.recipe.datasets import DataFile
from llmlaunch.recipe.numbers import Betas, Fp8, OptimizerFile
from llmlaunch.recipe.recovery import OnOomKey, RestartKey, WatchdogKey
from llmlaunch.recipe.types import AUTO_NODES, MOST_NODES, MOST_STEPS

__all__ = ["HINTS", "RIVALS", "SHORTHAND", "RecipeFile"]

Count = Annotated[int, Field(ge=1, le=10**9)]
Tokens = Annotated[
    int,
    Field(ge=1, le=10**18),
    BeforeValidator(token_count),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 10**18}, {"type": "string", "pattern": TOKENS.pattern}]}
    ),
]

# what a plain word in the place of a mapping stands for
SHORTHAND = {"model": "base", "cluster": "base", "accelerator": "base", "backend": "name"}

# two keys that say the same in two ways: a word of the command line replaces the other one of the file
RIVALS: dict[KeyPath, KeyPath] = {
    ("training", "steps"): ("training", "tokens"),
    ("training", "tokens"): ("training", "steps"),
}

# keys that are unknown for a reason worth telling
HINTS: dict[KeyPath, str] = {
    ("training", "micro_batch_size"): "is part of the layout; write it under `layout:`",
    ("training", "nodes"): "stands at the top of the recipe, not under `training:`",
    ("max_nodes",): "stands under `budget:`",
    ("tokens",): "stands under `training:`",
}

T = TypeVar("T")
NodeCount = Annotated[int, Field(ge=1, le=MOST_NODES)]


def _auto_nodes(value: Any, check: ValidatorFunctionWrapHandler) -> int:
    chosen: int = AUTO_NODES if value == "auto" and isinstance(value, str) else check(value)
    return chosen


def _pin(check: Callable[[Any], bool], wanted: str) -> Callable[[Any], Any]:
    """A pin: one value, a list of allowed ones, or `auto`."""

    def validate(value: Any) -> Any:
        if value == "auto" and isinstance(value, str):
            return None
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError(f"is an empty list; give {wanted}, a list of such, or auto")
        for item in values:
            if not check(item):
                raise ValueError(f"must be {wanted}, a list of such, or auto")
        return tuple(dict.fromkeys(values)) if isinstance(value, list) else value

    return validate


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 10**9


def _is_amount(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9


def _is_stage(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3


def _one_or_many(one: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}, {"const": "auto"}]}


SizePin = Annotated[
    Any,
    AfterValidator(_pin(_is_size, "a whole number of at least 1")),
    WithJsonSchema(_one_or_many({"type": "integer", "minimum": 1})),
]
AmountPin = Annotated[
    Any,
    AfterValidator(_pin(_is_amount, "a whole number")),
    WithJsonSchema(_one_or_many({"type": "integer", "minimum": 0})),
]
StagePin = Annotated[
    Any, AfterValidator(_pin(_is_stage, "0, 1, 2 or 3")), WithJsonSchema(_one_or_many({"enum": [0, 1, 2, 3]}))
]
FlagPin = Annotated[
    Any,
    AfterValidator(_pin(lambda value: isinstance(value, bool), "true or false")),
    WithJsonSchema(_one_or_many({"type": "boolean"})),
]
RecomputePin = Annotated[
    Any,
    AfterValidator(_pin(lambda value: value in ("none", "selective", "full"), "none, selective or full")),
    WithJsonSchema(_one_or_many({"enum": ["none", "selective", "full"]})),
]


def _stages(value: Any) -> Any:
    if value == "auto" and isinstance(value, str):
        return None
    if value == "even" and isinstance(value, str):
        return ()
    if not isinstance(value, list) or len(value) < 2 or not all(_is_amount(item) for item in value):
        raise ValueError("must be auto, even, or the decoder layers of each stage in order, such as [21, 20, 20, 19]")
    return tuple(value)


StagesPin = Annotated[
    Any,
    AfterValidator(_stages),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2},
                {"enum": ["auto", "even"]},
            ]
        }
    ),
]


RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
Share = Annotated[float, Field(ge=0, le=1)]


class BackendFile(StrictModel):
    """The training framework."""

    name: Literal["megatron-lm", "deepspeed"] = Field(description="Training framework")
    version: Line | None = Field(None, description="Version the job will run with, quoted; recorded with the run")
    path: PathText | None = Field(None, description="Megatron-LM checkout on the cluster")
    script: PathText | None = Field(None, description="Your own DeepSpeed training script instead of the shipped one")
    script_args: list[Line] = Field([], description="Arguments of `script`")
    script_kind: Literal["own", "hugging-face", "pipeline", "megatron-deepspeed"] = Field(
        "own",
        description="What `script` takes: ds_config.json alone, the arguments of Hugging Face's Trainer too, a number "
        "of pipeline stages it builds a PipelineModule of, or the arguments of Megatron-DeepSpeed's pretrain_gpt.py",
    )
    extra_args: list[Line] = Field([], description="Arguments passed to the framework as they are")

    @model_validator(mode="after")
    def _belongs_to_the_backend(self) -> BackendFile:
        if self.name == "megatron-lm" and (self.script is not None or self.script_args):
            raise ValueError("script and script_args belong to deepspeed; remove them, or use extra_args")
        if self.name == "deepspeed" and self.path is not None:
            raise ValueError("path is the Megatron-LM checkout; remove it (a script of your own goes into `script`)")
        if self.script_args and self.script is None:
            raise ValueError("script_args needs script; name the script they belong to")
        if self.script_kind != "own" and self.script is None:
            raise ValueError("script_kind needs script; name the script it is said of")
        return self


class AdaptersFile(StrictModel):
    """Low-rank adapters: the model itself is frozen."""

    rank: Annotated[int, Field(ge=1, le=2**16)] = Field(description="Inner width of each adapter")
    frozen_down: bool = Field(False, description="LoRA-FA: the first matrix of each adapter is frozen too")


class TrainingFile(StrictModel):
    """What is trained, for how long and how it is optimised."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["steps"]}, {"required": ["tokens"]}]})

    sequence_length: Annotated[int, Field(ge=1, le=2**28)] = Field(description="Tokens in one sequence")
    global_batch_size: Annotated[int, Field(ge=1, le=2**28)] = Field(
        description="Sequences in one step, over all devices"
    )
    steps: Annotated[int | None, Field(ge=1, le=MOST_STEPS)] = Field(
        None, description="Optimizer steps; give this or `tokens`"
    )
    tokens: Tokens | None = Field(
        None, description="Tokens to train on, instead of `steps`: 15T, 300B, 1.5M or a whole number"
    )
    precision: Literal["bf16", "fp16", "fp32"] = Field("bf16", description="Number format of the computation")
    fp8: Fp8 | None = Field(
        None, description="megatron-lm: linear layers multiply in 8 bits, scaled by this recipe of Transformer Engine"
    )
    fp8_parameters: bool = Field(False, description="megatron-lm: their weights are kept and gathered in 8 bits too")
    fp4: Literal["nvfp4"] | None = Field(None, description="megatron-lm: linear layers multiply in 4 bits")
    optimizer: OptimizerFile | None = Field(
        None,
        description="megatron-lm: formats of what the precision-aware optimizer keeps; {} = all fp32; absent = the "
        "usual optimizer",
    )
    learning_rate: Annotated[float, Field(gt=0, le=1000)] = Field(3.0e-4, description="Peak learning rate")
    learning_rate_decay: Literal["cosine", "linear", "constant"] | None = Field(
        None,
        description="From the peak to `minimum_learning_rate` at the last step; absent = cosine on megatron-lm, "
        "constant on deepspeed",
    )
    minimum_learning_rate: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.0, description="Learning rate at the end of its decay"
    )
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = Field(
        None,
        description="Steps from 0 to the peak learning rate; absent = a hundredth of the steps on megatron-lm, a tenth "
        "on deepspeed, 2000 at most",
    )
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = Field(0.1, description="Weight decay of AdamW")
    adam_betas: Betas = Field([0.9, 0.95], description="How long AdamW remembers gradients and their squares")
    gradient_clipping: Annotated[float, Field(ge=0, le=10**6)] = Field(
        1.0, description="Largest norm of all gradients together; 0 = not clipped"
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(1234, description="Seed of initialisation and data order")
    log_interval: Count = Field(10, description="Steps between two lines of the log")
    gradient_dtype: Literal["fp32", "bf16", "auto"] | None = Field(
        None,
        description="Format gradients accumulate in; absent = on megatron-lm fp32 with bf16, else as `precision`; auto "
        "= megatron-lm: whichever is faster and fits",
    )
    adapters: AdaptersFile | None = Field(None, description="Train low-rank adapters (LoRA) instead of the model")
    trained_layers: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="Train only the last so many layers, the final norm and the head; absent = all"
    )
    save_interval: Count | None = Field(None, description="Steps between two checkpoints; absent = none is written")
    checkpoint_path: PathText | None = Field(None, description="Folder on the cluster for checkpoints")
    checkpoint_format: Literal["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"] | None = Field(
        None, description="megatron-lm: absent = torch_dist, and fsdp_dtensor with zero_stage 2 or 3"
    )
    tensorboard: PathText | None = Field(None, description="megatron-lm: folder on the cluster for TensorBoard")
    start_from: PathText | None = Field(
        None,
        description="Weights to start from: a Hugging Face folder (deepspeed) or a folder of Megatron checkpoints "
        "(megatron-lm); absent = random ones",
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainingFile:
        if self.steps is None and self.tokens is None:
            raise ValueError("steps: is missing; add it, or tokens: (how long the training is)")
        if self.steps is not None and self.tokens is not None:
            raise ValueError("steps and tokens both say how long the training is; remove one of the two")
        return self

    @model_validator(mode="after")
    def _checkpoints_have_a_place(self) -> TrainingFile:
        if (self.save_interval is None) != (self.checkpoint_path is None):
            missing = "checkpoint_path" if self.checkpoint_path is None else "save_interval"
            raise ValueError(f"save_interval and checkpoint_path go together; add {missing} or remove the other")
        return self


class PinsFile(StrictModel):
    """What you fix of the layout: a value, a list of allowed values, or auto."""

    tensor: SizePin = Field(None, description="Tensor parallel size")
    pipeline: SizePin = Field(None, description="Pipeline parallel size")
    virtual_pipeline: SizePin = Field(None, description="Model chunks of each pipeline rank; 1 = not interleaved")
    context: SizePin = Field(None, description="Context parallel size")
    data: SizePin = Field(None, description="Data parallel size, context parallelism not counted")
    expert: SizePin = Field(None, description="Expert parallel size")
    expert_tensor: SizePin = Field(None, description="Tensor parallel size inside experts")
    micro_batch_size: SizePin = Field(None, description="Sequences in one micro-batch of one data parallel rank")
    sequence_parallel: FlagPin = Field(None, description="Sequence parallelism beside tensor parallelism")
    zero_stage: StagePin = Field(
        None,
        description="ZeRO stage; for megatron-lm 1 is the distributed optimizer, 2 and 3 are Megatron-FSDP",
    )
    distributed_optimizer: bool | None = Field(None, description="megatron-lm: another way to say zero_stage 1 or 0")
    recompute: RecomputePin = Field(None, description="Activations recomputed in the backward pass")
    recompute_layers: SizePin = Field(
        None,
        description="recompute: full; uniform: layers in a group, block: layers of a model chunk that are recomputed",
    )
    offload_layers: AmountPin = Field(
        None,
        description="First layers of each stage whose activations wait in host memory, whole; absent = searched",
    )
    layers_by_stage: StagesPin = Field(
        None,
        description="megatron-lm: decoder layers of each stage, virtual ones too, in order; even: the same everywhere; "
        "auto: searched",
    )

    @model_validator(mode="after")
    def _one_answer(self) -> PinsFile:
        if self.distributed_optimizer is None or self.zero_stage is None:
            return self
        stages = self.zero_stage if isinstance(self.zero_stage, tuple) else (self.zero_stage,)
        if stages != (int(self.distributed_optimizer),):
            flag = "true" if self.distributed_optimizer else "false"
            raise ValueError(
                f"distributed_optimizer: {flag} is zero_stage: {int(self.distributed_optimizer)}, which contradicts "
                "the zero_stage given; remove one of the two"
            )
        return self


class LayoutFile(PinsFile):
    """Pins, and the techniques that trade time for memory. What is named holds for every layout searched."""

    recompute_modules: Annotated[list[RecomputeModule], Field(min_length=1)] | None = Field(
        None, description="What recompute: selective recomputes; absent = searched"
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None,
        description="recompute: full keeps the input of groups of layers (uniform), or recomputes some layers only; "
        "absent = uniform where full is pinned, else searched",
    )
    offload_modules: list[OffloadModule] | None = Field(
        None, description="Modules whose saved inputs wait in host memory; [] = none, absent = searched"
    )
    offload_checkpoints: bool = Field(
        False, description="The layer inputs recompute: full keeps wait in host memory; absent = searched"
    )
    offload_optimizer: Share = Field(
        0.0, description="Share of the optimizer states held and updated on the host; absent = searched"
    )
    offload_parameters: bool = Field(
        False, description="Parameters rest on the host and are streamed in (ZeRO 3); absent = searched"
    )
    loss: Literal["native", "te", "fused_linear", "tiled"] | None = Field(
        None,
        description="Kernel of the loss: fused, Transformer Engine's, fused with the head, in tiles; absent = unfused",
    )
    loss_tiles: Annotated[int, Field(ge=2, le=2**20)] | None = Field(
        None, description="Pieces of the sequence for loss: tiled; absent = 8"
    )
    mlp_chunks: Annotated[int, Field(ge=1, le=2**20)] = Field(
        1, description="Pieces of the sequence the MLP computes one after the other"
    )
    delay_weight_gradients: bool = Field(False, description="Weight gradients in a pass of their own")
    token_dispatcher: Literal["alltoall", "allgather", "flex"] | None = Field(
        None, description="How tokens reach their experts; absent = alltoall"
    )
    flex_backend: Literal["deepep", "hybridep"] | None = Field(
        None, description="megatron-lm: library that carries them with token_dispatcher: flex; absent = deepep"
    )
    overlap_shared_expert: bool = Field(
        False, description="megatron-lm: the shared expert computes while tokens travel to the others"
    )
    overlap_expert_communication: bool = Field(
        False, description="megatron-lm: tokens of one micro-batch travel to experts while another one computes"
    )
    tp_comm_overlap: bool = Field(
        False, description="megatron-lm: gathers and scatters of tensor parallelism run beside the products"
    )
    context_comm: Literal["p2p", "a2a"] | None = Field(
        None, description="megatron-lm: keys and values travel in a ring, or heads by all-to-all; absent = p2p"
    )


class WhatIfFile(StrictModel):
    """Techniques of papers that no backend runs: priced by check and plan, refused by render and submit."""

    swapped_share: Share = Field(0.0, description="MEMO: share of each layer's activations swapped to the host")
    sampled_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="WTA-CRS: share of each linear layer's input rows kept for the weight gradient"
    )
    weight_versions: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="Versions of the weights in flight; PipeDream-2BW keeps 2"
    )


class MemoryFile(StrictModel):
    """When a plan is called safe."""

    limit: Annotated[float, Field(gt=0, le=1)] = Field(0.80, description="Share of device memory that may be used")
    floor_gib: Annotated[float, Field(ge=0, le=1024)] = Field(
        4.0, description="What must stay free at least, in units of 2**30 bytes (GPUs only)"
    )
    risk: Annotated[float, Field(gt=0, le=0.5)] | None = Field(
        None, description="Share of runs that may need more; measured runs then set the limit, `limit` until they do"
    )
    calibration: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$")] = Field(
        "in-use",
        description="What measured runs say of predictions: in-use (for its backend and accelerator), none, or an id",
    )


class BudgetFile(StrictModel):
    """What the whole job may take."""

    days: Annotated[float, Field(gt=0, le=36_500)] | None = Field(
        None, description="Days the training may take, waiting in the queue not counted"
    )
    gpu_hours: Annotated[float, Field(gt=0, le=10**12)] | None = Field(
        None, description="Hours of all devices together the training may take"
    )
    max_nodes: NodeCount | None = Field(None, description="Most nodes there are; absent = 1024 for nodes: auto")


class CodeFile(StrictModel):
    """The trainer's code."""

    path: PathText | None = Field(None, description="Source tree of the trainer, recorded by commit and diff")
    snapshot: bool = Field(False, description="Copy the source tree into the run directory")


class MonitorFile(StrictModel):
    """The monitor beside the training."""

    interval_seconds: Annotated[float, Field(ge=0.1, le=3600)] = Field(1.0, description="Seconds between two samples")
    probe: bool = Field(True, description="Each rank's Python writes down torch's own memory peaks (GPU clusters)")


def _auto_or_pins(value: object) -> str:
    return "(pins)" if isinstance(value, dict) else "(auto)"


class RecipeFile(StrictModel):
    """A recipe: what to train, on which cluster, how."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of the recipe format, 1")
    name: Name = Field(description="Name of the recipe and of its jobs: letters, digits, '.', '_' and '-', at most 64")
    model: Annotated[
        Annotated[Line, Tag("(name)")] | Annotated[ShapeFile, Tag("(inline)")], Discriminator(inline_or_name)
    ] = Field(description="Preset, path of a Hugging Face config.json (or its folder), or an inline shape")
    backend: Annotated[
        Annotated[Literal["megatron-lm", "deepspeed"], Tag("(name)")] | Annotated[BackendFile, Tag("(inline)")],
        Discriminator(inline_or_name),
    ] = Field(description="megatron-lm, deepspeed, or a mapping")
    cluster: Annotated[
        Annotated[Line, Tag("(name)")] | Annotated[ClusterFile, Tag("(inline)")], Discriminator(inline_or_name)
    ] = Field(description="Profile by name, shipped or of the site, path of a profile, or a mapping")
    nodes: Annotated[
        NodeCount,
        WrapValidator(_auto_nodes),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_NODES}, {"const": "auto"}]}),
    ] = Field(description="Number of nodes; auto = the fewest that fit, and that meet the budget")
    training: TrainingFile = Field(description="What is trained, for how long")
    data: DataFile = Field(description="What it is trained on")
    layout: Annotated[
        Annotated[Literal["auto"], Tag("(auto)")] | Annotated[LayoutFile, Tag("(pins)")], Discriminator(_auto_or_pins)
    ] = Field("auto", description="How the job is split: auto, or a mapping of what you fix")
    what_if: WhatIfFile = Field(WhatIfFile.model_construct(), description="Techniques no backend runs, to be priced")
    budget: BudgetFile = Field(BudgetFile.model_construct(), description="What the whole job may take")
    memory: MemoryFile = Field(MemoryFile.model_construct(), description="When a plan is called safe")
    slurm: SlurmOptions = Field(
        {}, description="Any long option of sbatch without its dashes; true = without a value, false = leave it out"
    )
    slurm_plugins: PluginOptions = Field(
        {}, description="Options that plugins of the site (SPANK) add to sbatch, without their dashes; not checked"
    )
    environment: dict[EnvironmentName, EnvironmentValue] = Field(
        {}, description="Variables exported to the trainers; no secrets"
    )
    secrets: list[SecretName] = Field([], description="Names of variables that must be set where you submit")
    not_secrets: list[Line] = Field(
        [],
        description="What looks like a secret and is none: keys such as environment.BUILD_KEY, comments for all "
        "comments, files of the trainer's code by their paths",
    )
    setup: list[SetupLine] = Field(
        [],
        description="Shell lines (module load ...) run where the job begins; every node gets their environment",
    )
    container: ContainerFile | None = Field(None, description="Container of the job")
    code: Annotated[
        Annotated[Literal["snapshot"], Tag("(name)")] | Annotated[CodeFile, Tag("(inline)")],
        Discriminator(inline_or_name),
    ] = Field(CodeFile.model_construct(), description="The trainer's code: snapshot, or a mapping")
    monitor: MonitorFile = Field(MonitorFile.model_construct(), description="The monitor beside the training")
    placement: Literal["auto", "slurm"] = Field(
        "auto", description="Which node gets which ranks: auto decides at job start, slurm keeps SLURM's order"
    )
    restart: RestartKey | None = Field(
        None,
        description="How a job that ended early comes back from its last checkpoint; none = it does not; absent = with "
        "the defaults where checkpoints are written",
    )
    on_oom: OnOomKey = Field(
        "stop", description="When a device runs out of memory: stop, fallback (as layouts: 2), or a mapping"
    )
    watchdog: WatchdogKey = Field(
        True, description="Notices a job that makes no more steps, dumps its stacks and ends it; false = off"
    )
    preflight: bool = Field(
        False, description="Try devices, memory and network of every node for about a minute before the training"
    )
    spare_nodes: Annotated[int, Field(ge=0, le=1024)] = Field(
        0, description="Nodes allocated beside `nodes`: they take the place of nodes that preflight finds bad"
    )
    python: PathText | None = Field(None, description="Python of the training environment on the nodes")
