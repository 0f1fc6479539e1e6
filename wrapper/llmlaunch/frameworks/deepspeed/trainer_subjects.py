"""What arguments of Hugging Face's Trainer, of its example scripts and of TRL do to memory (5.23 of transformers,
training_args.py): one subject for each reason. The first that holds an argument decides. Arguments that are written or
read have a row in trainer_table.py; the others are words of a subject."""

from __future__ import annotations

from llmlaunch.frameworks.deepspeed.subjects import Subject
from llmlaunch.frameworks.flag_classes import DECIDES, LESS, LESS_OF_STATES, MORE, NEUTRAL, PRICED, UNKNOWN

REPORTS = Subject(
    "logs, reports and names",
    NEUTRAL,
    "written by the host",
    patterns=(
        "logging_* log_* disable_tqdm project trackio_* include_num_input_tokens_seen hub_* push_to_hub "
        "overwrite_output_dir"
    ),
)
CHECKPOINTS = Subject(
    "checkpoints",
    NEUTRAL,
    "which parts are written, and how many are kept; their copies on the host are counted of the recipe's",
    patterns=(
        "save_* load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint "
        "ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint"
    ),
)
DATA = Subject(
    "seeds and data",
    NEUTRAL,
    "which tokens are read, and how the host reads them",
    patterns=(
        "data_seed dataloader_* remove_unused_columns label_names train_sampling_strategy length_column_name "
        "group_by_length preprocessing_num_workers dataset_num_proc trust_remote_code low_cpu_mem_usage"
    ),
)
SCHEDULE = Subject(
    "numbers of the schedule and the optimizer",
    NEUTRAL,
    "numbers of the optimizer, not its states",
    patterns="lr_scheduler_* warmup_* adam_* num_train_epochs average_tokens_across_devices tf32",
)
PROCESSES = Subject(
    "torch's own data parallelism and processes",
    NEUTRAL,
    "DeepSpeed's engine has buckets of its own",
    patterns="ddp_* do_train local_rank torch_empty_cache_steps",
)
OFF = Subject(
    "switched off",
    NEUTRAL,
    "switched off",
    patterns=(
        "torch_compile=False,false use_liger_kernel=False,false auto_find_batch_size=False,false "
        "activation_checkpointing=False,false use_cache=False,false skip_memory_metrics=True,true "
        "full_determinism=False,false do_eval=False,false do_predict=False,false evaluation_strategy=no "
        "eval_on_start=False,false use_peft=False,false use_galore=False,false use_apollo=False,false "
        "use_badam=False,false use_adam_mini=False,false use_muon=False,false q_lora=False,false "
        "qlora=False,false use_qlora=False,false use_liger=False,false enable_liger_kernel=False,false "
        "use_unsloth=False,false load_in_4bit=False,false load_in_8bit=False,false bf16_full_eval=False,false "
        "fp16_full_eval=False,false"
    ),
)
ADAMW = Subject(
    "AdamW of torch",
    PRICED,
    "its step is counted fused or not",
    patterns=(
        "optim=adamw_torch,adamw_torch_fused,adamw,AdamW,adam,Adam "
        "optimizer=adamw_torch,adamw_torch_fused,adamw,AdamW,adam,Adam"
    ),
)
SCORES = Subject(
    "scores of attention",
    PRICED,
    "eager attention keeps its scores for the backward pass",
    patterns="attn_implementation=eager",
)
FUSED_ATTENTION = Subject(
    "fused attention",
    NEUTRAL,
    "keeps no scores",
    patterns="attn_implementation=sdpa,flash_attention_2,flash_attention_3",
)
SPARING_KERNELS = Subject(
    "Liger's and Unsloth's kernels",
    UNKNOWN,
    "such kernels keep less for the backward pass than the modules that they replace",
    effect=LESS,
    patterns="use_liger_kernel=True,true enable_liger_kernel=True,true use_liger=True,true use_unsloth=True,true",
)
BATCH = Subject(
    "batch and length",
    UNKNOWN,
    "the batch that was priced is the recipe's",
    key="training.global_batch_size, layout.micro_batch_size, training.sequence_length",
    patterns="auto_find_batch_size max_seq_length max_length block_size model_max_length",
)
PRECISION = Subject("precision", UNKNOWN, "the formats that were priced are the recipe's", key="training.precision")
WEIGHT_FORMAT = Subject(
    "format in which weights are loaded",
    NEUTRAL,
    "DeepSpeed's engine casts the weights to the format of the training (runtime/engine.py "
    "_configure_distributed_model, 0.19.8)",
    patterns="torch_dtype dtype",
)
KIND_OF_RECOMPUTE = Subject(
    "how activations are recomputed",
    NEUTRAL,
    "either kind of torch.utils.checkpoint keeps the input of each layer",
    patterns="gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant",
)
VALIDATION_TIMES = Subject(
    "when it validates",
    NEUTRAL,
    "how often, not with what",
    patterns="eval_delay eval_accumulation_steps prediction_loss_only",
)
RECOMPUTE = Subject(
    "recomputed activations",
    UNKNOWN,
    "what is recomputed is the plan's",
    key="layout.recompute",
    effect=LESS,
    patterns="activation_checkpointing",
)
ADAPTERS = Subject(
    "adapters",
    UNKNOWN,
    "what is trained is the recipe's",
    key="training.adapters",
    effect=LESS_OF_STATES,
    patterns="use_peft lora_*",
)
CONFIGURATION = Subject(
    "configuration of DeepSpeed",
    UNKNOWN,
    "ds_config.json is the plan's",
    key="layout",
    effect=DECIDES,
    patterns="deepspeed_config fsdp fsdp_config parallelism_config",
)
VALIDATION = Subject(
    "validation",
    UNKNOWN,
    "validation has a memory of its own",
    key="training.evaluation",
    effect=MORE,
    patterns=(
        "eval_on_start eval_do_concat_batches eval_use_gather_object evaluation_strategy do_eval do_predict "
        "include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval"
    ),
)
KERNELS = Subject(
    "compiled and replaced kernels",
    UNKNOWN,
    "what they keep for the backward pass is not in the formula",
    patterns=(
        "torch_compile torch_compile_* use_liger_kernel liger_kernel_config attn_implementation use_cache "
        "full_determinism"
    ),
)
OPTIMIZERS = Subject(
    "other optimizers",
    UNKNOWN,
    "the optimizer's memory is unknown; torch's AdamW is priced",
    effect=DECIDES,
    patterns=(
        "optim optim_* optimizer use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini "
        "use_muon use_lomo"
    ),
)
MODELS = Subject(
    "further models",
    UNKNOWN,
    "a second model, of reference or reward, is not in the formula",
    effect=DECIDES,
    patterns="ref_model* reward_model* pref_beta",
)
LOSS = Subject(
    "additions to the loss",
    UNKNOWN,
    "tensors of the loss that are not in the formula",
    effect=MORE,
    patterns="label_smoothing_factor neftune_noise_alpha",
)
QUANTIZED = Subject(
    "weights in few bits",
    UNKNOWN,
    "quantized weights are not in the formula",
    effect=LESS_OF_STATES,
    patterns="load_in_4bit load_in_8bit bnb_4bit_* quantization_bit quantization_method q_lora qlora use_qlora",
)
DEBUGGING = Subject(
    "debugging and placement",
    UNKNOWN,
    "tensors that are kept or moved otherwise are not in the formula",
    patterns="debug skip_memory_metrics use_cpu accelerator_config",
)

TRAINER_SUBJECTS = (
    *(REPORTS, CHECKPOINTS, DATA, SCHEDULE, PROCESSES, OFF, ADAMW, SCORES, FUSED_ATTENTION, SPARING_KERNELS),
    *(BATCH, PRECISION, WEIGHT_FORMAT, KIND_OF_RECOMPUTE, VALIDATION_TIMES, RECOMPUTE, ADAPTERS, CONFIGURATION),
    *(VALIDATION, KERNELS, OPTIMIZERS, MODELS, LOSS, QUANTIZED, DEBUGGING),
)

SHIPPED_SUBJECTS = (  # of llmlaunch/trainers/deepspeed/train.py
    Subject(
        "how it trains",
        UNKNOWN,
        "the trainer takes it from the recipe",
        key="model, training or data",
        patterns=(
            "split steps sequence_length learning_rate* minimum_learning_rate warmup_steps weight_decay adam_betas "
            "seed log_interval model data tokenizer weights save save_interval"
        ),
    ),
    Subject(
        "techniques",
        UNKNOWN,
        "what is recomputed, offloaded or tiled is the plan's",
        key="layout or training",
        patterns=(
            "gradient_checkpointing offload_checkpoints mlp_chunks loss_tiles adapter_rank adapter_targets "
            "frozen_adapter_down trained_layers"
        ),
    ),
    Subject(
        "validation of the shipped trainer",
        UNKNOWN,
        "validation has a memory of its own",
        key="training.evaluation, data.validation",
        patterns="evaluation_* validation*",
    ),
    Subject(
        "for llmlaunch itself",
        UNKNOWN,
        "the trainer then trains otherwise",
        patterns="alone measure_baseline deepspeed deepspeed_config skip_steps",
    ),
)
