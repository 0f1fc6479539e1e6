"""What a site's profile puts into job.sbatch, and what train.sh sees to before the ranks start: words stay words, a
container sees what the recipe names and has caches it can write, limits are raised, a tokenizer is fetched once.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run_samples import (
    H100,
    NASTY,
    cluster,
    container_job,
    deepspeed_cpu,
    megatron_70b,
    outside_slurm,
    recipe,
    script_of,
    train_alone,
    train_variables,
    write_program,
)

from llmlaunch.causes.log_scan import scan
from llmlaunch.cluster.profile import Site
from llmlaunch.errors import UserError
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.datasets import Data
from llmlaunch.recipe.types import BackendChoice, Recipe
from llmlaunch.rendering.scripts import job_script, refuse_unrenderable, train_script
from llmlaunch.techniques import Techniques


def bash(script: str, **environment: str) -> list[str]:
    """The words it prints, each ended by NUL."""
    done = subprocess.run(["bash", "-uc", script], env={"PATH": "/usr/bin:/bin", **environment}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split("\0")[:-1]


UNWRITABLE = ("nul\x00", "half \ud800")
PLACES: dict[str, Callable[[str], dict[str, object]]] = {
    "interpreter": lambda text: {"python": f"/usr/bin/{text}"},
    "variable": lambda text: {"environment": {"WORD": text}},
    "variable's name": lambda text: {"environment": {f"A{text}": "1"}},
    "image": lambda text: {"container": Container(text)},
    "mount": lambda text: {"container": Container("/image.sqsh", (f"/{text}:/data",))},
    "sbatch option": lambda text: {"slurm": {"comment": text}},
}


@pytest.mark.parametrize("text", UNWRITABLE)
@pytest.mark.parametrize("place", PLACES)
def test_check_refuses_what_the_scripts_would_refuse_in_the_same_words(place: str, text: str) -> None:
    boxed, planned, rendered = container_job()
    hostile = replace(boxed, **PLACES[place](text))  # type: ignore[arg-type]
    with pytest.raises(UserError) as of_scripts:
        _ = job_script(hostile, planned) + train_script(hostile, rendered, None)
    with pytest.raises(UserError) as of_check:
        refuse_unrenderable(hostile, planned, rendered, prepares=False)
    assert str(of_check.value) == str(of_scripts.value)
    assert str(of_check.value).startswith("recipes/boxed.yaml: ")


@pytest.mark.parametrize("text", UNWRITABLE)
def test_check_refuses_what_no_script_can_hold_of_the_framework_s_arguments(text: str) -> None:
    of, planned, rendered = megatron_70b()
    hostile = replace(rendered, program=(*rendered.program, text))
    with pytest.raises(UserError, match="holds"):
        refuse_unrenderable(of, planned, hostile, prepares=False)


def test_check_refuses_none_of_what_the_scripts_hold() -> None:
    for of, planned, rendered in (megatron_70b(), container_job(), deepspeed_cpu()):
        refuse_unrenderable(of, planned, rendered, prepares=True)
        assert job_script(of, planned, prepares=True)
        assert train_script(of, rendered, None)


def test_check_renders_templates_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.sh.j2").write_text("{{ no_such_name }}")
    monkeypatch.setenv("LLMLAUNCH_TEMPLATES", str(tmp_path))
    of, planned, rendered = megatron_70b()
    with pytest.raises(UserError, match="no_such_name"):
        refuse_unrenderable(of, planned, rendered, prepares=False)


def at_site(site: Site, **changes: object) -> Recipe:
    return replace(recipe(cluster=cluster(H100, 8, site=site)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [text for text in NASTY if text])
def test_an_srun_option_reaches_srun_as_it_is_written(text: str) -> None:
    script = script_of(at_site(Site(srun={"comment": text, "overlap": True, "mem": False}, mpi="none")))
    start = script.index("  srun_options+=(--mpi=none")
    line = script[start : script.index("\n  step=(", start)]
    assert bash(f"srun_options=()\n{line}\nprintf '%s\\0' \"${{srun_options[@]}}\"") == [
        "--mpi=none",
        f"--comment={text}",
        "--overlap",
    ]


def test_setup_lines_of_the_site_then_its_modules_then_the_recipes_lines() -> None:
    site = Site(setup=("module() { printf '%s\\0' \"$@\"; }",), modules=("cuda/12.4", "a; touch PWNED"))
    script = script_of(at_site(site, setup=("module last",)))
    start = script.index(site.setup[0])
    words = bash(script[start : script.index("trap - ERR", start)])
    assert words == ["load", "cuda/12.4", "load", "a; touch PWNED", "last"]


def mounts(folder: Path, of: Recipe, run: str = "runs/1") -> list[str]:
    """What job.sbatch would mount for a run directory in `folder`."""
    script = script_of(of)
    start = script.index("mounts=(")
    body = script[start : script.index("[[ -z ${SLURM_JOB_ID:-} ]] || find_mounts", start)]
    tools = 'say() { :; }; die() { echo "$*" >&2; exit 1; }\n'
    (folder / run).mkdir(parents=True, exist_ok=True)
    return bash(f"{tools}{body}find_mounts\nprintf '%s\\0' \"${{mounts[@]}}\"", run_dir=str(folder / run))


def boxed(*given: str, **changes: object) -> Recipe:
    return replace(recipe(container=Container("/box.sqsh", given)), **changes)  # type: ignore[arg-type]


def saving(of: Recipe, path: Path) -> Recipe:
    return replace(of, training=replace(of.training, save_interval=5, checkpoint_path=str(path)))


def test_what_the_recipe_names_is_in_the_container_at_its_own_place(tmp_path: Path) -> None:
    for name in ("data/corpus.bin", "code/pretrain.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    of = boxed(
        data=Data(path=str(tmp_path / "data" / "corpus")),  # the beginning of corpus.bin and corpus.idx
        backend=BackendChoice("deepspeed", script=str(tmp_path / "code" / "pretrain.py")),
    )
    saved = tmp_path / "ck" / "mine"
    places = [tmp_path / name for name in ("ck", "code", "data", "runs/1")]
    assert mounts(tmp_path, saving(of, saved)) == [f"{place}:{place}" for place in places]
    assert saved.is_dir()


def test_what_only_the_image_has_or_a_mount_brings_is_left_alone(tmp_path: Path) -> None:
    in_image = BackendChoice("megatron-lm", path="/opt/megatron-lm")  # though this host has an /opt
    of = boxed("/lustre:/data", data=Data(path="/data/corpus"), backend=in_image)
    run = tmp_path / "runs" / "1"
    assert mounts(tmp_path, saving(of, Path("/data/checkpoints"))) == ["/lustre:/data", f"{run}:{run}"]
    assert not Path("/data/checkpoints").exists()


def test_a_read_only_mount_leaves_what_is_written_below_it_writable(tmp_path: Path) -> None:
    of = saving(boxed(f"{tmp_path}:{tmp_path}:ro", data=Data(path=str(tmp_path / "corpus"))), tmp_path / "ck" / "mine")
    run = tmp_path / "runs" / "1"
    assert mounts(tmp_path, of) == [f"{tmp_path}:{tmp_path}:ro", f"{tmp_path}/ck:{tmp_path}/ck", f"{run}:{run}"]


def test_nothing_is_mounted_twice_nor_below_a_mount_that_brings_it_there(tmp_path: Path) -> None:
    """Saved into the run directory, which lies below a mount of the site."""
    of = saving(boxed(f"{tmp_path}:{tmp_path}:rw", "/lustre:/data", "/lustre:/data"), tmp_path / "runs" / "1" / "ck")
    assert mounts(tmp_path, of) == ["/lustre:/data", f"{tmp_path}:{tmp_path}:rw"]


def test_what_another_mount_would_hide_is_mounted_in_it(tmp_path: Path) -> None:
    of = boxed(f"{tmp_path}:{tmp_path}", f"/scratch:{tmp_path}/runs")
    run = tmp_path / "runs" / "1"
    assert mounts(tmp_path, of) == [f"{tmp_path}:{tmp_path}", f"/scratch:{tmp_path}/runs", f"{run}:{run}"]


def test_paths_no_mount_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("no mount can hold the comma or colon of /a,b/c")):
        script_of(boxed(data=Data(path="/a,b/c")))
    with pytest.raises(AssertionError, match="comma, colon or line break"):
        mounts(tmp_path, boxed(), run="runs/a:b")


NOTING_LIMITS = """\
#!/bin/bash
cache="{folder}/cache"
case "$*" in
  *AutoTokenizer*)
    echo "${{HF_HUB_OFFLINE:-online}}" >>"{folder}/hub_requests"
    if [[ -n ${{HF_HUB_OFFLINE:-}} ]]; then [[ -e $cache ]]; else {fetch}; fi
    ;;
  *torch.distributed.run*)
    printf '%s\\n' "$(ulimit -Sn)" "${{OMP_NUM_THREADS:-}}" "${{HF_HUB_OFFLINE:-}}" >"{folder}/seen"
    ;;
esac
"""
"""Stands for the interpreter: the hub is not asked in earnest, and its torchrun notes what it was given."""


def torchrun_saw(
    folder: Path, of: Recipe, fetch: str = ': >"$cache"', files: tuple[int, int] | None = None, **environment: str
) -> tuple[list[str], str]:
    """Soft limit of open files, OMP_NUM_THREADS and HF_HUB_OFFLINE of torchrun, and the log. `files`: the soft and the
    hard limit that train.sh starts with."""
    folder.mkdir(exist_ok=True)
    python = write_program(folder / "python", NOTING_LIMITS.format(folder=folder, fetch=fetch))
    variables = outside_slurm("OMP", "HF", **train_variables(folder / "run", python, **environment))
    limit: Callable[[], None] = lambda: files and resource.setrlimit(resource.RLIMIT_NOFILE, files)  # noqa: E731
    _, log = train_alone(folder, of, variables, limit)
    return (folder / "seen").read_text().split("\n")[:3], log


def of_ranks(count: int, **changes: object) -> Recipe:
    of, _, _ = deepspeed_cpu()
    return replace(of, nodes=count // of.cluster.devices_per_node, **changes)  # type: ignore[arg-type]


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    (soft, _, _), log = torchrun_saw(tmp_path, of_ranks(2), files=(256, 2048))
    assert soft == "2048"
    assert "files open" not in log


def test_a_hard_limit_too_low_for_the_ranks_is_said(tmp_path: Path) -> None:
    (soft, _, _), log = torchrun_saw(tmp_path, of_ranks(1024), files=(256, 1024))
    assert soft == "1024"
    assert "may have 1024 files open (ulimit -Hn), and 1024 ranks that meet here may need 2560" in log


def test_job_sbatch_raises_the_limit_that_srun_hands_on(tmp_path: Path) -> None:
    of, plan, _ = deepspeed_cpu()
    script = job_script(of, plan)
    start = script.index("raise_open_files() {")
    body = script[start : script.index("\nraise_open_files\n") + 1]
    limit: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))  # noqa: E731
    done = subprocess.run(
        ["bash", "-uc", f"{body}raise_open_files; ulimit -Sn"], preexec_fn=limit, capture_output=True, text=True
    )
    assert done.stdout == "4096\n", done.stderr


def test_a_host_optimizer_gets_the_cores_of_the_node(tmp_path: Path) -> None:
    offloaded = of_ranks(2, techniques=Techniques(offload_optimizer=1.0))
    (_, threads, _), log = torchrun_saw(tmp_path, offloaded)
    assert threads == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert f"with {threads} thread(s) a rank" in log


def test_a_number_of_threads_that_is_set_stays(tmp_path: Path) -> None:
    offloaded = of_ranks(2, techniques=Techniques(offload_optimizer=1.0))
    assert torchrun_saw(tmp_path / "shell", offloaded, OMP_NUM_THREADS="7")[0][1] == "7"
    assert torchrun_saw(tmp_path / "recipe", replace(offloaded, environment={"OMP_NUM_THREADS": "5"}))[0][1] == "5"


def with_tokenizer(tokenizer: str, **changes: object) -> Recipe:
    return of_ranks(2, data=Data(path="/data/text", tokenizer=tokenizer), **changes)


def test_a_tokenizer_of_the_hub_is_fetched_once_and_loaded_offline(tmp_path: Path) -> None:
    (_, _, offline), log = torchrun_saw(tmp_path, with_tokenizer("org/words"))
    assert offline == "1"
    assert (tmp_path / "hub_requests").read_text().split() == ["1", "online", "1"]
    assert "the ranks load it offline" in log


def test_a_tokenizer_in_the_cache_asks_the_hub_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert torchrun_saw(tmp_path, with_tokenizer("org/words"))[0][2] == "1"
    assert (tmp_path / "hub_requests").read_text().split() == ["1"]


def test_a_tokenizer_that_cannot_be_fetched_is_left_to_the_ranks(tmp_path: Path) -> None:
    fetch = "{ echo Traceback; echo '429 Too Many Requests'; } >&2; false"
    (_, _, offline), log = torchrun_saw(tmp_path, with_tokenizer("org/words"), fetch=fetch)
    assert offline == ""
    assert "is not in this node's cache (429 Too Many Requests); each rank asks the hub for it" in log
    assert scan(log) == []


@pytest.mark.parametrize(
    "of",
    [with_tokenizer("/models/words"), with_tokenizer("org/words", backend=BackendChoice("deepspeed", script="/t.py"))],
)
def test_whoever_asks_no_hub_is_left_alone(tmp_path: Path, of: Recipe) -> None:
    assert torchrun_saw(tmp_path, of)[0][2] == ""
    assert not (tmp_path / "hub_requests").exists()


def test_a_word_of_ones_own_on_the_hub_stays(tmp_path: Path) -> None:
    assert torchrun_saw(tmp_path, with_tokenizer("org/words"), HF_HUB_OFFLINE="0")[0][2] == "0"
    assert not (tmp_path / "hub_requests").exists()


CACHES = (
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "MPLCONFIGDIR",
    "HF_HOME",
)
# Stands for the interpreter: its torchrun writes down what a trainer would see, and tries the caches.
NOTING_CACHES = f"""\
#!/bin/bash
[[ $* = *torch.distributed.run* ]] || exit 0
printf '%s' "$0" >trained-by
printf '%s\\n' "$HOME" "${{TMPDIR-unset}}" >places
touch "$HOME/written" || exit 1
for name in {" ".join(CACHES)}; do
  printf '%s\\0' "${{!name:-}}" >>caches
  [[ -z ${{!name:-}} ]] || : >"${{!name}}/written" || exit 1
done
"""


def trained(folder: Path, container: Container | None = None, **more: str) -> Path:
    """A finished run of train.sh alone, as job.sbatch starts it in the job 1; its run directory."""
    for name in ("python3", "host-python"):
        write_program(folder / name, NOTING_CACHES)
    (folder / "tmp").mkdir()
    outside = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder / "tmp"), "SLURM_JOB_ID": "1"}
    variables = train_variables(folder / "run", folder / "host-python", **{**outside, **more})
    return train_alone(folder, replace(deepspeed_cpu()[0], container=container), variables)[0]


def caches(run: Path) -> dict[str, str]:
    return dict(zip(CACHES, (run / "caches").read_text().split("\0"), strict=False))


@pytest.mark.parametrize(
    ("container", "job", "python"),
    [
        (Container("box.sif", (), "apptainer"), "1", "python3"),
        (Container("box.sqsh"), "1", "python3"),
        (Container("box.sqsh"), "", "host-python"),  # without SLURM it trains outside the container
        (None, "1", "host-python"),
    ],
)
def test_the_login_nodes_interpreter_does_not_enter_a_container(
    tmp_path: Path, container: Container | None, job: str, python: str
) -> None:
    run = trained(tmp_path, container, SLURM_JOB_ID=job)
    assert (run / "trained-by").read_text() == str(tmp_path / python)


def test_without_a_home_each_cache_has_a_folder_while_it_trains(tmp_path: Path) -> None:
    run = trained(tmp_path, HOME=str(tmp_path / "none"), TMPDIR=str(tmp_path / "missing"))
    places = caches(run)
    assert places.pop("HF_HOME") == f"{run}/cache/huggingface"
    assert (run / "places").read_text().split() == [places["XDG_CACHE_HOME"], "unset"]
    assert all(place.startswith("/tmp/llmlaunch-caches.") for place in places.values())
    assert not any(Path(place).exists() for place in places.values())
    assert (run / "cache" / "huggingface" / "written").exists()


def test_a_persons_own_caches_stay_where_they_can(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    own = {
        "HF_HOME": str(tmp_path / "models"),
        "TRITON_CACHE_DIR": str(tmp_path / "new"),
        "MPLCONFIGDIR": "/proc/no/way",
    }
    places = caches(trained(tmp_path, HOME=str(tmp_path / "none"), **own))
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert places[name] == own[name]
    assert places["MPLCONFIGDIR"].startswith(f"{tmp_path}/tmp/llmlaunch-caches.")


def test_a_home_that_can_be_written_keeps_the_caches(tmp_path: Path) -> None:
    run = trained(tmp_path, HOME=str(tmp_path))
    assert set(caches(run).values()) == {""}
    assert (run / "places").read_text().split() == [str(tmp_path), str(tmp_path / "tmp")]


# Stands for the interpreter: the node side is the real one but for a monitor that has something to say, torchrun starts
# one rank, and the trainer notes what it would import first.
NOTING_IMPORTS = f"""\
#!/bin/bash
case "$*" in
  *node.pyz\\ monitor*) echo "no monitor today" >&2 ;;
  *node.pyz*) exec {shlex.quote(sys.executable)} "$@" ;;
  *torch.distributed.run*)
    while [[ $1 != -- ]]; do shift; done
    shift
    RANK=0 LOCAL_RANK=0 "$@"
    ;;
  *trainer/train.py*) ls "${{PYTHONPATH%%:*}}" && printf '%s' "${{PYTHONPATH%%:*}}" >imports ;;
esac
"""


@pytest.mark.parametrize("room", [True, False], ids=["a disk with room", "a full disk"])
def test_what_ranks_import_lies_on_the_node_where_its_disk_has_room(tmp_path: Path, room: bool) -> None:
    """And what the monitor said comes to the run directory."""
    write_program(tmp_path / "python", NOTING_IMPORTS)
    (tmp_path / "tmp").mkdir()
    of = replace(deepspeed_cpu()[0], cluster=cluster(H100, 2))  # with a probe
    variables = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path)}
    limit = 10**9 if room else 100_000  # bytes of a file; node.pyz has more

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    run, log = train_alone(tmp_path, of, train_variables(tmp_path / "run", tmp_path / "python", **variables), before)
    hook = Path((run / "imports").read_text())
    assert (hook != run / "hook", "takes no copy" in log) == (room, not room)
    assert {"llmlaunch_memory_probe.py", "sitecustomize.py"} <= set(log.split())
    assert not hook.exists() or not room  # what a node kept for itself is gone
    (monitor_log,) = (run / "logs").glob("*.monitor.log")
    assert monitor_log.read_text() == "no monitor today\n"
