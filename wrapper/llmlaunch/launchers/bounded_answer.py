"""The answer of a command that a scheduler runs for us: bounded in bytes and in seconds, whatever it is."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from typing import IO, Any

MOST_OUTPUT_BYTES = 1 << 26
"""Limit for stdout. The longest ordinary answer is sacct's or squeue's of some 100,000 jobs, about 20 MiB."""

MOST_ERROR_BYTES = 1 << 20
"""Limit for stderr, of which a person is shown a few lines."""

_LOOK_SECONDS = 0.2  # at the size of the file that stderr goes to


class AnswerTooLong(Exception):
    """A command wrote more than any answer has."""


def bounded_answer(process: subprocess.Popen[Any], errors: IO[bytes], seconds: float, stdin: bytes = b"") -> bytes:
    """Return what a command writes to stdout until it ends, while it reads `stdin` where it has a pipe for that.

    `errors` is the file that its stderr goes to. The command is killed where it is not over in time or writes too much.

    Raises:
        subprocess.TimeoutExpired: it took more than `seconds`.
        AnswerTooLong: it wrote more than MOST_OUTPUT_BYTES, or more than MOST_ERROR_BYTES to stderr.
    """
    until = time.monotonic() + seconds
    try:
        output = _output(process, errors, until, stdin)
        _wait_for_end(process, errors, until)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close(pipe)
    return output


def _output(process: subprocess.Popen[Any], errors: IO[bytes], until: float, stdin: bytes) -> bytes:
    assert process.stdout is not None
    output, left = bytearray(), memoryview(stdin)
    with selectors.DefaultSelector() as pipes:
        pipes.register(process.stdout, selectors.EVENT_READ)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            pipes.register(process.stdin, selectors.EVENT_WRITE)
        while True:
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise subprocess.TimeoutExpired(process.args, 0.0)
            _refuse_endless_errors(errors)
            for key, _ in pipes.select(min(_LOOK_SECONDS, remaining)):
                if key.fileobj is process.stdout:
                    block = os.read(key.fd, 1 << 16)
                    if not block:
                        return bytes(output)
                    output += block
                    if len(output) > MOST_OUTPUT_BYTES:
                        raise AnswerTooLong
                else:
                    left = left[_written(key.fd, left) :]
                    if not left:
                        pipes.unregister(key.fileobj)
                        _close(key.fileobj)


def _wait_for_end(process: subprocess.Popen[Any], errors: IO[bytes], until: float) -> None:
    """Wait for a command that has closed its stdout, which may still write to stderr."""
    while process.poll() is None:
        _refuse_endless_errors(errors)
        remaining = until - time.monotonic()
        if remaining <= 0:
            raise subprocess.TimeoutExpired(process.args, 0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_SECONDS, remaining))


def _written(descriptor: int, content: memoryview) -> int:
    """Return how many bytes a pipe took; all where nobody reads it any more."""
    try:
        return os.write(descriptor, content[: 1 << 16]) if content else 0
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(content)


def _refuse_endless_errors(errors: IO[bytes]) -> None:
    """Raise AnswerTooLong where the file holds more than MOST_ERROR_BYTES."""
    if os.fstat(errors.fileno()).st_size > MOST_ERROR_BYTES:
        raise AnswerTooLong


def _close(pipe: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # a broken pipe, whose buffer holds nothing of ours
        pipe.close()
