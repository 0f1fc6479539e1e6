"""What is recomputed, kept on the host, chunked and tiled."""

from __future__ import annotations

import argparse
import types
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F

from adapters import layers_of
from group import refuse
from parallel import is_mixture


def recompute_layers(model: torch.nn.Module, settings: dict[str, Any], offload: bool) -> None:
    """Every layer keeps its input alone; with `offload` in host memory, as ds_config says."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Transformers makes the embedding's output need a gradient, and frozen first layers would be kept for nothing.
    model.disable_input_require_grads()
    if offload:
        deepspeed.checkpointing.configure(None, deepspeed_config=settings)
        model._set_gradient_checkpointing(True, deepspeed.checkpointing.non_reentrant_checkpoint)


def chunk_mlps(model: torch.nn.Module, chunks: int) -> None:
    """Each MLP computes pieces of the sequence in turn, keeps its input and computes again in the backward pass
    (mini-sequences, Luo et al. 2024)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def forward(mlp: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return TiledMLP.apply(type(mlp).forward, mlp, inputs, chunks, list(mlp.parameters()))

    for layer in layers_of(model):
        mlp = layer.mlp if hasattr(layer, "mlp") else layer.feed_forward  # LFM2's
        mlp.forward = types.MethodType(forward, mlp)


def tile_loss(model: torch.nn.Module, tiles: int) -> None:
    """Head and loss of one piece of the sequence after the other: only one piece's logits exist. The model returns the
    sum of the losses when it is called with targets, and is what it was without.

    ZeRO reduces a gradient when it is ready. That of a head tied to the embedding is not when the pieces are done: the
    embedding adds its own at the end of the backward pass.

    Not TiledFusedLogitsLoss: it makes the head's gradient before the engine divides the loss by the micro-batches.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    cap = getattr(model.config, "final_logit_softcapping", None)
    scale = getattr(model.config, "lm_head_multiplier", 1.0) / getattr(model.config, "logits_scaling", 1.0)
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table

    def forward(self: torch.nn.Module, *words: Any, targets: torch.Tensor | None = None, **inputs: Any) -> Any:
        if targets is None:
            return type(self).forward(self, *words, **inputs)
        head = self.get_output_embeddings()
        hidden = self.base_model(**inputs).last_hidden_state
        if tied and hidden.requires_grad:
            table.ds_grad_is_ready = False
            hidden.register_hook(lambda _: setattr(table, "ds_grad_is_ready", True))  # when all pieces are done

        def piece(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            if scale != 1.0:
                logits = logits * scale
            if cap is not None:
                logits = torch.tanh(logits / cap) * cap
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

        return sequence_tiled_compute(
            piece,
            seqlen=targets.shape[1],
            shards=tiles,
            kwargs_to_shard={"hidden": hidden, "targets": targets},
            kwargs_to_pass={},
            grad_requiring_tensor_key="hidden",
            compute_params=[weight for weight in head.parameters() if not (tied and weight is table)],
            output_unshard_dimension=0,
            output_reduction="sum",
        )

    model.forward = types.MethodType(forward, model)
    model.returns_loss = True


def apply_techniques(model: torch.nn.Module, settings: dict[str, Any], args: argparse.Namespace) -> None:
    """What is recomputed, chunked and tiled."""
    if is_mixture(model.config) and (args.mlp_chunks > 1 or args.loss_tiles > 1):
        refuse("--mlp-chunks and --loss-tiles are for dense models: a mixture's balancing loss would be lost")
    if args.gradient_checkpointing:
        recompute_layers(model, settings, args.offload_checkpoints)
    if args.mlp_chunks > 1:
        chunk_mlps(model, args.mlp_chunks)
    if args.loss_tiles > 1:
        tile_loss(model, args.loss_tiles)
