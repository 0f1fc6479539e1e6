"""A login node behind a real sshd on 127.0.0.1, in front of the one-machine cluster, and someone with a laptop."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from one_machine import Cluster, wait_until
from person import Person, at_home

NAME = "login"
# Ends the connection whose command this is: the session's sshd is the parent of what it started.
CUT = "kill -9 $PPID"
CUT_OF_A_CHILD = "kill -9 $(cut -d' ' -f4 /proc/$PPID/stat)"


@dataclass
class LoginNode:
    """`home` is the person's there; `bin` comes before all other commands there."""

    folder: Path
    port: int
    cluster: Cluster
    daemon: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def config(self) -> Path:
        """The ssh configuration of who has a laptop."""
        return self.folder / "config"

    def put(self, **scripts: str) -> None:
        """Put shell scripts before all other commands there; an empty one is removed."""
        for name, script in scripts.items():
            path = self.home / "bin" / name
            path.unlink(missing_ok=True)
            if script:
                path.write_text(f"#!/bin/sh\n{script}\n")
                path.chmod(0o755)

    def run_directory(self, run_id: str) -> Path:
        return self.home / "llmlaunch-runs" / run_id

    def up(self) -> None:
        log = (self.folder / "sshd.log").open("ab")
        argv = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self.daemon = subprocess.Popen(argv, stderr=log)
        wait_until(self._listens, "sshd listens", instead=lambda: (self.folder / "sshd.log").read_text())

    def down(self) -> None:
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
            self.daemon = None

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def login_node(cluster: Cluster) -> Iterator[LoginNode]:
    """A host `login` with its own key, in which this user logs in with a key of his own."""
    with tempfile.TemporaryDirectory(prefix="login-", ignore_cleanup_errors=True) as name:  # a socket's name is short
        node = _installed(cluster, Path(name))
        node.up()
        try:
            yield node
        finally:
            node.down()


def _installed(cluster: Cluster, folder: Path) -> LoginNode:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        node = LoginNode(folder, free.getsockname()[1], cluster)
    (node.home / "bin").mkdir(parents=True)
    path = f"{node.home / 'bin'}:{os.environ['PATH']}"
    (node.home / ".bash_profile").write_text(
        f"echo Welcome to the cluster\nexport PATH={shlex.quote(path)} SLURM_CONF={cluster.conf}\n"
    )
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(
        f"Port {node.port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host_key'}\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nStrictModes no\nPasswordAuthentication no\n"
        f"KbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\nSetEnv HOME={node.home}\n"
    )
    key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{node.port} {key}")
    node.config.write_text(
        f"Host {NAME}\n  HostName 127.0.0.1\n  Port {node.port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder / 'user_key'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known_hosts'}\n"
        f"  ControlMaster auto\n  ControlPath {folder}/%C\n  ControlPersist 5\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd gives up its privileges
    return node


@dataclass(frozen=True)
class Laptop:
    """Someone whose machine has no SLURM, and ssh."""

    person: Person

    def __call__(self, *words: str | Path, code: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """`llmlaunch WORDS`."""
        away = {"SLURM_CONF": "/nowhere", "PATH": f"{self.person.home / 'bin'}:{os.environ['PATH']}"}
        return self.person.llmlaunch(*words, code=code, **{**away, **variables})


def laptop(node: LoginNode, home: Path, config: Path | None = None) -> Laptop:
    """Someone at home in `home`, whose ssh reads the node's configuration, or `config`."""
    person = at_home(node.cluster, home)
    (home / "bin").mkdir(exist_ok=True)
    ssh = home / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config or node.config} "$@"\n')
    ssh.chmod(0o755)
    return Laptop(person)
