"""The steps that trainers' lines report, as the parser of the product reads them."""

from __future__ import annotations

from llmlaunch.frameworks.base import ProgressLines
from llmlaunch.frameworks.logs import known_trainers_lines
from llmlaunch.rundir.step_lines import Step, StepLines


def parser_of(lines: ProgressLines) -> StepLines:
    return StepLines(lines.step_patterns, lines.slow_patterns)


def parse_step(line: str) -> Step | None:
    """Return the step that a line of Megatron-LM or of the shipped DeepSpeed script reports."""
    return parser_of(known_trainers_lines()).step_of(line.encode())
