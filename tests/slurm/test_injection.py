"""Text of a recipe stays text: hostile values in every text field, rendered, submitted and run on a real cluster.

The fields are found in the recipe's JSON Schema, so that none is forgotten when one is added. Each must either be
refused in a sentence that names it, or arrive as it was; and nowhere may a command in it have run. All that are taken
are submitted in one recipe, each with the worst text that it takes. A text that must stand alone in a recipe is
rendered; `make soak` also submits it.
"""

from __future__ import annotations

import copy
import json
import secrets
import tempfile
from collections.abc import Iterator
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
from support.side_by_side import side_by_side

pytestmark = pytest.mark.slurm

Place = tuple[str | int, ...]
ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())

# Where anyone may leave a file. None is there at the end of any test: each text runs a command that makes it, wherever
# the text is taken for code.
CANARY = Path(tempfile.gettempdir()) / f"llmlaunch-canary-{secrets.token_hex(8)}"
RUN = f"touch {CANARY}"
NO_QUOTES = f"x $({RUN}) `{RUN}` ; {RUN} & {RUN} | {RUN} #{{{{ 7 * 7 }}}} {{% raw %}} ~ * !!"
# The worst first; a field that takes it is not asked for the next.
ATTACKS = {"quotes": f"x' \"; {RUN}; \\\" {NO_QUOTES} && {RUN} #'", "no-quotes": NO_QUOTES}
LINES = f"x\n#SBATCH --comment=taken\n{RUN}\n"

# What has another meaning by its nature: lines of shell, which are the recipe's own code.
CODE: set[Place] = {("setup", 0), ("cluster", "setup", 0)}

EVALUATED = {**QUICKSTART["training"], "evaluation": {"interval": 10, "iterations": 2}}
MEGATRON = {
    "backend": {"name": "megatron-lm"},
    "cluster": {"base": "h100-80gb-x8"},
    "data": {"mock": True},
    "layout": "auto",
}

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
    "layout": {"zero_stage": 0, "micro_batch_size": 8},  # nothing is searched
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
def refusals() -> dict[str, dict[Place, str]]:
    """What each field says to each attack that it is asked for; empty where the recipe is rendered."""
    said: dict[str, dict[Place, str]] = {}
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        for attack in ATTACKS:
            asked = [place for place in PLACES if all(before[place] for before in said.values() if place in before)]
            said[attack] = {
                place: refusal(with_text(HARMLESS, place, ATTACKS[attack]), Path(folder, f"{attack}-{at}"))
                for at, place in enumerate(asked)
            }
    return said


def taken() -> dict[Place, str]:
    """The attack that each field takes."""
    return {place: attack for attack, of_places in refusals().items() for place, said in of_places.items() if not said}


@pytest.fixture(scope="module", autouse=True)
def refused() -> None:
    """What is refused is known before stories begin: click's runner is for one thread alone."""
    refusals()


def assert_names(place: Place, said: str) -> None:
    named = ".".join(str(part) for part in takewhile(lambda part: isinstance(part, str) and part != "<key>", place))
    # what has a path may be written as the path alone, and a section may name its key
    assert named.removesuffix(".path") in said.replace(": ", "."), (place, said)
    assert "\n" not in said, (place, said)


def test_every_field_accepts_the_text_or_its_refusal_names_the_field() -> None:
    for of_places in refusals().values():
        for place, said in of_places.items():
            if said:
                assert_names(place, said)
    assert not {("name",), ("cluster", "name")} & {*taken()}
    assert not CANARY.exists(), "a value was run as a command"


def test_no_field_takes_more_than_a_line(tmp_path: Path) -> None:
    for number, place in enumerate(PLACES):
        assert_names(place, refusal(with_text(HARMLESS, place, LINES), tmp_path / str(number)))


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


def no_recipe_text_runs_as_code_and_accepted_text_arrives_unchanged(person: Person) -> None:
    together = HARMLESS
    for at, (place, attack) in enumerate(taken().items()):
        if place not in ON_ITS_OWN:
            together = with_text(together, place, ATTACKS[attack])
        elif SOAK and person.is_root:
            submitted(person, with_text(HARMLESS, place, ATTACKS[attack]), person.folder(str(at)))
    folder = person.folder("together")
    job = submitted(person, together, folder)
    shown = person.ask("scontrol", "show", "job", job)
    wait_until(lambda: not person.ask("squeue", "-h"), "every job has ended")
    logs = "\n".join(path.read_text() for path in folder.glob("run/logs/*"))
    assert (folder / "run" / "arrived.json").exists(), logs
    arrived = json.loads((folder / "run" / "arrived.json").read_text())
    texts = {place[:2]: ATTACKS[attack] for place, attack in taken().items()}
    words = [texts[place] for place in (("backend", "script_args"), ("backend", "extra_args")) if place in texts]
    assert [word for word in arrived["argv"] if word in ATTACKS.values()] == words
    for place, name in ((("environment", "HOSTILE"), "HOSTILE"), (("cluster", "environment"), "HOSTILE_SITE")):
        assert arrived["environment"][name] == texts.get(place)
    assert (texts.get(("slurm", "comment"), CANARY.name) in shown) == (("slurm", "comment") in texts)
    assert not CANARY.exists(), "a value was run as a command"


test_on_a_cluster = side_by_side(
    no_recipe_text_runs_as_code_and_accepted_text_arrives_unchanged,
    sites=LIVED_ON,
)
