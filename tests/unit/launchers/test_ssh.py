"""Runs on a host behind ssh: what reaches its shell, what comes home, and what each mistake says. ssh itself is the
only stand-in: it gives the text to a real shell of this machine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers import bounded_answer
from llmlaunch.launchers.choose import choose, launcher_of, place_of
from llmlaunch.launchers.place import THIS_MACHINE
from llmlaunch.launchers.run_environment import QUERIES, for_sbatch
from llmlaunch.launchers.run_files import read_submission
from llmlaunch.launchers.slurm.commands import SlurmCommands
from llmlaunch.launchers.slurm.launcher import SlurmLauncher
from llmlaunch.launchers.ssh import mirror
from llmlaunch.launchers.ssh.connection import Connection, is_ssh_host
from llmlaunch.launchers.ssh.home import Home, SshPlace, home_of, write_home
from llmlaunch.launchers.ssh.look import look_at
from llmlaunch.launchers.ssh.mirror import bring_each_home, bring_home, brought_home

AWKWARD = "it's a $(touch stolen) `folder`; rm -rf *"
Put = Callable[..., Path]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_commands: Put) -> Path:
    """The home on the host `login`, whose login shell prints a greeting and finds the programs of `bin` first."""
    home = tmp_path / "there"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    (home / ".bash_profile").write_text(f"echo Welcome; echo mesg >&2\nexport PATH={home}/bin:{os.environ['PATH']}\n")
    answers(home, sbatch="echo 4711", squeue="", sacct="", python3=f'exec {sys.executable} "$@"')
    put_commands(
        ssh=f'printf "%s\\n" "$*" >> {tmp_path}/calls; echo The banner >&2; for text; do :; done; exec sh -c "$text"'
    )
    return home


def answers(home: Path, **scripts: str) -> None:
    """Put programs on the host."""
    for name, script in scripts.items():
        (home / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (home / "bin" / name).chmod(0o755)


def run_here(tmp_path: Path, directory: Path | str) -> Path:
    """A run directory of this machine that lives in `directory` on the host."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"name": "sample"}')
    (run / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --time=1\n")
    write_home(run, Home("login", str(directory), os.getuid()))
    return run


@pytest.mark.parametrize("host", ["login", "me@login.site.org", "10.0.0.1", "[::1]", "me@[fe80::1%eth0]", "_a-b"])
def test_a_host_is_what_ssh_takes(host: str) -> None:
    assert is_ssh_host(host)


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=x", "a b", "a;b", "a$(b)", "a/b", "a\nb", "a:b", "@", 3, "x" * 300]
)
def test_what_may_be_an_option_or_shell_text_is_no_host(host: object) -> None:
    assert not is_ssh_host(host)


@pytest.mark.parametrize("target", ["-oProxyCommand=touch stolen", "-F/dev/null", "", ":/folder", "a b:/x", "a;b"])
def test_on_takes_no_option(target: str) -> None:
    with pytest.raises(UserError, match=r"is no host as ssh takes it; write --on HOST or --on HOST:FOLDER"):
        look_at(target)


def test_words_reach_the_host_as_they_are(there: Path, tmp_path: Path) -> None:
    words = (AWKWARD, "a'b\"c", "", "*", "$HOME", "\\", "-n")
    reply = Connection("login").run("printf '%s\\n' \"$@\"; pwd >&2", *words)
    assert reply.output.split("\n")[:-1] == list(words)
    assert reply.words == f"{tmp_path}\n", "no greeting, no banner"
    assert not (tmp_path / "stolen").exists()
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "BatchMode=yes" in call
    assert "!" not in call, "csh would take it for an event"


@pytest.mark.parametrize(
    ("said", "reached", "words"),
    [
        ("ssh: Could not resolve hostname login: Name or service not known", "no", "name a host of your ~/.ssh/config"),
        ("ssh: connect to host login port 22: Connection refused", "no", "try again when `ssh login true` works"),
        ("me@login: Permission denied (publickey).", "no", "type `ssh login true` until it asks for nothing"),
        ("Host key verification failed.", "no", "type `ssh login true` once, and compare the key"),
        ("Connection closed by 10.0.0.1 port 22", "perhaps", "try again when `ssh login true` works"),
        (
            "banner\nllmlaunch: the command begins\nclient_loop: Broken pipe",
            "perhaps",
            "connection was lost (client_loop",
        ),
        ("", "perhaps", "ssh ended without a word"),
    ],
)
def test_what_became_of_a_command_whose_connection_failed(said: str, reached: str, words: str) -> None:
    outcome, message = Connection("login").heard(255, said)
    assert outcome == reached
    assert message.startswith("login is not reached: ")
    assert words in message
    assert Connection("login").heard(1, "banner\nllmlaunch: the command begins\nsbatch: error: no") == (
        "yes",
        "sbatch: error: no",
    )


def test_variables_of_the_host_do_not_change_what_was_rendered(there: Path) -> None:
    profile = there / ".bash_profile"
    profile.write_text(
        profile.read_text()
        + "export SBATCH_TIMELIMIT=1 SBATCH_ACCOUNT=physics SBATCH_QOS=low SQUEUE_STATES=R SLURM_TIME_FORMAT=relative\n"
    )
    place = SshPlace("login", os.getuid())
    script = "#!/bin/bash\n#SBATCH --qos=high\n"
    answers(there, sbatch="env | grep ^SBATCH_ | sort", squeue="env | grep -e ^SQUEUE_ -e ^SLURM_ ; date +%z")
    commands = SlurmCommands(20.0, 1, print, place)
    assert commands.start(["sbatch"], for_sbatch(script)).answer().output == "SBATCH_ACCOUNT=physics\n"
    assert commands.start(["squeue"], QUERIES).answer().output == time.strftime("%z\n")


def test_a_look_finds_the_folder_for_runs(there: Path, tmp_path: Path) -> None:
    host = look_at("login")
    assert (host.name, host.user_id, host.runs) == ("login", os.getuid(), f"{there}/llmlaunch-runs")
    assert look_at("login:/scratch/me/").runs == "/scratch/me"
    assert look_at("login:~/x").runs == look_at("login:x").runs == f"{there}/x"
    with (there / ".bash_profile").open("a") as profile:
        profile.write("export LLMLAUNCH_RUNS=/scratch/runs\n")
    assert look_at("login").runs == "/scratch/runs"
    barred = f"{there}/.bash_profile/x"
    lacking = host.lacking([str(there), str(tmp_path / "gone")], [f"{there}/new/er", barred], ["HOME", "NO_SUCH"])
    assert lacking == {str(tmp_path / "gone"), barred, "NO_SUCH"}


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ({"sbatch": None}, "login: no sbatch, so no SLURM, on the PATH of a login shell there"),
        ({"python3": "exit 1"}, "login: its python3 is older than 3.8 or does not run"),
        ({"python3": "echo 3 6"}, "login: its python3 is older than 3.8"),
    ],
)
def test_what_the_host_lacks_is_said_at_once(there: Path, programs: dict[str, str | None], message: str) -> None:
    for name, script in programs.items():
        if script is None:
            (there / "bin" / name).unlink()
            (there / ".bash_profile").write_text(f"export PATH={there}/bin\n")
        else:
            answers(there, **{name: script})
    with pytest.raises(UserError) as mistake:
        look_at("login")
    assert message in str(mistake.value)


def test_on_a_host_and_here_at_once_is_refused() -> None:
    with pytest.raises(UserError, match=r"--on login:/x, --local: .* choose one"):
        choose(True, on="login:/x")


def test_a_run_is_sent_whole_and_submitted_there(there: Path, tmp_path: Path) -> None:
    folder = there / AWKWARD
    run = run_here(tmp_path, folder / "sample-1")
    (run / "run.id").write_text("sample-1\n")
    (run / "job.sbatch").chmod(0o700)
    answers(there, sbatch='pwd > called; echo "$@" >> called; echo 4711')
    submission = launcher_of_new(run).submit(run)
    assert submission.job_id == "4711"
    assert read_submission(run) == submission
    directory = folder / "sample-1"
    assert (directory / "called").read_text().splitlines() == [
        str(directory),
        "--parsable --comment=llmlaunch=sample-1 job.sbatch",
    ]
    assert (directory / "job.sbatch").stat().st_mode & 0o777 == 0o700
    assert {path.name for path in directory.iterdir()} == {
        "called",
        "logs",
        "job.sbatch",
        "run.id",
        "run.json",
        "submission.json",
    }
    assert [path.name for path in folder.iterdir()] == ["sample-1"], "nothing half sent is left"
    assert launcher_of(submission) == launcher_of_new(run)


def launcher_of_new(run: Path) -> SlurmLauncher:
    from llmlaunch.launchers.base import Submission

    launcher = launcher_of(Submission("slurm", "1", run, 0.0))
    assert isinstance(launcher, SlurmLauncher)
    return launcher


@pytest.mark.parametrize(
    ("tar", "message"),
    [
        ("cat >/dev/null; echo 'tar: run.json: Cannot write: No space left on device' >&2; exit 2", "make room there"),
        ("cat >/dev/null; exit 0", "could not be written below"),  # what was cut is no run directory
    ],
)
def test_a_run_that_does_not_arrive_is_not_submitted(there: Path, tmp_path: Path, tar: str, message: str) -> None:
    run = run_here(tmp_path, there / "runs" / "sample-1")
    answers(there, tar=tar, sbatch=f"touch {tmp_path}/submitted")
    with pytest.raises(UserError, match=r"nothing was submitted") as mistake:
        launcher_of_new(run).submit(run)
    assert message in str(mistake.value)
    assert not (tmp_path / "submitted").exists()
    assert not (run / "submitting").exists()
    assert "could not be written" in json.loads((run / "refused.json").read_text())["words"]
    assert list((there / "runs").iterdir()) == []


def test_another_s_word_calls_no_host_and_damage_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_here(tmp_path, "/there/run")
    assert place_of(run) == SshPlace("login", os.getuid())
    (run / "host.json").write_text('{"host": "-oProxyCommand=x", "directory": "/x", "user_id": 1}')
    with pytest.raises(UserError, match=r"host\.json: damaged"):
        home_of(run)
    monkeypatch.setattr("llmlaunch.launchers.ssh.home.is_foreign", lambda _: True)
    assert place_of(run) == THIS_MACHINE


def job_writes(directory: Path) -> None:
    for name, text in {
        "attempts/7.0/attempt.json": "{}",
        "attempts/7.0/ranks/n1.jsonl": '{"rank": 0}\n',
        "attempts/7.0/stacks/n1.txt": "frames",
        "logs/7.0.job.log": "begins\n",
        "logs/7.0.n1.log": "step 1\n",
        "peaks/n1.jsonl": '{"a": 1}\n',
        "slurm-7.out": "way\n",
        "stop": "",
        "checkpoints.pt": "large",
        "code/train.py": "code",
        "recipe.yaml": "another",
        ".hidden": "x",
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "logs" / "link.log").symlink_to("/etc/passwd")


def at_home(run: Path) -> set[str]:
    own = {"run.json", "job.sbatch", "host.json"}
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} - own


def test_what_the_job_wrote_comes_home_once(there: Path, tmp_path: Path) -> None:
    directory = there / "runs" / AWKWARD
    run = run_here(tmp_path, directory)
    bring_home([run], "state")
    assert at_home(run) == set(), "nothing is there yet, and that is no mistake"
    job_writes(directory)
    bring_home([run], "state")
    state = {"attempts/7.0/attempt.json", "attempts/7.0/ranks/n1.jsonl", "logs/7.0.job.log", "slurm-7.out", "stop"}
    assert at_home(run) == state
    bring_home([run], "peaks")
    assert at_home(run) == state | {"peaks/n1.jsonl"}
    bring_home([run], "all")
    assert at_home(run) == state | {"peaks/n1.jsonl", "logs/7.0.n1.log", "attempts/7.0/stacks/n1.txt"}
    kept = (run / "attempts/7.0/attempt.json").stat().st_ino
    with (directory / "logs/7.0.n1.log").open("a") as log:
        log.write("step 2\n" * 400_000)  # more than is sent at once
    (directory / "peaks/n1.jsonl").write_text("new\n")  # shorter: another file
    (directory / "stop").unlink()
    bring_home([run], "all")
    assert (run / "logs/7.0.n1.log").read_bytes() == (directory / "logs/7.0.n1.log").read_bytes()
    assert (run / "peaks/n1.jsonl").read_text() == "new\n"
    assert not (run / "stop").exists()
    assert (run / "attempts/7.0/attempt.json").stat().st_ino == kept, "what has not changed is not sent again"


def test_the_peaks_of_a_run_that_is_over_come_home_where_no_summary_holds_them(there: Path, tmp_path: Path) -> None:
    run = run_here(tmp_path, there / "runs")
    job_writes(there / "runs")
    (there / "runs" / "status.json").write_text("{}")
    (there / "runs" / "attempts/7.0/summary.json").write_text("{}")
    bring_home([run], "state")
    assert "peaks/n1.jsonl" not in at_home(run)
    (there / "runs" / "attempts/7.0/summary.json").unlink()
    bring_home([run], "state")
    assert "peaks/n1.jsonl" in at_home(run)


HOSTILE = """
import json, sys, zlib
for path in ("../stolen", "/stolen", "recipe.yaml", "host.json", "logs/../../stolen", "attempts/.ssh/x", "logs/a\\nb"):
    packed = zlib.compress(b"x")
    record = dict(run=0, path=path, offset=0, bytes=1, packed=len(packed), changed=0, whole=True)
    sys.stdout.buffer.write(json.dumps(record).encode() + b"\\n" + packed)
print(json.dumps({"run": 0, "gone": "run.json"}))
print(json.dumps({"looked": True}))
"""


def test_a_host_writes_nothing_but_what_a_job_writes(there: Path, tmp_path: Path) -> None:
    run = run_here(tmp_path, there / "runs")
    (tmp_path / "hostile.py").write_text(HOSTILE)
    answers(there, python3=f"exec {sys.executable} {tmp_path}/hostile.py")
    before = {path: path.read_bytes() for path in run.iterdir()}
    bring_home([run], "all")
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    assert not list(tmp_path.rglob("stolen"))


@pytest.mark.parametrize(
    ("python", "message"),
    [
        (None, "login: no python3 on the PATH of a login shell there"),
        ("echo no", "what came was none of the answers expected"),
        ("echo SyntaxError >&2; exit 1", "its python3 did not tell what is new (SyntaxError)"),
    ],
)
def test_a_host_that_cannot_tell_what_is_new_is_one_warning(
    there: Path, tmp_path: Path, python: str | None, message: str
) -> None:
    run = run_here(tmp_path, there / "runs")
    answers(there, python3=python or "")
    if python is None:
        (there / "bin" / "python3").unlink()
        (there / ".bash_profile").write_text(f"export PATH={there}/bin\n")
    with pytest.raises(UserError) as mistake:
        bring_home([run], "state")
    assert message in str(mistake.value)
    warnings: list[str] = []
    bring_each_home([run], "state", warnings.append)
    (warning,) = warnings
    assert warning.endswith("its run is shown as last seen")


ODD_FRAME = """
import json
frame = {{"run": 0, "path": "logs/a.job.log", "offset": 0, "bytes": 1, "packed": 0, "changed": 1, "whole": True}}
print(json.dumps({{**frame, **{change}}}))
print(json.dumps({{"looked": True}}))
"""


@pytest.mark.parametrize(
    "change",
    [
        {"path": ["x"]},
        {"path": {"x": 1}},
        {"path": None},
        {"gone": ["stop"]},
        {"gone": {}},
        {"offset": 2**62},
        {"offset": -1},
        {"bytes": [1]},
        {"bytes": 10**30},
        {"changed": "²"},
        {"changed": 2**62},
    ],
)
def test_an_odd_frame_writes_nothing(there: Path, tmp_path: Path, change: dict[str, object]) -> None:
    run = run_here(tmp_path, there / "runs")
    (tmp_path / "odd.py").write_text(ODD_FRAME.format(change=repr(change)))
    answers(there, python3=f"exec {sys.executable} {tmp_path}/odd.py")
    bring_home([run], "all")
    written = [path.read_bytes() for path in run.rglob("*.job.log")]
    assert written in ([], [b""])


@pytest.mark.parametrize("body", ["exec yes", "exec yes >&2"])
def test_an_endless_answer_is_one_message(there: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(bounded_answer, "MOST_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(UserError, match="login is not reached: it answered with more than any answer has"):
        Connection("login").run(body)


def test_an_endless_answer_of_slurm_is_no_answer(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answer, "MOST_OUTPUT_BYTES", 1 << 20)
    for said in ("exec yes", "exec yes >&2"):
        answers(there, squeue=said)
        answer = SlurmCommands(60.0, 1, print, SshPlace("login", os.getuid())).ask(["squeue"])
        assert (answer.code, answer.output, answer.words) == (None, "", "squeue answered without end")


@pytest.mark.parametrize(
    ("program", "bound", "message"),
    [
        ("print('x' * 1000, file=sys.stderr)", None, "it answered with more than any answer has"),
        ("print(frame, flush=True)", "_MOST_LOOK_BYTES", "what it sends has no end"),
        ("print(frame, flush=True); time.sleep(0.01)", "_MOST_LOOK_SECONDS", "what it sends has no end"),
    ],
)
def test_a_look_without_end_is_one_message(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, bound: str | None, message: str
) -> None:
    run = run_here(tmp_path, there / "runs")
    frame = json.dumps({"run": 0, "path": "x", "offset": 0, "bytes": 0, "packed": 0, "changed": 1, "whole": True})
    (tmp_path / "endless.py").write_text(f"import sys, time\nframe = {frame!r}\nwhile True:\n    {program}\n")
    answers(there, python3=f"exec {sys.executable} {tmp_path}/endless.py")
    if bound is not None:
        monkeypatch.setattr(mirror, bound, 0.0)
    with pytest.raises(UserError, match=message):
        bring_home([run], "all")


def test_a_lost_connection_is_made_again_while_files_come_home(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmlaunch.launchers.ssh.mirror._LOOK_SECONDS", 0.1)
    monkeypatch.setattr("llmlaunch.launchers.ssh.mirror._PAUSES_SECONDS", (0.1,))
    run = run_here(tmp_path, there / "runs")
    job_writes(there / "runs")
    real = f'exec {sys.executable} "$@"'
    answers(there, python3=f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 255; }}; {real}")
    said: list[str] = []
    with brought_home([run], said.append) as at_once:
        for _ in range(200):
            if len(said) == 2 and "logs/7.0.n1.log" in at_home(run):
                break
            time.sleep(0.05)
        (there / "runs" / "status.json").write_text("{}")
        at_once()
    assert "the connection was lost" in said[0]
    assert said[1] == "login is reached again"
    assert (run / "status.json").exists()
