"""The shipped training script, for real: two processes on this machine's CPU under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.base import Rendered
from llmlaunch.backends.checkpoints import checkpoint_bytes
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import TRAINER
from support.step_lines import parse_step

pytestmark = pytest.mark.frameworks

TINY = (
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 256}",
    "training.sequence_length=64",
    "training.global_batch_size=8",
    "training.steps=12",
    "training.learning_rate=0.01",
)
MIXTURE = "model.moe={num_experts: 4, topk: 2, ffn_hidden_size: 96}"
SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(program: list[str], environment: dict[str, str], processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node_rank=0"]
    command += [f"--nproc_per_node={processes}", "--rdzv_backend=static", "--master_addr=127.0.0.1"]
    command += [f"--master_port={free_port()}", "--max_restarts=0", *program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **environment}, text=True, start_new_session=True, **pipes)


def lay_out(folder: Path, layout: Layout, *overrides: str) -> Rendered:
    """The rendered files in `folder`, as `llmlaunch render` would lay them."""
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), (*TINY, *overrides))
    rendered = DeepSpeed().render(recipe, layout)
    for name, content in rendered.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return rendered


def start(folder: Path, rendered: Rendered) -> subprocess.Popen[str]:
    """The rendered job, as train.sh would start it."""
    words = [f"{folder}{word.suffix}" if isinstance(word, NodeVariable) else word for word in rendered.program]
    return torchrun(words, dict(rendered.environment))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors. Nothing it started outlives it."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def losses(output: str) -> list[float]:
    lines = [parse_step(line) for line in output.splitlines()]
    return [line.loss for line in lines if line is not None and line.loss is not None]


def test_it_learns(tmp_path: Path) -> None:
    layout = Layout(data=2, micro_batch_size=2, zero_stage=2, recompute=RECOMPUTE_FULL)
    code, out, err = finish(start(tmp_path, lay_out(tmp_path, layout)))
    assert code == 0, err
    seen = losses(out)
    assert len(seen) == 12
    assert seen[-1] < seen[0] - 1.0, "the loss does not fall"


def test_a_mixture_trains_in_bf16(tmp_path: Path) -> None:
    layout = Layout(data=2, micro_batch_size=4, zero_stage=2)
    code, out, err = finish(start(tmp_path, lay_out(tmp_path, layout, MIXTURE, "training.precision=bf16")))
    assert code == 0, err
    assert losses(out)[-1] < losses(out)[0] - 0.5


def saving(folder: Path, interval: int, steps: int) -> tuple[str, ...]:
    place = f"training.checkpoint_path={folder / 'checkpoints'}"
    return (f"training.save_interval={interval}", place, f"training.steps={steps}")


def tell(process: subprocess.Popen[str], ranks: int, until_it_ends: bool = False) -> None:
    """SIGTERM to so many trainers after a few steps, as a node's wrapper sends it; again and again where asked."""
    assert process.stdout is not None
    for line in process.stdout:
        seen = parse_step(line)
        if seen is not None and seen.step == 3:
            break
    trainers = [pid for pid in children(process.pid) if b"train.py" in command_line(pid)][:ranks]
    assert len(trainers) == ranks
    while True:
        for pid in trainers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not until_it_ends or process.poll() is not None:
            return
        time.sleep(0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_told_to_end_it_saves_and_goes_on_as_if_never_interrupted(tmp_path: Path, stage: int) -> None:
    """One rank alone is told, between two regular saves; all agree."""
    layout, steps = Layout(data=2, micro_batch_size=4, zero_stage=stage), 200
    whole = tmp_path / "whole"
    code, undisturbed, err = finish(start(whole, lay_out(whole, layout, f"training.steps={steps}")))
    assert code == 0, err
    told = start(tmp_path, lay_out(tmp_path, layout, *saving(tmp_path, 1000, steps)))
    tell(told, ranks=1)
    code, out, err = finish(told)
    assert code == 0, err
    saved = re.search(r"^saved step (\d+) after SIGTERM$", out, re.MULTILINE)
    assert saved is not None, out
    assert 3 < int(saved[1]) < steps
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{saved[1]}"
    code, rest, err = finish(start(tmp_path, lay_out(tmp_path, layout, *saving(tmp_path, 1000, steps))))
    assert code == 0, err
    assert rest.splitlines()[0] == f"resumed after step {saved[1]}"
    assert losses(rest) == pytest.approx(losses(undisturbed)[int(saved[1]) :], abs=2e-4)
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{steps}"


def test_signals_while_it_saves_do_not_disturb_it(tmp_path: Path) -> None:
    layout = Layout(data=2, micro_batch_size=4, zero_stage=1)
    told = start(tmp_path, lay_out(tmp_path, layout, *saving(tmp_path, 5, 100_000)))
    tell(told, ranks=2, until_it_ends=True)
    code, out, err = finish(told)
    assert code == 0, err
    assert "after SIGTERM" in out.splitlines()[-1]
    step = int((tmp_path / "checkpoints" / "latest").read_text().removeprefix("step-"))
    code, out, err = finish(start(tmp_path, lay_out(tmp_path, layout, *saving(tmp_path, 5, step + 1))))
    assert code == 0, err
    assert f"step {step + 1}/{step + 1} | loss" in out


def test_a_checkpoint_that_is_not_whole_is_named_and_not_loaded(tmp_path: Path) -> None:
    """DeepSpeed alone would go on without the optimizer's states."""
    layout = Layout(data=2, micro_batch_size=4, zero_stage=1)
    code, _, err = finish(start(tmp_path, lay_out(tmp_path, layout, *saving(tmp_path, 2, 4))))
    assert code == 0, err
    folder = tmp_path / "checkpoints"
    written = sum(path.stat().st_size for path in (folder / "step-4").iterdir())
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), (*TINY, *saving(tmp_path, 2, 4)))
    assert written == pytest.approx(checkpoint_bytes(recipe), rel=0.03)  # what the lead time is derived from
    next((folder / "step-4").glob("*zero_pp_rank_1_*")).unlink()
    code, _, err = finish(start(tmp_path, lay_out(tmp_path, layout, *saving(tmp_path, 2, 6))))
    assert code != 0
    assert "names step-4, which holds the optimizer states of 1 ranks; this job has 2" in err
    (folder / "latest").write_text("step-40")
    code, _, err = finish(start(tmp_path, lay_out(tmp_path, layout, *saving(tmp_path, 2, 6))))
    assert code != 0
    assert err.count("latest names step-40, which is missing") == 1
    assert "there are step-2, step-4" in err


def test_a_loss_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    rendered = lay_out(tmp_path, Layout(data=2, micro_batch_size=4, zero_stage=1))
    model = tmp_path / "trainer" / "model.json"
    model.write_text(json.dumps({**json.loads(model.read_text()), "rms_norm_eps": float("nan")}))
    code, _, err = finish(start(tmp_path, rendered))
    assert code != 0
    assert err.count("step 1: the loss is nan") == 1


REFUSING = """
import datetime, os, sys, time
sys.path.insert(0, sys.argv[1])
import group
group.MEETING = datetime.timedelta(seconds=float(sys.argv[3]))
group.join()
if os.environ["RANK"] in sys.argv[2].split(","):
    time.sleep(int(os.environ["RANK"]))
    group.refuse("the data has gone")
time.sleep(600)
"""


@pytest.mark.parametrize(("refusing", "seconds"), [("0,1", 30), ("1", 1)])
def test_what_ranks_refuse_is_said_once_by_whichever_sees_it(tmp_path: Path, refusing: str, seconds: int) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    words = [str(tmp_path / "refusing.py"), str(TRAINER.parent), refusing, str(seconds)]
    code, _, err = finish(torchrun(words, {"DS_ACCELERATOR": "cpu"}))
    assert code != 0
    assert err.count("the data has gone") == 1, err[-2000:]
    assert err.count("Said by rank 1 on ") == (refusing == "1")
    assert 'refusing.py", line' not in err  # no traceback but of torchrun


@pytest.mark.faults
def test_a_rank_that_dies_fails_the_job(tmp_path: Path) -> None:
    layout = Layout(data=2, micro_batch_size=4, zero_stage=1)
    process = start(tmp_path, lay_out(tmp_path, layout, "training.steps=100000"))
    assert process.stdout is not None
    for line in process.stdout:
        if parse_step(line) is not None:
            break
    victim = next(pid for pid in children(process.pid) if b"train.py" in command_line(pid))
    os.kill(victim, signal.SIGKILL)
    code, _, _ = finish(process)
    assert code != 0


def test_the_idle_trainer_is_measured() -> None:
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    began = time.time()
    code, out, err = finish(torchrun([str(TRAINER), "--measure-baseline"], environment, processes=1))
    assert code == 0, err
    said = json.loads(out.splitlines()[-1])
    assert said["event"] == "baseline"
    assert 200e6 < said["resident_bytes"] <= said["resident_peak_bytes"] < 2e9
    assert not built_since(began), "an extension was compiled; the quickstart must not wait for a compiler"


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def built_since(moment: float) -> list[Path]:
    place = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    return [path for path in place.rglob("*.so") if path.stat().st_mtime >= moment]
