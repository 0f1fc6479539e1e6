"""Starts a training script as one rank of a job whose other ranks do not exist.

    WORLD_SIZE=512 RANK=128 LOCAL_RANK=0 python rank_alone.py SCRIPT [WORDS ...]

Every process group of the script is one of torch's own `fake` backend: nothing is sent, and what the others would have
sent is made up here, so that the script computes on numbers and takes the memory it would. What is gathered or
exchanged is this rank's own, what comes from another stage is small random numbers, what is reduced or broadcast stays
as it is. Python >= 3.8 and torch >= 2.3; copied into a run directory as trainer/rank_alone.py.

torch's backend does a part of it itself, more with every version (FakeProcessGroup.hpp: of 2.13 all but receiving; in
earlier ones an exchange leaves whatever was in that memory). Done again here, it is the same in all of them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import runpy
import sys
from pathlib import Path

TYPE_CHECKING = False  # `typing` is the script's to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Of activations and gradients: far from the ends of every number format, also summed over a sequence. A constant would
# have no variance, and a normalisation would divide by its square root.
DEVIATION = 0.01

# What a group is told that is meant for NCCL, or for a real meeting of ranks.
OF_REAL_GROUPS = ("backend", "init_method", "world_size", "rank", "store", "pg_options", "device_id")

FRAMEWORKS = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "transformer_engine": "transformer_engine",
    "deepspeed": "deepspeed",
}
"""Their modules, by the names of their packages."""


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    script = sys.argv[1]
    pretend_the_others()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        with contextlib.suppress(Exception):
            write_versions()


def write_versions() -> None:
    """What ran, as it calls itself, for whoever reads the run directory."""
    reported = {name: getattr(sys.modules.get(module), "__version__", None) for name, module in FRAMEWORKS.items()}
    versions = {name: _released(name, str(version)) for name, version in reported.items() if version}
    place = Path(os.environ["LLMLAUNCH_RUN_DIR"], "attempts", os.environ["LLMLAUNCH_ATTEMPT"])
    (place / "versions.json").write_text(json.dumps(versions) + "\n")


def _released(name: str, version: str) -> str:
    """Without the commit a framework was built from; of torch the part behind the plus is what it computes on."""
    return version if name == "torch" else version.partition("+")[0]


def pretend_the_others() -> None:
    """From here on every process group is fake. Call it before anything is imported that binds torch's collectives."""
    import torch.distributed as dist

    put(dist, "init_process_group", _begin_fake(dist.init_process_group))
    put(dist, "new_group", _split_fake(dist.new_group))
    for name, fill in FILLED.items():
        real = getattr(dist.distributed_c10d, name, None)
        if real is not None:
            put(dist, name, _filling(real, fill))
    for name, answer in ANSWERED.items():
        put(dist, name, answer)


def put(dist: Any, name: str, function: Callable[..., Any]) -> None:
    """Where scripts look it up, and where torch itself does."""
    setattr(dist.distributed_c10d, name, function)
    if hasattr(dist, name):
        setattr(dist, name, function)


def _begin_fake(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        passed_on = {name: value for name, value in options.items() if name not in OF_REAL_GROUPS}
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        real("fake", store=FakeStore(), world_size=size, rank=rank, **passed_on)
        with contextlib.suppress(Exception):
            write_versions()  # already: a script may end without this one (os._exit, or out of memory)

    return init_process_group


def _split_fake(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def new_group(*arguments: Any, **options: Any) -> Any:
        passed_on = {name: value for name, value in options.items() if name not in OF_REAL_GROUPS}
        return real(*arguments[:2], **passed_on)  # of which ranks, and a time-out; the backend is that of the world

    return new_group


def _filling(real: Callable[..., Any], fill: Callable[..., None]) -> Callable[..., Any]:
    """The collective itself, and what it should have left in its first argument, made of its second."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def collective(*arguments: Any, **options: Any) -> Any:
        import torch

        values = list(signature.bind(*arguments, **options).arguments.values())
        work = real(*arguments, **options)
        with torch.no_grad():
            fill(*values[:2])
        return work

    return collective


# --- what the others would have sent ----------------------------------------------------------------------------------


def _as_if_equal(output: Any, source: Any) -> None:
    """Every rank has what this one has. Where one is a part of the other, the rest holds values already. Takes no
    memory of its own, and two kernels at most."""
    if output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        return
    if output.shape == source.shape:
        output.copy_(source)
        return
    target, values = output.view(-1), source.reshape(-1)
    size = values.numel()
    if not size:
        target.zero_()
        return
    whole = target.numel() // size * size
    target[:whole].view(-1, size).copy_(values)
    target[whole:].copy_(values[: target.numel() - whole])


def _as_if_equal_each(outputs: Any, source: Any) -> None:
    for output in outputs:
        _as_if_equal(output, source)


def _first_of(output: Any, sources: Any) -> None:
    _as_if_equal(output, sources[0])


def _one_by_one(outputs: Any, sources: Any) -> None:
    for place, output in enumerate(outputs):
        _as_if_equal(output, sources[place])


def _received(tensor: Any, *_: Any) -> None:
    """Numbers that are no activations are sizes or positions: none."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.normal_(0.0, DEVIATION)
    else:
        tensor.zero_()


def _broadcast(tensor: Any, *_: Any) -> None:
    """Megatron's rank 0 tells all whether there is training to do: a stage in the middle reads no data, and would
    end at once, without a word (build_train_valid_test_data_loaders, megatron/training/training.py, core 0.19)."""
    asking = sys._getframe(2).f_code.co_name  # of the caller of the collective
    if asking == "build_train_valid_test_data_loaders":
        tensor[0] = 1


FILLED: dict[str, Callable[..., None]] = {
    "all_gather_into_tensor": _as_if_equal,
    "all_gather_single": _as_if_equal,
    "_all_gather_base": _as_if_equal,
    "all_gather": _as_if_equal_each,
    "reduce_scatter_tensor": _as_if_equal,
    "reduce_scatter_single": _as_if_equal,
    "_reduce_scatter_base": _as_if_equal,
    "reduce_scatter": _first_of,
    "all_to_all_single": _as_if_equal,
    "all_to_all": _one_by_one,
    "broadcast": _broadcast,
    "recv": _received,
    "irecv": _received,
}


# --- what ranks tell each other in Python -----------------------------------------------------------------------------


def _all_say(into: Any, value: Any, *_: Any, **__: Any) -> None:
    into[:] = [value] * len(into)


def _gathered(value: Any, into: Any = None, *_: Any, **__: Any) -> None:
    if into is not None:
        into[:] = [value] * len(into)


def _scattered(output: Any, values: Any = None, *_: Any, **__: Any) -> None:
    output[0] = values[0] if values else None


def _nothing(*_: Any, **__: Any) -> None:
    """What another would have said stays unsaid."""


ANSWERED: dict[str, Callable[..., Any]] = {
    "all_gather_object": _all_say,
    "gather_object": _gathered,
    "scatter_object_list": _scattered,
    "broadcast_object_list": _nothing,
    "barrier": _nothing,
    "monitored_barrier": _nothing,
}

if __name__ == "__main__":
    main()
