"""Collectors that meet, die or lose their server, and disks that are full: every peak is in the store, once."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import psycopg
import pytest

from support import judge
from support.chain import Chain
from support.command_line import run_llmlaunch
from support.node_rig import GIB, until
from support.postgres_server import PostgresServer

COLLECTORS = 4
RUNS = 3

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def ended(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """A run that is over and that no store knows of; the stores are the tests' own."""
    run = Chain(tmp_path_factory.mktemp("ended"), nvml_library)
    run.start().train(40).stop()
    (run.place / "store.db").unlink()
    yield run
    run.close()


def copies(run: Chain, place: Path) -> list[Path]:
    """The run directory as so many runs."""
    directories = [shutil.copytree(run.run, place / f"run{number}") for number in range(RUNS)]
    for number, directory in enumerate(directories):
        (directory / "run.id").write_text(f"run-{number}\n")
    return directories


def collector(run: Chain, store: str, *directories: Path) -> subprocess.Popen[str]:
    """`llmlaunch collect`, begun."""
    return subprocess.Popen(
        [sys.executable, "-m", "llmlaunch", "collect", *map(str, directories)],
        env={**run.environment, "LLMLAUNCH_STORE": store}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def judge_all(run: Chain, store: str, directories: list[Path]) -> None:
    """Each of the directories is in the store with every peak it holds, once."""
    environment = {**run.environment, "LLMLAUNCH_STORE": store}
    exported = run_llmlaunch(run.place, "measurements", "export", code=0, **environment).stdout
    records = [json.loads(line) for line in exported.splitlines()]
    for directory in directories:
        now = judge.on_disk(directory)
        run_id = (directory / "run.id").read_text().strip()
        assert judge.judge(directory, now, now, [record for record in records if record["run_id"] == run_id]) == []
    assert len({record["run_id"] for record in records}) == len(directories)


def test_collectors_at_once_one_of_which_is_killed(ended: Chain, tmp_path: Path, repeat: int) -> None:
    store, directories = str(tmp_path / "store.db"), copies(ended, tmp_path)
    collectors = [collector(ended, store, *directories) for _ in range(COLLECTORS)]
    time.sleep(Random(repeat).uniform(0.1, 0.6))  # where it is by then is chance, and any moment will do
    collectors[0].kill()
    outputs = [process.communicate()[0] for process in collectors]
    assert [process.returncode for process in collectors[1:]] == [0] * (COLLECTORS - 1), outputs
    judge_all(ended, store, directories)


@pytest.mark.postgres
def test_a_server_that_crashes_in_mid_write(ended: Chain, server: PostgresServer, tmp_path: Path) -> None:
    """The collector stands in the midst of its transaction, since somebody holds the table it wants to write next."""
    server.start()
    directories = copies(ended, tmp_path)
    assert collector(ended, server.url, directories[0]).wait() == 0
    with psycopg.connect(server.url) as somebody, psycopg.connect(server.url, autocommit=True) as watcher:
        somebody.execute("LOCK TABLE measurements IN EXCLUSIVE MODE")
        writing = collector(ended, server.url, *directories)
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'measurements'::regclass"
        until(lambda: (watcher.execute(waits).fetchone() or [0])[0], "the collector in mid-write")
        server.stop("immediate")
        said, _ = writing.communicate()
        somebody.close()
        watcher.close()
    assert writing.returncode != 0
    assert "Traceback" not in said, said
    assert "check LLMLAUNCH_STORE" in said, said
    server.start()
    judge_all(ended, server.url, directories[:1])  # what was committed is there, what was not has left nothing
    both = [collector(ended, server.url, *directories) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    judge_all(ended, server.url, directories)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        yield server
    finally:
        server.remove()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where the tests are run by root; else a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(disk: Path, run: Chain) -> Iterator[None]:
    """No room is left on the disk; where that takes root, the monitor's files may grow no more."""
    if os.getuid() != 0:
        monitor = run.pid("monitor")
        assert monitor
        resource.prlimit(monitor, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        yield
        resource.prlimit(monitor, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    filler.unlink()


@pytest.mark.parametrize("for_good", [True, False], ids=["for good", "for a while"])
def test_the_disk_of_the_run_is_full(chain: Callable[..., Chain], small_disk: Path, for_good: bool) -> None:
    run = chain(folder=small_disk).start().train(40)
    before = run.on_disk()
    with full(small_disk, run):
        run.driver.hold(60)
        run.driver.until_sampled(3)
        if for_good:
            run.stop()
    if not for_good:
        run.until_written(60)
        run.stop()
    records = {record["global_rank"]: record for record in run.judged(before) if record["peak_kind"] == "device"}
    assert records[0]["peak_bytes"] == 60 * GIB  # what found no room lies in the spool of the node
