"""Runs for reports: one with restarts on eight GPUs, and one of thousands of ranks and a hundred thousand steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from llmlaunch.units import GIB
from support.store_run_dirs import STARTED, RunDir, gpu

STEP_PATTERN = r"iteration +(?P<step>\d+)/ *(?P<steps>\d+).*\(ms\): (?P<milliseconds>[\d.]+).*loss: (?P<loss>\S+)"
LIMIT, CARD = 74 * GIB, 79 * GIB
PACE = 12.0  # seconds of a step


def restarted_run(path: Path, **names: Any) -> RunDir:
    """Two nodes of four GPUs, two pipeline ranks: three attempts. A GPU died at step 140, a hang was ended at 260, and
    the third went on from step 240 to the end, 400."""
    run = _described(RunDir(path, kind="gpu", nodes=2, devices=4, pipeline=2), steps=400, **names)
    lives = ((0, 140, "gpu", 120), (120, 260, "hang", 240), (240, 400, None, None))
    began = STARTED
    for number, (first, last, cause, saved) in enumerate(lives):
        began = _live(run, f"77.{number}", began, first, last, cause, saved)
    return run


def huge_run(path: Path, nodes: int = 2000, steps: int = 100_000) -> RunDir:
    """Eight GPUs on each node in 16 pipeline ranks, with their account as the job's last act wrote it."""
    run = _described(RunDir(path, kind="gpu", nodes=nodes, devices=8, pipeline=16), steps=steps)
    names = [f"n{number}" for number in range(nodes)]
    run.write("attempts/77.0/attempt.json", _beginning("77.0", names, STARTED, 0))
    ranks = [
        {"rank": rank, "pipeline_rank": rank * 16 // (8 * nodes), "node": names[rank // 8], "gpu_uuid": f"GPU-{rank}"}
        | {"peak_bytes": (50 + rank % 7) * GIB, "peak_source": "nvml process list"}
        for rank in range(8 * nodes)
    ]
    files = {"attempts/77.0/progress.json": 0}
    run.write("attempts/77.0/progress.json", {"schema": 1, "step": steps, "steps": steps})
    files["attempts/77.0/progress.json"] = (path / "attempts/77.0/progress.json").stat().st_size
    summary = {"schema": 1, "attempt": "77.0", "ranks": ranks, "nodes": [], "files": files, "damaged": {}}
    run.write("attempts/77.0/summary.json", summary | {"step": steps, "steps_run": steps})
    with (path / "logs" / f"77.0.{names[-1]}.log").open("w") as log:
        log.writelines(_line(step, steps) for step in range(1, steps + 1))
    ended = {"schema": 1, "attempt": "77.0", "state": "succeeded", "exit_code": 0, "ended_at": STARTED + PACE * steps}
    run.write("status.json", ended | {"step": steps})
    return run


def _described(run: RunDir, steps: int, **names: Any) -> RunDir:
    """Add what a report reads of the plan."""
    stages = run.run["pipeline"]
    patterns = {"step_patterns": [STEP_PATTERN], "slow_patterns": [], "promised": True}
    run.run |= {
        "progress": patterns | {"steps": steps, "tokens_per_step": 1_048_576},
        "overrides": ["nodes=2"],
        **names,
    }
    run.run["predicted_bytes"] = [(62 - 2 * stage) * GIB if stage < 8 else 48 * GIB for stage in range(stages)]
    run.run["measurement"]["model"]["name"] = "llama3-8b"
    run.write("run.json", run.run)
    memory = {"limit_bytes": LIMIT, "memory_bytes": CARD}
    plan = {"recipe": "tiny", "verdict": "safe", "memory": memory, "step_seconds": 11.2}
    layout = {"tensor": 4, "pipeline": stages, "data": 1, "micro_batch_size": 2}
    run.write("plan.json", plan | {"layout": layout, "tokens_per_second_per_gpu": 11_700.0})
    return run


def _beginning(attempt: str, nodes: list[str], began: float, first: int) -> dict[str, Any]:
    record = {"schema": 1, "attempt": attempt, "layout": "", "fallback": False, "cluster": "c", "nodes": nodes}
    return record | {"started_at": began, "from_step": first, "tracker_step": None, "note": ""}


def _live(
    run: RunDir, attempt: str, began: float, first: int, last: int, cause: str | None, saved: int | None
) -> float:
    """Write one attempt; returns when the next one begins."""
    ended = began + 240 + PACE * (last - first)
    run.write(f"attempts/{attempt}/attempt.json", _beginning(attempt, ["n0", "n1"], began, first))
    run.ranks(attempt, started_at=began + 30, ended_at=ended - 5, exit_code=int(cause is not None))
    with (run.path / "logs" / f"{attempt}.n1.log").open("w") as log:
        log.writelines(_line(step, 400) for step in range(first + 1, last + 1))
    for node in range(2):
        for moment in range(0, int(ended - began), 60):
            grown = 1 - math.exp(-moment / 150)
            cards = [_card(node, index, grown) for index in range(4)]
            run.line(f"n{node}", "beat", attempt, gpus=cards, processes=[], time=began + moment)
    run.write(f"attempts/{attempt}/progress.json", {"schema": 1, "step": last, "steps": 400, "step_seconds": PACE})
    why = None if cause is None else {"schema": 1, "kind": cause, "node": "n1", "rank": 5, "line": "as it was logged"}
    following = {"action": "end" if cause is None else "requeue", "why": "", "layout": "", "seconds": 0}
    changes = {"cause": why, "step": last, "saved_step": saved or last, "next": following, "ended_at": ended}
    run.status(attempt, "succeeded" if cause is None else "failed", int(cause is not None), **changes)
    (run.path / "attempts" / attempt / "status.json").write_text((run.path / "status.json").read_text())
    return ended + 420


def _card(node: int, index: int, grown: float) -> dict[str, Any]:
    held = (60.5 - 3.1 * node - 0.4 * index) * grown + 1
    rank = 4 * node + index
    peak = int((held - 1) * GIB)
    return gpu(index, f"n{node}", held, process_peak_bytes={str(1000 + rank): peak}, used_bytes=int(held * GIB))


def _line(step: int, steps: int) -> str:
    """As Megatron-LM logs it; every hundredth step is slow."""
    pace = PACE * 1000 * (1 + 0.03 * math.sin(step * 1.7) + (0.4 if step % 100 == 0 else 0))
    loss = 2.1 + 8.5 * math.exp(-step / 60) + 0.06 * math.sin(step * 2.3)
    return f" iteration {step:8d}/ {steps:8d} | elapsed time per iteration (ms): {pace:.1f} | lm loss: {loss:.6E} |\n"
