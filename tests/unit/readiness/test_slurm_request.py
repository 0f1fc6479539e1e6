"""What SLURM could never start, and a training that does not fit its time limit, are named before the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.readiness.readiness import Readiness, in_sentences
from llmlaunch.readiness.slurm_request import listed_partitions, request_findings
from llmlaunch.recipe.load import load_recipe
from llmlaunch.units import DAY, HOUR
from support.command_line import CommandLine
from support.recipes import recipe_text

# As sinfo 22.05.8 prints "%P|%a|%l|%L|%s|%D|%t|%G|%m" (src/sinfo/opts.c names the fields): a line for each group of
# nodes that are alike.
LISTED = """\
gpu*|up|1-00:00:00|1:00:00|1-16|6|idle|gpu:h100:8(S:0-1)|2000000
gpu*|up|1-00:00:00|1:00:00|1-16|2|drain*|gpu:h100:8(S:0-1)|2000000
long|up|14-00:00:00|n/a|1-infinite|2|mix|gpu:a100:4|1000000
open|up|infinite|n/a|1-infinite|64|alloc|gpu:h100:8|2000000
cpu|up|infinite|n/a|1-infinite|9|idle|(null)|256000
old|inact|infinite|n/a|1-infinite|4|idle|gpu:h100:8|2000000
"""
SAVED = "training={sequence_length: 64, global_batch_size: 32, steps: 9, save_interval: 3, checkpoint_path: /tmp/x}"


def requested(folder: Path, *overrides: str, seconds: float = 60.0, listed: str = LISTED) -> Readiness:
    path = folder / "recipe.yaml"
    path.write_text(recipe_text())
    recipe = load_recipe(path, overrides)
    return in_sentences(recipe, request_findings(recipe, seconds, listed))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['slurm.time="2-00:00:00"'], "slurm.time: 2 d 0 h are more than partition gpu allows, 24 h 0 min"),
        (["nodes=12"], "nodes: 12 nodes, and partition gpu has 8; take fewer"),
        (["nodes=20", "slurm.partition='gpu,long'"], "20 nodes, and partition gpu/long has 8"),
        (["slurm.partition=cpu"], "8 GPUs a node, and no node of partition cpu has so many (there are none)"),
        (["slurm.partition=long", "nodes=1"], "no node of partition long has so many (there are a100:4)"),
        (["slurm.mem=3000G"], "slurm.mem: 3000G are more than any node of partition gpu has, 2000000M"),
    ],
)
def test_what_could_never_start_is_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    assert any(message in sentence for sentence in requested(tmp_path, *overrides).missing)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slurm.partition=gpus"], "slurm.partition: this SLURM has no partition gpus that you may use; write gpu"),
        (["slurm.partition=zzz"], "has no partition zzz that you may use; it has gpu, long, open, cpu, old"),
        (["slurm.partition=old"], "old is not up"),
        (["nodes=7"], "7 nodes, and 6 of partition gpu are usable now"),
    ],
)
def test_what_sbatch_judges_or_time_may_mend_is_warned_of(overrides: list[str], message: str, tmp_path: Path) -> None:
    request = requested(tmp_path, *overrides)
    assert request.missing == ()
    assert message in request.doubtful[0]


def test_without_a_default_partition_one_must_be_named(tmp_path: Path) -> None:
    listed = LISTED.replace("gpu*|", "gpu|")
    assert "has no default partition; set slurm.partition" in requested(tmp_path, listed=listed).doubtful[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ['slurm.time="1-00:00:00"', "slurm.mem=0"],
        ["slurm.partition=open", "nodes=64", 'slurm.time="30-0"'],
        ["slurm.clusters=elsewhere", "nodes=500"],
        ["slurm.partition='cpu,gpu'"],
    ],
)
def test_what_fits_is_let_pass(overrides: list[str], tmp_path: Path) -> None:
    assert requested(tmp_path, *overrides) == Readiness()


@pytest.mark.parametrize("listed", ["", "what is this\n|||||\n"])
def test_a_slurm_that_says_nothing_is_no_reason_to_complain(listed: str, tmp_path: Path) -> None:
    assert requested(tmp_path, "nodes=500", listed=listed) == Readiness()


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["slurm.time=60"], "doubtful", "all of it lost; write training.save_interval"),
        ([], "doubtful", "slurm: the training takes about 2 d 0 h, and its time limit is 60 min"),
        (["slurm.time=60", SAVED, "restart=none"], "doubtful", "restart: none keeps it from going on"),
        (["slurm.time=60", SAVED], "doubtful", "that is 48 starts, and restart.times allows 20 restarts"),
        (["slurm.time=720", SAVED], "notes", "it comes back about 3 times from its last checkpoint"),
    ],
)
def test_a_training_longer_than_its_time_limit_is_told(
    overrides: list[str], kind: str, message: str, tmp_path: Path
) -> None:
    assert message in getattr(requested(tmp_path, *overrides, seconds=2 * DAY), kind)[0]


def test_a_training_within_its_time_limit_is_not_mentioned(tmp_path: Path) -> None:
    assert requested(tmp_path, "slurm.time=61", seconds=HOUR, listed="") == Readiness()
    assert requested(tmp_path, seconds=2 * DAY, listed="") == Readiness()


def sinfo(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a sinfo on PATH that runs these lines of shell."""
    (folder / "sinfo").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_sinfo_is_asked_once_and_never_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo(tmp_path, "printf 'gpu*|up|1:00|n/a|1-infinite|1|idle|gpu:8|1\\n'", monkeypatch)
    assert listed_partitions().startswith("gpu*|up")
    sinfo(tmp_path, "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1", monkeypatch)
    assert listed_partitions() == ""
    sinfo(tmp_path, "exec sleep 600", monkeypatch)
    monkeypatch.setattr("llmlaunch.readiness.slurm_request.ANSWER_SECONDS", 0.1)
    assert listed_partitions() == ""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert listed_partitions() == ""


def test_check_warns_and_submit_refuses_by_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llmlaunch: CommandLine
) -> None:
    sinfo(tmp_path, f"cat <<'END'\n{LISTED}END", monkeypatch)
    (tmp_path / "sbatch").symlink_to("/bin/false")
    recipe = tmp_path / "recipe.yaml"
    few = "{context: 1, micro_batch_size: 1, layers_by_stage: even, techniques: asked}"
    recipe.write_text(recipe_text(slurm='{time: "3-00:00:00"}', layout=few))
    message = f"{recipe}:9: slurm.time: 3 d 0 h are more than partition gpu allows"
    assert f"warning: {message}" in llmlaunch("check", recipe).stderr
    assert message in llmlaunch("submit", recipe, "-o", tmp_path / "run", code=2).stderr
    assert not (tmp_path / "run").exists()
