"""Builds the dataset indexes a Megatron-LM training will look for, once and on one node, before the large job asks.

    megatron_dataset.py --world-size 512 [--compute-capability 9.0] PRETRAIN_GPT.PY ARGUMENT ...

Rank 0 of a training builds them while every other rank waits: minutes to hours of all devices, or the time-out of the
first collective. Here the training script itself runs with its own arguments, as rank 0 of the training's world, but in
place of `pretrain` its own dataset provider is called. So parser, seed, split, lengths and number of samples are the
training's, and so are the names of the index files. No GPU and no process group is used, and nothing of llmlaunch.
Where the script has a training loop of its own, nothing is built, and the training itself will. Made for core 0.16 to
0.19.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import inspect
import os
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

GUESSED_CAPABILITY = "9.0"


def main() -> NoReturn:
    options = arguments()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(options.world_size), CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    sys.argv = [options.script, *options.script_arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    answer_without_gpu(options.compute_capability)
    import megatron.training
    import torch
    from megatron.training import training

    build = partial(build_instead, inspect.signature(training.pretrain))
    megatron.training.pretrain = training.pretrain = build
    torch.distributed.init_process_group = nothing_to_build
    try:
        runpy.run_path(options.script, run_name="__main__")
    except Built:
        leave(0)
    except OwnLoop:
        pass
    print(f"note: {options.script} does not call megatron.training.pretrain; the training builds its indexes itself")
    leave(0)


class Built(BaseException):
    """Leaves the training script from within; not an Exception, so that it is not caught on the way."""


class OwnLoop(BaseException):
    """Leaves a training script that begins to train without Megatron's `pretrain`."""


def nothing_to_build(*_: Any, **__: Any) -> NoReturn:
    """In place of `torch.distributed.init_process_group`, for which this process has no other ranks."""
    raise OwnLoop


def build_instead(pretrain: inspect.Signature, *positional: Any, **named: Any) -> NoReturn:
    """In place of `megatron.training.pretrain`, whose parameters differ by version."""
    handed = {**dict(zip(pretrain.parameters, positional, strict=False)), **named}
    provider = next(value for name, value in handed.items() if "dataset" in name)
    args = parsed(handed)
    stand_on_rank_0()
    from megatron.training import training

    have_helpers()
    samples = training.get_train_valid_test_num_samples()
    wanted = f"{samples[0]} training samples, {samples[1]} for validation"
    print(f"building indexes for {wanted}, sequence length {args.seq_length}", flush=True)
    try:
        with contextlib.ExitStack() as locks:
            for place in places(args):
                locks.enter_context(alone(place))
            provider(samples)
    except OSError as error:
        print(
            f"{error}\nIndexes are kept beside the dataset; where you may not write, name another folder: "
            "data.cache_path: /some/folder",
            file=sys.stderr,
        )
        leave(1)
    print("done", flush=True)
    raise Built


def places(args: Any) -> list[str]:
    """Where indexes will be written: the cache, else beside each dataset of a blend, in one order for all builders."""
    if args.data_cache_path:
        Path(args.data_cache_path).mkdir(parents=True, exist_ok=True)
        return [str(Path(args.data_cache_path) / "llmlaunch")]
    from megatron.core.datasets.utils import get_blend_from_list

    named = (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path)
    blends = [blend for blend in map(get_blend_from_list, named) if blend]
    return sorted({prefix for prefixes, _ in blends for prefix in prefixes})


@contextlib.contextmanager
def alone(place: str) -> Iterator[None]:
    """One builder at a time, where the file system has locks: runs of a sweep start together on one dataset, and
    Megatron takes a half-written index for a whole one."""
    with contextlib.ExitStack() as locks:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = locks.enter_context(os.fdopen(os.open(f"{place}.lock", flags, 0o666), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def have_helpers() -> None:
    """A checkout compiles them when a training starts; a package brings them."""
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        from megatron.core.datasets.utils import compile_helpers

        compile_helpers()


def parsed(handed: dict[str, Any]) -> Any:
    """The training's arguments: since core 0.18 the script has parsed them itself, before `pretrain` did."""
    from megatron.training import arguments, global_vars

    if global_vars._GLOBAL_ARGS is None:
        args = arguments.parse_args(handed.get("extra_args_provider"))
        arguments.validate_args(args, handed.get("args_defaults") or {})
        global_vars.set_global_variables(args)
    return global_vars.get_args()


def stand_on_rank_0() -> None:
    """What the provider asks of the process groups, which are not there: whether this rank reads data. Rank 0 does."""
    from megatron.core import parallel_state

    parallel_state.set_tensor_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(1)  # so that this stage is first and last


def answer_without_gpu(capability: str) -> None:
    """Megatron's checks ask what the GPU is; answered for the training's. Any is as good where torch sees none."""
    import torch

    major, minor = (int(part) for part in capability.split("."))
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=major, minor=minor)
    torch.cuda.get_device_capability = lambda *_: (major, minor)


def leave(code: int) -> NoReturn:
    """Not through the interpreter's own end, which may wait for threads of trackers and loggers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, required=True, help="of the training")
    parser.add_argument("--compute-capability", default=GUESSED_CAPABILITY)
    parser.add_argument("script", help="pretrain_gpt.py of the checkout, or one's own")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args()


if __name__ == "__main__":
    main()
