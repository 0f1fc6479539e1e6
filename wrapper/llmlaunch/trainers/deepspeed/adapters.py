"""What is trained where not all of a model is: adapters beside frozen layers, or the last layers alone."""

from __future__ import annotations

import argparse
import types

import torch
import torch.nn.functional as F


def adapt(linear: torch.nn.Module, rank: int, frozen_down: bool) -> None:
    """Puts a low-rank pair beside a linear layer (LoRA, Hu et al. 2021; LoRA-FA, Zhang et al. 2023)."""
    alike = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
    linear.adapter_down = torch.nn.Linear(linear.in_features, rank, **alike)
    linear.adapter_up = torch.nn.Linear(rank, linear.out_features, **alike)
    linear.adapter_down.weight.requires_grad = not frozen_down

    def forward(self: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight, self.bias) + self.adapter_up(self.adapter_down(inputs))

    linear.forward = types.MethodType(forward, linear)


def choose_trained(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Freezes what is not trained, and puts an adapter beside every linear layer of the blocks where asked."""
    if args.trained_layers:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[: -args.trained_layers].requires_grad_(False)
    if args.adapter_rank:
        model.requires_grad_(False)
        for module in list(model.model.layers.modules()):
            if isinstance(module, torch.nn.Linear):
                adapt(module, args.adapter_rank, args.frozen_adapter_down)
