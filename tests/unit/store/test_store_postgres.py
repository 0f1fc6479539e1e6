"""The same store in a real PostgreSQL server, which this test starts and stops itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmlaunch.app.planned_run import plan_loaded
from llmlaunch.app.stored_evidence import stored_calibration
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_recipe
from llmlaunch.store.calibrations import calibrate, in_use, use, uses
from llmlaunch.store.collect import collect
from llmlaunch.store.database import open_store
from llmlaunch.store.history import last_true_peaks, stored_run
from llmlaunch.store.location import where
from llmlaunch.store.measurements import Filters, contents, import_file, put_rehearsed, rehearsed_of
from llmlaunch.store.runs import find_run
from support.measured_runs import run
from support.postgres_server import PostgresServer
from support.rehearsed_plans import GALLERY, PINS, on_gpu, planned, records, traced
from support.store_run_dirs import GIB, RUN_ID, finished_cpu_run

pytestmark = pytest.mark.postgres

DATA = Path(__file__).resolve().parents[2] / "data" / "measurements"
FILES = (DATA / "fit.jsonl", DATA / "outcomes.jsonl")
IMPORT = """
import sys
from pathlib import Path
from llmlaunch.store.measurements import import_file
from llmlaunch.store.database import open_store
with open_store() as store:
    import_file(store, Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server that runs."""
    postgres = PostgresServer()
    try:
        postgres.start()
        yield postgres.url
    finally:
        postgres.remove()


def test_it_does_what_the_file_does(server: str, tmp_path: Path) -> None:
    env = {**os.environ, "LLMLAUNCH_STORE": server}
    running = [
        subprocess.Popen([sys.executable, "-c", IMPORT, str(file)], env=env, stderr=subprocess.PIPE)
        for file in (*FILES, FILES[0])  # all at once, into a database that is still empty
    ]
    assert [process.communicate()[1] for process in running] == [b""] * 3
    with open_store(where(env)) as store:
        lines = [line for file in FILES for line in file.read_text(encoding="utf-8").splitlines()]
        assert sorted(contents(store)) == sorted(lines)
        assert 0 < len(contents(store, Filters(gpu="h100"))) < len(lines)
        odd = '{"id": "odd", "gpu": "\\u0000", "x": ["\\ud800", 1e3, 0.10]}'
        (tmp_path / "odd.jsonl").write_text(odd + "\n")
        import_file(store, tmp_path / "odd.jsonl")
        assert contents(store)[-1] == odd
        run = finished_cpu_run(tmp_path / "run")
        assert [outcome.did for outcome in (*collect(store, [run.path]), *collect(store))] == ["collected", "unchanged"]
        assert find_run(store, RUN_ID).measured_bytes == 2 * GIB
        whole = stored_run(store, RUN_ID)
        assert whole is not None
        assert (whole["recipe"], len(whole["records"]), whole["plan"]["verdict"]) == ("tiny", 2, "safe")
        past = last_true_peaks(store, "d1", "tiny")
        assert past is not None
        assert max(peak.peak_bytes for peak in past.peaks) == 2 * GIB


def test_it_learns_and_goes_back(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve runs of one backend on one card, all a fifth above their predictions, are enough to learn from."""
    job = ("megatron", "a800-80gb")
    measured = [run(number, 1.2 + number % 3 / 100, gpu="A800") for number in range(12)]
    runs = tmp_path / "runs.jsonl"
    runs.write_text("".join(f"{json.dumps(record)}\n" for record in measured), encoding="utf-8")
    with open_store(where({"LLMLAUNCH_STORE": server})) as store:
        import_file(store, runs)
        learning = calibrate(store, 1.8e9, *job)
        (calibration,) = (answer.result.calibration for answer in learning.answers if answer.did == "taken")
        assert calibration is not None
        assert calibration.after.mape < calibration.before.mape
        with store.write() as connection:
            assert in_use(connection, *job) == calibration
            use(connection, *job, None, 1.9e9)
        with store.read() as connection:
            assert in_use(connection, *job) is None
            assert [entry.calibration_id for entry in uses(connection, job[0])] == [calibration.id, None]
    monkeypatch.setenv("LLMLAUNCH_STORE", server)  # as a check asks
    assert stored_calibration(*job) is None
    assert stored_calibration(*job, calibration.id) == calibration
    assert stored_calibration(*job, "no-such") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [("/postgres", "/nowhere"), ("?", "?bogus=hush&"), ("ada", "eve")],
    ids=["database", "option", "user"],
)
def test_what_the_server_refuses_is_one_message_without_the_password(server: str, old: str, new: str) -> None:
    with pytest.raises(UserError, match="check LLMLAUNCH_STORE") as caught:
        open_store(where({"LLMLAUNCH_STORE": server.replace(old, new, 1)}))
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rehearsals_are_found_and_replaced_there_too(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = planned()
    with open_store(where({"LLMLAUNCH_STORE": server})) as store:
        put_rehearsed(store, records(job, traced(job, 0), on_gpu(job, 1, ran_out=True)))
        assert (
            put_rehearsed(store, records(job, traced(job, 0, 1.1), on_gpu(job, 1))) == 5
        )  # one is gone, three are new
        assert rehearsed_of(store, job.recipe, job.plan) == (traced(job, 0, 1.1), on_gpu(job, 1))
        assert last_true_peaks(store, job.recipe.digest, job.recipe.name) is None
    monkeypatch.setenv("LLMLAUNCH_STORE", server)
    assert plan_loaded(load_recipe(GALLERY, PINS)).plan.rehearsed is not None
