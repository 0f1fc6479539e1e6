"""`llmlaunch rehearse` around its tracer: what it is given, what becomes of every answer, and of none.

The tracer's Python is a few lines that answer as the real one would, too slow for here: what real frameworks answer is
in tests/frameworks/test_rehearsals.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers import local_gpus
from llmlaunch.rehearsal import place
from llmlaunch.units import GIB
from support.command_line import CommandLine, Output
from support.json_schemas import validate
from support.recipes import recipe_of

RECIPES = Path(__file__).parents[3] / "recipes"
DENSE = str(RECIPES / "llama3-8b.yaml")
FEW = "context: 1, micro_batch_size: 1, layers_by_stage: even, recompute: none, offload_modules: []"
PIPELINE = f"layout={{tensor: 4, pipeline: 4, virtual_pipeline: 1, {FEW}}}"
SCHEMA = json.loads((RECIPES.parent / "docs" / "schemas" / "rehearse.schema.json").read_text())

Rehearse = Callable[..., Output]

ANSWERS = """\
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    trace = {"peak_bytes": PEAK, "seconds": 1.5, "microbatches": 64, "microbatches_run": [4, 6],
             "versions": {"megatron-core": "0.19.2"}, "allocator": {"reserved_bytes": {"default": 0, "expandable": 1}},
             "at_peak": [], "state": {}, "lasting": [], "peak_phase": "backward"}
    print("a line of somebody else's")
    print(json.dumps({"name": job["name"], "trace": trace}), flush=True)
"""


def frameworks(folder: Path, program: str = ANSWERS, peak: int = 30 * GIB, core: str = "0.19.2") -> Path:
    """An environment whose Python runs `program` whatever it is asked to."""
    environment_folder = folder / "frameworks"
    packages = environment_folder / "lib" / "python3.11" / "site-packages" / f"megatron_core-{core}.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {core}\n")
    python = environment_folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable}\n{program.replace('PEAK', str(peak))}")
    python.chmod(0o755)
    return environment_folder


@pytest.fixture
def rehearse(llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """`llmlaunch rehearse` beside an environment, with further variables."""

    def run(environment: Path, *arguments: str | Path, code: int = 0, **variables: str) -> Output:
        for name, value in {"LLMLAUNCH_FRAMEWORKS": str(environment), **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(environment.parent)
        return llmlaunch("rehearse", *arguments, code=code)

    return run


def mistake(rehearse: Rehearse, environment: Path, *arguments: str | Path) -> str:
    """Return the one message of a `rehearse` that must fail."""
    answer = rehearse(environment, *arguments, code=2)
    assert answer.stdout == ""
    message = answer.stderr.partition("error: ")[2]
    assert message
    return message


def test_the_result_alone_is_on_stdout_in_its_stable_shape(rehearse: Rehearse, tmp_path: Path) -> None:
    answer = rehearse(frameworks(tmp_path), DENSE, PIPELINE, "--on", "trace", "--rank", "all", "--json")
    result = json.loads(answer.stdout)
    validate(result, SCHEMA)
    assert result["verdict"] == result["predicted_verdict"] == "safe"
    assert [rank["pipeline_rank"] for rank in result["ranks"]] == [0, 1, 2, 3]
    for rank in result["ranks"]:
        assert (rank["on"], rank["peak_kind"], rank["rehearsed_bytes"]) == ("trace", "allocated", 30 * GIB)
        assert rank["predicted_bytes"] > 0
        assert rank["stands_for"] == [rank["pipeline_rank"]]
        assert sum(rank["device_parts"].values()) == rank["device_bytes"] <= rank["limit_bytes"]
    assert "pipeline rank 3: traced in 2 s" in answer.stderr


def test_a_person_reads_predicted_against_rehearsed_and_what_is_next(rehearse: Rehearse, tmp_path: Path) -> None:
    answer = rehearse(frameworks(tmp_path), DENSE, PIPELINE, "--on", "trace")
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("llama3-8b: safe  TP4 PP4")
    for part in (
        "predicted  rehearsed  difference",
        "allocated peak",
        "communicators *",
        "* from the estimate: no single rank shows it",
        "a replay, which no GPU has validated yet",
        "6 of 64 micro-batches a step were run",
        "3 pipeline ranks keep their estimate",
        "Verdict: safe.",
        "megatron-core 0.19.2",
    ):
        assert part in answer.stdout, part
    assert lines[-1] == f"Next: llmlaunch submit {DENSE} '{PIPELINE}'"


def test_what_was_rehearsed_before_is_shown_and_not_chosen_again_if_refuted(rehearse: Rehearse, tmp_path: Path) -> None:
    variables = {"XDG_DATA_HOME": str(tmp_path / "data")}
    tracer = frameworks(tmp_path)
    rehearse(tracer, DENSE, PIPELINE, "--on=trace", "--rank=1", **variables)
    again = rehearse(tracer, DENSE, PIPELINE, "--on=trace", "--rank=2", "--json", **variables)
    shown = rehearse(tracer, DENSE, PIPELINE, "--on=trace", "--rank=2", **variables)
    assert "Rehearsed before, GiB per device: pipeline rank 1" in shown.stdout
    too_much = frameworks(tmp_path / "much", peak=75 * GIB)
    over = rehearse(too_much, DENSE, PIPELINE, "--on=trace", "--rank=0", "--json", code=3, **variables)
    assert json.loads(over.stdout)["layout"] == json.loads(again.stdout)["layout"]
    another = rehearse(tracer, DENSE, PIPELINE, "--on=trace", "--json", **variables)
    assert json.loads(another.stdout)["layout"] != json.loads(over.stdout)["layout"]
    assert json.loads(over.stdout)["ranks"][0]["left_out"][0]["technique"] == "tp_comm_overlap"
    assert "layouts left out: refuted by a rehearsal" in another.stderr, "as planned, and as it was traced"


def test_more_than_the_limit_is_exit_code_3_with_the_next_layout(rehearse: Rehearse, tmp_path: Path) -> None:
    tracer = frameworks(tmp_path, peak=78 * GIB)
    answer = rehearse(tracer, DENSE, f"layout={{{FEW}}}", "--on", "trace", "--rank", "0", "--json", code=3)
    result = json.loads(answer.stdout)
    validate(result, SCHEMA)
    assert (result["predicted_verdict"], result["verdict"]) == ("safe", "unsafe")
    assert result["next_layout"]["layout"] != result["layout"]
    shown = rehearse(tracer, DENSE, f"layout={{{FEW}}}", "--on", "trace", "--rank", "0", code=3)
    assert "Next layout: " in shown.stdout
    assert "llmlaunch submit" not in shown.stdout


def test_a_plan_that_is_unsafe_is_rehearsed_all_the_same(rehearse: Rehearse, tmp_path: Path) -> None:
    pins = "layout={tensor: 1, pipeline: 1, context: 1, micro_batch_size: 4, recompute: none, offload_layers: 0}"
    stays = rehearse(frameworks(tmp_path, peak=90 * GIB), DENSE, pins, "--on", "trace", "--json", code=3)
    assert json.loads(stays.stdout)["verdict"] == "unsafe"
    fits = rehearse(frameworks(tmp_path / "less", peak=40 * GIB), DENSE, pins, "--on", "trace", "--json")
    assert json.loads(fits.stdout)["verdict"] == "safe"
    assert "the estimate alone said unsafe" in json.loads(fits.stdout)["reasons"]


DYING = "import sys; print('no room left', file=sys.stderr); sys.exit(7)"


def failing(kind: str) -> str:
    failure = {"kind": kind, "what": "unrecognized arguments: --x (megatron/training/arguments.py:9)", "detail": "a\nb"}
    return (
        "import json, sys\n"
        "for line in sys.stdin:\n"
        f"    print(json.dumps({{'name': json.loads(line)['name'], 'failure': {failure!r}}}))\n"
    )


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (failing("refused"), "pipeline rank 0: Megatron-LM refuses these arguments: unrecognized arguments: --x"),
        (failing("dishonest"), "pipeline rank 0: the trace would not have been true"),
        (failing("error"), "pipeline rank 0: the trace failed: unrecognized"),
        (DYING, "no room left"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL) before it was done"),
    ],
)
def test_why_no_rank_was_traced_is_one_message(rehearse: Rehearse, tmp_path: Path, program: str, message: str) -> None:
    assert message in mistake(rehearse, frameworks(tmp_path, program), DENSE, PIPELINE, "--on", "trace", "--json")


def test_ctrl_c_ends_the_tracer_and_all_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids) + '.new'!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids) + '.new'!r}, {str(pids)!r})\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "LLMLAUNCH_FRAMEWORKS": str(frameworks(tmp_path, program))}
    command = [sys.executable, "-m", "llmlaunch", "rehearse", DENSE, PIPELINE, "--on", "trace"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_for(pids.exists)
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=180)
    assert running.returncode == 130
    assert "Traceback" not in stderr
    for pid in pids.read_text().split():
        wait_for(lambda pid=pid: not lives(int(pid)))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(happened: Callable[[], bool]) -> None:
    for _ in range(3600):
        if happened():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within three minutes")


def test_the_tracers_python_gets_nothing_of_this_one(rehearse: Rehearse, tmp_path: Path) -> None:
    note = tmp_path / "environment.json"
    program = f"import json, os\njson.dump(dict(os.environ), open({str(note)!r}, 'w'))\n{ANSWERS}"
    leaks = {"PYTHONPATH": os.pathsep.join(sys.path), "VIRTUAL_ENV": "/somewhere"}
    rehearse(frameworks(tmp_path, program), DENSE, PIPELINE, "--on", "trace", **leaks)
    variables = json.loads(note.read_text())
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} & set(variables)
    assert variables["OMP_NUM_THREADS"] == "1"


def test_mistakes_are_one_message_before_anything_is_traced(rehearse: Rehearse, tmp_path: Path) -> None:
    tracer = frameworks(tmp_path, "raise SystemExit('it was started')")
    deepspeed = str(RECIPES / "llama2-7b-deepspeed.yaml")
    one = "layout={zero_stage: 1, context: 1, micro_batch_size: 1, recompute: none, techniques: asked}"
    for arguments, message in (
        ((DENSE, PIPELINE, "--rank", "4"), "pipeline ranks are 0 to 3; or say worst or all"),
        ((DENSE, PIPELINE, 'backend={name: megatron-lm, version: "0.16"}'), "the job runs Megatron core 0.16, and"),
        ((deepspeed, one, 'backend={name: deepspeed, version: "0.15.0"}'), "the job runs DeepSpeed 0.15.0, and"),
        ((deepspeed, one, "backend={name: deepspeed, script: /x.py}"), "no rank of /x.py can be run alone"),
        ((DENSE, "-o", "run"), "a trace leaves no run directory"),
        (("nowhere.yaml",), "nowhere.yaml"),
    ):
        error = mistake(rehearse, tracer, *arguments, "--on", "trace", "--json")
        assert message in error
        assert len(error.strip().splitlines()) == 1
        assert "it was started" not in error


def test_a_store_that_cannot_be_written_costs_the_record_alone(rehearse: Rehearse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = str(tmp_path / "file" / "store.db")
    answer = rehearse(frameworks(tmp_path), DENSE, PIPELINE, "--on", "trace", "--json", LLMLAUNCH_STORE=store)
    assert json.loads(answer.stdout)["recorded"] is None
    assert "warning: not recorded: " in answer.stderr


def test_what_is_named_must_be_an_environment_with_megatron(rehearse: Rehearse, tmp_path: Path) -> None:
    assert "is no such environment" in mistake(rehearse, tmp_path / "nowhere", DENSE, PIPELINE, "--on", "trace")
    empty = frameworks(tmp_path)
    for file in empty.glob("lib/*/site-packages/*/METADATA"):
        file.unlink()
        file.parent.rmdir()
    assert "holds no megatron-core" in mistake(rehearse, empty, DENSE, PIPELINE, "--on", "trace")


@pytest.mark.parametrize("where", ["auto", "gpu"])
def test_where_nothing_is_at_hand_both_ways_to_have_something_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.delenv("LLMLAUNCH_FRAMEWORKS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(place, "CHECKOUT", tmp_path)
    recipe = recipe_of("llama3-8b")
    with pytest.raises(UserError) as caught:
        place.chosen_place(recipe, where, print)
    message = str(caught.value)
    assert "llmlaunch rehearse --install-frameworks makes one" in message
    assert "on a machine that has a h100-80gb or its like, or --on gpu where there is SLURM" in message
    (tmp_path / "Makefile").touch()
    with pytest.raises(UserError, match="make install-frameworks in "):
        place.chosen_place(recipe, where, print)


ON_BRIDGE = ("backend=megatron-bridge", "training.start_from=/weights", "training.learning_rate=1.0e-5")
ADAPTED = (*ON_BRIDGE, "training.adapters={rank: 4}")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "with backend=megatron-lm behind the recipe"),
        (("data={path: /rows, format: chat, tokenizer: words}",), "backend=megatron-lm 'data={mock: true}' behind"),
        (("training.adapters={rank: 4}",), "which has no adapters"),
    ],
)
def test_what_runs_on_a_gpu_in_place_of_bridge_is_said(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as caught:
        place.chosen_place(recipe_of("llama3-8b", *ON_BRIDGE, *overrides), "gpu", print)
    assert said in str(caught.value)
    assert "is traced (--on trace)" in str(caught.value)


def test_a_job_of_bridge_is_traced_beside_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = local_gpus.LocalGpu("NVIDIA H100 80GB HBM3", "GPU-0", 80 * GIB, "9.0")
    monkeypatch.setattr(place, "gpu_at_hand", lambda _: gpu)
    monkeypatch.setenv("LLMLAUNCH_FRAMEWORKS", str(frameworks(tmp_path)))
    on_bridge, on_megatron = (
        place.chosen_place(recipe_of("llama3-8b", *each), "auto", print) for each in (ADAPTED, ())
    )
    assert (on_bridge.launcher, on_megatron.environment) == (None, None)
    assert on_bridge.environment is not None


def test_adapters_are_traced_where_bridge_is(rehearse: Rehearse, tmp_path: Path) -> None:
    tracer = frameworks(tmp_path)
    words = (DENSE, *ADAPTED, PIPELINE)
    error = mistake(rehearse, tracer, *words)
    assert f"training.adapters: {tracer} holds no megatron-bridge, whose LoRA stands beside the layers; " in error
    assert len(error.strip().splitlines()) == 1
    bridge = tracer / "lib" / "python3.11" / "site-packages" / "megatron_bridge-0.6.2.dist-info"
    bridge.mkdir()
    (bridge / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-bridge\nVersion: 0.6.2\n")
    answer = rehearse(tracer, *words, "--json")
    assert json.loads(answer.stdout)["ranks"][0]["on"] == "trace"
    other = mistake(rehearse, tracer, *words, 'backend={name: megatron-bridge, version: "0.5.0"}')
    assert "the job runs Megatron-Bridge 0.5.0, and" in other


def test_the_checkouts_environment_goes_before_the_persons_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMLAUNCH_FRAMEWORKS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(place, "CHECKOUT", tmp_path / "checkout")
    assert place.find_trace_environment() is None
    for folder in (tmp_path / "data" / "llmlaunch", tmp_path / "checkout"):
        folder.mkdir(parents=True)
        candidate = frameworks(folder)
        if folder.name == "checkout":
            candidate = candidate.rename(folder / ".venv-frameworks")
        before = place.find_trace_environment()
        assert before is None or before.folder != candidate, "its installation was interrupted"
        (candidate / ".installed").touch()
        chosen = place.find_trace_environment()
        assert chosen is not None
        assert (chosen.folder, chosen.versions) == (candidate, {"megatron-core": "0.19.2"})


def test_a_gpu_of_this_machine_is_taken_where_it_is_like_the_planned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto asks SLURM for none, and a card that is smaller or of another kind would show another peak."""
    cards = {"NVIDIA H100 80GB HBM3": (79 * GIB, (9, 0))}
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: list(cards)[index],
        "nvmlDeviceGetName": lambda card: card,
        "nvmlDeviceGetCudaComputeCapability": lambda card: cards[card][1],
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=cards[card][0]),
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    planned = recipe_of("llama3-8b").cluster.accelerator
    card_at_hand = local_gpus.gpu_at_hand(planned)
    assert card_at_hand is not None
    assert card_at_hand.name == "NVIDIA H100 80GB HBM3"
    for other in ({}, {"NVIDIA A100": (80 * GIB, (8, 0))}, {"NVIDIA H100 PCIe": (47 * GIB, (9, 0))}):
        cards.clear()
        cards.update(other)
        assert local_gpus.gpu_at_hand(planned) is None


def test_a_recipe_for_cpus_has_no_gpus_memory_to_rehearse(rehearse: Rehearse, tmp_path: Path) -> None:
    assert "trains on CPUs" in mistake(rehearse, frameworks(tmp_path), RECIPES / "quickstart.yaml")


def test_a_version_nobody_knows_is_rehearsed_as_the_one_it_is_rendered_for(rehearse: Rehearse, tmp_path: Path) -> None:
    version = 'backend={name: megatron-lm, version: "0.99"}'
    answer = rehearse(frameworks(tmp_path), DENSE, PIPELINE, version, "--on", "trace", "--json")
    remarks = json.loads(answer.stdout)["ranks"][0]["remarks"]
    assert remarks[0] == "the job runs Megatron core 0.99; this is 0.19.2, whose arguments were rendered for it"
