"""8- and 4-bit products and the precision-aware optimizer: what is rendered, what is refused, what it weighs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Layout
from llmlaunch.techniques import Techniques
from llmlaunch.workload import OptimizerFormats
from support.backend_output import check_flags, refused_by
from support.recipes import recipe_of

SHARDED = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)
NAME, PARAMETERS = "llama3-70b", "training.fp8_parameters=true"
HOPPER, BLACKWELL = "cluster=h100-80gb-x8", "cluster=b200-x8"
SHARED_BUFFER = "--reuse-grad-buf-for-mxfp8-param-ag"
FP8 = "--fp8-format --fp8-recipe --fp8-param-gather --fp8-amax-history-len --fp8-amax-compute-algo"


SAID = [
    ([HOPPER, "training.fp8=delayed"], "--fp8-format hybrid --fp8-amax-history-len 1024 --bf16", "--fp8-param-gather"),
    ([HOPPER, "training.fp8=tensorwise"], "--fp8-format hybrid --fp8-recipe tensorwise --bf16", "--fp8-param-gather"),
    ([HOPPER, "training.fp8=blockwise"], "--fp8-format e4m3 --fp8-recipe blockwise --bf16", "--fp8-param-gather"),
    ([BLACKWELL, "training.fp8=mxfp8"], "--fp8-format e4m3 --fp8-recipe mxfp8 --bf16", "--fp8-param-gather"),
    ([BLACKWELL, "training.fp4=nvfp4"], "--fp4-format e2m1 --fp4-recipe nvfp4", FP8),
    # narrow parameters share the gradients' buffer under mxfp8 alone
    ([BLACKWELL, "training.fp8=mxfp8", PARAMETERS], f"--fp8-param-gather {SHARED_BUFFER}", ""),
    ([HOPPER, "training.fp8=tensorwise", PARAMETERS], "--fp8-param-gather", SHARED_BUFFER),
    ([HOPPER], "--bf16", "--use-precision-aware-optimizer"),
    (
        [
            *(HOPPER, "training.gradient_dtype=bf16"),
            "training.optimizer={main_parameters: fp16, first_moment: bf16, second_moment: fp8}",
        ],
        "--use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 "
        "--main-grads-dtype bf16 --grad-reduce-in-bf16",
        "",
    ),
    (
        [
            *("training.warmup_steps=7", "training.learning_rate_decay=linear", "training.weight_decay=0.0"),
            *("training.minimum_learning_rate=3.0e-5", "training.adam_betas=[0.8, 0.99]"),
            "training.gradient_clipping=0.5",
        ],
        "--lr-warmup-iters 7 --lr-decay-style linear --min-lr 3e-05 --weight-decay 0.0 --adam-beta1 0.8 "
        "--adam-beta2 0.99 --clip-grad 0.5",
        "",
    ),
]


@pytest.mark.parametrize(("overrides", "said", "unsaid"), SAID, ids=[" ".join(overrides) for overrides, *_ in SAID])
def test_formats_and_schedule_are_said_in_flags(overrides: list[str], said: str, unsaid: str) -> None:
    recipe = recipe_of(NAME, *overrides)
    check_flags(recipe, SHARDED, said, unsaid)
    assert refused_by(recipe, SHARDED) == set()


def test_a_device_nobody_knows_is_not_judged() -> None:
    recipe = recipe_of(NAME, HOPPER, "training.fp8=mxfp8")
    unknown = replace(recipe.cluster.accelerator, compute_capability=None)
    assert MegatronLM().rules(replace(recipe, cluster=replace(recipe.cluster, accelerator=unknown)))


PLAIN = replace(SHARDED, zero_stage=0)
WIDE = Layout(16, 1, data=32, sequence_parallel=1, zero_stage=1)
SELECTIVE = replace(SHARDED, recompute=RECOMPUTE_SELECTIVE)


def test_rules_of_words_look_at_the_techniques_chosen_with_a_layout() -> None:
    def refused(techniques: Techniques, *overrides: str, layout: Layout = SHARDED) -> set[str]:
        return refused_by(replace(recipe_of(NAME, HOPPER, *overrides), techniques=techniques), layout)

    norms, host = Techniques(recompute_modules=("layernorm",)), Techniques(offload_optimizer=1.0)
    assert refused(norms, "training.fp8=delayed", layout=SELECTIVE) == {"delayed-keeps-norms"}
    assert refused(norms, "training.fp8=tensorwise", layout=SELECTIVE) == set()
    assert refused(host, "training.optimizer={}") == {"optimizer-formats-on-device"}
    assert refused(host, "training.fp8=tensorwise", PARAMETERS) == {"fp8-parameters-on-device"}
    assert refused(host, "training.fp8=delayed", PARAMETERS) == set()


HALF = OptimizerFormats(first_moment="bf16", second_moment="bf16")


@pytest.mark.parametrize(
    ("options", "lasting", "step"),
    [
        (MegatronOptions(), 12.0, 0.0),
        (MegatronOptions(gradient_dtype="bf16"), 12.0, 4.0),  # a wide copy of the gradients
        (MegatronOptions(optimizer=OptimizerFormats()), 10.0, 0.0),  # the main parameter's 16 low bits
        (MegatronOptions("fp16", optimizer=OptimizerFormats()), 12.0, 0.0),  # fp16 has no such bits
        (MegatronOptions(gradient_dtype="bf16", optimizer=OptimizerFormats()), 10.0, 0.0),  # read as they are
        (MegatronOptions(optimizer=HALF), 6.0, 0.0),  # widened inside the kernel
        (MegatronOptions(optimizer=replace(HALF, main_parameters="fp16")), 6.0, 4.0),
        (MegatronOptions(optimizer=OptimizerFormats("fp16", "fp8", "fp8")), 4.0, 12.0),
        (MegatronOptions(optimizer=OptimizerFormats("fp32", "bf16", "fp32")), 8.0, 4.0),
        (MegatronOptions(optimizer=HALF, fp8_recipe="delayed"), 6.0, 0.0),
        (MegatronOptions(optimizer=HALF, fp8_recipe="tensorwise"), 8.0, 0.0),  # Megatron holds the main parameters
        (MegatronOptions(gradient_dtype="bf16", optimizer=HALF, fp8_recipe="mxfp8"), 8.0, 4.0),
    ],
)
def test_what_the_optimizer_weighs(options: MegatronOptions, lasting: float, step: float) -> None:
    facts = megatron_facts(options)
    assert facts.states.optimizer_bytes == lasting
    assert facts.step.step_bytes_sharded == (0.0, step, step, step)
    assert facts.step.step_bytes == (step, 0.0, 0.0, 0.0)  # without the distributed optimizer: of all parameters


def test_the_estimate_knows_what_is_rendered() -> None:
    narrow = MegatronLM().facts(recipe_of(NAME, HOPPER, "training.fp8=blockwise", PARAMETERS))
    assert narrow.layer.quantized is not None
    assert narrow.layer.quantized.replaces_parameters
    assert MegatronLM().facts(recipe_of(NAME, HOPPER)).layer.quantized is None
    assert MegatronLM().facts(recipe_of(NAME, HOPPER, "training.optimizer={}")).states.optimizer_bytes == 10.0
