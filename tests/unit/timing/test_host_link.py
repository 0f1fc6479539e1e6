"""What travels between a device and its node's memory: over which link, how much, and what is computed instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timed_jobs import BASE, H100, RACK, job, term, total

from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.techniques import Techniques
from llmlaunch.timing.network import host_link, host_link_bytes_per_second


def test_grace_reaches_its_devices_over_nvlink_and_others_over_pcie() -> None:
    assert host_link(RACK).name == "NVLink-C2C"
    assert host_link(H100).name == "16 lanes of PCIe 5.0"
    assert host_link_bytes_per_second(RACK) > 4 * host_link_bytes_per_second(H100)
    slow = replace(RACK, accelerator=replace(RACK.accelerator, host_link=None))
    offloaded = job(techniques=Techniques(offload_optimizer=1.0))
    assert term("optimizer", BASE, offloaded, slow) > 2 * term("optimizer", BASE, offloaded, RACK)


def host_bytes(share: float) -> int:
    swapping = job(techniques=Techniques(swapped_share=share))
    return estimate(swapping, BASE, node=HostNode(processes=8)).host_terms["offloaded_activations"]


def test_what_is_not_swapped_is_recomputed() -> None:
    """The time between nothing and a whole forward pass of matrix products; none where all is swapped."""
    again = [term("recompute", BASE, job(techniques=Techniques(swapped_share=share))) for share in (0.01, 0.5, 1.0)]
    assert again[2] == 0
    assert again[1] == pytest.approx(again[0] * 0.5 / 0.99)
    assert 0.5 < again[0] / (term("matrix_products", BASE) / 3) < 1.2
    full = replace(BASE, recompute=RECOMPUTE_FULL)
    swapping = job(techniques=Techniques(swapped_share=0.5))
    assert term("recompute", full, swapping) == pytest.approx(term("recompute", full))


def test_a_smaller_swapped_share_needs_less_of_the_host_but_never_nothing() -> None:
    """A layer's input and the attention's output, a good tenth of it here, are always swapped whole."""
    little, half, whole = (host_bytes(share) for share in (1e-9, 0.5, 1.0))
    assert 0.1 * whole < little < half < whole
    assert half == pytest.approx((little + whole) / 2, rel=1e-6)


def test_swapping_over_a_fast_link_is_never_slower() -> None:
    swapping = job(techniques=Techniques(swapped_share=1.0))
    slow = replace(RACK, accelerator=replace(RACK.accelerator, host_link=None))
    assert total(BASE, swapping, RACK) < total(BASE, swapping, slow)
