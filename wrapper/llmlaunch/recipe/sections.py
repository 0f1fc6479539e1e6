"""Sections of a recipe that depend on no other: the number of nodes, how full memory may be, notices and the
trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.text import EnvironmentName, Line, PathText
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.recipe.training import Training
from llmlaunch.units import GIB

# wandb refuses these in a project's name (wandb/sdk/wandb_settings.py validate_project, 0.31); a comma would part paths
WandbName = Annotated[Line, Field(pattern=r"^[^/\\#?%:,]{1,128}$")]


@section
class WandbRun:
    """One run of Weights & Biases for the whole job: restarts, follow-up jobs and fallback layouts go on with it."""

    project: WandbName = key("Project of the run")
    entity: WandbName | None = key("User or team that owns the project; absent = the key's own", default=None)
    name: Line | None = key("Name to show; absent = the name of llmlaunch's run", default=None, max_length=128)
    mode: str = key(
        "online: uploads while it trains, with WANDB_API_KEY among `secrets` or `wandb login` on the nodes; offline: "
        "writes files, which `wandb sync` uploads",
        default="online",
        written=Literal["online", "offline"],
    )
    save_dir: PathText | None = key(
        "Folder in which the run's files are kept, in wandb/; absent = the run directory", default=None
    )


@section
class Tracking:
    """What the training framework writes besides its log."""

    wandb: WandbRun | None = key("Weights & Biases", default=None)
    tensorboard: PathText | None = key("Folder on the cluster for TensorBoard", default=None)


NO_TRACKING = Tracking()


def tracking_problems(tracking: Tracking, training: Training) -> Iterator[tuple[KeyPath, str]]:
    """Yield the key that says the same as another one."""
    if tracking.tensorboard is not None and training.tensorboard is not None:
        yield ("training", "tensorboard"), "says what tracking.tensorboard says; remove one of the two"


def tracking_with_absolute_paths(tracking: Tracking, absolute: Callable[[str | None], str | None]) -> Tracking:
    """Return the tracking with its folders as `absolute` makes them."""
    run = tracking.wandb
    return replace(
        tracking,
        tensorboard=absolute(tracking.tensorboard),
        wandb=None if run is None else replace(run, save_dir=absolute(run.save_dir)),
    )


MOST_NODES = 100_000
AUTO_NODES = 0  # a recipe whose number of nodes the planner has not chosen yet
NodeCount = Annotated[int, Field(ge=1, le=MOST_NODES)]


def _nodes(value: Any, check: ValidatorFunctionWrapHandler) -> int:
    nodes: int = AUTO_NODES if value == "auto" and isinstance(value, str) else check(value)
    return nodes


Nodes = Annotated[
    NodeCount,
    WrapValidator(_nodes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_NODES}, {"const": "auto"}]}),
]


@section
class NodeRange:
    """How many nodes train, and with how few the job goes on where it has lost some and no spare node is left."""

    count: int = key("Number of nodes", written=NodeCount)
    at_least: int | None = key(
        "Go on with so few nodes in the same allocation, with a layout planned at submit, rather than back to the "
        "queue; absent = with all of them only",
        default=None,
        written=NodeCount | None,
    )

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where the fewest nodes are not fewer."""
        fewest = keys.get("at_least")
        if fewest is not None and fewest >= keys["count"]:
            raise ValueError(f"at_least: {fewest} is not fewer than count: {keys['count']}; lower it, or leave it out")


FLOOR_GIB = 4.0  # 20 % of a 40 GB card is too thin


IN_USE, NO_CALIBRATION = "in-use", "none"


@section
class MemoryPolicy:
    """When a plan is called safe. Without a word here, and with a `risk`, measured runs set the limit of a GPU where
    there are enough of them. With a `limit` alone, and wherever they do not, it is a share of device memory, and at
    least `floor_gib` stay free."""

    limit: float | None = key(
        "Share of device memory that may be used (Fujii's rule is 0.8), in place of measured runs",
        default=None,
        gt=0,
        le=1,
    )
    floor_gib: float | None = key(
        "What must stay free at least, in units of 2**30 bytes (GPUs only); absent = 4.0 beside a share",
        default=None,
        ge=0,
        le=1024,
    )
    risk: float | None = key(
        "Share of runs that may need more than predicted and the margin; absent = 0.07",
        default=None,
        gt=0,
        le=0.5,
    )
    calibration: str = key(
        "What measured runs say of predictions: in-use (for its backend and accelerator), none, or an id",
        default=IN_USE,
        pattern=r"^[A-Za-z0-9.-]+$",
    )
    accept: str | None = key(
        "tight: run also what fits the card only if its prediction is not too low, with a layout to fall back on",
        default=None,
        written=Literal["tight"],
    )

    @property
    def floor_bytes(self) -> int:
        """What stays free beside a share of memory."""
        return int((FLOOR_GIB if self.floor_gib is None else self.floor_gib) * GIB)

    @property
    def by_runs(self) -> bool:
        """Whether measured runs may set the limit."""
        return self.limit is None or self.risk is not None


Event = Literal["start", "first_step", "stall", "restart", "slow", "bad_loss", "end"]


@section
class Notices:
    """Notices of what becomes of a job."""

    webhook: EnvironmentName | None = key(
        "Name of a variable, set where you submit, with the address to which notices are posted as Slack's JSON",
        default=None,
    )
    command: tuple[Line, ...] = key(
        "Program and arguments, run on the job's first node with each notice as JSON on its standard input", default=()
    )
    events: tuple[str, ...] | None = key(
        "The events that are told; absent = all",
        default=None,
        written=tuple[Event, ...] | None,
        min_length=1,
    )

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where nobody would hear of anything, or the variable may be one of job.sbatch's own."""
        if keys.get("webhook") is None and not keys.get("command"):
            raise ValueError("names neither a webhook nor a command; name one of them, or remove notify")
        if (name := keys.get("webhook")) and name != name.upper():
            raise ValueError(
                f"webhook is {name}; write the variable in capitals, as the job script has its own in small ones"
            )


def receivers(notices: Notices, environment: Mapping[str, str]) -> str:
    """Return where notices go, of an address its host alone, and which: the row of a dry run."""
    parts = []
    if notices.webhook is not None:
        host = webhook_host(environment.get(notices.webhook, ""))
        parts.append(f"{host or 'an address that is missing'} (${notices.webhook})")
    if notices.command:
        parts.append(f"the command {notices.command[0]}")
    events = "all" if notices.events is None else ", ".join(notices.events)
    return f"{' and '.join(parts)}: {events}"


def webhook_host(address: str) -> str | None:
    """Return the host of an http or https address; None for anything else."""
    try:
        parts = urlsplit(address.strip())
        return parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        return None
