"""Why a rank could not be traced, or why its trace is worth nothing."""

from __future__ import annotations

import traceback

__all__ = ["DISHONEST", "ERROR", "REFUSED", "UNSUPPORTED", "Dishonest", "Unsupported", "failed", "failure_of"]

REFUSED = "refused"  # the frameworks do not take the job
DISHONEST = "dishonest"  # it ran, and not all of it that allocates
UNSUPPORTED = "unsupported"  # it would run on a GPU, and cannot be traced
ERROR = "error"  # anything else

FRAMEWORKS = ("/site-packages/megatron/", "/site-packages/transformer_engine/")
REFUSALS = (AssertionError, ValueError, SystemExit)  # what Megatron and TransformerEngine raise about arguments
VALUES_ASKED = ("DataDependentOutputException", "DynamicOutputShapeException")  # torch/_subclasses/fake_tensor.py
LONGEST = 400  # characters of what is said in one sentence


class Dishonest(Exception):
    """The trace ran to its end without all that a training step allocates."""


class Unsupported(NotImplementedError):
    """What is asked of the pretended device or of a stand-in is not modelled."""


def failed(kind: str, what: str, detail: str = "") -> dict[str, str]:
    return {"kind": kind, "what": " ".join(what.split())[:LONGEST], "detail": detail}


def failure_of(error: BaseException, said: str = "") -> dict[str, str]:
    """`said` is what the program wrote to stderr: a parser says there what it refuses, and then exits."""
    lines = said.strip().splitlines()
    message = lines[-1] if isinstance(error, SystemExit) and lines else f"{error}" or type(error).__name__
    kind = _kind(error)
    place = "" if kind == DISHONEST else _place(error)
    return failed(kind, f"{message} ({place})" if place else message, "".join(traceback.format_exception(error)))


def _kind(error: BaseException) -> str:
    if isinstance(error, Dishonest):
        return DISHONEST
    missing = isinstance(error, ImportError)  # a package of the job's own that the environment of traces has not
    if missing or isinstance(error, NotImplementedError) or type(error).__name__ in VALUES_ASKED:
        return UNSUPPORTED
    last = traceback.extract_tb(error.__traceback__)[-1:]
    theirs = bool(last) and any(framework in last[0].filename for framework in FRAMEWORKS)
    return REFUSED if isinstance(error, SystemExit) or (isinstance(error, REFUSALS) and theirs) else ERROR


def _place(error: BaseException) -> str:
    """The innermost line of the frameworks' own Python: file and number."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for framework in FRAMEWORKS:
            _, found, tail = frame.filename.rpartition(framework)
            if found:
                return f"{framework.split('/')[2]}/{tail}:{frame.lineno}"
    return ""
