"""Which keys of a recipe each Megatron-LM flag is written from and read into, as a table for the documentation; and
jobs that write every flag of it."""

from __future__ import annotations

from collections.abc import Iterator

from llmlaunch.assets import asset
from llmlaunch.frameworks.megatron.flags.table import bridge_fields, flags
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, core_parser
from llmlaunch.frameworks.megatron.words import EARLIER
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of, small

NON_PERSISTENT = "training.non_persistent_save_interval=2"
# Words of a recipe that the gallery does not use.
WORDS = (
    ("training.fp8=delayed", "training.fp8_parameters=true", "training.optimizer={first_moment: fp8}"),
    ("training.fp8=mxfp8", "training.fp8_parameters=true", "training.gradient_dtype=bf16", "training.optimizer={}"),
    ("training.fp4=nvfp4", "training.minimum_learning_rate=1.0e-5", "training.adam_betas=[0.8, 0.95]"),
    ("training.precision=fp16", "training.gradient_dtype=fp32", "training.tensorboard=/logs", "training.steps=10"),
    ("layout.offload_modules=[core_attn, attn_proj]", "layout.offload_fraction=0.5"),
    ("layout.loss=native", "layout.mlp_chunks=2", "layout.optimizer_instances=2"),
    ("training.optimizer=muon",),
    ("layout.offload_optimizer=0.5", "layout.tp_comm_overlap=true", "layout.context_comm=a2a"),
    ("training.save_interval=10", "training.checkpoint_path=/c", "training.start_from=/w", "on_oom=fallback"),
    ("training.save_interval=10", "training.checkpoint_path=/c", "training.async_save=true", NON_PERSISTENT),
    ("data={path: /d, tokenizer: /t, cache_path: /i}",),
    ("data={blend: [{path: /d, weight: 1}]}", "model={base: llama3.1-8b, qk_layernorm: true, mtp_num_layers: 1}"),
    ("model={base: gpt3-175b, zero_centered_norm: true, linear_bias: false}", "training.sequence_length=1024"),
    ("model=gpt-oss-20b",),
    ("model=glm-5",),
    ("model={base: mixtral-8x7b, no_rope_every: 4, moe: {topk: 1, router: {weighted_inputs: true}}}",),
    ("model={base: llama3-8b, qk_l2_norm: true}",),
    ("model=qwen3-next-80b-a3b",),
    ("model={base: nemotron-3-super, mtp_num_layers: 2, mtp_repeated: true}",),
    ("model={base: llama3-8b, rotary_percent: 0.5}",),
    ("model={base: llama3-8b, rope_scaling: {kind: linear, factor: 2}, norm_epsilon: 1.0e-6}",),
    (
        "model={base: llama3-8b, sliding_window: {tokens: 64, full_every: 6}, rope_scaling: {kind: yarn, factor: 2, "
        "original_max_position_embeddings: 4096, truncate: false, mscale: 1, mscale_all_dim: 1}}",
    ),
    (
        "model={base: qwen2-57b-a14b, moe: {capacity_factor: 1.5, router: {normalize_topk: false}}}",
        *("layout.token_dispatcher=flex", "layout.overlap_shared_expert=true"),
    ),
    ("model=qwen3-30b-a3b", "layout.overlap_expert_communication=true", "layout.token_dispatcher=alltoall"),
    ("model=qwen3-30b-a3b", "layout.delay_weight_gradients=true"),
    (
        *("model=qwen3-30b-a3b", "layout.token_dispatcher=flex", "layout.flex_backend=hybridep"),
        *("layout.expert_rank_capacity_factor=1.5", "layout.paged_stash={}"),
    ),
    ("layout.cuda_graphs=[attn, mlp]",),
    ("layout.cuda_graphs=[full_iteration]",),
    ("layout.zero_stage=2",),
    ("tracking={wandb: {project: p, entity: e}, tensorboard: /logs}",),
    ("tracking={wandb: {project: p}}", "training.evaluation={interval: 5, iterations: 2}"),
    ("data={path: /d, validation: /v}", "training.evaluation={interval: 5, iterations: 2}"),
    ("model=deepseek-v3.2",),
)
LAYOUTS = (
    Layout(2, 4, 2, 2, 2, 2, 1, 1, 1, 1, RECOMPUTE_FULL),
    Layout(2, 1, 1, 1, 2, 1, 1, 1, 1, 2, RECOMPUTE_SELECTIVE, offload_layers=1),
)
SPLITS = ((7, 9, 8, 8), (9, 9, 8, 6), (7, 8, 8, 8, 8, 8, 8, 7), (6, 9, 9, 8))


def flag_key_table() -> str:
    """Return the table, a row for each flag, in the order of the flags."""
    keys = {row.name: set[str]() for row in flags()} | {name: set[str]() for name in EARLIER}
    for row in flags():
        keys[row.name] |= {*row.keys, *row.reads}
    for name, earlier in EARLIER.items():
        keys[name] = {key for row in flags() if row.dest == earlier.parsed.dest for key in row.keys}
    written = {row.name for row in flags() if row.writes}
    lines = ["| flag | recipe key | written | field of Megatron-Bridge | in core |", "|---|---|---|---|---|"]
    for flag, of in sorted(keys.items()):
        fields = ", ".join(f"`{field}`" for field, _ in bridge_fields().get(flag, ()))
        named = ", ".join(f"`{key}`" for key in sorted(of))
        lines.append(f"| `{flag}` | {named} | {'yes' if flag in written else ''} | {fields} | {_versions(flag)} |")
    return "\n".join(lines)


def _versions(flag: str) -> str:
    known = [version for version in KNOWN_VERSIONS if flag in core_parser(version).flags]
    return ", ".join(known) or "earlier"


def written_jobs() -> Iterator[tuple[Recipe, Layout]]:
    """Yield recipes of every kind with layouts, whether or not these are legal: together they write every flag."""
    for recipe in _recipes():
        for layout in LAYOUTS:
            if recipe.model.mamba is None or recipe.model.num_layers % (layout.pipeline * layout.virtual_pipeline) == 0:
                yield recipe, layout
    for split in SPLITS:
        recipe = small(f"model={{base: llama3-8b, num_layers: {sum(split)}}}")
        yield recipe, Layout(pipeline=4, virtual_pipeline=len(split) // 4, layers_by_stage=split)


def _recipes() -> Iterator[Recipe]:
    for path in sorted(asset("recipes").glob("*.yaml")):
        recipe = recipe_of(path.stem)
        if recipe.backend.name == "megatron-lm" and not recipe.data.python_source:
            yield recipe
    for words in WORDS:
        yield small(*words)
