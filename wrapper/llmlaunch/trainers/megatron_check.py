"""Asks Megatron-LM itself whether it takes a training's arguments, on one node and before a step is spent.

    megatron_check.py --world-size 512 [--compute-capability 9.0] [--planned-for 0.19] PRETRAIN_GPT.PY ARGUMENT ...

The training script runs with its own arguments, as rank 0 of the training's world, up to its call of `pretrain`: so the
parser is the checkout's, with the arguments its script adds, and so are `validate_args` and `TransformerConfig`. Of a
script with a training loop of its own the arguments are judged where it starts its process group: `initialize_megatron`
has parsed them before. No GPU and no process group is used, and nothing of llmlaunch. Made for core 0.16 to 0.19, and
main of August 2026.

Exit code 0: taken, or nobody here can say (the checkout has another layout, or something does not import: then the
training will say it). 3: refused; the last lines say why.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import linecache
import os
import re
import runpy
import shlex
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

REFUSED = 3
GUESSED_CAPABILITY = "9.0"
MOST_SECONDS = 300.0
STATEMENT_LINES = 8  # of a check whose end the traceback does not say (Python before 3.11)

# Where Megatron judges its arguments. What fails elsewhere is no word on them.
JUDGES = ("/megatron/training/", "/megatron/core/transformer/", "/megatron/core/model_parallel_config.py")
# No judgement either: of what is missing on this node, or hidden from this process.
NO_WORD = (ImportError, OSError, AttributeError, NameError, MemoryError)
# What parsing begins beside parsing, where this rank is the last one, too: trackers, and a handler for SIGTERM.
EFFECTS = (
    *("_set_tensorboard_writer", "_set_wandb_writer", "_set_one_logger", "_set_adlr_autoresume"),
    "_set_signal_handler",
)
NEEDS_DEVICE = re.compile(r"\bNVIDIA\b|\bCUDA (driver|GPUs?|error|is not available)|compiled with CUDA|cuda\w* runtime")


class Taken(BaseException):
    """Leaves the training script from within; not an Exception, so that it is not caught on the way."""


def main() -> NoReturn:
    began, options, output = time.monotonic(), parse_arguments(), io.StringIO()
    threading.Thread(target=give_up, args=(MOST_SECONDS,), daemon=True).start()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(options.world_size), CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("NO_VCS_VERSION", "1")
    sys.argv = [options.script, *options.script_arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            ask(options)
    except Taken:
        seconds = f"{time.monotonic() - began:.0f} s"
        say(f"Megatron core {version_here()} takes the arguments of {options.world_size} rank(s) ({seconds})")
    except (Exception, SystemExit) as failure:
        if is_refusal(failure):
            say(refusal(failure, output.getvalue(), options.script_arguments))
            leave(REFUSED)
        not_checked(f"{type(failure).__name__}: {last_line(str(failure))}")
    else:
        not_checked(f"{options.script} ended without calling megatron.training.pretrain")
    compare(options.planned_for)
    leave(0)


def ask(options: argparse.Namespace) -> None:
    """Raises Taken, what refuses the arguments, or what keeps them from being checked."""
    answer_without_gpu(options.compute_capability)
    import_engine()
    import megatron.training
    import torch
    from megatron.training import global_vars, training

    judge = partial(judge_instead, inspect.signature(training.pretrain))
    megatron.training.pretrain = training.pretrain = judge
    torch.distributed.init_process_group = judge_parsed
    for effect in EFFECTS:
        if hasattr(global_vars, effect):
            setattr(global_vars, effect, lambda *_: None)
    runpy.run_path(options.script, run_name="__main__")


def judge_instead(pretrain: inspect.Signature, *positional: Any, **named: Any) -> NoReturn:
    """In place of `megatron.training.pretrain`. Since core 0.18 the script has parsed the arguments itself by then."""
    from megatron.training import arguments, global_vars

    if global_vars._GLOBAL_ARGS is None:
        handed = {**dict(zip(pretrain.parameters, positional, strict=False)), **named}
        args = arguments.parse_args(handed.get("extra_args_provider"))
        arguments.validate_args(args, handed.get("args_defaults") or {})
        global_vars._GLOBAL_ARGS = args
    judge_parsed()


def judge_parsed(*_: Any, **__: Any) -> NoReturn:
    """In place of `torch.distributed.init_process_group`, which a script that parses nothing before it may call."""
    from megatron.training import arguments, global_vars

    args = global_vars._GLOBAL_ARGS
    if args is None:
        raise OSError("the script starts its process group before Megatron has parsed its arguments")
    arguments.core_transformer_config_from_args(args)
    raise Taken


def import_engine() -> None:
    """Megatron goes on without a Transformer Engine that does not import, and then refuses what needs one. Where it is
    installed, that would be this process's fault."""
    from importlib.util import find_spec

    if find_spec("transformer_engine") is not None:
        import transformer_engine.pytorch  # noqa: F401


def answer_without_gpu(capability: str) -> None:
    """Megatron's checks ask what the GPU is; answered for the training's. Any is as good where torch sees none."""
    import torch

    major, minor = (int(part) for part in capability.split("."))
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=major, minor=minor)
    torch.cuda.get_device_capability = lambda *_: (major, minor)


def is_refusal(failure: BaseException) -> bool:
    """Whether Megatron's own checks said no, and not something that is missing here."""
    if isinstance(failure, NO_WORD) or NEEDS_DEVICE.search(str(failure)):
        return False
    if isinstance(failure, SystemExit) and failure.code != 2:  # argparse's
        return False
    judging = [frame for frame in traceback.extract_tb(failure.__traceback__) if is_judge(frame)]
    return bool(judging) and judging[0].name != "<module>"  # which is being imported, and judges nothing yet


def is_judge(frame: traceback.FrameSummary) -> bool:
    return any(place in frame.filename for place in JUDGES)


def refusal(failure: BaseException, output: str, arguments: list[str]) -> str:
    """One block: Megatron's words, where it says so, the flags in question, and where those come from."""
    frame = next(each for each in reversed(traceback.extract_tb(failure.__traceback__)) if is_judge(each))
    if isinstance(failure, SystemExit):
        errors = "\n".join(line for line in output.splitlines() if "error: " in line)
        message = last_line(errors).partition("error: ")[2]
    else:
        message = str(failure).strip() or statement(frame)
    flags = flags_in_question(message, "" if isinstance(failure, SystemExit) else statement(frame), arguments)
    run = os.environ.get("LLMLAUNCH_RUN_DIR", "RUN")
    place = frame.filename[frame.filename.rindex("/megatron/") + 1 :]
    return "\n".join(
        [
            f"Megatron-LM refuses its arguments: {' '.join(message.split())}",
            f"  said by {place}, line {frame.lineno} ({frame.name}), Megatron core {version_here()}",
            *([f"  it may be about: {'; '.join(flags)}"] if flags else []),
            "  The arguments were rendered by llmlaunch. From which line of the recipe each follows:",
            f"    llmlaunch explain-args {shlex.quote(run)}",
            "  No step was run.",
        ]
    )


def flags_in_question(message: str, source: str, arguments: list[str]) -> list[str]:
    """The flags a refusal names, or whose values its check reads, with the values they were given."""
    named = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", message)}
    named |= set(re.findall(r"\b(?:args|self|config)\.(\w+)", source))
    named |= {word for word in re.findall(r"\w+", message) if "_" in word}
    flags, place = [], 0
    while place < len(arguments):
        end = next((n for n in range(place + 1, len(arguments)) if arguments[n].startswith("--")), len(arguments))
        if arguments[place].startswith("--") and arguments[place][2:].partition("=")[0].replace("-", "_") in named:
            flags.append(" ".join(arguments[place:end]))
        place = end
    return flags


def statement(frame: traceback.FrameSummary) -> str:
    """The source of the check that said no."""
    first = frame.lineno or 1
    last = getattr(frame, "end_lineno", None) or first + STATEMENT_LINES
    return " ".join(linecache.getline(frame.filename, number).strip() for number in range(first, last + 1))


def compare(planned_for: str) -> None:
    """Says where the checkout is another version than the arguments were rendered for."""
    here = version_here()
    if planned_for and here and here.split(".")[:2] != planned_for.split(".")[:2]:
        note(
            f"this checkout is Megatron core {here}, but the arguments and the memory were planned for {planned_for}; "
            "backend.version in the recipe says another"
        )


def version_here() -> str:
    """What the imported Megatron core calls itself; empty where nothing was imported."""
    info = sys.modules.get("megatron.core.package_info")
    return str(getattr(info, "__version__", ""))


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def give_up(seconds: float) -> None:
    time.sleep(seconds)
    not_checked(f"no answer within {seconds:.0f} s")
    leave(0)


def not_checked(why: str) -> None:
    note(f"the arguments were not checked: {why}; the training will say")


def note(sentence: str) -> None:
    say(f"note: {sentence}")


def say(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


def leave(code: int) -> NoReturn:
    """Not through the interpreter's own end, which may wait for threads of trackers and loggers."""
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    os._exit(code)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, required=True, help="of the training")
    parser.add_argument("--compute-capability", default=GUESSED_CAPABILITY)
    parser.add_argument("--planned-for", default="", help="the version whose arguments these are")
    parser.add_argument("script", help="pretrain_gpt.py of the checkout, or one's own")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    main()
