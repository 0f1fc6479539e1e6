"""Laws of memory that every job obeys, whatever the trainer: each is a function of one random job that raises
AssertionError where the estimate breaks it. A law compares a job with another form of itself, or with the model that
it trains. What a law allows for a physical reason stands beside it, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from random_jobs import RandomJob

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import MemoryFacts
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.host import HostNode, host_terms
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.moments import state_terms, transient_terms
from llmlaunch.memory.peak import cache_share, rank_terms
from llmlaunch.memory.states import states
from llmlaunch.memory.weights import largest_parameter, rank_parameters, trained_parameters
from llmlaunch.memory.workspace import weight_gradient_stubs
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from support.changed_facts import changed

ROUNDING_BYTES = 64.0  # terms are rounded to whole bytes one by one
ROUNDING = 1.0 - 1e-9
FP32_BYTES = 4.0
LASTING, AT_THE_LOSS = -1, 0

# Terms that share bytes with another one: what a layer's backward pass needs is counted beyond the saved tensors that
# it frees, and the step takes either the norm's copy or the optimizer's temporaries.
JOINED = {
    "layer_backward": "activations",
    "recomputed_layer": "activations",
    "delayed_weight_gradients": "activations",
    "paired_layer": "activations",
    "gradient_norm": "optimizer_step",
}

Terms = Mapping[tuple[int, str], FloatColumn]
Split = tuple[Layout, int]  # with its micro-batches


def ranks_of(job: Job, *splits: Split) -> RankColumns:
    layouts, microbatches = zip(*splits, strict=True)
    return all_ranks(job, LayoutColumns.of(layouts), np.array(microbatches))


def by_split(rows: RankColumns, columns: Mapping[Any, FloatColumn]) -> list[dict[Any, FloatColumn]]:
    """Return the columns of each split that the rows are of. Together they are priced as each alone."""
    places = [rows.layout_index == index for index in range(rows.layout_index.max() + 1)]
    whole = {name: np.broadcast_to(column, len(rows)) for name, column in columns.items()}
    return [{name: column[place] for name, column in whole.items()} for place in places]


def peaks_of(job: Job, rows: RankColumns) -> list[dict[str, FloatColumn]]:
    """Return of each split the peaks of every pipeline rank, by kind."""
    peaks = rank_terms(job, rows)
    return by_split(rows, {"allocated": peaks.allocated, "reserved": peaks.reserved, "device": peaks.device})


def terms_of(job: Job, rows: RankColumns) -> list[Terms]:
    """Return of each split every term at every moment, for all pipeline ranks. Joined terms are one."""
    transient, state = transient_terms(job, rows), state_terms(job, rows, states(job, rows))
    terms: dict[tuple[int, str], FloatColumn] = {}
    moments = [(LASTING, transient.lasting, state.lasting)]
    moments += [(i, *pair) for i, pair in enumerate(zip(transient.moments, state.moments, strict=True))]
    for moment, *parts in moments:
        for name, column in ((n, c) for part in parts for n, c in part.items()):
            key = moment, JOINED.get(name, name)
            terms[key] = terms.get(key, 0.0) + column
    return by_split(rows, terms)


# By group of devices, the terms that may grow where it grows, and why.
GROWS_FROM_ONE = {  # a group comes into being, of all ranks of a kind or of those that hold the same experts
    "parameters",  # ZeRO 3 gathers them beside the shards
    "gathered_parameters",  # so does FSDP
    "unreduced_gradients",  # and reduces gradients apart
    "gradient_buffers",
}
EXCHANGED = {"activations"}  # tokens that go to experts of other devices are there twice
STUBS = "weight_gradient_stubs"  # one for every distinct shape: a split may make two shapes equal, or apart
GATHERED = "gathered_parameters"  # a whole number of blocks ahead, of at least so many elements
GROWS = {
    "data": set[str](),
    "context": set[str](),
    "tensor": {STUBS, GATHERED},
    # a dispatcher that gathers holds the tokens of all expert ranks
    "expert": {STUBS, GATHERED, "sequence_gather"},
    # the tokens of all expert-tensor ranks are gathered, and each holds one side of an adapter whole
    "expert_tensor": {STUBS, GATHERED, "sequence_gather", "activations"},
}


def further_splits(drawn: RandomJob) -> Iterator[tuple[str, Layout]]:
    """Yield the layout with one group of devices doubled, and which."""
    layout = drawn.layout
    for group in GROWS:
        further = replace(layout, **{group: 2 * getattr(layout, group)})
        devices = further.tensor * further.context * further.data
        if group.startswith("expert") and (
            drawn.job.shape.moe is None
            or devices % (further.expert * further.expert_tensor)
            or drawn.job.shape.moe.num_experts % further.expert
            or (group == "expert_tensor" and drawn.job.techniques.adapters is not None)
        ):
            continue
        yield group, further


def ranks_of_same_experts(drawn: RandomJob, layout: Layout) -> int:
    """Return how many ranks hold the same experts and may share them, 0 where there are none."""
    devices = layout.tensor * layout.context * layout.data
    return 0 if drawn.job.shape.moe is None else devices // (layout.expert * layout.expert_tensor)


def more_devices_never_add_to_a_sharded_term(drawn: RandomJob) -> None:
    """Nor do twice as many take away more than half of what lasts, unless experts are shared no more and so need not be
    gathered. The vocabulary needs no padding here, which is to a multiple of the tensor ranks, and ZeRO 3 gathers no
    more than a layer: its limits are elements, so that smaller parameters may be more (test_gathering.py). More devices
    share a second shard, too."""
    job = replace(drawn.job, shape=replace(drawn.job.shape, vocab_size=131072))
    job = replace(job, facts=changed(job.facts, gathering=None, secondary_ranks=1))
    groups, layouts = zip(*further_splits(drawn), strict=True)
    before, *afters = terms_of(
        job, ranks_of(job, *((layout, drawn.microbatches) for layout in (drawn.layout, *layouts)))
    )
    for group, further, more in zip(groups, layouts, afters, strict=True):
        may_grow, may_end = GROWS[group], {STUBS, "cached_logits"}
        if getattr(drawn.layout, group) == 1:
            may_grow = may_grow | (EXCHANGED if group == "expert" else GROWS_FROM_ONE)
        same_experts = ranks_of_same_experts(drawn, drawn.layout), ranks_of_same_experts(drawn, further)
        if same_experts == (1, 2):
            may_grow = may_grow | GROWS_FROM_ONE
        elif same_experts == (2, 1):
            may_end |= GROWS_FROM_ONE
        for (moment, name), after in more.items():
            earlier = before[moment, name]
            at = f"{name} at moment {moment}, {group} doubled"
            if name not in may_grow:
                assert np.all(after <= earlier + ROUNDING_BYTES), f"{at}: {earlier} becomes {after}"
            if moment in (LASTING, AT_THE_LOSS) and name not in may_end:
                assert np.all(after >= earlier / 2 - ROUNDING_BYTES), f"{at}: {earlier} becomes {after}"


def larger_jobs(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the job with longer sequences, or a larger model."""
    workload = replace(job.workload, sequence_length=2 * job.workload.sequence_length)
    yield "sequence", replace(job, workload=workload)
    for name, larger in larger_shapes(job.shape):
        yield name, replace(job, shape=larger)


def larger_shapes(shape: ModelShape) -> Iterator[tuple[str, ModelShape]]:
    ffn, hidden = 2 * shape.ffn_hidden_size, 2 * shape.hidden_size
    yield "MLP", replace(shape, ffn_hidden_size=ffn)
    yield "residual stream", replace(shape, hidden_size=hidden)
    yield "both", replace(shape, hidden_size=hidden, ffn_hidden_size=ffn)
    yield "vocabulary", replace(shape, vocab_size=2 * shape.vocab_size)
    yield "heads", replace(shape, num_attention_heads=2 * shape.num_attention_heads)
    yield "query groups", replace(shape, num_query_groups=shape.num_attention_heads)
    moe = shape.moe
    if moe is not None:
        yield "experts", replace(shape, moe=replace(moe, num_experts=2 * moe.num_experts))
        yield "chosen experts", replace(shape, moe=replace(moe, topk=moe.topk + 1))
        yield "expert", replace(shape, moe=replace(moe, ffn_hidden_size=2 * moe.ffn_hidden_size))


def a_larger_job_never_needs_less(drawn: RandomJob) -> None:
    """But for what ZeRO 3 gathers, since larger parameters may be fewer that fit its limits, and for the stubs of
    matrices that become alike: there is one for every distinct shape."""
    job = replace(drawn.job, facts=changed(drawn.job.facts, gathering=None))
    layout, microbatches = split = drawn.layout, drawn.microbatches
    wider = replace(layout, micro_batch_size=2 * layout.micro_batch_size)
    rows = ranks_of(job, split, (wider, microbatches), (layout, 2 * microbatches))
    before, *afters = peaks_of(job, rows)
    never_less("micro-batch", before, afters[0])
    never_less("micro-batches", before, afters[1])
    stubs = weight_gradient_stubs(job, rows)[rows.layout_index == 0]
    for grown, larger in larger_jobs(job):
        rows = ranks_of(larger, split)
        fewer = np.maximum(stubs - weight_gradient_stubs(larger, rows), 0.0)
        never_less(grown, before, *peaks_of(larger, rows), spared=fewer * (1.0 + cache_share(larger)))


def never_less(
    grown: str, before: dict[str, FloatColumn], after: dict[str, FloatColumn], spared: FloatColumn | float = 0.0
) -> None:
    for kind, peaks in after.items():
        assert np.all(peaks >= before[kind] - spared - ROUNDING_BYTES), (
            f"{grown}: {kind} {before[kind]} becomes {peaks}"
        )


def more_offload_never_needs_more(drawn: RandomJob) -> None:
    """Beyond the buffers that it stages through: a parameter in fp32 on its way back from the host, and the clones that
    Megatron's optimizer sets up with where only a share of it is there."""
    job = drawn.job
    split = drawn.layout, drawn.microbatches
    fewer_layers = replace(drawn.layout, offload_layers=drawn.layout.offload_layers + drawn.trainer.moves_layers)
    before, after = peaks_of(job, ranks_of(job, split, (fewer_layers, drawn.microbatches)))
    never_less("layers", after, before)
    for name, more, facts in more_offloaded(drawn):
        staged, moved = staging_bytes(drawn, more), replace(job, techniques=more, facts=facts)
        (after,) = peaks_of(moved, ranks_of(moved, split))
        for kind, peaks in after.items():
            excess = peaks - before[kind]
            assert np.all(excess <= staged + ROUNDING_BYTES), f"{name}: {kind} {before[kind]} becomes {peaks}"


def more_offloaded(drawn: RandomJob) -> Iterator[tuple[str, Techniques, MemoryFacts]]:
    """Yield the job's techniques and facts with more on the host."""
    techniques, facts = drawn.job.techniques, drawn.job.facts
    yield "checkpoints", replace(techniques, offload_checkpoints=True), facts
    yield "parameters", replace(techniques, offload_parameters=True), facts
    modules = ("qkv_linear", "core_attn", "attn_proj", "expert_fc1", "moe_act")
    yield "modules", replace(techniques, offload_modules=modules), facts
    yield "swapped", replace(techniques, swapped_share=1.0), facts
    offloading = drawn.trainer.offloading
    for share in (0.25, 0.5, 1.0):
        on_host = offloading is not None and share < 1.0 and drawn.layout.zero_stage < 3
        if share <= techniques.offload_optimizer or on_host:
            continue
        more = replace(techniques, offload_optimizer=share)
        yield f"optimizer {share}", more, facts if offloading is None else drawn.family(offloading(share))


def staging_bytes(drawn: RandomJob, more: Techniques) -> FloatColumn | float:
    facts, share = drawn.job.facts, more.offload_optimizer
    if share == drawn.job.techniques.offload_optimizer:
        return 0.0
    rows = ranks_of(drawn.job, (drawn.layout, drawn.microbatches))
    trained = trained_parameters(drawn.job, rows, rank_parameters(drawn.job, rows))
    clones = 2.0 * facts.states.partly_offloaded_bytes * (trained.dense + trained.expert) if share < 1.0 else 0.0
    return FP32_BYTES * largest_parameter(drawn.job, rows) + clones


def what_leaves_the_device_is_on_the_host(drawn: RandomJob) -> None:
    """Of states and of modules' activations, where a trainer can move them; what is swapped may be recomputed."""
    job = drawn.job
    nothing = replace(job.techniques, offload_optimizer=0.0, offload_parameters=False, offload_modules=())
    facts = job.facts if drawn.trainer.offloading is None else drawn.family(drawn.trainer.offloading(0.0))
    here = replace(job, techniques=nothing, facts=facts)
    rows, rows_before = (ranks_of(each, (drawn.layout, drawn.microbatches)) for each in (job, here))
    (before,), (after,) = terms_of(here, rows_before), terms_of(job, rows)
    host, host_before = (host_terms(j, r, HostNode(8, resident=True)) for j, r in ((job, rows), (here, rows_before)))
    arrives = {} if job.techniques.swapped_share else {"offloaded_activations": "activations"}
    if job.facts.host.optimizer_bytes[drawn.layout.zero_stage]:
        arrives["offloaded_optimizer"] = "optimizer_states"
    if job.facts.host.parameter_bytes:
        arrives["offloaded_parameters"] = "parameters"
    for host_term, term in arrives.items():
        moment = AT_THE_LOSS if term == "activations" else LASTING
        gone = before[moment, term] - after[moment, term]
        arrived = host[host_term] - host_before[host_term]
        assert np.all(arrived >= gone - ROUNDING_BYTES), f"{host_term}: {arrived} of {gone}"


def the_model_is_held_at_least_once(drawn: RandomJob) -> None:
    """By all devices and hosts together: its weights, and where all of it is trained, optimizer states and, when they
    are all there, gradients."""
    job, layout, trainer = drawn.job, drawn.layout, drawn.trainer
    rows = ranks_of(job, (layout, drawn.microbatches))
    (terms,) = terms_of(job, rows)
    host = host_terms(job, rows, HostNode(8, resident=True))
    devices = layout.tensor * layout.context * layout.data
    total = count_parameters(job.shape).total

    weights = terms[LASTING, "parameters"] + terms[LASTING, "weight_copies"]
    if job.techniques.offload_parameters and layout.zero_stage >= trainer.sharded_from:
        weights = weights + (host["offloaded_parameters"] if job.facts.host.parameter_bytes else np.inf)
    assert devices * weights.sum() >= trainer.parameter * total * ROUNDING, f"weights: {devices * weights} of {total}"
    if job.techniques.adapters is not None or job.techniques.trained_layers is not None:
        return
    optimizer = terms[LASTING, "optimizer_states"]
    if job.techniques.offload_optimizer:
        on_host = job.facts.host.optimizer_bytes[layout.zero_stage]
        optimizer = optimizer + (host["offloaded_optimizer"] if on_host else np.inf)
    assert devices * optimizer.sum() >= trainer.states * total * ROUNDING, f"optimizer: {devices * optimizer}"
    moments = {moment for moment, _ in terms if moment != LASTING}
    gradients = max(sum(np.sum(terms.get((i, n), 0.0)) for n in ("gradients", "gradient_buffers")) for i in moments)
    share = 1.0 if trainer.offloads is None else 1.0 - trainer.offloads
    assert devices * gradients >= share * trainer.gradient * total * ROUNDING, f"gradients: {devices * gradients}"


LAWS = (
    more_devices_never_add_to_a_sharded_term,
    a_larger_job_never_needs_less,
    more_offload_never_needs_more,
    what_leaves_the_device_is_on_the_host,
    the_model_is_held_at_least_once,
)
