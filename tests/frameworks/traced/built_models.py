"""Which model Megatron core 0.19.2 builds of the words of a job, on a machine without a GPU. Run as a program:

stdin   {"world_size": 1, "arguments": ["--num-layers", ...]}, a job a line
stdout  {"parameters": 123, "config": {name: value, ...}, "model": {name: value, ...}}, or {"failure": "ValueError: "}

`parameters` counts the whole model, built under fake tensors; `config` is the TransformerConfig and `model` what else
the model is built with, as far as they are plain values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import sys
import warnings
from typing import Any

import megatron_judge as judge  # the first to import torch

# isort: split
from megatron.training.argument_utils import gpt_config_from_args
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_dispatch import InventedScalars
from pretrain import build_model


def built(job: judge.Job) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        judge.read_arguments(job)
        judge.make_config(job)
        judge.make_groups(job)
        judge.initialize._set_random_seed(job.args.seed)
        with FakeTensorMode(allow_non_fake_inputs=True), InventedScalars():
            model = build_model(pre_process=True, post_process=True)
            parameters = sum(parameter.numel() for parameter in model.parameters())
    others = gpt_config_from_args(job.args)
    return {"parameters": parameters, "config": plain(job.config), "model": plain(others)}


def plain(config: Any) -> dict[str, Any]:
    """Fields that are numbers, words or lists of such; functions by their names."""
    values = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    return {name: getattr(value, "__name__", value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str)) or hasattr(value, "__name__")


def answered_apart(job: judge.Job) -> str:
    """Megatron keeps its state in the process, so every job has one of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = built(job)
        except (Exception, SystemExit) as failure:
            answer = {"failure": f"{type(failure).__name__}: {failure}"}
        with os.fdopen(writing, "w") as out:
            out.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said or json.dumps({"failure": "died"})


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        print(answered_apart(judge.Job(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
