"""The schema of run.json (docs/run-files.md), and its reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from . import file_names
from .files import read_object
from .schema import Amount, Bytes, Count, Seconds, Step, sound
from .values import count_above_zero

if TYPE_CHECKING:
    from pathlib import Path


class PredictedByKind(TypedDict, total=False):
    """The prediction by kind of peak."""

    allocated: list[Bytes]
    """predicted peak of torch's allocated bytes on each pipeline rank"""
    reserved: list[Bytes]
    """predicted peak of torch's reserved bytes on each pipeline rank"""
    host: Bytes | None
    """predicted peak of main memory on one node"""


class ProgressRules(TypedDict, total=False):
    """How steps are read from the logs, and when a step is overdue (watchdog.md). With `watchdog: off`, `floor_seconds`
    and `first_step_seconds` are null."""

    step_patterns: list[str]
    """regular expressions (Python 3.8) that are searched in each log line. Their groups are all optional: `step`,
    `steps`, `loss`, `tokens_per_second`, the step's duration as `seconds` or `milliseconds`, and `nan`, which matches
    if the line reports a NaN loss in other words"""
    slow_patterns: list[str]
    """regular expressions for log lines after which a step may take longer"""
    promised: bool
    """whether the trainer is certain to log its steps"""
    steps: Step | None
    """number of steps planned"""
    tokens_per_step: Count | None
    """tokens that the whole job processes in one step"""
    floor_seconds: Seconds | None
    """shortest time after which a step may count as overdue"""
    first_step_seconds: Seconds | None
    """time allowed for the first step"""
    save_every: Step | None
    """number of steps between saves; null if log lines announce the saves"""
    evaluate_every: Step | None
    """number of steps between evaluations, which log lines may not announce; null without evaluations"""
    saving_seconds: Seconds | None
    """time allowed for a step with a save or an evaluation"""


class RestartPolicy(TypedDict, total=False):
    """When an attempt that ended early is started again (recovery.md)."""

    by: str
    """how a new job continues the run: `requeue` (the same job again) or `chain` (a follow-up job)"""
    within: str
    """where a failed attempt is restarted. `job`: in the same allocation if possible; `queue`: only by way of the
    queue"""
    times: Count
    """maximum number of restarts"""
    fruitless: Count
    """maximum number of consecutive attempts that made no progress"""
    per_hour: Count | None
    """maximum number of failures within an hour; null: no limit"""
    lost_gpu_hours: Amount | None
    """maximum device-hours spent on steps that no checkpoint holds"""
    backoff_seconds: Seconds
    """wait before the second restart in a row; doubled each time"""
    bad_checkpoint: str
    """what to do if the last checkpoint cannot be loaded: `previous` (continue from the one before it) or `stop`"""
    slow_nodes: str
    """`replace` if slow nodes are replaced by spare ones; absent if they are only reported"""


class Checkpoints(TypedDict, total=False):
    """Where and how often checkpoints are written."""

    path: str
    """folder of the checkpoints"""
    tracker: str
    """name of the file that holds the number of the last step saved"""
    promised: bool
    """whether the trainer is certain to write the tracker file; false for a DeepSpeed script of your own. If such a
    script leaves no tracker file, the last step at which a save was due, judging by its log, is used instead"""
    interval: Step | None
    """number of steps between saves"""
    keep: Count
    """number of complete checkpoints that are kept; absent: all"""
    non_persistent: str
    """folder within `path` for checkpoints of which only the newest is kept; absent if there are none"""


class FallbackLayout(TypedDict, total=False):
    """A layout to switch to after running out of memory."""

    layout: str
    """folder of the layout: `fallback/K`"""
    keeps_checkpoints: bool
    """whether the layout can load the checkpoints of the layout before it"""
    loads: list[str]
    """earlier layouts whose checkpoints the layout can load; the empty text stands for the planned layout"""


class SmallerLayout(TypedDict, total=False):
    """A layout for fewer nodes."""

    layout: str
    """folder of the layout: `nodes/N`"""
    nodes: Count
    """number of nodes that train"""
    step_seconds: Seconds | None
    """predicted seconds of one step"""


class FewerNodesRules(TypedDict, total=False):
    """Layouts for fewer nodes than planned."""

    step_seconds: Seconds | None
    """predicted seconds of one step of the planned layout"""
    usd_per_node_hour: Amount | None
    """price of one node for one hour; null if unknown"""
    layouts: list[SmallerLayout]
    """the layouts, from the most nodes to the fewest"""


class LossPolicy(TypedDict, total=False):
    """What happens when the loss goes bad."""

    action: str
    """`tell` (report it only), `stop` or `rollback`"""
    spike: bool
    """whether a spike is treated like NaN and infinity"""
    skip_batches: Count
    """number of steps whose batches are skipped after a rollback"""
    times: Count
    """maximum number of rollbacks"""


class NoticeTarget(TypedDict, total=False):
    """Where notices are sent (notices.md)."""

    webhook: str | None
    """name of the environment variable that holds the webhook's address"""
    command: list[str]
    """command that is run for each notice, as a list of words"""
    events: list[str] | None
    """events that are sent; null: all"""


class ContainerRules(TypedDict, total=False):
    """The container in which the nodes train."""

    runtime: str
    """program that runs the container: `pyxis`, `apptainer` ..."""
    image: str
    """image of the container"""
    mounts: list[str]
    """mounts that the recipe lists"""
    is_imported: bool
    """whether each node imports the image before the training"""
    paths: list[str]
    """paths named in the recipe that no mount contains; each is mounted as well"""
    makes: str
    """folder that is created before the container starts; empty: none"""
    has_gpus: bool
    """whether the container gets the GPUs"""


class JobRules(TypedDict, total=False):
    """What `node.pyz job` reads. It is only in the `run.json` of the planned layout."""

    allocated: Count
    """number of nodes in the job, spare ones included"""
    python: str
    """Python interpreter that the recipe names; empty if it names none"""
    secrets: list[str]
    """names of the environment variables that hold secrets"""
    preflight: bool
    """whether the nodes are tested before the training"""
    prepares: bool
    """whether one node checks or builds something before the training"""
    is_placed: bool
    """whether the nodes are ordered by their network"""
    is_probed: bool
    """whether the memory probe runs in the ranks"""
    waits_for_devices: bool
    """whether the job waits for GPU memory to be released before it trains again in the same allocation"""
    late_end_seconds: Seconds
    """time that the remaining nodes get to end after the first node has ended well"""
    srun: list[str]
    """additional srun options that the site needs"""
    step_gres: str
    """value of srun's `--gres`, for jobs that request a total number of GPUs; empty: none"""
    container: ContainerRules | None
    """the container in which the nodes train; null without one"""


class NodeWord(TypedDict, total=False):
    """A word whose beginning is the value of an environment variable on the node."""

    variable: str
    """environment variable of the node whose value begins the word"""
    suffix: str
    """text that follows the variable's value"""


class TriedPaths(TypedDict, total=False):
    """Paths that the preflight tests."""

    reads: list[str]
    """paths that the preflight must be able to read"""
    writes: list[str]
    """paths that the preflight must be able to write"""


class TrackedRun(TypedDict, total=False):
    """The run in Weights & Biases."""

    name: str | None
    """name of the run in Weights & Biases; null: the run's id"""
    save_dir: str | None
    """folder for the files of Weights & Biases; null: the run directory"""


class LaunchRules(TypedDict, total=False):
    """What `node.pyz node` reads besides `command.txt`. A word is either a text or an object that each node completes
    with one of its environment variables."""

    environment: dict[str, str | NodeWord]
    """environment variables of the ranks"""
    python_path: list[str | NodeWord]
    """folders that are put at the front of PYTHONPATH one by one, so the last one ends up first"""
    check: list[str | NodeWord]
    """command that checks the arguments; empty: none"""
    prepare: list[str | NodeWord]
    """command that builds files that all nodes read; empty: none"""
    workdir: str | NodeWord
    """folder in which the ranks start; empty: the run directory"""
    required_variables: list[str]
    """names of the environment variables that must be set on every node"""
    python: str
    """Python interpreter that the recipe names; empty if it names none"""
    in_container: bool
    """whether the ranks run in a container"""
    threads_on_host: bool
    """whether the optimizer steps on the CPU, so that each rank needs its share of the cores"""
    tokenizer: str
    """name of a tokenizer on the Hugging Face hub that each node downloads before the training; empty: none"""
    world_size: Count
    """number of ranks in the job"""
    open_files: Count
    """number of files that one process of a node may need to keep open"""
    node_files: list[str]
    """files of the run directory that each node copies to its own disk"""
    hook_files: list[str]
    """files that the Python of each trainer imports first"""
    kind: str
    """kind of device: `gpu` or `cpu`"""
    tried_paths: TriedPaths
    """paths that the preflight tests"""
    by_itself: bool
    """whether the job is a single process, whose rank is given in `environment`"""
    monitor: list[str]
    """arguments of the monitor"""
    wandb: TrackedRun | None
    """the run in Weights & Biases; null without one"""
    skip_flag: str
    """the trainer's flag for steps whose batches are skipped; empty if it has none"""
    flight_recorder: bool
    """whether NCCL's flight recorder is on"""


class RehearsedStage(TypedDict, total=False):
    """A rank that runs alone ([rehearse-gpu.md](rehearse-gpu.md), [store.md](store.md#rehearsed-ranks)). With this key,
    `nodes` and `devices_per_node` are 1 and `progress.steps` is the short number of steps run; `pipeline` and
    `predicted_bytes` describe the planned job; `measurement` describes what runs, and its one rank belongs to this
    `pipeline_rank`, whatever its number."""

    pipeline_rank: Count | None
    """pipeline rank that the process plays"""
    stands_for: list[Count] | None
    """pipeline ranks with the same memory, this one included"""
    on: str
    """where the rank runs: `gpu`"""
    notes: list[str]
    """differences between this run and the planned job, in words"""
    shape: str
    """key of everything that the rank's memory depends on"""
    recipe: str
    """recipe of the planned job"""
    recipe_digest: str
    """digest of the planned job's recipe"""
    nodes: Count | None
    """number of nodes of the planned job"""
    layout: dict[str, Any]
    """layout of the planned job"""
    techniques: dict[str, Any]
    """techniques of the planned job"""
    gradient_dtype: str | None
    """gradient number format of the planned job"""
    left_out: list[Any]
    """techniques of the planned job that the rank runs without, each with its predicted cost"""
    as_run: dict[str, Any]
    """`shape` and `techniques` of what runs; absent if they equal the planned ones"""


class RunFile(TypedDict, total=False):
    """What the nodes and `collect` need to know about a layout. Pipeline parallelism is the outermost rank order
    (`tp-cp-ep-dp-pp`), so `pipeline_rank = global_rank // (world_size // pipeline)`. The file of an observed run has
    only `schema`, `name`, `observed`, `nodes`, `peak_kind` and `progress` until `collect` has read the command."""

    schema: int
    """version of this format: 1"""
    name: str
    """name of the recipe"""
    recipe_digest: str
    """digest of the recipe"""
    overrides: list[str]
    """`KEY=VALUE` words given with the recipe"""
    backend: str
    """backend of the recipe"""
    accelerator_kind: str
    """kind of accelerator: `gpu` or `cpu`"""
    nodes: Count | None
    """number of nodes that train"""
    devices_per_node: Count | None
    """number of devices on each node, one rank on each device"""
    fabric_gigabytes_per_second: Amount | None
    """bandwidth between nodes for each device, from the cluster profile"""
    pipeline: Count | None
    """number of pipeline ranks"""
    verdict: str
    """the plan's verdict: `safe` or `tight`"""
    stated_risk: Amount | None
    """predicted risk of running out of memory, as a share of such runs"""
    peak_kind: str
    """kind of memory that is predicted: `device`, or `resident` on a CPU"""
    predicted_bytes: list[Bytes]
    """predicted peak memory of each pipeline rank"""
    predicted_by_kind: PredictedByKind
    """the prediction by kind of peak"""
    monitor_interval_seconds: Seconds | None
    """time between two samples of the monitor"""
    progress: ProgressRules
    """how steps are read from the logs, and when a step is overdue"""
    restart: RestartPolicy | None
    """when the run is restarted; null: never"""
    checkpoint: Checkpoints | None
    """where and how often checkpoints are written; null: none are"""
    fallbacks: list[FallbackLayout]
    """all fallback layouts in order; the list is the same in the `run.json` of every layout"""
    after_checkpoint: str
    """what to do if memory runs out once a checkpoint exists: `reshard`, `restart` or `stop`"""
    on_bad_loss: LossPolicy
    """what happens when the loss goes bad"""
    fewer_nodes: FewerNodesRules
    """layouts for fewer nodes than planned; only with `nodes.at_least`, and only in the `run.json` of the planned
    layout"""
    notify: NoticeTarget
    """where notices are sent; absent if the recipe has no `notify`"""
    measurement: dict[str, Any]
    """a measurement record in which only the peak is missing"""
    rehearsal: RehearsedStage
    """the rank that runs alone; absent from ordinary runs"""
    job: JobRules
    """what `node.pyz job` reads"""
    launch: LaunchRules
    """what `node.pyz node` reads"""
    files: list[str]
    """names of all rendered files, those of other layouts included; a comparison with the files that exist shows what a
    site has removed. Absent from an observed run"""
    observed: bool
    """true if `llmlaunch observe` wrote the file ([observe.md](observe.md))"""
    calibration_id: str
    """id of the calibration behind the prediction; absent without one"""


def read_run_file(run_directory: Path, layout: str = "") -> RunFile:
    """Return the run.json of a layout, or an empty one if it cannot be read."""
    return sound(RunFile, read_object(run_directory / layout / file_names.RUN)) or RunFile()


def pipeline_rank_of(run: RunFile, rank: int) -> int | None:
    """Return the pipeline rank of a global rank, or None if the numbers in `run` (run.json) do not fit together.
    Pipeline parallelism is the outermost rank order. A rank that runs alone belongs to the stage for which it was
    started, whatever its number."""
    rehearsed_stage = (run.get("rehearsal") or RehearsedStage()).get("pipeline_rank")
    if rehearsed_stage is not None:
        return rehearsed_stage
    pipeline, world = run.get("pipeline"), count_above_zero(run.get("measurement", {}).get("world_size"))
    world = world or (run.get("nodes") or 0) * (run.get("devices_per_node") or 0)
    if not pipeline or not world or world % pipeline or rank >= world:
        return None
    return rank // (world // pipeline)
