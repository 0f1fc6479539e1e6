"""A validated recipe in plain frozen values, and its keys. Only `llmlaunch.recipe.load` makes recipes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from llmlaunch.cluster.profile import Cluster, cluster_form
from llmlaunch.documents.keys import form, form_of, key, keys_of, name_or_mapping, section
from llmlaunch.documents.text import (
    EnvironmentName,
    EnvironmentValue,
    JsonSettings,
    Line,
    Name,
    PathText,
    PluginOptions,
    SecretName,
    SetupLine,
    SlurmOptions,
)
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.datasets import Data
from llmlaunch.recipe.frameworks import FRAMEWORKS, FrameworkName, FrameworkTraits
from llmlaunch.recipe.layout_keys import Pin, layout_form, what_if_form
from llmlaunch.recipe.sections import (
    AUTO_NODES,
    IN_USE,
    MOST_NODES,
    NO_CALIBRATION,
    NO_TRACKING,
    MemoryPolicy,
    NodeCount,
    NodeRange,
    Nodes,
    Notices,
    Tracking,
)
from llmlaunch.recipe.training import Training, training_form
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload

__all__ = [
    "AUTO_NODES",
    "IN_USE",
    "MOST_NODES",
    "NO_BUDGET",
    "NO_CALIBRATION",
    "NO_RESTART",
    "SCHEMA",
    "VOCABULARY",
    "BackendChoice",
    "Budget",
    "Code",
    "MemoryPolicy",
    "MonitorPolicy",
    "OnBadLoss",
    "OnOom",
    "Recipe",
    "Restart",
    "WatchdogPolicy",
    "recipe_form",
]


NO_RESTART = "none"  # the word; a recipe that says nothing has the defaults of `Restart` where checkpoints are written

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]


@section
class Restart:
    """How a job that ended early comes back by itself, from its last checkpoint."""

    times: int = key("Automatic restarts of one run at most", default=20, ge=0, le=10_000)
    fruitless: int = key(
        "Attempts in a row that got no further than the one before, and it is given up", default=2, ge=1, le=100
    )
    per_hour: int = key("Failures within an hour at most, and it is given up", default=10, ge=1, le=1000)
    lost_gpu_hours: float | None = key(
        "GPU-hours at most whose steps no checkpoint held, of all attempts, and it is given up; absent = 48 for each "
        "GPU",
        default=None,
        gt=0,
        le=1e9,
    )
    backoff_seconds: float = key(
        "Wait before a restart after a failure, doubled each fruitless time", default=60.0, ge=0, le=86_400
    )
    save_seconds: Seconds | None = key(
        "How long writing a checkpoint may take; absent = derived from its size", default=None
    )
    resume_seconds: Seconds | None = key(
        "From a stop to the first new step, the queue left out; absent = as the cluster profile says, else derived",
        default=None,
    )
    within: str = key(
        "job: after a failure it starts again in the same allocation, spare nodes in the place of bad ones, and goes "
        "back to the queue when nodes run out; queue: at once",
        default="job",
        written=Literal["job", "queue"],
    )
    by: str | None = key(
        "requeue: the same job again; chain: follow-up jobs are submitted together with the first, for sites that "
        "forbid requeue; absent = as the cluster profile says, else requeue",
        default=None,
        written=Literal["requeue", "chain"] | None,
    )
    bad_checkpoint: str = key(
        "Where the last checkpoint is damaged: previous: go on from the newest whole one before it; stop: the end, and "
        "nothing is trained",
        default="previous",
        written=Literal["previous", "stop"],
    )
    slow_nodes: str = key(
        "tell: nodes that are slower than their peers are named; replace: the trainers save, and spare nodes take "
        "their place in the same allocation, where there are enough",
        default="tell",
        written=Literal["tell", "replace"],
    )


@section
class OnOom:
    """Other layouts to try in the same allocation after a device ran out of memory; 0 = none, the job ends."""

    layouts: int = key("How many layouts, each with more head-room than the one before", default=2, ge=1, le=8)
    after_checkpoint: str = key(
        "With checkpoints written: reshard: go on from the last where the next layout can load it, else stop; restart: "
        "where it cannot, begin again in a folder of its own; stop: no other layout is tried",
        default="reshard",
        written=Literal["reshard", "restart", "stop"],
    )


@section
class OnBadLoss:
    """What follows when the loss becomes NaN or infinite and stays so."""

    action: str = key(
        "tell: it is said; stop: the job ends, without a save; rollback: it goes on from a checkpoint before the bad "
        "step, past the batches around it",
        default="tell",
        written=Literal["tell", "stop", "rollback"],
    )
    spike: bool = key("Whether a spike of the loss that stays counts, too", default=False)
    skip_batches: int = key(
        "rollback: global batches left out, half of them before the bad step", default=200, ge=1, le=10_000
    )
    times: int = key("rollback: so many times at most", default=2, ge=1, le=100)


@section
class WatchdogPolicy:
    """When a job that makes no step counts as hung."""

    floor_seconds: Seconds = key("At least so long without a new step; else ten times the median step", default=600.0)
    first_step_seconds: Seconds = key("So long may it take until the first step", default=3600.0)


Scalar = str | int | float | bool
SCHEMA = 1  # of recipes
# what people and other tools call our keys and values
VOCABULARY = Path(__file__).with_name("vocabulary.json")

BRIDGE_FIELD = re.compile(r"[a-z_]+(\.\w+)+=\S")


@section
class BackendChoice:
    """The training framework. `found_version` is what was seen of it where `version` is not given
    (llmlaunch.frameworks.framework_version)."""

    name: str = key("Training framework", written=FrameworkName)
    version: Line | None = key("Version the job will run with, quoted; recorded with the run", default=None)
    path: PathText | None = key("Megatron-LM checkout on the cluster", default=None)
    script: PathText | None = key(
        "Your own training script: instead of the shipped one (deepspeed), or of pretrain_gpt.py, with its arguments "
        "(megatron-lm)",
        default=None,
    )
    script_args: tuple[Line, ...] = key("Arguments of `script`", default=())
    script_kind: str = key(
        "deepspeed: what `script` takes: ds_config.json alone, the arguments of Hugging Face's Trainer too, or a "
        "number of pipeline stages it builds a PipelineModule of",
        default="own",
        written=Literal["own", "hugging-face", "pipeline"],
    )
    extra_args: tuple[Line, ...] = key(
        "Arguments passed to the framework as they are; megatron-bridge: fields of its ConfigContainer, such as "
        "train.manual_gc=true",
        default=(),
    )
    neutral_args: tuple[Line, ...] = key(
        "Flags of `extra_args` and `script_args`, dotted keys of `ds_config`, that change no GPU memory by your word",
        default=(),
    )
    ds_config: Mapping[str, Any] = key(
        "deepspeed: keys of ds_config.json beside those the recipe decides, and in place of those llmlaunch chooses",
        default={},
        written=JsonSettings,
    )
    libraries: tuple[str, ...] = key(
        "megatron-lm: libraries that the job's environment has and that a layout may use: deepep, hybridep; a search "
        "uses them where they gain",
        default=(),
        written=tuple[Literal["deepep", "hybridep"], ...],
    )
    found_version: str | None = None

    @property
    def traits(self) -> FrameworkTraits:
        """What a recipe's keys ask of the framework."""
        return FRAMEWORKS[self.name]

    @property
    def framework(self) -> str:
        """As its makers call it."""
        return self.traits.title

    @property
    def on_megatron_core(self) -> bool:
        """Whether Megatron core trains: by Megatron-LM's script or one of its kind, or by Megatron-Bridge."""
        return self.traits.on_megatron_core

    @property
    def has_own_arguments(self) -> bool:
        """Whether the person passes arguments of their own on."""
        return bool(self.script_args or self.extra_args)

    @property
    def runs_version(self) -> str | None:
        """The version the job will run with, as the recipe says or as it was found; None where it is not known."""
        return self.version or self.found_version

    @property
    def reads_data_keys(self) -> bool:
        """Whether the trainer is handed the recipe's `data`. Most DeepSpeed scripts of a person's own get their data in
        their own arguments."""
        return self.script is None or self.on_megatron_core

    @property
    def command_line_args(self) -> tuple[str, ...]:
        """`extra_args` as words of the program: those of megatron-bridge are settings."""
        return () if self.traits.takes_settings else self.extra_args

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where a key belongs to the other backend, or to a script that is not named."""
        framework, script = FRAMEWORKS[keys["name"]], keys.get("script")
        megatron = framework.on_megatron_core
        if framework.takes_settings:
            if script:
                raise ValueError("script belongs to megatron-lm and deepspeed; megatron-bridge has settings; remove it")
            for word in keys.get("extra_args") or ():
                if not BRIDGE_FIELD.match(word):
                    raise ValueError(
                        "extra_args of megatron-bridge set fields of its ConfigContainer, as train.manual_gc=true; "
                        f"{word[:40]!a} is none"
                    )
        if megatron and keys.get("script_kind", "own") != "own":
            raise ValueError("script_kind belongs to deepspeed; a script of megatron-lm takes Megatron's arguments")
        if megatron and keys.get("ds_config"):
            raise ValueError("ds_config belongs to deepspeed; remove it")
        if not megatron and keys.get("libraries"):
            raise ValueError("libraries belongs to megatron-lm; remove it")
        if not framework.has_checkout and keys.get("path") is not None:
            raise ValueError("path is the Megatron-LM checkout; remove it (a script of your own goes into `script`)")
        if keys.get("script_args") and script is None:
            raise ValueError("script_args needs script; name the script they belong to")
        if keys.get("script_kind", "own") != "own" and script is None:
            raise ValueError("script_kind needs script; name the script it describes")


@section
class Budget:
    """What the whole job may take; None = as much as it needs."""

    days: float | None = key(
        "Days the training may take, waiting in the queue not counted", default=None, gt=0, le=36_500
    )
    gpu_hours: float | None = key("Hours of all devices together the training may take", default=None, gt=0, le=10**12)
    max_nodes: NodeCount | None = key("Most nodes there are; absent = 1024 for nodes: auto", default=None)


NO_BUDGET = Budget()


@section
class Code:
    """The trainer's code."""

    path: PathText | None = key("Source tree of the trainer, recorded by commit and diff", default=None)
    snapshot: bool = key("Copy the source tree into the run directory", default=False)


@section
class MonitorPolicy:
    """The monitor beside the training."""

    interval_seconds: float = key("Seconds between two samples", default=1.0, ge=0.1, le=3600)
    probe: bool = key("Each rank's Python writes down torch's own memory peaks (GPU clusters)", default=True)


def _model_form() -> Any:
    from llmlaunch.families.inline import model_form

    return model_form()


@section
class Recipe:
    """Everything a person asked for, validated; defaults filled in.

    `pins` holds what the person fixed of the layout, by the names of `Layout` (recompute as "none", "selective" or
    "full"); what is absent is llmlaunch's to choose. A pin may be one value or a tuple of allowed values. `fixed` names
    the techniques the recipe chooses itself. `layers_by_stage` is as in `Layout`: () is even; None is llmlaunch's to
    choose. With `preference` the plainest of nearly equal layouts is chosen (planner/preference.py). `text` is the file
    as given and `overrides` the `key=value` words applied to it, so that a run directory can reproduce both;
    `document` is the two as parsed. `digest` is sha256 over the resolved content (order, comments and
    white space left out).
    """

    name: Name = key("Name of the recipe and of its jobs: letters, digits, '.', '_' and '-', at most 64")
    model: ModelShape = key(
        "Preset, known id of the Hugging Face hub, path of a config.json (or its folder), or an inline shape",
        written=lambda: name_or_mapping(Line, _model_form()),
    )
    backend: BackendChoice = key(
        "megatron-lm, deepspeed, megatron-bridge, or a mapping",
        words={name: BackendChoice(name) for name in FRAMEWORKS},
    )
    cluster: Cluster = key(
        "Profile by name, shipped or of the site, path of a profile, or a mapping",
        written=lambda: name_or_mapping(Line, cluster_form()),
    )
    # AUTO_NODES until the planner has chosen them (llmlaunch.planner.planning)
    nodes: int = key(
        "Number of nodes; auto = the fewest that fit, and that meet the budget; or a mapping",
        written=lambda: name_or_mapping(Nodes, form_of(NodeRange)),
    )
    training: Training = key("What is trained, for how long", written=training_form)
    data: Data = key("What it is trained on")
    tracking: Tracking = key("Where the framework writes its curves", default=NO_TRACKING)
    pins: Mapping[str, Pin] = key(
        "How the job is split: auto, or a mapping of what you fix",
        default={},
        key_name="layout",
        written=layout_form,
        words={"auto": {}},
    )
    techniques: Techniques = key(
        "Techniques no backend runs, to be priced", default=NO_TECHNIQUES, key_name="what_if", written=what_if_form
    )
    budget: Budget = key("What the whole job may take", default=NO_BUDGET)
    memory: MemoryPolicy = key("When a plan is called safe", default=MemoryPolicy())
    # those of the cluster's site among them; False = leave it out
    slurm: Mapping[str, Scalar] = key(
        "Any long option of sbatch without its dashes; true = without a value, false = leave it out",
        default={},
        written=SlurmOptions,
    )
    slurm_plugins: Mapping[str, Scalar] = key(
        "Options that plugins of the site (SPANK) add to sbatch, without their dashes; not checked",
        default={},
        written=PluginOptions,
    )
    # the recipe's own, over the cluster's; secrets by reference only
    environment: Mapping[str, str] = key(
        "Variables exported to the trainers; no secrets", default={}, written=dict[EnvironmentName, EnvironmentValue]
    )
    secrets: tuple[SecretName, ...] = key("Names of variables that must be set where you submit", default=())
    not_secrets: tuple[Line, ...] = key(
        "What looks like a secret and is none: keys such as environment.BUILD_KEY, comments for all comments, files of "
        "the trainer's code by their paths",
        default=(),
    )
    # trusted code of the person's
    setup: tuple[SetupLine, ...] = key(
        "Shell lines (module load ...) run where the job begins; every node gets their environment", default=()
    )
    container: Container | None = key("Container of the job", default=None, written=lambda: form_of(Container) | None)
    code: Code = key(
        "The trainer's code: snapshot, or a mapping", default=Code(), words={"snapshot": Code(snapshot=True)}
    )
    monitor: MonitorPolicy = key("The monitor beside the training", default=MonitorPolicy())
    placement: str = key(
        "Which node gets which ranks: auto decides at job start, slurm keeps SLURM's order",
        default="auto",
        written=Literal["auto", "slurm"],
    )
    restart: Restart | None = key(
        "How a job that ended early comes back from its last checkpoint; none = it does not; absent = with the "
        "defaults where checkpoints are written",
        default=None,
        words={NO_RESTART: NO_RESTART},
    )
    on_oom: OnOom = key(
        "When a device runs out of memory: stop, fallback (as layouts: 2), or a mapping",
        default=OnOom(layouts=0),
        words={"stop": OnOom(layouts=0), "fallback": OnOom()},
    )
    on_bad_loss: OnBadLoss = key(
        "When the loss becomes NaN or infinite: tell, stop, rollback, or a mapping",
        default=OnBadLoss(),
        words={action: OnBadLoss(action=action) for action in ("tell", "stop", "rollback")},
    )
    watchdog: WatchdogPolicy | None = key(
        "Notices a job that makes no more steps, dumps its stacks and ends it; false = off",
        default=WatchdogPolicy(),
        written=WatchdogPolicy,
        words={True: WatchdogPolicy(), False: None},
    )
    notify: Notices | None = key(
        "Who hears of start, first step, stall, restart, slow nodes, bad loss and end; absent = nobody", default=None
    )
    preflight: bool = key(
        "Try devices, memory and network of every node for about a minute before the training", default=False
    )
    spare_nodes: int = key(
        "Nodes allocated beside `nodes`: they take the place of nodes that preflight finds bad",
        default=0,
        ge=0,
        le=1024,
    )
    python: PathText | None = key("Python of the training environment on the nodes", default=None)
    workdir: PathText | None = key("Folder in which the trainers start; absent = the run directory", default=None)

    at_least_nodes: int | None = None  # nodes.at_least
    path: str = ""
    text: str = ""
    overrides: tuple[str, ...] = ()
    digest: str = ""
    assumptions: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    layers_by_stage: tuple[int, ...] | None = None
    preference: bool = True
    technique_limit: str | None = None  # which of them a search may choose; None = all that keep the mathematics
    locked_by: str = ""  # name of the file that keeps it to an earlier plan
    document: Document | None = field(default=None, compare=False, repr=False)

    @property
    def workload(self) -> Workload:
        return self.training.workload

    @property
    def tensorboard(self) -> str | None:
        """The folder for TensorBoard, by either of the keys that may say it."""
        return self.tracking.tensorboard or self.training.tensorboard

    @property
    def world_size(self) -> int:
        return self.nodes * self.cluster.devices_per_node

    @property
    def hub_tokenizer(self) -> str | None:
        """The name by which each rank would ask Hugging Face's hub for its tokenizer. None if no rank would: the
        tokenizer is named by its path, is of another kind, or is not handed to the script."""
        name, kind = self.data.tokenizer, self.data.tokenizer_type
        reads_files = self.backend.reads_data_keys and not self.data.mock
        from_hub = reads_files and kind in (None, "HuggingFaceTokenizer")
        return name if name is not None and from_hub and not name.startswith("/") else None


@cache
def recipe_form(named: tuple[str, ...] = ()) -> Any:
    """Return the type of a recipe file; the keys that are not written have no defaults in it. `named` are keys that may
    only hold a name: a type without the mappings of `model` and `cluster` is built four times as fast."""
    schema = Annotated[Literal[1], Field(description="Version of the recipe format, 1")]
    keys = keys_of(Recipe, written=dict.fromkeys(named, Line))
    return form("Recipe", {"schema": schema, **keys}, description="What to train, on which cluster, how.")
