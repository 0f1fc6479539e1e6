"""Where the framework itself writes its curves: Weights & Biases and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.text import Line, PathText
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.recipe.training import Training

__all__ = ["NO_TRACKING", "Tracking", "WandbRun", "tracking_problems", "tracking_with_absolute_paths"]

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
