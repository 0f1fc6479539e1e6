"""Rows of conversations, prompts and texts with the shipped DeepSpeed script, trained for real on this machine's CPU:
it learns what TRL's SFTTrainer learns of them, however the job is split, and exports what it has learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_runner import Train, TrainerRun, TrainerRuns, case

from llmlaunch.layout import Layout

pytestmark = pytest.mark.frameworks

MODEL = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 304},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True},
}
TURN = "{{ '<|im_start|>' + message.role + '\\n' }}"
TEXT = "{{ message.content + '<|im_end|>' + '\\n' }}"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = f"{{% for message in messages %}}{TURN}{TEXT}{{% endfor %}}{ASKED}"
MARKED = (
    f"{{% for message in messages %}}{TURN}{{% if message.role == 'assistant' %}}{{% generation %}}{TEXT}"
    f"{{% endgeneration %}}{{% else %}}{TEXT}{{% endif %}}{{% endfor %}}{ASKED}"
)
FORGETFUL = f"{{% for message in messages %}}{{% if loop.last or message.role == 'user' %}}{TURN}{TEXT}{{% endif %}}{{% endfor %}}{ASKED}"


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


CHATS = [
    {"messages": turns("What is two and two?", "Four.", "And three?", "Seven, since four and three are seven.")},
    {"messages": turns("Name a colour.", "Blue.", system="Be short.")},
    {"messages": turns("Who wrote Faust?", "Goethe wrote it over sixty years, in two parts.")},
    {"messages": turns("Is water wet?", "Yes.", "Why?", "Because it is.", "Is it?", "It is.")},
    {"messages": turns("Say nothing.", "-", system="You are a helpful assistant who says little.")},
    {"messages": turns("Which is the longest river?", "The Nile, or the Amazon; people measure differently.")},
]
PAIRS = [
    {"prompt": "The capital of France is", "completion": " Paris."},
    {"prompt": "One, two,", "completion": " three, four, five, six, seven, eight, nine and ten."},
    {"prompt": "A rose is a rose is", "completion": " a rose."},
    {"prompt": "To be or not to be, that is the", "completion": " question."},
    {"prompt": "Roses are red, violets are", "completion": " blue, and so on."},
    {"prompt": "x", "completion": "y"},
]
TALKS = [
    {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CHATS
]
ROWS = {"chats": CHATS, "pairs": PAIRS, "talks": TALKS}
STEPS = 4
JUDGED = [
    {"name": "chats", "rows": "chats", "batch": 4, "assistant_only": True},
    {"name": "pairs", "rows": "pairs", "batch": 4},
    {"name": "talks with adapters", "rows": "talks", "batch": 4, "adapters": 4},
    {"name": "packed pairs", "rows": "pairs", "batch": 2, "packed": True},
]
FORMATS = {"chats": "chat", "pairs": "prompt-completion", "talks": "prompt-completion"}
WHOLE = Layout(micro_batch_size=2, zero_stage=0)
PACKED = ("--packed",)
# name -> what TRL calls it, its layout, what is said more
SPLIT: dict[str, tuple[str, Layout, tuple[str, ...]]] = {
    "chats": ("chats", WHOLE, ()),
    "chats, zero 2": ("chats", Layout(data=2, micro_batch_size=1, zero_stage=2), ()),
    "chats, zero 3": ("chats", Layout(data=2, micro_batch_size=2, zero_stage=3), ("--loss-tiles", "2")),
    "chats, tensor": ("chats", Layout(tensor=2, micro_batch_size=2, zero_stage=1), ("--mlp-chunks", "3")),
    "chats, context": ("chats", Layout(context=2, micro_batch_size=2, zero_stage=3), ()),
    "pairs": ("pairs", Layout(data=2, micro_batch_size=1, zero_stage=1), ()),
    "talks with adapters": ("talks with adapters", WHOLE, ("--adapter-rank", "4")),
    "packed pairs": ("packed pairs", Layout(micro_batch_size=1, zero_stage=1), PACKED),
    "packed pairs, zero 3": ("packed pairs", Layout(data=2, micro_batch_size=1, zero_stage=3), PACKED),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for name, rows in ROWS.items():
        write(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def judged(place: Path) -> dict[str, list[float]]:
    """TRL's losses by name; the model and its tokenizer are in `place`."""
    cases = [{"steps": STEPS, **one} for one in JUDGED]
    asked = {"folder": str(place), "template": MARKED, "model": MODEL, "rows": ROWS, "cases": cases}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("trl_judge.py")],
        input=json.dumps(asked),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(place / "cache")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    answers: dict[str, list[float]] = json.loads(lines[0].removeprefix("RESULT "))
    return answers


def job(
    name: str, place: Path, rows: str | Path, kind: str, layout: Layout, *words: str, batch: int = 4
) -> dict[str, Any]:
    said = (
        *("--data", str(place / f"{rows}.jsonl" if isinstance(rows, str) else rows), "--format", kind),
        *("--weights", str(place / "model"), "--sequence-length", "96", "--weight-decay", "0", *words),
    )
    overrides = (
        *(f"training.global_batch_size={batch}", f"training.steps={STEPS}", "training.sequence_length=96"),
        *("training.gradient_clipping=1.0",),
    )
    made = case(name, layout, *overrides, words=said, model=MODEL)
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place / "cache")}
    return made | {"environment": variables}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(train: Train, place: Path, judged: dict[str, list[float]]) -> TrainerRuns:
    batches = {one["name"]: one["batch"] for one in JUDGED}
    rows = {one["name"]: one["rows"] for one in JUDGED}
    cases = [
        job(name, place, rows[alike], FORMATS[rows[alike]], layout, *words, batch=batches[alike])
        for name, (alike, layout, words) in SPLIT.items()
    ]
    return train(cases, place / "runs")


@pytest.mark.parametrize("name", SPLIT)
def test_rows_are_learned_as_trl_learns_them(runs: TrainerRuns, judged: dict[str, list[float]], name: str) -> None:
    run = runs[name]
    assert set(run.codes) == {0}, run.said[-3000:]
    assert run.losses == pytest.approx(judged[SPLIT[name][0]], rel=2e-5)
    assert run.losses[-1] < run.losses[0] - 0.05
