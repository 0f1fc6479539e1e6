"""Trains a model of Transformers with DeepSpeed: the script llmlaunch copies into a run directory, with its modules.

They stand alone: Python >= 3.9, torch, DeepSpeed and Transformers, and nothing of llmlaunch. Started by torchrun:

    torchrun --nproc_per_node 2 train.py --model model.json --data python-source --steps 40 \\
        --sequence-length 256 --learning-rate 1e-3 --deepspeed --deepspeed_config ds_config.json

`model.json` is a Hugging Face configuration. Rank 0 prints one line per log interval:

    step 5/40 | loss 3.1234 | 0.52 s/step | 1969 tokens/s

With --evaluation-interval it works out the loss on validation data, too:

    validation at step 20/40 | validation loss 3.2345 | 0.31 s

With --format the data are rows: conversations, of which the answers are learned, prompts with completions, or texts.
Every learned token of a step counts alike.

With --save it saves every --save-interval steps and after the last, and goes on from the last checkpoint when started
again. Told by SIGTERM, it saves after the step that runs, prints `saved step N after SIGTERM` and ends.

With --keep-best and --patience the lowest loss on validation data decides which checkpoint stays in SAVE/best, and
whether to end early. After the last step --samples prints answers to rows, and --export writes the model as Hugging
Face has it.

With --skip-steps it leaves out the batches of these steps and counts them as done.

With --alone it is rank 0 of so many ranks that do not exist, started by rank_alone.py: it trains a few steps to be
looked at, saves nothing, and fails where it did less than a rank of such a job.

Exit code 0 after the last step or after a save it was told to make; anything else is a failure, and a loss that is not
finite is one.
"""

# ruff: noqa: E402 (the libraries are imported once it is settled how)
from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# Each rank starts three seconds sooner so: its libraries are no garbage to look for, and DeepSpeed's autotuner, which
# no job here uses, would import MLflow wherever it is installed.
gc.disable()
sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]

import torch
import torch._dynamo  # Transformers needs it later, and it cannot be imported under zero.Init (torch 2.13)
import torch.distributed as dist

# Every engine imports DeepSpeed's Muon, which no job here uses: it asks to be compiled when it is called, and for that
# alone half a second of torch's compiler would be imported (runtime/zero/muon/original_muon.py, DeepSpeed 0.19).
compile_function, torch.compile = torch.compile, lambda function: function
with contextlib.suppress(ImportError):  # older releases have none
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
torch.compile = compile_function

from adapters import TARGETS
from alone import check_place, check_work, spare_the_vote
from checkpoints import load, name_checkpoint, resume, save
from data import Batches, make_batches, training_share
from evaluation import OTHER_SEED, Evaluator, add_evaluation, validation_batches
from export import add_export, check_target, export
from group import join, leave, refuse, report
from learning import add_learning, learning_rate
from model import build_engine, describe, micro_batch_loss
from parallel import RankSplit, check_packing, gradient_share, is_mixture, split_of
from rows import JobRows, RowBatches, TokenizedRows, add_rows, open_data
from samples import add_samples, print_samples

gc.freeze()
gc.enable()

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


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Transformers model with DeepSpeed.")
    parser.add_argument("--model", type=Path, help="Hugging Face configuration of the model (JSON)")
    parser.add_argument(
        "--data",
        nargs="+",
        default=["mock"],
        help="mock, python-source, a text file, a folder of them, an indexed dataset, or WEIGHT SOURCE ...; "
        "with --format rows: a file, a folder, or a name on the Hugging Face hub",
    )
    add_rows(parser)
    parser.add_argument("--tokenizer", help="Hugging Face tokenizer; without it every byte is a token")
    parser.add_argument("--weights", type=Path, help="Hugging Face checkpoint folder the model begins with")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence-length", type=int, default=256)
    add_learning(parser)
    add_evaluation(parser)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--log-interval", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--offload-checkpoints", action="store_true", help="the inputs it keeps wait in host memory")
    parser.add_argument("--mlp-chunks", type=int, default=1, help="pieces of the sequence an MLP computes in turn")
    parser.add_argument("--loss-tiles", type=int, default=1, help="pieces of the sequence the loss is computed of")
    parser.add_argument("--adapter-rank", type=int, default=0, help="train adapters of this rank, freeze the model")
    parser.add_argument(
        "--adapter-targets", nargs="+", choices=TARGETS, help="linear layers that have one; without it, all"
    )
    parser.add_argument("--adapter-base", choices=["nf4"], help="frozen linear layers in 4 bits (QLoRA)")
    parser.add_argument("--frozen-adapter-down", action="store_true", help="freeze their first matrices too (LoRA-FA)")
    parser.add_argument("--trained-layers", type=int, default=0, help="train the last so many layers and the head only")
    parser.add_argument("--save", type=Path, help="folder for checkpoints; training resumes from its latest")
    parser.add_argument("--save-interval", type=int, default=0, help="steps between checkpoints")
    add_samples(parser)
    add_export(parser)
    parser.add_argument(
        "--skip-steps",
        type=int,
        nargs="+",
        default=[],
        metavar="STEP",
        help="steps that are not trained, nor their batch",
    )
    parser.add_argument("--alone", type=int, default=0, metavar="RANKS", help="be rank 0 of so many that do not exist")
    parser.add_argument("--measure-baseline", action="store_true", help="print the idle trainer's memory")
    parser.add_argument("--deepspeed", action="store_true", help="accepted for DeepSpeed's own launcher")
    parser.add_argument("--deepspeed_config", "--deepspeed-config", type=Path)
    parsed = parser.parse_args(argv)
    check_together(parser, parsed)
    return parsed


def check_together(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends the process where one argument lacks another that it needs."""
    if not parsed.measure_baseline and not (parsed.model and parsed.deepspeed_config):
        parser.error("--model and --deepspeed_config are needed")
    if parsed.alone and (parsed.save or parsed.weights or parsed.export):
        parser.error("--alone neither saves nor loads: leave out --save, --weights and --export")
    if (parsed.packed or parsed.chat_template) and not parsed.format:
        parser.error("--packed and --chat-template are for rows: name their --format")
    if parsed.samples and parsed.format not in ("chat", "prompt-completion"):
        parser.error("--samples are answers: they need --format chat or prompt-completion")
    if (parsed.patience or parsed.keep_best) and not parsed.evaluation_interval:
        parser.error("--patience and --keep-best judge by evaluations: they need --evaluation-interval")
    if parsed.keep_adapters_apart and not (parsed.export and parsed.adapter_rank):
        parser.error("--keep-adapters-apart is about adapters that are exported: it needs --adapter-rank and --export")
    if parsed.keep_best and not parsed.save:
        parser.error("--keep-best needs --save")
    if parsed.adapter_base and not (parsed.adapter_rank and parsed.weights):
        parser.error("--adapter-base is about weights beneath adapters: it needs --adapter-rank and --weights")


@dataclass(frozen=True)
class StepContext:
    """What is the same for every step. `losses` are those of whole samples that the all-reduce of the loss adds up: a
    rank without peers has its own, or its share of one."""

    seed: int
    split: RankSplit
    gradient_share: float = 1.0
    losses: float = 1.0


class Notice:
    """Whether this process was told to save and end. Hearing it again changes nothing."""

    def __init__(self) -> None:
        self.heard = False

    def listen(self) -> None:
        def hear(number: int, frame: object) -> None:
            self.heard = True

        signal.signal(signal.SIGTERM, hear)
        signal.siginterrupt(signal.SIGTERM, False)  # a file that is being written is written on


def train_step(engine: Any, batches: Batches, step: int, notice: Notice, context: StepContext) -> tuple[float, bool]:
    """One optimizer step; returns the loss averaged over micro-batches and ranks, and whether any rank was told to end.

    Some ranks hear of the end a step later than others, so they must agree. That costs nothing: it is one more number
    in the all-reduce of the loss.
    """
    micro_batches, split = engine.gradient_accumulation_steps(), context.split
    # dropout is the same in a resumed run, and in all ranks of a layer
    torch.manual_seed((context.seed * 1_000_003 + step) * 1_000_003 + split.rank // split.tensor)
    shared = torch.zeros(2, device=engine.device)
    for index in range(micro_batches):
        batch = batches(step * micro_batches + index).to(engine.device)
        loss = micro_batch_loss(engine, batch, split)
        shared[0] += loss.detach() / micro_batches
        engine.backward(loss * context.gradient_share)
        engine.step()
    shared[1] = float(notice.heard)
    dist.all_reduce(shared)
    total, requests = shared.tolist()
    return total / context.losses, requests > 0


def set_learning_rate(engine: Any, args: argparse.Namespace, step: int) -> None:
    rate = learning_rate(args, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def train(args: argparse.Namespace, notice: Notice) -> None:
    settings = json.loads(args.deepspeed_config.read_text(encoding="utf-8"))
    config = json.loads(args.model.read_text(encoding="utf-8"))
    split = split_of(settings, args.sequence_length)
    losses = 1 / split.sequence if args.alone else split.data * split.tensor
    context = StepContext(args.seed, split, gradient_share(settings, split), losses)
    check_target(args)
    if args.packed:
        check_packing(describe(config), split)
    data = open_data(args)
    engine = build_engine(args, config, settings, split)
    if args.alone:
        spare_the_vote(engine)
    batches, evaluator, tokens_of = sources(args, config, data, engine, context)
    state = resume(engine, args.save)
    done = state["step"]
    evaluator.go_on_from(state.get("evaluation", {}))
    if args.keep_best:
        name_best(args.save, evaluator)
    logged, clock, tokens = done, time.perf_counter(), 0
    skipped = frozenset(args.skip_steps)
    for step in range(done, args.steps):
        if evaluator.exhausted:
            break
        if step + 1 in skipped:
            logged, clock, tokens = step + 1, time.perf_counter(), 0
            continue
        set_learning_rate(engine, args, step)
        loss, stop_requested = train_step(engine, batches, step, notice, context)
        if not math.isfinite(loss):
            refuse(f"step {step + 1}: the loss is {loss}; lower the learning rate or check the data")
        finished = step + 1
        tokens += tokens_of(step)
        if finished % args.log_interval == 0 or finished == args.steps or stop_requested:
            passed = time.perf_counter() - clock
            seconds = passed / (finished - logged)
            report(
                f"step {finished}/{args.steps} | loss {loss:.4f} | {seconds:.2f} s/step | "
                f"{tokens / passed:.0f} tokens/s"
            )
            logged, clock, tokens = finished, time.perf_counter(), 0
            write_curves(engine, {"train_loss": loss, "step_seconds": seconds})
        began = time.perf_counter()
        if not stop_requested:
            evaluator.evaluate_if_due(engine, finished)
        if save_if_due(engine, args, finished, stop_requested, notice, evaluator):
            return
        clock += time.perf_counter() - began  # seconds per step are those of training
        done = finished
    if evaluator.exhausted:
        report(f"ended at step {done}: {evaluator.waited} evaluations in a row without a lower validation loss")
    if args.alone:
        check_work(engine, args.steps, split)
    else:
        finish(engine, args, data, done, evaluator, split)


def sources(
    args: argparse.Namespace, config: dict[str, Any], data: JobRows | None, engine: Any, context: StepContext
) -> tuple[Batches, Evaluator, Callable[[int], int]]:
    """Batches to train on, what evaluates on others, and how many tokens a step has."""
    vocabulary, micro_batch_size = int(config["vocab_size"]), engine.train_micro_batch_size_per_gpu()
    micro_batches, split = engine.gradient_accumulation_steps(), context.split
    count = args.evaluation_iterations * micro_batches
    if data is None:
        batches = make_batches(args, vocabulary, micro_batch_size, split, training_share(args.split))
        others = validation_batches(args, vocabulary, micro_batch_size, split)
        each = engine.train_batch_size() * args.sequence_length // (split.data if args.alone else 1)
        return batches, Evaluator(args, others, count, split, context.losses), lambda step: each

    def of(rows: TokenizedRows, together: int, seed: int, once: bool = False) -> RowBatches:
        masked = is_mixture(engine.module.config)  # its routers are to be balanced for tokens, not for padding
        return RowBatches(rows, args, vocabulary, micro_batch_size, split, together, masked, seed, once)

    training, others = of(data.training, micro_batches, args.seed), None
    if args.evaluation_interval:
        assert data.validation is not None
        others = of(data.validation, count, args.seed + OTHER_SEED, once=True)
        count = others.together
    mine = split.data if args.alone else 1
    return training, Evaluator(args, others, count, split, context.losses), lambda step: training.tokens(step) // mine


def finish(
    engine: Any, args: argparse.Namespace, data: JobRows | None, done: int, evaluator: Evaluator, split: RankSplit
) -> None:
    """Answers of the trained model, and the model itself: that of the lowest validation loss where it was kept."""
    if (args.samples or args.export) and args.keep_best and evaluator.best_step not in (0, done):
        load(engine, args.save, f"step-{evaluator.best_step}", "best")
        done = evaluator.best_step
        report(f"took step {done}, which has the lowest validation loss, {evaluator.best:.4f}")
    if args.samples and data is not None:
        print_samples(engine, args, data, split)
    if args.export:
        export(engine, args, done, split)


def name_best(folder: Path, evaluator: Evaluator) -> None:
    """Names the best checkpoint of those that led to the one a job goes on from, if it is still there."""
    if (folder / f"step-{evaluator.best_step}").is_dir():
        name_checkpoint(folder, "best", f"step-{evaluator.best_step}")
        return
    evaluator.best, evaluator.best_step = math.inf, 0
    if dist.get_rank() == 0:
        with contextlib.suppress(FileNotFoundError):
            (folder / "best").unlink()
    dist.barrier()


def write_curves(engine: Any, values: dict[str, float]) -> None:
    """To where ds_config.json sends curves, beside the learning rate, which is all that DeepSpeed 0.19 writes by
    itself (runtime/engine.py step)."""
    if engine.monitor.enabled:
        engine.monitor.write_events(
            [(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()]
        )


def save_if_due(
    engine: Any, args: argparse.Namespace, finished: int, stop_requested: bool, notice: Notice, evaluator: Evaluator
) -> bool:
    """Saves where it is time to; returns whether to end because some rank was told to."""
    regular = args.save_interval and finished % args.save_interval == 0
    best = args.keep_best and evaluator.best_step == finished
    if args.save and (stop_requested or regular or best or evaluator.exhausted or finished == args.steps):
        save(engine, args.save, finished, evaluator.state())
        if best:
            name_checkpoint(args.save, "best", f"step-{finished}")
        if not stop_requested:  # told while it saved: this checkpoint is the one
            heard = torch.tensor(float(notice.heard), device=engine.device)
            dist.all_reduce(heard)
            stop_requested = bool(heard > 0)
        report(f"saved step {finished}" + (" after SIGTERM" if stop_requested else ""))
    elif stop_requested:
        report(f"ended at step {finished} after SIGTERM; without --save nothing is kept")
    return stop_requested


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
    args = argparse.Namespace(**{**vars(args), "data": ["mock"], "sequence_length": 8})
    split = split_of(TINY_SETTINGS, args.sequence_length)
    engine = build_engine(args, TINY_MODEL, TINY_SETTINGS, split)
    train_step(engine, make_batches(args, 256, 1, split), 0, Notice(), StepContext(args.seed, split))
    report(json.dumps({"event": "baseline", "world_size": dist.get_world_size(), **dict(resident_bytes())}))


def main(argv: list[str] | None = None) -> NoReturn:
    args = arguments(argv)
    notice = Notice()
    notice.listen()
    # DeepSpeed 0.19 calls collectives by names torch 2.13 has renamed: nothing the person who trains can mend
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    torch.manual_seed(args.seed)
    join()
    if args.alone:
        check_place(args.alone)
    if args.measure_baseline:
        measure_baseline(args)
    else:
        train(args, notice)
    leave()


if __name__ == "__main__":
    main()
