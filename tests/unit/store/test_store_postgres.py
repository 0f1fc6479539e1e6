"""The same store in a real PostgreSQL server, which this test starts and stops itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from store_run_dirs import GIB, RUN_ID, finished_cpu_run

from llmlaunch.errors import UserError
from llmlaunch.store.collect import collect
from llmlaunch.store.history import last_true_peaks
from llmlaunch.store.location import where
from llmlaunch.store.measurements import Filters, contents, import_file
from llmlaunch.store.open import VERSION_TABLE, open_store
from llmlaunch.store.runs import find_run
from llmlaunch.store.tables import metadata

pytestmark = pytest.mark.postgres

DATA = Path(__file__).resolve().parents[2] / "data" / "measurements"
FILES = (DATA / "fit.jsonl", DATA / "outcomes.jsonl")
IMPORT = """
import sys
from pathlib import Path
from llmlaunch.store.measurements import import_file
from llmlaunch.store.open import open_store
with open_store() as store:
    import_file(store, Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server of this test's own, on a socket in a new folder. As root it runs as `postgres`."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    assert programs, "PostgreSQL is not installed: apt-get install postgresql"
    bin_folder = programs[-1].parent
    folder = Path(tempfile.mkdtemp(prefix="llmlaunch-pg-"))
    as_user: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
        as_user = ["runuser", "-u", "postgres", "--"]

    def run(program: str, *words: str) -> None:
        command = [*as_user, str(bin_folder / program), "-D", str(folder / "data"), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")

    run("initdb", "-A", "trust", "-U", "ada", "--no-sync")
    try:
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        yield f"postgresql://ada:hush@/postgres?host={folder}"
    finally:
        run("pg_ctl", "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder)


def test_it_does_what_the_file_does(server: str, tmp_path: Path) -> None:
    env = {**os.environ, "LLMLAUNCH_STORE": server}
    running = [
        subprocess.Popen([sys.executable, "-c", IMPORT, str(file)], env=env, stderr=subprocess.PIPE)
        for file in (*FILES, *FILES)  # all at once, into a database that is still empty
    ]
    assert [process.communicate()[1] for process in running] == [b""] * 4
    with open_store(where(env)) as store:
        given = [line for file in FILES for line in file.read_text(encoding="utf-8").splitlines()]
        assert sorted(contents(store)) == sorted(given)
        assert 0 < len(contents(store, Filters(gpu="h100"))) < len(given)
        with store.read() as connection:
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            assert compare_metadata(context, metadata) == []
        odd = '{"id": "odd", "gpu": "\\u0000", "x": ["\\ud800", 1e3, 0.10]}'
        (tmp_path / "odd.jsonl").write_text(odd + "\n")
        import_file(store, tmp_path / "odd.jsonl")
        assert contents(store)[-1] == odd
        run = finished_cpu_run(tmp_path / "run")
        assert [outcome.did for outcome in (*collect(store, [run.path]), *collect(store))] == ["collected", "unchanged"]
        assert find_run(store, RUN_ID).measured_bytes == 2 * GIB
        past = last_true_peaks(store, "d1", "tiny")
        assert past is not None
        assert past.worst.peak_bytes == 2 * GIB


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
