"""Scripts that people publish, each with the answer that is right for it (tests/data/public_scripts): what `check` says
of a script as it is typed, and the same job written by hand as a recipe.

`PYTHONPATH=tests python -m support.public_scripts` prints a line for each script, and how many are answered right.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

FOLDER = Path(__file__).parents[1] / "data" / "public_scripts"
TOLERANCE = 0.05
"""How far the memory of a script as read may be from that of the recipe written by hand."""

NO_VERDICT, CANNOT_WORK = 5, 2

# What a recipe's search may choose for itself and a script does not do unless it says so.
_AS_IT_IS: Mapping[str, Mapping[str, Any]] = {
    "megatron": {"virtual_pipeline": 1, "layers_by_stage": "even", "offload_layers": 0, "offload_modules": []},
    "deepspeed": {"tensor": 1, "pipeline": 1, "context": 1, "offload_parameters": False, "offload_checkpoints": False},
}
WITHOUT_EXPANSION = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


@dataclass(frozen=True)
class PublicScript:
    """One folder: a script with the files it needs, and `answer.yaml`.

    The answer is a `recipe`, written by hand from what the script means, or a fact that the one line of a refusal must
    contain (`refused`). `set` holds what a person has to say of variables, `launch` words of the launch problem.
    """

    name: str
    script: Path
    answer: Mapping[str, Any]

    @property
    def words(self) -> tuple[str, ...]:
        """What a person types behind `llmlaunch check`."""
        settings = [word for name, value in self.answer.get("set", {}).items() for word in ("--set", f"{name}={value}")]
        return (self.script.name, "--cluster", str(self.answer["cluster"]), *settings, "--json")


@dataclass(frozen=True)
class Reply:
    """What `llmlaunch check SCRIPT --json` says."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Mapping[str, Any]:
        """Return the answer, {} where nothing is printed."""
        return json.loads(self.stdout) if self.stdout.startswith("{") else {}

    @property
    def peak_bytes(self) -> int | None:
        """Return the memory of the worst rank, None without a figure."""
        return _peak_bytes(self.json)


@dataclass(frozen=True)
class Outcome:
    """What became of a script: `right`, or why it is not, in words; `ratio` of read to written memory."""

    right: bool
    says: str
    code: int
    ratio: float | None = None

    @property
    def misread(self) -> bool:
        """Whether a wrong figure was given and nothing said that it may be wrong."""
        return not self.right and self.ratio is not None and self.code != NO_VERDICT


@cache
def public_scripts() -> tuple[PublicScript, ...]:
    """Return all scripts, by name."""
    return tuple(_script(folder) for folder in sorted(FOLDER.iterdir()) if folder.is_dir())


def _script(folder: Path) -> PublicScript:
    answer = yaml.safe_load((folder / "answer.yaml").read_text("utf-8"))
    named = answer.get("script")
    found = [folder / named] if named else [path for path in folder.iterdir() if path.stem == "job"]
    if len(found) != 1:
        raise ValueError(f"{folder}: holds no single file job.*, and answer.yaml names no script")
    return PublicScript(folder.name, found[0], answer)


def reply_to(script: PublicScript) -> Reply:
    """Return what `llmlaunch check` says of a script, run in its folder and in this process."""
    return run_check(script.script.parent, *script.words)


def run_check(folder: Path, *words: str) -> Reply:
    """Return what `llmlaunch check` with these words says in a folder, run in this process."""
    return _run(folder, "check", *words)


def _run(folder: Path, *words: str) -> Reply:
    from llmlaunch.cli.main import main

    stdout, stderr, before, code = io.StringIO(), io.StringIO(), Path.cwd(), 0
    os.chdir(folder)
    typed = patch.object(sys, "argv", ["llmlaunch", *words])
    try:
        with typed, contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os.chdir(before)
    return Reply(code, stdout.getvalue(), stderr.getvalue())


def written_recipe(script: PublicScript) -> dict[str, Any]:
    """Return the job as its recipe, with the keys that all such recipes share."""
    written = script.answer["recipe"]
    backend = written["backend"]
    family = (backend if isinstance(backend, str) else backend["name"]).partition("-")[0]
    environment = dict(script.answer.get("environment", WITHOUT_EXPANSION)) | dict(written.get("environment", {}))
    return {
        "schema": 1,
        "name": script.name,
        "cluster": script.answer["cluster"],
        "nodes": 1,
        "data": {"mock": True},
        **written,
        "training": {"steps": 100, **written["training"]},
        "layout": {"techniques": "asked", "offload_optimizer": 0.0, **_AS_IT_IS[family], **written["layout"]},
        "environment": environment,
    }


def written_bytes(script: PublicScript, folder: Path) -> int:
    """Return the memory of the worst rank of the job as written by hand."""
    path = folder / f"{script.name}.yaml"
    path.write_text(yaml.safe_dump(written_recipe(script), sort_keys=False), "utf-8")
    reply = _run(folder, "check", path.name, "--json")
    if reply.peak_bytes is None:
        raise ValueError(f"{script.name}: its own recipe has no figure: {reply.stderr or reply.stdout}")
    return reply.peak_bytes


def _peak_bytes(answer: Mapping[str, Any]) -> int | None:
    ranks = (answer.get("memory") or {}).get("ranks", [])
    return max((int(rank["device_bytes"]) for rank in ranks), default=None)


def outcome_of(script: PublicScript, folder: Path) -> Outcome:
    """Return what became of a script, compared with its right answer. `folder` takes the recipe's file."""
    reply = reply_to(script)
    if "refused" in script.answer:
        return _refusal(script, reply)
    if reply.peak_bytes is None:
        return Outcome(False, f"no figure: {_first_line(reply)}", reply.code)
    ratio = reply.peak_bytes / written_bytes(script, folder)
    right = abs(ratio - 1) <= TOLERANCE
    launch = str(script.answer.get("launch", ""))
    problems = json.dumps(reply.json.get("launch", "")).lower()
    if launch and (reply.code != CANNOT_WORK or launch.lower() not in problems):
        return Outcome(
            False, f"does not say that the launch cannot work: {launch}", reply.code, None if right else ratio
        )
    if not launch and reply.code == CANNOT_WORK:
        return Outcome(False, f"a launch that works is refused: {_first_line(reply)}", reply.code)
    return Outcome(right, "" if right else "another figure", reply.code, ratio)


def _refusal(script: PublicScript, reply: Reply) -> Outcome:
    if reply.peak_bytes is not None and reply.json.get("verdict") != "unknown":
        return Outcome(False, "a figure for what cannot be priced", reply.code, 0.0)
    line = f"{reply.json.get('reason', '')} {_first_line(reply)}"
    facts = script.answer["refused"]
    missing = [fact for fact in ([facts] if isinstance(facts, str) else facts) if fact.lower() not in line.lower()]
    if reply.code != script.answer.get("code", NO_VERDICT):
        return Outcome(False, f"exit code: {_first_line(reply)}", reply.code)
    return Outcome(not missing, f"does not say {missing}: {_first_line(reply)}" if missing else "", reply.code)


def _first_line(reply: Reply) -> str:
    """Return the error, with what is missing where it lists that."""
    lines = reply.stderr.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("error")), 0)
    return " ".join(line.strip() for line in lines[first : first + 4])[:500]


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_DATA_HOME"] = folder
        outcomes = {script.name: outcome_of(script, Path(folder)) for script in public_scripts()}
    for name, outcome in outcomes.items():
        ratio = "-" if outcome.ratio is None else f"{outcome.ratio:.3f}"
        print(f"{name:42} {'right' if outcome.right else 'WRONG':6} {ratio:>7} {outcome.code} {outcome.says}")
    right, misread = sum(o.right for o in outcomes.values()), sum(o.misread for o in outcomes.values())
    print(f"{right} of {len(outcomes)} within 5 % or refused in one correct line; {misread} silently misread")


if __name__ == "__main__":
    main()
