"""The schema of run.json (docs/run-files.md), and its reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from . import file_names
from .files import read_object
from .schema import Amount, Bytes, Count, Seconds, Step, sound

if TYPE_CHECKING:
    from pathlib import Path


class PredictedByKind(TypedDict, total=False):
    """The prediction by kind of peak."""

    allocated: list[Bytes]
    """torch's allocated bytes of each pipeline rank"""
    reserved: list[Bytes]
    """torch's reserved bytes of each pipeline rank"""
    host: Bytes | None
    """main memory of a node"""


class ProgressRules(TypedDict, total=False):
    """How steps are read from the logs, and when one is overdue (watchdog.md). Times are null with `watchdog: off`."""

    step_patterns: list[str]
    """regular expressions of Python 3.8 that are searched in each line; their groups, any of which may lack, are
    `step`, `steps`, `loss`, `tokens_per_second`, `seconds` and `milliseconds` of a step, and `nan`, which says in other
    words that the loss is NaN"""
    slow_patterns: list[str]
    """the same for lines after which a step may take longer"""
    promised: bool
    """whether step lines will come"""
    steps: Step | None
    """all that are planned"""
    tokens_per_step: Count | None
    """of the whole job"""
    floor_seconds: Seconds | None
    """below which no step is overdue"""
    first_step_seconds: Seconds | None
    """that the first step may take"""
    save_every: Step | None
    """steps between saves that no line announces"""
    evaluate_every: Step | None
    """steps between evaluations that no line announces"""
    saving_seconds: Seconds | None
    """that a step with a save or an evaluation may take"""


class RestartPolicy(TypedDict, total=False):
    """When an attempt that ended early is started again (recovery.md)."""

    by: str
    """`requeue` or `chain`"""
    within: str
    """`job`: in the same allocation if that works; `queue`: never there"""
    times: Count
    """restarts at most"""
    fruitless: Count
    """attempts in a row that got no further, at most"""
    per_hour: Count | None
    """failures within an hour, at most"""
    lost_gpu_hours: Amount | None
    """hours of all devices whose steps no checkpoint has, at most"""
    backoff_seconds: Seconds
    """to wait before the second restart in a row; doubled each time"""
    bad_checkpoint: str
    """`previous`: go on from the one before; `stop`"""
    slow_nodes: str
    """`replace`; absent if slow nodes are only reported"""


class Checkpoints(TypedDict, total=False):
    """Where checkpoints are written."""

    path: str
    """their folder"""
    tracker: str
    """the file that holds the last step saved"""
    promised: bool
    """false for a DeepSpeed script of your own: if it leaves no tracker, the last step that was due to be saved, by
    what its log shows, stands for it"""
    interval: Step | None
    """steps between saves"""
    keep: Count
    """how many complete ones stay; absent: all"""
    non_persistent: str
    """folder in `path` of those of which only the newest stays; absent if there are none"""


class FallbackLayout(TypedDict, total=False):
    """A layout to fall back on, out of memory."""

    layout: str
    """`fallback/K`"""
    keeps_checkpoints: bool
    """whether it can load those of the layout before it"""
    loads: list[str]
    """layouts before it whose checkpoints it can load; empty text is the planned one"""


class SmallerLayout(TypedDict, total=False):
    """A layout on fewer nodes."""

    layout: str
    """`nodes/N`"""
    nodes: Count
    """how many"""
    step_seconds: Seconds | None
    """of a step"""


class FewerNodesRules(TypedDict, total=False):
    """Layouts on fewer nodes than planned, with `nodes.at_least`."""

    step_seconds: Seconds | None
    """of a step of the planned layout"""
    usd_per_node_hour: Amount | None
    """price, if it is known"""
    layouts: list[SmallerLayout]
    """the most nodes first"""


class LossPolicy(TypedDict, total=False):
    """What follows a bad loss."""

    action: str
    """`tell`, `stop` or `rollback`"""
    spike: bool
    """whether a spike counts, too"""
    skip_batches: Count
    """batches that are left out"""
    times: Count
    """rollbacks at most"""


class NoticeTarget(TypedDict, total=False):
    """Where notices go (notices.md)."""

    webhook: str | None
    """name of the variable that holds its address"""
    command: list[str]
    """words of a command"""
    events: list[str] | None
    """null: all"""


class ContainerRules(TypedDict, total=False):
    """The container of the steps."""

    runtime: str
    """`pyxis`, `apptainer` ..."""
    image: str
    """its image"""
    mounts: list[str]
    """of the recipe"""
    is_imported: bool
    """whether each node imports it first"""
    paths: list[str]
    """that are mounted because no mount brings them"""
    makes: str
    """a folder to make; empty: none"""
    has_gpus: bool
    """whether it gets the devices"""


class JobRules(TypedDict, total=False):
    """What `node.pyz job` reads. Only in the planned layout's `run.json`."""

    allocated: Count
    """nodes of the job with the spare ones"""
    python: str
    """the Python of the recipe; empty if it names none"""
    secrets: list[str]
    """names of variables"""
    preflight: bool
    """whether nodes are tried first"""
    prepares: bool
    """whether one node checks or builds something first"""
    is_placed: bool
    """whether nodes are ordered by the network"""
    is_probed: bool
    """whether the probe runs"""
    waits_for_devices: bool
    """whether devices must be empty before it starts again"""
    late_end_seconds: Seconds
    """that the last node may end later than the first"""
    srun: list[str]
    """words of the site for each srun"""
    step_gres: str
    """`--gres` of the training step"""
    container: ContainerRules | None
    """null without one"""


class NodeWord(TypedDict, total=False):
    """A word that a node completes."""

    variable: str
    """a variable of the node"""
    suffix: str
    """what follows its value"""


class TriedPaths(TypedDict, total=False):
    """Paths that the preflight tries."""

    reads: list[str]
    """to read"""
    writes: list[str]
    """to write"""


class TrackedRun(TypedDict, total=False):
    """A run of Weights & Biases."""

    name: str | None
    """its name"""
    save_dir: str | None
    """its folder"""


class LaunchRules(TypedDict, total=False):
    """What `node.pyz node` reads beside `command.txt`. A word is a text, or what a node completes."""

    environment: dict[str, str | NodeWord]
    """variables of the ranks"""
    python_path: list[str | NodeWord]
    """folders of PYTHONPATH; the last goes first"""
    check: list[str | NodeWord]
    """a command that checks the arguments"""
    prepare: list[str | NodeWord]
    """a command that builds what all will read"""
    workdir: str | NodeWord
    """where the ranks start; empty: where the job does"""
    required_variables: list[str]
    """names of variables that must be set"""
    python: str
    """as in `job`"""
    in_container: bool
    """whether the ranks run in one"""
    threads_on_host: bool
    """whether ranks compute on the host, and so get its cores"""
    tokenizer: str
    """on the hub, fetched before the training"""
    world_size: Count
    """ranks of the job"""
    open_files: Count
    """that a node may need"""
    node_files: list[str]
    """that each node copies to its own disk"""
    hook_files: list[str]
    """that trainers import first"""
    kind: str
    """`gpu` or `cpu`"""
    tried_paths: TriedPaths
    """that the preflight tries"""
    by_itself: bool
    """whether it is one process, whose environment says its rank"""
    monitor: list[str]
    """words for the monitor"""
    wandb: TrackedRun | None
    """null without it"""
    skip_flag: str
    """the trainer's flag for steps to leave out; empty if it has none"""
    flight_recorder: bool
    """whether collectives are recorded"""


class RehearsedStage(TypedDict, total=False):
    """A rank that runs alone ([rehearse-gpu.md](rehearse-gpu.md), [store.md](store.md#rehearsed-ranks)). `nodes` and
    `devices_per_node` are then 1 and `progress.steps` are its few; `pipeline` and `predicted_bytes` are the planned
    job's; `measurement` is of what runs, and its one rank is of this `pipeline_rank`, whatever its number."""

    pipeline_rank: Count | None
    """that it is of"""
    stands_for: list[Count] | None
    """pipeline ranks that hold the same, itself among them"""
    on: str
    """`gpu`"""
    notes: list[str]
    """what runs otherwise than in the job"""
    shape: str
    """key of what its memory depends on"""
    recipe: dict[str, Any]
    """of the job"""
    recipe_digest: str
    """of the job"""
    nodes: Count | None
    """of the job"""
    layout: dict[str, Any]
    """of the job"""
    techniques: dict[str, Any]
    """of the job"""
    gradient_dtype: str | None
    """of the job"""
    left_out: list[Any]
    """what the rank runs without, and its price"""
    as_run: dict[str, Any]
    """shape and techniques of what runs, where they differ"""


class RunFile(TypedDict, total=False):
    """What the nodes and `collect` need of a layout. Pipeline parallelism is the outermost rank order
    (`tp-cp-ep-dp-pp`), so `pipeline_rank = global_rank // (world_size // pipeline)`. What `llmlaunch observe` writes
    holds `schema`, `name`, `observed`, `nodes`, `peak_kind` and `progress`, until `collect` has read the command."""

    schema: int
    """1"""
    name: str
    """of the recipe"""
    recipe_digest: str
    """of the recipe"""
    overrides: list[str]
    """key=value words given with the recipe"""
    backend: str
    """the framework"""
    accelerator_kind: str
    """`gpu` or `cpu`"""
    nodes: Count | None
    """that train"""
    devices_per_node: Count | None
    """ranks of each"""
    fabric_gigabytes_per_second: Amount | None
    """of the network, per device, by the cluster's profile"""
    pipeline: Count | None
    """pipeline ranks"""
    verdict: str
    """`safe` or `tight`"""
    stated_risk: Amount | None
    """of running out of memory, as a share of such runs"""
    peak_kind: str
    """`device`, or `resident` on a CPU"""
    predicted_bytes: list[Bytes]
    """peak of each pipeline rank"""
    predicted_by_kind: PredictedByKind
    """the prediction by kind of peak"""
    monitor_interval_seconds: Seconds | None
    """between two samples"""
    progress: ProgressRules
    """how steps are read, and when one is overdue"""
    restart: RestartPolicy | None
    """null: never started again"""
    checkpoint: Checkpoints | None
    """null: none are written"""
    fallbacks: list[FallbackLayout]
    """the whole chain, in every layout's `run.json`"""
    after_checkpoint: str
    """out of memory after a checkpoint: `reshard`, `restart` or `stop`"""
    on_bad_loss: LossPolicy
    """what follows a bad loss"""
    fewer_nodes: FewerNodesRules
    """only with `nodes.at_least`, in the planned layout's `run.json` alone"""
    notify: NoticeTarget
    """only where the recipe has it"""
    measurement: dict[str, Any]
    """a measurement record whose peak is null"""
    rehearsal: RehearsedStage
    """only of a rank that runs alone"""
    job: JobRules
    """what `node.pyz job` reads"""
    launch: LaunchRules
    """what `node.pyz node` reads"""
    files: list[str]
    """names of all rendered files, those of other layouts too: what is left of them tells what a site has removed.
    Absent of an observed run"""
    observed: bool
    """true where `llmlaunch observe` wrote it ([observe.md](observe.md))"""
    calibration_id: str
    """of the calibration behind the prediction; absent without one"""


def read_run_file(run_directory: Path, layout: str = "") -> RunFile:
    """Return the run.json of a layout; empty where it cannot be read."""
    return sound(RunFile, read_object(run_directory / layout / file_names.RUN)) or RunFile()
