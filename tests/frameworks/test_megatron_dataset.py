"""Real Megatron core finds every index the step before the training built: its own parser and dataset builder."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import MEGATRON_DATASET

pytestmark = pytest.mark.frameworks

PYTHON = Path(__file__).resolve().parents[2] / ".venv-frameworks" / "bin" / "python"
TRACED = Path(__file__).with_name("traced")
SECONDS = 300
RANKS = 2
SMALL = ("training.sequence_length=128", "training.global_batch_size=16", "training.steps=50", "nodes=1")


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    command = [str(PYTHON), str(TRACED / "dataset_ranks.py"), *words]
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=everything, stdout=PIPE, stderr=STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


def indexer(data: str) -> list[str]:
    """The words of the rendered step, for a training of two ranks on what the recipe says of its `data`."""
    recipe = load_recipe(asset("recipes", "llama3-8b.yaml"), (*SMALL, f"data={data}"))
    rendered = MegatronLM().render(recipe, Layout(data=RANKS, zero_stage=1))
    assert rendered.prepare[1:3] == ("--world-size", str(recipe.world_size))
    words = [str(MEGATRON_DATASET), "--world-size", str(RANKS), *rendered.prepare[3:]]
    return [str(TRACED / "pretrain_gpt.py") if isinstance(word, NodeVariable) else word for word in words]


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def train(words: list[str]) -> list[str]:
    """What the ranks of the training say that comes after the step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    training = words[words.index(str(TRACED / "pretrain_gpt.py")) :]
    ranks = [start("train", *training, **meeting, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(RANKS)]
    told = list(map(finish, ranks))
    assert [code for code, _ in told] == [0] * RANKS, told
    return [said for _, said in told]


def test_the_training_finds_every_index_and_builds_none(tmp_path: Path) -> None:
    dataset = tmp_path / "text_document"
    assert finish(start("make", str(dataset)))[0] == 0
    words = indexer(f"{{path: {dataset}}}")
    sweep = [finish(build) for build in (start("build", *words), start("build", *words))]  # two runs begin together
    said = "".join(text for _, text in sweep)
    assert [code for code, _ in sweep] == [0, 0], said
    assert said.count("Build and save the GPTDataset train indices") == 1
    before = files(tmp_path)
    assert len([path for path in before if "GPTDataset-train" in path]) == 4, said  # description and three indexes
    for rank, said in enumerate(train(words)):
        assert f"rank {rank}: " in said
        assert "Build and save" not in said
    assert files(tmp_path) == before


def test_a_blend_is_built_in_its_cache_and_found_there(tmp_path: Path) -> None:
    parts = [tmp_path / name for name in ("a_document", "b_document")]
    assert [finish(making)[0] for making in [start("make", str(part)) for part in parts]] == [0, 0]
    blend = ", ".join(f"{{path: {part}, weight: {weight}}}" for part, weight in zip(parts, (3, 1), strict=True))
    cache = tmp_path / "made" / "by_the_step"
    words = indexer(f"{{blend: [{blend}], cache_path: {cache}}}")
    code, said = finish(start("build", *words))
    assert code == 0, said
    assert said.count("Build and save the GPTDataset train indices") == 2
    before = files(tmp_path)
    assert all(path.startswith(str(cache)) for path in before if path.endswith(".npy"))
    assert len([path for path in before if "BlendedDataset-train" in path]) == 3  # description and two indexes
    for rank, said in enumerate(train(words)):
        assert f"rank {rank}: " in said
        assert "Build and save" not in said
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_said_in_one_sentence(tmp_path: Path) -> None:
    dataset = tmp_path / "text_document"
    assert finish(start("make", str(dataset)))[0] == 0
    dataset.write_text("a file where the indexes would go")
    code, said = finish(start("build", *indexer(f"{{path: {dataset}}}")))
    assert code == 1
    assert "where you may not write, name another folder: data.cache_path: /some/folder" in said
    assert "Traceback" not in said
