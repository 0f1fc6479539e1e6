"""What is trained, for how long, in which number formats and how it is optimised: the keys under `training:`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from llmlaunch.cluster.profile import Accelerator
from llmlaunch.documents.keys import form, key, key_names, keys_of, name_or_mapping, section
from llmlaunch.documents.text import PathText
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import OF_ATTENTION, Adapters, TrainedAdapters, TrainedLayers
from llmlaunch.techniques.technique import TRAINING, key_of
from llmlaunch.workload import NumberFormats, OptimizerFormats, Workload

MOST_STEPS = 10**9
AUTO_INTERVAL = 0  # steps between two saves that the planner has still to choose
MOST_WARMUP_STEPS = 2000
MUON = "muon"
MUON_ELSEWHERE = "the shipped script trains with AdamW, and DeepSpeed's own Muon is not priced; remove it"
# what a person writes instead where another framework trains; of `optimizer` that is Muon alone
OF_MEGATRON: Mapping[str, str] = {
    "checkpoint_format": "remove it",
    "tensorboard": "write tracking.tensorboard",
    "fp8": "remove it",
    "fp4": "remove it",
    "optimizer": MUON_ELSEWHERE,
    "fp8_parameters": "remove it",
}

Problem = tuple[KeyPath, str]

_TOKENS = re.compile(r"^[0-9]{1,18}(\.[0-9]{1,18})?[KMBT]$")
_TIMES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _token_count(value: Any) -> Any:
    """Return the whole number that a text such as 1.5T stands for, and anything else as it is.

    Raises ValueError for a fraction of a token, and for a text that is no such amount.
    """
    if not isinstance(value, str):
        return value
    if _TOKENS.fullmatch(value) is None:
        raise ValueError(f"must be a whole number, or one with K, M, B or T such as 1.5T, not {value[:40]!a}")
    amount = Decimal(value[:-1]) * _TIMES[value[-1]]
    if amount != int(amount):
        raise ValueError(f"{value} is no whole number of tokens")
    return int(amount)


Count = Annotated[int, Field(ge=1, le=10**9)]


def _interval_or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> int:
    interval: int = AUTO_INTERVAL if value == "auto" and isinstance(value, str) else check(value)
    return interval


SaveInterval = Annotated[
    Count,
    WrapValidator(_interval_or_auto),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": 10**9}]}),
]
Tokens = Annotated[
    int,
    Field(ge=1, le=10**18),
    BeforeValidator(_token_count),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": 10**18},
                {"type": "string", "pattern": _TOKENS.pattern},
            ]
        }
    ),
]
Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves after its warm-up, "cosine", "linear" or "constant", and steps of the warm-up."""

    decay: str
    warmup_steps: int


def default_schedule(backend: str, script_kind: str, steps: int) -> Schedule:
    """Return the schedule of a training of `steps` whose recipe names none: as the Llama models were trained on
    Megatron core, that of Hugging Face's Trainer scripts, and a constant rate of the shipped DeepSpeed trainer."""
    on_megatron = FRAMEWORKS[backend].on_megatron_core
    share = 100 if on_megatron else 10
    decay = "cosine" if on_megatron or script_kind == "hugging-face" else "constant"
    return Schedule(decay, min(steps // share, MOST_WARMUP_STEPS))


@section
class Evaluation:
    """How the loss on validation data is worked out on the way."""

    interval: Count = key("Steps between two evaluations")
    iterations: Count = key("Batches of one evaluation, of `global_batch_size` each")
    patience: Count | None = key(
        "deepspeed: evaluations in a row without a lower loss, and the training ends; absent = it makes all steps",
        default=None,
    )
    keep_best: bool = key(
        "deepspeed: the checkpoint with the lowest validation loss stays, named in the file `best` of "
        "`checkpoint_path`; it is what `export` writes",
        default=False,
    )

    def times(self, steps: int) -> int:
        """Return how many evaluations a training of `steps` has at most: trainers evaluate after the last, too."""
        return steps // self.interval + 1


@section
class Export:
    """Where the trained model is written in Hugging Face's format."""

    path: PathText = key("Folder that is made after the last step, whole or not at all")
    merge_adapters: bool = key(
        "Adapters are merged into the weights; false = the folder has the adapters alone, as PEFT reads them",
        default=True,
    )


def _export(value: Export | str) -> Export:
    return Export(value) if isinstance(value, str) else value


@section
class Training:
    """What is trained, for how long and how it is optimised. None is the backend's choice."""

    sequence_length: int = key("Tokens in one sequence", ge=1, le=2**28)
    global_batch_size: int = key("Sequences in one step, over all devices", ge=1, le=2**28)
    steps: int = key(
        "Optimizer steps; give this or `tokens`", default=0, written=int | None, ge=1, le=MOST_STEPS
    )  # follows from `tokens` where they are given
    tokens: Tokens | None = key(
        "Tokens to train on, instead of `steps`: 15T, 300B, 1.5M or a whole number", default=None
    )
    precision: str = key("Number format of the computation", default="bf16", written=Literal["bf16", "fp16", "fp32"])
    fp8: str | None = key(
        "megatron-lm: linear layers multiply in 8 bits, scaled by this recipe of Transformer Engine",
        default=None,
        written=Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None,
    )
    fp8_parameters: bool = key("megatron-lm: their weights are kept and gathered in 8 bits too", default=False)
    fp4: str | None = key(
        "megatron-lm: linear layers multiply in 4 bits", default=None, written=Literal["nvfp4"] | None
    )
    optimizer: OptimizerFormats | str | None = key(
        "Formats of what AdamW keeps, on megatron-lm by its precision-aware optimizer, {} = all fp32; or, on "
        "megatron-lm, muon = Muon for the matrices of the blocks and AdamW for the rest; absent = the usual AdamW",
        default=None,
        written=lambda: name_or_mapping(Literal["muon"], OptimizerFormats),
    )
    learning_rate: float = key(
        "Peak learning rate; to be written where weights are fine-tuned (`start_from`, `adapters`)",
        default=3.0e-4,
        gt=0,
        le=1000,
    )
    learning_rate_decay: str | None = key(
        "From the peak to `minimum_learning_rate` at the last step; absent = cosine on megatron-lm, constant on "
        "deepspeed",
        default=None,
        written=Literal["cosine", "linear", "constant"] | None,
    )
    minimum_learning_rate: float = key("Learning rate at the end of its decay", default=0.0, ge=0, le=1000)
    warmup_steps: int | None = key(
        "Steps from 0 to the peak learning rate; absent = a hundredth of the steps on megatron-lm, a tenth on "
        "deepspeed, 2000 at most",
        default=None,
        ge=0,
        le=MOST_STEPS,
    )
    weight_decay: float = key("Weight decay of AdamW", default=0.1, ge=0, le=1000)
    adam_betas: tuple[Beta, ...] = key(
        "How long AdamW remembers gradients and their squares", default=(0.9, 0.95), min_length=2, max_length=2
    )
    gradient_clipping: float = key(
        "Largest norm of all gradients together; 0 = not clipped", default=1.0, ge=0, le=10**6
    )
    seed: int = key("Seed of initialisation and data order", default=1234, ge=0, lt=2**31)
    log_interval: Count = key("Steps between two lines of the log", default=10)
    gradient_dtype: str | None = key(
        "Format gradients accumulate in; absent = on megatron-lm fp32 with bf16, else as `precision`; auto = "
        "megatron-lm: whichever is faster and fits",
        default=None,
        written=Literal["fp32", "bf16", "auto"] | None,
    )
    evaluation: Evaluation | None = key(
        "The loss on validation data (`data.validation`, else a share of `data.split`); absent = not evaluated",
        default=None,
    )
    save_interval: SaveInterval | None = key(
        "Steps between two checkpoints; auto = those with which the job is expected to end soonest; absent = none is "
        "written",
        default=None,
    )
    non_persistent_save_interval: int | None = key(
        "megatron-lm: steps between two checkpoints of which the newest alone stays, for what happens between two of "
        "`save_interval`; absent = none",
        default=None,
        ge=1,
        le=10**9,
    )
    checkpoint_path: PathText | None = key("Folder on the cluster for checkpoints", default=None)
    async_save: bool = key(
        "megatron-lm: a process beside each trainer writes checkpoints while it goes on", default=False
    )
    keep_checkpoints: int | None = key(
        "Whole checkpoints that stay; older ones are removed while it trains. With 1 there is none to go back to; "
        "absent = all stay",
        default=None,
        ge=1,
        le=10**6,
    )
    checkpoint_format: str | None = key(
        "megatron-lm: absent = torch_dist, and fsdp_dtensor with zero_stage 2 or 3",
        default=None,
        written=Literal["torch_dist", "torch", "torch_dcp", "fsdp_dtensor"] | None,
    )
    tensorboard: PathText | None = key("megatron-lm: as tracking.tensorboard", default=None)
    start_from: PathText | None = key(
        "Weights to start from: a Hugging Face folder (deepspeed, megatron-bridge) or a folder of Megatron checkpoints "
        "(megatron-lm, megatron-bridge); absent = random ones",
        default=None,
    )

    samples: int | None = key(
        "deepspeed: validation rows (training rows without any) whose answers the trained model writes into the log; "
        "absent = 3 with data.format chat or prompt-completion, else none",
        default=None,
        ge=0,
        le=1000,
    )
    export: Export | None = key(
        "deepspeed: folder for the trained model in Hugging Face's format (config.json, safetensors, tokenizer); or a "
        "mapping",
        default=None,
        written=lambda: Annotated[name_or_mapping(PathText, Export), AfterValidator(_export)],
    )

    @property
    def workload(self) -> Workload:
        return Workload(self.sequence_length, self.global_batch_size, self.precision)

    @property
    def numbers(self) -> NumberFormats:
        formats = self.optimizer if isinstance(self.optimizer, OptimizerFormats) else None
        return NumberFormats(self.fp8 or self.fp4, self.fp8_parameters, formats)

    @property
    def muon(self) -> bool:
        return self.optimizer == MUON

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError unless there is one length, and a place and an interval for checkpoints or neither."""
        steps, tokens = keys.get("steps"), keys.get("tokens")
        if steps is None and tokens is None:
            raise ValueError("steps: is missing; add it, or tokens: (how long the training is)")
        if steps is not None and tokens is not None:
            raise ValueError("steps and tokens both say how long the training is; remove one of the two")
        if (keys.get("save_interval") is None) != (keys.get("checkpoint_path") is None):
            missing = "checkpoint_path" if keys.get("checkpoint_path") is None else "save_interval"
            raise ValueError(f"save_interval and checkpoint_path go together; add {missing} or remove the other")
        often, seldom = keys.get("non_persistent_save_interval"), keys.get("save_interval")
        if often is not None and (seldom is None or (isinstance(seldom, int) and often >= seldom)):
            raise ValueError(
                "non_persistent_save_interval: these checkpoints are written between those of save_interval; set it to "
                "more steps than this, or remove non_persistent_save_interval"
            )
        if keys.get("async_save") and keys.get("checkpoint_path") is None:
            raise ValueError("async_save writes checkpoints, and none is written; add checkpoint_path or remove it")
        if keys.get("keep_checkpoints") is not None and keys.get("checkpoint_path") is None:
            raise ValueError(
                "keep_checkpoints counts checkpoints, and none is written; add checkpoint_path or remove it"
            )


def training_form() -> Any:
    """Return the type of the mapping `training:`, which holds the keys of `Training` and some techniques."""
    return form(
        "Training",
        keys_of(Training) | keys_of(Techniques, place=TRAINING),
        description=Training.__doc__,
        check=Training.check_keys,
        schema_extra={"oneOf": [{"required": ["steps"]}, {"required": ["tokens"]}]},
    )


def training_from(keys: Mapping[str, Any]) -> Training:
    """Return the training that these keys describe, its steps as many as see all `tokens` where these are given."""
    values = {name: keys[name] for name in key_names(Training) if keys.get(name) is not None}
    if values.get("gradient_dtype") == "auto":
        del values["gradient_dtype"]
    if "tokens" in values:
        values["steps"] = -(-values["tokens"] // (values["sequence_length"] * values["global_batch_size"]))
    return Training(**values)


def training_problems(training: Training, techniques: Techniques, model: ModelShape, backend: str) -> Iterator[Problem]:
    """Yield every key under `training:`, techniques among them, that contradicts another one, the model or the backend.
    What a device or a layout cannot do is for the backend's requirements and rules."""
    if not FRAMEWORKS[backend].on_megatron_core:
        for name, instead in OF_MEGATRON.items():
            if getattr(training, MUON if name == "optimizer" else name):
                yield ("training", name), f"is a word of megatron-lm; {instead} for backend: {backend}"
    else:
        yield from _narrow_problems(training)
    if training.optimizer not in (None, MUON) and training.precision == "fp32":
        yield (
            ("training", "optimizer"),
            "chooses formats beside half parameters; with precision: fp32 the parameters are their own main copy; "
            "remove it, or write precision: bf16",
        )
    yield from _schedule_problems(training, backend)
    yield from _trained_layers_problems(training, techniques, model)
    yield from _adapters_problems(techniques.adapters, model)


def _narrow_problems(training: Training) -> Iterator[Problem]:
    if training.fp8 is not None and training.fp4 is not None:
        yield ("training", "fp4"), "linear layers multiply in one format; remove fp4 or fp8"
    if training.fp8_parameters and training.fp8 is None:
        yield ("training", "fp8_parameters"), "belongs to fp8; write that too, or remove fp8_parameters"
    for name in ("fp8", "fp4"):
        if getattr(training, name) is not None and training.precision != "bf16":
            yield ("training", name), f"is for precision: bf16, which all else computes in, not {training.precision}"


def _schedule_problems(training: Training, backend: str) -> Iterator[Problem]:
    decay = training.learning_rate_decay or default_schedule(backend, "own", training.steps).decay
    least = ("training", "minimum_learning_rate")
    if training.warmup_steps is not None and training.warmup_steps >= max(training.steps, 1):
        yield (
            ("training", "warmup_steps"),
            f"{training.warmup_steps} of {counted(training.steps, 'step')}; leave at least one step after the warm-up",
        )
    if training.minimum_learning_rate > training.learning_rate:
        yield least, f"is above the learning rate, {training.learning_rate:g}; lower it"
    elif training.minimum_learning_rate and decay == "constant":
        yield least, "belongs to a decay; write learning_rate_decay: cosine or linear, or remove it"


def _trained_layers_problems(training: Training, techniques: Techniques, model: ModelShape) -> Iterator[Problem]:
    if training.gradient_dtype == "bf16" and training.precision != "bf16":
        yield (
            ("training", "gradient_dtype"),
            f"bf16 gradients need precision: bf16, not {training.precision}; remove it",
        )
    last, place = techniques.trained_layers, (TRAINING, key_of(TrainedLayers))
    if last is None:
        return
    if techniques.adapters is not None:
        yield place, "trains layers, and adapters freeze all of them; remove one of the two"
    if last > model.num_layers:
        yield place, f"{last} of {counted(model.num_layers, 'layer')}; use at most {model.num_layers}"
    if model.tied_embeddings:
        yield (
            place,
            f"{model.name} ties its head to the embedding: training the head would send gradients through every layer; "
            "set model.tied_embeddings: false, or remove it",
        )


def _adapters_problems(adapters: Adapters | None, model: ModelShape) -> Iterator[Problem]:
    """Latent attention and gated delta nets have other layers than those of `target_modules`."""
    if adapters is None or (model.mla is None and model.linear_attention is None):
        return
    if 0 < len(adapters.targets.intersection(OF_ATTENTION)) < len(OF_ATTENTION):
        yield (
            (TRAINING, key_of(TrainedAdapters), "target_modules"),
            f"attention of {model.name} has other layers; name q_proj, k_proj, v_proj and o_proj together for all of "
            "these, or none",
        )


def number_notes(numbers: NumberFormats, device: Accelerator) -> tuple[str, ...]:
    """Return what the time of a step is worked out with where the device's own figure is not known."""
    if numbers.narrow is None:
        return ()
    if "fp8" not in device.flops_per_second:
        return (f"{device.name} has no fp8_tflops: narrow products are timed as those of bf16",)
    if numbers.narrow == "nvfp4" and "fp4" not in device.flops_per_second:
        return (f"the fp4 peak of {device.name} is not known: twice its fp8 peak",)
    return ()
