"""The telling lines of one node's log. Pure: text in, hits out; `read_log` is the one that touches a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.foreign_values import byte_size_in, whole_number_in
from ..rundir.regular_files import open_regular
from .kinds import RERUN, SILENT_CORRUPTION
from .patterns import (
    ACTIVITIES,
    EXCEPTION,
    NO_CAUSES,
    OF_THE_SYSTEM,
    TELLING,
    WRAPPER,
    frames,
    patterns,
)
from .redaction import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..rundir.attempt_files import Cause

    Speaker = tuple[str, int]
    Numbers = dict[str, int | float]
    Facts = dict[str, str]


FIRST_BYTES, LAST_BYTES = 2**20, 4 * 2**20
READ_CHARACTERS = 4096  # of a line; a message about memory has some 600
MESSAGE_LINES = 5  # a message about memory that something broke into lines
PIN_LINES = 12  # a traceback's last lines, in which `pin_memory` says that it was main memory
ACTIVITY_LINES = 400  # before a hang, in which the log says what the program was doing
MOST_MEASURED = 1000  # messages about memory whose numbers are read
FACT_CHARACTERS = 100
ROUNDING_BYTES = 16 * 2**20  # two decimals of each of the GiB that are added
MOST_OF_KIND = 2000
"""Hits of one kind that are kept. The last crash says most, so each further one takes the place of the one before."""

XID = r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<number>\d{1,20})"

# Xids by which the host is at fault, not the program: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors), where
# the immediate action is to reset the GPU, to restart the machine or to call support. Left out although on some lists:
# 13, 31, 43, 45, 69, 109 (programs cause them), 63 and 92 (a repair that worked; nothing died of them), 154 (only names
# what to do about another).
HARDWARE_XIDS = {
    46: "xid",  # GPU stopped processing
    48: "ecc",  # double-bit ECC error
    54: "xid",  # auxiliary power not connected
    61: "xid",  # breakpoint or warning of the internal micro-controller
    62: "xid",  # halt of the internal micro-controller
    64: "ecc",  # a page could not be retired, a row not be remapped
    74: "nvlink",
    79: "gpu_lost",  # has fallen off the bus
    94: "ecc",  # contained
    95: "ecc",  # uncontained
    110: "xid",  # security fault
    119: "xid",  # the GPU system processor does not answer
    120: "xid",  # error of the GPU system processor
    121: "nvlink",  # chip-to-chip link
    136: "nvlink",  # link training failed
    140: "ecc",  # not recovered
    143: "xid",  # initialisation failed
    144: "nvlink",
    145: "nvlink",
    146: "nvlink",
    147: "nvlink",
    148: "nvlink",
    149: "nvlink",
    150: "nvlink",
    155: "nvlink",
    156: "xid",  # a resource was retired
    158: "xid",  # fatal time-out
}

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,2048}\x07")
# srun --label begins every line with the task; torchrun --tee with role and local rank; then torch >= 2.4 writes the
# global rank before each line of an uncaught exception
_PREFIX = re.compile(
    r"(?: {0,9}(?P<task>\d{1,9}): )?(?:\[(?!rank)(?P<role>[a-z]{1,60})(?P<local>\d{1,9})\]:\s?)?"
    r"(?:\[rank(?P<rank>\d{1,9})\]:\s?)?"
)
# pdsh, DeepSpeed's way to other nodes, begins every line with the host: known by its first traceback
_OF_HOST = re.compile(
    r"([A-Za-z\d][\w.-]{0,99}): (?:\[[a-z]{1,60}\d{1,9}\]:\s?){0,2}Traceback \(most recent call last\):"
)
_BEGINNINGS = frozenset("[ 0123456789")
_PATTERNS = [(re.compile(pattern.expression), pattern) for pattern in patterns()]
_FRAMES = [(re.compile(frame.expression), frame) for frame in frames()]
_CAUSE_OF_PHASE = {frame.phase: frame.cause for _, frame in _FRAMES}
_ACTIVITIES = [(name, re.compile(expression)) for name, expression in ACTIVITIES]
_NO_CAUSE = re.compile("|".join(expression for expression, _ in NO_CAUSES))
_EXCEPTION = re.compile(EXCEPTION)
_XID = re.compile(XID)
_DEVICE = re.compile(r"(?:\bRank (?P<rank>\d{1,9}), node \S+, device|\(node: \S+, gpu:) (?P<device>\d{1,9})\b")
_OF_THE_SYSTEM, _WRAPPER = re.compile(f"{OF_THE_SYSTEM}|{WRAPPER}"), re.compile(WRAPPER)
_COLLECTIVE = re.compile(r"\bOpType=(\w{1,40})")
_OTHER_FAILURES, _FIRST_FAILURE = "Failures:", "Root Cause (first observed failure):"
_END_OF_RANK = re.compile(r"\s{1,9}(exitcode|traceback) {0,9}:")
_LAST_ERROR = "Last error:"  # NCCL's, on the line after torch's
_BAD_STEP = re.compile(r"\b(?:step|iteration) #?(\d{1,15})\b")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_WITHOUT_TRACEBACK = re.compile(r"\s*what\(\):\s+\S|Fatal Python error: |\S+\.py: error: ")


class Hit(NamedTuple):
    """One telling line. `rank` is global, `local_rank` within the node; None where the line does not say. `place`
    orders the hits of a log in time."""

    kind: str
    line: str
    place: int
    rank: int | None = None
    local_rank: int | None = None
    numbers: Numbers = {}  # noqa: RUF012 - never changed
    facts: Facts = {}  # noqa: RUF012 - never changed
    sick: bool = False
    consequence: bool = False


def read_log(path: Path, last_bytes: int | None = None, begin: int = 0) -> str:
    """The first MiB and the last four of a log, or its `last_bytes` alone, as text; empty where there is none. Damaged
    UTF-8 is replaced. What comes before byte `begin` is left out."""
    first, last = (FIRST_BYTES, LAST_BYTES) if last_bytes is None else (0, last_bytes)
    try:
        with open_regular(path, follow=True) as file:  # an array's task has a link to its slurm-<job>.out
            size = file.seek(0, 2)
            begin = begin if begin <= size else 0  # it was begun again
            file.seek(begin)
            if size - begin <= first + last:
                raw = file.read(first + last) or b""
            else:
                raw = file.read(first)
                file.seek(size - last)
                raw += b"\n" + file.read(last)
    except OSError:
        return ""
    return raw.decode("utf-8", errors="replace")


def scan(text: str) -> list[Hit]:
    """Return every telling line in the order of the log.

    An exception is told by the line that ends its traceback, one for each chain of exceptions, unless an earlier link
    of the chain is a cause by itself. One that no pattern names means what the frames of its traceback say of it,
    unless the system raised it. The work is linear in the text: a line is cut before any expression sees it.
    """
    scanner = _Scanner(text.replace("\r\n", "\n").split("\n"))
    for place, line in enumerate(scanner.lines):
        if line:
            scanner.read(place, line)
    return scanner.hits


class _Scanner:
    """What is known of the lines so far. A speaker is a rank, or None for the lines without a prefix."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.hits: list[Hit] = []
        self._open_tracebacks: dict[Speaker | None, bool] = {}
        self._phases: dict[Speaker | None, dict[str, None]] = {}  # of the frames of its traceback, in their order
        self._chained: dict[Speaker | None, int] = {}  # index of the hit that the chain may replace
        self._last_crash: dict[Speaker | None, int] = {}
        self._newest_crash = -1  # its index
        self._measured = 0
        self._kept: dict[str, int] = {}  # hits by kind
        self._hang_is_known = False
        self._lists_others = False
        self._hosts: dict[str, int] = {}

    def read(self, place: int, raw: str) -> None:
        host, line = self._host(_plain(raw))
        speaker, line = _speaker(line)
        speaker = host if speaker is None else speaker
        if line.startswith(_CHAINED) and speaker in self._last_crash:
            self._chained[speaker] = self._last_crash[speaker]
            return
        if line.startswith(_TRACEBACK):
            self._open_tracebacks[speaker] = True
            return
        if self._is_of_another(line):
            return
        if self._open_tracebacks.get(speaker) and line[:1] in (" ", "\t"):
            for expression, frame in _FRAMES:
                if expression.match(line):
                    self._phases.setdefault(speaker, {})[frame.phase] = None
            return  # the program's own text, which may quote anything
        ends = bool(self._open_tracebacks.get(speaker)) and _EXCEPTION.match(line) is not None
        phases = tuple(self._phases.get(speaker, ())) if ends else ()
        telling = any(word in line for word in TELLING)
        hit = self._hit(place, speaker, line, phases) if telling or phases else None
        if ends:
            self._open_tracebacks[speaker] = False
            if not _WRAPPER.match(line):
                self._phases.pop(speaker, None)
        if hit is None and (ends or (telling and _WITHOUT_TRACEBACK.match(line))):
            told = self._with_last_error(place, line) if "nccl" in line.lower() else line
            hit = _with_speaker(Hit(_cause_of_phases(line, phases), harmless(told), place), speaker)
        if hit is not None:
            self._add(hit, speaker, ends)

    def _host(self, line: str) -> tuple[Speaker | None, str]:
        match = _OF_HOST.match(line)
        if match is not None:
            self._hosts.setdefault(match.group(1), len(self._hosts))
        host, _, rest = line.partition(": ") if self._hosts else ("", "", "")
        return (("task", self._hosts[host]), rest) if host in self._hosts else (None, line)

    def _is_of_another(self, line: str) -> bool:
        """Whether torchrun's list says how a rank ended that did not fail first: torchrun itself may have killed it."""
        if line.startswith((_OTHER_FAILURES, _FIRST_FAILURE)):
            self._lists_others = line.startswith(_OTHER_FAILURES)
        return self._lists_others and _END_OF_RANK.match(line) is not None

    def _add(self, hit: Hit, speaker: Speaker | None, ends: bool) -> None:
        before = self._chained.pop(speaker, None) if ends else None
        if not hit.line:
            return  # one of a kind of which enough are known
        if before is None:
            self._kept[hit.kind] = self._kept.get(hit.kind, 0) + 1
            if self._kept[hit.kind] > MOST_OF_KIND:
                if hit.kind == "crash":
                    self.hits[self._newest_crash] = hit
                return
            self.hits.append(hit)
            self._last_crash[speaker] = len(self.hits) - 1
            if hit.kind == "crash":
                self._newest_crash = len(self.hits) - 1
        elif self.hits[before].kind == "crash" or self.hits[before].consequence:
            self.hits[before] = hit._replace(place=self.hits[before].place)

    def _hit(self, place: int, speaker: Speaker | None, line: str, phases: tuple[str, ...]) -> Hit | None:
        if _NO_CAUSE.search(line):
            return None
        xid = _XID.search(line)
        if xid is not None:
            return _hit_of_xid(xid.group("number"), line, place)
        for expression, pattern in _PATTERNS:
            match = None if pattern.phase and pattern.phase not in phases else expression.search(line)
            if match is not None and _comes_after(pattern.after, line[: match.start()]):
                break
        else:
            return None
        kind = pattern.cause
        numbers: Numbers = {}
        if self._kept.get(kind, 0) >= MOST_OF_KIND:
            return Hit(kind, "", place)
        if kind in ("oom", "host_oom"):
            kind, numbers = self._memory(kind, place, speaker)
        if kind == "bad_loss":
            step = _BAD_STEP.search(line)
            numbers = {} if step is None else {"since_step": int(step.group(1))}
        device = _DEVICE.search(line) if kind in (SILENT_CORRUPTION, RERUN) else None
        if device is not None:
            numbers = {"device": int(device["device"])}
            speaker = speaker if device["rank"] is None else ("rank", int(device["rank"]))
        facts = {name: harmless(value)[:FACT_CHARACTERS] for name, value in match.groupdict().items() if value}
        facts.update({"phase": phases[-1]} if phases else {})
        facts.update(self._hang(place, line) if kind == "hung" else {})
        told = self._with_last_error(place, line) if kind == "nccl" else line
        return _with_speaker(
            Hit(kind, harmless(told), place, None, None, numbers, facts, pattern.sick, pattern.consequence), speaker
        )

    def _memory(self, kind: str, place: int, speaker: Speaker | None) -> tuple[str, Numbers]:
        """The kind, and what the message says in numbers; something may have broken it into lines."""
        self._measured += 1
        if self._measured > MOST_MEASURED:
            return kind, {}
        message = " ".join(self._message(place))
        if kind == "oom" and "Tried to allocate" not in message and self._pins(place, speaker):
            kind = "host_oom"  # cudaHostAlloc fails with the same words as cudaMalloc
        return kind, device_numbers(message) if kind == "oom" else _sizes_in(message, {"asked_bytes": _HOST})

    def _message(self, place: int) -> list[str]:
        return [_speaker(_plain(line))[1] for line in self.lines[place : place + MESSAGE_LINES]]

    def _pins(self, place: int, speaker: Speaker | None) -> bool:
        before = (_speaker(_plain(line)) for line in self.lines[max(0, place - PIN_LINES) : place])
        return any(who == speaker and "pin_memory" in line for who, line in before)

    def _with_last_error(self, place: int, line: str) -> str:
        """The line with what NCCL says after it of its own last error."""
        message = self._message(place)
        at = next((number for number, text in enumerate(message) if text.strip().startswith(_LAST_ERROR)), None)
        if at is None:
            return line
        said = [message[at].strip()[len(_LAST_ERROR) :].strip(), *(text.strip() for text in message[at + 1 : at + 2])]
        last_error = next((text for text in said if text), "")
        return f"{line} NCCL's last error: {last_error}" if last_error else line

    def _hang(self, place: int, line: str) -> Facts:
        """What the program was doing, by the last line before the first hang that says so, and where ranks wait."""
        operation = _COLLECTIVE.search(line)
        facts = {} if operation is None else {"operation": operation.group(1)}
        if self._hang_is_known:
            return facts
        self._hang_is_known = True
        for raw in reversed(self.lines[max(0, place - ACTIVITY_LINES) : place]):
            said = _speaker(_plain(raw))[1]
            doing = next((name for name, expression in _ACTIVITIES if expression.search(said)), None)
            if doing is not None:
                return {**facts, "doing": doing}
        return facts


def _comes_after(words: tuple[str, ...], before: str) -> bool:
    return not words or any(word in before for word in words)


def _cause_of_phases(line: str, phases: Sequence[str]) -> str:
    """What an exception means by the innermost frame that says so; what the system raised says nothing of a file."""
    causes = [_CAUSE_OF_PHASE[phase] for phase in phases if _CAUSE_OF_PHASE[phase]]
    return causes[-1] if causes and not _OF_THE_SYSTEM.match(line) else "crash"


def _hit_of_xid(digits: str, line: str, place: int) -> Hit | None:
    number = whole_number_in(digits)
    kind = None if number is None else HARDWARE_XIDS.get(number)
    if number is None or not kind:
        return None
    return Hit(kind, harmless(line), place, numbers={"xid": number}, sick=True)


# The launchers' own words around the end of their ranks: torchrun, DeepSpeed's launcher, srun, and our scripts.
_LAUNCHERS = re.compile(
    r"\[?[EWI]\d{4} |\[\d{4}-\d\d-\d\d|torch\.distributed|[=\-*]{4,}|Root Cause|Failures?:"
    r"|<NO_OTHER_FAILURES>|\[\d+\]:$"
    r"|\s*(time|host|rank|exitcode|error_file|traceback) +:|srun: |slurmstepd: |train\.sh on "
    r"|job\.sbatch: |llmlaunch: |monitor: "
    r"|Traceback |\s+(File \"|\^|~)|\S*FAILED$|.*\b\d+/\d+ \[|step \d+/|\s*iteration +\d+/"
)
_RANKS_ENDED = re.compile(
    r"failed \(exitcode: |ChildFailedError|Sending process \d+ closing signal|Killing subprocess|exits with return code"
)
LAST_LINES = 500


def last_message(text: str) -> str:
    """Return the last line that the trainer itself has written before its launcher told of its end; empty where there
    is none. A launcher's own words, a step's line and a traceback's frames are none."""
    lines = [_speaker(_plain(line))[1] for line in text.rstrip()[-LAST_LINES * READ_CHARACTERS :].split("\n")][
        -LAST_LINES:
    ]
    end = next((place for place, line in enumerate(lines) if _RANKS_ENDED.search(line)), len(lines))
    own = (line.strip() for line in reversed(lines[:end]) if line[:1].strip() and not _LAUNCHERS.match(line))
    return harmless(next(own, ""))


def with_last_message(record: Cause | None, text: str) -> Cause | None:
    """Return the cause with the last line that the trainer wrote, where nothing else is known but the exit code of a
    rank, or its launcher's words about it: what a program says before it exits by itself is no exception."""
    if record is None or record["kind"] != "crash":
        return record
    exited = record["source"] == "ranks" and "exit_code" in record["numbers"]
    told_by_launcher = record["source"] == "log" and record["consequence"]
    message = last_message(text) if exited or told_by_launcher else ""
    if not message:
        return record
    return {**record, "line": harmless(f"{record['line']}; its log ends with: {message}") if exited else message}


def _plain(line: str) -> str:
    """Without colours, and of a progress bar the last state."""
    line = line[-READ_CHARACTERS:] if "\r" in line else line[:READ_CHARACTERS]
    line = _ANSI.sub("", line) if "\x1b" in line else line
    return line.rpartition("\r")[2]


def _with_speaker(hit: Hit, speaker: Speaker | None) -> Hit:
    if speaker is None or speaker[0] == "task":
        return hit
    word, number = speaker
    return hit._replace(rank=number) if word == "rank" else hit._replace(local_rank=number)


def _speaker(line: str) -> tuple[Speaker | None, str]:
    """Who wrote a line, by the last word of its prefix, and the rest of it."""
    match = _PREFIX.match(line) if line[:1] in _BEGINNINGS else None
    if match is None or match.end() == 0:
        return None, line
    task, role, local, rank = match.group("task", "role", "local", "rank")
    rest = line[match.end() :]
    if rank is not None:
        return ("rank", int(rank)), rest
    return (("task", int(task)) if role is None else (role, int(local))), rest


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZE = r"(?<![\d.])([\d.]{1,64})\s{1,9}(bytes|[KMGTP]iB)"

# torch 2.1 on, where it was "capacty" at first
_SINCE_TORCH_2_1 = {
    "asked_bytes": rf"Tried to allocate\s+{_SIZE}",
    "total_bytes": rf"has a total capaci?ty of\s+{_SIZE}",
    "free_bytes": rf"of which\s+{_SIZE}\s+is free",
    "process_bytes": rf"Including non-PyTorch memory, this process has\s+{_SIZE}",
    "allowed_bytes": rf"{_SIZE}\s+allowed;",
    "allocated_bytes": rf"Of the allocated memory\s+{_SIZE}\s+is allocated by PyTorch",
    "private_pools_bytes": rf"with\s+{_SIZE}\s+allocated\s+in private pools",
    "unallocated_bytes": rf"and\s+{_SIZE}\s+is\s+reserved by PyTorch but unallocated",
}
# torch 1.0 to 2.0; before 1.4 the last was called "cached"
_BEFORE_TORCH_2_1 = {
    "total_bytes": rf";\s+{_SIZE}\s+total capacity;",
    "allocated_bytes": rf"{_SIZE}\s+already allocated;",
    "free_bytes": rf"{_SIZE}\s+free;",
    "reserved_bytes": rf"{_SIZE}\s+(?:reserved in total by PyTorch|cached)",
}
_GPU = r"GPU (\d{1,9})\b"
_OTHERS = rf"Process (\d{{1,9}}) has\s+{_SIZE}\s+memory in use"
_HOST = r"(?:tried to allocate|Unable to allocate)\s+([\d.]{1,64})\s{1,9}(bytes|[KMGTP]iB)"


def device_numbers(text: str) -> Numbers:
    """Return all that an allocator's message says; a number that it leaves out, or that cannot be read, is absent.

    `reserved_bytes` = allocated + unallocated, `non_torch_bytes` = what the process holds beyond that (CUDA context,
    NCCL, libraries). torch rounds each to two decimals of its unit, so they are exact to about 5 MiB in the GiB range.
    """
    numbers = _sizes_in(text, _SINCE_TORCH_2_1)
    for name, value in _sizes_in(text, _BEFORE_TORCH_2_1).items():
        numbers.setdefault(name, value)
    gpu = re.search(_GPU, text)
    if gpu is not None:
        numbers["gpu"] = int(gpu.group(1))
    if "allocated_bytes" in numbers and "unallocated_bytes" in numbers:
        numbers.setdefault("reserved_bytes", numbers["allocated_bytes"] + numbers["unallocated_bytes"])
    numbers.update(_of_other_processes(text, numbers))
    if "process_bytes" in numbers and "reserved_bytes" in numbers:
        numbers["non_torch_bytes"] = max(0, numbers["process_bytes"] - numbers["reserved_bytes"])
    return numbers


def _of_other_processes(text: str, numbers: Numbers) -> Numbers:
    """What processes hold that the message gives numbers. Where none is "this process", as in a container with process
    ids of its own, torch has taken itself for one of them: for the smallest that could hold what torch reserved."""
    others = [(int(match[1]), _bytes(match[2], match[3])) for match in re.finditer(_OTHERS, text)]
    held = [(size, process) for process, size in others if size is not None]
    if len(held) != len(others):
        return {}
    found: Numbers = {}
    if held and "process_bytes" not in numbers:
        least = numbers.get("reserved_bytes", 0) - ROUNDING_BYTES
        itself = min((one for one in held if one[0] >= least), default=None)
        if itself is not None:
            held.remove(itself)
            found["process_bytes"] = itself[0]
    if held:
        found["other_processes_bytes"] = sum(size for size, _ in held)
    if len(held) == 1:
        found["other_process_id"] = held[0][1]
    return found


def _sizes_in(text: str, expressions: dict[str, str]) -> Numbers:
    numbers: Numbers = {}
    for name, expression in expressions.items():
        match = re.search(expression, text)
        size = None if match is None else _bytes(match.group(1), match.group(2))
        if size is not None:
            numbers[name] = size
    return numbers


def _bytes(number: str, unit: str) -> int | None:
    return byte_size_in(number.rstrip("."), _UNITS[unit])
