"""Every mistake is answered with the file, the line, the key and the fix; nothing else ever comes out."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_recipe

Write = Callable[[str | bytes], Path]

GOOD = (Path(__file__).parent / "good.yaml").read_text(encoding="utf-8")


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


# (what is replaced, by what, line of the mistake, what the message says)
MISTAKES = {
    "unknown model": (
        "model: llama3-8b",
        "model: llama3-9b",
        3,
        "model: unknown model 'llama3-9b'; did you mean llama3-8b?",
    ),
    "unknown gpu": (
        "cluster: h100-80gb-x8",
        "cluster: {base: h100-80gb-x8, accelerator: h300}",
        5,
        "cluster.accelerator: unknown accelerator 'h300'; known: a100-40gb",
    ),
    "unknown cluster": (
        "h100-80gb-x8",
        "h100-80g-x8",
        5,
        "cluster: unknown cluster 'h100-80g-x8'; did you mean h100-80gb-x8?",
    ),
    "no such config": ("model: llama3-8b", "model: models/config.json", 3, "config.json: cannot be read: No such file"),
    "unknown key": ("  steps: 1000", "  stepz: 1000", 10, "training.stepz: is not a known key; did you mean steps?"),
    "missing key": ("  steps: 1000\n", "", 7, "training: steps: is missing; add it, or tokens:"),
    "duplicate key": ("nodes: 4", "nodes: 4\nnodes: 8", 7, "the key 'nodes' stands twice (first at"),
    "1e9 where a whole number is wanted": ("steps: 1000", "steps: 1e9", 10, "YAML reads 1e9 as text: write 1000000000"),
    "1e-3 where a number is wanted": (
        "steps: 1000",
        "steps: 9\n  learning_rate: 1e-3",
        11,
        "YAML reads 1e-3 as text: write 1.0e-3 or 0.001",
    ),
    "a quoted number": (
        "steps: 1000",
        'steps: "1000"',
        10,
        "training.steps: must be a whole number, at least 1 and at most 1000000000, not '1000'; remove the quotes",
    ),
    "a fraction": (
        "steps: 1000",
        "steps: 2.5",
        10,
        "must be a whole number, at least 1 and at most 1000000000, not 2.5",
    ),
    "zero": ("nodes: 4", "nodes: 0", 6, "nodes: must be a whole number, at least 1 and at most 100000, not 0"),
    "negative": (
        "global_batch_size: 512",
        "global_batch_size: -512",
        9,
        "training.global_batch_size: must be a whole number",
    ),
    "nan": ("steps: 1000", "steps: 9\n  learning_rate: .nan", 11, "training.learning_rate: must be a finite number"),
    "infinite": (
        "steps: 1000",
        "steps: 9\n  learning_rate: 1.0e+999",
        11,
        "training.learning_rate: must be a finite number",
    ),
    "negative size of a model": (
        "model: llama3-8b",
        "model: {base: llama3-8b, hidden_size: -4096}",
        3,
        "model.hidden_size: must be a whole number, at least 1",
    ),
    "nan in a model": ("model: llama3-8b", "model: {base: llama3-8b, rotary_base: .nan}", 3, "model.rotary_base"),
    "true where a number is wanted": ("nodes: 4", "nodes: yes", 6, "not true"),
    "no where text is wanted": ("name: small", "name: no", 2, 'YAML reads an unquoted no as false: quote it: "no"'),
    "a number where text is wanted": ("name: small", "name: 12", 2, 'quote it: "12"'),
    "an unquoted time": (
        '"24:00:00"',
        "24:00:00",
        15,
        'YAML reads 24:00:00 as a number in base 60; quote it: "24:00:00"',
    ),
    "an octal number": ("nodes: 4", "nodes: 010", 6, "YAML reads 010 as an octal number"),
    "an empty value": ("nodes: 4", "nodes:", 6, "not empty; give it a value or remove the line"),
    "a word for a choice": ("bf16", "bf8", 11, "training.precision: must be one of bf16, fp16, fp32, not 'bf8'"),
    "an unknown backend": ("megatron-lm", "megatron", 4, "backend: must be one of megatron-lm, deepspeed or a mapping"),
    "nodes of another word": ("nodes: 4", "nodes: many", 6, "nodes: must be a whole number, at least 1 and at most"),
    "nodes beyond the budget": (
        "nodes: 4",
        "nodes: 4\nbudget: {max_nodes: 3}",
        6,
        "nodes: 4 are more than budget.max_nodes: 3; change one of the two",
    ),
    "a bound outside the budget": ("nodes: 4", "nodes: auto\nmax_nodes: 3", 7, "max_nodes: stands under `budget:`"),
    "no days": ("nodes: 4", "nodes: auto\nbudget: {days: 0}", 7, "budget.days: must be a finite number, above 0"),
    "two lengths": (
        "steps: 1000",
        "steps: 1000\n  tokens: 1T",
        7,
        "training: steps and tokens both say how long the training is; remove one of the two",
    ),
    "an amount that is none": (
        "steps: 1000",
        "tokens: 1.5 T",
        10,
        "training.tokens: must be a whole number, or one with K, M, B or T such as 1.5T, not '1.5 T'",
    ),
    "tokens in powers of ten": ("steps: 1000", "tokens: 1e12", 10, "or one with K, M, B or T such as 1.5T, not '1e12'"),
    "half a token": ("steps: 1000", "tokens: 0.0005K", 10, "training.tokens: 0.0005K is no whole number of tokens"),
    "tokens without end": (
        "steps: 1000",
        "tokens: 900000T",
        10,
        "training.tokens: are 214576721192 steps of 4194304 tokens; use at most 1000000000 steps",
    ),
    "a risk of nothing": ("layout: auto", "memory: {risk: 0}", 13, "memory.risk: must be"),
    "a risk of more than one in two": ("layout: auto", "memory: {risk: 1}", 13, "memory.risk: must be"),
    "a limit above one": (
        "layout: auto",
        "memory: {limit: 80}",
        13,
        "memory.limit: must be a finite number, above 0 and at most 1",
    ),
    "heads not divisible": ("layout: auto", "layout: {tensor: 3}", 13, "32 attention heads are not divisible by 3"),
    "heads of an inline model": (
        "model: llama3-8b",
        "model: {base: llama3-8b, num_attention_heads: 30}",
        3,
        "hidden_size 4096 is not divisible by 30 heads",
    ),
    "query groups": (
        "model: llama3-8b",
        "model: {base: llama3-8b, num_query_groups: 5}",
        3,
        "num_query_groups must divide num_attention_heads",
    ),
    "batch not divisible": (
        "layout: auto",
        "layout: {data: 32, micro_batch_size: 3}",
        9,
        "training.global_batch_size: 512 is not divisible by data x micro_batch_size = 96",
    ),
    "more stages than layers": (
        "layout: auto",
        "layout: {pipeline: 64}",
        13,
        "64 stages for 32 layers; use at most 32",
    ),
    "layout and devices": (
        "layout: auto",
        "layout: {tensor: 8, context: 8}",
        13,
        "tensor x context = 64 does not divide the 32 devices of 4 nodes",
    ),
    "experts of a dense model": ("layout: auto", "layout: {expert: 2}", 13, "a model without experts"),
    "stages that do not add up": (
        "layout: auto",
        "layout: {layers_by_stage: [9, 8, 8, 8]}",
        13,
        "layout.layers_by_stage: 9, 8, 8, 8 are 33 layers, llama3-8b has 32; make them add up",
    ),
    "more stages than the pipeline has": (
        "layout: auto",
        "layout: {pipeline: 2, virtual_pipeline: 1, layers_by_stage: [9, 8, 8, 7]}",
        13,
        "layout.layers_by_stage: 4 stages are no pipeline x virtual_pipeline with pipeline: 2, virtual_pipeline: 1",
    ),
    "a number of stages": (
        "layout: auto",
        "layout: {layers_by_stage: 4}",
        13,
        "layout.layers_by_stage: must be auto, even, or the decoder layers of each stage in order, such as [21, 20",
    ),
    "an unknown pin": (
        "layout: auto",
        "layout: {tensr: 2}",
        13,
        "layout.tensr: is not a known key; did you mean tensor?",
    ),
    "a wrong pin": (
        "layout: auto",
        "layout: {tensor: [1, x]}",
        13,
        "layout.tensor: must be a whole number of at least 1",
    ),
    "a word for a layout": ("layout: auto", "layout: best", 13, "layout: must be auto or a mapping, not 'best'"),
    "contradicting pins": (
        "layout: auto",
        "layout: {zero_stage: 0, distributed_optimizer: true}",
        13,
        "distributed_optimizer: true is zero_stage: 1, which contradicts the zero_stage given",
    ),
    "a literal secret": (
        "layout: auto",
        "environment: {HF_TOKEN: hf_abc}",
        13,
        "environment.HF_TOKEN: looks like a secret, which must not stand in a recipe; list the name under secrets:",
    ),
    "a secret in setup": (
        "layout: auto",
        "setup: [export WANDB_API_KEY=abc]",
        13,
        "gives WANDB_API_KEY a literal value",
    ),
    "a secret in slurm": (
        "layout: auto\nslurm:",
        "slurm:\n  export: ALL,HF_TOKEN=hf_abc",
        14,
        "gives HF_TOKEN a literal value",
    ),
    "a name no variable has": ("layout: auto", "environment: {A-B: x}", 13, "is not a name of an environment variable"),
    "a variable of the launcher": (
        "layout: auto",
        "environment: {MASTER_ADDR: x}",
        13,
        "is set by the launcher itself",
    ),
    "a line break in a directive": (
        'time: "24:00:00"',
        'comment: "a\\n#SBATCH --uid=0"',
        15,
        "slurm.comment: contains a line break",
    ),
    "an option with underscores": ('time: "24:00:00"', "cpus_per_task: 4", 15, "write cpus-per-task"),
    "an option with dashes": (
        'time: "24:00:00"',
        "--mem: 4",
        15,
        "slurm.--mem: is not a long option of sbatch without its dashes; write mem",
    ),
    "an option of ours": ('time: "24:00:00"', "nodes: 4", 15, "slurm.nodes: is not set here"),
    "an unsafe name": ("name: small", "name: ../x", 2, "name: must be a safe file and job name"),
    "a name like an option": ("name: small", "name: -rf", 2, "not beginning with '.' or '-'"),
    "a path like an option": ("layout: auto", "python: --version", 13, "python: must not begin with '-'"),
    "two kinds of data": ("{mock: true}", "{mock: true, path: /x}", 12, "data: give exactly one of"),
    "no data": ("{mock: true}", "{}", 12, "data: give exactly one of"),
    "bytes and a tiny vocabulary": (
        "{mock: true}\n",
        "{python_source: true}\n",
        12,
        "bytes need a vocabulary of at least 256",
    ),
    "half a checkpoint": ("steps: 1000", "steps: 9\n  save_interval: 5", 7, "add checkpoint_path"),
    "a script for megatron": ("megatron-lm", "{name: megatron-lm, script: x.py}", 4, "belong to deepspeed"),
    "a checkout for deepspeed": ("megatron-lm", "{name: deepspeed, path: x}", 4, "path is the Megatron-LM checkout"),
    "a mount without its end": (
        "layout: auto",
        "container: {image: a.sqsh, mounts: [/x]}",
        13,
        "must be /source:/destination",
    ),
    "a YAML tag": ("{mock: true}", "!!python/object/apply:os.system [ls]", 12, "the YAML tag"),
    "an anchor": ("{mock: true}", "&a {mock: true}", 12, "anchors (&) and aliases (*) are not accepted"),
    "a merge key": ("{mock: true}", "{<<: {mock: true}}", 12, "merge keys"),
    "broken YAML": ("{mock: true}", "{mock: true", 13, "is not valid YAML"),
    "a second document": ("layout: auto", "---\nlayout: auto", 13, "a second document begins here"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_file_line_key_and_fix(name: str, good: str, write: Write) -> None:
    old, new, line, sentence = MISTAKES[name]
    assert old in good
    text = good.replace(old, new)
    if name == "bytes and a tiny vocabulary":
        text = text.replace("model: llama3-8b", "model: {base: llama3-8b, vocab_size: 64}")
    path = write(text)
    message = complaint(path)
    assert sentence in message
    assert message.startswith(f"{path}:{line}: ")


def test_learned_positions_end_where_they_end(good: str, write: Write) -> None:
    message = complaint(write(good.replace("model: llama3-8b", "model: gpt3-175b")))
    assert "training.sequence_length: 8192 is more than the 2048 positions gpt3-175b has learned" in message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", ":1: the file is a list, not a mapping"),
        (b"recipe\n", ":1: the file is a single value, not a mapping"),
        (b"name: \xff\n", ":1: is not UTF-8 text"),
        (b"name: a\0b\n", "contains a NUL byte"),
        ("name: x".encode("utf-16"), "is not"),
        (b"name: \x01\n", "is not valid YAML: control characters are not allowed"),
        (b"a:\n\tb: 1\n", "indent with spaces, not tabs"),
        (b"[" * 500_000, "nested more than"),
        (b"a: " + b"9" * 100_000, "is not a usable number"),
        (b"a: 0x" + b"f" * 100_000, "is not a usable number"),
        (b"? [a]\n: b\n", "a key must be plain text"),
    ],
    ids=range(13),
)
def test_what_is_no_recipe_at_all(content: bytes, sentence: str, write: Write) -> None:
    path = write(content)
    message = complaint(path)
    assert sentence in message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_fifty_megabytes_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    with path.open("wb") as out:
        out.truncate(50 * 2**20)  # a hole: reading it would find NUL bytes and say so
    assert "is 50.0 MiB, more than the 1 MiB allowed here" in complaint(path)


def test_a_directory_a_device_a_missing_and_an_unreadable_file(good: str, write: Write, tmp_path: Path) -> None:
    assert "is a directory" in complaint(tmp_path)
    assert "is not a regular file" in complaint(Path("/dev/zero"))
    assert "cannot be read: No such file or directory" in complaint(tmp_path / "absent.yaml")
    assert "cannot be read: Not a directory" in complaint(write(good) / "recipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "cannot be read: Too many levels of symbolic links" in complaint(tmp_path / "loop.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")  # must not wait for a writer
    assert "is not a regular file" in complaint(tmp_path / "pipe.yaml")


def test_several_mistakes_are_told_at_once_and_only_the_first_few(good: str, write: Write) -> None:
    text = good.replace("steps: 1000", "steps: -1").replace("nodes: 4", "nodes: -1").replace("bf16", "bf8")
    message = complaint(write(text)).splitlines()
    assert [re.sub(r".*yaml:(\d+): ([\w.]+):.*", r"\1 \2", line) for line in message] == [
        "6 nodes",
        "10 training.steps",
        "11 training.precision",
    ]
    many = "".join(f"key{i}: 1\n" for i in range(20))
    lines = complaint(write(good + many)).splitlines()
    assert len(lines) == 6
    assert lines[-1].endswith("and 15 more")


def test_a_secret_is_never_repeated_in_a_message(good: str, write: Write) -> None:
    for text in ("environment: {MY_API_KEY: s3cr3t}", "environment: {A: {b: s3cr3t}}", "setup: [MY_TOKEN=s3cr3t run]"):
        assert "s3cr3t" not in complaint(write(good + text + "\n"))
    assert "s3cr3t" not in complaint(write(good), "environment.MY_TOKEN=s3cr3t")


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYS", "SECRETARY", "NCCL_DEBUG", "NCCL_IB_KEY", "KEYCLOAK_REALM"]
)
def test_only_the_end_of_a_name_makes_a_secret(name: str, good: str, write: Write) -> None:
    recipe = load_recipe(write(good + f'environment: {{{name}: "false"}}\n'))
    assert recipe.environment == {name: "false"}


TEXTS = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="abc:-[]{}\n \t&*!|>'\"#%@,?0123456789.e+_~<=", max_size=200),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
@example(text="a: &a [*a, *a]")
@example(text="%YAML 9.9\n---\na: 1")
@example(text="a: !!binary x")
@example(text="a: 2001-99-99")
@example(text="a: =")
@example(text="\ufeffa: 1")
def test_any_text_at_all_is_answered_with_a_user_error(text: str, write: Write) -> None:
    path = write(text.encode("utf-8", "surrogatepass"))
    assert str(path) in complaint(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.integers(0, GOOD.count("\n") - 1), text=TEXTS)
def test_any_line_of_a_recipe_may_be_anything(line: int, text: str, write: Write) -> None:
    lines = GOOD.splitlines()
    lines[line] = text
    with contextlib.suppress(UserError):
        load_recipe(write("\n".join(lines).encode("utf-8", "surrogatepass")))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(["layout", "model", "cluster", "slurm.x", "data", "training.steps", "setup", "environment.A"]),
    value=TEXTS,
)
def test_any_override_is_taken_or_answered(key: str, value: str, write: Write) -> None:
    with contextlib.suppress(UserError):
        load_recipe(write(GOOD), [f"{key}={value}"])


def test_many_allowed_values_are_weighed_without_multiplying_them_out(good: str, write: Write) -> None:
    sizes = ", ".join(map(str, range(3, 20_003, 2)))  # odd: none but 1 divides 32 devices
    text = good.replace(
        "layout: auto", f"layout: {{context: [{sizes}], expert_tensor: [{sizes}], tensor: [1, {sizes}]}}"
    )
    # multiplied out, this would be 10^12 products
    assert "does not divide the 32 devices" in complaint(write(text))


def test_reading_is_the_same_without_the_c_library(good: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    from llmlaunch.documents import yaml_strict

    path = write(good)
    expected = load_recipe(path)
    monkeypatch.setattr(yaml_strict, "_Loader", yaml.SafeLoader)
    assert load_recipe(path) == expected
    assert "recipe.yaml:6: the key 'model' stands twice" in complaint(write(good.replace("nodes: 4", "model: x")))
    assert "nested more than" in complaint(write(b"[" * 10_000))
