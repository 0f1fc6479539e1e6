"""A login node behind a real sshd on 127.0.0.1, in front of the one-machine cluster, and someone with a laptop."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from one_machine import Cluster, wait_until
from person import SOURCES, Person, at_home

NAME = "login"


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

    def work(self, folder: Path) -> Path:
        """The folder in which commands work there that are typed in `folder`."""
        return self.home / "llmlaunch-work" / folder.name

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
    installed = node.home / "bin" / "llmlaunch"
    installed.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m llmlaunch "$@"\n')
    installed.chmod(0o755)
    path = f"{node.home / 'bin'}:{os.environ['PATH']}"
    (node.home / ".bash_profile").write_text(
        f"echo Welcome to the cluster\nexport PATH={shlex.quote(path)} SLURM_CONF={cluster.conf} "
        f"PYTHONPATH={SOURCES} PYTHONDONTWRITEBYTECODE=1\n"
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

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": "/nowhere", "PATH": f"{self.person.home / 'bin'}:{os.environ['PATH']}"}

    def __call__(self, *words: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """`llmlaunch WORDS --on login`."""
        return self.person.llmlaunch(words[0], "--on", NAME, *words[1:], code=code, **self.variables)


def laptop(node: LoginNode, home: Path, config: Path | None = None) -> Laptop:
    """Someone at home in `home`, whose ssh reads the node's configuration, or `config`."""
    person = at_home(node.cluster, home)
    (home / "bin").mkdir(exist_ok=True)
    ssh = home / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config or node.config} "$@"\n')
    ssh.chmod(0o755)
    return Laptop(person)
