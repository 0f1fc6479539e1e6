"""Which links a group of ranks uses; and what travels between a device and its node's memory: over which link, how
much, and what is computed instead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from timed_jobs import BASE, H100, MIXTRAL, RACK, job, term

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.techniques import Techniques
from llmlaunch.timing.network import all_to_all, host_link, host_link_bytes_per_second, links, neighbour, ring
from llmlaunch.timing.products import constant

NEAR, FAR = constant("nvlink_efficiency"), constant("fabric_efficiency")


def bandwidth(size: int, stride: int, cluster: Cluster) -> float:
    return float(links(cluster, np.array([float(size)]), np.array([float(stride)])).bytes_per_second[0])


@pytest.mark.parametrize(
    ("cluster", "size", "stride", "expected"),
    [
        (H100, 8, 1, NEAR * 450e9),
        (H100, 4, 2, NEAR * 450e9),
        (H100, 2, 8, FAR * 50e9),  # one device of each node
        (H100, 16, 4, FAR * 100e9),  # two of each
        (H100, 64, 1, FAR * 400e9),  # all eight
        (RACK, 8, 1, NEAR * 900e9),  # GB200: 4 devices to a node, 72 to a domain
        (RACK, 72, 1, NEAR * 900e9),
        (RACK, 16, 4, NEAR * 900e9),
        (RACK, 32, 4, FAR * 50e9 * 18),  # 18 members in a rack, 18 adapters
        (RACK, 2, 72, FAR * 50e9),
    ],
)
def test_a_group_runs_at_the_links_of_its_tier_and_shares_the_adapters_of_its_members(
    cluster: Cluster, size: int, stride: int, expected: float
) -> None:
    assert bandwidth(size, stride, cluster) == pytest.approx(expected, rel=1e-12)


def test_a_slower_domain_is_priced_between_node_and_fabric() -> None:
    slower = replace(RACK, domain_link=Link(300e9, 1e-5))
    assert bandwidth(4, 1, slower) == NEAR * 900e9
    assert bandwidth(8, 1, slower) == NEAR * 300e9
    layout = replace(BASE, tensor=8, data=2)
    assert term("tensor_parallel", layout, cluster=slower) > term("tensor_parallel", layout, cluster=RACK)


def test_a_measured_link_is_taken_as_it_is() -> None:
    measured = replace(H100, fabric_link=replace(H100.fabric_link, measured=True))
    assert bandwidth(2, 8, measured) == 50e9
    assert bandwidth(8, 1, measured) == NEAR * 450e9


def test_without_a_switch_a_pair_has_only_its_own_links() -> None:
    mesh = replace(H100, devices_per_node=4, nvlink_domain_devices=4, node_mesh=True)
    assert [bandwidth(n, 1, mesh) / bandwidth(4, 1, mesh) for n in (2, 3, 4)] == pytest.approx([1 / 3, 2 / 3, 1])
    single, pair, message = np.array([1.0]), np.array([2.0]), np.array([1e9])
    switched, alone = (neighbour(cluster, single, pair, message)[0] for cluster in (H100, mesh))
    assert alone == pytest.approx(3 * switched, rel=0.01)


def test_a_ring_moves_all_but_one_share_and_one_rank_moves_nothing() -> None:
    size, stride = np.array([1.0, 8.0]), np.array([1.0, 1.0])
    alone, together = ring(links(H100, size, stride), size, np.array([8e9, 8e9]))
    assert alone == 0
    assert together == pytest.approx(7e9 / (NEAR * 450e9), rel=0.01)


def test_experts_across_nodes_send_over_the_fabric_what_leaves_the_node() -> None:
    size, stride, message = np.array([16.0]), np.array([1.0]), np.array([16e9])
    far, near = constant("fabric_exchange_efficiency"), constant("nvlink_exchange_efficiency")
    assert all_to_all(H100, size, stride, message)[0] == pytest.approx(8e9 / (far * 50e9), rel=0.01)
    assert all_to_all(RACK, size, stride, message)[0] == pytest.approx(15e9 / (near * 900e9), rel=0.01)
    spread, alone = (Layout(data=16, expert=e, zero_stage=1) for e in (8, 1))
    assert term("expert_parallel", spread, job(MIXTRAL)) > term("expert_parallel", alone, job(MIXTRAL))


def test_stages_are_the_outermost_ranks() -> None:
    count, message = np.array([2.0]), np.array([1e9])
    inside = neighbour(H100, np.array([4.0]), count, message)[0]
    across = neighbour(H100, np.array([8.0]), count, message)[0]
    assert across > 5 * inside
    assert neighbour(H100, np.array([8.0]), np.array([1.0]), message)[0] == 0


def on_matrix(speed: float) -> Cluster:
    """Sixteen nodes that all reach each other at one measured speed."""
    matrix = BandwidthMatrix(tuple(f"n{i:02}" for i in range(16)), tuple(((speed,) * 16,) * 16))
    return replace(H100, bandwidth=matrix).between(16)


def test_an_even_measured_network_is_a_measured_fabric() -> None:
    fabric = replace(H100, fabric_link=replace(H100.fabric_link, bytes_per_second=7e9, measured=True))
    for layout in (BASE, replace(BASE, pipeline=1, data=BASE.data * BASE.pipeline)):
        for name in ("data_parallel", "pipeline_transfer", "tensor_parallel"):
            assert term(name, layout, cluster=on_matrix(7e9)) == pytest.approx(term(name, layout, cluster=fabric))
    spread = Layout(data=128, expert=16, zero_stage=1)
    matrix, even = (term("expert_parallel", spread, job(MIXTRAL), cluster=at) for at in (on_matrix(7e9), fabric))
    assert matrix == pytest.approx(even)


ON_PCIE = replace(RACK, accelerator=replace(RACK.accelerator, host_link=None))


def test_grace_reaches_its_devices_over_nvlink_and_others_over_pcie() -> None:
    assert host_link(RACK).name == "NVLink-C2C"
    assert host_link(H100).name == "16 lanes of PCIe 5.0"
    assert host_link_bytes_per_second(RACK) > 4 * host_link_bytes_per_second(H100)
    offloaded = job(techniques=Techniques(offload_optimizer=1.0))
    assert term("optimizer", BASE, offloaded, ON_PCIE) > 2 * term("optimizer", BASE, offloaded, RACK)


def test_devices_that_share_an_uplink_divide_it_and_what_was_measured_is_taken_as_it_is() -> None:
    a100 = load_cluster("a100-80gb-x8")
    assert host_link_bytes_per_second(a100) == pytest.approx(12.6e9)
    alone = replace(a100, devices_per_uplink=1)
    assert host_link_bytes_per_second(alone) == pytest.approx(25.2e9)
    measured = load_cluster({"base": "a100-80gb-x8", "links": {"host": {"gigabytes_per_second": 13.1}}})
    assert host_link_bytes_per_second(measured) == 13.1e9
    offloaded = job(techniques=Techniques(offload_optimizer=1.0))
    shared, own = (term("optimizer", BASE, offloaded, at) for at in (a100, alone))
    assert shared > 1.1 * own
    faster = replace(a100, host_copy_bytes_per_second=1e12)  # the host's own Adam is not a copy
    assert term("optimizer", BASE, offloaded, faster) > 0.2 * own


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
