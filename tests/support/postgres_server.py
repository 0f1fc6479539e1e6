"""A real PostgreSQL server of a test's own, on a socket in a new folder. As root it runs as `postgres`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class PostgresServer:
    """Stopped until `start`; `url` is that of its database, with a password that nothing may print."""

    def __init__(self) -> None:
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
        assert programs, "PostgreSQL is not installed: apt-get install postgresql"
        self._programs = programs[-1].parent
        self.folder = Path(tempfile.mkdtemp(prefix="llmlaunch-pg-"))
        self._as_user: list[str] = []
        if os.getuid() == 0:
            shutil.chown(self.folder, "postgres")
            self._as_user = ["runuser", "-u", "postgres", "--"]
        self._run("initdb", "-A", "trust", "-U", "ada", "--no-sync")
        self.url = self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql://ada:hush@/{database}?host={self.folder}"

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off"
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode: str) -> None:
        """`mode`: `fast` ends all connections, `immediate` is a crash that the next start recovers from."""
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def remove(self) -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder)

    def _run(self, program: str, *words: str) -> None:
        command = [*self._as_user, str(self._programs / program), "-D", str(self.folder / "data"), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")
