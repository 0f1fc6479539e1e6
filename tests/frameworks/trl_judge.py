"""What TRL learns from the same rows, for trainer_cases.py: makes small models with their tokenizer, trains them.

asked      {"template": "...", "models": {name: {...}}, "rows": {name: [...]}, "cases": [...]}; a case has "name",
           "model", "rows", "batch", "steps" and, where it has them, "adapters", "quantized", "packed" and
           "assistant_only"
answered   {name: the loss of every step} in the file losses.json

Models are in folders of their names; their weights are drawn from seed 0. Rows are taken in the order in which the
shipped script takes them with its seed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SEED = 1234  # of the shipped script, by default
LENGTH = 96


def main(asked: dict[str, Any], folder: Path) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # no process group
    tokenizer = made_tokenizer(json.dumps(asked["rows"]), asked["template"])
    for name, values in asked["models"].items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    answers = {case["name"]: learned(case, asked["rows"][case["rows"]], tokenizer, folder) for case in asked["cases"]}
    (folder / "losses.json").write_text(json.dumps(answers))


def made_tokenizer(text: str, template: str) -> PreTrainedTokenizerFast:
    """Byte pairs of the rows' own text, so that tokens merge across what is a boundary for people."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def learned(case: dict[str, Any], rows: list[dict[str, Any]], tokenizer: Any, folder: Path) -> list[float]:
    narrow = {}
    if case.get("quantized"):
        four_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        narrow = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **four_bits), "device_map": {"": "cpu"}}
    model = AutoModelForCausalLM.from_pretrained(folder / case["model"], dtype=torch.float32, **narrow)
    if case.get("adapters"):
        torch.manual_seed(SEED)
        rank = case["adapters"]
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    packed = case.get("packed", False)
    settings = SFTConfig(
        output_dir=str(folder / case["name"]),
        max_steps=case["steps"],
        per_device_train_batch_size=case["batch"] // 2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        max_length=LENGTH,
        packing=packed,
        padding_free=packed,
        assistant_only_loss=case.get("assistant_only", False),
        train_sampling_strategy="sequential",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataset_num_proc=None,
    )
    trainer = SFTTrainer(model, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    samples = len(trainer.train_dataset)
    epochs = -(-case["steps"] * case["batch"] // samples)
    order = [
        int(place)
        for epoch in range(epochs)
        for place in torch.randperm(samples, generator=torch.Generator().manual_seed(SEED * 1_000_000_007 + epoch))
    ]
    trainer.train_dataset = trainer.train_dataset.select(order)
    step, parts = trainer.training_step, []

    def watched(*words: Any, **more: Any) -> torch.Tensor:
        parts.append(step(*words, **more))  # the logged loss is rounded
        return parts[-1]

    trainer.training_step = watched
    trainer.train()
    return [float(first + second) for first, second in zip(parts[::2], parts[1::2], strict=True)]
