"""The steps that trainers' lines report, and the lines that report none."""

from __future__ import annotations

import pytest

from llmlaunch.frameworks.base import ProgressLines
from llmlaunch.frameworks.logs import any_script_lines, deepspeed_lines, known_trainers_lines, megatron_lines
from llmlaunch.rundir.step_lines import Step
from support.step_lines import parse_step, parser_of

OURS = b"step 5/40 | loss 3.1234 | 0.52 s/step | 1969 tokens/s\n"
MEGATRON = (
    b" [2026-08-22 15:22:22.000000] iteration        2/      10 | consumed samples:          256 | "
    b"elapsed time per iteration (ms): 1250.0 | throughput per GPU (TFLOP/s/GPU): 401.5 | learning rate: 1.000000E-04 |"
    b" global batch size:   128 | lm loss: 1.000000E+01 | loss scale: 1.0 | grad norm: 1.000 | "
    b"number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
WITHOUT_LOSS = MEGATRON.replace(b" lm loss: 1.000000E+01 |", b"")


def read(lines: ProgressLines, text: bytes) -> list[Step]:
    return parser_of(lines).read(text.splitlines()).steps


OWN = any_script_lines(40)


@pytest.mark.parametrize(
    ("lines", "line", "expected"),
    [
        (deepspeed_lines(), OURS, Step(5, 40, 3.1234, 1969.0, 0.52)),
        (megatron_lines(), MEGATRON, Step(2, 10, 10.0, None, 1.25)),
        # a flag switches fields off
        (megatron_lines(), b" iteration      100/     200 | consumed samples:            1 |", Step(100, 200)),
        # of skipped steps alone Megatron-LM prints the mean of nothing, 0.0
        (megatron_lines(), MEGATRON.replace(b"1.000000E+01", b"0.000000E+00"), Step(2, 10, None, None, 1.25)),
        (OWN, b"steps: 20 loss: 6.1250 iter time (s): 0.512 samples/sec: 31.2", Step(20, None, 6.125, None, 0.512)),
        (OWN, b"[2026-01-01] [INFO] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[]", Step(10, None, None, None, None)),
        (OWN, b"{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1}", Step(None, None, 2.5, None, None)),
        (OWN, b"{'loss': '2.5', 'learning_rate': '1e-05', 'epoch': '0.1'}", Step(None, None, 2.5, None, None)),
        (OWN, b" 30%|###       | 12/40 [00:10<00:23,  1.20it/s]", Step(12, 40, None, None, None)),
        (OWN, b"iter 7: loss 4.25, time 250.00ms, mfu 10%", Step(7, None, 4.25, None, None)),
        (OWN, b"step 7 | loss 4.25 | val loss 5.5", Step(7, None, 4.25, None, None)),
        (OWN, b"\x1b[31mstep:  3  \x1b[32mloss:  7.50  \x1b[33mmemory: 1GiB", Step(3, None, 7.5, None, None)),
    ],
)
def test_a_line_is_one_step(lines: ProgressLines, line: bytes, expected: Step) -> None:
    assert read(lines, line) == [expected]


OTHER_LINES = (
    b"Downloading: 12/400 [00:10<00:23,  1.20it/s]",
    b"step 1: loading the data",
    b"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.00",
    b"\xff\xfe\x00\x01 garbage",
)
# the loss of an evaluation is not the training's
EVALUATIONS = (
    b"Validation: step 20 loss 3.1",
    b"iteration 20 | val loss: 3.1",
    b"step 20/40 | validation loss 3.1",
    b" validation loss at iteration 20 | lm loss value: 1.0E+01 | lm loss PPL: 2.2E+04 | ",
    b"{'eval_loss': 2.5, 'eval_runtime': 3.1, 'epoch': 0.1}",
    b"validation at step 20/40 | validation loss 3.1234 | 0.31 s",
)
UNLIKE_OURS = (b"", b"step by step | nothing", b"step 5/40 | loss 3.1 | soon")


@pytest.mark.parametrize(
    ("lines", "line"),
    [(any_script_lines(40), line) for line in (*OTHER_LINES, *EVALUATIONS)]
    + [(known_trainers_lines(), line) for line in UNLIKE_OURS],
)
def test_other_lines_are_no_steps(lines: ProgressLines, line: bytes) -> None:
    assert parser_of(lines).read([line]).steps == []


@pytest.mark.parametrize(
    "line",
    [
        b"[2026-08-22 15:22:22.000000] saving checkpoint at iteration      40 to /ckpt in torch_dist format",
        b"saving step 40",
        b"[INFO] Saving model checkpoint: /ckpt/global_step40",
        b"***** Running Evaluation *****",
        b"Evaluating on 1024 samples",
    ],
)
def test_what_says_that_something_slow_begins(line: bytes) -> None:
    both = parser_of(any_script_lines(40))
    assert both.read([line]).slow
    assert not both.read([line, OURS]).slow
    assert both.read([OURS, line]).slow


@pytest.mark.parametrize(
    ("lines", "text", "loss"),
    [
        (deepspeed_lines(), OURS.replace(b"3.1234", b"nan"), "nan"),
        (megatron_lines(), MEGATRON.replace(b"1.000000E+01", b"NAN"), "nan"),
        (megatron_lines(), WITHOUT_LOSS.replace(b"nan iterations:   0", b"nan iterations:   2"), "nan"),
        (megatron_lines(), WITHOUT_LOSS.replace(b"norm: 1.000", b"norm: nan"), "nan"),
        (any_script_lines(10), b"steps: 20 loss: nan iter time (s): 0.500 samples/sec: 8.0", "nan"),
        (any_script_lines(10), b"step 7 | loss=-inf", "-inf"),
        (any_script_lines(10), b"iter 7: loss NaN, time 250ms", "nan"),
    ],
)
def test_a_loss_that_is_not_finite_is_read_as_what_it_is(lines: ProgressLines, text: bytes, loss: str) -> None:
    (step,) = read(lines, text)
    assert str(step.loss) == loss


@pytest.mark.parametrize("prefix", ["[default0]:", "0: "])
def test_a_launchers_prefix_does_not_matter(prefix: str) -> None:
    assert parse_step(f"{prefix}step 1/2 | loss 1.0 | 0.10 s/step | 10 tokens/s\n") is not None
