"""Run directories made by hand, as docs/run-directory.md says nodes leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmlaunch.rundir.rank_records import rank_records
from llmlaunch.units import GIB

RUN_ID = "tiny-20260101T000000Z-0001"
ATTEMPT = "77.0"
STARTED = 1_760_000_000.0


class RunDir:
    """`devices` ranks on each of `nodes` nodes n0, n1 ...; the pid of rank r is 1000 + r."""

    def __init__(
        self, path: Path, kind: str = "cpu", nodes: int = 1, devices: int = 2, pipeline: int = 1, run_id: str = RUN_ID
    ) -> None:
        self.path, self.nodes, self.devices = path, nodes, devices
        for folder in ("logs", "peaks", "attempts"):
            (path / folder).mkdir(parents=True)
        peak_kind = "resident" if kind == "cpu" else "device"
        self.run: dict[str, Any] = {
            "schema": 1,
            "name": "tiny",
            "recipe_digest": "d1",
            "backend": "deepspeed",
            "accelerator_kind": kind,
            "nodes": nodes,
            "devices_per_node": devices,
            "pipeline": pipeline,
            "peak_kind": peak_kind,
            "predicted_bytes": [(10 + stage) * GIB for stage in range(pipeline)],
            "monitor_interval_seconds": 1.0,
            "measurement": {
                "id": None,
                "family": "llmlaunch",
                "peak_kind": peak_kind,
                "peak_bytes": None,
                "pipeline_rank": None,
                "backend": "deepspeed",
                "gpu": "cpu" if kind == "cpu" else "H100",
                "world_size": nodes * devices,
                "model": {"num_layers": 2, "attention_dropout": 0.1},
            },
        }
        self.write("run.json", self.run)
        (path / "recipe.yaml").write_text("schema: 1\nname: tiny\n")
        self.write("plan.json", {"recipe": "tiny", "verdict": "safe"})
        (path / "run.id").write_text(run_id + "\n")

    @classmethod
    def rendered(cls, path: Path, devices: int = 1) -> RunDir:
        """A directory of one node that `render` wrote."""
        run = cls.__new__(cls)
        run.path, run.nodes, run.devices = path, 1, devices
        run.run = json.loads((path / "run.json").read_text())
        return run

    def write(self, name: str, value: Any) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))

    def rank(self, rank: int, attempt: str = ATTEMPT, **changes: Any) -> dict[str, Any]:
        record = {
            "v": 1,
            "rank": rank,
            "local_rank": rank % self.devices,
            "node": f"n{rank // self.devices}",
            "pid": 500 + rank,
            "program_pid": 1000 + rank,
            "started_at": STARTED + rank,
            "ended_at": STARTED + 100,
            "exit_code": 0,
            "signal": None,
            "resident_peak_bytes": (rank + 1) * GIB,
            "visible_devices": None,
            **changes,
        }
        self.append(f"attempts/{attempt}/ranks/{record['node']}.jsonl", record)
        return record

    def append(self, name: str, record: dict[str, Any]) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"\n{json.dumps(record)}\n")
        return path

    def ranks(self, attempt: str = ATTEMPT, **changes: Any) -> list[dict[str, Any]]:
        return [self.rank(rank, attempt, **changes) for rank in range(self.nodes * self.devices)]

    def line(self, node: str, event: str = "end", attempt: str = ATTEMPT, **fields: Any) -> None:
        record = {"v": 1, "event": event, "attempt": attempt, "node": node, "time": STARTED + 50, **fields}
        (self.path / "peaks").mkdir(exist_ok=True)
        with (self.path / "peaks" / f"{node}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def probe(
        self, rank: int, *, uuid: str | None = None, pid: int | None = None, ended: bool = True, **device: Any
    ) -> Path:
        """A line of the probe of a rank: 60 GiB reserved, 1.5 GiB beside it, never given back."""
        own = pid or 1000 + rank
        entry = {
            "device": rank % self.devices,
            "uuid": f"GPU-n0-{rank}" if uuid is None else uuid,
            "total_bytes": 79 * GIB,
            "allocated_peak_bytes": 50 * GIB,
            "active_peak_bytes": 51 * GIB,
            "reserved_peak_bytes": 60 * GIB,
            "reserved_bytes": 60 * GIB,
            "alloc_retries": 0,
            "ooms": 0,
            "device_used_bytes": 62 * GIB,
            "outside_bytes": 2 * GIB,
            **device,
        }
        place = {"rank": rank, "local_rank": rank % self.devices, "node": f"n{rank // self.devices}", "pid": own}
        account = {"v": 1, **place, "at": STARTED + own, "ended": ended, "devices": [entry]}
        return self.append(f"attempts/{ATTEMPT}/memory/{place['node']}.jsonl", account)

    def torn(self, node: str) -> None:
        with (self.path / "peaks" / f"{node}.jsonl").open("a") as file:
            file.write('{"v": 1, "event": "beat", "attempt": "77.0", "gpus": [{"uuid": "GPU-\n')

    def status(self, attempt: str = ATTEMPT, state: str = "succeeded", exit_code: int = 0, **changes: Any) -> None:
        ranks = rank_records(self.path / "attempts" / attempt)
        self.write(
            "status.json",
            {
                "schema": 1,
                "attempt": attempt,
                "state": state,
                "exit_code": exit_code,
                "nodes": [{"node": f"n{i}", "done": state == "succeeded"} for i in range(self.nodes)],
                "ranks": ranks,
                "ended_at": STARTED + 101,
                "why": "as told",
                **changes,
            },
        )


def gpu(
    index: int, node: str = "n0", peak_gib: float = 20, baseline_gib: float | None = 1, **fields: Any
) -> dict[str, Any]:
    """One entry of a monitor's `gpus`: 80 GiB, on the PCI bus in the order of `index`."""
    return {
        "index": index,
        "uuid": f"GPU-{node}-{index}",
        "name": "NVIDIA H100",
        "pci": f"00000000:{index + 1:02X}:00.0",
        "total_bytes": 80 * GIB,
        "reserved_bytes": GIB // 2,
        "used_bytes": GIB,
        "device_peak_bytes": int(peak_gib * GIB),
        "baseline_bytes": None if baseline_gib is None else int(baseline_gib * GIB),
        "process_peak_bytes": {},
        "accounting_peak_bytes": {},
        "samples": 3,
        "lost": False,
        **fields,
    }


def finished_cpu_run(path: Path, run_id: str = RUN_ID) -> RunDir:
    """Two ranks with resident peaks of 1 and 2 GiB by the kernel's count."""
    run = RunDir(path, run_id=run_id)
    run.ranks()
    run.line("n0", processes=[{"rank": 0, "pid": 1000, "resident_bytes": 5, "resident_peak_bytes": GIB // 2}])
    run.status()
    return run


def fallback_chain(path: Path) -> RunDir:
    """Two GPUs: the planned layout ran out of memory, fallback/1 (one pipeline rank, 8 GiB) trained to the end."""
    run = RunDir(path, kind="gpu", pipeline=2)
    other = {**run.run, "pipeline": 1, "predicted_bytes": [8 * GIB]}
    run.write("fallback/1/run.json", other | {"measurement": {**run.run["measurement"], "micro_batch_size": 1}})
    for attempt, layout, peak_gib, failed in (("77.0", "", 70, True), ("77.1", "fallback/1", 9, False)):
        later = 200 * (not failed)
        run.write(f"attempts/{attempt}/attempt.json", {"schema": 1, "attempt": attempt, "layout": layout})
        run.ranks(attempt, started_at=STARTED + later, ended_at=STARTED + later + 90, exit_code=int(failed))
        cards = [gpu(i, peak_gib=peak_gib, process_peak_bytes={str(1000 + i): peak_gib * GIB}) for i in range(2)]
        run.line("n0", attempt=attempt, gpus=cards)
        goes_on = {"action": "fallback", "layout": "fallback/1", "seconds": 0, "why": "out of memory"}
        run.status(
            attempt, "failed" if failed else "succeeded", int(failed), ended_at=STARTED + later + 91, layout=layout,
            next=goes_on if failed else {"action": "end"},
        )  # fmt: skip
        (path / "attempts" / attempt / "status.json").write_text((path / "status.json").read_text())
    return run


def tear_record(path: Path, rank: int) -> None:
    """Cut the records of a rank, as a full disk does."""
    lines = [line[: len(line) // 2] if f'"rank": {rank},' in line else line for line in path.read_text().split("\n")]
    path.write_text("\n".join(lines))
