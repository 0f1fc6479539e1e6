"""Where the store is, asked without a database library and answered without a password."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.store.location import network_file_system, store_exists, where


def test_the_default_follows_the_xdg_specification() -> None:
    assert where({"HOME": "/h"}).path == Path("/h/.local/share/llmlaunch/store.db")
    assert where({"HOME": "/h", "XDG_DATA_HOME": "/x"}).path == Path("/x/llmlaunch/store.db")
    assert where({"HOME": "/h", "XDG_DATA_HOME": "relative"}).path == Path("/h/.local/share/llmlaunch/store.db")


def test_the_variable_takes_a_url_or_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert where({"LLMLAUNCH_STORE": "sqlite:////data/s.db"}).path == Path("/data/s.db")
    assert where({"LLMLAUNCH_STORE": "/data/s.db"}).path == Path("/data/s.db")
    monkeypatch.chdir(tmp_path)
    assert where({"LLMLAUNCH_STORE": "s.db"}).path == tmp_path / "s.db"
    assert where({"LLMLAUNCH_STORE": "postgresql://u@h/d"}).url == "postgresql+psycopg://u@h/d"


@pytest.mark.parametrize("value", ["mysql://u:hush@h/d", "sqlite://", "sqlite:///", "sqlite:////s.db?mode=ro"])
def test_what_cannot_be_a_store_is_one_message(value: str) -> None:
    with pytest.raises(UserError, match="LLMLAUNCH_STORE") as caught:
        where({"LLMLAUNCH_STORE": value})
    assert "hush" not in str(caught.value)


def test_no_home_directory_is_one_message() -> None:
    with pytest.raises(UserError, match="LLMLAUNCH_STORE"):
        where({})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ada:hush@db.site:5432/llm", "postgresql://ada@db.site:5432/llm"),
        ("postgresql://db.site/llm?password=hush", "postgresql://db.site/llm"),
        ("postgresql+psycopg://ada:hush@db/llm?sslmode=require", "postgresql+psycopg://ada@db/llm"),
        ("postgresql://ada:hush%40%2F@db/llm", "postgresql://ada@db/llm"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    location = where({"LLMLAUNCH_STORE": url})
    assert location.shown == shown
    assert "hush" not in repr(location)


@pytest.mark.parametrize("password", ["hu@sh", "hu/sh", "hu?sh", "hu#sh", "hu:sh"])
def test_a_password_that_is_not_escaped_is_refused_unshown(password: str) -> None:
    with pytest.raises(UserError, match="@ as %40") as caught:
        where({"LLMLAUNCH_STORE": f"postgresql://ada:{password}@db/llm"})
    assert not {"hu", "sh"} & set(str(caught.value).replace("@", " ").split())
    assert password not in str(caught.value)


def test_a_store_exists_when_its_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMLAUNCH_STORE", str(tmp_path / "s.db"))
    assert not store_exists()
    (tmp_path / "s.db").touch()
    assert store_exists()
    monkeypatch.setenv("LLMLAUNCH_STORE", "postgresql://nowhere/d")
    assert store_exists()


def test_asking_for_the_store_loads_no_database_library() -> None:
    program = (
        "import sys; from llmlaunch.store import location as l; l.store_exists(); print('sqlalchemy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_network_file_system_is_told_by_the_mount_table(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\nfiler:/h /home nfs4 rw 0 0\n"
        "local /home/ada/fast\\040disk xfs rw 0 0\nmdt /scratch lustre rw 0 0\n"
    )
    assert network_file_system(Path("/home/ada/s.db"), mounts) == "nfs4"
    assert network_file_system(Path("/home/ada/fast disk/s.db"), mounts) is None
    assert network_file_system(Path("/scratch/s.db"), mounts) == "lustre"
    assert network_file_system(Path("/scratchy/s.db"), mounts) is None
    assert network_file_system(Path("/var/s.db"), tmp_path / "absent") is None
