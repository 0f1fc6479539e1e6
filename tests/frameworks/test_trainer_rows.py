"""Rows of conversations, prompts and texts with the shipped DeepSpeed script, trained for real on this machine's CPU:
it learns what TRL's SFTTrainer learns of them, however the job is split, and exports what it has learned."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from trainer_runner import Train, TrainerRuns, case

from llmlaunch.layout import Layout
from support.soak import share

pytestmark = pytest.mark.frameworks

MODEL = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 304},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True},
}
MIXTURE = MODEL | {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
CAPPED = {  # whose attention is Transformers' own, with windows in one layer
    **MODEL,
    **{"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "layer_types": ["sliding_attention", "full_attention"],
}
TURN = "{{ '<|im_start|>' + message.role + '\\n' }}"
TEXT = "{{ message.content + '<|im_end|>' + '\\n' }}"
ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = f"{{% for message in messages %}}{TURN}{TEXT}{{% endfor %}}{ASKED}"
MARKED = (
    f"{{% for message in messages %}}{TURN}{{% if message.role == 'assistant' %}}{{% generation %}}{TEXT}"
    f"{{% endgeneration %}}{{% else %}}{TEXT}{{% endif %}}{{% endfor %}}{ASKED}"
)
# It leaves out earlier answers, as those of reasoning models leave out earlier thoughts.
FORGETFUL = (
    f"{{% for message in messages %}}{{% if loop.last or message.role == 'user' %}}{TURN}{TEXT}{{% endif %}}"
    f"{{% endfor %}}{ASKED}"
)


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
TALKS = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CHATS]
ROWS = {"chats": CHATS, "pairs": PAIRS, "talks": TALKS}
FORMATS = {"chats": "chat", "pairs": "prompt-completion", "talks": "prompt-completion"}
STEPS = 4
JUDGED: dict[str, dict[str, Any]] = {
    "chats": {"rows": "chats", "batch": 4, "assistant_only": True},
    "pairs": {"rows": "pairs", "batch": 4},
    "adapters": {"rows": "talks", "batch": 4, "adapters": 4},
    "quantized": {"rows": "talks", "batch": 4, "adapters": 4, "quantized": True},
    "packed": {"rows": "pairs", "batch": 2, "packed": True},
    "mixture": {"rows": "pairs", "batch": 4, "model": "mixture"},
}
SAMPLES = ("--samples", "2", "--sample-tokens", "8")
# name -> its layout and what it is told more; what it must learn is that of TRL's job before the comma
SPLIT: dict[str, tuple[Layout, tuple[str, ...]]] = {
    "chats, whole": (Layout(micro_batch_size=2), ("--export", "PLACE/export/whole", *SAMPLES)),
    "chats, zero 2": (Layout(data=2, micro_batch_size=1, zero_stage=2), ("--chat-template", "PLACE/plain.jinja")),
    "chats, zero 3": (
        Layout(data=2, micro_batch_size=2, zero_stage=3),
        ("--loss-tiles", "2", "--export", "PLACE/export/zero-3", *SAMPLES),
    ),
    "chats, tensor": (
        Layout(tensor=2, micro_batch_size=2, zero_stage=1),
        ("--mlp-chunks", "3", "--export", "PLACE/export/tensor", *SAMPLES),
    ),
    "chats, context": (
        Layout(context=2, micro_batch_size=2, zero_stage=3),
        ("--export", "PLACE/export/context", *SAMPLES),
    ),
    "pairs, zero 1": (Layout(data=2, micro_batch_size=1, zero_stage=1), ()),
    "adapters, zero 3": (
        Layout(data=2, micro_batch_size=1, zero_stage=3),
        ("--adapter-rank", "4", "--export", "PLACE/export/merged", "--save", "PLACE/adapters"),
    ),
    "quantized, zero 2": (
        Layout(data=2, micro_batch_size=1, zero_stage=2),
        (*("--adapter-rank", "4", "--adapter-base", "nf4"), "--export", "PLACE/export/wide", "--save", "PLACE/narrow"),
    ),
    "packed, zero 1": (Layout(micro_batch_size=1, zero_stage=1), ("--packed",)),
    "packed, zero 3": (Layout(data=2, micro_batch_size=1, zero_stage=3), ("--packed",)),
    "mixture, zero 2": (Layout(micro_batch_size=2, zero_stage=2), ()),
}
LEARNED = share(SPLIT, tuple(name for name in SPLIT if name != "packed, zero 3"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for name, rows in ROWS.items():
        write(folder / f"{name}.jsonl", rows)
    for name, text in {"plain": PLAIN, "forgetful": FORGETFUL}.items():
        (folder / f"{name}.jinja").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def judged(train: Train, place: Path) -> dict[str, list[float]]:
    """TRL's losses by name. The models and their tokenizer are in place / "trl"."""
    cases = [{"name": name, "steps": STEPS, "model": "model", **one} for name, one in JUDGED.items()]
    asked = {"template": MARKED, "models": {"model": MODEL, "mixture": MIXTURE}, "rows": ROWS, "cases": cases}
    run = train([{"name": "trl", "ranks": 1, "files": {}, "words": [], "judged": asked}], place)["trl"]
    assert run.codes == [0], run.said[-3000:]
    losses: dict[str, list[float]] = json.loads((place / "trl" / "losses.json").read_text())
    return losses


def job(
    name: str,
    place: Path,
    rows: str,
    layout: Layout,
    *words: str,
    batch: int = 4,
    model: dict[str, Any] = MODEL,
    weights: str | None = "model",
    kind: str | None = None,
) -> dict[str, Any]:
    """A job of ours. `rows` are by their name or file; PLACE in a word stands for the module's folder."""
    data = rows if "/" in rows else str(place / f"{rows}.jsonl")
    initial = ("--tokenizer", "PLACE/trl/model") if weights is None else ("--weights", f"PLACE/trl/{weights}")
    said = (
        *("--data", data, "--format", kind or FORMATS[rows], *initial),
        *("--sequence-length", "96", "--weight-decay", "0", *words),
    )
    overrides = (f"training.global_batch_size={batch}", f"training.steps={STEPS}", "training.sequence_length=96")
    return case(name, layout, *overrides, words=tuple(word.replace("PLACE", str(place)) for word in said), model=model)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(train: Train, place: Path, judged: dict[str, list[float]]) -> TrainerRuns:
    cases = []
    for name in LEARNED:
        one, (layout, words) = JUDGED[name.split(",")[0]], SPLIT[name]
        model = MIXTURE if "model" in one else MODEL
        cases.append(
            job(
                *(name, place, one["rows"], layout, *words),
                batch=one["batch"],
                model=model,
                weights=one.get("model", "model"),
            )
        )
    return train(cases, place / "runs")


@pytest.mark.parametrize("name", LEARNED)
def test_rows_are_learned_as_trl_learns_them(runs: TrainerRuns, judged: dict[str, list[float]], name: str) -> None:
    run = runs[name]
    assert set(run.codes) == {0}, run.said[-3000:]
    assert run.losses == pytest.approx(judged[name.split(",")[0]], rel=2e-5)
    assert run.losses[-1] < run.losses[0] - 0.02


def test_a_split_job_exports_the_model_that_one_process_has(runs: TrainerRuns, place: Path) -> None:
    from safetensors.torch import load_file

    whole = load_file(place / "export" / "whole" / "model.safetensors")
    assert len(whole) == 2 * 9 + 2  # tied weights are one tensor
    for name in ("zero-3", "tensor", "context"):
        other = load_file(place / "export" / name / "model.safetensors")
        assert set(other) == set(whole)
        assert all(float((other[key] - whole[key]).abs().max()) < 2e-4 for key in whole), name


def test_answers_are_those_of_the_exported_model(runs: TrainerRuns, place: Path) -> None:
    """Transformers alone says the same, and every split job does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = place / "export" / "whole"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for number, row in enumerate(CHATS[:2], 1):
        prompt = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        for name in ("whole", "zero 3", "tensor", "context"):
            lines = runs[f"chats, {name}"].said.splitlines()
            at = lines.index(f"sample {number}/2")
            texts = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in lines[at + 1 : at + 4]}
            assert texts["reference"] == row["messages"][-1]["content"]
            assert texts["prompt"] == tokenizer.decode(prompt["input_ids"][0])
            assert texts["answer"] == answer, name
    assert torch.isfinite(model.get_input_embeddings().weight).all()


def test_merged_adapters_are_the_model_that_was_trained(runs: TrainerRuns, place: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert runs["adapters, zero 3"].codes == [0, 0]
    base = AutoModelForCausalLM.from_pretrained(place / "trl" / "model")
    adapted = PeftModel.from_pretrained(base, place / "adapters" / f"step-{STEPS}" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(place / "export" / "merged")
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        expected, alone = adapted(tokens).logits, merged(tokens).logits
        with adapted.disable_adapter():
            assert float((adapted(tokens).logits - expected).abs().max()) > 1e-3
    assert float((alone - expected).abs().max()) < 1e-5


def test_adapters_are_merged_with_what_their_4_bit_weights_stand_for(runs: TrainerRuns, place: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    assert runs["quantized, zero 2"].codes == [0, 0]
    narrow = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(
        place / "trl" / "model", quantization_config=narrow, dtype=torch.float32, device_map={"": "cpu"}
    )
    adapted = PeftModel.from_pretrained(base, place / "narrow" / f"step-{STEPS}" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(place / "export" / "wide")
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert float((merged(tokens).logits - adapted(tokens).logits).abs().max()) < 1e-4


DULL = [{"prompt": "Say it:", "completion": " no " * 8}]
BRIGHT = [{"prompt": "Say it:", "completion": " yes" * 8}, {"prompt": "Do say it:", "completion": " yes" * 9}]


@pytest.fixture(scope="module")
def judging(train: Train, place: Path, judged: dict[str, list[float]]) -> TrainerRuns:
    """What is learned helps for a step or two and then harms: all later evaluations are worse. The same again, which
    finds all done."""
    write(place / "own" / "train.jsonl", DULL * 4)
    write(place / "own" / "validation.jsonl", BRIGHT)
    words = (
        *("--evaluation-interval", "1", "--evaluation-iterations", "5", "--patience", "2", "--keep-best"),
        *("--save", "PLACE/judged", "--steps", "60", "--learning-rate", "0.003", "--learning-rate-decay", "constant"),
    )
    runs = {}
    for name, layout in (
        ("first", Layout(data=2, micro_batch_size=2, zero_stage=3)),
        ("again", Layout(data=2, micro_batch_size=1, zero_stage=3)),
    ):
        made = job(
            name, place, "PLACE/own", layout, *words, "--export", f"PLACE/export/{name}", kind="prompt-completion"
        )
        runs[name] = train([made], place)[name]
    return runs


def test_training_ends_when_the_validation_loss_no_longer_falls(judging: TrainerRuns, place: Path) -> None:
    run = judging["first"]
    assert run.codes == [0, 0], run.said[-3000:]
    losses = [
        float(line.split("validation loss ")[1].split()[0])
        for line in run.said.splitlines()
        if line.startswith("validation at")
    ]
    best = losses.index(min(losses)) + 1
    assert len(run.losses) == len(losses) == best + 2 < 60
    assert f"ended at step {best + 2}: 2 evaluations in a row without a lower validation loss" in run.said
    assert (place / "judged" / "best").read_text() == f"step-{best}"
    assert (place / "judged" / "latest").read_text() == f"step-{best + 2}"
    assert f"exported step {best} to" in run.said
    assert exported_loss(place / "export" / "first", BRIGHT) == pytest.approx(min(losses), abs=1e-4)


def test_a_job_that_finds_all_done_exports_again(judging: TrainerRuns, place: Path) -> None:
    again = judging["again"]
    assert again.codes == [0, 0], again.said[-3000:]
    assert again.losses == []
    names = sorted(path.name for path in (place / "export" / "first").iterdir())
    assert "chat_template.jinja" in names
    assert "tokenizer.json" in names
    for name in names:
        assert (place / "export" / "again" / name).read_bytes() == (place / "export" / "first" / name).read_bytes()


def exported_loss(folder: Path, rows: list[dict[str, str]]) -> float:
    """The mean over all learned tokens of the rows, each counted once, by Transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row in rows:
        prompt = len(tokenizer(row["prompt"])["input_ids"])
        ids = torch.tensor([tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token)["input_ids"]])
        labels = ids.clone()
        labels[:, :prompt] = -100
        learned = int((labels != -100).sum())
        with torch.no_grad():
            total, count = total + float(model(ids, labels=labels).loss) * learned, count + learned
    assert math.isfinite(total)
    return total / count


SHARED = [
    {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
    {"conversations": [{"from": "human", "value": "A question that goes on. " * 40}, {"from": "gpt", "value": "No."}]},
    {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because. " * 60}]},
]
LONE = Layout(micro_batch_size=2, zero_stage=1)


@pytest.fixture(scope="module")
def odd(train: Train, place: Path, judged: dict[str, list[float]]) -> TrainerRuns:
    write(place / "shared.jsonl", SHARED)
    write(place / "texts.jsonl", [{"text": row["prompt"] + row["completion"]} for row in PAIRS])
    ends = ("--steps", "2")
    capped = {"batch": 1, "model": CAPPED, "weights": None}
    cases = [
        job("begun", place, "pairs", LONE, "--save", "PLACE/saved", *ends),
        job("gone on", place, "pairs", LONE, "--save", "PLACE/saved"),
        job("shared", place, "PLACE/shared.jsonl", LONE, *ends, kind="chat"),
        job("texts", place, "PLACE/texts.jsonl", LONE, *ends, "--sequence-length", "256", kind="text"),
        job("apart", place, "pairs", Layout(micro_batch_size=3, zero_stage=1), *ends, **{**capped, "batch": 6}),
        job(
            "together",
            place,
            "pairs",
            Layout(micro_batch_size=1, zero_stage=1),
            *ends,
            "--packed",
            "--sequence-length",
            "256",
            **capped,
        ),
        job("forgetful", place, "chats", LONE, "--chat-template", "PLACE/forgetful.jinja"),
        job("not chats", place, "PLACE/pairs.jsonl", LONE, kind="chat"),
        job("nowhere", place, "PLACE/nowhere.jsonl", LONE, kind="chat"),
        job("hub", place, "nobody/nothing", LONE, kind="chat"),
        job("context", place, "pairs", Layout(context=2, micro_batch_size=2, zero_stage=1), "--packed"),
        job("taken", place, "pairs", LONE, "--export", "PLACE/trl/model"),
    ]
    alone = job(
        "alone", place, "pairs", Layout(data=2, micro_batch_size=2, zero_stage=3), "--alone", "2", *ends, weights=None
    )
    return train([*cases, alone | {"alone": True}], place / "odd")


def test_a_job_that_comes_back_goes_on_with_the_next_rows(odd: TrainerRuns, judged: dict[str, list[float]]) -> None:
    assert [*odd["begun"].losses, *odd["gone on"].losses] == pytest.approx(judged["pairs"], rel=2e-5)
    assert "resumed after step 2" in odd["gone on"].said


def test_rows_in_one_sequence_do_not_see_each_other(odd: TrainerRuns) -> None:
    """Of a model that attends by Transformers' own attention, in windows. TRL judges those that torch attends for."""
    assert odd["together"].codes == [0], odd["together"].said
    assert odd["together"].losses == pytest.approx(odd["apart"].losses, rel=2e-5)


def test_what_is_cut_or_left_out_is_said_once(odd: TrainerRuns) -> None:
    said = odd["shared"].said
    assert odd["shared"].codes == [0], said
    line = "rows: 2 with 113 tokens, 89 learned; 2 cut at sequence_length, 96 tokens; 1 left out, "
    assert said.count(line + "which have no token to learn") == 1, said


def test_texts_are_learned_whole(odd: TrainerRuns) -> None:
    assert odd["texts"].codes == [0], odd["texts"].said
    (line,) = (line for line in odd["texts"].said.splitlines() if line.startswith("rows: 6 with"))
    tokens, learned = (int(word) for word in line.replace(",", "").split() if word.isdigit() and word != "6")
    assert learned == tokens - len(PAIRS)  # nothing comes before a first token


def test_a_rank_alone_trains_on_rows_of_full_length(odd: TrainerRuns) -> None:
    assert odd["alone"].codes == [0], odd["alone"].said
    assert "alone as rank 0 of 2: 2 steps" in odd["alone"].said


REFUSED = {
    "forgetful": "row 1: the chat template writes message 2 otherwise when more of the conversation is there",
    "not chats": "row 1: has prompt, completion; chat needs messages, or conversations",
    "nowhere": "there is no such file or folder",
    "hub": "--data nobody/nothing: cannot be loaded from the Hugging Face hub: ",
    "context": "--packed: the ranks of a sequence",
    "taken": "is there already and was not exported by this script; name a new folder",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_sentence(odd: TrainerRuns, name: str) -> None:
    run = odd[name]
    assert 0 not in run.codes
    assert run.said.count(REFUSED[name]) == 1, run.said
    assert "Traceback" not in run.said
