"""From a file of conversations to an exported model on this machine: what docs/fine-tuning.md says, with a model small
enough for a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_quickstart import llmlaunch

pytestmark = pytest.mark.frameworks

CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 300},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
RECIPE = """
schema: 1
name: answers
model: base/config.json
backend: deepspeed
cluster: cpu-x1
nodes: 1
training:
  sequence_length: 64
  global_batch_size: 8
  steps: 12
  precision: fp32
  learning_rate: 5.0e-3
  start_from: base
  evaluation: {interval: 4, iterations: 2, patience: 3, keep_best: true}
  save_interval: 4
  checkpoint_path: checkpoints
  export: tuned
  log_interval: 1
data: {path: answers.jsonl, format: chat, split: '80,20,0'}
"""


def conversation(number: int) -> dict[str, object]:
    asked = {"role": "user", "content": f"Which number follows {number}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"The number {number + 1}."}]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its tokenizer, conversations and the recipe."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("fine-tuning")
    rows = [json.dumps(conversation(number)) for number in range(80)]
    (folder / "answers.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    special = ["<end>", "<user>", "<assistant>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces.train_from_iterator(
        rows, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def trained(place: Path) -> str:
    """What `submit --local --follow` prints."""
    return llmlaunch(place, "submit", place / "recipe.yaml", "--local", "--follow").stdout


def test_check_shows_what_is_learned_of_the_first_rows(place: Path) -> None:
    shown = llmlaunch(place, "check", place / "recipe.yaml", "-v").stdout
    assert "Which number follows 0?" in shown
    assert "The number 1." in shown


def test_the_validation_loss_falls_and_the_best_checkpoint_is_kept(trained: str, place: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", trained)]
    assert losses[-1] < losses[0]
    assert (place / "checkpoints" / "best").read_text().startswith("step-")


def test_sample_answers_are_in_the_log(trained: str) -> None:
    assert re.search(r"sample 3/3\n.*prompt: .*\n.*answer: .*\n.*reference: .*The number", trained), trained


def test_transformers_loads_what_was_exported(trained: str, place: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(place / "tuned", output_loading_info=True)
    assert not loading["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(place / "tuned")
    asked = tokenizer.apply_chat_template(
        conversation(5)["messages"][:1], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**asked, max_new_tokens=4).shape[1] > asked["input_ids"].shape[1]
