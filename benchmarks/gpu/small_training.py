"""A small GPT trained on one device: what the scripts beside this start. One JSON line on stdout says how it went.

    python benchmarks/gpu/small_training.py [--steps N] [--reset-every N] [--spike-mib N] [--stand-in]

With --stand-in it trains on the CPU and moves the counters of tests/support/fake_allocator.py, for trying the scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
VOCABULARY, HEAD_SIZE = 32_000, 64


class Counters:
    """The trainer's own account of torch's peaks, over its own resets of them: what the probe must come to as well."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.allocated, self.reserved = torch, 0, 0

    def take(self, reset: bool) -> None:
        cuda = self.torch.cuda
        self.allocated = max(self.allocated, cuda.max_memory_allocated())
        self.reserved = max(self.reserved, cuda.max_memory_reserved())
        if reset:
            cuda.reset_peak_memory_stats()


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20, help="steps before those that are timed")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true", help="recompute every layer in the backward pass")
    parser.add_argument("--bf16", action="store_true", help="parameters and states in bf16, instead of autocast")
    parser.add_argument("--reset-every", type=int, default=0, help="steps between resets of the counters; 0 = never")
    parser.add_argument("--spike-mib", type=int, default=0, help="held for 20 ms after the last step")
    parser.add_argument("--stand-in", action="store_true")
    return parser.parse_args(argv)


def build(torch: Any, options: argparse.Namespace, device: str) -> tuple[Any, Any]:
    torch.set_default_dtype(torch.bfloat16 if options.bf16 else torch.float32)
    with torch.device(device):
        layer = torch.nn.TransformerEncoderLayer(
            options.hidden,
            options.hidden // HEAD_SIZE,
            4 * options.hidden,
            dropout=0.0,
            norm_first=True,
            batch_first=True,
        )
        model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, options.hidden),
            torch.nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False),
            torch.nn.Linear(options.hidden, VOCABULARY),
        )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)


def step(torch: Any, model: Any, optimizer: Any, tokens: Any, options: argparse.Namespace) -> Any:
    """One training step on all of `tokens`; returns the loss, which the device may still be working on."""
    embedding, layers, head = model
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=not options.bf16):
        hidden = embedding(tokens[:, :-1])
        if options.checkpointing:
            hidden = torch.utils.checkpoint.checkpoint_sequential(
                list(layers.layers), options.layers, hidden, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden = layers(hidden)
        logits = head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    del hidden, logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(torch: Any, options: argparse.Namespace, fake: Any) -> dict[str, Any]:
    device = "cpu" if fake else "cuda"
    torch.manual_seed(1)
    model, optimizer = build(torch, options, device)
    tokens = torch.randint(VOCABULARY, (options.batch, options.tokens + 1), device=device)
    counters, seconds = Counters(torch), []
    for number in range(options.warm_up + options.steps):
        start = time.perf_counter()
        loss = step(torch, model, optimizer, tokens, options)
        loss.item()  # the device has come to the end of the step
        if fake:
            fake.hold(500 * MIB)
            fake.release(500 * MIB)
        if options.reset_every and (number + 1) % options.reset_every == 0:
            counters.take(reset=True)
        if number >= options.warm_up:
            seconds.append(time.perf_counter() - start)
    if options.spike_mib:
        spike(torch, options.spike_mib * MIB, fake)
    counters.take(reset=True)
    peaks = {"allocated_peak_bytes": counters.allocated, "reserved_peak_bytes": counters.reserved}
    return {"pid": os.getpid(), "step_seconds": seconds, **peaks, **versions(torch, fake)}


def described(options: argparse.Namespace, about: dict[str, Any], expandable: bool | None) -> dict[str, Any]:
    """Return the training as a measurement record has it, without its peak. Its backend is torch itself, which no
    formula of ours prices."""
    heads, numbers = options.hidden // HEAD_SIZE, "bf16" if options.bf16 else "fp32"
    model = {
        **{"name": f"encoder-{options.layers}x{options.hidden}", "num_layers": options.layers},
        **{"hidden_size": options.hidden, "ffn_hidden_size": 4 * options.hidden, "num_attention_heads": heads},
        **{"num_query_groups": heads, "head_dim": HEAD_SIZE, "vocab_size": VOCABULARY},
        **{"padded_vocab_size": VOCABULARY, "vocab_assumed": False, "tied_embeddings": False, "gated_mlp": False},
        **{"linear_bias": True, "normalization": "LayerNorm", "position_embedding": "none", "qk_layernorm": False},
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "mtp_num_layers": 0, "moe": None, "mla": None},
    }
    sizes = dict.fromkeys(("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data"), 1)
    return {
        **{"backend": "torch", "backend_version": about["torch"], "world_size": 1, "model": model},
        **{"sequence_length": options.tokens, "micro_batch_size": options.batch, "global_batch_size": options.batch},
        **{"num_microbatches": 1, "parallelism": {**sizes, "sequence_parallel": False, "microbatch_group": 1}},
        "optimizer": {
            **{"name": "adamw", "zero_stage": 0, "distributed_optimizer": False, "parameter_dtype": numbers},
            **{"gradient_dtype": numbers, "state_dtype": numbers, "state_bytes_per_parameter": None, "offload": None},
        },
        "recompute": {"granularity": "full" if options.checkpointing else "none", "method": None, "num_layers": 1},
        "precision": {"compute": "bf16", "fp8_recipe": None, "fp8_param_gather": False},
        "implementation": {"attention": "auto", "torch_compile": False, "expandable_segments": expandable},
    }


def spike(torch: Any, size: int, fake: Any) -> None:
    """Taken, given back to the device and forgotten by the counters within 20 ms."""
    if fake:
        fake.hold(size)
        fake.release(size)
        return
    block = torch.empty(size, dtype=torch.uint8, device="cuda")
    time.sleep(0.02)
    del block


def versions(torch: Any, fake: Any) -> dict[str, Any]:
    gpu = "stand-in" if fake else torch.cuda.get_device_name()
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu, "python": sys.version.split()[0]}


def main() -> None:
    options = arguments()
    import torch

    fake: Any = None
    if options.stand_in:
        sys.path.insert(0, str(ROOT / "tests" / "support"))
        import fake_allocator as fake

        fake.install(devices=1)
        if os.environ.get("FAKE_LIBCUDA"):
            fake.driver()
    elif not torch.cuda.is_available():
        sys.exit("small_training.py: torch sees no CUDA device here; --stand-in trains on the CPU")
    torch.cuda.init()
    print(json.dumps(train(torch, options, fake)), flush=True)


if __name__ == "__main__":
    main()
