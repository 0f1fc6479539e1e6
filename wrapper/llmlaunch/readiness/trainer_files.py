"""What runs the training: the user's script, the framework's checkout, the container or the interpreter, and the source
tree that is recorded."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from llmlaunch.findings import (
    Finding,
    doubtful,
    file_problem,
    first_bytes,
    host_path,
    missing,
    note,
    path_state,
    unseen,
)
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.launchers.run_environment import INTERPRETER_VARIABLE
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.user_data import with_home


def trainer_findings(recipe: Recipe, _: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the trainer and the place where it runs."""
    if recipe.backend.script is not None:
        yield from _script(recipe, recipe.backend.script)
    yield from framework_of(recipe).trainer_findings(recipe, environment)
    if recipe.code.path is not None and path_state(Path(recipe.code.path)) == "absent":
        yield doubtful(
            ("code", "path"), f"{recipe.code.path} is not there, so the code's commit is not recorded; name the tree"
        )
    if recipe.container is not None:
        from llmlaunch.readiness.container import container_findings

        yield from container_findings(recipe, recipe.container)
    else:
        yield from interpreter_findings(recipe, environment)


def _script(recipe: Recipe, script: str) -> Iterator[Finding]:
    key, place = ("backend", "script"), host_path(recipe, script)
    state = path_state(place)
    if state == "absent":
        yield missing(key, f"{script} is not there; name the script that trains")
    elif state == "unseen":
        yield unseen(key, script)
    elif (problem := file_problem(place)) is not None:
        yield missing(key, f"{script} {problem}; name the script that trains")


KEY = ("python",)


PACKAGE_FOLDERS = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")


USER_FOLDERS = ".local/lib/python3*/site-packages"


MOST_PTH_FILES, MOST_PTH_BYTES = 100, 64 * 2**10


def interpreter_findings(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is wrong with the interpreter that the recipe names, or what is unknown if it names none."""
    if recipe.python is None:
        yield from _unnamed(recipe, environment)
        return
    python = with_home(recipe.python)
    state = path_state(python)
    if not python.is_absolute():
        return  # a name that PATH has on the nodes
    if state == "unseen":
        yield unseen(KEY, python)
    elif state == "absent":
        yield missing(KEY, f"{python} does not exist; name the interpreter of the training environment")
    elif not python.is_file() or not os.access(python, os.X_OK):
        yield missing(KEY, f"{python} cannot be run; name the interpreter itself, such as .../bin/python")
    else:
        yield from _packages(recipe, python, environment)


def local_interpreter_findings(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield an error for a run on this machine if the recipe names no interpreter and none here has torch."""
    if recipe.python is not None or recipe.container is not None or _prepared(recipe, environment):
        return
    candidates = [] if INTERPRETER_VARIABLE in environment else [Path(sys.executable)]
    candidates += _candidates(environment)
    if importlib.util.find_spec("torch") is None and all(_lacking(python, ("torch",)) for python in candidates):
        tried = " and ".join(dict.fromkeys(map(str, candidates)))
        yield missing(
            KEY,
            f"is not written, and no Python here has torch ({tried}); name one that has it, by this key or by "
            f"{INTERPRETER_VARIABLE}",
        )


def _unnamed(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a note if the recipe names no interpreter and none here has torch. The job uses the first Python on PATH
    that has torch (node/node_environment.py), and SLURM passes PATH on."""
    candidates = _candidates(environment)
    if _prepared(recipe, environment) or not candidates:
        return
    if all(_lacking(python, ("torch",)) for python in candidates):
        yield note(
            KEY,
            f"is not written, and here {' and '.join(map(str, candidates))} {'have' if len(candidates) > 1 else 'has'} "
            "no torch: unless Python on the nodes has it, the job fails at startup; name the training environment's "
            "interpreter",
        )


def _candidates(environment: Mapping[str, str]) -> list[Path]:
    """Return the interpreters that the job would try on this machine if the recipe names none."""
    names = [environment[INTERPRETER_VARIABLE]] if environment.get(INTERPRETER_VARIABLE) else ["python3", "python"]
    paths = [shutil.which(name, path=environment.get("PATH", "")) for name in names]
    return [Path(path) for path in dict.fromkeys(paths) if path is not None]


def _prepared(recipe: Recipe, environment: Mapping[str, str]) -> bool:
    """Return whether setup lines or a variable may give Python more packages."""
    site = recipe.cluster.site
    variables = {**environment, **recipe.cluster.environment, **recipe.environment}
    return bool(recipe.setup or site.setup or site.modules or variables.get("PYTHONPATH"))


def _packages(recipe: Recipe, python: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield which packages the interpreter's folders lack, and a framework version that differs from the stated one."""
    required = framework_of(recipe).required_packages
    lacking = _lacking(python, ("torch", *required))
    if lacking:
        absent = f"{python} has no {' and no '.join(lacking)}"
        if _prepared(recipe, environment):
            yield doubtful(KEY, f"{absent}, unless setup lines or PYTHONPATH add it; install it, or name another")
        else:
            yield missing(KEY, f"{absent}; install what is missing, or name the training environment's interpreter")
    stated, package = recipe.backend.version, recipe.backend.traits.package
    if package not in required or stated is None:
        return
    folders = _package_folders(python) or ()
    distributions = [path for folder in folders for path in folder.glob(f"{package}-*.dist-info")]
    if distributions:
        version = distributions[0].name.removeprefix(f"{package}-").removesuffix(".dist-info")
        if not f"{version}.".startswith(f"{stated}."):
            yield doubtful(
                ("backend", "version"),
                f"is {stated}, but {python} has {recipe.backend.framework} {version}; write the one that runs",
            )


def _lacking(python: Path, needed: Sequence[str]) -> tuple[str, ...]:
    """Return which of these packages an interpreter lacks; none if its folders do not show it."""
    folders = _package_folders(python)
    if folders is None:
        return ()
    return tuple(name for name in needed if not any((folder / name).is_dir() for folder in folders))


def _package_folders(python: Path) -> list[Path] | None:
    """Return the folders from which an interpreter imports packages. Return None if they are unknown, as for a shim
    that starts another interpreter, or an environment that also uses another one's packages."""
    root = _prefix(python)
    settings = (first_bytes(root / "pyvenv.cfg", 4096) or b"").decode("utf-8", "replace")
    shim = not settings and (first_bytes(python, 2) or b"#!") == b"#!"  # such as pyenv's
    if shim or re.search(r"(?m)^include-system-site-packages\s*=\s*true", settings):
        return None
    folders = [folder for pattern in PACKAGE_FOLDERS for folder in sorted(root.glob(pattern))]
    if not folders:
        return None
    if not settings:  # outside a virtual environment, the user's packages count, and on Debian those in /usr/local
        folders += sorted(with_home("~").glob(USER_FOLDERS))
        folders += sorted(root.glob("lib/python3/dist-packages"))
    return [*folders, *(named for folder in folders for named in _folders_of_pth(folder))]


def _prefix(python: Path) -> Path:
    """Return the prefix of an interpreter: that of a virtual environment according to the path as written, or else that
    of the real file."""
    written = python.parent.parent
    return written if (written / "pyvenv.cfg").is_file() else python.resolve().parent.parent


def _folders_of_pth(folder: Path) -> Iterator[Path]:
    for file in islice(sorted(folder.glob("*.pth")), MOST_PTH_FILES):
        for line in (first_bytes(file, MOST_PTH_BYTES) or b"").decode("utf-8", "replace").splitlines():
            if line.strip() and not line.startswith(("#", "import ", "import\t")):
                yield folder / line.strip()
