"""What llmlaunch answers to one case. The only module of the corpus that imports llmlaunch, and only what lasts: the
planning session behind every command, and the command line itself.

Nothing of the machine enters an answer: the case runs in a folder of its own, with its home there and an environment
without variables of a person; paths of the folder, the checkout and the interpreter are replaced by names.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import llmlaunch
from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable, Reason, Word
from llmlaunch.frameworks.base import Rendered
from llmlaunch.timing.arithmetic import token_flops

Case = Mapping[str, Any]
Answer = dict[str, Any]

CODE_OF_OURS = re.compile(r"node\.pyz|(hook|trainer)/\w+\.py")
"""Files of a run directory that are code of llmlaunch and follow from no recipe: of them only the names are kept."""
NOT_KEPT = ("code.json", "recipe.yaml", "plan.json")
"""code.json names llmlaunch's version and the checkouts of the machine; recipe.yaml is the case's own text; plan.json
is the answer's `plan`."""
KEPT_VARIABLES = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE")

OF_THE_FOLDER = re.compile(r"/tmp/corpus-\w{0,8}")
DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
OF_THE_DISK = re.compile(r"^.* GiB are free on .*\n", re.MULTILINE)


def gallery() -> dict[str, str]:
    """Return the text of each recipe of the gallery by its name."""
    return {path.stem: path.read_text() for path in sorted(asset("recipes", "llama3-8b.yaml").parent.glob("*.yaml"))}


def answer_of(case: Case) -> Answer:
    """Return what llmlaunch answers to a case: to a recipe its plan and files, to a script also what was read of it."""
    with _alone(case.get("files", {})) as folder:
        answer = _of_script(case, folder) if "script" in case else _of_recipe(case["recipe"], case.get("overrides", ()))
        text = OF_THE_FOLDER.sub("<folder>", json.dumps(answer, ensure_ascii=False))
        if str(folder) in answer.get("recipe", ""):
            text = DIGEST.sub("<digest of a text that names the folder>", text)
    for place, name in _names():
        text = text.replace(place, name)
    return dict(json.loads(text))


def _names() -> Iterator[tuple[str, str]]:
    """Yield the places of this machine, the innermost first, and what an answer says in their stead."""
    yield sys.executable, "<python>"
    yield str(Path(sys.executable).parent), "<bin>"
    yield str(Path(__file__).resolve().parents[3]), "<checkout>"
    yield f'"{llmlaunch.__version__}"', '"<version>"'


@contextlib.contextmanager
def _alone(files: Mapping[str, str]) -> Iterator[Path]:
    """Go into a new folder that holds `files`, with nothing of the person's in the environment."""
    before, place = dict(os.environ), Path.cwd()
    # always of the same length, whatever TMPDIR says: texts are shortened by theirs
    with tempfile.TemporaryDirectory(prefix="corpus-", dir="/tmp") as name:
        folder = Path(name)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        kept = {key: before[key] for key in KEPT_VARIABLES if key in before}
        homes = {f"XDG_{kind}_HOME": str(folder / "home" / kind.lower()) for kind in ("DATA", "CACHE", "CONFIG")}
        _set_environment({**kept, **homes, "HOME": str(folder / "home"), "USER": "somebody", "LANG": "C.UTF-8"})
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(place)
            _set_environment(before)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _of_recipe(text: str, overrides: Sequence[str]) -> Answer:
    """Return the plan of a recipe, its FLOPs and what is rendered of it; or the message that refuses it."""
    path = Path("recipe.yaml")
    path.write_text(text)
    try:
        run = llmlaunch.plan(path, tuple(overrides))
    except UserError as error:
        return {"refused": str(error), "exit_code": error.exit_code}
    recipe = run.recipe
    flops = token_flops(recipe.model, recipe.workload.sequence_length, recipe.techniques)
    answer: Answer = {
        "plan": run.to_json(),
        "messages": list(run.messages),
        "flops": {"linears": flops.linears, "others": flops.others},
        **_rendered(run),
    }
    with contextlib.suppress(UserError):
        answer["mock_data"] = run.mock_data_warning
    for name, act in (("unsafe", run.refuse_unsafe), ("unrenderable", run.refuse_unrenderable)):
        try:
            act()
        except UserError as error:
            answer[name] = str(error)
    return answer


def _rendered(run: llmlaunch.PlannedRun) -> Answer:
    """Return what the backend makes of a plan and the files of its run directory; what refuses them where they cannot
    be made."""
    try:
        rendered, files = run.rendered, run.files()
    except UserError as error:
        return {"not_rendered": str(error)}
    record = json.loads(files["run.json"])["measurement"]
    kept = {name: content for name, content in files.items() if not CODE_OF_OURS.fullmatch(name)}
    return {
        "rendered": _made_by_backend(rendered),
        "names": sorted(files),
        "record": record,
        "priced": _priced(run, record),
        "files": {name: content.decode() for name, content in kept.items() if name not in NOT_KEPT},
    }


def _priced(run: llmlaunch.PlannedRun, template: Mapping[str, Any]) -> Answer:
    """Return what a measurement record of the plan is priced at, read back as calibration and `accuracy` read it: a
    record that measured just what was predicted of the fullest rank."""
    worst, kind = run.plan.estimate.worst, run.plan.estimate.peak_kind
    identity = {"schema": 1, "id": f"corpus/a1/rank0/{kind}", "run_id": "corpus", "attempt": "a1"}
    peak = {"peak_kind": kind, "peak_bytes": worst.device_bytes, "predicted_bytes": worst.device_bytes}
    rank = {"run_state": "completed", "pipeline_rank": worst.pipeline_rank, "rank_scope": "stage"}
    Path("record.jsonl").write_text(json.dumps({**template, **identity, **peak, **rank}) + "\n")
    answer = _command("accuracy", "record.jsonl", "--json")
    with contextlib.suppress(ValueError):
        answer["stdout"] = json.loads(answer["stdout"])["records"]
    return answer


def _made_by_backend(rendered: Rendered) -> Answer:
    """Return every word with its reason. Files are apart."""
    return {
        "program": list(map(_word, rendered.program)),
        "prepare": list(map(_word, rendered.prepare)),
        "check": list(map(_word, rendered.check)),
        "python_path": list(map(_word, rendered.python_path)),
        "required_variables": list(rendered.required_variables),
        "environment": dict(rendered.environment),
        "arguments": [
            {"flag": each.flag, "values": list(map(_word, each.values)), "reason": _reason(each.reason)}
            for each in rendered.arguments
        ],
        "variables": {name: _reason(reason) for name, reason in rendered.variables.items()},
        "settings": {name: _reason(reason) for name, reason in rendered.settings.items()},
        "settings_file": rendered.settings_file,
        "progress": [
            *rendered.progress.step_patterns,
            *rendered.progress.slow_patterns,
            str(rendered.progress.promised),
        ],
        "notes": list(rendered.notes),
        "by_itself": rendered.by_itself,
    }


def _word(word: Word) -> str:
    """Return a word, or what it is on the node: `${NAME}` and what follows."""
    return f"${{{word.name}}}{word.suffix}" if isinstance(word, NodeVariable) else word


def _reason(reason: Reason) -> Answer:
    return {"keys": list(reason.keys), "why": reason.why}


def _of_script(case: Case, folder: Path) -> Answer:
    """Return what `init --from` and `check` say of a script with their exit codes, and what the recipe that was read of
    it becomes."""
    script = folder / case["script"]
    words = [str(script.relative_to(folder)), *(("--cluster", case["cluster"]) if case.get("cluster") else ())]
    settings = [word for value in case.get("settings", ()) for word in ("--set", value)]
    answer = {
        "read": _command("init", "--from", *words, *settings, "--output", "read.yaml"),
        "check": _checked(words, settings),
    }
    read = folder / "read.yaml"
    if read.is_file():
        answer["recipe"] = read.read_text()
        answer["rendered"] = _of_recipe(answer["recipe"], ())
    return answer


def _checked(words: Sequence[str], settings: Sequence[str]) -> Answer:
    """Return what `check` says of a script. Keys of the recipe are overrides there, and variables stay settings."""
    values = settings[1::2]
    keys = [value for value in values if not value.partition("=")[0].isupper() and not value[0].isdigit()]
    variables = [word for value in values if value not in keys for word in ("--set", value)]
    answer = _command("check", *words, *variables, *keys, "--json")
    with contextlib.suppress(ValueError):
        answer["stdout"] = json.loads(answer["stdout"])
    return answer


def _command(*words: str) -> Answer:
    """Return what a command prints, and its exit code."""
    from llmlaunch.cli.main import main

    stdout, stderr, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["llmlaunch", *words]
    code: object = 0
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = argv
    return {"exit_code": code, "stdout": stdout.getvalue(), "stderr": OF_THE_DISK.sub("", stderr.getvalue())}
