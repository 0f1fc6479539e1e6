"""A measured matrix, as the groups of a job see it; links by hand and against ranks counted one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.cluster.matrix import BandwidthMatrix, MeasuredNetwork, measured_network


def matrix_of(speeds: list[list[float]]) -> BandwidthMatrix:
    return BandwidthMatrix(tuple(f"n{i}" for i in range(len(speeds))), tuple(map(tuple, speeds)))


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


# seconds per byte of a way from a node (row) to another (column)
NETWORK = MeasuredNetwork(np.array([[0.0, 1.0, 2.0], [4.0, 0.0, 8.0], [16.0, 32.0, 0.0]]), devices_per_node=2)


def test_a_ring_runs_at_its_slowest_link_and_none_inside_a_node_is_asked_for() -> None:
    # six ranks on three nodes: all; every second; pairs inside nodes
    assert NETWORK.ring(column(6, 3, 2), column(1, 2, 1)).tolist() == [16.0, 16.0, 0.0]


def test_a_pipeline_takes_the_mean_of_its_hops_there_and_back() -> None:
    assert NETWORK.chain(column(3), column(2)).tolist() == [(1 + 8 + 4 + 32) / 4]
    # stages of one rank: three of five boundaries stay inside a node
    assert NETWORK.chain(column(6), column(1)).tolist() == [(1 + 8 + 4 + 32) / 4]


def test_an_exchange_waits_for_the_node_that_sends_the_slowest() -> None:
    # node 2 sends to two ranks of node 0 and two of node 1
    assert NETWORK.exchange(column(6), column(1)).tolist() == [(2 * 16 + 2 * 32) / 4]


def test_the_job_is_priced_on_the_first_nodes_by_name_in_the_order_given() -> None:
    matrix = BandwidthMatrix(("b", "a", "c"), ((0, 2, 4), (8, 0, 16), (32, 64, 0)))
    network = measured_network(matrix, 2, 1, order=[1, 0])
    assert network.seconds_per_byte.tolist() == [[0, 1 / 8], [1 / 2, 0]]
    assert measured_network(matrix, 2, 1).seconds_per_byte.tolist() == [[0, 1 / 8], [1 / 2, 0]]


def test_nodes_the_matrix_does_not_know_get_the_median_of_its_links() -> None:
    network = measured_network(matrix_of([[0, 1.0, 2.0], [1.0, 0, 4.0], [2.0, 4.0, 0]]), 5, 1)
    assert network.seconds_per_byte.shape == (5, 5)
    assert set(network.seconds_per_byte[3:].ravel().tolist()) == {0.5, 0.0}
    assert np.all(np.diag(network.seconds_per_byte) == 0)


def test_near_nodes_follow_each_other_unless_the_order_is_given() -> None:
    near = ({0, 2}, {1, 3})
    matrix = matrix_of([[8.0 if {i, j} in near else 1.0 for j in range(4)] for i in range(4)])
    assert measured_network(matrix, 4, 1).ring(column(2), column(1)).tolist() == [1 / 8]
    assert measured_network(matrix, 4, 1, order=[0, 1, 2, 3]).ring(column(2), column(1)).tolist() == [1.0]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_every_ring_of_every_group_is_looked_at_and_no_other(
    size: int, stride: int, blocks: int, devices: int, seed: int
) -> None:
    world = size * stride * blocks
    if world % devices:
        return
    nodes = world // devices
    seconds = np.random.default_rng(seed).uniform(1, 2, (nodes, nodes))
    np.fill_diagonal(seconds, 0.0)
    slowest = 0.0
    for first in (b * size * stride + offset for b in range(blocks) for offset in range(stride)):
        group = [(first + i * stride) // devices for i in range(size)]
        slowest = max(slowest, *(seconds[a, b] for a, b in zip(group, [*group[1:], group[0]], strict=True)))
    ring = MeasuredNetwork(seconds, devices).ring(column(size), column(stride))
    assert ring.tolist() == [pytest.approx(slowest)]
