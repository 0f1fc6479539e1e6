"""`key=a,b,c`: several runs where it can be nothing else, one value where it can."""

from __future__ import annotations

import pytest

from llmlaunch.errors import UserError
from llmlaunch.recipe.overrides import variants
from support.recipes import SMALL

PATH = str(SMALL)


def test_several_values_of_several_keys_are_every_combination() -> None:
    assert variants(PATH, ["training.steps=10,20", "name=x", "nodes=1,2"]) == [
        ("name=x", "training.steps=10", "nodes=1"),
        ("name=x", "training.steps=10", "nodes=2"),
        ("name=x", "training.steps=20", "nodes=1"),
        ("name=x", "training.steps=20", "nodes=2"),
    ]


def test_words_that_are_not_split_stay_in_their_order_since_the_last_on_a_key_wins() -> None:
    words = ("model={base: llama2-7b, num_layers: 4}", "model.num_layers=7", "slurm.exclude=a,b", "nodes=1")
    assert variants(PATH, words) == [words]


@pytest.mark.parametrize(
    "word",
    [
        "nodes=1,2", "training.learning_rate=1.0e-4,3.0e-4", "training.precision=bf16,fp16", "layout.tensor=1,2,auto",
        "training.steps=10, 20", "layout.micro_batch_size=1,auto",
    ],
)  # fmt: skip
def test_numbers_and_fixed_words_are_split(word: str) -> None:
    assert len(variants(PATH, [word])) == word.count(",") + 1


@pytest.mark.parametrize(
    "word",
    [
        "environment.LIST=a,b",  # text of the person's own
        "slurm.exclude=node1,node2",
        "slurm.gres=gpu:8,nvme:1",
        'environment.LIST="a,b"',
        "model=llama3-8b,llama3-70b",  # text as far as the schema goes: --grid says that it is two
        "setup=[module load a, module load b]",  # a list is one value
        "layout={tensor: 2, pipeline: 2}",
        "nodes=[1,2]",
        "nodes=1,two",  # no part may be wrong: the whole word is refused later, in its own words
        "nodes=1,,2",
        "nodes=1,2,",
        "training.steps=1,000",  # a thousand
        "no.such.key=1,2",
        ",",
        "nodes",
    ],
)
def test_a_comma_that_may_be_part_of_the_value_is_left_alone(word: str) -> None:
    assert variants(PATH, [word]) == [(word,)]


def test_grid_splits_whatever_the_key_holds() -> None:
    assert variants(PATH, ["nodes=2"], ["model=llama3-8b,llama3-70b", "environment.X=a,b"]) == [
        ("nodes=2", "model=llama3-8b", "environment.X=a"),
        ("nodes=2", "model=llama3-8b", "environment.X=b"),
        ("nodes=2", "model=llama3-70b", "environment.X=a"),
        ("nodes=2", "model=llama3-70b", "environment.X=b"),
    ]


@pytest.mark.parametrize(
    ("words", "grid", "why"),
    [
        ([], ["model=llama3-8b"], "does not name several values"),
        ([], ["model"], "does not name several values"),
        ([], ["model=[a, b]"], "does not name several values"),
        (["nodes=1,2", "nodes=4"], [], "nodes: is given twice"),
        (["nodes=1,2"], ["nodes=3,4"], "nodes: is given twice"),
        (["nodes=1,1"], [], "a value is named twice"),
        ([], ["environment.KEY=secret,secret"], r"environment.KEY=\.\.\.: a value is named twice"),
        ([], ["model=" + ",".join(map(str, range(40))), "environment.X=" + ",".join(map(str, range(40)))], "1600"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], grid: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why) as refusal:
        variants(PATH, words, grid)
    assert "secret" not in str(refusal.value)
