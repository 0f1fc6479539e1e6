"""The environment of a node's ranks: which Python trains, where caches and temporary files go, what is set and what
stays."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.log_scan import scan
from llmlaunch.node.node_environment import (
    NodeError,
    OwnFolders,
    export_launch,
    export_tracking,
    fetch_tokenizer,
    put_first,
    raise_open_files,
    threads_on_host,
    training_python,
    value_of,
)

LAUNCH: dict[str, Any] = {"python": "", "in_container": False, "environment": {}, "python_path": []}
LAUNCH["required_variables"] = []
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR", "HF_HOME")


def launch(**changes: Any) -> dict[str, Any]:
    return {**LAUNCH, **changes}


def program(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def at_once(task: Callable[[], None]) -> None:
    task()


# --- variables ---


def test_a_word_is_text_or_the_value_of_a_variable_with_a_suffix() -> None:
    assert value_of("a $HOME", {}) == "a $HOME"
    assert value_of({"variable": "V", "suffix": "/x y"}, {"V": "a b"}) == "a b/x y"
    with pytest.raises(NodeError, match="the variable V is not set on this node"):
        value_of({"variable": "V", "suffix": ""}, {})


def test_what_is_rendered_is_set_and_imported_first() -> None:
    environment = {"RUN": "/run", "MINE": "of the person", "PYTHONPATH": "/theirs"}
    folders = ["/site", {"variable": "UNSET", "suffix": "/no"}, {"variable": "RUN", "suffix": "/code"}]
    words = {"MINE": "of the recipe", "HERE": {"variable": "RUN", "suffix": "/x"}}
    export_launch(launch(environment=words, python_path=folders), environment)
    assert environment == {
        "RUN": "/run",
        "MINE": "of the recipe",
        "HERE": "/run/x",
        "PYTHONPATH": "/run/code:/site:/theirs",
    }


@pytest.mark.parametrize("environment", [{}, {"HF_TOKEN": ""}])
def test_a_variable_that_every_node_needs_is_asked_for(environment: dict[str, str]) -> None:
    with pytest.raises(NodeError, match="HF_TOKEN is needed on every node; set it in the environment or the setup"):
        export_launch(launch(required_variables=["HF_TOKEN"]), environment)


def test_a_first_folder_leaves_no_empty_one_behind() -> None:
    """An empty entry of PYTHONPATH is the working directory."""
    environment = {"PYTHONPATH": ""}
    put_first(environment, "/a")
    put_first(environment, "/b")
    assert environment["PYTHONPATH"] == "/b:/a"


def test_one_run_of_wandb_for_all_attempts_with_the_prediction_as_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.id").write_text("tiny run/1\n")
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "wandb-config.json").write_text("{}")
    environment: dict[str, str] = {}
    run = {"name": "", "save_dir": ""}
    export_tracking({"wandb": run, "workdir": ""}, tmp_path, tmp_path / "layout", environment, at_once)
    expected = {"WANDB_RUN_ID": "tiny-run-1", "WANDB_RESUME": "allow", "WANDB_NAME": "tiny run/1"}
    assert environment == {**expected, "WANDB_DIR": str(tmp_path)}
    config = tmp_path / "config-defaults.yaml"
    assert config.read_text() == "{}"
    own = {"name": "$(mine)", "save_dir": str(tmp_path / "of wandb")}
    export_tracking({"wandb": own, "workdir": "/code"}, tmp_path, tmp_path / "layout", environment, at_once)
    assert (environment["WANDB_NAME"], environment["WANDB_DIR"]) == ("$(mine)", own["save_dir"])
    assert environment["WANDB_CONFIG_PATHS"] == str(config)  # the trainers start in another folder
    assert (tmp_path / "of wandb").is_dir()
    with pytest.raises(NodeError, match="cannot make the folder of Weights & Biases, /proc/none: "):
        export_tracking({"wandb": {**own, "save_dir": "/proc/none"}, "workdir": ""}, tmp_path, tmp_path, {}, at_once)


def test_an_untracked_run_has_no_variable_of_wandb(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    export_tracking({"wandb": None, "workdir": ""}, tmp_path, tmp_path, environment, at_once)
    assert environment == {}


# --- which Python trains ---


@pytest.fixture
def pythons(tmp_path: Path) -> dict[str, str]:
    """An environment whose python3 has no torch and whose python has; `named` has another."""
    program(tmp_path / "bin" / "python3", "exit 1")
    program(tmp_path / "bin" / "python", "echo torch 2.13.0a0+cu13")
    program(tmp_path / "named", "echo a greeting of the site; echo torch 2.7.1")
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}


def test_the_first_python_with_torch_trains_unless_one_is_named(tmp_path: Path, pythons: dict[str, str]) -> None:
    named = str(tmp_path / "named")
    assert training_python(launch(), pythons) == (f"{tmp_path}/bin/python", (2, 13))
    assert training_python(launch(), {**pythons, "LLMLAUNCH_PYTHON": named}) == (named, (2, 7))
    of_recipe = launch(python=f"{tmp_path}/bin/python")
    assert training_python(of_recipe, {**pythons, "LLMLAUNCH_PYTHON": named}).path == f"{tmp_path}/bin/python"


def test_the_login_nodes_interpreter_does_not_enter_a_container(tmp_path: Path, pythons: dict[str, str]) -> None:
    host = {**pythons, "LLMLAUNCH_PYTHON": str(tmp_path / "named")}
    boxed = launch(in_container=True)
    assert training_python(boxed, {**host, "SLURM_JOB_ID": "1"}).path == f"{tmp_path}/bin/python"
    assert training_python(boxed, host).path == str(tmp_path / "named")  # without SLURM it trains outside


@pytest.mark.parametrize(
    ("changes", "tried", "advice"),
    [
        ({}, "python3 python", "(python: in the recipe, or LLMLAUNCH_PYTHON)"),
        ({"python": "/nowhere/python"}, "/nowhere/python", "(python: in the recipe, or LLMLAUNCH_PYTHON)"),
        ({"in_container": True}, "python3 python", "(python: in the recipe)"),
    ],
)
def test_where_none_has_torch_what_was_tried_is_said(
    tmp_path: Path, pythons: dict[str, str], changes: dict[str, Any], tried: str, advice: str
) -> None:
    program(tmp_path / "bin" / "python", "exit 1")
    with pytest.raises(NodeError) as error:
        training_python(launch(**changes), pythons)
    assert str(error.value) == f"no torch in {tried}: name the training environment's interpreter {advice}"


@pytest.mark.parametrize(
    ("metadata", "version"),
    [("Name: torch\nVersion: 2.13.0a0+cu13\n", (2, 13)), (None, (0, 0)), ("Name: torch\n", (0, 0))],
)
def test_torch_is_found_without_its_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: str | None, version: tuple[int, int]
) -> None:
    """Not in the working directory, which all nodes share: it may be a folder of that name."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    if metadata is not None:
        (tmp_path / "site" / "torch-2.13.dist-info").mkdir()
        (tmp_path / "site" / "torch-2.13.dist-info" / "METADATA").write_text(metadata)
    python = program(tmp_path / "python", f'exec {sys.executable} -S "$@"')
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site"), "LLMLAUNCH_PYTHON": python}
    assert training_python(launch(), environment) == (python, version)
    monkeypatch.chdir(tmp_path / "site")
    with pytest.raises(NodeError, match="no torch in"):
        training_python(launch(), {**environment, "PYTHONPATH": ""})


# --- limits and threads ---


@pytest.fixture
def limited() -> Iterator[None]:
    """The soft limit of open files is 256; it is as before in the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("limited")
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one_or_a_million() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert raise_open_files(0, {"open_files": 500, "world_size": 2}) == ""
    most = 2**20 if hard == resource.RLIM_INFINITY else min(hard, 2**20)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most


def test_a_limit_too_low_for_the_ranks_is_said_where_they_meet() -> None:
    many = {"open_files": 2**40, "world_size": 2**39}
    warning = raise_open_files(0, many)
    assert f"files open (ulimit -Hn), and {2**39} ranks that meet here may need {2**40}; ask for a higher" in warning
    assert raise_open_files(1, many) == ""


def test_a_host_optimizer_gets_the_cores_of_the_node_unless_a_number_is_set() -> None:
    environment: dict[str, str] = {}
    cores = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert threads_on_host(2, environment) == environment["OMP_NUM_THREADS"] == cores
    assert threads_on_host(10**6, {}) == "1"
    for own in ("7", "4,2"):
        environment = {"OMP_NUM_THREADS": own}
        assert threads_on_host(2, environment) == environment["OMP_NUM_THREADS"] == own


# --- the tokenizer ---


@pytest.fixture
def hub(tmp_path: Path) -> Any:
    """`fetched(fetch)` fetches a tokenizer by a Python whose requests are noted; returns what is said, and those."""

    def fetched(fetch: str, **variables: str) -> tuple[str, list[str], str | None]:
        asked = f'echo "${{HF_HUB_OFFLINE:-online}}" >>{tmp_path}/requests'
        find = f'if [ -n "$HF_HUB_OFFLINE" ]; then [ -e {tmp_path}/cache ]; else {fetch}; fi'
        python = program(tmp_path / "python", f"{asked}\n{find}")
        environment = {"PATH": os.environ["PATH"], **variables}
        said = fetch_tokenizer(python, "org/words", environment)
        requests = tmp_path / "requests"
        return said, requests.read_text().split() if requests.exists() else [], environment.get("HF_HUB_OFFLINE")

    return fetched


def test_a_tokenizer_of_the_hub_is_fetched_once_and_loaded_offline(tmp_path: Path, hub: Any) -> None:
    said, requests, offline = hub(f"touch {tmp_path}/cache")
    assert said == "the tokenizer org/words is in this node's cache; the ranks load it offline (HF_HUB_OFFLINE=1)"
    assert (requests, offline) == (["1", "online", "1"], "1")


def test_a_tokenizer_in_the_cache_asks_the_hub_nothing(tmp_path: Path, hub: Any) -> None:
    (tmp_path / "cache").touch()
    _, requests, offline = hub("exit 1")
    assert (requests, offline) == (["1"], "1")


def test_a_tokenizer_that_cannot_be_fetched_is_left_to_the_ranks(hub: Any) -> None:
    """In one line: a traceback in the log would be taken for what ended the training."""
    said, _, offline = hub("{ echo Traceback; echo '429 Too Many Requests'; } >&2; exit 1")
    assert said.endswith("is not in this node's cache (429 Too Many Requests); each rank asks the hub for it")
    assert scan(said) == []
    assert offline is None


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_word_of_ones_own_on_the_hub_stays(hub: Any, name: str) -> None:
    said, requests, offline = hub("exit 1", **{name: "0"})
    assert (said, requests, offline) == ("", [], "0" if name == "HF_HUB_OFFLINE" else None)


# --- folders of the node's own ---


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OwnFolders, list[str]]]:
    """The folders, and what is said of them."""
    said: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", None)
    folders = OwnFolders(said.append)
    yield folders, said
    folders.remove()


def test_without_a_home_each_cache_has_a_folder_while_it_trains(
    tmp_path: Path, own: tuple[OwnFolders, list[str]]
) -> None:
    folders, said = own
    environment = {"HOME": "/none", "TMPDIR": str(tmp_path)}
    folders.use_temporary_folder(environment)
    folders.make_caches(tmp_path / "run", "1.0", "node1", environment)
    home = environment["HOME"]
    assert said == [f"HOME is /none, which is not on this node; {home} is used"]
    assert home.startswith(f"{tmp_path}/llmlaunch-caches.")
    places = {name: environment[name] for name in CACHES}
    assert places.pop("HF_HOME") == f"{tmp_path}/run/cache/huggingface"  # what is downloaded stays
    assert len({*places.values()}) == len(places)
    assert all(Path(place).is_dir() and place.startswith(home) for place in places.values())
    folders.remove()
    assert not Path(home).exists()
    assert (tmp_path / "run" / "cache" / "huggingface").is_dir()


def test_a_home_that_can_be_written_keeps_the_caches(tmp_path: Path, own: tuple[OwnFolders, list[str]]) -> None:
    environment = {"HOME": str(tmp_path)}
    own[0].make_caches(tmp_path, "1.0", "node1", environment)
    assert (environment, own[1]) == ({"HOME": str(tmp_path)}, [])


def test_a_persons_own_caches_stay_where_they_can(tmp_path: Path, own: tuple[OwnFolders, list[str]]) -> None:
    mine = {"HF_HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "new"), "MPLCONFIGDIR": "/proc/no/way"}
    environment = {"HOME": "", **mine}
    own[0].make_caches(tmp_path, "1.0", "node1", environment)
    assert (environment["HF_HOME"], environment["TRITON_CACHE_DIR"]) == (str(tmp_path), str(tmp_path / "new"))
    assert environment["MPLCONFIGDIR"].startswith(environment["HOME"])
    assert f"MPLCONFIGDIR is /proc/no/way, which cannot be made here; {environment['MPLCONFIGDIR']} is used" in own[1]


def test_a_folder_for_temporary_files_that_cannot_be_written_is_not_used(own: tuple[OwnFolders, list[str]]) -> None:
    environment = {"TMPDIR": "/proc/none"}
    own[0].use_temporary_folder(environment)
    assert environment == {}
    assert own[1] == ["TMPDIR is /proc/none, which cannot be written on this node; /tmp is used"]
    folder = own[0].make("node")
    assert folder is not None
    assert folder.parent == Path("/tmp")


NCCL = "TORCH_NCCL_"


@pytest.mark.parametrize(
    ("torch", "sizes"),
    [
        ((0, 0), {f"{NCCL}TRACE_BUFFER_SIZE"}),
        ((2, 7), {f"{NCCL}TRACE_BUFFER_SIZE"}),
        ((2, 8), {f"{NCCL}TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"}),
        ((2, 10), {f"{NCCL}TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"}),
        ((2, 11), {"TORCH_FR_BUFFER_SIZE"}),
    ],
)
def test_the_flight_recorder_goes_by_the_names_of_this_torch(
    own: tuple[OwnFolders, list[str]], torch: tuple[int, int], sizes: set[str]
) -> None:
    environment: dict[str, str] = {}
    own[0].record_collectives(Path("/run/flight"), torch, environment)
    assert {name for name in environment if name.endswith("BUFFER_SIZE")} == sizes
    assert {environment.pop(name) for name in sizes} == {"2000"}
    pipes = environment.pop(f"{NCCL}DEBUG_INFO_PIPE_FILE")
    assert environment == {
        "TORCH_FR_DUMP_TEMP_FILE": "/run/flight/rank_",
        f"{NCCL}DEBUG_INFO_TEMP_FILE": "/run/flight/rank_",
        f"{NCCL}DUMP_ON_TIMEOUT": "1",
    }
    os.mkfifo(f"{pipes}0.pipe")  # on this node's own disk
    own[0].remove()
    assert not Path(pipes).parent.exists()


@pytest.mark.parametrize("names", [("TRACE_BUFFER_SIZE", "DEBUG_INFO_TEMP_FILE"), ("BUFFER_SIZE", "DUMP_TEMP_FILE")])
def test_who_has_set_one_of_two_names_of_the_flight_recorder_meant_both(
    own: tuple[OwnFolders, list[str]], names: tuple[str, str]
) -> None:
    prefix = NCCL if names[0].startswith("TRACE") else "TORCH_FR_"
    set_already = {prefix + names[0]: "50", prefix + names[1]: "/mine", f"{NCCL}DUMP_ON_TIMEOUT": "0"}
    environment = {**set_already, f"{NCCL}DEBUG_INFO_PIPE_FILE": "/pipes"}
    own[0].record_collectives(Path("/run/flight"), (2, 9), environment)
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "50", f"{NCCL}TRACE_BUFFER_SIZE": "50", "TORCH_FR_DUMP_TEMP_FILE": "/mine",
        f"{NCCL}DEBUG_INFO_TEMP_FILE": "/mine", f"{NCCL}DUMP_ON_TIMEOUT": "0", f"{NCCL}DEBUG_INFO_PIPE_FILE": "/pipes",
    }  # fmt: skip
