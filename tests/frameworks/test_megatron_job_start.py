"""What a Megatron-LM job runs before its training, with the real core: the check of its arguments, which tells what
Megatron refuses in one block, and the step that builds every index of a dataset the training will look for."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from judges import TRACED, MegatronScripts

from llmlaunch.assets import asset
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import MEGATRON_CHECK, MEGATRON_DATASET

pytestmark = pytest.mark.frameworks

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


def check(
    scripts: MegatronScripts, *extra: str, script: str = NOW, version: str = "0.19", layout: Layout = LAYOUT
) -> tuple[int, str]:
    """Return the exit code and the output of the check of a rendered job, with `extra` words."""
    where = (f"cluster={{base: h100-80gb-x8, devices_per_node: {layout.world_size}}}", "nodes=1")
    recipe = load_recipe(
        asset("recipes", "llama3-8b.yaml"), (f'backend={{name: megatron-lm, version: "{version}"}}', *where)
    )
    rendered = MegatronLM().render(recipe, layout)
    places = {"LLMLAUNCH_RUN_DIR": str(MEGATRON_CHECK), "MEGATRON_LM_PATH": str(TRACED / script)}
    words = [places[word.name] if isinstance(word, NodeVariable) else word for word in rendered.check]
    environment = {**rendered.environment, "LLMLAUNCH_RUN_DIR": "/runs/mine"}
    return scripts.start("build", *words, *extra, together=False, **environment).end()


def test_what_is_rendered_is_taken_and_another_version_is_said(scripts: MegatronScripts) -> None:
    """By the last rank, too, where parsing begins to report to a tracker (which is not installed)."""
    tracked = ("--wandb-project", "mine", "--wandb-exp-name", "this")
    code, output = check(scripts, *tracked, version="0.16", layout=Layout(zero_stage=1))
    accepted, note = output.splitlines()
    assert code == 0
    assert accepted.startswith("Megatron core 0.19.2 takes the arguments of 1 rank(s) (")
    assert note.startswith(
        "note: this checkout is Megatron core 0.19.2, but the arguments and the memory were planned for"
    )


def test_a_flag_nobody_knows_is_refused_by_the_parser_with_the_scripts_own_flags_known(
    scripts: MegatronScripts,
) -> None:
    code, output = check(scripts, "--of-the-script", "3", "--of-nobody", "4", script=BEFORE)
    assert code == 3
    assert output.startswith("Megatron-LM refuses its arguments: unrecognized arguments: --of-nobody 4\n")
    assert output.endswith("  it may be about: --of-nobody 4\n" + EXPLAINED)


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
    scripts: MegatronScripts, extra: tuple[str, ...], script: str, message: str, judge: str, flags: str
) -> None:
    code, output = check(scripts, *extra, script=script)
    assert code == 3
    assert output.startswith(f"Megatron-LM refuses its arguments: {message}\n  said by {judge}, line ")
    assert flags in output
    assert output.endswith(EXPLAINED)
    assert "Traceback" not in output


def test_where_nobody_can_say_the_job_goes_on(scripts: MegatronScripts, tmp_path: Path) -> None:
    """An interpreter without Megatron core, and a script that calls no `pretrain`."""
    script = tmp_path / "train.py"
    script.write_text("print('a loop of its own')")
    here = [str(MEGATRON_CHECK), "--world-size", "8", str(script), "--num-layers", "2"]
    here_alone = subprocess.run([sys.executable, *here], stdout=PIPE, text=True, check=False)
    for (code, output), why in (
        ((here_alone.returncode, here_alone.stdout), "ModuleNotFoundError: No module named 'megatron'"),
        (scripts.start("build", *here, together=False).end(), "ended without calling megatron.training."),
    ):
        assert code == 0
        assert output.startswith("note: the arguments were not checked: ")
        assert why in output


RANKS = 2
SMALL = ("training.sequence_length=128", "training.global_batch_size=16", "training.steps=50", "nodes=1")


def indexer(data: str) -> list[str]:
    """The words of the rendered step, for a training of two ranks on what the recipe says of its `data`."""
    recipe = load_recipe(asset("recipes", "llama3-8b.yaml"), (*SMALL, f"data={data}"))
    rendered = MegatronLM().render(recipe, Layout(data=RANKS, zero_stage=1))
    assert rendered.prepare[1:3] == ("--world-size", str(recipe.world_size))
    words = [str(MEGATRON_DATASET), "--world-size", str(RANKS), *rendered.prepare[3:]]
    return [str(TRACED / "pretrain_gpt.py") if isinstance(word, NodeVariable) else word for word in words]


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def train(scripts: MegatronScripts, words: list[str]) -> list[str]:
    """What the ranks of the training say that comes after the step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    training = words[words.index(str(TRACED / "pretrain_gpt.py")) :]
    ranks = [scripts.start("train", *training, **meeting, RANK=str(n), LOCAL_RANK=str(n)) for n in range(RANKS)]
    ended = [rank.end() for rank in ranks]
    assert [code for code, _ in ended] == [0] * RANKS, ended
    return [output for _, output in ended]


def copied(dataset: Path, place: Path) -> Path:
    for suffix in (".bin", ".idx"):
        shutil.copy(dataset.with_suffix(suffix), place.with_suffix(suffix))
    return place


def test_the_training_finds_every_index_and_builds_none(
    scripts: MegatronScripts, dataset: Path, tmp_path: Path
) -> None:
    dataset = copied(dataset, tmp_path / "text_document")
    words = indexer(f"{{path: {dataset}}}")
    runs = [scripts.start("build", *words) for _ in range(2)]  # which begin together
    sweep = [run.end() for run in runs]
    output = "".join(text for _, text in sweep)
    assert [code for code, _ in sweep] == [0, 0], output
    assert output.count("Build and save the GPTDataset train indices") == 1
    before = files(tmp_path)
    assert len([path for path in before if "GPTDataset-train" in path]) == 4, output  # description and three indexes
    for rank, output in enumerate(train(scripts, words)):
        assert f"rank {rank}: " in output
        assert "Build and save" not in output
    assert files(tmp_path) == before


def test_a_blend_is_built_in_its_cache_and_found_there(scripts: MegatronScripts, dataset: Path, tmp_path: Path) -> None:
    parts = [copied(dataset, tmp_path / name) for name in ("a_document", "b_document")]
    blend = ", ".join(f"{{path: {part}, weight: {weight}}}" for part, weight in zip(parts, (3, 1), strict=True))
    cache = tmp_path / "made" / "by_the_step"
    words = indexer(f"{{blend: [{blend}], cache_path: {cache}}}")
    code, output = scripts.start("build", *words).end()
    assert code == 0, output
    assert output.count("Build and save the GPTDataset train indices") == 2
    before = files(tmp_path)
    assert all(path.startswith(str(cache)) for path in before if path.endswith(".npy"))
    assert len([path for path in before if "BlendedDataset-train" in path]) == 3  # description and two indexes
    for rank, output in enumerate(train(scripts, words)):
        assert f"rank {rank}: " in output
        assert "Build and save" not in output
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_said_in_one_sentence(
    scripts: MegatronScripts, dataset: Path, tmp_path: Path
) -> None:
    dataset = copied(dataset, tmp_path / "text_document")
    dataset.write_text("a file where the indexes would go")
    code, output = scripts.start("build", *indexer(f"{{path: {dataset}}}")).end()
    assert code == 1
    assert "where you may not write, name another folder: data.cache_path: /some/folder" in output
    assert "Traceback" not in output
