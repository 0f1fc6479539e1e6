"""Jobs in containers on real nodes. Apptainer is a stand-in that notes its words and runs the command: what is tested
is that the right command reaches every node. pyxis is no Debian package: an srun in front of the real one stands in for
it, and does what pyxis 0.24.0 and enroot 4.1.2 were seen to do."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import Future

import pytest
from person import Person
from training import QUICKSTART, Training, backend, submit

from support.side_by_side import Story, by_name

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
srun: {{cpu-bind: none, unbuffered: true}}
mpi: none
setup:
  - module() {{ [[ $1 = load && $2 = apptainer/1.3 ]] && PATH="{programs}:$PATH"; }}
  - export SITE_SAYS='two words'
modules: [apptainer/1.3]
container: {{runtime: apptainer, mounts: ["{data}:/data:ro"]}}
"""
TRAINER = "import os\nassert os.environ['SITE_SAYS'] == 'two words'\nprint('trains in', os.getcwd(), flush=True)\n"

# A step's container is `pyxis_<job>.<step>`. Where a folder of that name is there already, the step says so in its own
# output and ends at once with 1, and the folder is removed. Where the image is missing, the step ends so each time.
SRUN = """\
#!/bin/bash
options=()
while [[ $1 = --* ]]; do
  [[ $1 = --container-* || $1 = --no-container-* ]] || options+=("$1")
  shift
done
echo "$1" >>"{folder}/steps"
exec {srun} "${{options[@]}}" bash "{folder}/stepd" "$@"
"""
STEPD = """\
fail() {{
  echo "slurmstepd-$SLURMD_NODENAME: pyxis: creating container filesystem: pyxis_$SLURM_JOB_ID.$SLURM_STEP_ID"
  echo "slurmstepd-$SLURMD_NODENAME: error: pyxis: failed to create container filesystem for image: /images/box.sqsh"
  echo "slurmstepd-$SLURMD_NODENAME: error: pyxis: printing enroot log file:"
  echo "slurmstepd-$SLURMD_NODENAME: error: pyxis:     [ERROR] $1"
  exit 1
}} >&2
[[ ! -e "{folder}/no-image" ]] || fail "No such file or directory: /images/box.sqsh"
! rmdir "{folder}/$SLURM_NODEID/pyxis_$SLURM_STEP_ID" 2>/dev/null || fail "File already exists: {folder}/pyxis"
exec "$@"
"""


def stand_in(person: Person, name: str, text: str) -> str:
    """A folder for PATH with a program of that name."""
    programs = person.folder("programs")
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
    return str(programs)


def the_container_command_reaches_every_node_with_what_the_recipe_names(person: Person) -> None:
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
    assert "setup: exit code" not in training.log()
    bound = [f"{data}:/data:ro", f"{mine}:{mine}", f"{run}:{run}"]
    expected = ["exec", "--no-home", "--pwd", str(run), *(word for bind in bound for word in ("--bind", bind))]
    for node in ("0", "1"):
        called = (seen / node).read_text().splitlines()
        assert called == [training.job, *expected, str(person.home / "box.sif"), "bash", f"{run}/./train.sh"]


def a_container_that_is_slow_to_go_does_not_cost_the_verdict(person: Person) -> None:
    """The ranks have ended and the step has not, nor does it until SLURM kills it."""
    lingering = APPTAINER.replace("exec ", "trap '' TERM\n").rstrip() + "\nsleep 1000\n"
    programs = stand_in(person, "apptainer", lingering.format(seen=person.folder("seen")))
    (person.home / "train.py").write_text("print('trains', flush=True)\n")
    (person.home / "box.sif").write_text(IMAGE)
    box = (f"setup=['PATH={programs}:$PATH']", f"container={{image: {person.home}/box.sif, runtime: apptainer}}")
    training = submit(person, person.home, "nodes=2", backend(person.home / "train.py"), *box)
    training.wait(lambda it: it.status(), "the job is judged")
    assert training.status()["state"] == "succeeded"
    assert training.in_queue().startswith("RUNNING")
    # as at the time limit, which then kills what is left
    person.ask("scancel", "--batch", "--signal=TERM", training.job)
    training.wait(lambda it: "RUNNING" not in it.in_queue(), "the script has ended")
    assert "what was judged before it stands" in training.log()
    assert training.status()["state"] == "succeeded"


def a_recipes_container_is_looked_into_on_one_node_and_remembered(person: Person) -> None:
    """`llmlaunch doctor --container`: the interpreter inside and what it finds are real."""
    seen = person.folder("seen")
    programs = stand_in(person, "apptainer", APPTAINER.format(seen=seen))
    (person.home / "box.sif").write_text(IMAGE)
    (person.home / "recipe.yaml").write_text(
        QUICKSTART.read_text()
        + f"\npython: {sys.executable}\ncontainer: {{image: box.sif, runtime: apptainer}}\n"
        + f"slurm: {{partition: train}}\nsetup: ['PATH={programs}:$PATH']\n"
    )
    deepspeed = importlib.metadata.version("deepspeed")
    doctor = person.llmlaunch("doctor", "--container", "recipe.yaml", code=0, OMP_NUM_THREADS="1")
    assert f"deepspeed           {deepspeed}\n" in doctor.stdout
    job, *called = (seen / "0").read_text().splitlines()
    assert job.isdigit()
    assert called[:5] == ["exec", "--no-home", str(person.home / "box.sif"), "bash", "-c"]
    checked = person.llmlaunch("check", "-v", "recipe.yaml", code=0).stdout
    assert f"Assumed: DeepSpeed {deepspeed}, as llmlaunch doctor saw" in checked


def in_pyxis(person: Person, *words: str, code: int) -> Training:
    """A followed run of two nodes."""
    folder = person.home
    programs = stand_in(person, "srun", SRUN.format(folder=folder, srun=shutil.which("srun")))
    (folder / "stepd").write_text(STEPD.format(folder=folder))
    (folder / "train.py").write_text("print('trains', flush=True)\n")
    site = f"cluster={{base: cpu-x1, setup: ['PATH={programs}:$PATH'], container: {{runtime: pyxis}}}}"
    own = ("nodes=2", site, backend(folder / "train.py"), "container.image=/images/box.sqsh")
    return submit(person, folder, *own, *words, "--follow", code=code)


def folders_that_pyxis_left_behind_cost_a_try_and_no_node_is_blamed(person: Person) -> None:
    """One is met by the preflight on the first node, one by the training on the second."""
    for leftover in ("0/pyxis_0", "1/pyxis_1"):
        (person.home / leftover).mkdir(parents=True)
    training = in_pyxis(person, "preflight=true", code=0)
    first = training.status("0")
    assert first["cause"]["kind"] == "container_busy"
    assert "File already exists" in first["cause"]["line"]
    why = "the container did not start this time"
    assert first["next"] == {"action": "again", "why": why, "layout": ".", "seconds": 0, "nodes": []}
    assert training.of_attempt("0", "preflight.json")["bad"] == {}
    assert training.status()["state"] == "succeeded"


def an_image_that_is_not_there_ends_the_job_and_is_named(person: Person) -> None:
    (person.home / "no-image").touch()
    saved = person.home / "saved"
    saves = ("training.save_interval=2", f"training.checkpoint_path={saved}")  # so it would come back
    training = in_pyxis(person, *saves, code=1)
    status = training.status()
    assert status["cause"]["kind"] == "container", training.log()
    assert status["next"]["why"] == "a restart would end in container again"
    assert "the container does not start" in training.said.stdout
    assert "No such file or directory: /images/box.sqsh" in training.said.stdout
    assert len(training.attempts()) == 1


STORIES = by_name(
    folders_that_pyxis_left_behind_cost_a_try_and_no_node_is_blamed,
    a_container_that_is_slow_to_go_does_not_cost_the_verdict,
    the_container_command_reaches_every_node_with_what_the_recipe_names,
    a_recipes_container_is_looked_into_on_one_node_and_remembered,
    an_image_that_is_not_there_ends_the_job_and_is_named,
)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_container(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: Story) -> None:
    stories[request.node.nodeid].result()
