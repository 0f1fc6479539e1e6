"""node.pyz: the same bytes every time, and a bare Python runs it."""

from __future__ import annotations

import ast
import io
import json
import marshal
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

import pytest

import llmlaunch
from llmlaunch.rendering.node_archive import node_archive
from support.node_rig import NODE, NodeRig, run_archive

# four nodes in a ring, where a-c, c-b, b-d and d-a are the fast links
PLACED = """{"schema": 1, "nodes": 4, "devices_per_node": 1, "fabric_gigabytes_per_second": 1, "layout": {"data": 4},
"bytes": {"pipeline": 0, "data": [1e9], "expert_data": [0], "expert": 0},
"matrix": {"nodes": ["a", "b", "c", "d"], "gigabytes_per_second": [[0,1,9,9],[1,0,9,9],[9,9,0,1],[9,9,1,0]]}}"""
PACKAGE = Path(llmlaunch.__file__).parent


def interpreters() -> dict[tuple[int, ...], str]:
    """Every other Python of this machine by version: the system's and pyenv's."""
    programs = {sys.version_info[:2]: sys.executable}
    candidates = [*Path("/usr/bin").glob("python3*"), *Path.home().glob(".pyenv/versions/*/bin/python")]
    for path in sorted(candidates):
        command = [str(path), "-c", "import sys; print(tuple(sys.version_info[:2]))"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.startswith("("):
            programs.setdefault(ast.literal_eval(answer.stdout), str(path))
    return programs


NEW_ENOUGH = {version: path for version, path in interpreters().items() if version >= (3, 8)}


def test_same_bytes_every_time() -> None:
    assert node_archive.__wrapped__() == node_archive()


def test_holds_our_node_side_and_nvidias_binding_unchanged() -> None:
    archive = zipfile.ZipFile(io.BytesIO(node_archive()))
    rooms = ("causes", "node", "placement", "rundir")
    ours = {f"llmlaunch/{room}/{path.name}" for room in rooms for path in (PACKAGE / room).glob("*.py")}
    failures = sorted((PACKAGE / "frameworks").glob("*/failures.py"))
    assert len(failures) >= 3
    of_backends = [
        PACKAGE / "frameworks" / "__init__.py",
        *failures,
        *(path.with_name("__init__.py") for path in failures),
    ]
    ours |= {f"llmlaunch/{path.relative_to(PACKAGE)}" for path in of_backends}
    given = {f"llmlaunch/trainers/{name}.py" for name in ("hook", "memory_probe")}  # to trainers that are observed
    bytecode = {f"{name}c" for name in ours}
    assert set(archive.namelist()) == {"__main__.py", "pynvml.py", "llmlaunch/__init__.py", *ours, *bytecode, *given}
    binding = archive.read("pynvml.py")
    assert binding == Path(str(metadata.distribution("nvidia-ml-py").locate_file("pynvml.py"))).read_bytes()
    assert b"Redistribution and use in source and binary forms" in binding


def test_every_file_of_ours_is_python_3_8() -> None:
    archive = zipfile.ZipFile(io.BytesIO(node_archive()))
    for name in archive.namelist():
        if name != "pynvml.py" and name.endswith(".py"):
            ast.parse(archive.read(name), filename=name, feature_version=(3, 8))


@pytest.mark.parametrize("version", sorted(NEW_ENOUGH), ids=lambda version: ".".join(map(str, version)))
def test_a_bare_python_runs_all_of_it(version: tuple[int, ...], gpu_node: NodeRig) -> None:
    gpu_node.python = NEW_ENOUGH[version]
    gpu_node.scenario("gpu used=3G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(3.5)
    assert gpu_node.rank("true").wait() == 0
    end = gpu_node.stop(monitor)
    assert end["event"] == "end"
    assert [process["rank"] for process in end["processes"]] == [0]
    gpu_node.done(NODE)
    assert gpu_node.finish(nodes=1, code=0)[0] == 0


def test_bytecode_is_that_of_the_source_beside_it() -> None:
    archive = zipfile.ZipFile(io.BytesIO(node_archive()))
    for name in archive.namelist():
        if name.endswith(".pyc"):
            source = archive.read(name[:-1])
            header, code = archive.read(name)[:16], marshal.loads(archive.read(name)[16:])
            assert header == MAGIC_NUMBER + bytes([1, 0, 0, 0]) + source_hash(source)
            assert code == compile(source, name[:-1], "exec", dont_inherit=True)
            assert code.co_filename == name[:-1]


def test_a_python_of_another_version_reads_the_source(tmp_path: Path) -> None:
    path = tmp_path / "node.pyz"
    with zipfile.ZipFile(io.BytesIO(node_archive())) as archive, zipfile.ZipFile(path, "w") as other:
        for name in archive.namelist():
            content = archive.read(name)
            other.writestr(name, b"\0\0" + content[2:16] + b"no code" if name.endswith(".pyc") else content)
    answer = run_archive(path, "finish", "--help")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("version", sorted(NEW_ENOUGH), ids=lambda version: ".".join(map(str, version)))
def test_a_bare_python_places_nodes(version: tuple[int, ...], archive: Path, tmp_path: Path) -> None:
    (tmp_path / "placement.json").write_text(PLACED)
    place = ("place", "--run-dir", tmp_path, "--attempt", "1.0")
    answer = run_archive(archive, *place, stdin="a\nb\nc\nd\n", python=NEW_ENOUGH[version])
    assert (answer.returncode, answer.stdout) == (0, "a\n0 2 1 3\n"), answer.stderr


def test_a_python_too_old_is_told_so(archive: Path) -> None:
    for version, path in interpreters().items():
        if version < (3, 8):
            answer = subprocess.run([path, str(archive), "rank"], capture_output=True, text=True, check=False)
            assert answer.returncode == 1
            assert answer.stderr.startswith("llmlaunch: node.pyz needs Python >= 3.8")


def test_runs_as_a_program_of_its_own(archive: Path, tmp_path: Path) -> None:
    program = tmp_path / "node.pyz"
    program.write_bytes(archive.read_bytes())
    program.chmod(0o755)
    finish = ("finish", "--run-dir", tmp_path, "--attempt", "1.0", "--nodes", "1", "--code", "4")
    assert subprocess.run([program, *finish], capture_output=True, check=False).returncode == 4
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_an_unknown_command_gets_the_usage(archive: Path) -> None:
    answer = run_archive(archive, "dance")
    assert answer.returncode == 1
    assert "usage: python3 node.pyz {begin," in answer.stderr
