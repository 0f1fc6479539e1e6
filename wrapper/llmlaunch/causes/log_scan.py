"""The telling lines of one node's log. Pure: text in, hits out; `read_log` is the one that touches a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.files import open_regular
from ..rundir.foreign_values import byte_size_in, whole_number_in
from .redaction import harmless
from .signs import (
    EXCEPTION,
    HARDWARE_XIDS,
    LOADING_FRAME,
    NO_CAUSES,
    OF_THE_SYSTEM,
    RERUN,
    SIGNS,
    SILENT_CORRUPTION,
    TELLING,
    WRAPPER,
    XID,
)

if TYPE_CHECKING:
    from pathlib import Path

    Speaker = tuple[str, int]
    Numbers = dict[str, int | float]

__all__ = ["Hit", "device_numbers", "read_log", "scan"]

FIRST_BYTES, LAST_BYTES = 2**20, 4 * 2**20
READ_CHARACTERS = 4096  # of a line; a message about memory has some 600
MESSAGE_LINES = 5  # a message about memory that something broke into lines
PIN_LINES = 12  # a traceback's last lines, in which `pin_memory` says that it was main memory

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
# torch >= 2.4 begins an uncaught exception's lines with the global rank; torchrun --tee with role and local rank
_PREFIX = re.compile(r"\[(?P<word>rank|[a-z]+)(?P<number>\d{1,9})\]:\s?")
_SIGNS = [(re.compile(sign.expression), sign) for sign in SIGNS]
_NO_CAUSE = re.compile("|".join(expression for expression, _ in NO_CAUSES))
_EXCEPTION = re.compile(EXCEPTION)
_XID = re.compile(XID)
_DEVICE = re.compile(r"(?:\bRank (?P<rank>\d{1,9}), node \S+, device|\(node: \S+, gpu:) (?P<device>\d{1,9})\b")
_LOADING_FRAME = re.compile(LOADING_FRAME)
_OF_THE_SYSTEM, _WRAPPER = re.compile(f"{OF_THE_SYSTEM}|{WRAPPER}"), re.compile(WRAPPER)
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
    """Every telling line in the order of the log. Exceptions are told by the line that ends their traceback, one for
    each chain of exceptions, unless an earlier link of the chain is a sign by itself. One that left the function that
    loads a checkpoint is the checkpoint's, unless the system raised it."""
    lines = [_plain(line) for line in text.replace("\r\n", "\n").split("\n")]
    hits: list[Hit] = []
    open_tracebacks: dict[Speaker | None, bool] = {}
    loading: set[Speaker | None] = set()  # those whose open traceback goes through the loading of a checkpoint
    chained: dict[Speaker | None, int] = {}  # speaker -> index of the hit that the chain may replace
    last_crash: dict[Speaker | None, int] = {}
    for place, whole in enumerate(lines):
        speaker, line = _speaker(whole)
        if line.startswith(_CHAINED) and speaker in last_crash:
            chained[speaker] = last_crash[speaker]
            continue
        if line.startswith(_TRACEBACK):
            open_tracebacks[speaker] = True
            continue
        if open_tracebacks.get(speaker) and line[:1] in (" ", "\t"):
            if _LOADING_FRAME.match(line):
                loading.add(speaker)
            continue  # the program's own text, which may quote anything
        telling = any(word in line for word in TELLING)
        hit = _hit(lines, place, speaker, line) if telling else None
        ends = bool(open_tracebacks.get(speaker)) and _EXCEPTION.match(line) is not None
        if ends:
            open_tracebacks[speaker] = False
        if hit is None and (ends or (telling and _WITHOUT_TRACEBACK.match(line))):
            kind = "checkpoint" if ends and speaker in loading and not _OF_THE_SYSTEM.match(line) else "crash"
            hit = _with_speaker(Hit(kind, harmless(line), place), speaker)
        if ends and not _WRAPPER.match(line):
            loading.discard(speaker)
        if hit is None:
            continue
        before = chained.pop(speaker, None) if ends else None
        if before is None:
            hits.append(hit)
            last_crash[speaker] = len(hits) - 1
        elif hits[before].kind == "crash" or hits[before].consequence:
            hits[before] = hit._replace(place=hits[before].place)
    return hits


def _hit(lines: list[str], place: int, speaker: Speaker | None, line: str) -> Hit | None:
    if _NO_CAUSE.search(line):
        return None
    xid = _XID.search(line)
    if xid is not None:
        number = whole_number_in(xid.group("number"))
        kind = None if number is None else HARDWARE_XIDS.get(number)
        if number is None or not kind:
            return None
        return Hit(kind, harmless(line), place, numbers={"xid": number}, sick=True)
    sign = next((sign for expression, sign in _SIGNS if expression.search(line)), None)
    if sign is None:
        return None
    kind = sign.kind
    numbers: Numbers = {}
    if kind in ("oom", "host_oom"):
        message = " ".join(_speaker(other)[1] for other in lines[place : place + MESSAGE_LINES])
        if kind == "oom" and "Tried to allocate" not in message and _pins(lines, place, speaker):
            kind = "host_oom"  # cudaHostAlloc fails with the same words as cudaMalloc
        numbers = device_numbers(message) if kind == "oom" else _sizes_in(message, {"asked_bytes": _HOST})
    if kind == "bad_loss":
        step = _BAD_STEP.search(line)
        numbers = {} if step is None else {"since_step": int(step.group(1))}
    device = _DEVICE.search(line) if kind in (SILENT_CORRUPTION, RERUN) else None
    if device is not None:
        numbers = {"device": int(device["device"])}
        speaker = speaker if device["rank"] is None else ("rank", int(device["rank"]))
    hit = Hit(kind, harmless(line), place, None, None, numbers, sign.sick, sign.consequence)
    return _with_speaker(hit, speaker)


def _plain(line: str) -> str:
    """Without colours, and of a progress bar the last state."""
    line = line[-READ_CHARACTERS:] if "\r" in line else line[:READ_CHARACTERS]
    line = _ANSI.sub("", line) if "\x1b" in line else line
    return line.rpartition("\r")[2]


def _pins(lines: list[str], place: int, speaker: Speaker | None) -> bool:
    before = (_speaker(line) for line in lines[max(0, place - PIN_LINES) : place])
    return any(who == speaker and "pin_memory" in line for who, line in before)


def _with_speaker(hit: Hit, speaker: Speaker | None) -> Hit:
    if speaker is None:
        return hit
    word, number = speaker
    return hit._replace(rank=number) if word == "rank" else hit._replace(local_rank=number)


def _speaker(line: str) -> tuple[Speaker | None, str]:
    match = _PREFIX.match(line) if line.startswith("[") else None
    return (None, line) if match is None else ((match.group("word"), int(match.group("number"))), line[match.end() :])


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZE = r"([\d.]+)\s+(bytes|[KMGTP]iB)"

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
_OTHERS = rf"Process \d+ has\s+{_SIZE}\s+memory in use"
_HOST = r"(?:tried to allocate|Unable to allocate)\s+([\d.]+)\s+(bytes|[KMGTP]iB)"


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
    others = [_bytes(match.group(1), match.group(2)) for match in re.finditer(_OTHERS, text)]
    if others and None not in others:
        numbers["other_processes_bytes"] = sum(size for size in others if size is not None)
    if "allocated_bytes" in numbers and "unallocated_bytes" in numbers:
        numbers.setdefault("reserved_bytes", numbers["allocated_bytes"] + numbers["unallocated_bytes"])
    if "process_bytes" in numbers and "reserved_bytes" in numbers:
        numbers["non_torch_bytes"] = max(0, numbers["process_bytes"] - numbers["reserved_bytes"])
    return numbers


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
