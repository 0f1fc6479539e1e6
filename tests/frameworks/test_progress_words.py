"""The lines Megatron core prints, put together from its own source, are those the watchdog knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmlaunch.backends.logs import megatron_lines
from support.step_lines import parser_of

pytestmark = pytest.mark.frameworks

SITE_PACKAGES = next((Path(__file__).resolve().parents[2] / ".venv-frameworks").glob("lib/python*/site-packages"), None)


def source(name: str) -> str:
    assert SITE_PACKAGES is not None, "no Megatron core in .venv-frameworks: make install-frameworks"
    return (SITE_PACKAGES / "megatron" / "training" / name).read_text()


def test_the_training_line() -> None:
    formats = re.findall(r"log_string \+?= f?[\"'](.*?)[\"'](?:\.format\(|$)", source("training.py"), re.MULTILINE)
    iteration = next(text for text in formats if "iteration {" in text)
    elapsed = next(text for text in formats if "elapsed time per iteration" in text)
    other = next(text for text in formats if re.fullmatch(r" \{\}: \{:\.6E\} \|", text))
    begin, words = iteration.format(12, 40) + elapsed.format(1250.0), parser_of(megatron_lines())
    lines = [begin + other.format("lm loss", loss) for loss in (3.5, 0.0)]  # 0.0: every step of it was skipped
    one, none = words.read(line.encode() for line in lines).steps
    assert (one.step, one.steps, one.seconds, one.loss) == (12, 40, 1.25, 3.5)
    assert (none.step, none.steps, none.seconds, none.loss) == (12, 40, 1.25, None)


def test_a_save_and_an_evaluation() -> None:
    words = parser_of(megatron_lines())
    for text in (source("checkpointing.py"), source("training.py")):
        told = re.findall(r"print_rank_0\(\s*f(.*?)\n\s*\)|print_rank_0\(f(.*?)\)\n", text, re.DOTALL)
        lines = [re.sub(r"\{.*?\}|[\"'\n]| +f", "7", "".join(parts)) for parts in told]
        assert any(words.read([line.encode()]).slow for line in lines)
