"""Weights of a tiny Hugging Face model on their way through Megatron-Bridge and back, on this machine's CPU (gloo).

A job a line on stdin, {"hugging_face": folder with a config.json, "imported": folder, "settings": those of our
bridge.json, "exported": folder}; an answer a line on stdout. The model is made there with random weights, Bridge's own
AutoBridge imports it, the model that our program configures (llmlaunch/trainers/megatron_bridge.py) reads that
checkpoint as a training begins, doubles every weight, or makes adapters random numbers, and saves as a training does;
and our program exports. The answer has the names of what came back, and of what is missing or not equal to the bit.

Transformer Engine is its own Python half over stand-ins for kernels, none of which runs; CUDA is answered by the CPU.
Each job has a process of its own, because Megatron keeps its groups in the process.
"""

# ruff: noqa: E402 (frameworks are imported after what they take for granted)
from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import logging
import multiprocessing
import os
import sys
import traceback
import typing
import warnings
from pathlib import Path
from typing import Any

import typing_extensions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SITE = Path(sys.prefix) / "bridge-0.6"
sys.path.insert(0, str(SITE))
sys.path.append(str(HERE.parent / "megatron_cpu"))
sys.path.extend(str(ROOT / "wrapper" / "llmlaunch" / room) for room in ("tracing", "trainers"))

gc.disable()  # of what is imported nothing is garbage, and each job is a process of its own
warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
typing.override = typing_extensions.override  # Megatron core takes it from typing, where Python 3.12 has it

import cuda_on_cpu

cuda_on_cpu.install()

import fake_triton
import patches
import te_extension

fake_triton.install()
te_extension.install()
patches.install_apex_kernel()

import absent_packages
from megatron.core.dist_checkpointing.strategies import filesystem_async

import bridge_packages

absent_packages.install()
bridge_packages.install()

import megatron_bridge as entry
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.llama import llama_bridge  # noqa: F401 (registers itself)
from megatron.bridge.models.qwen import qwen3_moe_bridge  # noqa: F401
from megatron.bridge.training import checkpointing
from megatron.bridge.training.model_load_save import temporary_distributed_context
from megatron.bridge.training.state import GlobalState
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

Job = dict[str, Any]
SEED = 7


def round_trip(job: Job) -> dict[str, Any]:
    settings = job["settings"]
    os.environ["LLMLAUNCH_RUN_DIR"] = str(Path(job["exported"]).parent)
    weights = random_weights(job["hugging_face"])
    with temporary_distributed_context(backend="gloo"):
        AutoBridge.import_ckpt(job["hugging_face"], job["imported"])
        adapters = trained(json.loads(json.dumps(settings), object_hook=entry.with_variables), job["imported"])
    entry.export(settings, job["exported"], None)
    files = Path(job["exported"]).glob("*.safetensors")
    back = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = adapters or {name: 2 * tensor for name, tensor in weights.items()}
    return {"unlike": unlike(expected, back), "names": sorted(back)}


def random_weights(folder: str) -> dict[str, Any]:
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return load_file(f"{folder}/model.safetensors")


def trained(settings: Job, imported: str) -> dict[str, Any]:
    """Save what a training would, and return its adapters by some of peft's names."""
    container = entry.container(settings)
    provider = container.model
    provider.finalize()
    if container.peft is not None:
        provider.register_pre_wrap_hook(lambda chunks: read_and_adapted(chunks, container.peft, imported))
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    if container.peft is None:
        read(model, imported)
    for parameter in model[0].parameters():
        if container.peft is None:
            parameter.data.mul_(2)
        elif parameter.requires_grad:
            parameter.data.normal_()
    state = GlobalState()
    state.cfg = container
    container.checkpoint.save_optim = container.checkpoint.save_rng = False  # which nothing of the export reads
    checkpointing.save_checkpoint(state, model, None, None, 0)
    return {} if container.peft is None else peft_names(model[0])


def read_and_adapted(chunks: list[Any], adapters: Any, imported: str) -> Any:
    read(chunks, imported)
    return adapters(chunks, training=True)


def read(chunks: list[Any], imported: str) -> None:
    checkpointing._load_model_weights_from_checkpoint(f"{imported}/iter_0000000", chunks)


def peft_names(model: Any) -> dict[str, Any]:
    """Those beside linears that Hugging Face's model has as they are."""
    linears = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
    matrices = {"linear_in": "lora_A", "linear_out": "lora_B"}
    parameters = dict(model.named_parameters())
    return {
        f"base_model.model.model.layers.{layer}.{theirs}.{matrix}.weight": next(
            tensor.detach() for name, tensor in parameters.items() if f"layers.{layer}.{ours}.adapter.{place}" in name
        )
        for layer in range(model.config.num_layers)
        for ours, theirs in linears.items()
        for place, matrix in matrices.items()
    }


def unlike(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    same = (name for name in expected.keys() & found.keys() if torch.equal(expected[name].to(found[name]), found[name]))
    return sorted(expected.keys() - set(same))


def main() -> None:
    filesystem_async.get_write_results_queue = functools.partial(filesystem_async.get_write_results_queue, "fork")
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    answer = round_trip(json.loads(line))
                except BaseException:
                    answer = {"failure": traceback.format_exc()[-3000:]}
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(answer))
            for process in multiprocessing.active_children():  # that of a checkpoint's writers has the pipe, too
                process.kill()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            print(pipe.read(), flush=True)
        os.waitpid(child, 0)
    os._exit(0)  # taking the frameworks apart takes seconds


if __name__ == "__main__":
    main()
