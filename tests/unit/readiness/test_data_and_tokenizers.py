"""Data and tokenizers that are missing, torn or of another kind are named at the desk, by the line of the recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from job_files import dataset, index, readiness, sentence_pieces, write

from support.recipes import recipe_text

MEGATRON = recipe_text(data="{path: corpus/text}")
DEEPSPEED = recipe_text(backend="deepspeed", data="{path: corpus}")
GOOD = {"corpus/text.bin": bytes(28), "corpus/text.idx": index([3, 4])}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

INDEXED = {
    "neither file": ({}, "corpus/text.bin and {0}/corpus/text.idx are not there; name what is"),
    "no .bin": ({"corpus/text.bin": None}, "corpus/text.bin is not there"),
    "no .idx": ({"corpus/text.idx": None}, "corpus/text.idx is not there"),
    "text for an index": ({"corpus/text.idx": "words, and no index"}, "text.idx is no index of a Megatron dataset"),
    "an older index": ({"corpus/text.idx": b"TNTIDX\x00\x00" + bytes(40)}, "text.idx is no index"),
    "an unknown version": ({"corpus/text.idx": index([3], version=2)}, "has version 2 and token type 4"),
    "an unknown token type": (
        {"corpus/text.idx": index([3], token_type=9)},
        "token type 9, which no Megatron-LM reads",
    ),
    "an index cut short": ({"corpus/text.idx": index([3, 4])[:-1]}, "text.idx ends before its 2 sequences do"),
    "an index of nothing": ({"corpus/text.idx": index([])}, "text.idx counts no sequence"),
    "a shorter .bin": ({"corpus/text.bin": bytes(27)}, "text.bin has 27 bytes, and text.idx counts 28"),
    "an empty .bin": ({"corpus/text.bin": ""}, "text.bin is empty"),
    "a pointer of Git LFS": ({"corpus/text.bin": LFS}, "text.bin is only a pointer of Git LFS"),
}


@pytest.mark.parametrize(("files", "message"), INDEXED.values(), ids=INDEXED)
def test_an_indexed_dataset_is_whole(files: Mapping[str, bytes | None], message: str, tmp_path: Path) -> None:
    write(tmp_path, {name: data for name, data in (GOOD | files if files else {}).items() if data is not None})
    (sentence,) = readiness(tmp_path, MEGATRON).missing
    assert sentence.startswith(f"{tmp_path}/recipe.yaml:8: data.path: {tmp_path}/corpus/text")
    assert message.format(tmp_path) in sentence


@pytest.mark.parametrize("name", ["training", "validation"])
def test_rows_to_finetune_on_lie_in_files_of_known_names(name: str, tmp_path: Path) -> None:
    rows = recipe_text(backend="megatron-bridge", data="{path: rows, format: chat, tokenizer: words}")
    write(tmp_path, {f"rows/{each}.jsonl": "{}" for each in ("training", "validation") if each != name})
    sentences = readiness(tmp_path, rows, "training.evaluation={interval: 1, iterations: 1}").missing
    assert any(f"data.path: {tmp_path}/rows/{name}.jsonl is not there" in each for each in sentences)


CHATS = {
    "chat": {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]},
    "chat, ShareGPT": {"id": 1, "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
    "prompt-completion": {"prompt": "?", "completion": "!"},
    "prompt-completion, Alpaca": {"instruction": "?", "input": "", "output": "!"},
}


@pytest.mark.parametrize("name", CHATS)
def test_chat_rows_are_not_learned_as_plain_text(name: str, tmp_path: Path) -> None:
    for file, named in (("corpus.jsonl", "corpus.jsonl"), ("corpus/part.json", "corpus")):
        write(tmp_path, {file: json.dumps(CHATS[name]) + "\n"})
        (sentence,) = readiness(tmp_path, DEEPSPEED, f"data.path={tmp_path}/{named}").missing
        assert f"{file} has rows of " in sentence
        assert f"add data.format: {name.partition(',')[0]} to learn their answers alone" in sentence


def test_preferences_have_no_format(tmp_path: Path) -> None:
    write(tmp_path, {"corpus.jsonl": json.dumps({"prompt": "?", "chosen": "!", "rejected": "."})})
    (sentence,) = readiness(tmp_path, DEEPSPEED, f"data.path={tmp_path}/corpus.jsonl").missing
    assert "rows of chosen and rejected" in sentence
    assert "write rows of messages" in sentence


def test_other_rows_of_json_are_warned_of_and_plain_text_is_not(tmp_path: Path) -> None:
    texts = {"corpus.jsonl": '{"text": "plain"}\n', "words.jsonl": "no row at all\n", "words.txt": '{"messages": 1}'}
    write(tmp_path, texts)
    (sentence,) = readiness(tmp_path, DEEPSPEED, f"data.path={tmp_path}/corpus.jsonl").doubtful
    assert "has rows of JSON" in sentence
    assert "add data.format: text" in sentence
    for name in ("words.jsonl", "words.txt"):
        ready = readiness(tmp_path, DEEPSPEED, f"data.path={tmp_path}/{name}")
        assert (ready.missing, ready.doubtful) == ((), ())


@pytest.mark.parametrize("token_type", [1, 4, 8])
def test_a_whole_dataset_is_taken_whatever_its_tokens(token_type: int, tmp_path: Path) -> None:
    size = {1: 1, 4: 4, 8: 2}[token_type]
    write(tmp_path, {"corpus/text.bin": bytes(7 * size), "corpus/text.idx": index([3, 4], token_type)})
    assert readiness(tmp_path, MEGATRON).missing == ()


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("corpus/text.idx", "write the prefix that both files share, {0}/corpus/text"),
        ("corpus/raw", "tools/preprocess_data.py appends _text_document: write {0}/corpus/raw_text_document"),
    ],
)
def test_a_prefix_that_is_nearly_right_is_mended(prefix: str, message: str, tmp_path: Path) -> None:
    dataset(tmp_path, "corpus/text")
    dataset(tmp_path, "corpus/raw_text_document")
    (sentence,) = readiness(tmp_path, MEGATRON, f"data.path={prefix}").missing
    assert message.format(tmp_path) in sentence


def test_a_pipe_and_a_device_are_never_opened(tmp_path: Path) -> None:
    dataset(tmp_path, "corpus/text")
    (tmp_path / "corpus/text.idx").unlink()
    os.mkfifo(tmp_path / "corpus/text.idx")
    (sentence,) = readiness(tmp_path, MEGATRON).missing
    assert "text.idx is no regular file" in sentence
    (tmp_path / "corpus/text.idx").unlink()
    (tmp_path / "corpus/text.idx").symlink_to("/dev/zero")
    assert "text.idx is no regular file" in readiness(tmp_path, MEGATRON).missing[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"corpus/notes/": ""}, "the folder {0}/corpus holds no file"),
        ({"corpus/a.txt": ""}, "the folder {0}/corpus holds only empty files"),
        ({"corpus": ""}, "{0}/corpus is empty"),
        ({}, "{0}/corpus is not there"),
    ],
)
def test_text_is_not_empty(files: Mapping[str, str], message: str, tmp_path: Path) -> None:
    for name in [name for name in files if name.endswith("/")]:
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path, {name: text for name, text in files.items() if not name.endswith("/")})
    (sentence,) = readiness(tmp_path, DEEPSPEED).missing
    assert message.format(tmp_path) in sentence


BPE = {"model": {"vocab": {"a": 0, "b": 300}}, "added_tokens": [{"id": 301}]}
UNIGRAM = {"model": {"vocab": [["a", 0.0]] * 301}}
SMALL_MODEL = "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 256}"

FOLDERS = {
    "absent": ({}, "tokenizer is not there"),
    "a file": ({"tokenizer": "x"}, "tokenizer is a file; name the folder"),
    "no tokenizer in it": ({"tokenizer/config.json": {}}, "holds no tokenizer: none of tokenizer.json"),
    "half of one": ({"tokenizer/vocab.json": {"a": 0}}, "holds vocab.json without merges.txt"),
    "a pointer of Git LFS": ({"tokenizer/tokenizer.json": LFS}, "tokenizer.json is only a pointer of Git LFS"),
    "too many tokens": ({"tokenizer/tokenizer.json": BPE}, "ids up to 300, and the embedding of"),
    "too many pieces": ({"tokenizer/tokenizer.json": UNIGRAM}, "ids up to 300"),
    "too many words": ({"tokenizer/vocab.txt": "word\n" * 301}, "set model.vocab_size to at least 301"),
    "too many of GPT-2's": ({"tokenizer/vocab.json": {"b": 300}, "tokenizer/merges.txt": "a b"}, "ids up to 300"),
    "too many of SentencePiece's": ({"tokenizer/tokenizer.model": sentence_pieces(301)}, "ids up to 300"),
}


@pytest.mark.parametrize(("files", "message"), FOLDERS.values(), ids=FOLDERS)
def test_a_tokenizer_by_its_folder_is_whole_and_fits_the_model(
    files: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    dataset(write(tmp_path, files), "corpus/text")
    (sentence,) = readiness(tmp_path, MEGATRON, SMALL_MODEL, f"data.tokenizer={tmp_path}/tokenizer").missing
    assert sentence.split(": ")[1] == "data.tokenizer"
    assert message in sentence


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer/tokenizer.json": {"model": {"vocab": {"a": 255}}}},
        {"tokenizer/tokenizer.model": sentence_pieces(256)},
        {"tokenizer/tokenizer.json": "not JSON at all"},
    ],
)
def test_a_tokenizer_that_fits_or_cannot_be_judged_is_let_pass(files: Mapping[str, object], tmp_path: Path) -> None:
    dataset(write(tmp_path, files), "corpus/text")
    ready = readiness(tmp_path, MEGATRON, SMALL_MODEL, f"data.tokenizer={tmp_path}/tokenizer")
    assert (ready.missing, ready.doubtful) == ((), ())


def test_added_tokens_beyond_the_embedding_are_warned_of(tmp_path: Path) -> None:
    vocabulary = {"model": {"vocab": {"a": 255}}, "added_tokens": [{"id": 256, "content": "<pad>"}]}
    dataset(write(tmp_path, {"tokenizer/tokenizer.json": vocabulary}), "corpus/text")
    ready = readiness(tmp_path, MEGATRON, SMALL_MODEL, f"data.tokenizer={tmp_path}/tokenizer")
    assert ready.missing == ()
    assert "its added tokens have ids up to 256" in ready.doubtful[0]


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "TikTokenizer"])
def test_a_tokenizer_that_is_a_file_is_one(kind: str, tmp_path: Path) -> None:
    dataset(tmp_path, "corpus/text")
    (tmp_path / "words").mkdir()
    (sentence,) = readiness(tmp_path, MEGATRON, "data.tokenizer=words", f"data.tokenizer_type={kind}").missing
    assert f"words is a folder, not a file; name the file of a {kind}" in sentence


def test_a_tokenizer_by_name_is_a_note_unless_it_is_in_the_cache(tmp_path: Path) -> None:
    dataset(tmp_path, "corpus/text")
    named, home = "data.tokenizer=meta-llama/Llama-3.1-8B", {"HF_HOME": str(tmp_path / "home")}
    ready = readiness(tmp_path, MEGATRON, named, environment=home)
    assert ready.missing == ()
    assert "meta-llama/Llama-3.1-8B is not in the cache of Hugging Face's hub" in ready.notes[0]
    offline = home | {"HF_HUB_OFFLINE": "1"}
    assert "keeps the job from fetching it" in readiness(tmp_path, MEGATRON, named, environment=offline).missing[0]
    write(tmp_path, {"home/hub/models--meta-llama--Llama-3.1-8B/snapshots/abc/tokenizer.json": "{}"})
    for environment in (home, offline):
        assert readiness(tmp_path, MEGATRON, named, environment=environment).notes == ()


def test_a_relative_tokenizer_is_told_how_it_is_read(tmp_path: Path) -> None:
    dataset(write(tmp_path, {"mine/tokenizer.json": "{}"}), "corpus/text")
    (sentence,) = readiness(tmp_path, recipe_text(data="{path: corpus/text, tokenizer: mine}")).doubtful
    assert f"the folder beside the recipe is {tmp_path}/mine" in sentence
    (sentence,) = readiness(tmp_path, recipe_text(data="{path: corpus/text, tokenizer: ./mine}")).missing
    assert "write a folder by its absolute path" in sentence
