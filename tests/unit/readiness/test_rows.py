"""Rows to fine-tune on are looked at before the job waits: their fields, their lengths, and what is learned of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from job_files import readiness, write

from llmlaunch.readiness.readiness import Readiness
from llmlaunch.readiness.rows import (
    FIELDS,
    MOST_BYTES,
    TEST_FILES,
    TRAINING_FILES,
    VALIDATION_FILES,
    preview,
    read_sample,
)
from llmlaunch.recipe.datasets import ROW_FILES
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import TRAINER
from support.recipes import recipe_text

CHAT = {"messages": [{"role": "user", "content": "two and three?"}, {"role": "assistant", "content": "five"}]}
GPT = {"conversations": [{"from": "human", "value": "two and three?"}, {"from": "gpt", "value": "five"}]}
ALPACA = {"instruction": "Add.", "input": "2 3", "output": "5"}
TRAINING = "{sequence_length: 64, global_batch_size: 8, steps: 10}"


def recipe_with(path: str, kind: str = "chat", **more: str) -> str:
    return recipe_text(
        backend="deepspeed", training=TRAINING, data=f"{{path: {path}, format: {kind}, tokenizer: /t}}", **more
    )


def judged(folder: Path, files: Mapping[str, str], path: str, kind: str = "chat", *overrides: str) -> Readiness:
    write(folder, files)
    return readiness(folder, recipe_with(path, kind), *overrides)


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def about_data(sentences: tuple[str, ...]) -> list[str]:
    return [sentence for sentence in sentences if ": data.path: " in sentence]


@pytest.mark.parametrize(
    ("files", "path", "kind", "message"),
    [
        ({}, "rows.jsonl", "chat", "rows.jsonl is not there"),
        ({"rows.jsonl": ""}, "rows.jsonl", "chat", "rows.jsonl is empty"),
        ({"rows.jsonl": "[]"}, "rows.jsonl", "chat", "rows.jsonl has no row"),
        ({"rows.txt": "words"}, "rows.txt", "chat", "has no file of rows (.jsonl"),
        ({"rows.jsonl": lines(CHAT) + "{'messages'\n"}, "rows.jsonl", "chat", "row 2 is no JSON"),
        ({"rows.jsonl": lines(CHAT, ["a"])}, "rows.jsonl", "chat", "row 2 is no JSON object"),
        ({"rows.jsonl": lines(ALPACA)}, "rows.jsonl", "chat", "row 1 has instruction, input, output, which "
         "data.format: prompt-completion reads, not chat"),
        ({"rows.jsonl": lines({"a": 1})}, "rows.jsonl", "prompt-completion", "row 1 has a; data.format: "
         "prompt-completion reads text or messages of prompt and completion"),
        ({"rows/test.jsonl": lines(CHAT)}, "rows", "chat", "rows has no file of rows"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_trained_with_are_named(
    files: Mapping[str, str], path: str, kind: str, message: str, tmp_path: Path
) -> None:
    (sentence,) = about_data(judged(tmp_path, files, path, kind).missing)
    assert message in sentence


@pytest.mark.parametrize(("kind", "row"), [("chat", CHAT), ("chat", GPT), ("prompt-completion", ALPACA)])
def test_rows_of_every_kind_are_counted_and_measured(kind: str, row: object, tmp_path: Path) -> None:
    for text in (lines(row, row, row), json.dumps([row, row, row], indent=2)):
        found = judged(tmp_path, {"rows.json": text}, "rows.json", kind)
        assert about_data(found.missing + found.doubtful) == []
        (sentence,) = about_data(found.notes)
        assert "rows.json has 3 rows: median " in sentence
        assert "(as characters / 4); 10 steps see them 26.7 times" in sentence


def test_a_share_that_is_cut_is_warned_of(tmp_path: Path) -> None:
    long = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "x" * 1000}]}
    (sentence,) = about_data(judged(tmp_path, {"rows.jsonl": lines(CHAT, long)}, "rows.jsonl").doubtful)
    assert "50.0% are longer than training.sequence_length, 64, and are cut there" in sentence


def test_of_a_large_file_the_beginning_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = lines({"messages": [{"role": "assistant", "content": "x" * 5000}]})
    file.write_text(row * (2 * MOST_BYTES // len(row)), encoding="utf-8")
    sample = read_sample(file)
    assert (sample.exact, sample.problem) == (False, None)
    assert sample.count == pytest.approx(2 * MOST_BYTES // len(row), rel=0.01)
    assert 0 < len(sample.rows) <= MOST_BYTES // len(row) + 1


def test_a_folder_has_a_part_for_an_evaluation(tmp_path: Path) -> None:
    evaluation = "training.evaluation={interval: 5, iterations: 1}"
    files = {"rows/train.jsonl": lines(CHAT), "rows/test.jsonl": lines({"a": 1})}
    (sentence,) = about_data(judged(tmp_path, files, "rows", "chat", evaluation).missing)
    assert "has no validation.* file for training.evaluation" in sentence
    files["rows/validation.jsonl"] = lines(CHAT)
    assert about_data(judged(tmp_path, files, "rows", "chat", evaluation).missing) == []


def test_rows_of_the_hub_are_said_to_be_downloaded(tmp_path: Path) -> None:
    (sentence,) = about_data(judged(tmp_path, {}, "org/answers").notes)
    assert "the nodes download the dataset of this name from the Hugging Face hub" in sentence


@pytest.mark.frameworks
def test_tokens_are_counted_where_the_tokenizer_is_here(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"two": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "t").mkdir()
    words.save(str(tmp_path / "t" / "tokenizer.json"))
    found = judged(tmp_path, {"rows.jsonl": lines(CHAT)}, "rows.jsonl", "chat", f"data.tokenizer={tmp_path}/t")
    (sentence,) = about_data(found.notes)
    assert "longest 3 tokens" in sentence
    assert "by the tokenizer" in sentence


def test_the_first_rows_show_what_is_learned_without_what_a_terminal_would_obey(tmp_path: Path) -> None:
    hostile = {"prompt": "one\nline \x1b[31m", "completion": "y" * 500}
    write(
        tmp_path,
        {"rows.jsonl": lines(hostile, *[ALPACA] * 4), "recipe.yaml": recipe_with("rows.jsonl", "prompt-completion")},
    )
    shown = preview(load_recipe(tmp_path / "recipe.yaml"), 80)
    assert shown[:2] == ["Row 1 of rows.jsonl", "  prompt    one\\nline \\x1b[31m"]
    assert shown[3:6] == ["Row 2 of rows.jsonl", "  prompt    Add.\\n\\n2 3", "  learned   5"]
    assert len(shown) == 9
    assert max(map(len, shown)) <= 80
    assert all(line.isprintable() for line in shown)


def constants_of(module: str) -> dict[str, object]:
    """The literals that a module of the trainer, which imports nothing of ours, gives a name."""
    found: dict[str, object] = {}
    for node in ast.parse(TRAINER.with_name(module).read_text("utf-8")).body:
        if isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            try:
                found[target] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def test_check_and_the_trainer_know_the_same_files_and_fields() -> None:
    of_files, of_fields = constants_of("rows.py"), constants_of("chat.py")
    assert tuple(of_files["SUFFIXES"]) == ROW_FILES  # type: ignore[arg-type]
    parts = of_files["(TRAINING_NAMES, VALIDATION_NAMES, TEST_NAMES)"]
    assert parts == (TRAINING_FILES, VALIDATION_FILES, TEST_FILES)
    accepted: dict[str, list[str]] = {}
    for fields, kind in FIELDS.items():
        if kind is not None:
            accepted.setdefault(kind, []).append(" and ".join(fields))
    said = {kind: text.replace(" (input)", "") for kind, text in of_fields["FIELDS"].items()}  # type: ignore[attr-defined]
    assert {kind: text.replace(", or ", ", ").replace(", ", "|") for kind, text in said.items()} == {
        kind: "|".join(fields) for kind, fields in accepted.items()
    }
