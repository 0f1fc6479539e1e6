"""What is rendered for Megatron-LM is what its own parser of each known version takes, and what the plan says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable, command_words
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS
from llmlaunch.frameworks.megatron.rules import RULES, requirements_for, rules_for
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.models.shape import MoeShape
from support.backend_output import check_with_parser, refused_by, words_of
from support.megatron_disagreements import DISAGREEMENTS, LAYERS, MOST_DISAGREEMENTS, layer_of
from support.recipes import recipe_of

DENSE = Layout(8, 4, virtual_pipeline=5, data=16, sequence_parallel=1, zero_stage=1)
MIXTURE = Layout(2, 4, data=8, expert=8, sequence_parallel=1, zero_stage=1)
SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")

CASES = [
    ("llama3-70b", (), DENSE),
    ("llama3-70b", (), replace(DENSE, virtual_pipeline=1, context=2, data=8, recompute=RECOMPUTE_FULL)),
    ("llama3-8b", (), Layout(1, 1, data=32, recompute=RECOMPUTE_SELECTIVE)),
    ("llama3-8b", ("model=gpt3-175b", "training.sequence_length=2048"), replace(DENSE, virtual_pipeline=1)),
    ("llama3-8b", ("training.precision=fp16", *SAVING), DENSE),
    ("llama3-70b", ("on_oom=fallback", *SAVING), DENSE),
    ("llama3-8b", ("data={path: /data/text_document, tokenizer: /models/llama3}",), DENSE),
    ("mixtral-8x7b", (), MIXTURE),
    ("llama3-8b", ("data={blend: [{path: /a, weight: 1}], cache_path: /c, tokenizer_type: GPT2BPETokenizer}",), DENSE),
    ("llama3-8b", ("training.start_from=/llama",), DENSE),
]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
@pytest.mark.parametrize(("name", "overrides", "layout"), CASES)
def test_every_word_is_one_the_real_parser_takes(
    version: str, name: str, overrides: tuple[str, ...], layout: Layout
) -> None:
    recipe = recipe_of(name, *overrides, f'backend={{name: megatron-lm, version: "{version}"}}')
    rendered = MegatronLM().render(recipe, layout)
    assert rendered.program[1:] == command_words(rendered.arguments)
    check_with_parser(rendered.arguments, version)


def test_indexes_of_a_dataset_are_built_first_from_the_same_words() -> None:
    rendered = MegatronLM().render(recipe_of("llama3-70b", "data={path: /data/text_document}"), DENSE)
    world = str(recipe_of("llama3-70b").world_size)
    script = NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/megatron_dataset.py")
    assert rendered.prepare == (script, "--world-size", world, "--compute-capability", "9.0", *rendered.program)
    assert "trainer/megatron_dataset.py" in rendered.files
    blend = recipe_of("llama3-70b", "data={blend: [{path: /a_document, weight: 7}, {path: /b_document, weight: 1}]}")
    assert MegatronLM().render(blend, DENSE).prepare
    assert MegatronLM().render(recipe_of("llama3-70b"), DENSE).prepare == ()  # made-up data has no index


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_megatron_itself_is_asked_first_about_the_same_words(version: str) -> None:
    rendered = MegatronLM().render(
        recipe_of("llama3-70b", f'backend={{name: megatron-lm, version: "{version}"}}'), DENSE
    )
    script = (NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/megatron_check.py"), "--world-size", "512")
    assert rendered.check == (*script, "--compute-capability", "9.0", "--planned-for", version, *rendered.program)
    assert "trainer/megatron_check.py" in rendered.files


def test_the_checkout_is_named_by_the_recipe_or_by_the_node() -> None:
    unnamed = MegatronLM().render(recipe_of("llama3-70b"), DENSE)
    assert unnamed.program[0] == NodeVariable("MEGATRON_LM_PATH", "/pretrain_gpt.py")
    assert unnamed.required_variables == ("MEGATRON_LM_PATH",)
    named = MegatronLM().render(recipe_of("llama3-70b", "backend={name: megatron-lm, path: /opt/Megatron-LM}"), DENSE)
    assert named.program[0] == "/opt/Megatron-LM/pretrain_gpt.py"
    assert named.required_variables == ()


OWN = "backend={{name: megatron-lm, script: /home/me/fork/pretrain_vl.py, script_args: [--freeze-vit, '2']{}}}"


def test_a_script_of_ones_own_takes_the_place_of_pretrain_gpt() -> None:
    """Its own arguments stand before Megatron's, and the check and the indexes of the dataset run the same words."""
    data = "data={path: /data/text_document, tokenizer: /data/tokenizer}"
    usual = MegatronLM().render(recipe_of("llama3-70b", data), DENSE)
    rendered = MegatronLM().render(recipe_of("llama3-70b", OWN.format(""), data), DENSE)
    assert rendered.program == ("/home/me/fork/pretrain_vl.py", "--freeze-vit", "2", *usual.program[1:])
    for command in (rendered.check, rendered.prepare):
        assert command[-len(rendered.program) :] == rendered.program
    assert rendered.required_variables == ()
    assert "pretrain_vl.py trains in place of pretrain_gpt.py" in rendered.notes[-1]
    assert not rendered.progress.promised


def test_a_script_of_ones_own_imports_the_checkout_that_the_recipe_or_the_node_names() -> None:
    from_node = MegatronLM().render(recipe_of("llama3-70b", OWN.format("")), DENSE)
    assert from_node.python_path == (NodeVariable("MEGATRON_LM_PATH"),)
    from_recipe = MegatronLM().render(recipe_of("llama3-70b", OWN.format(", path: /opt/Megatron-LM")), DENSE)
    assert from_recipe.python_path == ("/opt/Megatron-LM",)
    assert MegatronLM().render(recipe_of("llama3-70b"), DENSE).python_path == ()


def test_arguments_of_a_script_do_not_say_what_is_planned() -> None:
    contradicting = recipe_of("llama3-70b", "backend={name: megatron-lm, script: /s.py, script_args: [--lr, '1']}")
    with pytest.raises(UserError, match="script_args: --lr is planned"):
        MegatronLM().render(contradicting, DENSE)


def test_cards_before_blackwell_get_one_connection() -> None:
    hopper = recipe_of("llama3-70b")
    assert MegatronLM().render(hopper, DENSE).environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in MegatronLM().render(hopper, Layout(data=512)).environment
    blackwell = recipe_of("llama3-70b", "cluster=b200-x8")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in MegatronLM().render(blackwell, DENSE).environment


def test_an_evaluation_reads_its_share_or_data_of_its_own() -> None:
    evaluation = "training.evaluation={interval: 50, iterations: 4}"
    share = words_of(recipe_of("llama3-70b", evaluation, "data={path: /data/a, tokenizer: /t}"), DENSE)
    assert share[share.index("--data-path") :][:4] == ["--data-path", "/data/a", "--split", "99,1,0"]
    assert share[share.index("--eval-iters") :][:4] == ["--eval-iters", "4", "--eval-interval", "50"]
    own = "data={path: /data/a, tokenizer: /t, validation: [{path: /data/b, weight: 3}, {path: /data/c, weight: 1}]}"
    words = words_of(recipe_of("llama3-70b", evaluation, own), DENSE)
    assert not {"--data-path", "--split"} & set(words)
    assert words[words.index("--train-data-path") :][:7] == [
        *("--train-data-path", "/data/a"),
        *("--valid-data-path", "3", "/data/b", "1", "/data/c"),
    ]


REFUSED_ONLY_BY_RENDERING = {
    "data={python_source: true}": "data.python_source",
    "environment={CUDA_DEVICE_MAX_CONNECTIONS: 8}": "CUDA_DEVICE_MAX_CONNECTIONS",
    "backend={name: megatron-lm, extra_args: [--seed, '2']}": "--seed",
}


@pytest.mark.parametrize("override", REFUSED_ONLY_BY_RENDERING)
def test_a_recipe_that_rendering_may_refuse_is_rendered_to_check_it(override: str) -> None:
    recipe = recipe_of("llama3-70b", override)
    with pytest.raises(UserError, match=REFUSED_ONLY_BY_RENDERING[override]):
        MegatronLM().render(recipe, DENSE)
    assert not MegatronLM().always_renders(recipe)


def test_a_recipe_of_an_earlier_version_is_rendered_to_check_it() -> None:
    assert MegatronLM().always_renders(recipe_of("llama3-70b"))
    assert not MegatronLM().always_renders(recipe_of("llama3-70b", 'backend={name: megatron-lm, version: "0.16"}'))


@pytest.mark.parametrize(
    "override",
    [
        r'data={path: "/a\0"}', r'data={blend: [{path: "/a\0", weight: 1}]}', r'data={mock: true, cache_path: "/a\0"}',
        r'data={path: /a, tokenizer: "a\0"}', r'training.start_from="/a\0"', r'training.checkpoint_path="/a\0"',
        r'tracking.tensorboard="/a\0"', r'tracking={wandb: {project: "a\0"}}', r'backend.path="/a\0"',
        r'backend.script="/a\0"', r'python="/a\0"', r'workdir="/a\0"',
    ],
)  # fmt: skip
def test_text_that_no_argument_can_hold_is_refused_when_it_is_read(override: str) -> None:
    with pytest.raises(UserError, match="line break or control character"):
        recipe_of("llama3-70b", override)


def test_rule_keys_are_unique_and_name_their_place() -> None:
    keys = [rule.key for rule in (*requirements_for(), *rules_for())]
    assert len(set(keys)) == len(keys)
    assert all(
        rule.where.startswith(("megatron/", "transformer_engine/", "deep_ep/")) and rule.sentence
        for rule in rules_for()
    )


def test_every_disagreement_is_with_a_rule_and_names_file_and_line() -> None:
    keys = {rule.key for rule in (*requirements_for(), *rules_for())}
    assert {each.rule for each in DISAGREEMENTS} <= keys
    assert len(DISAGREEMENTS) <= MOST_DISAGREEMENTS
    assert all(re.fullmatch(r"(megatron|transformer_engine)/\S+\.py:\d+", each.where) for each in DISAGREEMENTS)


def test_every_layer_checks_something() -> None:
    assert {layer_of(rule.where) for rule in RULES} == set(LAYERS)


def test_experts_in_one_kernel_need_ampere() -> None:
    recipe = recipe_of("mixtral-8x7b")
    old = replace(recipe.cluster.accelerator, compute_capability="7.0")
    with pytest.raises(UserError, match=r"compute capability 8\.0"):
        MegatronLM().rules(replace(recipe, cluster=replace(recipe.cluster, accelerator=old)))


def test_only_widths_that_are_built_must_divide() -> None:
    """A model of mixtures alone has no dense MLP, and a shared expert is split like one."""
    recipe = recipe_of("mixtral-8x7b")
    mixture = MoeShape(8, 2, 64, 48, (1, 1))
    shape = replace(recipe.model, num_layers=2, ffn_hidden_size=100)
    for moe, refused in (
        (mixture, set()),
        (replace(mixture, layer_pattern=(0, 1)), {"ffn"}),
        (replace(mixture, shared_expert_ffn_hidden_size=50), {"shared-expert"}),
    ):
        wide = Layout(tensor=8, sequence_parallel=1, data=8)
        assert refused_by(replace(recipe, model=replace(shape, moe=moe)), wide, RULES) == refused
