"""The plan that a recipe keeps to: a small file beside the recipe, to be committed with it.

`llmlaunch plan --lock` writes it. As long as it is there, every command takes its layout, whatever a calibration, a
margin or another version of llmlaunch would choose. It holds what the person chose by accepting the plan, and nothing
of what follows from the recipe: what the recipe names itself stays the recipe's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from llmlaunch.documents.keys import form, key, keys_of, section
from llmlaunch.documents.text import Line
from llmlaunch.documents.validate import validate
from llmlaunch.documents.yaml_strict import read_document
from llmlaunch.errors import UserError
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import LAYOUT_FIELDS, RECOMPUTE_FULL, RECOMPUTE_LAYERS, RECOMPUTE_NAMES, Layout
from llmlaunch.planner.plan import Candidate, Plan
from llmlaunch.planner.search_space import as_ints, excluded_techniques
from llmlaunch.recipe.digest import recipe_digest
from llmlaunch.recipe.training import AUTO_INTERVAL
from llmlaunch.recipe.types import AUTO_NODES, Recipe
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.techniques import CHOOSABLE, NO_TECHNIQUES, SWITCH_NAMES, TREATMENT_NAMES, Techniques

FLAGS = ("sequence_parallel",)


@section
class LockedJob:
    """What the plan was made for. A plan of another job is no plan."""

    parameters: int = key("Parameters of the model", ge=0)
    layers: int = key("Decoder layers of the model", ge=1)
    backend: Line = key("Training framework")
    accelerator: Line = key("Accelerator of the cluster")
    devices_per_node: int = key("Devices of a node", ge=1)
    nodes: int = key("Number of nodes", ge=1)
    sequence_length: int = key("Tokens of a sequence", ge=1)
    global_batch_size: int = key("Sequences in one step", ge=1)
    precision: Line = key("Number format of the computation, with the narrow one beside it")


@section
class LockedPrediction:
    """What was predicted of the plan when it was locked."""

    verdict: Line = key("safe or tight")
    device_bytes: int = key("Device peak of the worst pipeline rank", ge=0)
    limit_bytes: int = key("How far a device could be filled", ge=0)
    step_seconds: float = key("Seconds of a step", ge=0)


@section
class PlanLock:
    """A plan to keep to. `layout` has the names of `Layout.as_json`, `techniques` those of `Techniques`."""

    llmlaunch: Line = key("Version that made the plan")
    job: LockedJob = key("What the plan was made for")
    layout: Mapping[str, Any] = key("How the job is split", written=dict[Line, Any])
    techniques: Mapping[str, Any] = key("What is chosen beside the layout", written=dict[Line, Any])
    predicted: LockedPrediction = key("What was predicted of it")
    gradient_dtype: str | None = key("Format gradients accumulate in; absent = the backend's own", default=None)
    save_interval: int | None = key("Steps between two checkpoints, where the recipe says auto", default=None, ge=1)


def lock_of(recipe: Recipe, plan: Plan, version: str) -> PlanLock:
    """Return the lock that keeps a recipe, its number of nodes chosen, to `plan`."""
    limit, chosen, expected = plan.limit.limit_bytes, plan.chosen, plan.expected
    return PlanLock(
        llmlaunch=version,
        job=_job_of(recipe),
        layout=chosen.layout.as_json(),
        techniques=_choices(chosen.techniques),
        predicted=LockedPrediction(plan.verdict, plan.device_bytes, limit, chosen.step_seconds),
        gradient_dtype=chosen.gradient_dtype,
        save_interval=expected.save_interval if expected is not None and expected.save_interval_reason else None,
    )


def lock_of_run(recipe: Recipe, plan: Mapping[str, Any], nodes: int) -> PlanLock:
    """Return the lock that keeps the recipe of a run directory to its plan.json. Raises KeyError and TypeError for what
    is no plan.json."""
    memory = plan["memory"]
    device_bytes = max(rank["device_bytes"] for rank in memory["ranks"])
    return PlanLock(
        llmlaunch="that rendered the run",
        job=_job_of(replace(recipe, nodes=nodes)),
        layout=plan["layout"],
        techniques=_choices(_with_choices(recipe, plan["techniques"])),
        predicted=LockedPrediction(plan["verdict"], device_bytes, memory["limit_bytes"], plan["step_seconds"]),
        gradient_dtype=plan["gradient_dtype"],
        save_interval=(plan["job"].get("expected") or {}).get("save_interval"),
    )


def _job_of(recipe: Recipe) -> LockedJob:
    numbers = recipe.training.numbers
    return LockedJob(
        parameters=count_parameters(recipe.model).total,
        layers=recipe.model.num_layers,
        backend=recipe.backend.name,
        accelerator=recipe.cluster.accelerator.name,
        devices_per_node=recipe.cluster.devices_per_node,
        nodes=recipe.nodes,
        sequence_length=recipe.workload.sequence_length,
        global_batch_size=recipe.workload.global_batch_size,
        precision="+".join(filter(None, (recipe.workload.precision, numbers.narrow))),
    )


def lock_text(lock: PlanLock, recipe_path: str | Path) -> str:
    """Return the file: the same bytes for the same plan."""
    name = Path(recipe_path).name
    content = {"schema": 1, **{name: value for name, value in asdict(lock).items() if value is not None}}
    return (
        f"# The plan of {name}: `llmlaunch submit` keeps to it, whatever it would choose today. Commit it beside the\n"
        f"# recipe. To plan anew: {to_type('plan', name, '--lock')}\n"
        + yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110)
    )


def read_lock(path: Path) -> PlanLock:
    """Read the lock at `path`.

    Raises:
        UserError: it cannot be read, or is no lock that this version understands.
    """
    schema = Annotated[Literal[1], Field(description="Version of the format")]
    keys = validate(form("PlanLock", {"schema": schema, **keys_of(PlanLock)}), read_document(path))
    lock = PlanLock(**{name: value for name, value in keys.items() if name != "schema"})
    _candidate(lock, path)
    return lock


def _candidate(lock: PlanLock, path: Path) -> Candidate:
    """Return the locked choice. Raises UserError for a word of another version."""
    try:
        split, recompute = tuple(lock.layout["layers_by_stage"]), RECOMPUTE_NAMES.index(lock.layout["recompute"])
        sizes = {
            name: int(value) for name, value in lock.layout.items() if name not in ("layers_by_stage", "recompute")
        }
        layout = Layout(**sizes, recompute=recompute, layers_by_stage=split)
        techniques = Techniques.from_json({name: lock.techniques[name] for name in lock.techniques})
        if not set(lock.techniques) <= set(CHOOSABLE):
            raise ValueError(f"{', '.join(sorted(set(lock.techniques) - set(CHOOSABLE)))} is nothing a plan chooses")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: was written by llmlaunch {lock.llmlaunch} and cannot be read by this version ({error}); "
            "plan anew with `llmlaunch plan --lock`, or use that version"
        ) from None
    predicted = lock.predicted
    return Candidate(layout, predicted.device_bytes, 0, predicted.step_seconds, 0.0, techniques, lock.gradient_dtype)


def keeping_to(recipe: Recipe, lock: PlanLock, path: Path) -> Recipe:
    """Return the recipe with everything pinned that the lock at `path` holds.

    Raises:
        UserError: the lock is of another job, or a pin of the recipe contradicts it.
    """
    chosen = _candidate(lock, path)
    sized = recipe
    if recipe.nodes == AUTO_NODES:
        sized = replace(recipe, nodes=lock.job.nodes)
        sized = replace(sized, digest=recipe_digest(sized))  # as if that number were written
    differences = [
        *_other_job(sized, lock.job),
        *_other_pins(recipe, chosen, (*TREATMENT_NAMES, *lock.techniques)),
    ]
    if differences:
        raise UserError(
            f"{path}: keeps a plan of another job: {'; '.join(differences)}. To plan anew and keep that: "
            f"{to_type('plan', recipe.path, *recipe.overrides, '--lock')}; to leave the lock aside this once: --replan"
        )
    training = replace(recipe.training, gradient_dtype=chosen.gradient_dtype)
    if training.save_interval == AUTO_INTERVAL and lock.save_interval is not None:
        training = replace(training, save_interval=lock.save_interval)
    return replace(
        sized,
        pins=_pins(chosen.layout),
        layers_by_stage=chosen.layout.layers_by_stage,
        techniques=_with_choices(recipe, lock.techniques),
        training=training,
        fixed=(*CHOOSABLE, "gradient_dtype"),
        locked_by=path.name,
    )


def _other_job(recipe: Recipe, locked: LockedJob) -> Iterator[str]:
    today = asdict(_job_of(recipe))
    for name, value in asdict(locked).items():
        if today[name] != value:
            yield f"{name} was {value} and is {today[name]}"


def _other_pins(recipe: Recipe, chosen: Candidate, locked: Collection[str]) -> Iterator[str]:
    """Yield what the recipe fixes otherwise than the lock, which names the techniques `locked`, a clause each."""
    for name, pin in recipe.pins.items():
        value = getattr(chosen.layout, name)
        if value not in as_ints(name, pin):
            yield f"layout.{name} was {value} and is pinned to {pin}"
    split = recipe.layers_by_stage
    if split is not None and split != chosen.layout.layers_by_stage:
        yield f"layout.layers_by_stage was cut otherwise, into {counted(len(chosen.layout.layers_by_stage), 'stage')}"
    for name in recipe.fixed:
        if name in locked and getattr(recipe.techniques, name) != getattr(chosen.techniques, name):
            yield f"layout.{name} was {getattr(chosen.techniques, name)} and is {getattr(recipe.techniques, name)}"
    for name in excluded_techniques(recipe):
        if getattr(chosen.techniques, name) != getattr(NO_TECHNIQUES, name):
            yield f"layout.techniques is {recipe.technique_limit}, and {name} was {getattr(chosen.techniques, name)}"
    if "gradient_dtype" in recipe.fixed and recipe.training.gradient_dtype not in (None, chosen.gradient_dtype):
        yield f"training.gradient_dtype was {chosen.gradient_dtype} and is {recipe.training.gradient_dtype}"


def _pins(layout: Layout) -> dict[str, Any]:
    """Return the layout as a recipe pins it. An amount of full recompute is none where nothing is recomputed so."""
    pins: dict[str, Any] = {name: getattr(layout, name) for name in LAYOUT_FIELDS}
    pins |= {name: bool(pins[name]) for name in FLAGS}
    pins["recompute"] = RECOMPUTE_NAMES[layout.recompute]
    if layout.recompute != RECOMPUTE_FULL or not layout.recompute_layers:
        del pins[RECOMPUTE_LAYERS]
    return pins


def _choices(techniques: Techniques) -> dict[str, Any]:
    """Return what a lock holds of a plan's techniques: of those that searches did not always choose, what is off too,
    because a lock without them is an older one and leaves them to the recipe."""
    changed = techniques.as_json()
    off = {name: getattr(NO_TECHNIQUES, name) for name in SWITCH_NAMES}
    return {name: changed.get(name, off.get(name)) for name in CHOOSABLE if name in changed or name in off}


def _with_choices(recipe: Recipe, locked: Mapping[str, Any]) -> Techniques:
    """Return the techniques of the recipe with those of a lock or a plan; what neither names is off."""
    choices = Techniques.from_json({name: value for name, value in locked.items() if name in CHOOSABLE})
    named = {*TREATMENT_NAMES, *locked}
    values = {name: getattr(choices, name) for name in CHOOSABLE if name in named}
    off = {name: getattr(NO_TECHNIQUES, name) for name in CHOOSABLE if name not in (*named, *recipe.fixed)}
    return replace(recipe.techniques, **values, **off)
