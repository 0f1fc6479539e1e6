"""Counts what the shipped trainer's techniques keep, for test_techniques_act.py: bytes of distinct storages autograd
saved in the forward pass beside parameters, trained parameters, and the loss with a checksum of all gradients.

trainer_cases.py imports this where the trainer's own modules are found.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator

import train
from group import join
from model import build_model
from parallel import RankSplit
from techniques import apply_techniques

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
SETTINGS = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 0},
    "activation_checkpointing": {"cpu_checkpointing": True},
}
SEQUENCE = 128


def measured(words: list[str]) -> dict[str, float]:
    """Run one forward and backward pass of a little model with the words of a technique."""
    join()
    # DeepSpeed's engine for checkpoints on the host would be left out on a CPU, and its blocking copies fail there.
    get_accelerator().is_synchronized_device = lambda: False
    args = train.arguments([*words, "--model", "m", "--deepspeed_config", "d"])
    model = build_model(CONFIG, SETTINGS, args, RankSplit())
    model.train()
    apply_techniques(model, SETTINGS, args)
    tokens = torch.randint(0, 512, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if getattr(model, "returns_loss", False):
            loss = model(input_ids=tokens[:, :-1], targets=tokens[:, 1:]) / tokens[:, 1:].numel()
        else:
            logits = model(input_ids=tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    return {
        "saved_bytes": sum(saved.values()),
        "trained": sum(p.numel() for p in trained),
        "loss": float(loss.detach()),
        "gradients": float(sum(p.grad.double().abs().sum() for p in trained)),
    }
