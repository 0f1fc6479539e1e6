"""The monitor's life beside its ranks, and what it reads of them, of the node and of its log."""

from __future__ import annotations

import os
import shlex
import signal
import sys

from support.node_rig import ATTEMPT, NODE, NodeRig, until

MIB = 2**20
# Holds 96 MiB for a moment, then waits on its standard input.
SPIKE = "import sys; block = b'x' * (96 << 20); del block; print('ready', flush=True); sys.stdin.read()"


def test_without_an_nvml_library_resident_memory_goes_on(cpu_node: NodeRig) -> None:
    trainer = cpu_node.rank("sleep", "600")
    pid = cpu_node.until_record()["program_pid"]
    monitor = cpu_node.monitor()
    cpu_node.until_line("a sample", lambda line: line.get("processes"))
    end = cpu_node.stop(monitor)
    events = [line["event"] for line in cpu_node.lines()]
    assert events[:2] == ["no_nvml", "start"]
    assert events.count("no_nvml") == 1
    assert end["gpus"] == []
    (process,) = end["processes"]
    assert (process["rank"], process["pid"]) == (0, pid)
    assert 0 < process["resident_bytes"] <= process["resident_peak_bytes"]
    assert trainer.poll() is None


def test_the_peak_is_the_kernels_own_and_outlives_the_program(cpu_node: NodeRig) -> None:
    monitor = cpu_node.monitor("--interval", "0.02")
    trainer = cpu_node.rank(sys.executable, "-c", SPIKE, rank=3)
    cpu_node.until_line("the spike", lambda line: _peak(line) > 96 * MIB)
    trainer.kill()
    (process,) = cpu_node.stop(monitor)["processes"]
    assert process["rank"] == 3
    assert process["resident_peak_bytes"] > 96 * MIB


def test_a_rank_that_ended_between_two_samples_has_its_peak_from_its_record(cpu_node: NodeRig) -> None:
    monitor = cpu_node.monitor("--interval", "600")  # not one sample between start and end
    cpu_node.until_event("start")
    trainer = cpu_node.rank(sys.executable, "-c", SPIKE.replace("sys.stdin.read()", "pass"))
    assert trainer.wait() == 0
    (process,) = cpu_node.stop(monitor)["processes"]
    assert process["resident_bytes"] is None
    assert process["resident_peak_bytes"] == cpu_node.record()["resident_peak_bytes"] > 96 * MIB


def test_ranks_of_other_nodes_are_left_to_their_monitors(cpu_node: NodeRig) -> None:
    cpu_node.rank("sleep", "600", rank=0)
    cpu_node.rank("sleep", "600", rank=1, node="node2")
    cpu_node.until_record(1)
    monitor = cpu_node.monitor()
    cpu_node.until_line("own rank", lambda line: line.get("processes"))
    assert [process["rank"] for process in cpu_node.stop(monitor)["processes"]] == [0]


def test_a_node_reads_the_file_of_its_own_ranks_alone(cpu_node: NodeRig) -> None:
    """However many others there are; a record in it that names another node is none of its own."""
    for rank, name in ((0, "node0"), (2, NODE), (3, NODE)):
        cpu_node.rank("sleep", "600", rank=rank, node=name)
        record = cpu_node.until_record(rank)
    cpu_node.write_rank({**record, "rank": 9, "node": NODE, "program_pid": None})
    monitor = cpu_node.monitor()
    cpu_node.until_line("two ranks", lambda line: len(line.get("processes", [])) == 2)
    assert [process["rank"] for process in cpu_node.stop(monitor)["processes"]] == [2, 3]


def test_it_ends_with_its_parent(cpu_node: NodeRig) -> None:
    place = shlex.join(cpu_node.place)
    shell = cpu_node.rank("sh", "-c", f"{cpu_node.python} {cpu_node.archive} monitor {place} --node {NODE} & wait")
    cpu_node.until_event("start")
    shell.kill()
    assert cpu_node.until_event("end")["signal"] == "SIGTERM"


def test_a_checkpoint_signal_does_not_end_it(cpu_node: NodeRig) -> None:
    monitor = cpu_node.monitor("--beat-interval", "0.01")
    cpu_node.until_event("start")
    before = len(cpu_node.lines())
    monitor.send_signal(signal.SIGUSR1)
    until(lambda: len(cpu_node.lines()) > before + 2, "two more lines")
    assert cpu_node.stop(monitor)["event"] == "end"


def test_a_wrong_argument_does_not_fail_the_job(cpu_node: NodeRig) -> None:
    monitor = cpu_node.start("monitor", "--run-dir")
    _, stderr = monitor.communicate()
    assert monitor.returncode == 0
    assert "--run-dir" in stderr


def test_the_nodes_main_memory_is_sampled(gpu_node: NodeRig) -> None:
    host = gpu_node.stop(gpu_node.started_monitor("gpu\n"))["host"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host["total_bytes"] == total
    assert 0 < host["used_peak_bytes"] < total
    assert set(host) == {"used_peak_bytes", "total_bytes", "cgroup_peak_bytes", "cgroup_limit_bytes"}


def test_memory_lines_of_the_nodes_own_log(cpu_node: NodeRig) -> None:
    log = cpu_node.run_directory / "logs" / f"{ATTEMPT}.{NODE}.log"
    log.parent.mkdir(parents=True)
    monitor = cpu_node.monitor("--list-interval", "0.05", "--beat-interval", "0.01")
    cpu_node.until_event("start")
    with log.open("a") as file:
        file.write("[Rank 3] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 3.0")
        file.flush()
        before = len(cpu_node.lines())
        until(lambda: len(cpu_node.lines()) > before + 3, "looks at half a line")
        file.write("0 | max reserved: 4.00\n")
    peaks = {"allocated_peak_bytes": 2 * MIB, "reserved_peak_bytes": 4 * MIB, "device_bytes": None}
    wanted = {"rank": 3, **peaks, "source": "megatron log"}
    cpu_node.until_line("the line", lambda line: line.get("logged") == [wanted])
    assert cpu_node.stop(monitor)["logged"] == [wanted]


def _peak(line: dict[str, object]) -> int:
    processes = line.get("processes")
    return max((p["resident_peak_bytes"] or 0 for p in processes), default=0) if isinstance(processes, list) else 0
