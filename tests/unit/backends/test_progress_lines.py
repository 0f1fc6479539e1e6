"""The progress a log line reports is read from either trainer's line, and from no other."""

from __future__ import annotations

import math

import pytest

from llmlaunch.backends.logs import Progress, parse_progress

MEGATRON = (
    " [2026-08-22 15:22:22.000000] iteration        2/      10 | consumed samples:          256 | "
    "elapsed time per iteration (ms): 1250.0 | throughput per GPU (TFLOP/s/GPU): 401.5 | learning rate: 1.000000E-04 | "
    "global batch size:   128 | lm loss: 1.000000E+01 | loss scale: 1.0 | grad norm: 1.000 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_the_shipped_scripts_line() -> None:
    assert parse_progress("step 5/40 | loss 3.1234 | 0.52 s/step | 1969 tokens/s") == Progress(
        step=5, steps=40, loss=3.1234, seconds_per_step=0.52, tokens_per_second=1969.0
    )


def test_megatrons_line() -> None:
    assert parse_progress(MEGATRON) == Progress(
        step=2, steps=10, loss=10.0, seconds_per_step=1.25, tokens_per_second=None, tflops_per_gpu=401.5
    )


def test_a_line_of_skipped_steps_alone_has_no_loss() -> None:
    """Megatron-LM prints the mean of nothing as 0.0."""
    skipped = parse_progress(MEGATRON.replace("lm loss: 1.000000E+01", "lm loss: 0.000000E+00"))
    assert skipped == Progress(step=2, steps=10, seconds_per_step=1.25, tflops_per_gpu=401.5)


NAN_LINE = (  # core 0.19 prints no mean that is NaN (training_log: `if avg >= 0.0`)
    " [2026-08-22 15:22:22.000000] iteration        3/      10 | consumed samples:          384 | "
    "elapsed time per iteration (ms): 1250.0 | learning rate: 1.000000E-04 | global batch size:   128 | "
    "loss scale: 1.0 | grad norm: nan | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


@pytest.mark.parametrize(
    "line",
    [
        NAN_LINE,
        NAN_LINE.replace("grad norm: nan |", "").replace("nan iterations:   0", "nan iterations:   2"),
        MEGATRON.replace("1.000000E+01", "NAN"),
    ],
)
def test_megatron_says_in_several_ways_that_the_loss_is_nan(line: str) -> None:
    progress = parse_progress(line)
    assert progress is not None
    assert progress.loss is not None
    assert math.isnan(progress.loss)


def test_fields_a_flag_switches_off_are_unknown_not_wrong() -> None:
    bare = parse_progress(
        " iteration      100/     200 | consumed samples:  1 | elapsed time per iteration (ms): 10.0 |"
    )
    assert bare == Progress(step=100, steps=200, seconds_per_step=0.01)


@pytest.mark.parametrize("prefix", ["[default0]:", "0: ", "node-1: "])
def test_a_launchers_prefix_does_not_matter(prefix: str) -> None:
    assert parse_progress(f"{prefix}step 1/2 | loss 1.0 | 0.10 s/step | 10 tokens/s\n") is not None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step by step | nothing",
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 1.00",
        "step 5/40 | loss 3.1 | soon",
    ],
)
def test_other_lines_report_nothing(line: str) -> None:
    assert parse_progress(line) is None


def test_a_loss_that_is_no_number_is_kept_as_such() -> None:
    progress = parse_progress("step 5/40 | loss nan | 0.52 s/step | 1969 tokens/s")
    assert progress is not None
    assert progress.loss is not None
    assert progress.loss != progress.loss
