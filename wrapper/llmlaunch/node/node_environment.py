"""The environment of the ranks of a node: what run.json's `launch` says, and what only the node knows: which Python
trains, where caches can be written, what this torch calls its flight recorder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..rundir import file_names
from ..rundir.file_names import attempt_folder
from ..rundir.files import replace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    Environment = MutableMapping[str, str]

PROBE_VARIABLE = "LLMLAUNCH_PROBE"
MOST_OPEN_FILES = 2**20
"""Programs that close all files they might have open take minutes at the billion of some containers."""
TOKENIZER_SECONDS = 600.0
_TORCH_VERSION = (
    # An empty entry of sys.path is the working directory, which all nodes share.
    "import sys; sys.path[:] = filter(None, sys.path)\n"
    "import importlib.util, importlib.metadata as metadata\n"
    "if importlib.util.find_spec('torch') is None: sys.exit(1)\n"
    "try: print('torch', metadata.version('torch'))\n"
    "except metadata.PackageNotFoundError: pass\n"
)
_LOAD_TOKENIZER = "import sys; from transformers import AutoTokenizer; AutoTokenizer.from_pretrained(sys.argv[1])"


class NodeError(Exception):
    """Why this node cannot train: one sentence for a person."""


class TrainingPython(NamedTuple):
    path: str
    torch: tuple[int, int]  # (2, 13); (0, 0) where it does not say


def value_of(word: Any, environment: Mapping[str, str]) -> str:
    """Return a word of `launch`: text, or the value of a variable followed by a suffix. Raises NodeError."""
    if not isinstance(word, dict):
        return str(word)
    name = str(word["variable"])
    if name not in environment:
        raise NodeError(f"the variable {name} is not set on this node, and the rendered job uses it")
    return environment[name] + str(word.get("suffix", ""))


def export_launch(launch: Mapping[str, Any], environment: Environment) -> None:
    """Set the variables of the recipe, the framework and the site, and what is imported first. Raises NodeError where
    one lacks that must be set on every node."""
    for name, word in launch["environment"].items():
        environment[name] = value_of(word, environment)
    for folder in launch["python_path"]:
        if not isinstance(folder, dict) or environment.get(folder["variable"]):
            put_first(environment, value_of(folder, environment))
    for name in launch["required_variables"]:
        if not environment.get(name):
            raise NodeError(
                f"{name} is needed on every node; set it in the environment or the setup lines of the recipe, or where "
                "you submit"
            )


def put_first(environment: Environment, folder: str) -> None:
    """Put a folder first on PYTHONPATH."""
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{folder}:{others}" if others else folder


def export_tracking(
    launch: Mapping[str, Any],
    run_directory: Path,
    layout: Path,
    environment: Environment,
    on_disk: Callable[[Callable[[], None]], None],
) -> None:
    """One run of Weights & Biases for this run directory: restarts, follow-up jobs and fallback layouts go on with it.
    Its key comes from the environment that submitted, or from `wandb login` on this machine. `on_disk` does later what
    it is given. Raises NodeError."""
    wandb = launch.get("wandb")
    if wandb is None:
        return
    run_id = (run_directory / file_names.RUN_ID).read_text(encoding="utf-8").strip()
    environment["WANDB_RUN_ID"], environment["WANDB_RESUME"] = re.sub(r"[^A-Za-z0-9_-]", "-", run_id), "allow"
    environment["WANDB_NAME"] = wandb["name"] or run_id
    environment["WANDB_DIR"] = wandb["save_dir"] or str(run_directory)
    if wandb["save_dir"]:
        try:
            Path(wandb["save_dir"]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot make the folder of Weights & Biases, {wandb['save_dir']}: {error.strerror}"
            raise NodeError(reason) from error
    # The prediction. wandb.init, seconds after a rank begins, makes this file of the working directory the run's
    # configuration.
    config = run_directory / "config-defaults.yaml"
    if launch["workdir"]:  # the trainers start in another folder
        environment["WANDB_CONFIG_PATHS"] = str(config)
    on_disk(lambda: _copy_if_possible(layout / "wandb-config.json", config))


def _copy_if_possible(source: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        replace_bytes(target, source.read_bytes(), lasting=False)


def threads_on_host(devices: int, environment: Environment) -> str:
    """Share the cores of this task among its ranks, whose optimizers step on them. What is set stays. Returns the
    threads of a rank, as OpenMP reads them: `8`, or `8,2` where they start more."""
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // devices))
    return environment["OMP_NUM_THREADS"]


def training_python(launch: Mapping[str, Any], environment: Mapping[str, str]) -> TrainingPython:
    """Return the Python of the recipe, else of LLMLAUNCH_PYTHON, else the first on PATH that has torch. In a container
    the interpreter of the host does not count. Raises NodeError."""
    of_host = "" if launch["in_container"] and "SLURM_JOB_ID" in environment else environment.get("LLMLAUNCH_PYTHON")
    named = launch["python"] or of_host
    candidates = [named] if named else ["python3", "python"]
    for candidate in candidates:
        version = _torch_of(candidate, environment)
        if version is not None:
            return TrainingPython(shutil.which(candidate, path=environment.get("PATH")) or candidate, version)
    advice = "python: in the recipe" if launch["in_container"] else "python: in the recipe, or LLMLAUNCH_PYTHON"
    raise NodeError(f"no torch in {' '.join(candidates)}: name the training environment's interpreter ({advice})")


def _torch_of(python: str, environment: Mapping[str, str]) -> tuple[int, int] | None:
    try:
        answer = subprocess.run(
            [python, "-c", _TORCH_VERSION],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    except OSError:
        return None
    if answer.returncode:
        return None
    match = re.match(r"(\d+)\.(\d+)", answer.stdout.rpartition("torch ")[2])  # it may say more than it was asked
    return (int(match[1]), int(match[2])) if match else (0, 0)


def raise_open_files_limit() -> int:
    """Raise the limit of open files to what may be had, and return it; 0 where there is none. srun speaks with every
    node, and each rank keeps two connections to node rank 0, where the ranks meet: a soft limit of 1,024 starves 512.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return 0 if soft == resource.RLIM_INFINITY else soft


def raise_open_files(rank: int, launch: Mapping[str, Any]) -> str:
    """Raise the limit of open files. Returns a warning where it is too low for the ranks that meet here, else ""."""
    most = raise_open_files_limit()
    if rank or not most or most >= launch["open_files"]:
        return ""
    return (
        f"warning: this node may have {most} files open (ulimit -Hn), and {launch['world_size']} ranks that meet here "
        f"may need {launch['open_files']}; ask for a higher LimitNOFILE of slurmd"
    )


class OwnFolders:
    """Folders of this node's own disk, removed in the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._folders: list[Path] = []

    def use_temporary_folder(self, environment: Environment) -> None:
        folder = environment.get("TMPDIR")
        if folder and not os.access(folder, os.W_OK):
            self._say(f"TMPDIR is {folder}, which cannot be written on this node; /tmp is used")
            del environment["TMPDIR"]
        tempfile.tempdir = environment.get("TMPDIR") or "/tmp"

    def make(self, name: str) -> Path | None:
        """Return a new folder; None where this node's disk takes none."""
        for place in dict.fromkeys([tempfile.gettempdir(), "/tmp"]):
            with contextlib.suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix=f"llmlaunch-{name}.", dir=place))
                self._folders.append(folder)
                return folder
        return None

    def remove(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def make_caches(self, run_directory: Path, attempt: str, node: str, environment: Environment) -> None:
        """Where no home can be written, as in most containers and on sites that keep homes off their nodes, compilers
        keep their caches on this node while it trains, and what is downloaded stays in the run directory. A setting of
        the person's own is kept if its folder exists or can be made."""
        home = environment.get("HOME", "")
        if home and os.access(home, os.W_OK):
            return
        caches = self.make("caches")
        if caches is None:
            caches = attempt_folder(run_directory, attempt) / "caches" / node
            self._folders.append(caches)
        if not os.path.isdir(home):  # noqa: PTH112 - it may be empty
            self._say(f"HOME is {home or 'empty'}, which is not on this node; {caches} is used")
            with contextlib.suppress(OSError):
                caches.mkdir(parents=True, exist_ok=True)
                environment["HOME"] = str(caches)  # for what keeps its settings there
        self._use_cache("XDG_CACHE_HOME", caches, environment)
        for name, folder in (
            ("TRITON_CACHE_DIR", "triton"),
            ("TORCHINDUCTOR_CACHE_DIR", "torchinductor"),
            ("CUDA_CACHE_PATH", "cuda"),
            ("MPLCONFIGDIR", "matplotlib"),
        ):
            self._use_cache(name, caches / folder, environment)
        self._use_cache("HF_HOME", run_directory / "cache" / "huggingface", environment)

    def _use_cache(self, name: str, folder: Path, environment: Environment) -> None:
        chosen = environment.get(name)
        if chosen:
            with contextlib.suppress(OSError):
                Path(chosen).mkdir(parents=True, exist_ok=True)
                return
            self._say(f"{name} is {chosen}, which cannot be made here; {folder} is used")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            environment[name] = str(folder)

    def record_collectives(self, flight: Path, torch: tuple[int, int], environment: Environment) -> None:
        """PyTorch's flight recorder: what each rank's NCCL was doing, written to attempts/<attempt>/flight/ after a
        time-out, and when the rank's pipe is written to. What is set already stays; of a variable with two names, who
        set either meant both. The pipes are in a folder of this node: not every shared file system has pipes, and a
        trainer that cannot make its own is ended by PyTorch."""
        old_file, file = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"
        old_size, size = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
        dumps = environment.get(file) or environment.get(old_file) or str(flight / "rank_")
        events = environment.get(size) or environment.get(old_size) or "2000"
        environment[file] = environment[old_file] = dumps
        environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        if torch >= (2, 8):
            environment[size] = events
        if torch < (2, 11):  # read for the pipe until 2.10, and warned of after that
            environment[old_size] = events
        pipes = self.make("flight")
        if pipes is not None:
            with contextlib.suppress(OSError):
                os.mkfifo(pipes / "probe")
                environment.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(pipes / "rank_"))


def fetch_tokenizer(python: str, tokenizer: str, environment: Environment) -> str:
    """Fetch the tokenizer once on each node: every rank would ask the hub for it, and that answers 429 to hundreds.
    Returns what is said of it; nothing where who has set a word on the hub meant it."""
    if environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE"):
        return ""

    def load(**variables: str) -> str:
        """Return the last line of an error. A traceback in the log would be taken for what ended the training."""
        try:
            done = subprocess.run(
                [python, "-c", _LOAD_TOKENIZER, tokenizer],
                env={**environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=TOKENIZER_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else ""

    problem = load(HF_HUB_OFFLINE="1") and (load() or load(HF_HUB_OFFLINE="1"))
    if problem:
        return f"the tokenizer {tokenizer} is not in this node's cache ({problem}); each rank asks the hub for it"
    environment["HF_HUB_OFFLINE"] = "1"
    return f"the tokenizer {tokenizer} is in this node's cache; the ranks load it offline (HF_HUB_OFFLINE=1)"


def probe_variable(run_directory: Path, attempt: str, node: str, rank: int, local_rank: int) -> str:
    """Return what starts this rank's memory probe, in the trainer and in what that starts (trainers/hook.py)."""
    place = {"run": str(run_directory), "attempt": attempt, "node": node, "rank": rank, "local_rank": local_rank}
    return json.dumps(place)
