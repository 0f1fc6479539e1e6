"""A run with uneven stages: its script says them as they are, and its record tells them again."""

from __future__ import annotations

import json
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_samples import megatron_70b, plan

from llmlaunch.backends.megatron.arguments import written_layout
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.calibration.cases import case_of
from llmlaunch.layout import Layout
from llmlaunch.rendering.provenance import Provenance
from llmlaunch.rendering.run_directory import run_files
from llmlaunch.rendering.run_json import measurement_template

RECIPE = megatron_70b()[0]
LAYERS = RECIPE.model.num_layers


@st.composite
def splits(draw: st.DrawFn) -> Layout:
    """80 layers over two to eight stages of one or two chunks."""
    pipeline, chunks = draw(st.sampled_from([2, 4])), draw(st.integers(1, 2))
    stages = pipeline * chunks
    cuts = st.lists(st.integers(1, LAYERS - 1), min_size=stages - 1, max_size=stages - 1, unique=True)
    before = sorted(draw(cuts))
    layers = tuple(b - a for a, b in zip([0, *before], [*before, LAYERS], strict=True))
    split = () if len(set(layers)) == 1 else layers
    data = 512 // (8 * pipeline)
    return Layout(8, pipeline, chunks, data=data, sequence_parallel=1, zero_stage=1, layers_by_stage=split)


@given(layout=splits())
def test_the_record_of_a_run_tells_its_stages_again(layout: Layout) -> None:
    record = measurement_template(RECIPE, plan(RECIPE, layout), MegatronLM().render(RECIPE, layout))
    assert case_of(json.loads(json.dumps(record))).layout == layout


@pytest.mark.parametrize("split", [(20, 21, 20, 19), (10, 10, 10, 10, 10, 10, 11, 9)])
def test_the_shell_hands_a_written_layout_on_as_one_word(split: tuple[int, ...]) -> None:
    layout = Layout(8, 4, len(split) // 4, data=16, sequence_parallel=1, zero_stage=1, layers_by_stage=split)
    rendered = MegatronLM().render(RECIPE, layout)
    files = run_files(RECIPE, plan(RECIPE, layout), {"recipe": RECIPE.name}, rendered, Provenance(code={}))
    word = written_layout(split)
    line = next(line for line in files["train.sh"].decode().splitlines() if line.startswith("program="))
    say = f'MEGATRON_LM_PATH=/opt\n{line}\nprintf "%s\\n" "${{program[@]}}"'
    printed = subprocess.run(["bash", "-c", say], capture_output=True, text=True, check=True).stdout
    assert word in printed.splitlines()
