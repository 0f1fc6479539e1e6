"""A weight that bitsandbytes quantizes takes the bytes that are priced."""

from __future__ import annotations

import pytest

from llmlaunch.effects.quantized_base import NF4_BYTES

pytestmark = pytest.mark.frameworks


def test_a_quantized_weight_takes_the_bytes_that_are_priced() -> None:
    import torch
    from bitsandbytes.functional import quantize_4bit

    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))
    narrow, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    taken = narrow.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert taken == NF4_BYTES * weight.numel()
