"""A notice reaches its receiver or leaves a reason, and whoever sends it notices nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.notices import LAST_SECONDS
from support.node_rig import environment, until
from support.webhook import SECRET, Webhook, webhook

VARIABLE = "TRAINING_CHANNEL"
ATTEMPT = "4711.0"
SENDER = """
import json, sys
from pathlib import Path
from llmlaunch.node import notices
for name, value in json.loads(sys.argv[2]).items():
    setattr(notices, name, value)
for event, text in json.load(sys.stdin):
    notices.notify(Path(sys.argv[1]), "4711.0", event, text)
notices.wait_for_deliveries(float(sys.argv[3]))
print("went on")
"""


@pytest.fixture
def receiver() -> Iterator[Webhook]:
    with webhook() as running:
        yield running


class Sender:
    """A process of the node side whose run has a webhook, a command, or both."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder / "run"
        self.address = address
        (self.folder / "attempts" / ATTEMPT).mkdir(parents=True)
        self.describe(webhook=VARIABLE)
        self.limits: dict[str, Any] = {}

    def describe(self, **target: Any) -> None:
        description = {"name": "llama", "notify": {"webhook": None, "command": [], "events": None, **target}}
        (self.folder / "run.json").write_text(json.dumps(description))

    def send(self, *notices: tuple[str, str], waits: float = 0.0, **more: str) -> None:
        """Return when the sender has ended and closed all it had inherited."""
        command = [sys.executable, "-c", SENDER, str(self.folder), json.dumps(self.limits), str(waits)]
        variables = {**environment(), VARIABLE: self.address, "no_proxy": "*", "SLURM_JOB_ID": "4711", **more}
        ended = subprocess.run(
            command, env=variables, input=json.dumps(notices), capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "attempts" / ATTEMPT / "notices.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def outcomes(self, count: int = 1) -> list[tuple[bool, str | None]]:
        """What became of the notices, once so many are delivered or given up."""
        ended = until(lambda: (lines := self._ended()) and len(lines) >= count and lines, "the notices to end")
        return [(line["delivered"], line["why"]) for line in ended]

    def _ended(self) -> list[dict[str, Any]]:
        return [line for line in self.journal() if line["delivered"] is not None]


@pytest.fixture
def sender(tmp_path: Path, receiver: Webhook) -> Sender:
    return Sender(tmp_path, receiver.address)


# --- what arrives --------------------------------------------------------------------------------------------------


def test_a_webhook_gets_slacks_json_and_nothing_that_slack_would_obey(sender: Sender, receiver: Webhook) -> None:
    sender.send(("end", "failed: <!channel> a & b"))
    assert sender.outcomes() == [(True, None)]
    assert receiver.payloads == [{"text": "llama (job 4711): failed: &lt;!channel&gt; a &amp; b"}]


def test_without_a_target_or_for_other_events_nothing_is_sent(sender: Sender, receiver: Webhook) -> None:
    sender.describe(webhook=VARIABLE, events=["end"])
    sender.send(("start", "began"), ("end", "done"))
    assert sender.outcomes() == [(True, None)]
    (sender.folder / "run.json").write_text("{}")
    sender.send(("end", "done again"))
    (sender.folder / "run.json").write_text("[")
    sender.send(("end", "done again"))
    assert receiver.texts == ["llama (job 4711): done"]


def test_the_same_notice_is_sent_once_per_attempt(sender: Sender, receiver: Webhook) -> None:
    for _ in range(2):
        sender.send(("slow", "node n1 is slow"))
        sender.outcomes()
    sender.send(("slow", "node n2 is slow"))
    sender.outcomes(2)
    assert receiver.texts == ["llama (job 4711): node n1 is slow", "llama (job 4711): node n2 is slow"]


def test_many_notices_are_cut_off_but_the_end_is_told(sender: Sender, receiver: Webhook) -> None:
    sender.limits = {"MOST_AN_HOUR": 2}
    for number in range(4):
        sender.send(("bad_loss", f"step {number}"))
        sender.outcomes(min(number + 1, 3))
    sender.send(("end", "done"))
    assert sender.outcomes(4)[2:] == [
        (False, "more than 2 notices in an hour; further ones are left out"),
        (True, None),
    ]
    assert [text.partition(": ")[2] for text in receiver.texts] == ["step 0", "step 1", "done"]


def test_secrets_of_the_environment_are_not_told(sender: Sender, receiver: Webhook) -> None:
    sender.send(("end", "failed: token is abcdef123456"), HF_TOKEN="abcdef123456")
    sender.outcomes()
    assert receiver.texts == ["llama (job 4711): failed: token is ***"]


def test_a_command_gets_the_notice_as_json_and_in_variables(sender: Sender, tmp_path: Path) -> None:
    result = tmp_path / "result"
    sender.describe(command=["sh", "-c", f'cat > {result}.1; echo "$LLMLAUNCH_EVENT $LLMLAUNCH_ATTEMPT" >> {result}.1'])
    sender.send(("stall", "no step"))
    assert sender.outcomes() == [(True, None)]
    notice, _, variables = Path(f"{result}.1").read_text().rpartition("}")
    assert json.loads(notice + "}") | {"at": 0, "host": ""} == {
        "event": "stall", "text": "no step", "run": "llama", "run_directory": str(sender.folder), "attempt": ATTEMPT,
        "job": "4711", "host": "", "at": 0,
    }  # fmt: skip
    assert variables.strip() == f"stall {ATTEMPT}"


# --- what does not -------------------------------------------------------------------------------------------------


def test_a_server_that_is_busy_is_asked_again(sender: Sender, receiver: Webhook) -> None:
    receiver.answers = [(500, {}), (429, {})]
    sender.send(("end", "done"))
    assert sender.outcomes() == [(True, None)]
    assert len(receiver.payloads) == 3


def test_an_address_that_is_gone_is_asked_once(sender: Sender, receiver: Webhook) -> None:
    receiver.answers = [(404, {})]
    sender.send(("end", "done"))
    assert sender.outcomes() == [(False, "HTTP 404")]
    assert len(receiver.payloads) == 1


def test_a_redirect_is_followed_to_the_same_host_alone(sender: Sender, receiver: Webhook) -> None:
    receiver.answers = [
        (307, {"Location": "/moved"}),
        (302, {"Location": receiver.address.replace("127.0.0.1", "localhost")}),
    ]
    sender.send(("start", "began"))
    assert sender.outcomes() == [(False, "HTTP 302, redirects to another host")]
    assert receiver.paths == [SECRET, "/moved"]


def test_a_server_that_hangs_is_waited_for_by_nobody(sender: Sender, receiver: Webhook) -> None:
    sender.limits = {"ALTOGETHER_SECONDS": 2.0, "TRY_SECONDS": 1.0}
    receiver.hold()
    sender.send(("end", "done"))  # its end, and that of its streams
    until(lambda: receiver.payloads, "the request to arrive")
    assert not receiver.released.is_set()
    assert sender.outcomes() == [(False, "no answer: timed out")]


def test_a_job_that_ends_waits_for_its_last_notice_but_not_for_long(sender: Sender, receiver: Webhook) -> None:
    sender.send(("restart", "starts again"), waits=60)
    assert sender._ended()
    receiver.hold()
    sender.send(("end", "failed"), waits=LAST_SECONDS)
    assert not receiver.released.is_set()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", f"{VARIABLE} is not set where the job runs"),
        ("file:///etc/passwd", f"{VARIABLE} holds no http or https address"),
        ("http://[::1/x-secret", "ValueError"),
        ("http://127.0.0.1:port-secret/", "InvalidURL"),
        ("http://127.0.0.1:9/services/secret", "[Errno 111] Connection refused"),
    ],
)
def test_what_cannot_be_an_address_is_noted_without_it(tmp_path: Path, address: str, reason: str) -> None:
    sender = Sender(tmp_path, address)
    sender.send(("end", "done"))
    assert sender.outcomes() == [(False, reason)]


def test_a_command_that_does_not_start_fails_or_hangs_is_noted(sender: Sender) -> None:
    sender.limits = {"ALTOGETHER_SECONDS": 2.0}
    commands = (["/nowhere/notify"], ["false"], ["sleep", "600"])
    for number, command in enumerate(commands, 1):
        sender.describe(command=command)
        sender.send(("slow", str(command)))
        sender.outcomes(number)
    assert sender.outcomes(3) == [
        (False, "/nowhere/notify does not start: No such file or directory"),
        (False, "exit code 1"),
        (False, "the command did not end within 2 s"),
    ]


def test_the_address_is_in_no_file_and_in_no_list_of_arguments(sender: Sender, receiver: Webhook) -> None:
    receiver.answers = [(500, {}), (500, {}), (500, {})]
    sender.describe(webhook=VARIABLE, command=["sleep", "1"])
    receiver.hold()
    sender.send(("end", f"failed: posting to {receiver.address} did not work"))
    until(lambda: receiver.payloads, "the request to arrive")
    arguments = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    receiver.release()
    assert sender.outcomes(2)
    assert not any(SECRET.encode() in words for words in arguments)
    texts = [path.read_text() for path in sender.folder.rglob("*") if path.is_file()]
    assert not any(SECRET in text for text in [*texts, *receiver.texts])


def test_a_full_disk_costs_the_journal_alone(
    sender: Sender, receiver: Webhook, faulty_disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").write_text("28")  # ENOSPC
    disk = {"LD_PRELOAD": str(faulty_disk), "FAULTY_UNDER": str(sender.folder), "FAULTY_HOW": str(tmp_path / "disk")}
    sender.send(("end", "done"), **disk)
    until(lambda: receiver.payloads, "the notice to arrive")
    assert sender.journal() == []
