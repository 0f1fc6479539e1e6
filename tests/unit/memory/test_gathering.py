"""What ZeRO 3 gathers, tensor by tensor, against what real engines gathered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import LLAMA2_7B, LLAMA3_8B

from llmlaunch.facts import Gathering
from llmlaunch.families.hub_ids import load_preset, preset_names
from llmlaunch.layers.modules import ModuleSplit
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.memory import gathering
from llmlaunch.memory.gathering import gathered, modules_of
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques.requests import Adapters

MIB = 2.0**20
ALONE = ModuleSplit()
LLAMA = ModelShape("tiny", 8, 256, 1024, 8, 2, 32, 4000, 4096)
MIXTRAL = replace(ModelShape("tiny", 6, 128, 256, 4, 2, 32, 2000, 4096), moe=MoeShape(8, 2, 256, 0, (1,) * 6))
MIXTRAL = replace(MIXTRAL, family="mixtral")
BILLION = 10**9


def limits(prefetch: int, live: int, reuse: int, persistent: int) -> Gathering:
    return Gathering(prefetch, live, reuse, persistent)


# Elements of the storages of gathered parameters and of the buffers they arrive in, at most, in the third step of
# Transformers 5.23 on two CPU ranks (deepspeed 0.19.8, gloo), each module's fetch and each wait looked at.
COUNTED = [
    (LLAMA, False, limits(300_000, 2_000_000, 2_000_000, 1_000), 3_191_040),
    (LLAMA, False, limits(300_000, 2_000_000, 0, 1_000), 3_191_040),
    (LLAMA, False, limits(2_000_000, 3_000_000, 1_000_000, 1_000), 5_255_424),
    (LLAMA, False, limits(50_000, 1_000_000, 500_000, 100_000), 3_125_504),
    (LLAMA, False, limits(300_000, BILLION, BILLION, 1_000), 10_178_816),
    (LLAMA, False, limits(0, 2_000_000, 3_000_000, 0), 1_548_544),
    (LLAMA, False, limits(500_000, 1_500_000, 1_500_000, 70_000), 3_649_792),
    (LLAMA, True, limits(300_000, 2_000_000, 2_000_000, 1_000), 3_092_736),
    (LLAMA, True, limits(2_000_000, 3_000_000, 1_000_000, 1_000), 5_255_424),
    (LLAMA, True, limits(50_000, 1_000_000, 500_000, 100_000), 3_125_504),
    (replace(LLAMA, tied_embeddings=True), False, limits(300_000, 2_000_000, 2_000_000, 1_000), 3_191_040),
    (MIXTRAL, False, limits(300_000, 2_000_000, 2_000_000, 1_000), 3_341_952),
    (MIXTRAL, False, limits(2_000_000, 3_000_000, 1_000_000, 1_000), 6_475_392),
    (MIXTRAL, False, limits(0, 2_000_000, 3_000_000, 0), 2_914_816),
    (MIXTRAL, True, limits(50_000, 1_000_000, 500_000, 100_000), 1_613_440),
]


@pytest.mark.parametrize(("shape", "recompute", "settings", "counted"), COUNTED)
def test_as_much_is_gathered_as_a_real_engine_holds(
    shape: ModelShape, recompute: bool, settings: Gathering, counted: int
) -> None:
    assert gathered(shape, ALONE, None, settings, recompute).most == counted


@pytest.mark.parametrize(
    ("shape", "settings", "counted"),
    [
        (LLAMA, limits(0, 2_000_000, 3_000_000, 0), 1_810_688),
        (MIXTRAL, limits(300_000, 2_000_000, 2_000_000, 1_000), 3_030_656),
    ],
)
def test_with_recompute_no_less_than_a_real_engine_holds_is_counted(
    shape: ModelShape, settings: Gathering, counted: int
) -> None:
    """Checkpoints stop early, and what a mixture waits for comes in an order that nobody knows."""
    assert counted <= gathered(shape, ALONE, None, settings, True).most <= 1.11 * counted


@pytest.mark.parametrize("name", preset_names())
def test_modules_have_all_parameters_of_the_model(name: str) -> None:
    shape = load_preset(name)
    modules = modules_of(shape, ALONE, None)
    assert sum(size for module in modules for size in module.parameters) == count_parameters(shape).total
    assert modules[0].inside == len(modules) - 1


def test_parameters_that_are_used_again_within_the_reuse_distance_stay() -> None:
    """Llama 2 7B with 3e7 live parameters: what is kept for its reuse does not fall under that limit."""
    live = 30_000_000
    released = gathered(LLAMA2_7B, ALONE, None, limits(live, live, live, 100_000), False).most
    kept = gathered(LLAMA2_7B, ALONE, None, limits(live, live, BILLION, 100_000), False).most
    assert 2 * released / 2**30 == pytest.approx(0.28, abs=0.01)
    assert 2 * kept / 2**30 == pytest.approx(0.94, abs=0.01)


def test_parameters_gathered_one_by_one_need_no_common_buffer() -> None:
    """The experts of a mixture arrive in a buffer as large as they are, unless each tensor is gathered by itself."""
    shape = load_preset("mixtral-8x7b")
    together, apart = (
        gathered(shape, ALONE, None, Gathering(sequential=sequential), False).most for sequential in (False, True)
    )
    experts = 3 * 8 * 4096 * 14336
    assert apart < together < apart + 1.1 * experts


def test_small_adapters_stay_whole() -> None:
    """Llama 3 8B, rank 16: those of all linears but the MLP's wide sides have at most 100,000 elements."""
    adapters = Adapters(16)
    plain, beside = (gathered(LLAMA3_8B, ALONE, each, Gathering(), False).persistent for each in (None, adapters))
    assert 2 * (beside - plain) / MIB == pytest.approx(38, abs=1)


def test_no_more_stays_than_the_model_s_threshold() -> None:
    settings = replace(Gathering(), persistent_total=100_000)
    assert gathered(LLAMA3_8B, ALONE, None, settings, False).persistent <= 100_000


@pytest.mark.parametrize("name", ["llama3-70b", "gemma3-27b", "mixtral-8x22b", "deepseek-v3", "qwen3-vl-8b"])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_repeat_themselves_can_be_left_out(
    name: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = load_preset(name)
    for settings in (Gathering(10**7, 10**8, 10**8), Gathering(5 * 10**7, 3 * 10**7, 2 * 10**8)):
        short = gathered(shape, ALONE, None, settings, recompute)
        monkeypatch.setattr(gathering, "_without_repetition", lambda modules, layers, limits: modules)
        gathered.cache_clear()
        assert gathered(shape, ALONE, None, settings, recompute) == short
        monkeypatch.undo()


def test_norms_and_the_activation_stand_where_they_run() -> None:
    """A layer of Gemma 2 has a norm behind each block; an MLP activates its gate before it projects up."""
    shape = load_preset("gemma2-9b")
    modules = modules_of(shape, ALONE, None)
    start = next(index for index, module in enumerate(modules) if module.layer)
    sizes = [module.parameters for module in modules[start + 1 : start + 1 + modules[start].inside]]
    h, keys, query, ffn = 3584, 8 * 256, 16 * 256, 14336
    attention = [(), (h * query,), (h * keys,), (h * keys,), (query * h,)]
    mlp = [(), (h * ffn,), (), (h * ffn,), (ffn * h,)]
    assert sizes == [(h,), *attention, (h,), (h,), *mlp, (h,)]
