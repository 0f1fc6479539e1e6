"""node.pyz: the same bytes every time, and a bare Python runs it."""

from __future__ import annotations

import ast
import contextlib
import io
import subprocess
import sys
import tokenize
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import llmlaunch
from llmlaunch.rendering.node_archive import OBSERVING, bare_source, node_archive
from support.node_rig import NODE, NodeRig, run_archive
from support.soak import share

PACKAGE = Path(llmlaunch.__file__).parent


@cache
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


def test_same_bytes_every_time() -> None:
    assert node_archive.__wrapped__() == node_archive()


def test_holds_what_its_programs_import_and_nvidias_binding_unchanged() -> None:
    archive = zipfile.ZipFile(io.BytesIO(node_archive()))
    names = set(archive.namelist())
    assert {f"llmlaunch/node/{name}.py" for name in ("job", "training_node", "monitor", "preflight", "prune")} <= names
    assert {
        f"llmlaunch/{path.relative_to(PACKAGE)}" for path in (PACKAGE / "frameworks").glob("*/failures.py")
    } <= names
    assert not {name for name in names if "observe" in name}
    assert "llmlaunch/node/observe.py" in zipfile.ZipFile(io.BytesIO(node_archive(OBSERVING))).namelist()
    binding = archive.read("pynvml.py")
    assert binding == Path(str(metadata.distribution("nvidia-ml-py").locate_file("pynvml.py"))).read_bytes()
    assert b"Redistribution and use in source and binary forms" in binding


def test_is_at_most_a_megabyte() -> None:
    assert len(node_archive()) <= 1_000_000


def test_every_statement_keeps_its_line_without_docstrings_and_comments() -> None:
    source = (PACKAGE / "node" / "job.py").read_text("utf-8")
    bare = bare_source(source)
    tokens = tokenize.generate_tokens(io.StringIO(bare).readline)
    assert not any(token.type == tokenize.COMMENT for token in tokens)
    assert len(bare.splitlines()) == len(source.splitlines())
    assert not any(ast.get_docstring(node) for node in ast.walk(ast.parse(bare)) if isinstance(node, ast.FunctionDef))
    lines = [number for number, line in enumerate(source.splitlines()) if line.startswith("    def ")]
    assert all(bare.splitlines()[number] == source.splitlines()[number] for number in lines)


def test_a_text_with_a_number_sign_or_quotes_is_no_comment() -> None:
    texts = [
        '"# no"',
        "'# no \\' # no'",
        '"""# no\n"# no" \\""" # no"""',
        "f\"{x['#']}\"",
        "'\"' + '#'",
        'r"\\\\" + "#"',
    ]
    source = "".join(f"x = {text}\n" for text in texts)
    assert bare_source(source.replace("\nx", "  # it's \"\nx")) == source


def test_meanings_of_fields_and_imports_of_type_checkers_are_left_out() -> None:
    source = (
        'X = 1\n"""What it is."""\nif TYPE_CHECKING:\n    import os\n\nclass A:\n    x: int\n    """One\n    more."""\n'
    )
    assert bare_source(source) == "X = 1\n\n\n\n\nclass A:\n    x: int\n\n\n"


def test_every_file_of_ours_is_python_3_9() -> None:
    archive = zipfile.ZipFile(io.BytesIO(node_archive()))
    for name in archive.namelist():
        if name != "pynvml.py" and name.endswith(".py"):
            ast.parse(archive.read(name), filename=name, feature_version=(3, 9))


def test_a_bare_python_runs_all_of_it(archive: Path, nvml_library: Path, tmp_path: Path) -> None:
    """The oldest of this machine, in `make soak` each."""
    versions = sorted(version for version in interpreters() if version >= (3, 9))
    for version in share(versions, versions[:1]):
        folder = tmp_path / ".".join(map(str, version))
        folder.mkdir()
        with contextlib.closing(NodeRig(archive, folder, nvml_library)) as rig:
            rig.python = interpreters()[version]
            rig.scenario("gpu used=3G\n")
            monitor = rig.monitor()
            rig.until_used(3.5)
            assert rig.rank("true").wait() == 0
            end = rig.stop(monitor)
            assert end["event"] == "end"
            assert [process["rank"] for process in end["processes"]] == [0]
            rig.done(NODE)
            assert rig.finish(nodes=1, code=0)[0] == 0


def test_a_python_too_old_is_told_so(archive: Path) -> None:
    for version, path in interpreters().items():
        if version < (3, 9):
            answer = subprocess.run([path, str(archive), "job"], capture_output=True, text=True, check=False)
            assert answer.returncode == 1
            assert answer.stderr.startswith("llmlaunch needs Python 3.9 or newer here")


def test_runs_as_a_program_of_its_own(archive: Path, tmp_path: Path) -> None:
    program = tmp_path / "node.pyz"
    program.write_bytes(archive.read_bytes())
    program.chmod(0o755)
    assert subprocess.run([program, "monitor", "--help"], capture_output=True, check=False).returncode == 0


def test_an_unknown_command_gets_the_usage(archive: Path) -> None:
    answer = run_archive(archive, "dance")
    assert answer.returncode == 1
    assert "usage: python3 node.pyz {beside," in answer.stderr
