"""How Megatron-LM says what ended it: rows of the table of causes (`causes/kinds.py`), packed in `node.pyz`."""

from __future__ import annotations

from ...causes.pattern import Frame, Pattern

_RANK = r"\bRank \d{1,9}, node \S{1,200}, device \d{1,9}, iteration #\d{1,15}: "
_RERUN = "Megatron-LM core 0.19, megatron/core/rerun_state_machine.py"
_CHECKPOINTING = "Megatron-LM core 0.16 and 0.19, megatron/training/checkpointing.py"

PATTERNS = (
    # --- the rerun state machine: causes.rerun_verdict says what its lines mean
    Pattern(
        "silent_corruption",
        _RANK + r"Possible transient error!",
        _RERUN,
        True,
    ),
    Pattern(
        "silent_corruption",
        _RANK + r"Possible persistent error!",
        f"{_RERUN}; it names the place of the second GPU",
    ),
    Pattern(
        "unexpected_result",
        _RANK + r"Correct result \(but possible Application error\)",
        _RERUN,
    ),
    Pattern(
        "rerun",
        _RANK + r"First rerun: .{0,300}Need to rerun on a different GPU"
        r"|Got rescheduled on the same GPU\. Need to resume again",
        _RERUN,
    ),
    # --- the checkpoint
    Pattern(
        "checkpoint_mismatch",
        r"Global shape mismatch for loaded \((torch\.Size)?\(?(?P<theirs>[^)]{0,300})\)?\) "
        r"and expected \((torch\.Size)?\(?(?P<ours>[^)]{0,300})\)?\) tensor "
        r"for key (?P<of>\S{1,200})",
        "Megatron-LM core 0.19, core/dist_checkpointing/strategies/torch.py",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"\b(?P<of>\w{1,100}) value from checkpoint \((?P<theirs>.{0,300}?)\) is not equal to the "
        r"(?P<argument>input argument) value "
        r"\((?P<ours>.{0,300}?)\)",
        _CHECKPOINTING,
    ),
    Pattern(
        "checkpoint_mismatch",
        r"\((?P<of>TP, PP)\) mismatch after resume \((?P<ours>.{1,100}?) vs (?P<theirs>.{1,100}?) from checkpoint\)"
        r"|Fully parallel load is not supported for dp_zero_gather_scatter checkpoints",
        _CHECKPOINTING,
    ),
    Pattern(
        "checkpoint_mismatch",
        r"(?<!\S)\S{1,200} from model not in state dict: |Exception: (Some keys found in the checkpoint are missing"
        r"|(Unexpected|Missing) keys? \(not found in the (model|checkpoint)\))",
        "Megatron-LM core 0.19, core/dist_checkpointing/validation.py and strategies/torch.py; with "
        "--dist-ckpt-strictness log_all the same words are only logged",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"Unable to load (optimizer|rng state) from checkpoint .{0,300}(--no-load-(optim|rng)|--finetune)",
        f"{_CHECKPOINTING}; SwissArmyTransformer",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"Cannot merge two lists with different lengths",
        "Megatron-LM core 0.19, core/dist_checkpointing/dict_utils.py: the optimizer of another split",
        phase="loading",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"(?P<scheduler>OptimizerParamScheduler|AnnealingLR): class input value (?P<ours>\S{1,100}) and "
        r"checkpoint ?value (?P<theirs>\S{1,100}) for (?P<of>.{1,100}?) do not match",
        "Megatron-LM core 0.19, core/optimizer_param_scheduler.py",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"^KeyError: '?(?P<missing>[^']{0,300})",
        f"{_CHECKPOINTING}: what the loader looks for is not in the file",
        phase="loading",
    ),
    Pattern(
        "checkpoint_load",
        r"FileNotFoundError: .{0,300}(mp_rank_\d{1,20}\S{0,200}/(model_optim_rng|distrib_optim)\.pt|\.distcp\b)",
        f"{_CHECKPOINTING}: a file of another split, or one that is missing",
        phase="loading",
    ),
    Pattern(
        "checkpoint_format",
        r"ShardedTensor\.flattened_range is not supported",
        "Megatron-LM core 0.16 and 0.19, core/dist_checkpointing/mapping.py",
    ),
    Pattern(
        # A folder of another format, or another folder. That a file is missing the job script sees for itself.
        "checkpoint_load",
        r"CheckpointingException: .{0,300} is not a distributed checkpoint"
        r"|NotImplementedError: unknown checkpoint format in"
        r"|A metadata file exists but unable to load iteration",
        "Megatron-LM core 0.19, megatron/training/checkpointing.py, core/dist_checkpointing/validation.py",
    ),
    # --- the data
    Pattern(
        "index_cache",
        r"FileNotFoundError: .{0,300}No such file or directory: '[^']{0,300}(GPTDataset_indices"
        r"|[0-9a-f]+-\w{0,100}Dataset-)[^']{0,300}'",
        "Megatron-LM core 0.19, core/datasets/gpt_dataset.py",
    ),
    # --- the loss
    Pattern(
        "bad_loss",
        r"Unexpected result .{0,300}found (NaN|Inf) in local (forward loss|grad norm)",
        "Megatron-LM core 0.16 to 0.19, core/rerun_state_machine.py, core/distributed/param_and_grad_buffer.py and "
        "pretrain_gpt.py",
    ),
    # --- the arguments
    Pattern("bad_arguments", r"^Megatron-LM refuses its arguments: ", "llmlaunch, trainers/megatron_check.py"),
    Pattern(
        "bad_arguments",
        r"number of contiguous micro-batches in a virtual pipeline stage ?should range in"
        r"|number of microbatches .{0,300}(is not|must be) divisible by",
        "Megatron-LM core 0.16 to 0.19, core/pipeline_parallel/schedules.py",
    ),
    Pattern(
        "bad_arguments",
        r"Error: (decoder |encoder )?world_size \(\d{1,20}\) is not divisible by "
        r"|First dimension of the tensor should be divisible by tensor parallel size"
        r"|Error: num_layers should be divisible by ",
        "Megatron-LM core 0.9 to 0.19, core/parallel_state.py, core/tensor_parallel/mappings.py and "
        "core/transformer/transformer_block.py",
    ),
)

FRAMES = (
    Frame(
        "arguments",
        r'\s+File "[^"]*megatron/(core/(transformer/transformer|model_parallel)_config|bridge/training/config)\.py", '
        r"line \d+, in (__post_init__|finalize|validate)$",
        "Megatron-LM core 0.19, core/transformer/transformer_config.py; Megatron-Bridge 0.6, training/config.py",
        cause="bad_arguments",
    ),
    Frame(
        "loading",
        r'\s+File "[^"]*megatron/(bridge/)?training/checkpointing\.py", line \d+, in (load_checkpoint|_load_\w+)$',
        _CHECKPOINTING,
        cause="checkpoint_load",
    ),
    Frame(
        "arguments",
        r'\s+File "[^"]*megatron/training/arguments\.py", line \d+, in '
        r"(validate_args|core_transformer_config_from_args)$",
        "Megatron-LM core 0.16 and 0.19, megatron/training/arguments.py",
        cause="bad_arguments",
    ),
    Frame(
        "offload",
        r'\s+File "[^"]*megatron/core/optimizer/cpu_offloading/\w+\.py", line \d+, in ',
        "Megatron-LM core 0.19, core/optimizer/cpu_offloading",
    ),
)
