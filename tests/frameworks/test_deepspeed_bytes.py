"""The bytes per parameter our table says DeepSpeed's classes hold, against live tensors of real engines on two ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.backends.facts.deepspeed import ENGINES, Engine, Share

pytestmark = pytest.mark.frameworks

PROGRAM = Path(__file__).with_name("deepspeed_bytes.py")
RANKS = 2
LAYERS = 16
WIDTH = 256
BUCKET = WIDTH * WIDTH  # elements: a layer
SECONDS = 150
# Of a program of its own each, because a ZeRO 3 engine leaves tensors behind: (stage, precision, accumulation).
PROGRAMS = {"zero-3": lambda row: row.stage == 3, "others": lambda row: row.stage < 3}
COUNTED = [row for row in ENGINES if row.evidence == "counted"]


def name_of(row: Engine, microbatches: int) -> str:
    return f"ZeRO {row.stage} {row.precision} {row.accumulation} x{microbatches}"


def config(row: Engine, microbatches: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": row.stage}
    if row.stage:
        zero |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, "overlap_comm": False}
    if row.stage == 3:
        nothing = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        zero |= {f"stage3_{name}": 0 for name in nothing}
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if row.precision == "half":
        made["bf16"] = {"enabled": True}
    if row.accumulation == "fp32":
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made


def run(cases: list[dict[str, Any]]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", f"--master_port={port}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(PROGRAM), json.dumps(cases)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    lines = [line for line in out.splitlines() if line.startswith("COUNTED ")]
    assert lines, err[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("COUNTED "))
    return found


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for chosen in PROGRAMS.values():
        rows = [row for row in COUNTED if chosen(row)]
        cases = [
            {
                "name": name_of(row, m),
                "precision": "fp32" if row.precision == "fp32" else "bf16",
                "config": config(row, m),
            }
            for row in rows
            for m in (1, 2)
        ]
        found |= run(cases)
    return found


def bytes_of(*shares: Share) -> float:
    return sum(whole + sharded / RANKS for whole, sharded in shares)


def buckets(row: Engine) -> float:
    """ZeRO's one bucket for good (3), per parameter."""
    width = 4.0 if row.precision == "fp32" else 2.0
    return width / LAYERS if row.stage == 3 else 0.0


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("row", COUNTED, ids=lambda row: name_of(row, 0))
def test_an_engine_holds_what_its_row_says(counted: dict[str, Any], row: Engine, microbatches: int) -> None:
    """Lasting and accumulated bytes to a hundredth of the total; peaks may hold a few layers more than their row, and
    a bucket, but no more than that."""
    found = counted[name_of(row, microbatches)]
    lasting = bytes_of(row.lasting) + buckets(row)
    assert found["class"] in (*row.name.split(", "), "NoneType")
    assert found["lasting"] == pytest.approx(lasting, rel=0.01)
    if microbatches > 1:
        assert found["accumulated"] == pytest.approx(lasting + bytes_of(row.accumulated), rel=0.01)
    earlier = (0.0, row.accumulated[1] if microbatches > 1 else 0.0)
    flattened = row.final if row.flattened else (0.0, 0.0)
    final = lasting + bytes_of(row.final, flattened, earlier)
    layers = 4.0 * (4.0 if row.precision == "fp32" else 2.0) / LAYERS
    assert final * 0.99 <= found["final"] <= final + 2.0 * layers
    assert found["step"] == pytest.approx(lasting + bytes_of(row.step), rel=0.03)
