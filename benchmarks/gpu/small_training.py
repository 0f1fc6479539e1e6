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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20, help="steps before those that are timed")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--reset-every", type=int, default=0, help="steps between resets of the counters; 0 = never")
    parser.add_argument("--spike-mib", type=int, default=0, help="held for 20 ms after the last step")
    parser.add_argument("--stand-in", action="store_true")
    return parser.parse_args()


def build(torch: Any, options: argparse.Namespace, device: str) -> tuple[Any, Any]:
    layer = torch.nn.TransformerEncoderLayer(
        options.hidden, options.hidden // 64, 4 * options.hidden, dropout=0.0, norm_first=True, batch_first=True
    )
    model = torch.nn.Sequential(
        torch.nn.Embedding(32_000, options.hidden),
        torch.nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False),
        torch.nn.Linear(options.hidden, 32_000),
    ).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(torch: Any, options: argparse.Namespace, fake: Any) -> dict[str, Any]:
    device = "cpu" if fake else "cuda"
    torch.manual_seed(1)
    model, optimizer = build(torch, options, device)
    tokens = torch.randint(32_000, (options.batch, options.tokens + 1), device=device)
    counters, seconds = Counters(torch), []
    for step in range(options.warm_up + options.steps):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # the device has come to the end of the step
        if fake:
            fake.hold(500 * MIB)
            fake.release(500 * MIB)
        if options.reset_every and (step + 1) % options.reset_every == 0:
            counters.take(reset=True)
        if step >= options.warm_up:
            seconds.append(time.perf_counter() - start)
    if options.spike_mib:
        spike(torch, options.spike_mib * MIB, fake)
    counters.take(reset=True)
    peaks = {"allocated_peak_bytes": counters.allocated, "reserved_peak_bytes": counters.reserved}
    return {"pid": os.getpid(), "step_seconds": seconds, **peaks, **versions(torch, fake)}


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
