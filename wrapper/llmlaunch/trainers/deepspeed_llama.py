"""Trains a Llama or Mixtral model with DeepSpeed: the script llmlaunch copies into a run directory.

It stands alone: Python >= 3.9, torch, DeepSpeed and Transformers, and nothing of llmlaunch. Started by torchrun:

    torchrun --nproc_per_node 2 train.py --model model.json --data python-source --steps 40 \\
        --sequence-length 256 --learning-rate 1e-3 --deepspeed --deepspeed_config ds_config.json

`model.json` is a Hugging Face configuration. Rank 0 prints one line per log interval:

    step 5/40 | loss 3.1234 | 0.52 s/step | 1969 tokens/s

With --save it saves every --save-interval steps and after the last, and goes on from the last checkpoint when started
again. Told by SIGTERM, it saves after the step that runs, prints `saved step N after SIGTERM` and ends.

Exit code 0 after the last step or after a save it was told to make; anything else is a failure, and a loss that is not
finite is one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import sysconfig
import time
import types
import warnings
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
import torch._dynamo  # Transformers needs it later, and it cannot be imported under zero.Init (torch 2.13)
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Text is held in memory, one byte a token, so that reading it never disturbs a step.
TEXT_BYTES_PER_RANK = 64 * 2**20
PYTHON_SOURCE_BYTES = 8 * 2**20
INITIAL_STANDARD_DEVIATION = 0.02
ADAM_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1

Batches = Callable[[int], torch.Tensor]

# Built by --measure-baseline: large enough to run every kernel once, too small to weigh anything.
TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
}
TINY_SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama or Mixtral model with DeepSpeed.")
    parser.add_argument("--model", type=Path, help="Hugging Face configuration of the model (JSON)")
    parser.add_argument("--data", default="mock", help="mock, python-source, a text file or a folder of them")
    parser.add_argument("--tokenizer", help="Hugging Face tokenizer; without it every byte is a token")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--log-interval", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--offload-checkpoints", action="store_true", help="the inputs it keeps wait in host memory")
    parser.add_argument("--mlp-chunks", type=int, default=1, help="pieces of the sequence an MLP computes in turn")
    parser.add_argument("--loss-tiles", type=int, default=1, help="pieces of the sequence the loss is computed of")
    parser.add_argument("--adapter-rank", type=int, default=0, help="train adapters of this rank, freeze the model")
    parser.add_argument("--frozen-adapter-down", action="store_true", help="freeze their first matrices too (LoRA-FA)")
    parser.add_argument("--trained-layers", type=int, default=0, help="train the last so many layers and the head only")
    parser.add_argument("--save", type=Path, help="folder for checkpoints; training resumes from its latest")
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--measure-baseline", action="store_true", help="print the idle trainer's memory")
    parser.add_argument("--deepspeed", action="store_true", help="accepted for DeepSpeed's own launcher")
    parser.add_argument("--deepspeed_config", "--deepspeed-config", type=Path)
    parsed = parser.parse_args(words)
    if not parsed.measure_baseline and not (parsed.model and parsed.deepspeed_config):
        parser.error("--model and --deepspeed_config are needed")
    return parsed


def join() -> None:
    """Joins the process group torchrun described.

    On a CPU DeepSpeed would first compile its shared-memory all-reduce (about 45 s, needs g++ and ninja). Only
    inference calls that kernel (deepspeed/comm/torch.py, `inference_all_reduce`, 0.19.8), so it is switched off.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(verbose=False)


def leave() -> NoReturn:
    """Ends the process group together, then the process, with success.

    Not through the interpreter's own end: a torch thread that still wants Python while it is taken down aborts the
    process (SIGABRT, "terminate called without an active exception"; about 1 run in 15 on a CPU, torch 2.13).
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def compute_dtype(settings: dict[str, Any]) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if settings.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


def build_model(config: dict[str, Any], settings: dict[str, Any], args: argparse.Namespace) -> torch.nn.Module:
    """The model on its device, with the same initial weights for every ZeRO stage and number of ranks.

    ZeRO 3 splits each module as soon as it is made; the other stages make it whole, in the compute precision.
    """
    split = settings.get("zero_optimization", {}).get("stage", 0) == 3
    device = torch.device(get_accelerator().current_device_name())
    with deepspeed.zero.Init(config_dict_or_path=settings) if split else device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation="sdpa", dtype=compute_dtype(settings)
        )
        choose_trained(model, args)
    generator = torch.Generator(device).manual_seed(args.seed)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=split):
            if not split or dist.get_rank() == 0:
                initialise(name, parameter.data, generator)
    return model


def initialise(name: str, weights: torch.Tensor, generator: torch.Generator) -> None:
    """Biases and the second matrices of adapters 0, norm weights 1, other matrices normal."""
    if name.endswith(("bias", ".adapter_up.weight")):
        weights.zero_()
    elif weights.dim() == 1:
        weights.fill_(1.0)
    else:
        weights.normal_(0.0, INITIAL_STANDARD_DEVIATION, generator=generator)


def adapt(linear: torch.nn.Module, rank: int, frozen_down: bool) -> None:
    """Puts a low-rank pair beside a linear layer (LoRA, Hu et al. 2021; LoRA-FA, Zhang et al. 2023)."""
    alike = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
    linear.adapter_down = torch.nn.Linear(linear.in_features, rank, **alike)
    linear.adapter_up = torch.nn.Linear(rank, linear.out_features, **alike)
    linear.adapter_down.weight.requires_grad = not frozen_down

    def forward(self: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight, self.bias) + self.adapter_up(self.adapter_down(inputs))

    linear.forward = types.MethodType(forward, linear)


def choose_trained(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Freezes what is not trained, and puts an adapter beside every linear layer of the blocks where asked."""
    if args.trained_layers:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[: -args.trained_layers].requires_grad_(False)
    if args.adapter_rank:
        model.requires_grad_(False)
        for module in list(model.model.layers.modules()):
            if isinstance(module, torch.nn.Linear):
                adapt(module, args.adapter_rank, args.frozen_adapter_down)


def recompute_layers(model: torch.nn.Module, settings: dict[str, Any], offload: bool) -> None:
    """Every layer keeps its input alone; with `offload` in host memory, as ds_config says."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Transformers makes the embedding's output need a gradient, and frozen first layers would be kept for nothing.
    model.disable_input_require_grads()
    if offload:
        deepspeed.checkpointing.configure(None, deepspeed_config=settings)
        model._set_gradient_checkpointing(True, deepspeed.checkpointing.non_reentrant_checkpoint)


def chunk_mlps(model: torch.nn.Module, chunks: int) -> None:
    """Each MLP computes pieces of the sequence in turn, keeps its input and computes again in the backward pass
    (mini-sequences, Luo et al. 2024)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def forward(mlp: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return TiledMLP.apply(type(mlp).forward, mlp, inputs, chunks, list(mlp.parameters()))

    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


def tile_loss(model: torch.nn.Module, tiles: int) -> None:
    """Head and loss of one piece of the sequence after the other: only one piece's logits exist. The model is then
    called with targets and returns the loss.

    Not TiledFusedLogitsLoss: it makes the head's gradient before the engine divides the loss by the micro-batches.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    def forward(self: torch.nn.Module, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        def piece(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = self.lm_head(hidden).float().flatten(0, 1)
            return F.cross_entropy(logits, targets.flatten(), reduction="sum")

        summed = sequence_tiled_compute(
            piece,
            seqlen=targets.shape[1],
            shards=tiles,
            kwargs_to_shard={"hidden": self.model(input_ids=input_ids).last_hidden_state, "targets": targets},
            kwargs_to_pass={},
            grad_requiring_tensor_key="hidden",
            compute_params=list(self.lm_head.parameters()),
            output_unshard_dimension=0,
            output_reduction="sum",
        )
        return summed / targets.numel()

    model.forward = types.MethodType(forward, model)
    model.returns_loss = True


def apply_techniques(model: torch.nn.Module, settings: dict[str, Any], args: argparse.Namespace) -> None:
    """What is recomputed, chunked and tiled."""
    if args.gradient_checkpointing:
        recompute_layers(model, settings, args.offload_checkpoints)
    if args.mlp_chunks > 1:
        chunk_mlps(model, args.mlp_chunks)
    if args.loss_tiles > 1:
        tile_loss(model, args.loss_tiles)


def text_files(source: str) -> list[Path]:
    """The files a data source names, in an order that is the same on every node."""
    if source == "python-source":
        library = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        files = [p for p in library.rglob("*.py") if not skip & set(p.relative_to(library).parts)]
    else:
        path = Path(source)
        files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sorted(files)


def read_share(files: list[Path], rank: int, ranks: int, limit_bytes: int) -> bytes:
    """This rank's own part of the text: ranks never see the same byte. `limit_bytes` bounds all of it."""
    ends = list(accumulate(path.stat().st_size for path in files))
    total = min(ends[-1] if ends else 0, limit_bytes)
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    parts = []
    for index, path in enumerate(files):
        begin = ends[index - 1] if index else 0
        start, stop = max(first, begin), min(last, ends[index])
        if start < stop:
            with path.open("rb") as stream:
                stream.seek(start - begin)
                parts.append(stream.read(stop - start))
    return b"".join(parts)


def read_tokens(source: str, tokenizer: str | None, vocabulary: int) -> torch.Tensor:
    """This rank's tokens, one a byte or as the tokenizer says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    limit = PYTHON_SOURCE_BYTES if source == "python-source" else TEXT_BYTES_PER_RANK * ranks
    text = read_share(text_files(source), rank, ranks, limit)
    if tokenizer is None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
        largest = 256
    else:
        words = AutoTokenizer.from_pretrained(tokenizer)
        tokens = torch.tensor(words(text.decode("utf-8", "replace"))["input_ids"], dtype=torch.int32)
        largest = len(words)
    if largest > vocabulary:
        raise SystemExit(f"the data has {largest} different tokens, the model only {vocabulary}: enlarge vocab_size")
    return tokens


def make_batches(args: argparse.Namespace, vocabulary: int, micro_batch_size: int) -> Batches:
    """A function from the number of a micro-batch to this rank's tokens, inputs and targets in one.

    The numbers depend on seed, rank and micro-batch alone, so a resumed run goes on where it stopped.
    """
    rank, length = dist.get_rank(), args.sequence_length + 1

    def generator(number: int) -> torch.Generator:
        return torch.Generator().manual_seed((args.seed * 1_000_003 + rank) * 1_000_003 + number)

    if args.data == "mock":
        return lambda number: torch.randint(0, vocabulary, (micro_batch_size, length), generator=generator(number))
    tokens = read_tokens(args.data, args.tokenizer, vocabulary)
    if len(tokens) < length:
        raise SystemExit(
            f"{args.data}: rank {rank} has {len(tokens)} tokens, a sequence needs {length}: give more text "
            "or a shorter sequence_length"
        )

    def batch(number: int) -> torch.Tensor:
        starts = torch.randint(0, len(tokens) - length + 1, (micro_batch_size,), generator=generator(number))
        return torch.stack([tokens[start : start + length] for start in starts.tolist()]).long()

    return batch


def build_engine(args: argparse.Namespace, config: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The DeepSpeed engine of the model `config` describes, under the ds_config `settings`."""
    model = build_model(config, settings, args)
    model.config.use_cache = False
    apply_techniques(model, settings, args)
    # DeepSpeed casts buffers to the compute precision, and rotary frequencies do not survive bf16.
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.learning_rate, betas=ADAM_BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=settings)
    for name, buffer in engine.module.named_buffers():
        if name in exact:
            buffer.data = exact[name].to(engine.device)
    engine.train()
    return engine


def micro_batch_loss(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, and Mixtral's load-balancing loss where the model has one."""
    if getattr(engine.module, "returns_loss", False):
        return engine(input_ids=tokens[:, :-1], targets=tokens[:, 1:])
    outputs = engine(input_ids=tokens[:, :-1])
    loss = F.cross_entropy(outputs.logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    balance = getattr(outputs, "aux_loss", None)
    if balance is not None:
        loss = loss + engine.module.config.router_aux_loss_coef * balance
    return loss


class Notice:
    """Whether this process was told to save and end. Hearing it again changes nothing."""

    def __init__(self) -> None:
        self.heard = False

    def listen(self) -> None:
        def hear(number: int, frame: object) -> None:
            self.heard = True

        signal.signal(signal.SIGTERM, hear)
        signal.siginterrupt(signal.SIGTERM, False)  # a file that is being written is written on


def train_step(engine: Any, batches: Batches, step: int, notice: Notice) -> tuple[float, bool]:
    """One optimizer step; returns the loss averaged over micro-batches and ranks, and whether any rank was told to end.

    Some ranks hear of the end a step later than others, so they must agree. That costs nothing: it is one more number
    in the all-reduce of the loss.
    """
    micro_batches = engine.gradient_accumulation_steps()
    shared = torch.zeros(2, device=engine.device)
    for index in range(micro_batches):
        tokens = batches(step * micro_batches + index).to(engine.device)
        loss = micro_batch_loss(engine, tokens)
        shared[0] += loss.detach() / micro_batches
        engine.backward(loss)
        engine.step()
    shared[1] = float(notice.heard)
    dist.all_reduce(shared)
    total, told = shared.tolist()
    return total / dist.get_world_size(), told > 0


def set_learning_rate(engine: Any, args: argparse.Namespace, step: int) -> None:
    """Linear warm-up, then constant."""
    share = min(1.0, (step + 1) / (args.warmup_steps + 1))
    for group in engine.optimizer.param_groups:
        group["lr"] = args.learning_rate * share


def save(engine: Any, folder: Path, step: int) -> None:
    """Writes a checkpoint, and names it in `latest` once it is whole.

    Not by DeepSpeed: its rank 0 writes `latest` before the other ranks have written theirs (save_checkpoint,
    runtime/engine.py, 0.19.8), and a power cut between the two leaves no checkpoint that loads.
    """
    report(f"saving step {step}")
    tag = f"step-{step}"
    engine.save_checkpoint(str(folder), tag=tag, client_state={"step": step}, save_latest=False)
    rank = dist.get_rank()
    for pattern in (f"*zero_pp_rank_{rank}_*", *(["mp_rank_*"] if rank == 0 else [])):
        for path in (folder / tag).glob(pattern):
            flush(path)
    dist.barrier()
    if rank == 0:
        fresh = folder / "latest.new"
        fresh.write_text(tag)
        flush(fresh)
        fresh.replace(folder / "latest")
    dist.barrier()


def flush(path: Path) -> None:
    """Returns when the file system has it."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def resume(engine: Any, folder: Path | None) -> int:
    """Loads the checkpoint `latest` names, if there is one; returns the steps already done."""
    if folder is None or not (folder / "latest").exists():
        return 0
    tag = (folder / "latest").read_text().strip()
    refuse_torn(folder, tag, split=engine.zero_optimization())
    _, state = engine.load_checkpoint(str(folder), tag=tag)
    done = int(state["step"])
    report(f"resumed after step {done}")
    return done


def refuse_torn(folder: Path, tag: str, split: bool) -> None:
    """DeepSpeed goes on without optimizer states, and says nothing, where a rank's file is missing."""
    path, ranks = folder / tag, dist.get_world_size()
    states = len(list(path.glob("*zero_pp_rank_*_optim_states.pt")))
    if not path.is_dir():
        wrong = "which is missing"
    elif split and not states:
        wrong = "which holds no optimizer states of ZeRO"
    elif split and states != ranks:
        wrong = f"which holds the optimizer states of {states} ranks; this job has {ranks}"
    else:
        return
    others = ", ".join(sorted(p.name for p in folder.glob("step-*") if p.is_dir() and p != path))
    refuse(
        f"{folder}/latest names {tag}, {wrong}. Write the name of a whole checkpoint into it"
        + (f" (there are {others})" if others else "")
        + ", or move the folder away to begin again at step 1"
    )


def refuse(message: str) -> NoReturn:
    """Ends every rank; one of them says why."""
    raise SystemExit(message if dist.get_rank() == 0 else 1)


def train(args: argparse.Namespace, notice: Notice) -> None:
    settings = json.loads(args.deepspeed_config.read_text(encoding="utf-8"))
    config = json.loads(args.model.read_text(encoding="utf-8"))
    engine = build_engine(args, config, settings)
    batches = make_batches(args, int(config["vocab_size"]), engine.train_micro_batch_size_per_gpu())
    tokens_per_step = engine.train_batch_size() * args.sequence_length
    done = resume(engine, args.save)
    logged, clock = done, time.perf_counter()
    for step in range(done, args.steps):
        set_learning_rate(engine, args, step)
        loss, told = train_step(engine, batches, step, notice)
        if not math.isfinite(loss):
            raise SystemExit(f"step {step + 1}: the loss is {loss}; lower the learning rate or check the data")
        finished = step + 1
        if finished % args.log_interval == 0 or finished == args.steps or told:
            seconds = (time.perf_counter() - clock) / (finished - logged)
            logged, clock = finished, time.perf_counter()
            report(
                f"step {finished}/{args.steps} | loss {loss:.4f} | {seconds:.2f} s/step | "
                f"{tokens_per_step / seconds:.0f} tokens/s"
            )
        began = time.perf_counter()
        if keep(engine, args, finished, told, notice):
            return
        clock += time.perf_counter() - began  # seconds per step are those of training


def keep(engine: Any, args: argparse.Namespace, finished: int, told: bool, notice: Notice) -> bool:
    """Saves where it is time to; returns whether to end because some rank was told to."""
    regular = args.save_interval and finished % args.save_interval == 0
    if args.save and (told or regular or finished == args.steps):
        save(engine, args.save, finished)
        if not told:  # told while it saved: this checkpoint is the one
            heard = torch.tensor(float(notice.heard), device=engine.device)
            dist.all_reduce(heard)
            told = bool(heard > 0)
        report(f"saved step {finished}" + (" after SIGTERM" if told else ""))
    elif told:
        report(f"ended at step {finished} after SIGTERM; without --save nothing is kept")
    return told


def report(line: str) -> None:
    """One line from rank 0, written at once."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def resident_bytes() -> Iterator[tuple[str, int]]:
    """This process's resident memory now and at its highest, from the kernel (Linux)."""
    names = {"VmRSS": "resident_bytes", "VmHWM": "resident_peak_bytes"}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in names:
            yield names[key], int(value.split()[0]) * 1024


def measure_baseline(args: argparse.Namespace) -> None:
    """Prints, as one JSON line, what a trainer holds beside the tensors of its model.

    Torch, DeepSpeed and Transformers load much of themselves only when first used (about 150 MB of 420), so one step
    of a negligible model is taken before reading.
    """
    engine = build_engine(args, TINY_MODEL, TINY_SETTINGS)
    batches = make_batches(argparse.Namespace(**{**vars(args), "data": "mock", "sequence_length": 8}), 256, 1)
    train_step(engine, batches, 0, Notice())
    report(json.dumps({"event": "baseline", "world_size": dist.get_world_size(), **dict(resident_bytes())}))


def main(words: list[str] | None = None) -> NoReturn:
    args = arguments(words)
    notice = Notice()
    notice.listen()
    # DeepSpeed 0.19 calls collectives by names torch 2.13 has renamed: nothing the person who trains can mend
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    torch.manual_seed(args.seed)
    join()
    if args.measure_baseline:
        measure_baseline(args)
    else:
        train(args, notice)
    leave()


if __name__ == "__main__":
    main()
