"""Random jobs, legal and not: our rules and DeepSpeed's own code agree on each, but for the exceptions written down.

LLMLAUNCH_ORACLE_EXAMPLES sets how many (`make oracle-full`: thousands); 100 otherwise, and 300 in `make soak`, the same
ones every time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judges import DeepSpeedJudge

from llmlaunch.assets import asset
from llmlaunch.families.lookup import resolve_model
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.techniques import REQUIREMENTS
from llmlaunch.layout import Layout, LayoutColumns, Situation
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import Adapters
from support.soak import SOAK

pytestmark = pytest.mark.frameworks

EXAMPLES = int(os.environ.get("LLMLAUNCH_ORACLE_EXAMPLES", "300" if SOAK else "100"))


@dataclass(frozen=True)
class Stricter:
    """A rule of ours that refuses what DeepSpeed takes without a word: what then happens, and where it was read."""

    rule: str
    why: str
    where: str


SCRIPT = "llmlaunch/trainers/deepspeed/techniques.py"
STRICTER = (
    Stricter("dense-tiles", "the shipped script tiles the loss of dense models", SCRIPT),
    Stricter("dense-chunks", "the shipped script chunks dense MLPs", SCRIPT),
    Stricter("dense-adapters", "the shipped script adapts linear layers", "llmlaunch/trainers/deepspeed/adapters.py"),
    Stricter("tensor-or-context", "both make groups of neighbouring ranks", "deepspeed/utils/groups.py:202"),
    Stricter("tensor-query-groups", "uneven heads, or ranks without any", "deepspeed/module_inject/tp_shard.py:125"),
    Stricter(
        "tensor-ffn", "uneven shards, which the estimate does not know", "deepspeed/module_inject/tp_shard.py:130"
    ),
    Stricter("tensor-adapters", "adapted layers stay whole", "deepspeed/module_inject/auto_tp.py:484"),
    Stricter("tensor-tiles", "not tried", "deepspeed/runtime/sequence_parallel/ulysses_sp.py:760"),
    Stricter("context-masks", "the window is lost", "deepspeed/runtime/sequence_parallel/ulysses_sp.py:420"),
    Stricter("offload-parameters-zero-3", "ignored below 3", "deepspeed/runtime/zero/offload_config.py:20"),
    Stricter("offload-optimizer-zero", "ignored at 0", "deepspeed/runtime/zero/offload_config.py:52"),
    Stricter("gradients-fp32-here", "not counted", "llmlaunch/frameworks/deepspeed/facts.py"),
    Stricter("gradients-as-computed", "not counted", "llmlaunch/frameworks/deepspeed/facts.py"),
    Stricter("whole-optimizer-offload", "would be compiled on the node", "deepspeed/runtime/zero/stage3.py:150"),
)

BASES = {name: load_recipe(asset("recipes", f"{name}.yaml")) for name in ("llama2-7b-deepspeed", "quickstart")}
LLAMA = BASES["llama2-7b-deepspeed"].model
MIXTRAL = resolve_model("mixtral-8x7b", asset("recipes", "models"), default_positions=4096)[0]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Recipe, Layout]:
    """A recipe and a layout whose sizes multiply to its devices; whatever else may be wrong with them is."""
    base = BASES[draw(st.sampled_from(sorted(BASES)))]
    heads = draw(st.sampled_from((8, 12, 32)))
    groups = draw(st.sampled_from([size for size in (1, 2, 3, 4, 8, 12, 32) if heads % size == 0]))
    shape = draw(st.sampled_from((LLAMA, LLAMA, LLAMA, MIXTRAL)))
    shape = replace(
        shape,
        num_attention_heads=heads,
        num_query_groups=groups,
        hidden_size=128 * heads,
        head_dim=128,
        ffn_hidden_size=draw(st.sampled_from((11008, 11008, 11012))),
    )
    training = replace(
        base.training,
        sequence_length=draw(st.sampled_from((2048, 2048, 4096, 4001))),
        global_batch_size=draw(st.sampled_from((256, 256, 64, 250, 16, 7))),
        precision=draw(st.sampled_from(("bf16", "bf16", "fp32", "fp16"))),
        gradient_dtype=draw(st.sampled_from((None, None, "fp32"))),
    )
    recipe = replace(base, model=shape, training=training, techniques=draw(techniques()))
    return recipe, draw(layouts(recipe.world_size))


@st.composite
def techniques(draw: st.DrawFn) -> Techniques:
    if draw(st.booleans()):
        return Techniques()
    return Techniques(
        offload_optimizer=draw(st.sampled_from((0.0, 1.0, 1.0, 0.5))),
        offload_parameters=draw(st.booleans()),
        loss=draw(st.sampled_from((None, None, "tiled"))),
        mlp_chunks=draw(st.sampled_from((1, 1, 4))),
        adapters=draw(st.sampled_from((None, None, Adapters(8)))),
    )


@st.composite
def layouts(draw: st.DrawFn, world: int) -> Layout:
    tensor = draw(st.sampled_from([size for size in (1, 1, 2, 4, 8) if world % size == 0]))
    context = draw(st.sampled_from([size for size in (1, 1, 2, 4, 8, 16) if world % (tensor * size) == 0]))
    return Layout(
        tensor=tensor,
        context=context,
        data=world // (tensor * context),
        micro_batch_size=draw(st.sampled_from((1, 1, 2, 3, 4))),
        zero_stage=draw(st.integers(0, 3)),
    )


def refused_by_us(recipe: Recipe, layout: Layout) -> set[str]:
    broken = {requirement.key for requirement in REQUIREMENTS if requirement.broken(recipe)}
    situation = Situation(
        LayoutColumns.of([layout]), recipe.model, recipe.workload, recipe.cluster, recipe.nodes, recipe.techniques
    )
    # a recipe no requirement of which is broken, but of the same precision and gradients, has the same rules
    plain = replace(recipe, techniques=Techniques(), model=LLAMA)
    if "gradients-as-computed" in broken:
        plain = replace(plain, training=replace(plain.training, gradient_dtype=None))
    rules = DeepSpeed().rules(plain)
    return broken | {rule.key for rule in rules if not bool(np.all(rule.allows(situation)))}


@pytest.mark.parametrize(("kind", "taken"), [("cpu", False), ("gpu", True)])
def test_whether_fp16_is_taken_depends_on_the_job_and_not_on_this_machine(
    deepspeed: DeepSpeedJudge, kind: str, taken: bool
) -> None:
    """A CPU with fp16 in hardware, such as one with avx512_fp16, answers as one without."""
    recipe = BASES["quickstart"]
    device = replace(recipe.cluster.accelerator, kind=kind)
    recipe = replace(
        recipe,
        cluster=replace(recipe.cluster, accelerator=device),
        training=replace(recipe.training, precision="fp16"),
    )
    for machine_fp16 in (True, False):
        refusal = deepspeed.judge(recipe, Layout(data=recipe.world_size), machine_fp16=machine_fp16)
        assert (refusal is None) == taken, refusal


@pytest.fixture(scope="module")
def seen() -> dict[str, int]:
    return {"taken": 0, "refused": 0, "stricter": 0}


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    database=None,
)
@given(job=jobs())
def test_we_and_deepspeed_agree(deepspeed: DeepSpeedJudge, seen: dict[str, int], job: tuple[Recipe, Layout]) -> None:
    recipe, layout = job
    ours, theirs = refused_by_us(recipe, layout), deepspeed.judge(recipe, layout)
    seen["taken" if theirs is None else "refused"] += 1
    if theirs is not None:
        assert ours, f"DeepSpeed refuses what we take: {theirs}"
    elif ours:
        seen["stricter"] += 1
        strict = ours - {exception.rule for exception in STRICTER}
        assert not strict, f"we refuse what DeepSpeed takes: {strict}, {layout}"


def test_both_kinds_were_seen(seen: dict[str, int]) -> None:
    """After the test above: agreement about nothing would be none."""
    assert min(seen.values()) >= EXAMPLES // 20, seen
    assert len(STRICTER) <= 20
