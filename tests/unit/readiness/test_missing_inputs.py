"""`check` warns of data, tokenizers and secrets that are missing; `submit` refuses, before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from job_files import dataset, readiness, write

from llmlaunch.readiness.readiness import Readiness
from support.command_line import CommandLine
from support.recipes import recipe_text

MEGATRON = recipe_text(data="{path: corpus/text_document}")
DEEPSPEED = recipe_text(backend="deepspeed", data="{path: corpus}")
TINY = recipe_text(
    model="{num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 256}",
    backend="deepspeed",
    cluster="cpu-x2",
    nodes="1",
    training="{sequence_length: 64, global_batch_size: 4, steps: 2, precision: fp32}",
    data="{path: corpus.txt}",
    secrets="[MY_HUB]",
)


def looked_for(folder: Path, text: str, *overrides: str, **environment: str) -> Readiness:
    return readiness(folder, text, *overrides, environment=environment)


def test_every_part_of_a_blend_is_looked_for(tmp_path: Path) -> None:
    blend = "data={blend: [{path: a, weight: 1}, {path: b, weight: 2}]}"
    dataset(tmp_path, "a")
    write(tmp_path, {"b.idx": "x"})
    (sentence,) = looked_for(tmp_path, MEGATRON, blend).missing
    assert "data.blend.1.path" in sentence
    assert "b.bin is not there" in sentence


def test_validation_data_is_looked_for(tmp_path: Path) -> None:
    dataset(tmp_path, "a")
    dataset(tmp_path, "b")
    (tmp_path / "b.idx").unlink()
    evaluation = "training.evaluation={interval: 1, iterations: 1}"
    (sentence,) = looked_for(tmp_path, MEGATRON, "data={path: a, validation: b}", evaluation).missing
    assert "data.validation: " in sentence
    assert "b.idx is not there" in sentence


def test_text_of_the_deepspeed_trainer_is_a_file_a_folder_or_an_indexed_dataset(tmp_path: Path) -> None:
    assert "corpus is not there" in looked_for(tmp_path, DEEPSPEED).missing[0]
    write(tmp_path, {"corpus.idx": "x"})
    assert "corpus.bin is not there" in looked_for(tmp_path, DEEPSPEED).missing[0]
    dataset(tmp_path, "corpus")
    assert looked_for(tmp_path, DEEPSPEED) == Readiness()
    (tmp_path / "corpus.idx").unlink()
    write(tmp_path, {"corpus/part.txt": "x"})
    assert looked_for(tmp_path, DEEPSPEED) == Readiness()


def test_an_unset_secret_is_named_and_an_empty_one_too(tmp_path: Path) -> None:
    mock = recipe_text(secrets="[MY_HUB, OTHER]")
    missing = looked_for(tmp_path, mock, OTHER="").missing
    assert [sentence.split(": ")[2] for sentence in missing] == [
        "MY_HUB is not set here; export it where you submit",
        "OTHER is not set here; export it where you submit",
    ]
    assert looked_for(tmp_path, mock, MY_HUB="x", OTHER="y") == Readiness()


@pytest.mark.parametrize("path", ["/no-such-file-system/text", "s3://bucket/text"])
def test_a_path_that_only_the_nodes_can_see_is_a_warning(path: str, tmp_path: Path) -> None:
    inputs = looked_for(tmp_path, MEGATRON, f"data.path={path}", "data.cache_path=/no-such-file-system/cache")
    assert inputs.missing == ()
    (warning,) = inputs.doubtful
    start, _, paths = warning.partition("because this machine cannot see the path: ")
    assert start == f"{tmp_path}/recipe.yaml: not checked, "
    data, cache = paths.split(", ")
    assert data.startswith("data.path ")
    assert data.endswith("text.bin")
    assert cache == "data.cache_path /no-such-file-system/cache"


def test_a_folder_that_may_not_be_looked_into_hides_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.stat

    def refused(path: Path, **how: bool) -> os.stat_result:
        if "text_document" in path.name:
            raise PermissionError(13, "Permission denied")
        return real(path, **how)

    monkeypatch.setattr(Path, "stat", refused)
    assert "cannot see the path: data.path" in looked_for(tmp_path, MEGATRON).doubtful[0]


def test_what_a_container_mounts_is_looked_for_where_it_lies_on_the_host(tmp_path: Path) -> None:
    dataset(tmp_path, "host/text")
    mounted = f"container={{image: registry/x, mounts: ['{tmp_path}/host:/inside']}}"
    assert looked_for(tmp_path, MEGATRON, mounted, "data.path=/inside/text").missing == ()
    (sentence,) = looked_for(tmp_path, MEGATRON, mounted, "data.path=/inside/other").missing
    assert "/inside/other.bin and /inside/other.idx are not there" in sentence


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data={python_source: true}"], "data.python_source: is for the DeepSpeed trainer"),
        (["backend={name: megatron-lm, extra_args: [--seq-length, 9]}"], "--seq-length"),
    ],
)
def test_check_refuses_what_submit_refuses(
    overrides: list[str], message: str, tmp_path: Path, llmlaunch: CommandLine
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(layout="{context: 1, micro_batch_size: 1, layers_by_stage: even, techniques: asked}"))
    checked = llmlaunch("check", recipe, *overrides, code=2)
    assert message in checked.stderr
    assert checked.stdout == ""
    assert llmlaunch("submit", recipe, "--dry-run", *overrides, code=2).stderr.endswith(checked.stderr)


def test_check_and_render_warn_submit_and_its_dry_run_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llmlaunch: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MY_HUB", raising=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY)
    warnings = llmlaunch("check", recipe).stderr
    for part in ("warning: ", "data.path: ", "corpus.txt is not there", "MY_HUB is not set here"):
        assert part in warnings
    assert llmlaunch("render", recipe, "-o", "rendered").stderr.count("submit refuses until this is fixed") == 2
    for arguments in (["--dry-run"], ["-o", "run"], ["--local", "-o", "run"], ["training.steps=2,3"]):
        assert "corpus.txt is not there" in llmlaunch("submit", recipe, *arguments, code=2).stderr
        assert not (tmp_path / "run").exists()
    write(tmp_path, {"corpus.txt": "x"})
    monkeypatch.setenv("MY_HUB", "x")
    assert "warning" not in llmlaunch("check", recipe).stderr
    llmlaunch("submit", recipe, "--dry-run")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "CHANNEL is not set here; export it where you submit"),
        ("hooks.example/secret", "CHANNEL holds no http or https address; export the whole address"),
        ("http://[::1/secret", "CHANNEL holds no http or https address; export the whole address"),
        ("https://hooks.example/secret", ""),
    ],
)
def test_the_address_of_notices_is_looked_for_and_never_shown(tmp_path: Path, address: str, problem: str) -> None:
    text = recipe_text(notify="{webhook: CHANNEL, command: [no-such-program]}")
    found = looked_for(tmp_path, text, CHANNEL=address)
    assert [sentence.split(": notify.webhook: ")[1].split(", such")[0] for sentence in found.missing] == (
        [problem] if problem else []
    )
    assert "no-such-program is no program of this machine" in found.doubtful[0]
    assert "secret" not in "".join(found.missing)


def test_a_dry_run_shows_who_hears_of_the_job_and_of_an_address_its_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llmlaunch: CommandLine
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY.replace("secrets: [MY_HUB]", "notify: {webhook: CHANNEL, events: [end, stall]}"))
    (tmp_path / "corpus.txt").write_text("text")
    monkeypatch.setenv("CHANNEL", "https://hooks.example/services/secret")
    shown = llmlaunch("submit", recipe, "--dry-run").stdout
    assert "  notices to   hooks.example ($CHANNEL): end, stall\n" in shown
    assert "secret" not in shown
