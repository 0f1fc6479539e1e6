"""Progress is read from what trainers print, new bytes only, whatever becomes of the files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from llmlaunch.backends.base import ProgressLines
from llmlaunch.backends.logs import any_script_lines, deepspeed_lines, megatron_lines
from llmlaunch.node.progress import MOST_BYTES_A_LINE, MOST_BYTES_A_LOOK, NodeLogs, Step, Words

OURS = b"step 5/40 | loss 3.1234 | 0.52 s/step | 1969 tokens/s\n"
MEGATRON = (
    b" [2026-08-22 15:22:22.000000] iteration        2/      10 | consumed samples:          256 | "
    b"elapsed time per iteration (ms): 1250.0 | throughput per GPU (TFLOP/s/GPU): 401.5 | learning rate: 1.000000E-04 |"
    b" global batch size:   128 | lm loss: 1.000000E+01 | loss scale: 1.0 | grad norm: 1.000 | "
    b"number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
ATTEMPT = "17.0"


def words(lines: ProgressLines) -> Words:
    return Words(asdict(lines))


def read(lines: ProgressLines, text: bytes) -> list[Step]:
    return words(lines).read(text.splitlines()).steps


class Logs:
    """The logs of one attempt, and their reader."""

    def __init__(self, directory: Path, lines: ProgressLines) -> None:
        self.directory = directory
        self.reader = NodeLogs(directory, ATTEMPT, words(lines), nodes=100)

    def path(self, node: str) -> Path:
        return self.directory / f"{ATTEMPT}.{node}.log"

    def write(self, text: bytes, node: str = "node1") -> None:
        with self.path(node).open("ab") as file:
            file.write(text)

    def steps(self, everywhere: bool = False) -> list[int | None]:
        return [step.step for step in self.reader.look(everywhere).steps]


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path, deepspeed_lines())


def step(number: int) -> bytes:
    return f"step {number}/40 | loss 3.1 | 0.52 s/step | 1969 tokens/s\n".encode()


def test_each_trainers_own_line() -> None:
    assert read(deepspeed_lines(), OURS) == [Step(5, 40, 3.1234, 1969.0, 0.52)]
    assert read(megatron_lines(), MEGATRON) == [Step(2, 10, 10.0, None, 1.25)]


def test_fields_a_flag_switches_off_are_unknown() -> None:
    assert read(megatron_lines(), b" iteration      100/     200 | consumed samples:            1 |") == [
        Step(100, 200, None, None, None)
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"steps: 20 loss: 6.1250 iter time (s): 0.512 samples/sec: 31.2", Step(20, None, 6.125, None, 0.512)),
        (b"[2026-01-01] [INFO] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[]", Step(10, None, None, None, None)),
        (b"{'loss': 2.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.1}", Step(None, None, 2.5, None, None)),
        (b"{'loss': '2.5', 'learning_rate': '1e-05', 'epoch': '0.1'}", Step(None, None, 2.5, None, None)),
        (b" 30%|###       | 12/40 [00:10<00:23,  1.20it/s]", Step(12, 40, None, None, None)),
        (b"iter 7: loss 4.25, time 250.00ms, mfu 10%", Step(7, None, 4.25, None, None)),
        (b"\x1b[31mstep:  3  \x1b[32mloss:  7.50  \x1b[33mmemory: 1GiB", Step(3, None, 7.5, None, None)),
    ],
)
def test_lines_of_scripts_of_the_persons_own(line: bytes, expected: Step) -> None:
    assert read(any_script_lines(40), line) == [expected]


@pytest.mark.parametrize(
    "line",
    [
        b"Downloading: 12/400 [00:10<00:23,  1.20it/s]",
        b"step 1: loading the data",
        b"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.00",
        b"\xff\xfe\x00\x01 garbage",
    ],
)
def test_other_lines_are_no_steps(line: bytes) -> None:
    assert read(any_script_lines(40), line) == []


@pytest.mark.parametrize(
    "line",
    [
        b"[2026-08-22 15:22:22.000000] saving checkpoint at iteration      40 to /ckpt in torch_dist format",
        b"saving step 40",
        b"[INFO] Saving model checkpoint: /ckpt/global_step40",
        b"Saving model checkpoint to out/checkpoint-40",
        b"***** Running Evaluation *****",
        b"Evaluating on 1024 samples",
    ],
)
def test_what_says_that_something_slow_begins(line: bytes) -> None:
    both = words(any_script_lines(40))
    assert both.read([line]).slow
    assert not both.read([line, OURS]).slow
    assert both.read([OURS, line]).slow


def test_only_new_lines_are_read(logs: Logs) -> None:
    logs.write(step(1) + step(2))
    assert logs.steps() == [1, 2]
    assert logs.steps() == []
    logs.write(step(3))
    assert logs.steps() == [3]


def test_a_torn_line_is_read_when_it_is_whole(logs: Logs) -> None:
    logs.write(step(1)[:20])
    assert logs.steps() == []
    logs.write(step(1)[20:])
    assert logs.steps() == [1]


def test_a_progress_bar_goes_back_to_the_start_of_its_line(tmp_path: Path) -> None:
    logs = Logs(tmp_path, any_script_lines(40))
    logs.write(b"\r  1/40 [00:01<00:39,  1.0it/s]\r  2/40 [00:02<00:38,  1.0it/s]\r")
    assert logs.steps() == [1, 2]


def test_logs_of_other_attempts_of_the_job_and_of_the_monitor_are_not_read(logs: Logs) -> None:
    for name in ("17.1.node1.log", f"{ATTEMPT}.job.log", f"{ATTEMPT}.node1.monitor.log", "117.0.node1.log"):
        (logs.directory / name).write_bytes(step(9))
    assert logs.steps(everywhere=True) == []


def test_files_that_come_late_are_cut_or_replaced(logs: Logs) -> None:
    assert logs.steps() == []
    logs.write(step(1) + step(2))
    assert logs.steps() == [1, 2]
    logs.path("node1").write_bytes(step(3))
    assert logs.steps() == [3]
    fresh = logs.directory / "fresh"
    fresh.write_bytes(step(4) + step(5))
    fresh.replace(logs.path("node1"))
    assert logs.steps() == [4, 5]
    logs.path("node1").unlink()
    assert logs.steps() == []


def test_an_unreadable_directory_and_a_folder_in_a_logs_place_are_no_news(logs: Logs) -> None:
    logs.path("node1").mkdir()
    assert logs.steps() == []
    logs.path("node1").rmdir()
    logs.directory.rmdir()
    assert logs.steps(everywhere=True) == []


def test_noise_is_read_from_its_end(logs: Logs) -> None:
    logs.write(step(1))
    assert logs.steps() == [1]
    with logs.path("node1").open("ab") as file:
        file.truncate(100 * 2**20)  # zeros: one line of 100 MB
    logs.write(b"\n" + b"\xff" * MOST_BYTES_A_LOOK + b"\n" + step(2))
    assert logs.steps() == [2]
    logs.write(b"x" * 2 * MOST_BYTES_A_LINE)
    assert logs.steps() == []
    logs.write(b"x\n" + step(3))
    assert logs.steps() == [3]


def test_whoever_speaks_is_read_at_every_look_and_the_others_in_turn(logs: Logs) -> None:
    nodes = [f"node{number:03}" for number in range(100)]
    for node in nodes:
        logs.write(b"starting\n", node)
    logs.write(step(1), nodes[-1])
    found = [logs.steps() for _ in range(4)]
    assert found.count([1]) == 1
    logs.write(step(2), nodes[-1])
    assert logs.steps() == [2]
    logs.write(b"saving step 2\n", nodes[0])
    assert any(logs.reader.look().slow for _ in range(30))
    logs.write(b"saving step 2\n", nodes[0])
    assert logs.reader.look().slow
    logs.write(step(3), nodes[50])
    assert logs.steps(everywhere=True) == [3]


@pytest.mark.parametrize(
    ("lines", "text", "loss"),
    [
        (deepspeed_lines(), OURS.replace(b"3.1234", b"nan"), "nan"),
        (megatron_lines(), MEGATRON.replace(b"1.000000E+01", b"NAN"), "nan"),
        (megatron_lines(), MEGATRON.replace(b"1.000000E+01", b"INF"), "inf"),
        (
            megatron_lines(),
            MEGATRON.replace(b" lm loss: 1.000000E+01 |", b"").replace(b"norm: 1.000", b"norm: nan"),
            "nan",
        ),
        (any_script_lines(10), b"steps: 20 loss: nan iter time (s): 0.500 samples/sec: 8.0", "nan"),
        (any_script_lines(10), b"{'loss': 'nan', 'grad_norm': 'nan', 'learning_rate': '1e-05', 'epoch': '0.5'}", "nan"),
        (any_script_lines(10), b"step 7 | loss=-inf", "-inf"),
        (any_script_lines(10), b"iter 7: loss NaN, time 250ms", "nan"),
    ],
)
def test_a_loss_that_is_not_finite_is_read_as_what_it_is(lines: ProgressLines, text: bytes, loss: str) -> None:
    (found,) = read(lines, text)
    assert str(found.loss) == loss
