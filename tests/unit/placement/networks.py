"""Made-up networks for tests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from llmlaunch.placement.traffic import Sizes, Volumes, inverse, traffic

if TYPE_CHECKING:
    from llmlaunch.placement.traffic import Term


def uneven(nodes: int, seed: int) -> list[list[float]]:
    """Bytes per second as published matrices of one InfiniBand cluster have them: 16.2 to 19.8 GB/s, each direction
    for itself."""
    chance = random.Random(seed)
    return [[0.0 if i == j else chance.uniform(16.2e9, 19.8e9) for j in range(nodes)] for i in range(nodes)]


def two_levels(nodes: int, under_a_switch: int, seed: int) -> list[list[float]]:
    """Nodes under switches, twice as fast below one as between two, named in an order that does not show it."""
    chance = random.Random(seed)
    switch = [node // under_a_switch for node in range(nodes)]
    chance.shuffle(switch)
    return [
        [
            0.0 if i == j else (20e9 if switch[i] == switch[j] else 10e9) * chance.uniform(0.97, 1.03)
            for j in range(nodes)
        ]
        for i in range(nodes)
    ]


def job(nodes: int, pipeline: int, devices: int = 8, **sizes: int) -> dict[str, Term]:
    """The traffic of a dense job that fills the nodes, tensor parallel inside each."""
    stage = nodes * devices // pipeline
    whole = Sizes(tensor=devices, pipeline=pipeline, data=stage // devices, **sizes)
    return traffic(whole, Volumes(pipeline=2e9, data=(3e9,) * pipeline), devices)


@st.composite
def small_jobs(draw: st.DrawFn, most_nodes: int) -> tuple[dict[str, Term], list[list[float]]]:
    """Any split of up to `most_nodes` nodes of up to 4 devices, and seconds per byte between them."""
    nodes, devices = draw(st.integers(2, most_nodes)), draw(st.sampled_from([1, 2, 4]))
    world = nodes * devices

    def divisor(of: int) -> int:
        return draw(st.sampled_from([n for n in range(1, of + 1) if of % n == 0]))

    pipeline = divisor(world)
    tensor = divisor(world // pipeline)
    context = divisor(world // pipeline // tensor)
    expert = divisor(world // pipeline)
    sizes = Sizes(
        tensor=tensor,
        context=context,
        data=world // pipeline // tensor // context,
        pipeline=pipeline,
        virtual_pipeline=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        expert=expert,
        expert_tensor=divisor(world // pipeline // expert),
    )
    bytes_ = st.sampled_from([0.0, 1e6, 3e9])
    volumes = Volumes(
        pipeline=draw(bytes_),
        data=tuple(draw(bytes_) for _ in range(pipeline)),
        expert_data=tuple(draw(bytes_) for _ in range(pipeline)),
        expert=draw(bytes_),
    )
    speeds = draw(st.sampled_from([uneven, lambda n, seed: two_levels(n, 2, seed)]))(nodes, draw(st.integers(0, 99)))
    return traffic(sizes, volumes, devices), inverse(speeds)
