"""A version's parser decides what is rendered, and the version comes from the recipe, the checkout or a probe."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import argument
from llmlaunch.frameworks.framework_version import checkout_version, with_framework_version
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, NEWEST, core_parser, known_version
from llmlaunch.frameworks.megatron.rules import rules_for
from llmlaunch.frameworks.megatron.versions import rendered_arguments, version_requirements
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from support.backend_output import refused_by
from support.recipes import recipe_of

LAYOUT = Layout(data=32, zero_stage=1)
PACKAGE_INFO = """\
# Copyright (c) 2023, NVIDIA CORPORATION.  All rights reserved.
MAJOR = 0
MINOR = 16
PATCH = 1
PRE_RELEASE = '{}'

# Use the following formatting: (major, minor, patch, pre-release)
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
raise SystemExit("nobody runs this")
"""


def recipe_for(version: str = "", *overrides: str) -> Recipe:
    backend = [f'backend={{name: megatron-lm, version: "{version}"}}'] if version else []
    return recipe_of("llama3-8b", *backend, *overrides)


def checkout(folder: Path, text: str = PACKAGE_INFO.format("")) -> Path:
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(text)
    return folder


def not_probed(recipe: Recipe) -> None:
    return None


def test_every_known_version_says_where_its_flags_were_read() -> None:
    for known in KNOWN_VERSIONS:
        parser = core_parser(known)
        assert parser.version.startswith(f"{known}.")
        assert "arguments.py" in parser.source
        assert len(parser.flags) > 600
        assert parser.flags["--recompute-granularity"].choices == ("full", "selective")
    assert core_parser("0.16").flags["--offload-modules"].values == "+"


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.16", "0.16"), ("0.16.1", "0.16"), ("core_v0.16.0", "0.16"), ("core_r0.19.0", "0.19"),
        ("0.19.0rc3", "0.19"), ("0.19.2+abc", "0.19"), ("0.20.0", None), ("0.17", None),
        ("0.1", None), ("0.160", None), ("main", None),
        ("93ebf8d72f1145f9666f739adf7bbc8c426e56dc", None), ("", None), (None, None),
    ],
)  # fmt: skip
def test_a_version_is_known_by_its_first_two_numbers(version: str | None, known: str | None) -> None:
    assert known_version(version) == known


def test_what_only_helps_is_left_out_and_said() -> None:
    helping = argument("--lighten-the-load", why="it helps")
    arguments, notes = rendered_arguments(recipe_for("0.16"), (argument("--seed", 1, of="training.seed"), helping))
    assert [each.flag for each in arguments] == ["--seed"]
    assert notes == ("--lighten-the-load is left out: Megatron core 0.16 does not know it",)


def test_what_the_recipe_asks_for_is_refused_by_name() -> None:
    old = recipe_for("0.16")
    chunks = argument("--mlp-chunks-for-training", 4, of="layout.mlp_chunks")
    with pytest.raises(UserError, match=r"layout\.mlp_chunks: Megatron core 0\.16 has no --mlp-chunks.*0\.19 has it"):
        rendered_arguments(old, (chunks,))
    assert rendered_arguments(recipe_for("0.19"), (chunks,)) == ((chunks,), ())
    yarn = argument("--position-embedding-type", "yarn", of="model.position_embedding")
    with pytest.raises(UserError, match=r"model\.position_embedding: Megatron core 0\.16 has no --posit\S+ yarn;"):
        rendered_arguments(old, (yarn,))


LACKED_BY_0_16 = {
    "chunks-since-0.19": ("layout.mlp_chunks=4", "layout.mlp_chunks: --mlp-chunks-for-training came after core 0.16"),
    "offload-fraction-since-0.19": (
        "layout={offload_modules: [core_attn], offload_fraction: 0.5}",
        "layout.offload_fraction: --activation-offload-fraction came after core 0.16",
    ),
    "fixed-rows-since-0.19": (
        *("model=mixtral-8x7b", "cluster=b200-x8", "training.fp8=mxfp8"),
        "layout={token_dispatcher: flex, flex_backend: hybridep, expert_rank_capacity_factor: 1.5}",
        "layout.expert_rank_capacity_factor: --moe-expert-rank-capacity-factor came after core 0.16",
    ),
    "sharding-since-0.19": ("layout.zero_stage=[2,3]", "layout.zero_stage: 2 and 3 are Megatron-FSDP"),
    "delta-nets-since-0.19": (
        "model={base: llama3-8b, linear_attention: {full_every: 4}}",
        "model.linear_attention: gated delta nets of core 0.16 keep other tensors",
    ),
    "sqrtsoftplus-since-0.19": (
        "model={base: mixtral-8x7b, moe: {router: {score_function: sqrtsoftplus}}}",
        "model.moe.router.score_function: sqrtsoftplus came after core 0.16",
    ),
    "hybrid-since-0.19": (
        "model={base: nemotron-3-nano, moe: {topk: 4}}",
        "model.mamba: layers of one part each are another class in core 0.16",
    ),
    "repeated-prediction-since-0.19": (
        "model={base: llama3-8b, mtp_num_layers: 2, mtp_repeated: true}",
        "model.mtp_repeated: --mtp-use-repeated-layer came after core 0.16",
    ),
    "yarn-since-0.19": (
        "model={base: llama3-8b, rope_scaling: {kind: yarn, factor: 4, original_max_position_embeddings: 8192}}",
        "model.rope_scaling: core 0.16 stretches positions by yarn with latent attention alone",
    ),
}


@pytest.mark.parametrize("key", [requirement.key for requirement in version_requirements()])
def test_what_the_version_lacks_is_refused_before_anything_is_planned(key: str) -> None:
    *overrides, message = LACKED_BY_0_16[key]
    with pytest.raises(UserError, match=re.escape(message)):
        MegatronLM().rules(recipe_for("0.16", *overrides))
    assert MegatronLM().rules(recipe_for("0.19", *overrides))


def test_what_one_version_alone_refuses_of_a_layout() -> None:
    overrides = ("model={base: deepseek-v3, mtp_num_layers: 1}", "layout={overlap_expert_communication: true}")
    for version, number_of_rules in (("0.16", 1), ("0.19", 0)):
        recipe = recipe_for(version, *overrides)
        rules = [rule for rule in rules_for(recipe) if rule.where.endswith("core 0.16")]
        assert len(rules) == number_of_rules == len(refused_by(recipe, Layout(data=32, expert=8), rules))
        assert refused_by(recipe, Layout(pipeline=2, data=16, expert=8), rules) == set()


def test_a_flag_of_the_persons_own_that_the_version_lacks_stays_and_is_said() -> None:
    own = 'backend={name: megatron-lm, version: "0.16", extra_args: [--use-mup, --use-legacy-models]}'
    rendered = MegatronLM().render(recipe_for("", own), LAYOUT)
    assert rendered.program[-2:] == ("--use-mup", "--use-legacy-models")
    assert [note.split(":")[1].split(" is ")[0] for note in rendered.notes] == [" --use-mup"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (PACKAGE_INFO.format(""), "0.16.1"),
        (PACKAGE_INFO.format("rc0"), "0.16.1rc0"),
        (PACKAGE_INFO.format("; rm -rf"), "0.16.1"),
        ("MAJOR = 0\nMINOR = 20\nPATCH = 0\n", "0.20.0"),
        ("MAJOR = 0\nMINOR = __import__('os').getpid()\nPATCH = 0\n", None),
        ("MAJOR = 99999\nMINOR = 1\nPATCH = 0\n", None),
        ("\x00\udcff", None),
        ("", None),
    ],
)
def test_a_checkout_is_read_as_text(tmp_path: Path, text: str, version: str | None) -> None:
    (checkout(tmp_path, "") / "megatron" / "core" / "package_info.py").write_bytes(
        text.encode("utf-8", "surrogateescape")
    )
    assert checkout_version(tmp_path) == version
    assert checkout_version(tmp_path / "nowhere") is None


def test_the_checkout_says_the_version_where_the_recipe_does_not(tmp_path: Path) -> None:
    place = checkout(tmp_path)
    for recipe, environment in (
        (recipe_for("", f"backend={{name: megatron-lm, path: {place}}}"), {}),
        (recipe_for(), {"MEGATRON_LM_PATH": str(place)}),
        (recipe_for("", f"backend={{name: megatron-lm, path: /other, script: {place}/pretrain_mine.py}}"), {}),
    ):
        versioned, warnings = with_framework_version(recipe, environment, not_probed)
        assert versioned.backend.runs_version == "0.16.1"
        assert versioned.assumptions == (f"Megatron core 0.16.1, as {place} says",)
        assert (warnings, versioned.digest) == ((), recipe.digest)
        assert MegatronLM().facts(versioned).version == "0.16"


def test_the_recipe_wins_over_its_checkout_and_the_difference_is_said(tmp_path: Path) -> None:
    environment = {"MEGATRON_LM_PATH": str(checkout(tmp_path))}
    versioned, warnings = with_framework_version(recipe_for("0.19"), environment, not_probed)
    assert (versioned.backend.runs_version, versioned.assumptions) == ("0.19", ())
    assert warnings == (
        f"backend.version says 0.19, but {tmp_path} is Megatron core 0.16.1; its arguments follow the recipe",
    )
    assert with_framework_version(recipe_for("0.16"), environment, not_probed)[1] == ()


def test_a_probe_says_it_where_there_is_no_checkout_to_read() -> None:
    for name, versions, runs_version in (
        ("llama3-8b", {"megatron-core": "0.16.0", "torch": "2.9.1"}, "0.16.0"),
        ("llama2-7b-deepspeed", {"deepspeed": "0.17.2"}, "0.17.2"),
    ):
        versioned, _ = with_framework_version(recipe_of(name), {}, lambda recipe, versions=versions: versions)
        assert versioned.backend.runs_version == runs_version


def test_where_nothing_is_known_the_newest_is_assumed_in_the_open() -> None:
    versioned, warnings = with_framework_version(recipe_for(), {"MEGATRON_LM_PATH": os.devnull}, not_probed)
    assert versioned.backend.runs_version is None
    assert versioned.assumptions[-1].startswith(f"Megatron core {NEWEST} (set backend.version")
    assert warnings == ()


@pytest.mark.parametrize("version", ["0.20.0", "0.17", "main"])
def test_an_unknown_version_is_warned_of_and_rendered_as_the_newest(version: str) -> None:
    versioned, warnings = with_framework_version(recipe_for(version), {}, not_probed)
    assert [w.split(";")[0] for w in warnings] == [
        f"Megatron core {version} is none of those llmlaunch knows (0.16, 0.19)"
    ]
    newest = MegatronLM().render(recipe_for(NEWEST), LAYOUT)
    assert MegatronLM().render(versioned, LAYOUT).program == newest.program
