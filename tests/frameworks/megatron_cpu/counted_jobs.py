"""train_jobs.py, whose jobs say at their end what they did: {"forward", "backward", "optimizer_steps", "states"}."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import train_jobs
from megatron.core.pipeline_parallel import schedules
from torch.optim.optimizer import register_optimizer_step_post_hook

import train

COUNTS: Counter[str] = Counter()


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def count(*arguments: Any, **options: Any) -> Any:
        COUNTS[name] += 1
        return function(*arguments, **options)

    return count


def _stepped(optimizer: Any, *_: Any) -> None:
    COUNTS["optimizer_steps"] += 1
    COUNTS["states"] = len(optimizer.state)


def _telling(train_one: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    def run(words: list[str]) -> None:
        train_one(words)
        print(json.dumps(COUNTS), flush=True)

    return run


if __name__ == "__main__":
    schedules.forward_step = _counted("forward", schedules.forward_step)
    schedules.backward_step = _counted("backward", schedules.backward_step)
    register_optimizer_step_post_hook(_stepped)
    train.train = _telling(train.train)
    train_jobs.main()
