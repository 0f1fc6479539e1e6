"""What arguments of Hugging Face's Trainer and of the trainers that are made of it do to memory: one subject for each
reason. The first that holds an argument decides. Arguments that are written or read have a row in trainer_table.py; the
others are words of a subject. They were read in transformers 5.23, TRL f2cd577, ms-swift 3602360 (swift/arguments and
swift/megatron/arguments), LLaMA-Factory ff6d4d1 (hparams), open-instruct e6c3044 (finetune.py) and alignment-handbook
925acdf; tests/data/trainer_arguments.json holds their names."""

from __future__ import annotations

from llmlaunch.frameworks.deepspeed.subjects import Subject
from llmlaunch.frameworks.flag_classes import DECIDES, LESS, LESS_OF_STATES, MORE, NEUTRAL, PRICED, UNKNOWN

REPORTS = Subject(
    "logs, reports and names",
    NEUTRAL,
    "written by the host",
    patterns=(
        "logging_* log_* disable_tqdm project trackio_* include_num_input_tokens_seen hub_* push_to_hub "
        "overwrite_output_dir swanlab_* use_swanlab wandb_* tensorboard_* with_tracking plot_loss verbose "
        "print_param_status include_effective_tokens_per_second profiler_* enable_torch_profiler profile_modules "
        "callbacks exp_name hf_entity hf_metadata_dataset hf_repo_* gs_bucket_path oe_eval_* timeout "
        "try_auto_save_to_beaker try_launch_beaker_eval_jobs ray_* lang"
    ),
)
CHECKPOINTS = Subject(
    "checkpoints",
    NEUTRAL,
    "which parts are written, and how many are kept; their copies on the host are counted of the recipe's",
    patterns=(
        "save_* load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint "
        "ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint safe_serialization "
        "max_shard_size add_version create_checkpoint_symlink merge_lora mcore_model resume_only_model use_flash_ckpt "
        "checkpointing_steps clean_checkpoints_at_end keep_last_n_checkpoints do_not_randomize_output_dir early_stop* "
        "no_save_* no_load_* load_args load_data_args"
    ),
)
DATA = Subject(
    "seeds and data",
    NEUTRAL,
    "which tokens are read, and how the host reads them",
    patterns=(
        "data_seed dataloader_* remove_unused_columns label_names train_sampling_strategy length_column_name "
        "group_by_length preprocessing_num_workers dataset_* trust_remote_code low_cpu_mem_usage dataset datasets "
        "val_dataset* eval_dataset* eval_limit eval_metric cached_* columns custom_* streaming stream strict "
        "shuffle_* disable_shuffling interleave_prob* mix_strategy stopping_strategy buffer_size download_mode "
        "disable_auto_column_mapping split_dataset_ratio test_split_size val_size max_samples max_train_samples "
        "overwrite_cache tokenized_path media_dir data_shared_file_system preprocessing_batch_size "
        "load_from_cache_file lazy_tokenize packing_num_proc packing_strategy cache_* train_dataloader_shuffle "
        "data_sharding sortish_sampler id split weight truncation_* padding_side"
    ),
)
SCHEDULE = Subject(
    "numbers of the schedule and the optimizer",
    NEUTRAL,
    "numbers of the optimizer, not its states",
    patterns=(
        "lr_scheduler_* warmup_* adam_* num_train_epochs average_tokens_across_devices tf32 max_epochs final_lr_ratio "
        "clip_grad_norm aligner_lr lorap_lr_ratio loraplus_* max_train_steps sgd_momentum fused_optimizer max_steps "
        "learning_rate vit_lr muon_*"
    ),
)
PROCESSES = Subject(
    "torch's own data parallelism and processes",
    NEUTRAL,
    "DeepSpeed's engine has buckets of its own",
    patterns="ddp_* do_train local_rank torch_empty_cache_steps master_* sync_each_batch enable_npu_model_patch",
)
TEXT = Subject(
    "text and chats",
    NEUTRAL,
    "which tokens a row becomes, and which of them are learned",
    patterns=(
        "template template_backend *chat_template* system default_system agent_template response_prefix *thinking* "
        "use_fast_tokenizer eos_token pad_token pad_to_multiple_of split_special_tokens skip_special_tokens "
        "ignore_pad_token_for_loss train_on_prompt mask_history tool_format norm_bbox loss_scale is_binary_loss_scale "
        "assistant_only_loss completion_only_loss disable_ignore_empty_think model_author new_special_tokens* "
        "add_special_tokens add_tokens init_special_tokens resize_vocab init_strategy"
    ),
)
NAMES = Subject(
    "names of the model and of what is loaded",
    NEUTRAL,
    "the model that was priced is the recipe's",
    patterns=(
        "model model_name_or_path model_name model_type model_revision config_name local_repo_path use_hf check_model "
        "config max_model_len adapter_folder hf_hub_token ms_hub_token om_hub_token external_plugins "
        "ignore_args_error additional_model_arguments adapters mcore_adapter mhc_recompute_layer_num "
        "adapter_name_or_path create_new_adapter skip_megatron_init megatron_pretrained_checkpoint bridge_backend "
        "perform_initialization use_cpu_initialization extra_config train_from_scratch stage rope_scaling"
    ),
)
OF_OTHER_TASKS = Subject(
    "generation, export and other tasks",
    NEUTRAL,
    "no part of a training of this kind",
    patterns=(
        "generation_* temperature top_k top_p top_logprobs logprobs num_beams eval_num_beams repetition_penalty "
        "length_penalty max_new_tokens stop_words do_sample structured_outputs_regex batch_size n_shot task task_dir "
        "infer_* vllm_* sglang_* export_* kt_* kto_* dpo_* ppo_* simpo_gamma ld_alpha pref_bco_weight pref_ftx "
        "pref_loss eval_use_evalscope eval_generation_config extra_eval_args eval_on_each_dataset num_labels "
        "problem_type mrl_dims ds3_gather_for_generation use_kv_cache offload_folder compute_accuracy"
    ),
)
PACKED = Subject(
    "packed rows",
    NEUTRAL,
    "rows that are packed fill whole sequences, which were priced",
    patterns=(
        "packing packing_length padding_free eval_packing neat_packing use_packed_sequences block_diag_attn "
        "mlp_padding_free sample_packing pad_to_sequence_len"
    ),
)
BALANCE = Subject(
    "balance of experts",
    NEUTRAL,
    "one number for each expert",
    patterns="router_aux_loss_coef moe_aux_loss_coef load_balancing_loss load_balancing_weight",
)
OFF = Subject(
    "switched off",
    NEUTRAL,
    "switched off",
    patterns=(
        "skip_memory_metrics=True,true evaluation_strategy=no eval_strategy=no sequence_parallel_size=1 "
        "deepspeed_autotp_size=1 quantization_bit=16 loss_type=nll,causal_lm freeze_llm=False,false "
        "freeze_language_model=False,false tuner_backend=peft tuner_type=full,lora finetuning_type=full "
        "train_type=full sft_type=full task_type=causal_lm"
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
    patterns=(
        "attn_implementation=sdpa,flash_attention_2,flash_attention_3,kernels-community/flash-attn2 "
        "attn_impl=sdpa,flash_attn,flash_attention_2,flash_attention_3,flash_attention_4 flash_attn=auto,sdpa,fa2,fa3 "
        "use_flash_attn=True,true use_flash_attn"
    ),
)
SPARING_KERNELS = Subject(
    "Liger's and Unsloth's kernels",
    UNKNOWN,
    "such kernels keep less for the backward pass than the modules that they replace",
    effect=LESS,
    patterns=(
        "use_liger_kernel=True,true enable_liger_kernel use_liger use_unsloth use_unsloth_gc unsloth_* liger_rope "
        "liger_rms_norm liger_glu_activation liger_swiglu liger_fused_* liger_cross_entropy cut_cross_entropy "
        "chunked_cross_entropy tuner_backend=unsloth activation_offloading use_logits_to_keep use_v1_kernels"
    ),
)
FROZEN = Subject(
    "parameters that are frozen or trained alone",
    UNKNOWN,
    "training of all parameters was priced",
    effect=LESS_OF_STATES,
    patterns="freeze_* trainable_* unfrozen_parameters language_model_only",
)
VISION = Subject(
    "images, sound and the towers that read them",
    UNKNOWN,
    "what they take is not in the formula",
    effect=MORE,
    patterns=(
        "freeze_vit=False,false freeze_aligner=False,false freeze_vision_tower=False,false "
        "freeze_multi_modal_projector=False,false image_* video_* audio_* max_pixels crop_to_patches vit_g* vit_a* "
        "use_audio_in_video"
    ),
)
OTHER_TUNING = Subject(
    "other ways of tuning",
    UNKNOWN,
    "what they train or keep is not in the formula",
    effect=DECIDES,
    patterns=(
        "tuner_type use_dora use_llama_pro mixture_of_depths lisa_* llamapro_* vera_* boft_* oft_* adalora_* "
        "fourier_* reft_* adapter_act adapter_length use_swift_lora rl relora* peft_use_dora module_dropout"
    ),
)
OTHER_ENGINES = Subject(
    "another engine or split",
    UNKNOWN,
    "who holds what is not in the formula",
    effect=DECIDES,
    patterns=(
        "sequence_parallel_size deepspeed_autotp_size device_map max_memory use_mca use_megatron_bridge use_kt "
        "megatron_bridge_args use_hyper_parallel hyper_parallel_* fp8 fp8_* mixed_precision megatron_extra_kwargs "
        "task_type experts_impl fp4_format apply_dsa_kernel_fusion csa_dense_mode use_fused_mhc "
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "virtual_pipeline_model_parallel_size sequence_parallel sequence_packing_scheduler sequence_parallel_degree "
        "dp_shard_size dp_replicate_size tensor_parallel_size"
    ),
)
OF_MEGATRON = Subject(
    "Megatron's arguments",
    NEUTRAL,
    "read by the engines of Megatron alone, which another argument turns on",
    patterns=(
        "account_for_* apply_rope_fusion bias_activation_fusion calculate_per_token_loss cross_entropy_loss_fusion "
        "masked_softmax_fusion moe_token_dispatcher_type moe_grouped_gemm overlap_* recompute_* "
        "use_distributed_optimizer align_* batch_p2p_comm cp_partition_mode manual_gc_* data_parallel_random_init "
        "nccl_comm_warmup"
    ),
)
BATCH = Subject(
    "batch and length",
    UNKNOWN,
    "the batch that was priced is the recipe's",
    key="training.global_batch_size, layout.micro_batch_size, training.sequence_length",
    patterns="auto_find_batch_size max_seq_length max_length block_size model_max_length cutoff_len",
)
PRECISION = Subject(
    "precision",
    UNKNOWN,
    "the formats that were priced are the recipe's",
    key="training.precision",
    patterns="pure_bf16",
)
WEIGHT_FORMAT = Subject(
    "format in which weights are loaded",
    NEUTRAL,
    "DeepSpeed's engine casts the weights to the format of the training (runtime/engine.py "
    "_configure_distributed_model, 0.19.8)",
    patterns="torch_dtype dtype compute_dtype",
)
KIND_OF_RECOMPUTE = Subject(
    "how activations are recomputed",
    NEUTRAL,
    "either kind of torch.utils.checkpoint keeps the input of each layer",
    patterns="gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant use_reentrant_gc",
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
    patterns="activation_checkpointing disable_gradient_checkpointing",
)
ADAPTERS = Subject(
    "adapters",
    UNKNOWN,
    "what is trained is the recipe's",
    key="training.adapters",
    effect=LESS_OF_STATES,
    patterns=(
        "use_peft use_lora lora_* target_modules target_regex target_parameters finetuning_type train_type sft_type "
        "use_rslora modules_to_save additional_target pissa_* init_weights ignore_bias_buffers"
    ),
)
CONFIGURATION = Subject(
    "configuration of DeepSpeed",
    UNKNOWN,
    "ds_config.json is the plan's",
    key="layout",
    effect=DECIDES,
    patterns="deepspeed_config fsdp fsdp_config parallelism_config zero_hpz_partition_size",
)
VALIDATION = Subject(
    "validation",
    UNKNOWN,
    "validation has a memory of its own",
    key="training.evaluation",
    effect=MORE,
    patterns=(
        "eval_on_start eval_do_concat_batches eval_use_gather_object evaluation_strategy do_eval do_predict "
        "predict_with_generate include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval"
    ),
)
KERNELS = Subject(
    "compiled and replaced kernels",
    UNKNOWN,
    "what they keep for the backward pass is not in the formula",
    patterns=(
        "torch_compile torch_compile_* use_liger_kernel liger_kernel_config attn_implementation attn_impl flash_attn "
        "use_cache full_determinism shift_attn tuner_backend model_init_kwargs model_kwargs linear_decoupled_in_proj"
    ),
)
OPTIMIZERS = Subject(
    "other optimizers",
    UNKNOWN,
    "the optimizer's memory is unknown; torch's AdamW is priced",
    effect=DECIDES,
    patterns=(
        "optim optim_* optimizer use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini use_muon "
        "use_lomo use_8bit_optimizer"
    ),
)
MODELS = Subject(
    "further models",
    UNKNOWN,
    "a second model, of reference or reward, is not in the formula",
    effect=DECIDES,
    patterns="ref_model* ref_adapters reward_model* pref_beta",
)
LOSS = Subject(
    "additions to the loss",
    UNKNOWN,
    "tensors of the loss that are not in the formula",
    effect=MORE,
    patterns=(
        "label_smoothing_factor neftune_noise_alpha loss_type use_*_loss enable_dft_loss enable_channel_loss "
        "asft_alpha eaft_alpha acc_strategy upcast_layernorm upcast_lmhead_output mtp_*"
    ),
)
QUANTIZED = Subject(
    "weights in few bits",
    UNKNOWN,
    "quantized weights are not in the formula",
    effect=DECIDES,
    patterns=(
        "load_in_4bit load_in_8bit bnb_4bit_* quantization_* q_lora qlora use_qlora quant_* hqq_axis "
        "double_quantization use_bnb_nested_quant"
    ),
)
DEBUGGING = Subject(
    "debugging and placement",
    UNKNOWN,
    "tensors that are kept or moved otherwise are not in the formula",
    patterns="debug skip_memory_metrics use_cpu accelerator_config",
)

OF_TRAINERS = (VISION, TEXT, NAMES, OF_OTHER_TASKS, PACKED, BALANCE, FROZEN, OTHER_TUNING, OTHER_ENGINES, OF_MEGATRON)
"""Subjects of trainers that are known by name: in any other script such a word may mean anything."""

TRAINER_SUBJECTS = (
    *(OFF, ADAMW, SCORES, FUSED_ATTENTION, SPARING_KERNELS, REPORTS, CHECKPOINTS, DATA, SCHEDULE, PROCESSES),
    *(BATCH, PRECISION, WEIGHT_FORMAT, KIND_OF_RECOMPUTE, VALIDATION_TIMES, RECOMPUTE, ADAPTERS, CONFIGURATION),
    *(VALIDATION, KERNELS, OPTIMIZERS, MODELS, LOSS, QUANTIZED, DEBUGGING, *OF_TRAINERS),
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
