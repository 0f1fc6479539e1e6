"""Text of a recipe stays text: hostile values in every text field, rendered, submitted and run on a real cluster.

The fields are found in the recipe's JSON Schema, so that none is forgotten when one is added. Each must either be
refused in a sentence that names it, or arrive as it was; and nowhere may a command in it have run. A text that must
stand alone in a recipe is rendered with each attack; `make soak` also submits it.
"""

from __future__ import annotations

import copy
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from one_machine import wait_until
from person import LIVED_ON, SOAK, Person

from llmlaunch.cli.main import cli
from llmlaunch.errors import UserError
from support.recipe_keys import schema
from support.side_by_side import Story, asked_for, cases

pytestmark = pytest.mark.slurm

Place = tuple[str | int, ...]
ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())

# Where anyone may leave a file. None is there at the end of any test: each text runs a command that makes it, wherever
# the text is taken for code.
CANARY = Path(tempfile.gettempdir()) / f"llmlaunch-canary-{secrets.token_hex(8)}"
RUN = f"touch {CANARY}"
ATTACKS = {
    "quotes": f"x' \"; {RUN}; \\\" $({RUN}) `{RUN}` && {RUN} #'",
    "lines": f"x\n#SBATCH --comment=taken\n{RUN}\n",
    "no-quotes": f"x $({RUN}) `{RUN}` ; {RUN} & {RUN} | {RUN} #{{{{ 7 * 7 }}}} {{% raw %}} ~ * !!",
}

# What has another meaning by its nature: lines of shell, which are the recipe's own code.
CODE: set[Place] = {("setup", 0), ("cluster", "setup", 0)}

EVALUATED = {**QUICKSTART["training"], "evaluation": {"interval": 10, "iterations": 2}}
MEGATRON = {"backend": {"name": "megatron-lm"}, "cluster": {"base": "h100-80gb-x8"}, "data": {"mock": True}}

# What a field stands in where it means anything; the rest is as in the quickstart.
AROUND: dict[Place, dict[str, Any]] = {
    ("backend", "path"): MEGATRON,
    ("data", "blend", 0, "path"): {**MEGATRON, "data": {"blend": [{"weight": 1}]}},
    ("data", "cache_path"): {**MEGATRON, "data": {"path": "/data"}},
    ("data", "validation"): {**MEGATRON, "data": {"path": "/data"}, "training": EVALUATED},
    ("data", "validation", 0, "path"): {
        **MEGATRON,
        "data": {"path": "/data", "validation": [{"weight": 1}]},
        "training": EVALUATED,
    },
    ("data", "path"): {"data": {}},
    ("data", "tokenizer"): {"data": {"path": "/data"}},
    ("training", "checkpoint_path"): {"training": {**QUICKSTART["training"], "save_interval": 10}, "restart": "none"},
    ("container", "mounts", 0): {"container": {"image": "image"}},
    **{
        ("tracking", "wandb", key): {"tracking": {"wandb": {"project": "ours", "mode": "offline"}}}
        for key in ("entity", "name", "save_dir")
    },
}

# The name a mapping of any names is tried under.
NAMES: dict[Place, str] = {
    ("slurm",): "comment",
    ("cluster", "slurm"): "wckey",
    ("slurm_plugins",): "no-such-plugin",
    ("cluster", "slurm_plugins"): "no-such-plugin",
    ("cluster", "srun"): "comment",
    ("environment",): "HOSTILE",
    ("cluster", "environment"): "HOSTILE_SITE",
}

# Trains nothing: leaves what has reached it.
TELLS = """\
import json, os, sys
names = ("HOSTILE", "HOSTILE_SITE")
told = {"argv": sys.argv[1:], "environment": {name: os.environ.get(name) for name in names}}
with open("arrived.json", "w") as file:
    json.dump(told, file)
"""


def fields(node: dict[str, Any], place: Place = (), seen: tuple[str, ...] = ()) -> Iterator[Place]:
    """Every place of a recipe that takes free text; `<key>` stands for a name that is free."""
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        if name not in seen:
            yield from fields(schema()["$defs"][name], place, (*seen, name))
        return
    for branch in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from fields(branch, place, seen)
    if "string" in node.get("type", ()) and not {"enum", "const"} & {*node}:
        yield place
    for key, field in node.get("properties", {}).items():
        yield from fields(field, (*place, key), seen)
    if "items" in node:
        yield from fields(node["items"], (*place, 0), seen)
    if isinstance(node.get("additionalProperties"), dict):
        yield (*place, "<key>")
        yield from fields(node["additionalProperties"], (*place, NAMES[place]), seen)


PLACES = [place for place in dict.fromkeys(fields(schema())) if place not in CODE]

HARMLESS: dict[str, Any] = {
    **QUICKSTART,
    "name": "hostile",
    "backend": {"name": "deepspeed", "script": "trainer.py"},
    "cluster": {"base": "cpu-x1"},
}

# With these no training starts here, or no other field would be left: each is submitted on its own, by root.
ON_ITS_OWN: set[Place] = {
    ("python",), ("container", "image"), ("container", "mounts", 0), ("backend", "path"), ("data", "tokenizer"),
    ("data", "blend", 0, "path"), ("data", "cache_path"), ("slurm_plugins", "no-such-plugin"),
    ("data", "validation"), ("data", "validation", 0, "path"),
    ("cluster", "slurm_plugins", "no-such-plugin"),
    # folders, where the hostile script is a file of the same name
    ("training", "start_from"), ("training", "checkpoint_path"), ("tracking", "wandb", "save_dir"),
    ("tracking", "tensorboard"), ("workdir",),
}  # fmt: skip


def with_text(recipe: dict[str, Any], place: Place, text: str) -> dict[str, Any]:
    """A copy in which the field holds `text`."""
    recipe = copy.deepcopy({**recipe, **AROUND.get(place, {})})
    folder: Any = recipe
    for key, inside in pairwise(place):
        empty: Any = [] if inside == 0 else {}
        folder = folder[0] if key == 0 else folder.setdefault(key, empty)
    if place[-1] == 0:
        folder.append(f"/{text}:/here" if "mounts" in place else text)
    else:
        folder[text if place[-1] == "<key>" else place[-1]] = "value" if place[-1] == "<key>" else text
    return recipe


def refusal(recipe: dict[str, Any], folder: Path) -> str:
    """Empty where `folder`/run was rendered, else the sentence that refuses it."""
    folder.mkdir()
    file = written(recipe, folder)
    done = CliRunner().invoke(cli, ["render", str(file), "-o", str(folder / "run")], standalone_mode=False)
    if done.exception is None:
        return ""
    assert isinstance(done.exception, UserError), (recipe, done.exc_info)
    return str(done.exception)


def written(recipe: dict[str, Any], folder: Path) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, allow_unicode=True, width=10_000))
    return file


@cache
def refusals(attack: str) -> dict[Place, str]:
    """What each field says to it; empty where the recipe is rendered."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        return {place: refusal(alone(place, attack), folder / str(at)) for at, place in enumerate(PLACES)}
    finally:
        shutil.rmtree(folder)


def alone(place: Place, attack: str) -> dict[str, Any]:
    return with_text(HARMLESS, place, ATTACKS[attack])


@pytest.fixture(scope="module", autouse=True)
def refused(request: pytest.FixtureRequest) -> None:
    """What is refused is known before stories begin: click's runner is for one thread alone."""
    for parameters in asked_for(request, "attack").values():
        refusals(parameters["attack"])


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_field_accepts_the_text_or_its_refusal_names_the_field(attack: str) -> None:
    for place, said in refusals(attack).items():
        named = takewhile(lambda part: isinstance(part, str) and part != "<key>", place)
        assert not said or f"{'.'.join(map(str, named))}" in said, (place, said)
        assert "\n" not in said, (place, said)
    assert {("name",), ("cluster", "name")} < {place for place, said in refusals(attack).items() if said}
    assert not CANARY.exists(), "a value was run as a command"


def submitted(person: Person, recipe: dict[str, Any], folder: Path) -> str:
    """The job's number; empty where SLURM refused it, or the hostile text names data that is not there."""
    script = folder / str(recipe["backend"].get("script", "none"))
    person.ask("mkdir", "-p", str(script.parent))
    script.write_text(TELLS)
    file = written({"python": person.python, **recipe}, folder)
    done = person.llmlaunch("submit", str(file), "-o", str(folder / "run"))
    assert done.returncode in (0, 4) or "not there; name " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads((folder / "run" / "submission.json").read_text())["job_id"] if done.returncode == 0 else ""


def no_recipe_text_runs_as_code_and_accepted_text_arrives_unchanged(attack: str, person: Person) -> None:
    text = ATTACKS[attack]
    taken = [place for place, said in refusals(attack).items() if not said]
    together = HARMLESS
    for at, place in enumerate(taken):
        if place in ON_ITS_OWN and SOAK and person.is_root:
            submitted(person, alone(place, attack), person.folder(f"{attack}-{at}"))
        elif place not in ON_ITS_OWN:
            together = with_text(together, place, text)
    folder = person.folder(f"{attack}-together")
    job = submitted(person, together, folder)
    shown = person.ask("scontrol", "show", "job", job)
    wait_until(lambda: not person.ask("squeue", "-h"), "every job has ended")
    logs = "\n".join(path.read_text() for path in folder.glob("run/logs/*"))
    assert (folder / "run" / "arrived.json").exists(), logs
    arrived = json.loads((folder / "run" / "arrived.json").read_text())
    taken_by = {place[:2] for place in taken}
    arguments = [place for place in (("backend", "script_args"), ("backend", "extra_args")) if place in taken_by]
    assert arrived["argv"].count(text) == len(arguments)
    for place, name in ((("environment", "HOSTILE"), "HOSTILE"), (("cluster", "environment"), "HOSTILE_SITE")):
        assert arrived["environment"][name] == (text if place in taken_by else None)
    assert (text in shown) == (("slurm", "comment") in taken_by)
    assert not CANARY.exists(), "a value was run as a command"


STORIES = cases(
    no_recipe_text_runs_as_code_and_accepted_text_arrives_unchanged, **{attack: (attack,) for attack in ATTACKS}
)


@pytest.mark.parametrize("site", LIVED_ON)
@pytest.mark.parametrize(("attack", "story"), [*zip(ATTACKS, STORIES.values(), strict=True)], ids=ATTACKS)
def test_on_a_cluster(
    stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, site: str, attack: str, story: Story
) -> None:
    stories[request.node.nodeid].result()
