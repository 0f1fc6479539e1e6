"""A validated recipe, in plain frozen values. `llmlaunch.recipe.load` makes one; nothing else should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmlaunch.cluster.profile import Cluster
from llmlaunch.models.shape import ModelShape
from llmlaunch.number_formats import NO_NUMBER_FORMATS, NumberFormats
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload

__all__ = [
    "AUTO_NODES",
    "IN_USE",
    "MOST_NODES",
    "MOST_STEPS",
    "NO_BUDGET",
    "NO_CALIBRATION",
    "BackendChoice",
    "BlendPart",
    "Budget",
    "Code",
    "Container",
    "Data",
    "MemoryPolicy",
    "OnOom",
    "Recipe",
    "Restart",
    "Schedule",
    "Training",
    "Watchdog",
]

Scalar = str | int | float | bool
MOST_STEPS = 10**9
MOST_NODES = 100_000
IN_USE, NO_CALIBRATION = "in-use", "none"
AUTO_NODES = 0  # a recipe whose number of nodes the planner has not chosen yet


@dataclass(frozen=True)
class BackendChoice:
    """`name` is "megatron-lm" or "deepspeed". `path` is the Megatron-LM checkout on the cluster; `script` a
    DeepSpeed training script of the person's own, with `script_args`; `extra_args` go to the framework as they are.
    `found_version` is what was seen of it where `version` says nothing (llmlaunch.backends.framework_version)."""

    name: str
    version: str | None = None
    path: str | None = None
    script: str | None = None
    script_args: tuple[str, ...] = ()
    script_kind: str = "own"  # or "hugging-face", "pipeline", "megatron-deepspeed": what it takes beside ds_config.json
    extra_args: tuple[str, ...] = ()
    found_version: str | None = None

    @property
    def runs_version(self) -> str | None:
        """The version the job will run with, as the recipe says or as it was found; None = nothing is known."""
        return self.version or self.found_version


@dataclass(frozen=True)
class Schedule:
    """How AdamW learns, but for the peak of the learning rate. `warmup_steps` and `decay` ("cosine", "linear",
    "constant") None are the backend's choice; `clipping` 0 is none."""

    warmup_steps: int | None = None
    decay: str | None = None
    minimum_learning_rate: float = 0.0
    weight_decay: float = 0.1
    adam_betas: tuple[float, float] = (0.9, 0.95)
    clipping: float = 1.0


@dataclass(frozen=True)
class Training:
    """What is trained, for how long and how it is optimised."""

    workload: Workload
    steps: int
    learning_rate: float
    seed: int
    log_interval: int
    save_interval: int | None  # steps; None = no checkpoint
    checkpoint_path: str | None
    gradient_dtype: str | None = None  # what gradients accumulate in; None = the backend's choice
    numbers: NumberFormats = NO_NUMBER_FORMATS
    schedule: Schedule = Schedule()
    start_from: str | None = None  # weights of the first step; None = random
    checkpoint_format: str | None = None  # None = the one that goes with the layout
    tensorboard: str | None = None  # folder


@dataclass(frozen=True)
class BlendPart:
    """An indexed dataset and its weight beside the others'."""

    path: str
    weight: float


@dataclass(frozen=True)
class Data:
    """Exactly one of: `mock`; `path` (framework's own format, a text file or a folder of text files); `blend` (several
    indexed datasets); `python_source` (the standard library's own source files as byte-level text: nothing is
    downloaded). `split` is "train,valid,test" shares. None is the backend's choice."""

    mock: bool = False
    path: str | None = None
    python_source: bool = False
    tokenizer: str | None = None
    blend: tuple[BlendPart, ...] = ()
    split: str | None = None
    cache_path: str | None = None  # folder for indexes
    tokenizer_type: str | None = None  # in Megatron's words

    @property
    def datasets(self) -> tuple[str, ...]:
        """Where data is read from."""
        return (*(() if self.path is None else (self.path,)), *(part.path for part in self.blend))


@dataclass(frozen=True)
class MemoryPolicy:
    """Safe means device bytes <= `limit` x device memory, and at least `floor_bytes` free. With a `risk`, the share of
    runs that may need more than the plan says, measured runs set the limit where there are enough of them. Predictions
    take the `calibration` of that id, the one in use, or none."""

    limit: float = 0.80
    floor_bytes: int = 4 * 2**30
    risk: float | None = None
    calibration: str = IN_USE


@dataclass(frozen=True)
class Budget:
    """What the whole job may take; None = as much as it needs. `gpu_hours` are those of all devices together."""

    days: float | None = None
    gpu_hours: float | None = None
    max_nodes: int | None = None


NO_BUDGET = Budget()


@dataclass(frozen=True)
class Container:
    """`image` as `runtime` ("pyxis", "apptainer") takes it: a path or a registry reference; `mounts` as
    src:dst[:flags], the site's among them."""

    image: str
    mounts: tuple[str, ...] = ()
    runtime: str = "pyxis"


@dataclass(frozen=True)
class Code:
    """`path` is the trainer's source tree, recorded by commit and diff; `snapshot` copies it into the run."""

    path: str | None = None
    snapshot: bool = False


@dataclass(frozen=True)
class Restart:
    """How a job that ended early comes back by itself, from its last checkpoint.

    `times` bounds the restarts of a run altogether; `fruitless` attempts in a row that got no further than the one
    before end it. `backoff_seconds` is the wait after a failure, doubled with each fruitless attempt. `save_seconds` is
    how long writing a checkpoint may take; None = derived. `by` is "requeue" (the same job again), "chain" (jobs that
    were submitted together, one after the other) or None (as the cluster's site says, else "requeue")."""

    times: int = 20
    fruitless: int = 2
    backoff_seconds: float = 60.0
    save_seconds: float | None = None
    by: str | None = None


@dataclass(frozen=True)
class OnOom:
    """What follows when a device ran out of memory: `layouts` others with more head-room are tried one after the other
    in the same allocation; 0 = none, the job ends. `after_checkpoint`: "reshard" (go on from it where the next layout
    can load it, else stop), "restart" (where it cannot, begin again at step 0 in a folder of its own) or "stop"."""

    layouts: int = 0
    after_checkpoint: str = "reshard"


@dataclass(frozen=True)
class Watchdog:
    """A job without a new step for so long hangs: ten median steps, `floor_seconds` at least; `first_step_seconds`
    until the first."""

    floor_seconds: float = 600.0
    first_step_seconds: float = 3600.0


@dataclass(frozen=True)
class Recipe:
    """Everything a person asked for, validated; defaults filled in.

    `text` is the file as given and `overrides` the `key=value` words applied to it, so that a run directory can
    reproduce both. `digest` is sha256 over the resolved content (order, comments and white space left out).
    `pins` holds what the person fixed of the layout, by the names of `Layout` (recompute as "none", "selective" or
    "full"); what is absent is llmlaunch's to choose. A pin may be one value or a tuple of allowed values.
    `nodes` is AUTO_NODES until the planner has chosen them (llmlaunch.planner.sizing).
    """

    name: str
    model: ModelShape
    backend: BackendChoice
    cluster: Cluster
    nodes: int
    training: Training
    data: Data
    pins: Mapping[str, int | str | bool | tuple[int | str | bool, ...]]
    memory: MemoryPolicy
    slurm: Mapping[str, Scalar]  # any sbatch long option -> value, cluster defaults merged in; False = leave it out
    environment: Mapping[str, str]  # the recipe's own, over the cluster's; secrets by reference only
    secrets: tuple[str, ...]  # names of variables that must be set where the job is submitted
    setup: tuple[str, ...]  # shell lines the site needs first (module load ...): trusted code of the site
    container: Container | None
    code: Code
    monitor_interval_seconds: float
    path: str
    text: str
    overrides: tuple[str, ...] = ()
    digest: str = ""
    assumptions: tuple[str, ...] = field(default=())
    techniques: Techniques = NO_TECHNIQUES
    budget: Budget = NO_BUDGET
    placement: str = "auto"  # "auto": the order of the nodes is decided at job start; "slurm": SLURM's stays
    fixed: tuple[str, ...] = ()  # words of techniques the recipe chooses itself; the others are llmlaunch's to choose
    layers_by_stage: tuple[int, ...] | None = None  # as in `Layout`: () is even; None is llmlaunch's to choose
    restart: Restart | None = None  # None: a job that ended early stays ended
    on_oom: OnOom = OnOom()
    memory_probe: bool = True  # torch's own peaks, written down in each rank's Python
    watchdog: Watchdog | None = Watchdog()  # None: nobody looks whether it hangs
    preflight: bool = False  # the nodes are tried for a minute before the training
    spare_nodes: int = 0  # allocated beside `nodes`, to take the place of those preflight finds bad
    not_secrets: tuple[str, ...] = ()  # keys and files of the code that look like secrets and are none
    python: str | None = None  # interpreter of the training environment on the nodes; None = the one found there

    @property
    def workload(self) -> Workload:
        return self.training.workload

    @property
    def world_size(self) -> int:
        return self.nodes * self.cluster.devices_per_node
