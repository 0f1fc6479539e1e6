"""What a rank holds beside tensors, against sums done by hand: what torch's allocator keeps with and without segments
that expand, and what NCCL's communicators hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import shapes
from shapes import LLAMA3_70B, MIXTRAL

from llmlaunch.calibration.cases import predict
from llmlaunch.calibration.records import Record
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import Layout
from llmlaunch.memory.constants import constant
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from llmlaunch.units import MIB
from validation.cases import case_or_reason

DATA = Path(__file__).parents[2] / "data" / "measurements"
SPLIT = Layout(pipeline=2, data=4, zero_stage=1)
CUT = replace(LLAMA3_70B, num_layers=12)


def reserved_apart(shape: ModelShape, layout: Layout, expandable: bool, length: int) -> list[int]:
    """Bytes that the allocator reserves beyond its share, by pipeline rank."""
    facts = megatron_facts(MegatronOptions(loss="te", expandable_segments=expandable))
    return [
        rank.terms["allocator_cache"] - round(facts.allocator.cache_share * rank.allocated_bytes)
        for rank in shapes.ranks(shape, layout, facts, length=length)
    ]


def test_the_gradient_of_a_table_gets_a_segment_of_its_own_where_segments_do_not_expand() -> None:
    """Beside it lie halves of a hidden-wide tensor: of 4096 tokens x 8192, 64 MiB, a matrix of queries, keys and values
    (160 MiB) holds two and a half; the other matrices hold them whole. The last rank has no table's gradient."""
    table, halves = 2 * 128256 * 8192, 6 * 32 * MIB
    assert reserved_apart(CUT, SPLIT, expandable=False, length=4096) == [table + halves, halves]
    assert reserved_apart(CUT, SPLIT, expandable=True, length=4096) == [0, 0]


def test_activations_waste_what_they_cannot_use_of_the_segments_parameters_were_made_in() -> None:
    """16,384 tokens make hidden-wide tensors of 256 MiB. Matrices of 896, 448, 160 and 128 MiB hold three, one and none
    of them: 128 + 192 + 160 + 128 MiB are left, in each of twelve layers."""
    (apart,) = reserved_apart(CUT, Layout(context=8, zero_stage=1), expandable=False, length=131072)
    assert apart == 12 * 608 * MIB


def simumax(kind: str) -> Iterator[Record]:
    for name in ("fit.jsonl", "released.jsonl"):
        for line in (DATA / name).read_text(encoding="utf-8").splitlines():
            record: Record = json.loads(line)
            if record["family"] == "SimuMax" and record["peak_kind"] == kind:
                yield record


def test_what_eight_b200s_reserved_is_predicted_within_five_percent_and_one_on_average() -> None:
    records = list(simumax("reserved"))
    errors = []
    for record, prediction in zip(records, predict([case_or_reason(record, {}) for record in records]), strict=True):
        assert not isinstance(prediction, str)
        errors.append(prediction.reserved[record["pipeline_rank"]] / record["peak_bytes"] - 1.0)
    assert max(map(abs, errors)) < 0.05
    assert sum(map(abs, errors)) / len(errors) < 0.01


@pytest.mark.parametrize(
    ("dispatcher", "expert", "expert_tensor", "peers"),
    [("alltoall", 8, 1, 7), (None, 4, 1, 3), ("alltoall", 8, 4, 1), ("alltoall", 1, 1, 0), ("flex", 8, 1, 0)],
)
def test_an_all_to_all_connects_every_expert_rank_of_the_node(
    dispatcher: str | None, expert: int, expert_tensor: int, peers: int
) -> None:
    assert MIXTRAL.moe is not None
    layout = Layout(data=32, expert=expert, expert_tensor=expert_tensor, zero_stage=1)
    (rank,) = shapes.ranks(MIXTRAL, layout, megatron_facts(), Techniques(token_dispatcher=dispatcher))
    groups = 2 + (expert > 1) + (expert > 1 and expert * expert_tensor < 32)  # all ranks, data, experts, their replicas
    assert rank.terms["communicators"] == groups * constant("communicator_bytes") + peers * round(
        constant("exchange_peer_bytes")
    )


def test_fp32_logits_are_the_softmax_themselves_and_old_versions_made_two() -> None:
    def logit_bytes(**options: object) -> float:
        return megatron_facts(MegatronOptions(**options)).loss.logit_bytes  # type: ignore[arg-type]

    assert logit_bytes() == 2 + 4
    assert logit_bytes(precision="fp32") == 4
    assert logit_bytes(two_loss_copies=True) == 2 + 4 + 4
    assert logit_bytes(two_loss_copies=True, loss="te") == logit_bytes(loss="te") == 2
