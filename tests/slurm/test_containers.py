"""Jobs in containers on real nodes. Apptainer is a stand-in that notes its words and runs the command: what is tested
is that the right command reaches every node (tests/releases has the real one). pyxis is no Debian package: what stands
in for it, in pyxis/, makes containers as pyxis 0.24.0 and enroot 4.1.2 were seen to make them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from person import TRIED, Person, interpreter
from training import QUICKSTART, Training, backend, submit

from support.side_by_side import side_by_side

pytestmark = pytest.mark.slurm

APPTAINER = """\
#!/bin/bash
printf '%s\\n' "$SLURM_JOB_ID" "$@" >"{seen}/$SLURM_NODEID"
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
"""
IMAGE = "#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0"  # as much of one as is looked at before a submit
PROFILE = """\
base: cpu-x1
slurm: {{partition: train}}
srun: {{cpu-bind: none, quit-on-interrupt: true}}
mpi: none
setup:
  - module() {{ [[ $1 = load && $2 = apptainer/1.3 ]] && PATH="{programs}:$PATH"; }}
  - export SITE_SAYS='two words'
modules: [apptainer/1.3]
container: {{runtime: apptainer, mounts: ["{data}:/data:ro"]}}
"""
TRAINS = "print('trains', flush=True)\n"
TRAINER = "import os\nassert os.environ['SITE_SAYS'] == 'two words'\nprint('trains in', os.getcwd(), flush=True)\n"

PYXIS = Path(__file__).with_name("pyxis")
REGISTRY_IMAGE = "nvcr.io#nvidia/box:1"
IN_THE_BOX = "PATH=/usr/local/bin:/usr/bin:/bin\nLANG=C.UTF-8\nPYTORCH_VERSION=2.9\n"
# A trainer that says what it sees of its container, one fact a line; then it makes two steps, saves, and fails, once.
LOOKS_AROUND = """\
import os, sys
from pathlib import Path
def writes(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return error.strerror
    return "yes"
facts = {
    "root": writes("/written"), "/tmp": writes("/tmp/written"), "home": sorted(os.listdir(sys.argv[1])),
    **{name: os.environ.get(name) for name in ("PATH", "LANG", "LC_ALL", "LANGUAGE")},
    "port": os.environ["MASTER_PORT"],
}
for name, fact in facts.items():
    print(f"fact {name}: {fact}", flush=True)
latest = Path(sys.argv[1], "kept", "saved", "latest")
if os.environ["RANK"] == "0" and not latest.exists():
    print("step 2/100 | loss 1.0 | 0.50 s/step | 1000 tokens/s", flush=True)
    latest.parent.mkdir(exist_ok=True)
    latest.write_text("step-2")
    sys.exit(3)
"""


def stand_in(person: Person, name: str, text: str) -> str:
    """A folder for PATH with a program of that name."""
    programs = person.folder("programs")
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
    return str(programs)


def the_container_command_of_the_recipe_reaches_every_node(person: Person) -> None:
    seen, mine, data, clusters = (person.folder(name) for name in ("seen", "mine", "data", "clusters"))
    programs = stand_in(person, "apptainer", APPTAINER.format(seen=seen))
    (mine / "train.py").write_text(TRAINER)
    (person.home / "box.sif").write_text(IMAGE)
    (clusters / "ours.yaml").write_text(PROFILE.format(data=data, programs=programs))
    shutil.copy(QUICKSTART, person.home / "recipe.yaml")
    run = person.home / "run"
    said = person.llmlaunch(
        "submit", "recipe.yaml", "nodes=2", "cluster=ours", f"python={sys.executable}", "container.image=box.sif",
        backend(mine / "train.py"), "-o", run, "--follow", code=0, LLMLAUNCH_CLUSTERS=str(clusters),
    )  # fmt: skip
    training = Training(person, run, said)
    assert training.status()["state"] == "succeeded"
    assert training.log().count(f"trains in {run}") == 2
    bound = [f"{data}:/data:ro", f"{mine}:{mine}", f"{run}:{run}"]
    expected = ["exec", "--no-home", "--pwd", str(run), *(word for bind in bound for word in ("--bind", bind))]
    for node in ("0", "1"):
        called = (seen / node).read_text().splitlines()
        words = [str(person.home / "box.sif"), sys.executable, "-I", "-S", f"{run}/node.pyz", "node"]
        assert called[: 1 + len(expected) + len(words)] == [training.job, *expected, *words]


class Box:
    """Someone at a site with pyxis (./pyxis, in his home), and a folder `mine` of his for what he trains with."""

    def __init__(self, person: Person, image: str, *setup: str) -> None:
        self.person, self.image = person, image
        self.pyxis = Path(shutil.copytree(PYXIS, person.home / "pyxis"))
        (self.pyxis / "registry").mkdir()
        (self.pyxis / "registry" / REGISTRY_IMAGE.replace("/", "+")).write_text(IN_THE_BOX)
        self.mine = person.home / "mine"
        self.mine.mkdir()
        self.python = str(interpreter(self.mine / "python", first=TRIED))
        # of which a node waits half for one whose container did not start
        soon = "export LLMLAUNCH_PREFLIGHT_SECONDS=20"
        self.setup = (f"PATH={self.pyxis}:$PATH", "export LANG=C LC_ALL=C LANGUAGE=de", soon, *setup)

    def trains(self, trainer: str, *words: str, code: int) -> Training:
        """A followed run of two nodes."""
        (self.mine / "train.py").write_text(trainer)
        # the image has no Python of its own
        places = dict.fromkeys([str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix])
        box = {"image": self.image, "mounts": [f"{place}:{place}" for place in places]}
        site = {"base": "cpu-x1", "setup": self.setup, "container": {"runtime": "pyxis"}}
        site["srun"] = {"container-env": "LANGUAGE"}
        own = (f"cluster={json.dumps(site)}", f"container={json.dumps(box)}", f"python={self.python}")
        script = backend(self.mine / "train.py", self.person.home)
        return submit(self.person, self.person.home, "nodes=2", *own, script, *words, "--follow", code=code)

    def containers(self) -> list[str]:
        """What is left on the nodes, NODE/NAME each."""
        return sorted(f"{path.parent.name}/{path.name}" for path in self.pyxis.glob("nodes/*/*"))

    def imports(self) -> list[str]:
        """The node of each import, in their order."""
        return [line.split()[0] for line in (self.pyxis / "imports").read_text().splitlines()]


def folders_left_behind_by_pyxis_cost_one_attempt_and_blame_no_node(person: Person) -> None:
    """One is met by the preflight on the first node, one by the training on the second. A requeued job meets those of
    the job that it was: step numbers begin again."""
    first, second = (f'"$(scontrol show hostnames | sed -n {line}p)"' for line in (1, 2))
    left = (
        f'mkdir -p "{person.home}"/pyxis/nodes/{node}/"pyxis_$SLURM_JOB_ID.{step}"'
        for node, step in ((first, 0), (second, 1))
    )
    (person.home / "box.sqsh").write_text("hsqs")
    training = Box(person, f"{person.home}/box.sqsh", *left).trains(TRAINS, "preflight=true", code=0)
    first_attempt = training.status("0")
    assert first_attempt["cause"]["kind"] == "container_busy"
    assert "File already exists" in first_attempt["cause"]["line"]
    why = "the container did not start this time"
    assert first_attempt["next"] == {"action": "again", "why": why, "layout": ".", "seconds": 0, "nodes": []}
    assert training.of_attempt("0", "attempt.json")["preflight"]["bad"] == {}
    assert training.status()["state"] == "succeeded"


def a_registry_image_is_imported_once_a_job_on_each_node_and_retried_where_refused(person: Person) -> None:
    """What the trainers then see is the container as pyxis makes it."""
    box = Box(person, REGISTRY_IMAGE)
    (box.pyxis / "refused").write_text("[ERROR] URL https://nvcr.io/v2/nvidia/box returned error code: 429 ")
    saves = ("training.save_interval=2", f"training.checkpoint_path={person.home}/kept/saved", "training.steps=100")
    comes_back = (*saves, "restart={times: 1, backoff_seconds: 0, within: queue}")
    training = box.trains(LOOKS_AROUND, *comes_back, code=0)
    first_attempt = training.status("0")
    assert (first_attempt["cause"]["kind"], first_attempt["next"]["action"]) == ("container_busy", "again")
    assert first_attempt["cause"]["line"].startswith(f"importing {REGISTRY_IMAGE}: [ERROR] URL")
    assert training.status("1")["next"]["action"] == "requeue", training.log()
    assert len(training.attempts()) == 3
    lives = [training.of_attempt(attempt, "attempt.json")["nodes"] for attempt in ("1", "2")]
    assert sorted(box.imports()) == sorted(node for nodes in lives for node in nodes)
    assert box.containers() == []
    facts = dict(re.findall(r"fact (\S+): (.*)$", training.log("1"), re.MULTILINE))
    of_a_hook = str(int(training.job) % 4536 + 61000)
    assert facts.pop("port") != of_a_hook, "the port is node rank 0's, and not the one of a hook for PyTorch's images"
    assert facts == {
        "root": "Read-only file system", "/tmp": "yes", "home": str(sorted(["kept", "mine", "run"])),
        "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "None", "LANGUAGE": "de",
    }  # fmt: skip


def a_node_without_room_for_the_image_is_replaced_by_a_spare_one(person: Person) -> None:
    """The preflight tries the others alone. Of an earlier job that SLURM ended nothing stays on the nodes."""
    left = f'mkdir -p "{person.home}/pyxis/nodes/$SLURMD_NODENAME/pyxis_1_llmlaunch-$SLURM_CLUSTER_NAME-1-0"'
    box = Box(person, REGISTRY_IMAGE, left)
    (box.pyxis / "scope_job").touch()
    (box.pyxis / "refused").write_text("Write on output file failed because No space left on device")
    training = box.trains(TRAINS, "spare_nodes=1", code=0)
    (full,) = (path.suffix[1:] for path in box.pyxis.glob("refused.*"))
    line = f"importing {REGISTRY_IMAGE}: Write on output file failed because No space left on device"
    preflight = training.of_attempt("0", "attempt.json")["preflight"]
    assert preflight["bad"] == {full: f"the image could not be imported: {line}"}
    assert len(training.attempts()) == 1
    assert sorted(box.imports()) == sorted(preflight["nodes"])
    assert box.containers() == []


def an_image_missing_from_the_registry_ends_the_job_and_is_named(person: Person) -> None:
    training = Box(person, "nvcr.io#nvidia/bocks:1").trains(TRAINS, "preflight=true", code=1)
    cause = training.status()["cause"]
    assert cause["kind"] == "image", training.log()
    url = "https://nvcr.io/v2/nvidia/bocks:1/manifests/1"
    why = f"importing nvcr.io#nvidia/bocks:1: [ERROR] URL {url} returned error code: 404 Not Found"
    assert cause["line"] == f"{why} (and on 1 other node)"
    assert f"the image could not be imported ({cause['node']}): {cause['line']}" in training.said.stdout
    assert "name a .sqsh file that enroot import wrote" in " ".join(training.said.stdout.split())
    assert len(training.attempts()) == 1


test_container = side_by_side(
    folders_left_behind_by_pyxis_cost_one_attempt_and_blame_no_node,
    the_container_command_of_the_recipe_reaches_every_node,
    a_registry_image_is_imported_once_a_job_on_each_node_and_retried_where_refused,
    a_node_without_room_for_the_image_is_replaced_by_a_spare_one,
    an_image_missing_from_the_registry_ends_the_job_and_is_named,
)
