"""Data, tokenizer and checkpoints."""

from __future__ import annotations

from typing import Any, get_args

from llmlaunch.frameworks.argument import blend_words
from llmlaunch.frameworks.megatron.flags.row import PARSED, Explained, Flag, PlannedJob, Space, alias, chosen, flag
from llmlaunch.frameworks.megatron.flags.training import evaluates, is_weight
from llmlaunch.frameworks.megatron.parser import core_parser
from llmlaunch.frameworks.megatron.sharding import FIRST_STAGE
from llmlaunch.frameworks.resharding import RESHARDING_FLAG, saved_by_parameter
from llmlaunch.recipe.datasets import SHARES, WITHOUT_MODEL, TokenizerType

CHECKPOINT = "checkpoint"  # the section of Bridge
NUMBERS, HUGGING_FACE = "NullTokenizer", "HuggingFaceTokenizer"
MASK_BYTES_TOLD = 2**28  # of one sequence: 16,384 tokens


def _masks(space: Space) -> object:
    """Return that the loader makes attention masks, where they are large enough to matter: rendering spares smaller
    ones."""
    length = space.get("seq_length") or 0
    made = space.get("create_attention_mask_in_dataloader") and not space.get("dataloader_inter_document_masking")
    return True if made and length**2 >= MASK_BYTES_TOLD else None


def _from_files(job: PlannedJob) -> bool:
    return not job.recipe.data.mock


def _training_files(job: PlannedJob) -> object:
    data = job.recipe.data
    return Explained(tuple(blend_words(data.blend)), ("data.blend",)) if data.blend else data.path


def _read_blend(prefixes: list[str]) -> dict[str, Any]:
    """One dataset, or several with their weights before them (get_blend_from_list, core/datasets/utils.py, core 0.19);
    without weights each counts the same."""
    if len(prefixes) == 1:
        return {"path": prefixes[0]}
    pairs = list(zip(prefixes[::2], prefixes[1::2], strict=False))
    if len(prefixes) % 2 == 0 and all(is_weight(weight) for weight, _ in pairs):
        parts = [{"path": path, "weight": float(weight)} for weight, path in pairs]
    else:
        parts = [{"path": path, "weight": 1.0} for path in prefixes]
    return {"blend": parts} if len(parts) > 1 else {"path": parts[0]["path"]}


def _source(key: str) -> Any:
    def read(space: Space) -> object:
        prefixes = [str(word) for word in space.get("data_path") or space.get("train_data_path") or ()]
        return _read_blend(prefixes).get(key) if prefixes and not space.get("mock_data") else None

    return read


def _validation(space: Space) -> object:
    prefixes = [str(word) for word in space.get("valid_data_path") or ()]
    if not prefixes or space.get("mock_data") or not evaluates(space):
        return None
    source = _read_blend(prefixes)
    return source.get("path") or source["blend"]


def _read_split(space: Space) -> object:
    split = str(space.get("split") or "")
    shares = f"{split},0" if split.count(",") == 1 else split
    whole = space.get("mock_data") or space.get("train_data_path") or not SHARES.fullmatch(shares)
    return None if whole else shares


ONE_BLEND, KEPT_APART = "a recipe names one blend and its split", "a hundredth is kept apart"

# Validation data of its own excludes --data-path and --split (BlendedMegatronDatasetConfig,
# core/datasets/blended_megatron_dataset_config.py, core 0.19).
DATA_ROWS: tuple[Flag, ...] = (
    flag(
        "--no-create-attention-mask-in-dataloader",
        (),
        (("dataset.create_attention_mask", False), ("dataset.skip_getting_attention_mask_from_dataset", True)),
        write=lambda job: not job.recipe.data.attention_masks,
        reads={"data.attention_masks": _masks},
        why="fused attention is causal by itself; masks would take sequence x sequence bytes of every sample",
        added="fused attention is causal by itself",
        subject="attention masks",
    ),
    flag("--mock-data", "data.mock", (("dataset.kind", "mock"),), decides=True),
    flag(
        "--train-data-path",
        "data.path",
        (("dataset.kind", "indexed"), ("dataset.train_data_path", PARSED)),
        write=_training_files,
        when=lambda job: _from_files(job) and bool(job.recipe.data.validation),
        reads={},
        decides=True,
        unread=ONE_BLEND,
    ),
    flag(
        "--data-path",
        "data.path",
        (("dataset.kind", "indexed"), ("dataset.data_path", PARSED)),
        write=_training_files,
        when=lambda job: _from_files(job) and not job.recipe.data.validation,
        reads={"data.path": _source("path"), "data.blend": _source("blend")},
        decides=True,
    ),
    flag(
        "--valid-data-path",
        "data.validation",
        (("dataset.valid_data_path", PARSED),),
        write=lambda job: tuple(blend_words(job.recipe.data.validation)) if job.recipe.data.validation else None,
        when=_from_files,
        read=_validation,
        decides=True,
        unread=ONE_BLEND,
    ),
    flag(
        "--split",
        "data.split",
        (("dataset.split", PARSED),),
        write=lambda job: Explained(job.recipe.data.shares, why=None if job.recipe.data.split else KEPT_APART),
        when=lambda job: _from_files(job) and not job.recipe.data.validation,
        read=_read_split,
        added=KEPT_APART,
    ),
    flag(
        "--data-cache-path",
        "data.cache_path",
        (("dataset.path_to_cache", PARSED),),
        when=_from_files,
        read=lambda space: None if space.get("mock_data") else space.get("data_cache_path") or None,
    ),
    alias("--data-args-path", "data.blend", decides="data.blend", unread="a recipe names the datasets themselves"),
    alias("--per-split-data-args-path", "data.validation", decides="data.validation"),
    Flag("--test-data-path", (), unread=ONE_BLEND),
)


def _tokenizer(job: PlannedJob) -> str:
    data = job.recipe.data
    return data.tokenizer_type or (HUGGING_FACE if data.tokenizer else NUMBERS)


def _tokenizer_type(job: PlannedJob) -> object:
    kind = _tokenizer(job)
    return Explained(kind, why="tokens are numbers already" if kind == NUMBERS else "")


def _of_numbers(job: PlannedJob) -> bool:
    return _tokenizer(job) == NUMBERS


def _read_tokenizer_type(space: Space) -> object:
    kind, name = space.get("tokenizer_type"), space.get("tokenizer_model")
    if space.get("mock_data"):
        return None
    if kind in WITHOUT_MODEL:
        return kind if kind != NUMBERS else None
    return kind if kind in get_args(TokenizerType) and name and kind != HUGGING_FACE else None


def _read_tokenizer(space: Space) -> object:
    kind, name = space.get("tokenizer_type"), space.get("tokenizer_model")
    named = kind not in WITHOUT_MODEL and kind in get_args(TokenizerType) and not space.get("mock_data")
    return name if named and name else None


# Megatron makes as many rows of the embedding as the tokenizer has words, padded (build_tokenizer,
# core/tokenizers/utils/build_tokenizer.py, core 0.19), unless it is told: the plan's are said.
TOKENIZER_ROWS: tuple[Flag, ...] = (
    flag(
        "--tokenizer-type",
        ("data.tokenizer", "data.tokenizer_type"),
        "tokenizer",
        write=_tokenizer_type,
        reads={"data.tokenizer_type": _read_tokenizer_type},
        added="tokens are numbers already",
        unread="tokens are numbers where no tokenizer of the recipe reads them; model.vocab_size says how many",
        subject="tokenizer",
    ),
    flag(
        "--vocab-size",
        "model.vocab_size",
        (("tokenizer.vocab_size", PARSED),),
        when=_of_numbers,
        reads={},
        subject="shape of the model",
    ),
    flag(
        "--tokenizer-model",
        "data.tokenizer",
        "tokenizer",
        when=lambda job: not _of_numbers(job),
        read=_read_tokenizer,
        unread="made-up data has no tokenizer; model.vocab_size says how many tokens there are",
        subject="tokenizer",
    ),
    flag(
        "--padded-vocab-size",
        ("model.vocab_size", "layout.tensor"),
        (),
        write=lambda job: job.shape.padded_vocab_size(job.layout.tensor),
        when=lambda job: not _of_numbers(job),
        reads={},
        why="the plan's number, whatever the tokenizer counts",
        subject="shape of the model",
    ),
    alias("--vocab-file", "model.vocab_size", subject="tokenizer"),
)


def _saves(job: PlannedJob) -> bool:
    return job.training.checkpoint_path is not None and job.training.save_interval is not None


def _saved(space: Space) -> bool:
    return bool(space.get("save") and space.get("save_interval"))


def _ckpt_format(job: PlannedJob) -> object:
    """Megatron-FSDP takes no other format than its own, checkpoints or not."""
    if job.layout.zero_stage >= FIRST_STAGE:
        return Explained("fsdp_dtensor", ("layout.zero_stage",), "Megatron-FSDP takes no other")
    if job.training.checkpoint_path is None:
        return None
    requested = job.training.checkpoint_format
    return requested or Explained("torch_dist", why="loaded under another split, too")


def _read_format(space: Space) -> object:
    kind = space.get("ckpt_format")
    whole = kind == "torch" and not space.get("use_distributed_optimizer")
    sharded = kind == "fsdp_dtensor" and not space.get("use_megatron_fsdp")
    return kind if _saved(space) and (whole or sharded) else None


def _often(job: PlannedJob) -> object:
    return job.training.non_persistent_save_interval if _saves(job) else None


def _read_often(space: Space) -> object:
    often = space.get("non_persistent_save_interval")
    wide = space.get("non_persistent_ckpt_type") == "global" and space.get("ckpt_format") == "torch_dist"
    return often if _saved(space) and often and often < space["save_interval"] and wide else None


def _asynchronous(job: PlannedJob) -> bool:
    return _saves(job) and job.training.async_save


def _read_asynchronous(space: Space) -> object:
    worker = space.get("use_persistent_ckpt_worker") and space.get("async_strategy") in (None, "mcore")
    return True if _saved(space) and space.get("async_save") and worker else None


def _start(space: Space) -> object:
    load, save = space.get("load"), space.get("save")
    return space.get("pretrained_checkpoint") or (load if space.get("finetune") and load != save else None) or None


def _reshards(job: PlannedJob) -> bool:
    requested = RESHARDING_FLAG in job.recipe.backend.extra_args
    return _saves(job) and job.layout.zero_stage == 1 and saved_by_parameter(job.recipe, job.layout) and not requested


PATH, INTERVAL, OFTEN = "training.checkpoint_path", "training.save_interval", "training.non_persistent_save_interval"
START, ASYNC = "training.start_from", "training.async_save"

# --pretrained-checkpoint is read only where --load has no checkpoint yet (load_checkpoint, training/checkpointing.py,
# core 0.19), without optimizer and from step 0, so a job that comes back goes on from its own; without --load it is
# always read. Where it holds no checkpoint, Megatron ends with an error.
#
# Told by SIGTERM (--exit-signal's default), Megatron saves after the step and exits with 0; workers of its data loader
# then ignore that signal, too (training/datasets/data_samplers.py, core 0.16 on). Where --load is empty, it begins at
# step 0.
#
# Core switches --async-save off, with a warning alone, where there is no persistent worker (arguments.py validate_args,
# core 0.16 and 0.19). Core 0.19 takes nvidia-resiliency-ext for it unless --async-strategy says mcore
# (get_async_strategy, core/dist_checkpointing/strategies/torch.py), which core 0.16 always takes.
CHECKPOINT_FLAGS: tuple[Flag, ...] = (
    flag(
        "--pretrained-checkpoint",
        START,
        CHECKPOINT,
        read=_start,
        why="read by the first start alone: where --load has a checkpoint, that one wins",
        decides=True,
    ),
    flag(
        "--ckpt-format",
        "training.checkpoint_format",
        CHECKPOINT,
        write=_ckpt_format,
        read=_read_format,
        added="the format that any other layout can load",
    ),
    flag("--save", PATH, CHECKPOINT, when=_saves, read=lambda space: space["save"] if _saved(space) else None),
    flag(
        "--load",
        PATH,
        CHECKPOINT,
        when=_saves,
        reads={},
        why="a job that comes back goes on from its last checkpoint",
        added=True,
        unread="a job goes on from where it saves; training.start_from names other weights to begin with",
    ),
    flag(
        "--save-interval",
        INTERVAL,
        CHECKPOINT,
        when=_saves,
        read=lambda space: space["save_interval"] if _saved(space) else None,
    ),
    chosen(
        "--exit-signal-handler",
        bridge="train",
        keys="restart",
        why="saves and ends when it is told to",
        when=_saves,
        added=True,
        subject="end of the job and of its waiting",
    ),
    flag(
        "--non-persistent-save-interval",
        OFTEN,
        write=_often,
        read=_read_often,
        subject="checkpoints of which the newest alone stays",
        bridge=None,
    ),
    chosen(
        "--non-persistent-ckpt-type",
        "global",
        keys=OFTEN,
        why="in the checkpoint folder, for every node",
        when=lambda job: _often(job) is not None,
        subject="checkpoints of which the newest alone stays",
        bridge=None,
    ),
    flag(
        "--async-save",
        ASYNC,
        CHECKPOINT,
        write=_asynchronous,
        read=_read_asynchronous,
        subject="checkpoints written beside the training",
    ),
    chosen(
        "--use-persistent-ckpt-worker",
        bridge=CHECKPOINT,
        keys=ASYNC,
        why="without it --async-save is switched off",
        when=_asynchronous,
        subject="checkpoints written beside the training",
    ),
    chosen(
        "--async-strategy",
        "mcore",
        CHECKPOINT,
        keys=ASYNC,
        why="the other needs nvidia-resiliency-ext",
        when=lambda job: _asynchronous(job) and "--async-strategy" in core_parser(job.version).flags,
        subject="checkpoints written beside the training",
    ),
    chosen(
        RESHARDING_FLAG,
        bridge=((f"{CHECKPOINT}.dist_ckpt_optim_fully_reshardable", True),),
        keys=("on_oom", "nodes.at_least"),
        why="another layout may have to load it",
        when=_reshards,
        added="another layout may have to load the checkpoint",
        subject="names and contents of checkpoints",
    ),
    alias("--finetune", START, decides=START, unread="training.start_from begins with weights of another training"),
    Flag(
        "--use-checkpoint-args",
        (),
        unread="the sizes stand in a checkpoint; write them as arguments, or as keys of the recipe",
        subject="how checkpoints are written",
    ),
)

DATA_FLAGS: tuple[Flag, ...] = (*DATA_ROWS, *TOKENIZER_ROWS)
