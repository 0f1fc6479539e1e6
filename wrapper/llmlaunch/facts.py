"""What a backend tells the estimator: bytes per element, what is sharded over whom, which tensors are saved."""

from __future__ import annotations

import math

from llmlaunch.frozen import frozen

ByStage = tuple[float, float, float, float]  # by ZeRO stage 0, 1, 2, 3
ByPass = tuple[float, float]  # forward and backward
NONE: ByStage = (0.0, 0.0, 0.0, 0.0)
DEFAULT_GROUPS = ("tensor", "pipeline", "context", "data", "expert", "data_and_context")


@frozen
class Quantized:
    """Linear layers that multiply in a narrower format: bytes per element of the input they save, and per weight of
    the narrow copies they keep, scales included. With `replaces_parameters` there is no wider compute copy beside them
    (Megatron `--fp8-param-gather`). `cast_bytes` are what is read and written for each element that is cast, the reads
    that find its scale among them; with `block_scaled`, products read a scale for every block of elements."""

    input_bytes: float
    weight_copy_bytes: float
    replaces_parameters: bool = False
    cast_bytes: float = 4.0
    block_scaled: bool = False


@frozen
class LayerKernels:
    """Kernels that the host launches for one dense layer, and elements that its element-wise kernels read and write for
    each token, forward and backward: for each norm and for the residual stream around the norms per hidden element, for
    rotary positions per element of queries and keys, for the activation per column of the MLP beyond what a fused
    kernel moves, and for adapters per element of their linear layer's input and output. The defaults are Transformer
    Engine's layers, counted in a profile: norms, projections, rotary positions, attention, activation and collectives
    are a kernel or two each."""

    launched: ByPass = (20.0, 40.0)
    adapter: ByPass = (4.0, 6.0)  # launched for each linear layer that has an adapter beside it
    adapter_input_elements: ByPass = (0.0, 1.0)
    adapter_output_elements: ByPass = (5.0, 3.0)
    norm_elements: ByPass = (2.0, 2.0)
    stream_elements: ByPass = (6.0, 6.0)
    rotary_elements: ByPass = (2.0, 2.0)
    activation_elements: ByPass = (0.0, 0.0)
    # modules of a layer whose parameters hooks gather and free one by one under ZeRO 3, and of each adapter
    gathered_modules: float = 0.0
    gathered_adapter_modules: float = 0.0


@frozen
class HostFacts:
    """What one process keeps in host memory. Of offloaded tensors, `pinned` is the part in page-locked blocks.

    `optimizer_bytes` and `optimizer_pinned_bytes` are per parameter whose states are offloaded, by ZeRO stage: masters,
    moments, gradients and copies in flight. A checkpoint stages either all of a rank's share at once
    (`checkpoint_bytes`, per parameter of that share), or one tensor after the other, the largest of which are the
    rank's flat parameters and states (`checkpoint_parameter_bytes`, `checkpoint_state_bytes`).
    """

    process_bytes: float = 0.0  # resident set of a trainer, its libraries and what the accelerator's driver maps
    optimizer_bytes: ByStage = NONE
    optimizer_pinned_bytes: ByStage = NONE
    optimizer_flat: bool = True  # one tensor for all of the rank's parameters, else one for each
    parameter_bytes: float = 0.0  # per offloaded parameter
    activations_pinned: bool = False
    checkpoint_bytes: float = 0.0
    checkpoint_parameter_bytes: float = 0.0
    checkpoint_state_bytes: float = 0.0
    # while a checkpoint is read, before any state is made, per parameter of the whole model: what each process holds,
    # and what the first holds alone
    loading_bytes: ByStage = NONE
    loading_first_bytes: ByStage = NONE
    loading_assumed: str = ""  # a sentence: which version of a library loads so
    loader_batches: int = 0  # micro-batches a rank that loads data holds ready
    loader_workers: int = 2  # processes of its loader
    loader_mask: bool = False  # every sample brings an s x s attention mask, a byte an entry
    loader_mask_kept: bool = False  # each worker makes it once; else every sample has its own


@frozen
class FullSharding:
    """Blocks that gather parameters before they run and scatter their gradients after (FSDP), bytes per parameter.

    The embedding, the final norm and the head are gathered from the first forward to the end of the backward; so is all
    of it under ZeRO stage 2 (where that shards parameters at all, `first_stage`), and the whole stage of a pipeline
    where `keeps_stage`.
    """

    gathered_bytes: float  # of a block while it runs
    root_bytes: float  # of the embedding, the final norm and the head
    gradient_bytes: float  # as the backward pass makes them, before they are reduced
    reduced_bytes: float  # in the data type they are reduced in
    gathered_blocks: float = 3.0  # the one that runs, the next one, and the buffer one of them arrives in
    gathered_elements: float = 0.0  # gather ahead at least so many, whole blocks at a time
    reduced_blocks: float = 1.0  # blocks whose gradients are being reduced while the next block makes its own
    reduced_elements: float = 0.0  # or wait to be reduced, up to so many elements
    first_stage: int = 2  # the ZeRO stage from which on the parameters rest in shards
    keeps_stage: bool = False  # a pipeline rank gathers and reduces once a step, not once a micro-batch
    narrow_bytes: float = 0.0  # per weight of a narrow copy that replaces parameters: what rests in shards of it
    narrow_scale_bytes: float = 0.0  # and of its scales, which rest whole on every device


@frozen
class Gathering:
    """How ZeRO 3 gathers parameters, in elements (deepspeed/runtime/zero/config.py, 0.19.8): ahead of a module up to
    `prefetch_elements`, or to what `live_elements` leaves; a parameter stays that is used again within
    `reuse_elements`, and for good one of at most `persistent_elements`, up to `persistent_total` of them all.
    `sequential` gathers one by one, into no common buffer."""

    prefetch_elements: int = 50_000_000
    live_elements: int = 1_000_000_000
    reuse_elements: int = 1_000_000_000
    persistent_elements: int = 100_000
    persistent_total: float = math.inf
    sequential: bool = False


@frozen
class GradientLife:
    """When gradients are alive beside `gradient_bytes`, by ZeRO stage: bytes per parameter of the rank, and per sharded
    parameter.

    `lasting` from start to end. `accumulated` from the first micro-batch's backward on, so beside the forward pass of
    every later one. `final` at the end of the last backward, when no more than one layer's activations are left, and
    beside it `earlier_sharded`, the partition earlier micro-batches left. Where `flattened` is 1, `final` is flattened
    besides, `flat_bucket_bytes` at a time, to be all-reduced.
    """

    lasting: ByStage = NONE
    lasting_sharded: ByStage = NONE
    accumulated: ByStage = NONE
    accumulated_sharded: ByStage = NONE
    final: ByStage = NONE
    final_sharded: ByStage = NONE
    earlier_sharded: ByStage = NONE
    flattened: ByStage = NONE


@frozen
class FusedLoss:
    """A loss fused with the output head over chunks of tokens, with gradients made in the forward pass: bytes per
    element of the head's weight at the worst moment and from there to the head's backward, and bytes per token and
    hidden element (the gradient of the head's input, and one chunk of logits)."""

    weight_bytes: float
    kept_weight_bytes: float
    hidden_bytes: float


@frozen
class StateFacts:
    """Parameters, gradients and optimizer states between the steps: bytes per element of each, how they lie and who
    shares them.

    ZeRO stage 1 shards the optimizer, 2 also the gradients, 3 also the parameters, over data parallelism, and over
    context parallelism too where `shard_over_context` (Megatron core:
    `data_parallel_group(with_context_parallel=True)`, megatron/core/optimizer/__init__.py, 0.19).
    """

    parameter_bytes: float  # of the copy that the layers compute with
    gradient_bytes: float  # of what stays through the step
    optimizer_bytes: float  # of master weights and moments
    shard_over_context: bool = True
    optimizer_bytes_unsharded: float | None = None  # what stage 0 keeps instead, where its optimizer is another one
    optimizer_bytes_over_data: float = 0.0  # the part of `optimizer_bytes` that data parallelism alone shards
    optimizer_instances: int = 1  # groups of ranks, each of which shards a whole optimizer
    # the part of `optimizer_bytes` that matrices of the blocks do without (Muon)
    matrix_states_spared_bytes: float = 0.0
    matrices_whole: bool = False  # each matrix of the blocks lies whole on one of the ranks that share the optimizer
    # of a parameter whose states stay on the device while others' go to the host: copies made while that is set up
    partly_offloaded_bytes: float = 0.0
    full_sharding: FullSharding | None = None
    moved_to_buffers: bool = False  # from ZeRO 1 on parameters are made one by one and then moved into whole buffers
    placed_whole: bool = False  # ZeRO 3 is given a model that already lies whole on every device
    pad_vocabulary: bool = True  # to a multiple of 128 x tensor
    projections_apart: bool = False  # queries, keys and values, gate and up are parameters of their own
    embedding_whole: bool = False  # tensor parallelism leaves the embedding table whole, and a head tied to it


@frozen
class StepFacts:
    """Temporaries of the optimizer step and of the reduction right before it, bytes per element; `step_bytes` per
    parameter of the rank and `step_bytes_sharded` per sharded parameter, by ZeRO stage."""

    step_bytes: ByStage = NONE
    step_bytes_sharded: ByStage = NONE
    matrix_step_bytes: float = 0.0  # of the largest matrix, where each lies whole on one rank
    touched_gradient_bytes: ByStage = NONE  # of the rank's share or the largest parameter, whichever has more elements
    gradient_norm_bytes: ByStage = NONE  # of the largest parameter: widened for its norm
    flat_bucket_bytes: float = 0.0  # bytes per rank of the gradients flattened at a time for reduction
    state_element_bytes: float = 4.0  # of master weight, moments and gradient as the update reads them
    flat_step: bool = False  # temporaries are single tensors, too large for the room that freed activations leave


@frozen
class ZeroFacts:
    """How DeepSpeed's ZeRO holds, reduces and gathers gradients and parameters. By ZeRO stage where a field says so."""

    gradient_life: GradientLife | None = None  # None: gradients are there from start to end
    bucket_bytes: float = 0.0  # communication buckets, bytes per rank
    bucket_kept: bool = True  # ZeRO 3 has its bucket from start to end
    lasting_bucket_bytes: float = 0.0  # bytes per rank: of `bucket_bytes`, what ZeRO 3 keeps through the optimizer step
    widened_bucket_bytes: float = 0.0  # per element that ZeRO 1 and 2 reduce: a copy of the bucket in a wider type
    host_transfer_bytes: ByStage = NONE  # of the largest parameter: a buffer for gradients on their way to the host
    sub_group_elements: float | None = None  # ZeRO 3 steps so many parameters of a shard at a time; None: all at once
    gathering: Gathering | None = None  # of ZeRO 3, tensor by tensor; None: the largest layer is gathered
    gathered_weights_kept: bool = False  # what layers gather under ZeRO 3 stays until their backward, not recomputed
    secondary_ranks: int = 1  # ranks that share ZeRO 3's second copy of the parameters (ZeRO++'s hpZ); 1: there is none
    gathered_in_step: bool = False  # ZeRO 1 and 2 gather updated parameters at the end of the step, beside nothing


@frozen
class LayerFacts:
    """Tensors that the kernels of a layer's norms, MLP and linears save and make, and their type: bytes per element
    unless a field says otherwise."""

    kernels: LayerKernels = LayerKernels()
    activation_bytes: float = 2.0
    quantized: Quantized | None = None
    gated_activation_fused: bool = True  # silu(gate) is recomputed inside the fused kernel, not saved
    gated_gradient_in_place: bool = False  # its backward overwrites gate and up
    ungated_activation_bytes: float = 0.0  # per ffn column: more that an activation without a gate keeps, not fused
    clamped_activation_bytes: float = 0.0  # per ffn column: more that a clamped SwiGLU keeps
    norm_extra_bytes: float = 0.0  # per hidden element and norm: copies an unfused norm keeps beside input and output
    norm_backward_bytes: float = 0.0  # per hidden element: made beside the gradient by the backward of an unfused norm
    stream_copy_bytes: float = 0.0  # of several residual streams: a copy in another type, from which they are mixed
    branch_gradients_apart: bool = True  # the gradient of a block's output is a tensor beside the residual stream's
    weight_gradient_fused: bool = False  # wgrad accumulates into the gradient buffer: no temporary of a matrix
    mixer_fused: bool = False  # one kernel of a Mamba-2 mixer multiplies with its last matrix, too, and has its norm
    weight_gradient_stubs: bool = False  # then one stub for every distinct weight shape is kept for autograd
    mlp_chunks_recomputed: bool = False  # a chunked MLP keeps its input alone and computes each piece again
    travelling_checkpoints: float = 0.0  # layer inputs on the device while full recompute's others are on the host

    @property
    def linear_input_bytes(self) -> float:
        """Bytes per element of what a linear saves of its input."""
        return self.activation_bytes if self.quantized is None else self.quantized.input_bytes


@frozen
class AttentionFacts:
    """Tensors that attention saves and makes, also in a vision encoder: scores, softmax, positions and copies."""

    attention_scores_saved: bool = False  # unfused attention keeps the s x s probabilities
    # per score that is saved: bytes in the softmax's own type, where the product with V reads a copy; None: it does not
    softmax_bytes: float | None = None
    # per score that is saved: what the backward pass makes, less what it has let go of by then
    score_gradient_bytes: float = 0.0
    attention_narrow: bool = False  # attention, too, multiplies in 8 bits
    rotary_bytes: float = 0.0  # per token and element of a head: cosines and sines that all layers read
    turns_by_layer: float = 0.0  # cosines and sines as wide as a head that each layer makes and keeps beside images
    # widths of a vision encoder's residual stream that its attention keeps: queries, keys, values and the output, each
    # as often as it is copied
    encoder_attention_widths: float = 7.0
    # keys and values are copied to every query head; in latent attention, values are a view of the tensor that holds
    # keys too, and the output is copied before its projection
    key_values_expanded: bool = False
    mixed_projection_kept: bool = False  # values are a view of the tensor of unrotated queries and keys, which stays
    attention_output_copied: bool = False  # to bring heads together before the projection
    windows_masked: bool = False  # a window is a mask over the whole square, and spares attention nothing
    # per pair of tokens of a sequence: the masks that keep packed rows apart, one for each kind of attention. With them
    # a fused kernel keeps its own copy in the precision, and skips nothing of the square
    row_mask_bytes: float = 0.0
    query_input_normed: bool = False  # latent attention without a latent of queries has a norm before them
    context_all_to_all: bool = False  # context parallelism is by all-to-all: then the attention output is kept twice


@frozen
class MixtureFacts:
    """Tensors that routers and experts keep, and how evenly tokens are spread over experts."""

    router_bytes: float = 8.0  # per token and expert: the router's logits and probabilities
    router_last_bytes: float = 0.0  # per token and expert, of one micro-batch however many are in flight
    router_scores_bytes: float = 0.0  # per token and expert: scores of all, where the chosen ones' are not made anew
    router_input_bytes: float = 0.0  # per token and hidden element: a wider copy the router computes from
    fp32_router_experts: int = 0  # with at least this many experts the router computes in fp32
    combine_bytes: float = 0.0  # per routed token and hidden element, kept to combine expert outputs
    expert_output_weighted: bool = False  # the router's weight multiplies what experts put out, not their activation
    exchanges_held: bool = False  # what exchanges of routed tokens make lives until the mixture has run forward
    expert_imbalance: float = 1.0  # tokens of the busiest device's experts over the mean, dropless routing
    experts_fused: bool = False  # one kernel multiplies for all experts of a device and quantizes what it puts out


@frozen
class AdapterFacts:
    """How adapters beside the linears compute."""

    adapter_bytes: float | None = None  # per element, of a wider type to which each casts its input; None: it does not
    adapter_dropout: bool = False  # its input drops out
    # one adapter for queries, keys and values, and one for gate and up; tensor parallelism splits both of its matrices
    adapters_fused: bool = False


@frozen
class LossFacts:
    """Tensors of the output head and the loss: bytes per token and element of vocabulary / tensor."""

    logit_bytes: float = 6.0  # alive around the loss
    kept_logit_bytes: float = 4.0  # the part of `logit_bytes` that stays from the loss to its backward pass
    logit_gradient_bytes: float = 2.0  # the part of `logit_bytes` that is alive while the head runs backward
    deferred_head_gradients: int = 0  # micro-batches whose logit gradients wait for the end of the step
    fused_loss: FusedLoss | None = None
    logits_gathered: bool = False  # every tensor rank gets the logits of the whole vocabulary


@frozen
class ExchangeFacts:
    """Communication between ranks: its buffers, the process groups, and their memory outside torch."""

    sequence_gather: str = "none"  # ranks that keep one buffer of a gathered layer input: "none", "last" or "all"
    user_buffers: int = 0  # buffers of a gathered layer input that overlap tensor parallelism with multiplications
    inputs_reduced_apart: bool = False  # each matrix that reads a block's input reduces its gradient by itself
    streams_recorded: bool = False  # what NCCL gathered is reused only after the device has passed it
    pipeline_buffers: int = 0  # tensors received or sent that are alive beside what the layers keep
    groups: tuple[str, ...] = DEFAULT_GROUPS  # process groups a rank communicates in (`GROUPS` of memory/peak.py)
    communicator_bytes: float = 0.0  # for each of `groups` that has more than one rank
    exchange_peer_bytes: float = 0.0  # for each other expert rank of the node with which tokens go by all-to-all
    exchange_domain_devices: int = 8  # devices that exchange tokens by NVLink


@frozen
class AllocatorFacts:
    """Memory of a device outside its tensors, in bytes per rank, and how torch's allocator cuts and keeps segments."""

    workspace_bytes: float = 0.0  # what kernel libraries hold through torch
    grouped_workspace_bytes: float = 0.0  # the same for grouped GEMM of experts, beside it
    cache_share: float = 0.0  # reserved = allocated x (1 + cache_share)
    mixture_cache_share: float | None = None  # the same for a mixture of experts; None: as for other models
    context_bytes: float = 0.0  # the accelerator's context, outside torch; on a CPU the idle trainer
    cut_checkpoints: bool = False  # kept layer inputs are cut from freed MLP tensors, whole ones to a block
    # segments of the allocator are not expandable: activations are cut from those that parameters left when they moved
    # to their buffers, and the gradient of a table, for which no free piece is large enough, gets a new one
    whole_segments: bool = False


@frozen
class ForeignFacts:
    """Facts of trainers that llmlaunch does not launch.

    Public records of their runs judge the formulas of memory, so `validation/` sets these fields. No framework that a
    recipe can choose does (tests/unit/frameworks/test_fact_groups.py).
    """

    backward_gradient_bytes: ByStage = NONE  # per parameter of the rank: further gradients during the backward pass
    gradients_freed: bool = False  # no gradients from the optimizer step to the next backward pass
    reduced_at_end: bool = False  # gradients are reduced when the last backward pass is over
    stream_bytes: float | None = None  # per element of a residual stream that is wider than the other activations
    embedding_norm: bool = False  # a norm after the embedding, outside what is recomputed, keeps its input
    operators_kept: bool = False  # selective recompute keeps every second linear's output and attention's, nothing else
    unused_outputs_kept: bool = False  # it does so even where the backward pass does not read them
    gathered_inputs_kept: bool = False  # sequence parallelism saves a linear's gathered input, not its share of it
    key_values_returned: bool = False  # a layer's keys and values go to the caller, who holds them to the step's end
    stage_output_bytes: float = 0.0  # per hidden element / tensor: this rank's share of the output it sent, kept
    pipeline_buffers_by_microbatch: bool = False  # `pipeline_buffers` for every micro-batch of a step
    cached_logit_bytes: float = 0.0  # per logit, free around the loss but too small a piece for the next tensor
    step_logits_bytes: float = 0.0  # per logit of every micro-batch, kept to the end of a pipelined step


@frozen
class MemoryFacts:
    """One backend, one version, one precision, as data. `source` names the files it was read in."""

    backend: str
    version: str
    source: str
    states: StateFacts
    step: StepFacts = StepFacts()
    zero: ZeroFacts = ZeroFacts()
    layer: LayerFacts = LayerFacts()
    attention: AttentionFacts = AttentionFacts()
    mixture: MixtureFacts = MixtureFacts()
    adapters: AdapterFacts = AdapterFacts()
    loss: LossFacts = LossFacts()
    exchange: ExchangeFacts = ExchangeFacts()
    allocator: AllocatorFacts = AllocatorFacts()
    host: HostFacts = HostFacts()
    foreign: ForeignFacts = ForeignFacts()

    @property
    def residual_bytes(self) -> float:
        """Bytes per element of the residual stream, which is what enters a layer."""
        return self.layer.activation_bytes if self.foreign.stream_bytes is None else self.foreign.stream_bytes
