"""Sinks never make collecting fail or hang, and no secret is said; `collect` passes on as a person asks."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from pathlib import Path

import psutil
import pytest
from collected_runs import RUN_ID, collected, finished

from llmlaunch.errors import UserError
from llmlaunch.sinks.delivery import chosen_sinks, harmless, pass_on
from llmlaunch.store.database import Store
from support.command_line import CommandLine

SECRET = "pa@ss-word"


def test_nothing_is_passed_on_unless_it_is_asked_for() -> None:
    assert chosen_sinks(environment={}) == []
    named = chosen_sinks(environment={"LLMLAUNCH_MLFLOW": "https://h/", "LLMLAUNCH_PROMETHEUS": "/p"})
    assert [(sink.kind.name, sink.place) for sink in named] == [("prometheus", "/p"), ("mlflow", "https://h/")]
    only = chosen_sinks(["mlflow"], environment={"LLMLAUNCH_MLFLOW": "https://h/", "LLMLAUNCH_PROMETHEUS": "/p"})
    assert [sink.kind.name for sink in only] == ["mlflow"]


@pytest.mark.parametrize(("word", "says"), [("statsd=1", "prometheus, mlflow, wandb"), ("mlflow", "LLMLAUNCH_MLFLOW")])
def test_a_sink_that_is_none_and_one_without_a_place_are_mistakes(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        chosen_sinks([word], environment={})


def test_one_that_is_not_installed_is_a_mistake_where_it_is_named_and_a_warning_where_it_is_not(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected(store, finished(tmp_path / "run"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else find_spec(name))
    with pytest.raises(UserError, match=r"pip install 'llmlaunch\[mlflow\]'"):
        chosen_sinks([f"mlflow={tmp_path}"])
    (passed,) = pass_on(store, chosen_sinks(environment={"LLMLAUNCH_MLFLOW": str(tmp_path)}))
    assert "pip install 'llmlaunch[mlflow]'" in str(passed.sentence())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@host:5000/x", "https://host:5000/x"),
        ("https://me:a@b/c@host/x", "https://host/x"),
        ("https://host/x?token=secret and more", "https://host/x and more"),
        ("/a/folder", "/a/folder"),
    ],
)
def test_addresses_are_said_without_what_may_be_a_secret(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_a_server_that_is_gone_costs_a_warning_without_the_password(store: Store, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    collected(store, finished(tmp_path / "run"))
    (passed,) = pass_on(store, chosen_sinks([f"mlflow=http://me:{SECRET}@127.0.0.1:{port}"]))
    sentence = str(passed.sentence())
    assert sentence.startswith(f"warning: mlflow (http://127.0.0.1:{port}): ")
    assert "The store has all" in sentence
    assert SECRET not in sentence + json.dumps(passed.as_json())
    assert SECRET not in repr(chosen_sinks([f"mlflow=http://me:{SECRET}@h"]))


def test_a_server_that_says_nothing_is_given_up_and_nothing_is_left_of_its_process(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1000")
    collected(store, finished(tmp_path / "run"))
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (passed,) = pass_on(store, chosen_sinks([f"mlflow={uri}"]), answer_seconds=1.5)
    assert passed.why == "no answer within 1.5 s"
    assert {child.pid for child in mine.children(recursive=True)} <= before


def test_a_sink_that_is_killed_costs_a_warning(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1000")
    collected(store, finished(tmp_path / "run"))
    mine = psutil.Process()
    before = {child.pid for child in mine.children()}

    def kill_it() -> None:
        connection, _ = silent.accept()  # it has asked the server, and waits
        for child in mine.children():
            if child.pid not in before:
                child.kill()
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        killer = threading.Thread(target=kill_it)
        killer.start()
        (passed,) = pass_on(store, chosen_sinks([f"mlflow=http://127.0.0.1:{silent.getsockname()[1]}"]))
        killer.join()
    assert passed.why == "its process ended without a word"


def test_collect_passes_on_what_the_environment_names_and_its_json_says_so(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path / "run")
    folder = tmp_path / "textfiles"
    folder.mkdir()
    assert llmlaunch.json("collect", run.path).keys() == {"runs"}
    monkeypatch.setenv("LLMLAUNCH_PROMETHEUS", str(folder))
    assert llmlaunch.json("collect")["sinks"] == [  # also what was collected before
        {"sink": "prometheus", "place": str(folder), "sent": 1, "due": 1, "why": None}
    ]
    assert [path.name for path in folder.iterdir()] == [f"llmlaunch-{RUN_ID}.prom"]


def test_named_runs_alone_are_passed_on(llmlaunch: CommandLine, tmp_path: Path) -> None:
    first, second = finished(tmp_path / "first"), finished(tmp_path / "second", run_id="another")
    llmlaunch("collect", first.path, second.path)
    answer = llmlaunch("collect", "another", "--sink", f"prometheus={tmp_path}")
    assert answer.stdout.endswith(f"prometheus ({tmp_path}): 1 run sent\n")
    assert [path.name for path in tmp_path.glob("*.prom")] == ["llmlaunch-another.prom"]


def test_a_sink_that_fails_does_not_make_collect_fail(llmlaunch: CommandLine, tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    answer = llmlaunch("collect", run.path, "--sink", f"prometheus={tmp_path}/nowhere")
    assert f"{RUN_ID} (succeeded): collected" in answer.stdout
    assert "warning: prometheus" in answer.stderr
    assert "is no folder" in answer.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_wrong_sink_is_said_before_anything_is_collected(
    llmlaunch: CommandLine, own_home: Path, tmp_path: Path
) -> None:
    run = finished(tmp_path / "run")
    assert llmlaunch("collect", run.path, "--sink", "statsd", code=2).stdout == ""
    assert not (own_home / "data" / "llmlaunch" / "store.db").exists()
