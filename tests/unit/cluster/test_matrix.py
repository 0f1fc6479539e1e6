"""Measured bandwidths: the file is read strictly and reads back; its worth to the groups of a job, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.matrix import BandwidthMatrix, MeasuredNetwork, matrix_text, measured_network, read_matrix
from llmlaunch.errors import UserError

GOOD = """\
{
 "schema": 1,
 "nodes": ["a", "b", "c"],
 "gigabytes_per_second": [
  [null, 18.5, 17],
  [16.25, 0, 19.5],
  [18, 17.5, null]
 ]
}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "links.json"
    path.write_text(text)
    return path


def test_a_matrix_is_bytes_per_second_and_its_diagonal_means_nothing(tmp_path: Path) -> None:
    matrix = read_matrix(written(tmp_path, GOOD))
    assert matrix.nodes == ("a", "b", "c")
    assert matrix.bytes_per_second == ((0.0, 18.5e9, 17e9), (16.25e9, 0.0, 19.5e9), (18e9, 17.5e9, 0.0))


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    speeds = [[0.0, 1.5e9], [2.5e9, 0.0]]
    path = written(tmp_path, matrix_text(["n1", "n2"], speeds, {"message_bytes": 1, "backend": "gloo"}))
    assert read_matrix(path).bytes_per_second == tuple(map(tuple, speeds))
    assert json.loads(path.read_text())["measured"]["backend"] == "gloo"


@pytest.mark.parametrize(
    ("old", "new", "place", "sentence"),
    [
        ("18.5", "NaN", " gigabytes_per_second[0][1]: ", "a to b is NaN, no finite number"),
        ("19.5", "Infinity", " gigabytes_per_second[1][2]: ", "b to c is Infinity, no finite number"),
        ("17.5", "-17.5", " gigabytes_per_second[2][1]: ", "c to b is -17.5, negative"),
        ("17.5", "1e12", " gigabytes_per_second[2][1]: ", "more than any network does"),
        ("17.5", "true", " gigabytes_per_second[2][1]: ", "c to b is true, no number"),
        ("17.5", "null", " gigabytes_per_second[2][1]: ", "c to b is null, no number"),
        ("18.5", "0", " gigabytes_per_second[0][1]: ", "a to b is 0, though b to a is 16.25"),
        ("[16.25, 0, 19.5]", "[16.25, 0]", " gigabytes_per_second[1]: ",
         "the row of b has 2 numbers for 3 nodes; a matrix is square"),
        ("[16.25, 0, 19.5]", "7", " gigabytes_per_second[1]: ", "the row of b is no list"),
        ('"b", "c"]', '"b"]', " gigabytes_per_second: ", "there are 2 nodes but 3 rows"),
        ('"b", "c"]', '"b", "a"]', " nodes[2]: ", "a stands twice"),
        ('"b", "c"]', '"b", "c d"]', " nodes[2]: ", '"c d" is no node name'),
        ('["a", "b", "c"]', '["a"]', " nodes: ", "at least two node names"),
        ('"schema": 1', '"schema": 2', " schema: ", "another version of the format"),
        (' "schema": 1,\n', "", " schema: ", "schema: is missing"),
        ('"schema": 1', '"schema": 1, "unit": "MB"', " unit: ", "unit: is not a known key"),
        ('"schema": 1', '"schema": 1, "schema": 1', "1: ", "'schema' stands twice"),
        ("18.5,", "18.5 ", "5: ", "is not valid JSON"),
        (GOOD, "[1, 2]", " is no ", "is no JSON object"),
    ],
    ids=range(19),
)  # fmt: skip
def test_a_bad_matrix_is_refused_with_its_place(old: str, new: str, place: str, sentence: str, tmp_path: Path) -> None:
    assert GOOD.count(old) == 1
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UserError) as caught:
        read_matrix(path)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert message.startswith(f"{path}:{place}")


def test_zeros_both_ways_are_refused_too(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("18.5", "0").replace("16.25", "0"))
    with pytest.raises(UserError, match="a to b is 0, and so is the way back"):
        read_matrix(path)


def test_the_profile_names_its_matrix_relative_to_itself(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    (tmp_path / "site.yaml").write_text("base: cpu-x1\nlinks: {matrix: links.json}\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "ours.yaml").write_text("base: ../site.yaml\nnodes_per_switch: 4\n")
    cluster = load_cluster("deeper/ours.yaml", tmp_path)
    assert cluster.bandwidth is not None
    assert cluster.bandwidth.nodes == ("a", "b", "c")
    assert cluster.nodes_per_switch == 4
    inline = load_cluster({"base": "cpu-x1", "links": {"matrix": "links.json"}}, tmp_path)
    assert inline.bandwidth == cluster.bandwidth


def test_a_bad_matrix_is_told_with_the_profile_that_names_it(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("18.5", "NaN"))
    (tmp_path / "site.yaml").write_text("base: cpu-x1\nlinks: {matrix: links.json}\n")
    with pytest.raises(UserError) as caught:
        load_cluster("./site.yaml", tmp_path)
    assert f"site.yaml: links.matrix: {path}: gigabytes_per_second[0][1]: " in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=r"links\.json: cannot be read"):
        load_cluster("./site.yaml", tmp_path)


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
