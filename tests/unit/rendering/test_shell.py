"""Values stay values: in words, exports, directives and templates."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from jinja2 import TemplateError
from run_samples import NASTY

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.rendering.shell import (
    ShellText,
    directive,
    export,
    import_from,
    render_template,
    required,
    shell_word,
)


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("text", NASTY)
def test_a_word_comes_out_of_bash_as_it_went_in(text: str) -> None:
    assert bash(f"printf %s {shell_word(text)}").stdout == text
    assert bash(f'{export("V", text)}; printf %s "$V"').stdout == text


def test_a_sequence_becomes_as_many_words() -> None:
    assert shlex.split(shell_word(("a b", 1, True, 0.5))) == ["a b", "1", "true", "0.5"]


def test_marked_text_is_left_alone() -> None:
    assert shell_word(ShellText("$(hostname)")) == "$(hostname)"


def test_a_node_variable_is_expanded_where_the_script_runs_and_never_split() -> None:
    word = shell_word(NodeVariable("TOOLS", "/my $(touch PWNED).py"))
    assert bash(f"printf '<%s>' {word}", TOOLS="/a b").stdout == "</a b/my $(touch PWNED).py>"


@pytest.mark.parametrize("text", ["nul\x00", "half \ud800"])
def test_what_no_word_can_hold_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="holds"):
        shell_word(text)


@pytest.mark.parametrize("value", [None, {"a": 1}])
def test_what_has_no_shell_form_is_a_template_mistake(value: object) -> None:
    with pytest.raises(TypeError, match="no shell form"):
        shell_word(value)


@pytest.mark.parametrize("name", ["A;touch PWNED", "1A", "", "A B", "A\n", "É"])
def test_a_name_that_is_no_variable_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="variable name"):
        export(name, "1")


@pytest.mark.parametrize(
    ("folder", "variables", "path"),
    [
        ("/my code", {}, "/my code"),
        ("/my code", {"PYTHONPATH": "/site"}, "/my code:/site"),
        (NodeVariable("CHECKOUT"), {"CHECKOUT": "/my code", "PYTHONPATH": "/site"}, "/my code:/site"),
        (NodeVariable("CHECKOUT"), {"PYTHONPATH": "/site"}, "/site"),
    ],
)
def test_a_folder_comes_first_on_the_python_path(
    folder: str | NodeVariable, variables: dict[str, str], path: str
) -> None:
    assert bash(f'set -u; {import_from(folder)}; printf %s "$PYTHONPATH"', **variables).stdout == path


def test_a_missing_secret_ends_the_script_and_a_present_one_is_not_shown() -> None:
    line = f"{required('HF_TOKEN', 'export it where you submit')}; echo went on"
    missing = bash(line)
    assert missing.returncode != 0
    assert "HF_TOKEN: export it where you submit" in missing.stderr
    present = bash(line, HF_TOKEN="s3cret")
    assert (present.stdout, present.stderr) == ("went on\n", "")


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("time", "24:00:00", "#SBATCH --time=24:00:00"),
        ("nodelist", "node[1-4,7]", "#SBATCH --nodelist=node[1-4,7]"),
        ("exclusive", True, "#SBATCH --exclusive"),
        ("requeue", False, ""),
        ("mem", 0, "#SBATCH --mem=0"),
        ("comment", "run #1 of 2", '#SBATCH --comment="run #1 of 2"'),
        ("constraint", "a100|h100&ib", '#SBATCH --constraint="a100|h100&ib"'),
        ("job-name", "it's $HOME", '#SBATCH --job-name="it\'s $HOME"'),
    ],
)
def test_directives(option: str, value: str | int | bool, line: str) -> None:
    assert directive(option, value) == line


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("job-name", "x\n#SBATCH --wrap=id"),
        ("job-name", "x\r#SBATCH --wrap=id"),
        ("job-name", "x\u2028y"),
        ("job-name", 'x" --uid=0 "'),
        ("comment", "back\\slash"),
        ("partition", ""),
        ("partition", "  "),
        ("par tition", "gpu"),
        ("partition\n#SBATCH --wrap", "id"),
        ("--partition", "gpu"),
    ],
)
def test_directives_that_sbatch_would_misread_are_refused_by_name(option: str, value: str) -> None:
    with pytest.raises(UserError, match=r"^slurm\."):
        directive(option, value)


def test_a_mistake_in_a_template_of_ones_own_names_the_template(tmp_path, monkeypatch) -> None:
    (tmp_path / "job.sbatch.j2").write_text("echo\n{% if %}\n")
    monkeypatch.setenv("LLMLAUNCH_TEMPLATES", str(tmp_path))
    with pytest.raises(UserError, match=r"job\.sbatch\.j2, line 2"):
        render_template("job.sbatch.j2", {})
    monkeypatch.setenv("LLMLAUNCH_TEMPLATES", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="is not a folder"):
        render_template("job.sbatch.j2", {})


def test_undefined_names_and_ways_out_of_the_sandbox_render_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LLMLAUNCH_TEMPLATES", str(tmp_path))
    escapes = ("{{ missing }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ export.__globals__ }}")
    for text in escapes:
        (tmp_path / "bad.j2").write_text(text)
        with pytest.raises((UserError, TemplateError)):
            render_template("bad.j2", {})
