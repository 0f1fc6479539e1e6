"""The table of Megatron's arguments: every row is written for some job, and read back from what it wrote."""

from __future__ import annotations

from functools import cache

import pytest

from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.megatron.command_line import pinned_layout, read_values, with_stand_ins
from llmlaunch.frameworks.megatron.flags.row import Flag, PlannedJob
from llmlaunch.frameworks.megatron.flags.table import bridge_fields, column, flags, read_section, written_arguments
from llmlaunch.frameworks.megatron.namespace import namespace_of
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, NEWEST, core_parser
from llmlaunch.frameworks.megatron.words import EARLIER, read_words
from llmlaunch.recipe.load import recipe_from
from support.megatron_flag_keys import written_jobs

WRITTEN = [row for row in flags() if row.writes]
READ_ONLY = [row for row in flags() if not row.writes]


Words = tuple[str, ...]


def words_of(job: PlannedJob) -> dict[str, Words]:
    """Return the words of each argument of a job by its flag; a path that only a node knows is /node."""
    return {
        each.flag: tuple("/node" if isinstance(word, NodeVariable) else word for word in each.values)
        for each in written_arguments(job)
    }


@cache
def round_trips() -> tuple[tuple[PlannedJob, dict[str, Words], dict[str, Words]], ...]:
    """Return jobs that together write the whole table, each with what it writes, and what the recipe writes that is
    read from that."""
    trips = []
    for recipe, layout in written_jobs():
        for version in KNOWN_VERSIONS:
            job = PlannedJob(recipe, layout, version)
            written = words_of(job)
            parsed = read_words([word for flag, values in written.items() for word in (flag, *values)], version)
            try:
                reading = read_values(parsed.values, version=version, parsed=parsed)
                document = with_stand_ins(reading, recipe.world_size)
                again = recipe_from(Document("the recipe", "", document, {}, {}))
            except UserError:  # a layout that holds no model, or that no recipe says
                continue
            trips.append((job, written, words_of(PlannedJob(again, pinned_layout(again), version))))
    return tuple(trips)


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: f"{row.name}-of-{row.key or 'llmlaunch'}")
def test_every_row_is_written_and_read_back(row: Flag) -> None:
    trips = [(written[row.name], again.get(row.name)) for job, written, again in round_trips() if row.arguments(job)]
    assert trips, "no job of tests/support/megatron_flag_keys.py writes it"
    lost = {words for words, again in trips if words != again}
    assert lost == {words for flag, words in NOT_READ_BACK if flag == row.name}
    assert any(words == again for words, again in trips) or row.keys == ("on_oom", "nodes.at_least")


# The flags that some of those jobs write and no recipe says, with their words.
NOT_READ_BACK: set[tuple[str, Words]] = {
    ("--dist-ckpt-optim-fully-reshardable", ()),  # of what a job does when it comes back
    ("--non-persistent-save-interval", ("2",)),  # Megatron-FSDP reads none of these checkpoints back
    ("--non-persistent-ckpt-type", ("global",)),
}


def test_every_key_that_decides_a_flag_is_read_from_some_row() -> None:
    decided = {row.keys[0] for row in WRITTEN if row.keys}
    read = {key for row in flags() for key in row.reads}
    sections = {key for key in decided if any(each.startswith(f"{key}.") for each in read)}
    assert decided - read - sections == NOT_READ.keys()


NOT_READ = {
    "model.vocab_size": "the rows of the embedding, worked out of several flags (read_model.py)",
    "on_oom": "what a job does when it comes back",
    "restart": "the same",
}


@pytest.mark.parametrize("row", READ_ONLY, ids=lambda row: row.name)
def test_a_row_that_is_never_written_is_read_refused_or_explained(row: Flag) -> None:
    if row.decides or row.unread:
        return
    flag = next(flags[row.name] for flags in (core_parser(v).flags for v in KNOWN_VERSIONS) if row.name in flags)
    word = {"int": "8", "float": "0.5"}.get(str(flag.type), "file")
    others = {"train_iters": 100, "global_batch_size": 8, "num_attention_heads": 4, "hidden_size": 64}
    others |= {"num_experts": 8, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    before = namespace_of(others, NEWEST)
    words = read_words([row.name, *([] if flag.values == 0 else [word])])
    after = namespace_of(others | words.values, NEWEST)
    assert {name for name in after if after[name] != before.get(name)} - {row.dest}, "it sets nothing of today's"


def test_every_flag_is_one_of_a_parsers() -> None:
    names = {name for version in KNOWN_VERSIONS for name in core_parser(version).flags}
    assert {row.name for row in flags()} <= names
    assert not EARLIER.keys() & names
    dests = {flag.dest for flag in core_parser(NEWEST).flags.values()} | {"layernorm_epsilon"}
    assert {earlier.parsed.dest for earlier in EARLIER.values()} <= dests


def test_the_rows_of_one_flag_agree() -> None:
    for row in flags():
        others = [other for other in flags() if other.name == row.name]
        assert sum(other.fields is not None for other in others) <= 1 or len({str(o.fields) for o in others}) == 1
    assert set(bridge_fields()) <= {row.name for row in WRITTEN}
    assert column("decides").keys() <= {name for row in flags() for name in row.dests}


def test_a_section_has_its_keys_in_the_order_in_which_they_are_documented() -> None:
    space = namespace_of(
        {"micro_batch_size": 2, "tensor_model_parallel_size": 2, "recompute_granularity": "full"}, NEWEST
    )
    names = list(read_section(space, "layout"))
    assert names.index("tensor") < names.index("micro_batch_size") < names.index("recompute")
