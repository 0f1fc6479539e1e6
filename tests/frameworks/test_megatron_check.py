"""The check at job start asks the real Megatron core, and tells what it refuses in one block."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import MEGATRON_CHECK

pytestmark = pytest.mark.frameworks

PYTHON = Path(__file__).resolve().parents[2] / ".venv-frameworks" / "bin" / "python"
TRACED = Path(__file__).with_name("traced")
SECONDS = 300
LAYOUT = Layout(2, 2, data=8, sequence_parallel=1, zero_stage=1)
NOW, BEFORE = (
    "pretrain_gpt.py",
    "pretrain_gpt_0_16.py",
)  # which parse the arguments themselves, and leave it to pretrain
EXPLAINED = """\
  The arguments were rendered by llmlaunch. From which line of the recipe each follows:
    llmlaunch explain-args /runs/mine
  No step was run.
"""


def check(*extra: str, script: str = NOW, version: str = "0.19", layout: Layout = LAYOUT) -> tuple[int, str]:
    """The rendered words, and the stand-in for what this machine lacks, put before real Megatron."""
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    where = (f"cluster={{base: h100-80gb-x8, devices_per_node: {layout.world_size}}}", "nodes=1")
    recipe = load_recipe(
        asset("recipes", "llama3-8b.yaml"), (f'backend={{name: megatron-lm, version: "{version}"}}', *where)
    )
    rendered = MegatronLM().render(recipe, layout)
    places = {"LLMLAUNCH_RUN_DIR": str(MEGATRON_CHECK), "MEGATRON_LM_PATH": str(TRACED / script)}
    words = [places[word.name] if isinstance(word, NodeVariable) else word for word in rendered.check]
    environment = {**os.environ, **rendered.environment, "LLMLAUNCH_RUN_DIR": "/runs/mine"}
    done = subprocess.run(
        [str(PYTHON), str(TRACED / "dataset_ranks.py"), "build", *words, *extra],
        env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_is_rendered_is_taken_and_another_version_is_said() -> None:
    """By the last rank, too, where parsing begins to report to a tracker (which is not installed)."""
    tracked = ("--wandb-project", "mine", "--wandb-exp-name", "this")
    code, said = check(*tracked, version="0.16", layout=Layout(zero_stage=1))
    taken, note = said.splitlines()
    assert code == 0
    assert taken.startswith("Megatron core 0.19.2 takes the arguments of 1 rank(s) (")
    assert note.startswith(
        "note: this checkout is Megatron core 0.19.2, but the arguments and the memory were planned for"
    )


def test_a_flag_nobody_knows_is_refused_by_the_parser_with_the_scripts_own_flags_known() -> None:
    code, said = check("--of-the-script", "3", "--of-nobody", "4", script=BEFORE)
    assert code == 3
    assert said.startswith("Megatron-LM refuses its arguments: unrecognized arguments: --of-nobody 4\n")
    assert said.endswith("  it may be about: --of-nobody 4\n" + EXPLAINED)


@pytest.mark.parametrize(
    ("extra", "script", "message", "judge", "flags"),
    [
        (
            ("--recompute-granularity", "selective", "--recompute-method", "uniform"), NOW,
            "recompute method is not yet supported for selective recomputing granularity",
            "megatron/training/arguments.py", "--recompute-method uniform",
        ),
        (
            ("--num-attention-heads", "33"), BEFORE,
            "num_attention_heads (33) must be a multiple of tensor_model_parallel_size (2).",
            "megatron/core/transformer/transformer_config.py", "--num-attention-heads 33",
        ),
    ],
)  # fmt: skip
def test_a_combination_is_refused_in_megatrons_words_with_the_flags_in_question(
    extra: tuple[str, ...], script: str, message: str, judge: str, flags: str
) -> None:
    code, said = check(*extra, script=script)
    assert code == 3
    assert said.startswith(f"Megatron-LM refuses its arguments: {message}\n  said by {judge}, line ")
    assert flags in said
    assert said.endswith(EXPLAINED)
    assert "Traceback" not in said


def test_where_nobody_can_say_the_job_goes_on(tmp_path: Path) -> None:
    """An interpreter without Megatron core, and a script that calls no `pretrain`."""
    script = tmp_path / "train.py"
    script.write_text("print('a loop of its own')")
    here = [str(MEGATRON_CHECK), "--world-size", "8", str(script), "--num-layers", "2"]
    for command, why in (
        ([sys.executable, *here], "ModuleNotFoundError: No module named 'megatron'"),
        ([str(PYTHON), str(TRACED / "dataset_ranks.py"), "build", *here], "ended without calling megatron.training."),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("note: the arguments were not checked: ")
        assert why in done.stdout
