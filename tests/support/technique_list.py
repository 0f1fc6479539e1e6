"""Every technique a recipe can ask for: its key, the paper, what it saves and costs, and what each backend is told.

docs/backends.md shows the list as a table; tests keep page, recipe keys and rendered flags equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TECHNIQUE_LIST", "Technique"]


@dataclass(frozen=True)
class Technique:
    """`keys` stand in a recipe. `megatron` and `deepspeed` are what is rendered, None where nothing is. `source` is the
    paper, or where none is known the framework."""

    keys: tuple[str, ...]
    source: str
    saves: str
    costs: str
    megatron: str | None
    deepspeed: str | None


TECHNIQUE_LIST: tuple[Technique, ...] = (
    Technique(
        ("layout.recompute: full", "layout.recompute_method", "layout.recompute_layers"),
        "Chen et al. 2016; Korthikanti et al. 2022, section 5",
        "all a layer saves but its input; block: of some layers, uniform: all but one input in each group",
        "up to one more forward pass",
        "`--recompute-granularity full --recompute-method --recompute-num-layers`",
        "`--gradient-checkpointing` of the script (every layer)",
    ),
    Technique(
        ("layout.recompute: selective", "layout.recompute_modules"),
        "Korthikanti et al. 2022, section 5",
        "what the named modules save",
        "their forward pass once more",
        "`--recompute-granularity selective --recompute-modules`",
        None,
    ),
    Technique(
        ("layout.offload_modules",),
        "Megatron core, fine-grained activation offloading",
        "the saved inputs of the named modules",
        "host memory and the link to it",
        "`--fine-grained-activation-offloading --offload-modules`, `NVTE_CPU_OFFLOAD_V1=1`",
        None,
    ),
    Technique(
        ("layout.offload_fraction",),
        "Megatron core, fine-grained activation offloading",
        "that share of what offload_modules would move",
        "less host memory and less to travel than all of it",
        "`--activation-offload-fraction`",
        None,
    ),
    Technique(
        ("layout.offload_layers",),
        "KARMA (Wahib et al. 2020)",
        "all that the first layers save",
        "host memory and the link to it",
        "`--cpu-offloading-num-layers`",
        None,
    ),
    Technique(
        ("layout.offload_checkpoints",),
        "ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1)",
        "the layer inputs full recompute keeps",
        "host memory and the link to it",
        None,
        "`activation_checkpointing.cpu_checkpointing`",
    ),
    Technique(
        ("layout.optimizer_instances",),
        "MiCS (Zhang et al. 2022)",
        "nothing: each group keeps all states of the optimizer",
        "states of more groups; gradients and parameters travel in smaller groups, as in one rack",
        "`--num-distributed-optimizer-instances`",
        None,
    ),
    Technique(
        ("layout.mtp_stage",),
        "Megatron core, pipeline layouts with MTP before the loss",
        "prediction heads on a stage of their own or with other layers: the stage of the loss holds neither",
        "a longer message to the loss; the heads' activations of two or three micro-batches",
        "`--pipeline-model-parallel-layout`",
        None,
    ),
    Technique(
        ("layout.offload_optimizer",),
        "ZeRO-Offload (Ren et al. 2021); M6-10T (Lin et al. 2021)",
        "the share of master weights and moments",
        "host memory, a slower step",
        "`--optimizer-cpu-offload --optimizer-offload-fraction --use-precision-aware-optimizer "
        "--overlap-cpu-optimizer-d2h-h2d`",
        "`zero_optimization.offload_optimizer`, `zero_force_ds_cpu_optimizer: false`",
    ),
    Technique(
        ("layout.offload_parameters",),
        "ZeRO-Infinity; Superpipeline; KARMA; M6-10T",
        "the parameters, but those that run now",
        "host memory, every pass reads them over the link",
        None,
        "`zero_optimization.offload_param`",
    ),
    Technique(
        ("layout.loss", "layout.loss_tiles"),
        "MsT (Luo et al. 2024), LM head",
        "tiled: all logits but one piece's; native saves time alone",
        "tiled: one more pass of the head",
        "`--cross-entropy-loss-fusion --cross-entropy-fusion-impl native`",
        "`--loss-tiles` of the script (`sequence_tiled_compute`)",
    ),
    Technique(
        ("layout.mlp_chunks",),
        "MsT (Luo et al. 2024), MLP",
        "an MLP's temporaries but one piece's; in DeepSpeed also all it saves but its input",
        "smaller matrices; in DeepSpeed the MLP's forward pass once more",
        "`--mlp-chunks-for-training`",
        "`--mlp-chunks` of the script (`TiledMLP`)",
    ),
    Technique(
        ("layout.delay_weight_gradients",),
        "2BP (Rae et al. 2024)",
        "nothing: output gradients wait, the peak rises",
        "memory, for overlapped communication",
        "`--overlap-moe-expert-parallel-comm --delay-wgrad-compute`",
        None,
    ),
    Technique(
        ("layout.token_dispatcher",),
        "Pipeline-MoE (Chen et al. 2023)",
        "with allgather the buffers of the all-to-all",
        "every expert-parallel rank sees all tokens of its group",
        "`--moe-token-dispatcher-type`",
        None,
    ),
    Technique(
        ("layout.flex_backend",),
        "DeepEP (DeepSeek-V3, 2024); HybridEP (NVIDIA)",
        "nothing that is estimated: a token crosses the network once, however many of its experts are there",
        "a library of its own on the nodes, and its buffers, which the estimate does not know",
        "`--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend`",
        None,
    ),
    Technique(
        ("layout.expert_rank_capacity_factor",),
        "Megatron core, HybridEP; Transformer Engine, GroupedMLP",
        "nothing: rows that no token fills are kept, too; experts are one kernel, and the host asks for no sizes",
        "memory of all rows; a step with more tokens than rows is run again",
        "`--moe-expert-rank-capacity-factor --use-transformer-engine-op-fuser --moe-mlp-glu-interleave-size`, "
        "`NVTE_CUTEDSL_FUSED_GROUPED_MLP=1`",
        None,
    ),
    Technique(
        ("layout.paged_stash",),
        "Megatron core, paged_stash.py",
        "of what experts save, the rows that no token fills",
        "copies to pages and back, beside the rest of a layer; a step that fills them is run again",
        "`--moe-paged-stash --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda "
        "--moe-paged-stash-buffer-size-factor-cpu`",
        None,
    ),
    Technique(
        ("layout.overlap_shared_expert",),
        "Megatron core, SharedExpertMLP",
        "nothing: time that is not estimated",
        "the shared expert and the exchange share the device",
        "`--moe-shared-expert-overlap`",
        None,
    ),
    Technique(
        ("layout.overlap_expert_communication",),
        "DeepSeek-V3 (2024), DualPipe",
        "nothing: the exchange hides behind another micro-batch",
        "what about one more layer keeps; the exchange takes a share of the device; no full recompute",
        "`--overlap-moe-expert-parallel-comm`",
        None,
    ),
    Technique(
        ("layout.tp_comm_overlap",),
        "Transformer Engine, user buffers",
        "nothing: gathers and scatters hide behind the products",
        "buffers of ten layer inputs, three workspaces more",
        "`--tp-comm-overlap`",
        None,
    ),
    Technique(
        ("layout.context_comm",),
        "Ring Attention (Liu et al. 2023); DeepSpeed-Ulysses (Jacobs et al. 2023)",
        "nothing: a2a spares the steps of the ring",
        "a2a: the attention's output twice; heads must divide",
        "`--cp-comm-type`",
        None,
    ),
    Technique(
        ("layout.cuda_graphs",),
        "CUDA graphs (NVIDIA, 2019); Megatron core, cuda_graphs.py",
        "the host's launches of what is captured",
        "memory of graphs, which nothing else can use, for every micro-batch in flight",
        "`--cuda-graph-impl --cuda-graph-modules --te-rng-tracker --no-check-for-nan-in-loss-and-grad`, "
        "`NCCL_GRAPH_REGISTER=0`",
        None,
    ),
    Technique(
        ("training.adapters",),
        "LoRA (Hu et al. 2021); LoRA-FA (Zhang et al. 2023)",
        "gradients and states of all but the adapters; LoRA-FA also the inputs of linear layers",
        "what can be learned is of low rank",
        None,
        "`--adapter-rank`, `--adapter-targets`, `--frozen-adapter-down` of the script",
    ),
    Technique(
        ("training.trained_layers",),
        "SHERL (Diao et al. 2024)",
        "gradients, states and activations of the first layers",
        "the first layers stay as they are",
        None,
        "`--trained-layers` of the script",
    ),
    Technique(
        ("training.gradient_dtype",),
        "Megatron core, DistributedDataParallel",
        "bf16: half the gradient buffer",
        "precision of the accumulated gradient",
        "`--grad-reduce-in-bf16`, `--accumulate-allreduce-grads-in-fp32` (fp16)",
        "`data_types.grad_accum_dtype: fp32` (bf16, ZeRO 1 to 3)",
    ),
    Technique(
        ("what_if.swapped_share",),
        "MEMO (Zhao et al. 2025)",
        "all activations but two layers' rounding buffers",
        "the rest is recomputed; auto: as much as the link carries while a layer computes and as host memory holds",
        None,
        None,
    ),
    Technique(
        ("what_if.sampled_share",),
        "WTA-CRS (Liu et al. 2023)",
        "the inputs of linear layers, but the share of their rows",
        "noise in the weight gradient",
        None,
        None,
    ),
    Technique(
        ("what_if.weight_versions",),
        "PipeDream-2BW (Narayanan et al. 2021)",
        "the pipeline's bubble, and the wait for gradients of data parallelism, which travel beside the next batch",
        "4 bytes a parameter for each version more; gradients of weights a step old",
        None,
        None,
    ),
    Technique(
        ("what_if.zero_bubble",),
        "ZB-H1 (Qi et al. 2024); 2BP (Rae et al. 2024)",
        "of the pipeline's bubble twice the weight gradients of the other stages",
        "what weight gradients are made of waits on later stages",
        None,
        None,
    ),
)
