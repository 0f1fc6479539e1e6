"""job.sbatch: what its template is filled with. The `#SBATCH` lines are what the job needs, what its site wants and
what the recipe asks for."""

from __future__ import annotations

import re
from pathlib import PurePath

from llmlaunch.documents.slurm_options import GPU_OPTIONS, other_gres, refused_sbatch_option, sbatch_value_problem
from llmlaunch.documents.templates import has_own_templates
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Reason
from llmlaunch.frameworks.base import Rendered
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.setting import group_nodes, segment_nodes
from llmlaunch.recipe.containers import is_imported
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.launch import (
    PROBE_FILE,
    command_text,
    hook_files,
    if_a_path,
    launch_json,
    naming,
)
from llmlaunch.rendering.restarts import (
    is_placed,
    late_end_seconds,
    restart_by,
    warning_seconds,
)
from llmlaunch.rendering.shell import (
    ShellText,
    directive,
    refuse_unwritable,
    render_template,
    shell_word,
    variable_name,
)


def job_script(recipe: Recipe, plan: Plan) -> str:
    """Return job.sbatch. Raises UserError for a recipe value no directive or shell word can hold."""
    with naming(recipe):
        return render_template("job.sbatch.j2", _job_values(recipe, plan))


def refuse_unrenderable(recipe: Recipe, plan: Plan, rendered: Rendered) -> None:
    """Raise UserError for what `job_script`, `job_json`, `launch_json` and `command_text` would refuse.

    In the shipped templates only a value can be wrong, so they are not rendered for it, which would be a tenth of
    `check`; templates of the person's own are.
    """
    if has_own_templates():
        job_script(recipe, plan)
    with naming(recipe):
        refuse_unwritable(_job_values(recipe, plan))
    job_json(recipe, plan, prepares=False)  # which only says that something is
    launch_json(recipe, rendered, None)
    command_text(recipe, rendered, None)


def _job_values(recipe: Recipe, plan: Plan) -> dict[str, object]:
    options = sbatch_options(recipe, warning_seconds(recipe, plan), group_nodes(recipe.cluster, plan.layout))
    lines = [directive(option, value) for option, value in options.items()]
    return {
        "directives": [line for line in lines if line],
        "setup": setup_lines(recipe),
        "python": _python(recipe),
    }


def _python(recipe: Recipe) -> ShellText:
    """The Python of the batch host: the recipe's, unless that is the container's."""
    named = recipe.python if recipe.container is None else None
    return ShellText('"${LLMLAUNCH_PYTHON:-python3}"' if named is None else shell_word(named))


def job_json(recipe: Recipe, plan: Plan, prepares: bool) -> dict[str, object]:
    """Return `job` of run.json (docs/run-files.md): what `node.pyz job` is told beside what other parts say. With
    `prepares` one node checks or builds something first. Raises UserError for a path no mount can hold, and for what no
    argument can."""
    with naming(recipe):
        job = {
            "allocated": recipe.nodes + recipe.spare_nodes,
            "python": recipe.python or "",
            "secrets": [variable_name(name) for name in recipe.secrets],
            "preflight": recipe.preflight,
            "prepares": prepares,
            "is_placed": is_placed(recipe),
            "is_probed": PROBE_FILE in hook_files(recipe),
            "waits_for_devices": recipe.cluster.accelerator.kind == "gpu",
            "late_end_seconds": late_end_seconds(recipe, plan),
            "srun": _srun_options(recipe),
            "step_gres": _step_gres(recipe) if recipe.cluster.accelerator.kind == "gpu" else "",
            "container": _container_json(recipe),
        }
        refuse_unwritable(job)
    return job


def _container_json(recipe: Recipe) -> dict[str, object] | None:
    container = recipe.container
    if container is None:
        return None
    return {
        "runtime": container.runtime,
        "image": container.image,
        "mounts": list(container.mounts),
        "is_imported": is_imported(container),
        "paths": paths_to_mount(recipe),
        "makes": _unless_brought(recipe, recipe.training.checkpoint_path, written=True),
        "has_gpus": recipe.cluster.accelerator.kind == "gpu",
    }


def setup_lines(recipe: Recipe) -> list[ShellText]:
    """The site's lines (which may say where modules are), its modules, the recipe's lines. A line is shell; the name of
    a module is a word."""
    site = recipe.cluster.site
    modules = [ShellText(f"module load {shell_word(name)}") for name in site.modules]
    return [*map(ShellText, site.setup), *modules, *map(ShellText, recipe.setup)]


def _srun_options(recipe: Recipe) -> list[str]:
    site = recipe.cluster.site
    options = {**({"mpi": site.mpi} if site.mpi else {}), **site.srun}
    given_options = {name: value for name, value in options.items() if value is not False}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given_options.items()]


def _step_gres(recipe: Recipe) -> str:
    """Return the devices of one node as srun's --gres, with the other resources that the recipe names: a step that
    names any gets no others."""
    return ",".join([f"gpu:{recipe.cluster.devices_per_node}", *other_gres(recipe.slurm)])


def paths_to_mount(recipe: Recipe) -> list[str]:
    """What the recipe names by its path and no mount brings into the container. Raises UserError for a path no mount
    can hold."""
    training, data, backend = recipe.training, recipe.data, recipe.backend
    # a layout tried after another may keep its checkpoints beside the first one's, and a cache may not be there yet
    export = None if training.export is None else training.export.path
    folders = (training.checkpoint_path, data.cache_path, export)
    written = (*map(_folder, folders), *_tracked_folders(recipe))
    named = (if_a_path(data.tokenizer), training.start_from, backend.path, backend.script, recipe.workdir)
    read = (*data.datasets, *named)
    brought = [_unless_brought(recipe, path, written=True) for path in written]
    unmounted = [*brought, *(_unless_brought(recipe, path) for path in read)]
    wanted = [path for path in unmounted if path]
    for path in wanted:
        if re.search("[,:]", path):
            raise UserError(f"container: no mount can hold the comma or colon of {path}; mount it at another place")
    return list(dict.fromkeys(wanted))


def _tracked_folders(recipe: Recipe) -> tuple[str | None, ...]:
    run = recipe.tracking.wandb
    return _folder(recipe.tensorboard), _folder(None if run is None else run.save_dir)


def _unless_brought(recipe: Recipe, path: str | None, written: bool = False) -> str:
    """The path, or nothing where a mount has it in the container, or there is no container. A place that is `written`
    is not brought by a mount of a host's folder at its own place that is read-only."""
    if path is None or recipe.container is None:
        return ""
    for mount in recipe.container.mounts:
        source, place, *flags = mount.split(":")
        unfit = written and source == place and "ro" in re.split(r"[+,:]", ":".join(flags))
        if PurePath(path).is_relative_to(place) and not unfit:
            return ""
    return path


def _folder(path: str | None) -> str | None:
    """The folder a path lies in, or the path itself where that is the root."""
    if path is None:
        return None
    return path if PurePath(path).parent == PurePath("/") else str(PurePath(path).parent)


Option = str | int | float | bool

DIRECTIVE_REASONS = {
    "job-name": Reason(("name",)),
    "nodes": Reason(("nodes", "spare_nodes")),
    "ntasks-per-node": Reason(why="one node.pyz for each node, which starts a trainer for each device"),
    "cpus-per-task": Reason(("cluster.cpus_per_node",), "all cores of the node"),
    "gres": Reason(("cluster.devices_per_node", "cluster.gpu_request")),
    "gpus-per-node": Reason(("cluster.devices_per_node", "cluster.gpu_request")),
    "gpus-per-task": Reason(("cluster.devices_per_node", "cluster.gpu_request")),
    "switches": Reason(("cluster.nodes_per_switch", "placement"), "nodes under few switches"),
    "segment": Reason(("cluster.nodes_per_block", "placement"), "whole parts of a block"),
    "signal": Reason(("restart", "training.save_interval"), "told to save so long before its time limit"),
    "requeue": Reason(("restart",)),
    "no-requeue": Reason(("restart",)),
    "output": Reason(why="the way to the job's real log, which is in logs/"),
    "open-mode": Reason(why="a job that comes back goes on in the same file"),
    "exclude": Reason(("slurm.exclude", "cluster.exclude")),
}


def sbatch_options(recipe: Recipe, warning_seconds: int | None, group_of_nodes: int = 1) -> dict[str, Option]:
    """What the job itself needs, then what recipe and cluster profile ask for, by name; theirs win. False = left out.

    `warning_seconds` before its time limit the job is told; None where it does not come back. Blocks of the network are
    asked for in parts that hold whole groups of so many nodes. Raises UserError for what none of them may say.
    """
    for option in recipe.slurm:
        problem = refused_sbatch_option(option)
        if problem is not None:
            raise UserError(f"slurm.{option}: {problem}")
    wrong = sbatch_value_problem(recipe.slurm)
    if wrong is not None:
        raise UserError(f"slurm.{': '.join(wrong)}")
    options: dict[str, Option] = {
        "job-name": recipe.name,
        "nodes": recipe.nodes + recipe.spare_nodes,
        "ntasks-per-node": 1,
        **_cpu_request(recipe),
        **_gpu_request(recipe),
        **_near_each_other(recipe, group_of_nodes),
        **_coming_back(recipe, warning_seconds),
        # Relative to where sbatch is called, and in no folder: sbatch makes none, and a job whose output cannot be
        # opened dies without a word. The job's real log is in logs/.
        "output": "slurm-%j.out",
        "open-mode": "append",
    }
    options.update({name: value for name, value in sorted(recipe.slurm.items()) if name != "gres"})
    options.setdefault("gres", recipe.slurm.get("gres", False))  # ours, if any, holds the recipe's already
    options["exclude"] = _excluded(recipe)
    return options


def _excluded(recipe: Recipe) -> Option:
    """The nodes of the cluster profile and those of the recipe; none where the recipe says `exclude: false`."""
    requested = recipe.slurm.get("exclude", "")
    names = [] if requested is False else [*recipe.cluster.site.exclude, *([str(requested)] if requested else [])]
    return ",".join(names) or False


def _cpu_request(recipe: Recipe) -> dict[str, Option]:
    """All cores of the node, where the profile knows them and the recipe does not ask by another measure."""
    cpus, requested = recipe.cluster.cpus_per_node, recipe.slurm
    # sbatch refuses both (src/common/slurm_opt.c, _validate_cpus_per_gres)
    by_gpu = bool(requested.get("cpus-per-gpu")) or "cpu" in str(requested.get("tres-per-task"))
    return {"cpus-per-task": cpus} if cpus and not by_gpu else {}


def _gpu_request(recipe: Recipe) -> dict[str, Option]:
    """The devices of a node, in the form the cluster profile names; nothing where the recipe asks for them itself."""
    cluster, requested = recipe.cluster, recipe.slurm
    total = str(requested.get("gpus") or "")
    if total and not any(requested.get(option) for option in ("gres", *GPU_OPTIONS[1:])) and "," not in total:
        # SLURM may deal a total out as 1 and 3 (seen with 22.05)
        of_type, colon, _ = total.rpartition(":")
        return {"gpus-per-node": f"{of_type}{colon}{cluster.devices_per_node}"}
    gres = str(requested.get("gres") or "")
    by_name = any(option in requested for option in GPU_OPTIONS) or "gpu" in f"{gres} {requested.get('tres-per-task')}"
    if cluster.accelerator.kind == "cpu" or by_name:
        return {}
    kind, count = cluster.site.gpu_type, cluster.devices_per_node
    if cluster.gpu_request == "gres":
        ours = ":".join(filter(None, ["gpu", kind, str(count)]))
        return {"gres": ",".join(filter(None, [ours, gres]))}
    if cluster.gpu_request in ("gpus-per-node", "gpus-per-task"):  # one task per node: the same number
        return {cluster.gpu_request: f"{kind}:{count}" if kind else count}
    if cluster.gpu_request == "none":
        return {}
    raise UserError(
        f"cluster {cluster.name}: gpu_request is {cluster.gpu_request!r}; "
        "one of gpus-per-node, gres, gpus-per-task, none"
    )


def _near_each_other(recipe: Recipe, group_of_nodes: int) -> dict[str, Option]:
    """Nodes under few switches, or in whole parts of blocks, where the cluster profile says that SLURM knows them. Both
    wishes cost waiting only: a job that cannot have so few switches starts after the site's max_switch_wait."""
    cluster, nodes = recipe.cluster, recipe.nodes
    if recipe.placement != "auto" or nodes == 1:
        return {}
    wishes: dict[str, Option] = {}
    if cluster.nodes_per_switch:
        wishes["switches"] = -(-nodes // cluster.nodes_per_switch)
    if cluster.nodes_per_block:
        # more nodes than a segment must be whole segments (sbatch, SLURM 24.05 on)
        size = segment_nodes(nodes, cluster.nodes_per_block, group_of_nodes)
        if size > 1:
            wishes["segment"] = size
    return wishes


def _coming_back(recipe: Recipe, warning: int | None) -> dict[str, Option]:
    """Told in time, and put back into the queue. Where the job does not come back, the site's own habit holds."""
    if warning is None:
        return {}
    # to the batch script alone: it knows then that time is short, and tells the nodes
    options: dict[str, Option] = {} if "signal" in recipe.slurm else {"signal": f"B:USR1@{warning}"}
    if "requeue" in recipe.slurm or "no-requeue" in recipe.slurm:
        return options
    return options | {"requeue" if restart_by(recipe) == "requeue" else "no-requeue": True}
