"""Random jobs of every trainer: its facts, a model, a layout it can run, and techniques."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from shapes import ALTERNATING, LLAMA2_7B, LLAMA3_8B, MIXTRAL

from llmlaunch.facts import Gathering, MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, ZeroSettings, deepspeed_facts, script_facts
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.sharding_rules import megatron_fsdp_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, Layout
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape, Router
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.workload import OptimizerFormats, Workload
from support.changed_facts import changed
from validation.fsdp import (
    atorch_facts,
    composer_facts,
    internevo_facts,
    torchtitan_facts,
    torchtune_facts,
)
from validation.megatron_deepspeed import megatron_deepspeed_facts

GPT = replace(
    ModelShape("gpt", 24, 1024, 4096, 16, 16, 64, 50257, 2048),
    tied_embeddings=True,
    gated_mlp=False,
    linear_bias=True,
    normalization="LayerNorm",
    position_embedding="learned_absolute",
)
LATENT = replace(
    ModelShape("latent", 8, 2048, 8192, 16, 16, 128, 102400, 4096),
    mtp_num_layers=1,
    moe=MoeShape(64, 6, 1408, 2816, (0,) + (1,) * 7),
    mla=MlaShape(None, 512, 128, 64, 128),
)
GEMMA = replace(
    ModelShape("gemma", 26, 2304, 9216, 8, 4, 256, 256000, 8192),
    tied_embeddings=True,
    post_norms=True,
    zero_centered_norm=True,
    qk_layernorm=True,
    attention_softcap=50.0,
    logit_softcap=30.0,
)
SHARED = replace(
    ModelShape("shared", 12, 2048, 5632, 16, 16, 128, 151936, 8192),
    qkv_bias=True,
    moe=MoeShape(60, 4, 1408, 5632, (1,) * 12, shared_expert_gate=True, router=Router(normalize_topk=False)),
)
SINKS = replace(
    ModelShape("sinks", 12, 2880, 2880, 64, 8, 64, 201088, 8192),
    linear_bias=True,
    attention_sinks=True,
    activation="clamped_swiglu",
    moe=MoeShape(32, 4, 2880, 0, (1,) * 12),
)
SHAPES = (LLAMA3_8B, LLAMA2_7B, MIXTRAL, ALTERNATING, GPT, LATENT, GEMMA, SHARED)
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Trainer:
    """What prices a trainer's jobs, and the least bytes it keeps of a parameter: of the compute copy, of its gradient,
    of the optimizer's states. Stage by stage it shards no more than ZeRO says. `offloads` is None where any share of
    the states may be on the host, and those alone."""

    facts: MemoryFacts
    parameter: float
    gradient: float
    states: float
    stages: tuple[int, ...]
    pipelines: bool = True
    sharded_from: int = 3  # the ZeRO stage from which on parameters rest in shards
    offloads: float | None = None  # the share of the states that is on the host, their gradients with them
    offloading: Callable[[float], MemoryFacts] | None = None  # the facts with another share of the states there
    moves_layers: bool = False  # whole layers' activations can wait on the host
    hugging_face: bool = False  # trains a model of transformers, whose families differ


@st.composite
def megatron(draw: st.DrawFn, fsdp: bool) -> Trainer:
    precision = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    gradients = draw(st.sampled_from([None, "fp32", "bf16"])) if precision == "bf16" else None
    moments = st.sampled_from(["fp32", "bf16", "fp16", "fp8"])
    formats = st.builds(OptimizerFormats, st.sampled_from(["fp32", "fp16"]), moments, moments)
    optimizer = draw(st.none() | formats) if precision == "bf16" and not fsdp else None
    narrow = draw(st.sampled_from([None, "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]))
    muon = optimizer is None and not fsdp and draw(st.booleans())
    options = MegatronOptions(
        precision,
        gradient_dtype=gradients,
        optimizer=optimizer,
        muon=muon,
        loss=draw(st.sampled_from(["none", "native", "te"])),
        fp8_recipe=narrow,
        fp8_parameters=narrow is not None and draw(st.booleans()),
        transformer_engine=draw(st.booleans()),
        gradient_accumulation_fusion=draw(st.booleans()),
        context_all_to_all=draw(st.booleans()),
        tp_comm_overlap=draw(st.booleans()),
        compute_capability=draw(st.sampled_from([None, 9.0, 10.0])),
        version=draw(st.sampled_from(["0.16", "0.19"])),
    )
    width = STATE_BYTES[precision]
    states = 8.0 + (0.0 if precision == "fp32" else 4.0)
    if optimizer is not None:  # a master of 16 bits at least
        states = 2.0 + STATE_BYTES[optimizer.first_moment] + STATE_BYTES[optimizer.second_moment]
    return Trainer(
        megatron_fsdp_facts(options) if fsdp else megatron_facts(options),
        parameter={"nvfp4": 0.5}.get(narrow or "", 1.0) if options.fp8_parameters else width,
        gradient=STATE_BYTES[gradients or ("fp32" if precision == "bf16" else precision)],
        states=states - 4.0 * muon,
        stages=(2, 3) if fsdp else (0, 1),
        pipelines=not fsdp,
        moves_layers=True,
    )


@st.composite
def deepspeed(draw: st.DrawFn, script: str) -> Trainer:
    """`script`: the trainer that comes with llmlaunch, a Hugging Face one (Liger or not), or one with a pipeline."""
    precision = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    share = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    options = DeepSpeedOptions(
        precision=precision,
        accumulation=draw(st.sampled_from([None, "fp32"])) if precision == "bf16" else None,
        fused_optimizer=draw(st.booleans()),
        reduce_bucket_elements=draw(st.sampled_from([1e6, 5e8])),
        zero=ZeroSettings(
            gathering=draw(st.sampled_from([Gathering(), Gathering(10**7, 0, 10**9), Gathering(0, 10**9, 0, 10**6)])),
            secondary_ranks=draw(st.sampled_from([1, 8])),
            overlap_comm=draw(st.booleans()),
            contiguous_gradients=draw(st.booleans()),
            memory_efficient_linear=draw(st.booleans()),
        ),
        liger=script == "hugging-face" and draw(st.booleans()),
        split_from_start=draw(st.booleans()),
        expandable_segments=draw(st.booleans()),
        eager_attention=draw(st.booleans()),
    )

    def offloading(share: float) -> MemoryFacts:
        facts = deepspeed_facts(replace(options, offload_optimizer=share == 1.0, offloaded_share=share % 1.0))
        facts = changed(facts, cut_checkpoints=False)  # a wider MLP's freed blocks are cut with less waste
        return changed(facts, logit_bytes=12.0) if script == "shipped" else script_facts(facts, script)

    width = STATE_BYTES[precision]
    return Trainer(
        offloading(share),
        parameter=width,
        gradient=width,
        states=12.0 if width == 2.0 else 8.0,
        stages=(3,) if share % 1.0 else (0, 1, 2, 3),  # a share of the states leaves the device with ZeRO 3 alone
        pipelines=script == "pipeline",
        offloads=share,
        offloading=offloading,
        hugging_face=script != "pipeline",
    )


def simple(facts: MemoryFacts, parameter: float, gradient: float, states: float, *stages: int) -> Trainer:
    return Trainer(facts, parameter, gradient, states, stages, pipelines=False)


TRAINERS = {
    "Megatron-LM": megatron(fsdp=False),
    "Megatron-FSDP": megatron(fsdp=True),
    "DeepSpeed trainer": deepspeed("shipped"),
    "Hugging Face trainer": deepspeed("hugging-face"),
    "a script of one's own": deepspeed("own"),
    "DeepSpeed pipeline": deepspeed("pipeline"),
    "Megatron-DeepSpeed": st.sampled_from(
        [
            Trainer(megatron_deepspeed_facts("bf16"), 2.0, 4.0, 12.0, (1,)),
            Trainer(megatron_deepspeed_facts("bf16", "bf16"), 2.0, 2.0, 12.0, (0, 1)),
            Trainer(megatron_deepspeed_facts("fp16"), 2.0, 2.0, 12.0, (0, 1)),
        ]
    ),
    "torchtitan": st.builds(
        lambda *options: Trainer(torchtitan_facts(*options), 4.0, 4.0, 8.0, (3,)),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.sampled_from([1, 8]),
    ),
    "torchtune": st.builds(
        lambda compiled, chunked, fused: simple(
            torchtune_facts("bf16", compiled, chunked, fused, 1.0), 2.0, 0.0 if fused else 2.0, 2.0, 0
        ),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    # FSDP shards parameters with SHARD_GRAD_OP, too, as long as no step runs
    "composer": st.just(replace(simple(composer_facts(), 4.0, 4.0, 8.0, 2, 3), sharded_from=2)),
    "ATorch": st.just(simple(atorch_facts(), 4.0, 4.0, 8.0, 3)),
    "InternEvo": st.just(simple(internevo_facts(), 2.0, 2.0, 12.0, 3)),
}


@st.composite
def layouts(draw: st.DrawFn, shape: ModelShape, trainer: Trainer) -> Layout:
    tensor, context, data = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 8), (1, 2), (1, 2, 8, 64)))
    pipeline = draw(st.sampled_from([1, 2, 4])) if trainer.pipelines else 1
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    stages: tuple[int, ...] = ()
    if pipeline > 1 and draw(st.booleans()):
        cuts = st.lists(st.integers(1, shape.num_layers - 1), min_size=pipeline * virtual - 1, unique=True)
        inner = sorted(draw(cuts)[: pipeline * virtual - 1])
        stages = tuple(b - a for a, b in zip([0, *inner], [*inner, shape.num_layers], strict=True))
    ranks = tensor * context * data
    expert = draw(st.sampled_from([e for e in (1, 2, 8) if ranks % e == 0])) if shape.moe else 1
    expert_tensor = draw(st.sampled_from([e for e in (1, 2) if ranks % (e * expert) == 0])) if shape.moe else 1
    recompute = draw(st.sampled_from([0, 1, 2]))
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        context=context,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        micro_batch_size=draw(st.sampled_from([1, 4])),
        sequence_parallel=int(tensor > 1 and draw(st.booleans())),
        zero_stage=draw(st.sampled_from(trainer.stages)),
        recompute=recompute,
        recompute_layers=draw(st.integers(0, 4)) if recompute == RECOMPUTE_FULL else 0,
        offload_layers=draw(st.integers(0, 8)) if trainer.moves_layers and recompute == RECOMPUTE_NONE else 0,
        layers_by_stage=stages,
    )


TECHNIQUES = st.builds(
    Techniques,
    recompute_modules=st.sampled_from([(), ("core_attn",), ("mlp", "layernorm"), ("moe", "mla_up_proj")]),
    recompute_method=st.sampled_from(["uniform", "block"]),
    offload_modules=st.sampled_from([(), ("core_attn", "attn_proj"), ("qkv_linear", "expert_fc1", "moe_act")]),
    offload_checkpoints=st.booleans(),
    offload_optimizer=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    offload_parameters=st.booleans(),
    loss=st.sampled_from([None, "tiled", "fused_linear"]),
    mlp_chunks=st.sampled_from([1, 8]),
    adapters=st.sampled_from([None, Adapters(16), Adapters(16, frozen_down=True)]),
    trained_layers=st.sampled_from([None, None, 3]),
    delay_weight_gradients=st.booleans(),
    swapped_share=st.sampled_from([0.0, 0.7]),
    sampled_share=st.sampled_from([1.0, 0.3]),
    weight_versions=st.sampled_from([1, 2]),
)


GRAPHS = [(), ("attn",), ("layer",), ("attn", "moe_router"), ("full_iteration",)]


@dataclass(frozen=True)
class RandomJob:
    trainer: Trainer
    job: Job
    layout: Layout
    microbatches: int

    def family(self, facts: MemoryFacts) -> MemoryFacts:
        """Return the trainer's facts as those of the job's model."""
        workload = self.job.workload
        return with_family(facts, self.job.shape, workload.sequence_length) if self.trainer.hugging_face else facts


@st.composite
def random_jobs(draw: st.DrawFn, name: str) -> RandomJob:
    trainer = draw(TRAINERS[name])
    shape = draw(st.sampled_from(SHAPES))
    layout = draw(layouts(shape, trainer))
    techniques = draw(st.just(NO_TECHNIQUES) | TECHNIQUES)
    if trainer.offloads is not None:
        techniques = replace(techniques, offload_optimizer=trainer.offloads)
    microbatches = draw(st.sampled_from([1, 2, 8]))
    if trainer.moves_layers and techniques != NO_TECHNIQUES:  # Megatron's
        waits = draw(st.booleans())
        techniques = replace(techniques, cuda_graphs=draw(st.sampled_from(GRAPHS)), zero_bubble=waits)
    workload = Workload(4096, microbatches * layout.data * layout.micro_batch_size)
    drawn = RandomJob(trainer, Job(shape, workload, trainer.facts, techniques=techniques), layout, microbatches)
    return replace(drawn, job=replace(drawn.job, facts=drawn.family(trainer.facts)))
