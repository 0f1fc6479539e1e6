"""node.pyz: the same bytes every time, and a bare Python runs it."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from node_rig import NODE, NodeRig

from llmlaunch.runs.node_archive import node_archive


def interpreters() -> dict[tuple[int, ...], str]:
    """Every other Python of this machine by version: the system's and pyenv's."""
    found = {sys.version_info[:2]: sys.executable}
    candidates = [*Path("/usr/bin").glob("python3*"), *Path.home().glob(".pyenv/versions/*/bin/python")]
    for path in sorted(candidates):
        ask = [str(path), "-c", "import sys; print(tuple(sys.version_info[:2]))"]
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.startswith("("):
            found.setdefault(ast.literal_eval(answer.stdout), str(path))
    return found


NEW_ENOUGH = {version: path for version, path in interpreters().items() if version >= (3, 8)}


def test_same_bytes_every_time() -> None:
    assert node_archive() == node_archive()


def test_holds_our_node_side_and_nvidias_binding_unchanged() -> None:
    archive = zipfile.ZipFile(io.BytesIO(node_archive()))
    ours = {f"node/{path.name}" for path in Path(__import__("llmlaunch.node").node.__file__).parent.glob("*.py")}
    assert set(archive.namelist()) == {"__main__.py", "pynvml.py", *ours}
    binding = archive.read("pynvml.py")
    assert binding == Path(str(metadata.distribution("nvidia-ml-py").locate_file("pynvml.py"))).read_bytes()
    assert b"Redistribution and use in source and binary forms" in binding


def test_every_file_of_ours_is_python_3_8() -> None:
    archive = zipfile.ZipFile(io.BytesIO(node_archive()))
    for name in archive.namelist():
        if name != "pynvml.py":
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
    place = ["--run-dir", str(tmp_path), "--attempt", "1.0"]
    answer = subprocess.run(
        [program, "finish", *place, "--nodes", "1", "--code", "4"], capture_output=True, check=False
    )
    assert answer.returncode == 4
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_an_unknown_command_gets_the_usage(archive: Path) -> None:
    answer = subprocess.run([sys.executable, archive, "dance"], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "monitor,rank,finish" in answer.stderr
