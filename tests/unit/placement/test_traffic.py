"""What crosses from node to node, by hand and against ranks counted one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.placement.traffic import Sizes, Volumes, inverse, order_seconds, term_seconds, traffic


def test_a_job_inside_one_node_sends_nothing_between_nodes() -> None:
    assert traffic(Sizes(tensor=4, pipeline=2), Volumes(pipeline=1.0, data=(1.0, 1.0)), 8) == {}


def test_two_stages_of_two_nodes_are_two_pipelines_and_two_rings() -> None:
    # ranks 0-15 are stage 0 on nodes 0 and 1, ranks 16-31 stage 1 on nodes 2 and 3
    terms = traffic(Sizes(tensor=8, data=2, pipeline=2), Volumes(pipeline=5.0, data=(7.0, 9.0)), 8)
    assert set(terms["pipeline"]) == {((0, 2, 5.0), (2, 0, 5.0)), ((1, 3, 5.0), (3, 1, 5.0))}
    assert set(terms["data"]) == {((0, 1, 7.0),), ((1, 0, 7.0),), ((2, 3, 9.0),), ((3, 2, 9.0),)}


def test_the_members_of_a_ring_in_a_node_share_what_leaves_it() -> None:
    sizes, sent = Sizes(tensor=2, data=8), Volumes(data=(8.0,), expert_data=(6.0,))
    assert traffic(sizes, sent, 4)["data"] == tuple(((a, b, 4.0),) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0)))
    rack = traffic(sizes, sent, 4, nvlink_domain_devices=8)  # two nodes to a domain
    assert {path[0][2] for path in rack["data"]} == {2.0}
    assert {path[0][2] for path in rack["expert_data"]} == {6.0 / 8}


def test_stages_that_share_a_node_hop_only_where_they_leave_it() -> None:
    # four stages of four ranks on two nodes of eight
    terms = traffic(Sizes(tensor=4, pipeline=4), Volumes(pipeline=1.0, data=(1.0,) * 4), 8)
    assert terms == {"pipeline": (((0, 1, 1.0), (1, 0, 1.0)),)}


def test_interleaving_hops_once_for_each_chunk_and_goes_back_to_the_first_stage() -> None:
    terms = traffic(Sizes(pipeline=2, virtual_pipeline=3), Volumes(pipeline=1.0, data=(0.0, 0.0)), 1)
    assert terms == {"pipeline": (((0, 1, 3.0), (1, 0, 2.0), (1, 0, 3.0), (0, 1, 2.0)),)}


def test_an_exchange_of_experts_over_two_nodes_sends_to_every_expert_of_the_other() -> None:
    terms = traffic(Sizes(tensor=1, data=8, expert=8), Volumes(expert=1.0, data=(0.0,)), 4)
    assert terms == {"expert": (((0, 1, 4.0),), ((1, 0, 4.0),))}


def test_an_interrupted_ring_costs_its_slowest_link_and_a_pipeline_the_sum_of_its_hops() -> None:
    terms = traffic(Sizes(pipeline=3), Volumes(pipeline=6.0), 1)
    cost = inverse([[0, 3, 1], [2, 0, 6], [1, 1, 0]])
    # forward at 3 and 6 bytes a second, back at 1 and 2
    assert term_seconds(terms, (0, 1, 2), cost) == {"pipeline": pytest.approx(6 / 3 + 6 / 6 + 6 / 1 + 6 / 2)}
    ring = traffic(Sizes(data=3), Volumes(data=(6.0,)), 1)
    assert order_seconds(ring, (0, 1, 2), cost) == pytest.approx(6 / 1)
    assert order_seconds(ring, (0, 2, 1), cost) == pytest.approx(6 / 1)


def groups(sizes: Sizes, devices: int) -> dict[str, set[frozenset[int]]]:
    """Nodes of every pipeline and data-parallel group, from each rank's own coordinates in the order tp-cp-dp-pp."""
    ranks = itertools.product(*(range(n) for n in (sizes.pipeline, sizes.data, sizes.context, sizes.tensor)))
    pipelines: dict[tuple[int, ...], set[int]] = {}
    rings: dict[tuple[int, ...], set[int]] = {}
    for rank, (stage, data, context, tensor) in enumerate(ranks):
        pipelines.setdefault((data, context, tensor), set()).add(rank // devices)
        rings.setdefault((stage, tensor), set()).add(rank // devices)
    several = [{frozenset(n) for n in nodes.values() if len(n) > 1} for nodes in (pipelines, rings)]
    return dict(zip(("pipeline", "data"), several, strict=True))


@given(st.tuples(*(st.sampled_from([1, 2, 3, 4]) for _ in range(4))), st.sampled_from([1, 2, 4]))
def test_every_group_that_spans_nodes_is_there_and_no_other(split: tuple[int, ...], devices: int) -> None:
    sizes = Sizes(tensor=split[0], context=split[1], data=split[2], pipeline=split[3])
    if sizes.stage * sizes.pipeline % devices:
        return
    terms = traffic(sizes, Volumes(pipeline=1.0, data=(1.0,) * sizes.pipeline), devices)
    wanted = groups(sizes, devices)
    pipelines = {frozenset(rank for hop in path for rank in hop[:2]) for path in terms.get("pipeline", ())}
    assert pipelines == wanted["pipeline"]
    links = {frozenset(path[0][:2]) for path in terms.get("data", ())}
    assert {rank for link in links for rank in link} == {rank for group in wanted["data"] for rank in group}
    for group in wanted["data"]:
        inside = [link for link in links if link <= group]
        assert len(inside) >= len(group) - (len(group) == 2)
