"""How a node starts its ranks: `launch` of run.json, which `node.pyz node` reads, and command.txt, the training command
that a person can read, sign and edit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.documents.secrets import is_secret_variable
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import RUN_DIR, NodeVariable, Reason, Word, flag_groups
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.checkpoints import skip_flag
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rendering.shell import refuse_unwritable, shell_word, variable_name
from llmlaunch.rundir import file_names
from llmlaunch.trainers import HOOK, MEMORY_PROBE

SNAPSHOT_FOLDER = "code"
PROBE_FILE = "hook/llmlaunch_memory_probe.py"
NODE_FILES = "LLMLAUNCH_NODE_FILES"  # the folder of a node's own with a copy of our scripts (node/training_node.py)
FILES_OF_A_NODE = 512
"""Open files of a process beside its connections to other ranks: libraries, data, devices, pipes."""

TRACKING_REASONS = {
    "WANDB_PROJECT": Reason(("tracking.wandb.project",)),
    "WANDB_ENTITY": Reason(("tracking.wandb.entity",)),
    "WANDB_MODE": Reason(("tracking.wandb.mode",)),
    "TENSORBOARD_LOGGING_DIR": Reason(("tracking.tensorboard",), "for Hugging Face's Trainer"),
}

OUR_VARIABLES = {
    "PYTHONUNBUFFERED": Reason(why="a line of the log appears when it is written"),
    "CUDA_DEVICE_ORDER": Reason(why="the order NVML counts in, so that ranks and peaks match"),
    **TRACKING_REASONS,
}
_COMMAND_HEAD = """\
# The training command. Every rank runs it, after the Python of the training environment. This file is what runs: who
# edits it changes the run. One argument on a line; what follows # says why it is there.
"""
_REASON_COLUMN = 56


@contextlib.contextmanager
def naming(recipe: Recipe) -> Iterator[None]:
    """Name the recipe's file in what is refused of it."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{recipe.path}: {error}") from error


def launch_json(recipe: Recipe, rendered: Rendered, code_root: PurePath | None) -> dict[str, object]:
    """Return `launch` of run.json (docs/run-files.md). `code_root` is the source tree a snapshot was taken of, None
    without one: words and variables that name a place below it then name the copy in the run directory. Raises
    UserError for what no argument or variable can hold."""
    folders = [_in_snapshot(word, code_root) for word in rendered.python_path]
    if code_root is not None:  # the code this run was rendered with, not what lies in the source tree today
        folders.append(NodeVariable(RUN_DIR, f"/{SNAPSHOT_FOLDER}"))
    run = recipe.tracking.wandb
    with naming(recipe):
        environment = _environment(recipe, rendered, code_root)
        words = {
            "environment": environment,
            "python_path": folders,
            "check": [_in_snapshot(word, code_root) for word in rendered.check],
            "prepare": [_in_snapshot(word, code_root) for word in rendered.prepare],
            "workdir": "" if recipe.workdir is None else _in_snapshot(recipe.workdir, code_root),
        }
        refuse_unwritable(words)
        refuse_unwritable([recipe.python or "", recipe.hub_tokenizer or ""])
    return {
        **{key: _as_json(value) for key, value in words.items()},
        "required_variables": list(rendered.required_variables),
        "python": recipe.python or "",
        "in_container": recipe.container is not None,
        "threads_on_host": recipe.techniques.steps_on_the_host,
        "tokenizer": recipe.hub_tokenizer or "",
        "world_size": recipe.world_size,
        "open_files": FILES_OF_A_NODE + 2 * recipe.world_size,
        "node_files": _node_files(rendered),
        "hook_files": list(hook_files(recipe)),
        "kind": recipe.cluster.accelerator.kind,
        "tried_paths": _tried_paths(recipe),
        "by_itself": rendered.by_itself,
        "monitor": ["--interval", f"{recipe.monitor.interval_seconds:g}"],
        "wandb": None if run is None else {"name": run.name, "save_dir": run.save_dir},
        "skip_flag": skip_flag(recipe),
        "flight_recorder": records_flight(recipe),
    }


def command_text(recipe: Recipe, rendered: Rendered, code_root: PurePath | None) -> str:
    """Return command.txt (rundir/command_file.py has the form). Raises UserError as `launch_json` does."""
    reasons = [(argument.words, argument.reason) for argument in rendered.arguments]
    lines = []
    with naming(recipe):
        for group in flag_groups(rendered.program):
            why = next((_in_words(reason) for words, reason in reasons if words == tuple(group)), "")
            words = [_from_the_node(_in_snapshot(word, code_root), rendered) for word in group]
            line = shell_word(words)
            lines.append(f"{line:<{_REASON_COLUMN - 1}} # {why}" if why else line)
    return _COMMAND_HEAD + "".join(f"{line}\n" for line in lines)


def _in_words(reason: Reason) -> str:
    """Return the keys that decide an argument, and what a reader would not guess from them, on one line."""
    said = "; ".join(filter(None, [", ".join(reason.keys), reason.why]))
    return " ".join(said.split())


def _as_json(value: object) -> object:
    if isinstance(value, NodeVariable):
        return {"variable": value.name, "suffix": value.suffix}
    if isinstance(value, Mapping):
        return {name: _as_json(inner) for name, inner in sorted(value.items())}
    return [_as_json(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def records_flight(recipe: Recipe) -> bool:
    return recipe.cluster.accelerator.kind == "gpu" and recipe.watchdog is not None


def hook_files(recipe: Recipe) -> dict[str, Path]:
    """Return the source of each file of the folder that the trainers' Python imports first."""
    probed = recipe.monitor.probe and recipe.cluster.accelerator.kind == "gpu"
    hook = {"hook/sitecustomize.py": HOOK} if recipe.watchdog is not None or probed else {}
    return {**hook, **({PROBE_FILE: MEMORY_PROBE} if probed else {})}


def _node_files(rendered: Rendered) -> list[str]:
    """Return the files of the run directory that each node copies to its own disk: what every rank's Python imports.
    What trainers import first is in node.pyz, too."""
    ours = any(_from_the_node(word, rendered) != word for word in rendered.program)
    scripts = sorted(name for name in rendered.files if name.startswith("trainer/") and name.endswith(".py"))
    return [file_names.NODE_ARCHIVE, *(scripts if ours else ())]


def _from_the_node(word: Word, rendered: Rendered) -> Word:
    """Return a word of the program with a script of ours as the node's own copy."""
    if isinstance(word, NodeVariable) and word.name == RUN_DIR and word.suffix.lstrip("/") in rendered.files:
        return NodeVariable(NODE_FILES, word.suffix) if word.suffix.endswith(".py") else word
    return word


def _tried_paths(recipe: Recipe) -> dict[str, list[str]]:
    """What the preflight tries to read and to write: paths that the recipe names in full."""
    training, data = recipe.training, recipe.data
    read = (*data.datasets, if_a_path(data.tokenizer), training.start_from)
    export = None if training.export is None else str(PurePath(training.export.path).parent)
    named = {"reads": read, "writes": (training.checkpoint_path, export)}
    return {
        key: list(dict.fromkeys(path for path in paths if path and path.startswith("/")))
        for key, paths in named.items()
    }


def _environment(recipe: Recipe, rendered: Rendered, code_root: PurePath | None) -> dict[str, str | NodeVariable]:
    """What is exported to the ranks. Raises UserError for a name that looks like a secret's."""
    for name, value in recipe.environment.items():
        if is_secret_variable(variable_name(name), value) and f"environment.{name}" not in recipe.not_secrets:
            raise UserError(
                f"environment.{name}: looks like a secret, and a run directory holds none; list the name under "
                "secrets: and export it where you submit"
            )
    return {name: _in_snapshot(value, code_root) for name, value in exported(recipe, rendered).items()}


def exported(recipe: Recipe, rendered: Rendered) -> Mapping[str, str]:
    """The variables of the trainers: ours, the backend's, the site's, the recipe's; the later wins."""
    ours = {"PYTHONUNBUFFERED": "1"}
    if recipe.cluster.accelerator.kind == "gpu":
        ours["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return {
        **ours,
        **tracking_environment(recipe),
        **rendered.environment,
        **recipe.cluster.environment,
        **recipe.environment,
    }


def _in_snapshot(word: str | NodeVariable, code_root: PurePath | None) -> str | NodeVariable:
    """The same place in the run directory's copy of the code, for a word that names one below `code_root`."""
    if code_root is None or isinstance(word, NodeVariable) or not word.startswith(str(code_root)):
        return word
    rest = word[len(str(code_root)) :]
    if rest and not rest.startswith("/"):
        return word
    return NodeVariable("LLMLAUNCH_RUN_DIR", f"/{SNAPSHOT_FOLDER}{rest}")


def if_a_path(name: str | None) -> str | None:
    """A tokenizer may be named by its path, or otherwise."""
    return name if name is not None and name.startswith("/") else None


CONFIG_FILE = "wandb-config.json"  # beside the layout's run.json; a node copies it to where wandb.init looks


def tracking_environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables of a tracked run that are known before it starts; each node adds its id, name and folder."""
    run, folder = recipe.tracking.wandb, recipe.tensorboard
    variables = {} if run is None else {"WANDB_PROJECT": run.project, "WANDB_MODE": run.mode}
    if run is not None and run.entity is not None:
        variables["WANDB_ENTITY"] = run.entity
    trainer = recipe.backend.script is not None and recipe.backend.script_kind == "hugging-face"
    return variables | ({"TENSORBOARD_LOGGING_DIR": folder} if folder is not None and trainer else {})


def wandb_config(recipe: Recipe, plan: Plan) -> bytes:
    """Return the prediction in the form of config-defaults.yaml, which wandb.init reads in the working directory,
    whoever calls it (wandb/sdk/wandb_config.py _load_defaults, 0.31; the files of WANDB_CONFIG_PATHS end 0.31 with an
    error)."""
    ranks = plan.estimate.ranks
    kinds = {plan.estimate.peak_kind: "device_bytes", "reserved": "reserved_bytes", "allocated": "allocated_bytes"}
    predicted: dict[str, Any] = {
        kind: {f"stage{rank.pipeline_rank}": getattr(rank, name) for rank in ranks} for kind, name in kinds.items()
    }
    host = plan.estimate.host_bytes_per_node
    planned = {
        "recipe": recipe.name,
        "recipe_digest": recipe.digest,
        "verdict": plan.verdict,
        "nodes": recipe.nodes,
        "layout": plan.layout.as_json(),
        "techniques": plan.chosen.techniques.as_json(),
        "predicted_bytes": predicted | ({} if host is None else {"host": host}),
        "limit_bytes": plan.limit.limit_bytes,
        "predicted_step_seconds": plan.chosen.step_seconds,
        "predicted_tokens_per_second_per_gpu": plan.chosen.tokens_per_second_per_gpu,
    }
    from llmlaunch.documents.writing import json_bytes

    return json_bytes({"wandb_version": 1, "llmlaunch": {"value": planned}})
