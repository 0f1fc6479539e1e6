"""A secret that stands in every place a run directory has does not reach the store, and no export of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.redaction import masked
from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.history import stored_run
from llmlaunch.store.measurements import contents
from llmlaunch.store.run_figures import figures_of
from llmlaunch.store.runs import set_state
from support.store_run_dirs import ATTEMPT, GIB, RUN_ID, STARTED, RunDir, gpu

BY_REFERENCE = "correct-horse-battery"  # of a variable that only the recipe calls a secret
BY_NAME = "b2c4d6e8f0a1b3c5d7e9"
BY_ITS_LOOKS = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
IN_A_URL = "s3cr3t.p4ssw0rd"
OF_A_WORD = "staple-of-the-horse"  # of one that only a key=value word calls so
ALL = (BY_REFERENCE, OF_A_WORD, BY_NAME, BY_ITS_LOOKS, IN_A_URL)
LINE = (
    f"CUDA out of memory for {BY_REFERENCE} at https://ada:{IN_A_URL}@host/x "
    f"with Bearer {BY_ITS_LOOKS} ({BY_NAME}, {OF_A_WORD})"
)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("MY_HUB", BY_REFERENCE)
    monkeypatch.setenv("WANDB_API_KEY", BY_NAME)
    run = RunDir(tmp_path / "run", kind="gpu")
    recipe = (
        f"schema: 1\nname: tiny\nsecrets: [MY_HUB, HF_TOKEN]\n# {LINE}\ndata: {{path: 'https://ada:{IN_A_URL}@h/d'}}\n"
    )
    (run.path / "recipe.yaml").write_text(recipe)
    monkeypatch.setenv("OTHER_HUB", OF_A_WORD)
    overrides = ["secrets=[MY_HUB, OTHER_HUB]", f"backend.extra_args=--hub-token {LINE}"]
    run.run["overrides"] = [*overrides, f"environment.HF_TOKEN={BY_ITS_LOOKS}"]
    run.run["measurement"]["model"]["name"] = LINE
    run.write("run.json", run.run)
    run.write("plan.json", {"recipe": "tiny", "arguments": [LINE, "--wandb-key", "abcdefgh12345"], "note": LINE})
    run.ranks(exit_code=1, visible_devices=LINE)
    run.line("n0", gpus=[gpu(0, process_peak_bytes={"1000": GIB})])
    run.line("n0", "no_nvml", why=LINE)
    cause = {"schema": 1, "kind": "oom", "node": "n0", "rank": 1, "line": LINE, "source": "log", "sick": True}
    run.write(f"attempts/{ATTEMPT}/causes/n0.json", {**cause, "numbers": {}, "ranks": [{"rank": 1, "line": LINE}]})
    (run.path / "logs" / f"{ATTEMPT}.n0.log").write_text(f"RuntimeError: {LINE}\n")
    run.status(state="failed", exit_code=1, why=LINE, cause={**cause, "numbers": {}})
    run.write("submission.json", {"launcher": "slurm", "job_id": "77", "submitted_at": STARTED, "cluster": "c"})
    return run


def everything(store: Store) -> str:
    with store.read() as connection:
        tables = ("recipes", "plans", "runs", "measurements", "sick_nodes", "calibrations")
        rows: list[Any] = [connection.exec_driver_sql(f"SELECT * FROM {table}").all() for table in tables]
    return repr(rows)


def test_a_planted_secret_is_nowhere_in_the_store(store: Store, planted: RunDir, tmp_path: Path) -> None:
    (outcome,) = collect(store, [planted.path])
    assert outcome.did == "collected"
    set_state(store, RUN_ID, "lost", f"slurm said {LINE}")
    content = everything(store)
    exported = "\n".join([*contents(store), json.dumps(figures_of(stored_run(store, RUN_ID) or {}))])
    assert store.location.path is not None
    raw = store.location.path.read_bytes()
    for secret in ALL:
        assert secret not in content
        assert secret not in exported
        assert secret.encode() not in raw
    records = [json.loads(text) for text in contents(store)]
    assert {record["peak_kind"] for record in records} >= {"device", "oom"}
    line = next(record["line"] for record in records if record["peak_kind"] == "oom")
    assert line == "CUDA out of memory for *** at https://ada:***@host/x with Bearer *** (***, ***)"
    for text in ("secrets: [MY_HUB, HF_TOKEN]", "slurm said CUDA out of memory for ***"):  # all else stays
        assert text in content


def test_text_that_no_database_holds_is_made_such(store: Store, planted: RunDir) -> None:
    planted.status(state="failed", exit_code=1, why="torn \0 and \ud800 half")
    collect(store, [planted.path])
    assert "torn \ufffd and ? half" in everything(store)


@pytest.mark.parametrize(
    "harmless",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
        "max_tokens=12345678 tokens per second: 12345.678 lr_token: 1e-5 eos_token: <|endoftext|>",
        "tokenizer: meta-llama/Llama-3.1-8B, data: /scratch/risk-management-of-very-long-names",
        "https://github.com/NVIDIA/Megatron-LM/issues/1?page=2 at user@host:/path",
        "secrets: [HF_TOKEN, WANDB_API_KEY]",
        "FATAL: password authentication failed for user ada",
    ],
)
def test_what_is_no_secret_stays(harmless: str) -> None:
    assert masked(harmless) == harmless


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("--wandb-key abcdefghij --x", "--wandb-key *** --x"),
        ("api_key='abcdefgh12'", "api_key='***'"),
        ('{"password": "hunter2secret"}', '{"password": "***"}'),
        ("GET https://x/y?sig=abc%20d&z=1", "GET https://x/y?sig=***&z=1"),
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: Basic ***"),
        ("key AKIAIOSFODNN7EXAMPLE of ghp_abcdefghijklmnopqrstuv", "key *** of ***"),
        ("docker://user:pw@registry/image", "docker://user:***@registry/image"),
    ],
)
def test_what_looks_like_a_secret_goes(line: str, left: str) -> None:
    assert masked(line) == left
