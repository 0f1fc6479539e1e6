"""Real Megatron-LM trains on this machine's CPU with the words our renderer makes (core 0.19.2, `pretrain` itself).

Every split of a model begins with the weights that one process saved, and must then have its losses. Every Megatron-LM
recipe of the gallery trains, too, shrunken.
"""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cpu_training import TrainedJob, TrainOnCpu
from judges import FRAMEWORKS
from trained_cases import (
    CASES,
    DATASET,
    GALLERY_LAYOUTS,
    GALLERY_OBSTACLES,
    GALLERY_STEPS,
    INDEXED,
    LONG,
    STEPS,
    UNDISTURBED,
    TrainedCase,
    gallery_jobs,
    jobs,
    long_job,
    models_of,
    recipe_for,
)

from llmlaunch.assets import asset
from llmlaunch.frameworks.checkpoints import MEGATRON_TRACKER, NON_PERSISTENT_FOLDER
from llmlaunch.frameworks.logs import megatron_lines
from llmlaunch.frameworks.megatron.command_line import pinned_layout, read_values
from llmlaunch.imports.logs import read_logs
from llmlaunch.layout import Layout
from llmlaunch.node.checkpoint_folder import CheckpointFolder, Skipped
from llmlaunch.recipe.load import load_recipe
from support.recipes import gallery_of
from support.soak import in_soak, share
from support.step_lines import parser_of

pytestmark = pytest.mark.frameworks


TRAINED = share(CASES, lambda case: case.chosen)
GALLERY = [asset("recipes", f"{name}.yaml") for name in gallery_of("megatron-lm")]
CHOSEN = ("deepseek-v3",)
GALLERY_TRAINED = share([path for path in GALLERY if path.stem in GALLERY_LAYOUTS], lambda path: path.stem in CHOSEN)


@pytest.fixture(scope="module")
def trained(
    train_megatron: TrainOnCpu, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TrainedJob]:
    folder = tmp_path_factory.mktemp("megatron")
    for suffix in (".bin", ".idx"):
        shutil.copy(dataset.with_suffix(suffix), folder / f"{DATASET}{suffix}")
    return train_megatron([*jobs(folder, TRAINED), *gallery_jobs(GALLERY_TRAINED)])


@pytest.mark.parametrize("model", models_of(TRAINED))
def test_the_loss_falls(trained: dict[str, TrainedJob], model: str) -> None:
    alone = trained[f"{model} alone"]
    assert alone.codes == (0,), alone.complaint()
    assert [step.step for step in alone.steps] == list(range(1, STEPS + 1))
    assert {step.steps for step in alone.steps} == {STEPS}
    assert all(step.seconds for step in alone.steps)
    assert alone.losses[-1] < alone.losses[0] - 0.12


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_however_it_is_split_it_learns_the_same(trained: dict[str, TrainedJob], case: TrainedCase) -> None:
    one = trained[case.name]
    assert set(one.codes) == {0}, one.complaint()
    if case.tolerance is None:
        assert one.steps[-1].step == one.steps[-1].steps
        assert one.losses[-1] < one.losses[0] - 0.15
    else:
        assert one.losses == pytest.approx(trained[f"{case.model} alone"].losses, rel=case.tolerance)


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_its_log_says_of_which_job_it_is(trained: dict[str, TrainedJob], case: TrainedCase, tmp_path: Path) -> None:
    """The arguments that Megatron prints are enough for the recipe that was rendered (`measurements import`)."""
    one = trained[case.name]
    (tmp_path / "job.log").write_text("\n".join(one.output))
    [log] = read_logs(tmp_path / "job.log")
    assert (log.steps_run, log.step_seconds is not None) == (len(one.steps), True)
    document = read_values(log.values, nodes=1, devices_per_node=one.job.processes).document
    machine = {"base": "cpu-x2", "devices_per_node": one.job.processes}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**document, "cluster": machine, "nodes": 1}))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    even = len(set(case.layout.layers_by_stage)) == 1
    assert pinned_layout(recipe) == (replace(case.layout, layers_by_stage=()) if even else case.layout)
    model = recipe_for(case.model, case.overrides).model
    same = {"name": recipe.model.name}
    if model.mla is not None:
        same["qk_layernorm"] = recipe.model.qk_layernorm  # latents have norms, whatever is said of them
    assert recipe.model == replace(model, **same)


def test_every_job_behind_the_table_of_flags_ended_well(trained: dict[str, TrainedJob], tmp_path: Path) -> None:
    """docs/megatron-flags.md says "trained on CPU" of the flags of these jobs, and of no other."""
    behind_the_table = [trained[job.name] for job in jobs(tmp_path, TRAINED)]
    assert {run.job.name: run.codes for run in behind_the_table if any(run.codes)} == {}
    assert all(run.steps for run in behind_the_table)


def test_it_reads_an_indexed_dataset(trained: dict[str, TrainedJob]) -> None:
    """Random tokens teach nothing: the loss is that of a guess among 1000."""
    assert trained[INDEXED].losses == pytest.approx([6.9] * STEPS, abs=0.2)


def test_told_to_end_it_saves_and_goes_on_under_any_split(
    train_megatron: TrainOnCpu, trained: dict[str, TrainedJob], tmp_path: Path
) -> None:
    """One rank alone is told, and all agree. Then split by tensors, in `make soak` also as before; and another, which
    goes on from a non-persistent checkpoint, the one before the last."""
    told = train_megatron([replace(long_job("told", tmp_path / "told"), told_after=3)])["told"]
    assert told.codes == (0, 0), told.complaint()
    saved = int((tmp_path / "told" / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < LONG, told.complaint()
    shutil.copytree(tmp_path / "told", tmp_path / "copy")
    again = in_soak(long_job("again", tmp_path / "told"))
    otherwise = long_job("otherwise", tmp_path / "copy", Layout(tensor=2, zero_stage=1))
    earlier = long_job("earlier", died_with_its_last_save_torn(trained[UNDISTURBED], tmp_path / "died"))
    for one in train_megatron([*again, otherwise, earlier]).values():
        begun_at = 10 if one.job.name == "earlier" else saved
        first, second, *rest = trained[UNDISTURBED].losses[begun_at:]
        assert one.codes == (0, 0), one.complaint()
        assert one.steps[0].step == begun_at + 1
        # The first line after a start is not taken out of the second (training_log of training.py, core 0.19).
        assert one.losses == pytest.approx([first, (first + second) / 2, *rest], rel=1e-5)
    newest = (tmp_path / "died" / "non_persistent").iterdir()
    assert sorted(path.name for path in newest if path.is_dir()) == ["iter_0000010", "iter_0000015"]


def died_with_its_last_save_torn(undisturbed: TrainedJob, copy: Path) -> Path:
    """A copy of its checkpoints as if it had died before its end: what was durable is gone, and the non-persistent one
    of step 15 is not whole, so that the job goes on from the one before it."""
    shutil.copytree(undisturbed.job.rendered[undisturbed.job.rendered.index("--save") + 1], copy)
    shutil.rmtree(copy / f"iter_{LONG:07d}")
    (copy / MEGATRON_TRACKER).unlink()
    checkpoint = {"path": str(copy), "tracker": MEGATRON_TRACKER, "non_persistent": NON_PERSISTENT_FOLDER}
    folder = CheckpointFolder(checkpoint)
    assert sorted(folder.steps()) == [10, 15]
    (folder.folder_of(15) / ".metadata").unlink()
    assert folder.newest_whole(15) == (10, (Skipped(15, "non_persistent/iter_0000015 has no .metadata"),))
    folder.name(10)
    return copy


def test_no_recipe_of_the_gallery_is_left_out() -> None:
    assert {path.stem for path in GALLERY} == {*GALLERY_LAYOUTS, *GALLERY_OBSTACLES}
    assert not GALLERY_LAYOUTS.keys() & GALLERY_OBSTACLES.keys()


@pytest.mark.parametrize("recipe", [path.stem for path in GALLERY_TRAINED])
def test_a_recipe_of_the_gallery_trains(trained: dict[str, TrainedJob], recipe: str) -> None:
    job = trained[recipe]
    assert set(job.codes) == {0}, job.complaint()
    assert [step.step for step in job.steps] == list(range(1, GALLERY_STEPS + 1))
    assert all(map(math.isfinite, job.losses))
    assert job.losses[-1] < job.losses[0]


def source(name: str) -> str:
    """Return a module of Megatron's training."""
    return next(FRAMEWORKS.glob(f"lib/python*/site-packages/megatron/training/{name}")).read_text()


def test_the_training_line_of_megatrons_own_source_is_known_to_the_watchdog() -> None:
    formats = re.findall(r"log_string \+?= f?[\"'](.*?)[\"'](?:\.format\(|$)", source("training.py"), re.MULTILINE)
    iteration = next(text for text in formats if "iteration {" in text)
    elapsed = next(text for text in formats if "elapsed time per iteration" in text)
    other = next(text for text in formats if re.fullmatch(r" \{\}: \{:\.6E\} \|", text))
    begin, words = iteration.format(12, 40) + elapsed.format(1250.0), parser_of(megatron_lines())
    lines = [begin + other.format("lm loss", loss) for loss in (3.5, 0.0)]  # 0.0: every step of it was skipped
    one, none = words.read(line.encode() for line in lines).steps
    assert (one.step, one.steps, one.seconds, one.loss) == (12, 40, 1.25, 3.5)
    assert (none.step, none.steps, none.seconds, none.loss) == (12, 40, 1.25, None)


def test_so_are_a_save_and_an_evaluation() -> None:
    words = parser_of(megatron_lines())
    for text in (source("checkpointing.py"), source("training.py")):
        prints = re.findall(r"print_rank_0\(\s*f(.*?)\n\s*\)|print_rank_0\(f(.*?)\)\n", text, re.DOTALL)
        lines = [re.sub(r"\{.*?\}|[\"'\n]| +f", "7", "".join(parts)) for parts in prints]
        assert any(words.read([line.encode()]).slow for line in lines)
