"""Arguments that a log prints with values of any form: a recipe or one message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.command_line import read_values
from llmlaunch.imports.logs import read_logs
from support.training_logs import LLAMA, LOGS

MIXTURE = {**LLAMA, "num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 1, "moe_ffn_hidden_size": 1024}
LATENT = {**LLAMA, "multi_latent_attention": True, "q_lora_rank": 512, "kv_lora_rank": 128}
REAL = dict(read_logs(LOGS / "megatron-core-0.19.log")[0].values)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([0.5, -0.5, 1e18, 1e300, 2**62, -(2**62), "auto", "²", "", "9" * 400, "None", "True", "[1,2]"]),
    st.sampled_from(
        ["([0]*3+[1]*5)", "torch.float32", "Et*3|t", "1e999", {1, 2}, (1, 2), {"a": 1}, [[1]], ["x"], [], {}]
    ),
)


@settings(max_examples=80)
@given(st.data())
def test_they_make_a_recipe_or_one_message_says_why_not(data: st.DataObject) -> None:
    values: dict[str, Any] = dict(data.draw(st.sampled_from([LLAMA, MIXTURE, LATENT, REAL])))
    for name in data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3)):
        values[name] = data.draw(LEAVES)
    message = "job"
    try:
        read_values(values, nodes=1, devices_per_node=8, place="job")
    except UserError as mistake:
        message = str(mistake)
    assert message.startswith("job")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_layers", value) for value in ([4], True, 4.5, float("inf"), float("nan"))),
        *(("lr", (1, 2)), ("lr", 10**400), ("offload_modules", "True"), ("train_data_path", "False")),
    ],
)
def test_a_value_of_another_form_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^job: {name}: .* is no "):
        read_values({**LLAMA, name: value}, nodes=1, devices_per_node=8, place="job")


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("name", ["qk_l2_norm", "attention_output_gate", "layernorm_zero_centered_gamma"])
def test_a_switch_with_a_value_of_a_fork_is_off_only_where_the_value_is_empty(name: str, switch: bool) -> None:
    expected = read_values({**LLAMA, name: switch}, nodes=1, devices_per_node=8, place="job")
    for value in ("x", 0.5, [1], 1) if switch else ("", "0", 0, [], None):
        assert read_values({**LLAMA, name: value}, nodes=1, devices_per_node=8, place="job") == expected


@pytest.mark.parametrize("fraction", [1e308, -1e308, "1e308"])
def test_a_warm_up_of_endless_steps_leaves_a_step_after_it(fraction: object) -> None:
    values = {**LLAMA, "lr_warmup_fraction": fraction, "train_iters": 100}
    warmup = read_values(values, nodes=1, devices_per_node=8, place="job").document["training"]["warmup_steps"]
    assert warmup < 100
