"""`--on HOST`: what goes to the host, what reaches its shell, and what comes back. ssh itself is the only stand-in: it
gives the text to a real shell of this machine, and llmlaunch there shows what it was called with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.ssh.host import Host, host_at
from support.command_line import CommandLine
from support.recipes import recipe_text

AWKWARD = "it's a $(touch stolen) `folder`; rm -rf *"
Put = Callable[..., Path]

SHOWS_ITSELF = """\
printf '%s\\0' "$PWD" "$LLMLAUNCH_ON" "$@" > "$HOME/called"
echo out; echo err >&2; exit 3"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_commands: Put) -> Path:
    """The home on the host `login`, whose login shell prints a greeting and finds the programs of `bin` first. The
    person is in a folder `project` of this machine."""
    home, project = tmp_path / "there", tmp_path / "project"
    (home / "bin").mkdir(parents=True)
    project.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    (home / ".bash_profile").write_text(f"echo Welcome; echo mesg >&2\nexport PATH={home}/bin:{os.environ['PATH']}\n")
    answers(home, llmlaunch=SHOWS_ITSELF)
    put_commands(ssh=f'printf "%s\\n" "$*" >> {tmp_path}/calls; cd {home}; for text; do :; done; exec sh -c "$text"')
    return home


def answers(home: Path, **scripts: str) -> None:
    """Put programs on the host."""
    for name, script in scripts.items():
        (home / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (home / "bin" / name).chmod(0o755)


def called(home: Path) -> list[str]:
    """The folder in which llmlaunch was called there, the host it was told, and its words."""
    return (home / "called").read_text().split("\0")[:-1]


def below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("typed", "name", "folder"),
    [
        ("me@login.site.org:/scratch/me", "me@login.site.org", "/scratch/me"),
        ("10.0.0.1:~/runs", "10.0.0.1", "runs"),
        ("login:~", "login", "."),
        ("[::1]", "[::1]", "its/own"),
        ("me@[fe80::1%eth0]:-x", "me@[fe80::1%eth0]", "-x"),
        (f"_a-b:{AWKWARD}", "_a-b", AWKWARD),
    ],
)
def test_a_host_is_what_ssh_takes(typed: str, name: str, folder: str) -> None:
    assert host_at(typed, "its/own") == Host(name, folder, typed)


@pytest.mark.parametrize(
    "typed", ["", "-oProxyCommand=x", ":/x", "a b", "a;b:/x", "a$(b)", "a/b", "a\nb", "@", "x" * 300]
)
def test_what_may_be_an_option_or_shell_text_is_no_host(typed: str) -> None:
    with pytest.raises(UserError, match=r"is no host as ssh takes it; write --on HOST or --on HOST:FOLDER"):
        host_at(typed, "x")


def test_words_reach_the_host_as_they_are(there: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [AWKWARD, "a'b\"c", "", "*", "$HOME", "\\", "a\\\\b", "-n", "a\nb", "!!", "ü", "\udcff"]
    host = Host("login", AWKWARD, "login")
    host.send({})
    assert host.run(words) == 3
    folder, on, *arrived = (there / "called").read_bytes().split(b"\0")[:-1]
    assert arrived == [os.fsencode(word) for word in words]
    assert (os.fsdecode(folder), on) == (f"{there}/{AWKWARD}", b"login")
    assert capfd.readouterr() == ("out\n", "err\n"), "no greeting, each stream for itself"
    assert not list(tmp_path.rglob("stolen"))
    for call in (tmp_path / "calls").read_text().splitlines():
        assert "BatchMode=yes" in call, "nobody is there to answer"
        assert "!" not in call, "csh would take it for an event"
        assert "touch" not in call, "what a person wrote is no text of a shell"


def test_files_come_to_their_places_and_what_must_not_be_there_is_removed(there: Path) -> None:
    names = [AWKWARD, "sub/--checkpoint-action=exec=sh x", "-x", "a\nb", "ü"]
    Path("sub").mkdir()
    for name in names:
        Path(name).write_text(name)
    Path("run.sh").write_text("echo")
    Path("run.sh").chmod(0o755)
    Path("link").symlink_to("run.sh")
    host = Host("login", "work/-f", "login")
    (there / "work/-f").mkdir(parents=True)
    (there / "work/-f" / AWKWARD).write_text("old")
    (there / "work/-f" / "-rf").write_text("stale")
    kept = (there / "work/-f" / AWKWARD).open()
    host.send({name: Path(name) for name in [*names, "run.sh", "link"]}, ["-rf"])
    arrived = there / "work/-f"
    assert below(arrived) == {*names, "run.sh", "link"}
    assert [(arrived / name).read_text() for name in names] == names
    assert os.access(arrived / "run.sh", os.X_OK)
    assert (arrived / "link").readlink() == Path("run.sh")
    assert kept.read() == "old", "who reads a file goes on reading it"


def test_what_is_wrong_with_a_host_is_one_message(there: Path, put_commands: Put) -> None:
    host = Host("login", "x", "login:x")
    answers(there, tar="cat >/dev/null; exit 2")
    with pytest.raises(UserError, match=r"could not be written to x there; make room, or name a folder"):
        host.send({})
    (there / "bin" / "llmlaunch").unlink()
    (there / ".bash_profile").write_text("export PATH=/usr/bin:/bin\n")
    for act in (lambda: host.send({}), lambda: host.run(["status"])):
        with pytest.raises(UserError, match=r"login: llmlaunch is not on the PATH .*pip install") as mistake:
            act()
        assert mistake.value.exit_code == 2
    put_commands(ssh="exit 255")
    with pytest.raises(UserError, match=r"login is not reached.*`ssh login true` works.* status --on login:x"):
        host.run(["status"])


def test_a_command_is_typed_there_as_it_was_here(there: Path, llmlaunch: CommandLine) -> None:
    for typed, expected in {
        ("status", "--on", "login"): ["status"],
        ("status", "--on=login", "last", "--watch", "--interval", "3"): ["status", "last", "--watch", "--interval=3.0"],
        ("logs", "r", "--on", "login", "--tail", "5", "--node", "--on"): ["logs", "r", "--node=--on", "--tail=5"],
        ("cancel", "a", "b", "--on", "login"): ["cancel", "a", "b"],
        ("report", "last", "--json", "--on", "login"): ["report", "last", "--json"],
        ("resume", "last", "--on", "login", "--", "--time=1", "--on"): ["resume", "--", "last", "--time=1", "--on"],
        ("runs", "--state", "failed", "--state", "running", "--on", "login"): [
            *("runs", "--state=failed", "--state=running")
        ],
    }.items():
        llmlaunch(*typed, code=3)
        assert called(there) == [str(there), "login", *expected]


def recipe_here(path: str, **values: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(recipe_text(**values))


def test_a_recipe_goes_to_the_folder_with_what_it_names(there: Path, llmlaunch: CommandLine) -> None:
    recipe_here("recipes/a.yaml", model="../tiny", cluster="./site.yaml")
    Path("recipes/site.yaml").write_text("base: ../base.yaml\n")
    Path("base.yaml").write_text("base: h100-80gb-x8\nlinks: {matrix: links.json}\n")
    Path("links.json").write_text("{}")
    Path("tiny").mkdir()
    Path("tiny/config.json").write_text("{}")
    Path("tiny/model.safetensors").write_text("weights")
    Path("other").mkdir()
    Path("other/train.py").write_text("pass")
    Path("other/.env").write_text("x")
    Path("unnamed").write_text("x")
    folder = there / "llmlaunch-work" / "project"
    folder.mkdir(parents=True)
    (folder / "recipes").mkdir()
    (folder / "recipes/a.lock.yaml").write_text("of an earlier plan")
    words = ("training.steps=5", "backend.script=other/train.py", "training.checkpoint_path=checkpoints")
    said = llmlaunch("submit", Path("recipes/a.yaml").absolute(), *words, "--on", "login", "-o", "runs/x", code=3)
    assert called(there) == [str(folder), "login", "submit", "recipes/a.yaml", *words, "--output=runs/x"]
    assert below(folder) == {
        *("recipes/a.yaml", "recipes/site.yaml", "base.yaml", "links.json", "tiny/config.json", "other/train.py")
    }
    assert "Sending 6 files to login:llmlaunch-work/project, where the command runs" in said.stderr
    assert "look as if they held secrets, and stay here: .env" in said.stderr


def test_all_runs_of_a_submit_and_their_locks_go(there: Path, llmlaunch: CommandLine) -> None:
    for name in ("a", "b"):
        recipe_here(f"{name}.yaml")
        Path(f"{name}.lock.yaml").write_text("lock")
        Path(f"{name}-site.yaml").write_text("base: h100-80gb-x8\n")
    llmlaunch("submit", "a.yaml", "b.yaml", "--grid", "cluster=./a-site.yaml,./b-site.yaml", "--on", "login:w", code=3)
    assert called(there) == [
        *(f"{there}/w", "login:w", "submit", "a.yaml", "b.yaml", "--grid=cluster=./a-site.yaml,./b-site.yaml")
    ]
    assert below(there / "w") == {f"{name}{end}.yaml" for name in ("a", "b") for end in ("", ".lock", "-site")}


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("../a.yaml", (), r"lies outside of .*project; --on sends what lies in the folder you are in"),
        ("a.yaml", ("model=../tiny",), r"tiny/config\.json: lies outside of .*project"),
        ("-", (), r"-: --on takes the file of a recipe"),
        ("job.sh", (), r"job\.sh: --on takes the file of a recipe; `llmlaunch init --from SCRIPT`"),
        ("a.yaml", ("environment.HF_TOKEN=hf_" + "a1B2" * 9,), r"HF_TOKEN"),
        ("a.yaml", ("model=./keys.json",), r"keys\.json: holds what looks like a secret, so nothing was sent"),
        ("absent.yaml", (), r"absent\.yaml"),
    ],
)
def test_what_may_not_be_sent_is_not(
    there: Path, tmp_path: Path, llmlaunch: CommandLine, recipe: str, words: tuple[str, ...], message: str
) -> None:
    recipe_here("a.yaml")
    recipe_here("../a.yaml")
    Path("../tiny").mkdir()
    Path("../tiny/config.json").write_text("{}")
    Path("job.sh").write_text("python train.py\n")
    Path("keys.yaml").write_text(f"base: h100-80gb-x8\n# hf_{'a1B2' * 9}\n")
    Path("keys.json").write_text(f'{{"x": "hf_{"a1B2" * 9}"}}')
    said = llmlaunch("submit", recipe, *words, "--on", "login", code=2)
    assert re.search(message, said.stderr)
    assert not (tmp_path / "calls").exists()


def test_what_is_too_large_is_not_sent(
    there: Path, tmp_path: Path, llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_here("a.yaml", model="./config.json")
    Path("config.json").write_text(json.dumps({"x": "x" * 1000}))
    monkeypatch.setattr("llmlaunch.app.sent_files.LIMIT_BYTES", 1000)
    said = llmlaunch("submit", "a.yaml", "--on", "login", code=2)
    assert "no more than 0 MiB is sent; copy the code there once" in said.stderr
    assert not (tmp_path / "calls").exists()


def test_a_page_comes_back(there: Path, llmlaunch: CommandLine) -> None:
    answers(there, llmlaunch='echo "<html>$*"; exit $([ "$2" = last ]; echo $?)')
    said = llmlaunch("report", "last", "--html", "page.html", "--on", "login")
    assert Path("page.html").read_text() == "<html>report last --html=-\n"
    assert "wrote page.html: open it in a browser" in said.stderr
    llmlaunch("report", "other", "--html", "other.html", "--on", "login", code=1)
    assert not Path("other.html").exists()
    llmlaunch("report", "last", "--html", "page.txt", "--on", "login", code=2)


def test_what_comes_next_is_shown_as_it_is_typed_here(
    there: Path, llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_here("a.yaml")
    monkeypatch.setenv("MEGATRON_LM_PATH", "/on/the/cluster")
    monkeypatch.setenv("LLMLAUNCH_ON", "login:my runs")
    said = llmlaunch("submit", "a.yaml", "--dry-run").stdout
    assert "Next: llmlaunch submit --on 'login:my runs' a.yaml\n" in said
    assert "LLMLAUNCH_ON" not in os.environ, "a job does not inherit it"
