"""What a config.json of each family means: one function for each group of families that are built alike
(transformers/models/<family>/modeling_<family>.py, 5.23). Anything that is not exactly so is refused by its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.huggingface.decoder import (
    NO_BIAS,
    auxiliary,
    coefficient,
    decoder,
    only_if_given,
    silu_decoder,
)
from llmlaunch.models.huggingface.deepseek_v4 import deepseek_v4
from llmlaunch.models.huggingface.gemma4 import gemma4
from llmlaunch.models.huggingface.keys import (
    DEEPSEEK_EXPERTS,
    GEMMA2_KEYS,
    GLM_KEYS,
    GPT2_KEYS,
    INDEXER,
    LATENT,
    LINEAR_ATTENTION,
    LLAMA4_KEYS,
    LOCAL_EXPERTS,
    NORMALIZED,
    QKV_BIAS,
    QWEN_EXPERTS,
    SCALED,
    SHARED_EXPERT,
    TURNED,
    read_keys,
)
from llmlaunch.models.huggingface.lfm2 import lfm2
from llmlaunch.models.huggingface.nemotron import nemotron_h
from llmlaunch.models.huggingface.reader import (
    CHUNKED,
    FULL,
    WINDOWED,
    ConfigReader,
    alternating_window,
    linear_layers,
    no_window,
    rope,
    rotary_percent,
    whole_window,
)
from llmlaunch.models.shape import (
    CLAMP,
    CLAMPED,
    Indexer,
    LinearAttention,
    MlaShape,
    ModelShape,
    MoeShape,
    Router,
    SlidingWindow,
)

__all__ = ["BUILDERS"]


def llama(reader: ConfigReader) -> ModelShape:
    if reader.values.get("sliding_window") is not None:
        raise BadKey(("sliding_window",), "Llama has no sliding windows; remove it")
    bias = reader.flag("attention_bias")
    if bias != reader.flag("mlp_bias"):
        raise BadKey(("attention_bias",), "attention_bias and mlp_bias must be both true or both false here")
    return replace(silu_decoder(reader), linear_bias=bias)


def mistral(reader: ConfigReader) -> ModelShape:
    return replace(silu_decoder(reader), sliding_window=whole_window(reader))


def mixtral(reader: ConfigReader) -> ModelShape:
    shape = mistral(reader)
    if reader.number("router_jitter_noise") != 0:
        raise BadKey(("router_jitter_noise",), "noise on what the router sees is not supported; set it to 0")
    return replace(shape, moe=_local_experts(reader, shape, Router(**auxiliary(reader))))


def _local_experts(reader: ConfigReader, shape: ModelShape, router: Router) -> MoeShape:
    pattern = (1,) * shape.num_layers
    sizes = read_keys(reader, LOCAL_EXPERTS)
    return MoeShape(**sizes, shared_expert_ffn_hidden_size=0, layer_pattern=pattern, router=router)


def gpt_oss(reader: ConfigReader) -> ModelShape:
    """Biases everywhere, the router's included; every second layer attends to everything."""
    reader.only("attention_bias", True, why="attention has biases, as the experts have: must be true")
    reader.only("swiglu_alpha", 1.702, why="gates are multiplied by 1.702 before their sigmoid")
    reader.only("swiglu_limit", CLAMP, why=f"gate and up are held within {CLAMP}")
    shape = replace(
        silu_decoder(reader),
        linear_bias=True,
        activation=CLAMPED,
        attention_sinks=True,
        sliding_window=alternating_window(reader, 2, None),
    )
    return replace(shape, moe=_local_experts(reader, shape, Router(**auxiliary(reader))))


def llama4_text(reader: ConfigReader) -> ModelShape:
    """The language model of Llama 4, by itself."""
    reader.only("attention_bias", False, why=NO_BIAS)
    if reader.number("router_jitter_noise") != 0:
        raise BadKey(("router_jitter_noise",), "noise on what the router sees is not supported; set it to 0")
    if reader.flag("attn_temperature_tuning"):
        reader.only("floor_scale", 8192, why="positions count by 8192 tokens")
        reader.only("attn_scale", 0.1, why="queries grow by a tenth of a logarithm")
    shape = silu_decoder(reader)
    layers, every, step = (
        shape.num_layers,
        reader.size("no_rope_layer_interval"),
        reader.size("interleave_moe_layer_step"),
    )
    turned = [int((i + 1) % every != 0) for i in range(layers)]
    mixtures = list(range(step - 1, layers, step))
    kinds = [CHUNKED if with_positions else FULL for with_positions in turned]
    chunk = reader.get("attention_chunk_size")
    for key, value in (("no_rope_layers", turned), ("moe_layers", mixtures), ("layer_types", kinds)):
        written = reader.get(key)
        if written and written != value:
            raise BadKey((key,), "other layers than at even distances are not supported; remove it")
    router = Router("sigmoid", normalize_topk=False, weighted_inputs=True, **auxiliary(reader))
    experts = MoeShape(
        **read_keys(reader, LOCAL_EXPERTS),
        shared_expert_ffn_hidden_size=shape.ffn_hidden_size,
        layer_pattern=tuple(int(i in mixtures) for i in range(layers)),
        router=router,
    )
    window = None if chunk is None else SlidingWindow(reader.size("attention_chunk_size"), every, chunked=True)
    return replace(
        shape,
        **read_keys(reader, LLAMA4_KEYS),
        no_rope_every=every,
        sliding_window=window,
        moe=experts,
    )


def glm4_moe(reader: ConfigReader) -> ModelShape:
    """GLM-4.5 to 4.7: ordinary attention with biases on query, key and value, before DeepSeek-V3's experts."""
    only_if_given(reader, "scoring_func", "sigmoid")
    _remark_prediction(reader)
    return replace(_deepseek_experts(reader, _sigmoid_router(reader)), **read_keys(reader, GLM_KEYS))


def minimax_m2(reader: ConfigReader) -> ModelShape:
    """Released files name the turned part of a head `rotary_dim`, and the modules for multi-token prediction, which
    transformers builds none of."""
    only_if_given(reader, "scoring_func", "sigmoid")
    only_if_given(reader, "use_qk_norm", True)
    only_if_given(reader, "qk_norm_type", "per_layer")
    if reader.values.get("use_mtp"):
        reader.remark("multi-token prediction is left out, as transformers does")
    if reader.number("router_jitter_noise") != 0:
        raise BadKey(("router_jitter_noise",), "noise on what the router sees is not supported; set it to 0")
    shape, turned = silu_decoder(reader), reader.values.get("rotary_dim")
    router = Router("sigmoid", expert_bias=True, **auxiliary(reader))
    return replace(
        shape,
        qk_layernorm=True,
        qk_norm_of_all_heads=True,
        rotary_percent=rotary_percent(reader) if turned is None else reader.size("rotary_dim") / shape.head_dim,
        moe=_local_experts(reader, shape, router),
    )


def olmo3(reader: ConfigReader) -> ModelShape:
    """Norms stand behind attention and MLP; scaling changes the positions of layers without a window alone."""
    reader.only("attention_bias", False, why=NO_BIAS)
    local, scaled = rope(reader, WINDOWED, "rope_theta")
    if scaled is not None:
        raise BadKey(("rope_parameters",), "scaled positions in windowed layers are not supported")
    return replace(
        silu_decoder(reader),
        qk_layernorm=True,
        qk_norm_of_all_heads=True,
        norms_after_alone=True,
        sliding_window=alternating_window(reader, 4, local),
    )


def phi3(reader: ConfigReader) -> ModelShape:
    """Phi-3 and Phi-4; scaling by longrope is refused where it is read."""
    dropout = reader.rate("resid_pdrop")
    if reader.rate("embd_pdrop") != dropout:
        raise BadKey(("embd_pdrop",), "must be equal to resid_pdrop: one rate drops out of the residual stream here")
    return replace(mistral(reader), hidden_dropout=dropout, **read_keys(reader, TURNED))


def qwen2(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    return replace(silu_decoder(reader), qkv_bias=True)


def qwen3(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    reader.only("attention_bias", False, why=NO_BIAS)
    return replace(silu_decoder(reader), qk_layernorm=True)


def qwen2_moe(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    shape = replace(silu_decoder(reader), **read_keys(reader, QKV_BIAS))
    return replace(shape, moe=_with_shared_expert(reader, _qwen_experts(reader, shape)))


def qwen3_moe(reader: ConfigReader) -> ModelShape:
    shape = qwen3(reader)
    return replace(shape, moe=_qwen_experts(reader, shape))


def qwen3_next(reader: ConfigReader) -> ModelShape:
    shape = qwen3_5(reader)
    return replace(shape, moe=_with_shared_expert(reader, _qwen_experts(reader, shape)))


def qwen3_5(reader: ConfigReader) -> ModelShape:
    """Gated delta nets, and every fourth layer attention with a gate. Norms multiply by 1 + weight, but for those over
    the heads of the delta nets. Released files have a module for multi-token prediction, which transformers builds none
    of, and positions in three parts, which are one in text."""
    reader.only("attention_bias", False, why=NO_BIAS)
    only_if_given(reader, "attn_output_gate", True)
    if reader.values.get("mtp_num_hidden_layers"):
        reader.remark("multi-token prediction is left out, as transformers does")
    linear = LinearAttention(full_every=linear_layers(reader), **read_keys(reader, LINEAR_ATTENTION))
    return replace(
        silu_decoder(reader),
        qk_layernorm=True,
        zero_centered_norm=True,
        attention_gate=True,
        **read_keys(reader, TURNED),
        linear_attention=None if linear.full_every == 1 else linear,
    )


def qwen3_5_moe(reader: ConfigReader) -> ModelShape:
    """Every layer is a mixture, so that there is no width of a dense MLP."""
    width = reader.size("moe_intermediate_size")
    reader.values = {**reader.values, "intermediate_size": width}
    shape = qwen3_5(reader)
    moe = MoeShape(
        **read_keys(reader, QWEN_EXPERTS),
        shared_expert_ffn_hidden_size=0,
        layer_pattern=(1,) * shape.num_layers,
        router=Router(**auxiliary(reader)),
    )
    return replace(shape, moe=_with_shared_expert(reader, moe))


def _with_shared_expert(reader: ConfigReader, experts: MoeShape) -> MoeShape:
    return replace(experts, shared_expert_gate=True, **read_keys(reader, SHARED_EXPERT))


def _qwen_experts(reader: ConfigReader, shape: ModelShape) -> MoeShape:
    step = reader.size("decoder_sparse_step")
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(i, int) for i in dense):
        raise BadKey(("mlp_only_layers",), "must be a list of layer numbers")
    return MoeShape(
        **read_keys(reader, QWEN_EXPERTS),
        shared_expert_ffn_hidden_size=0,
        layer_pattern=tuple(int(i not in dense and not (i + 1) % step) for i in range(shape.num_layers)),
        router=Router(**read_keys(reader, (NORMALIZED,)), **auxiliary(reader)),
    )


def gemma(reader: ConfigReader) -> ModelShape:
    """The class takes its old "gelu" for gelu_pytorch_tanh."""
    reader.only("hidden_act", "gelu_pytorch_tanh", "gelu", why="only gelu_pytorch_tanh is supported")
    return _of_gemma(reader, decoder(reader))


def _of_gemma(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    reader.only("attention_bias", False, why=NO_BIAS)
    if reader.values.get("use_bidirectional_attention"):
        raise BadKey(("use_bidirectional_attention",), "only causal attention is supported; set it to false")
    return replace(shape, activation="gelu", zero_centered_norm=True, scaled_embedding=True)


def gemma2(reader: ConfigReader) -> ModelShape:
    return replace(_gemma2(reader), sliding_window=alternating_window(reader, 2, None))


def gemma3(reader: ConfigReader) -> ModelShape:
    """Layers with a window have a rotary base of their own, and scaling changes the others alone."""
    local, scaled = rope(reader, WINDOWED)
    if scaled is not None:
        raise BadKey(("rope_parameters",), "scaled positions in windowed layers are not supported")
    every = reader.size("sliding_window_pattern")
    return replace(_gemma2(reader), qk_layernorm=True, sliding_window=alternating_window(reader, every, local))


def _gemma2(reader: ConfigReader) -> ModelShape:
    shape = _of_gemma(reader, decoder(reader, "hidden_activation"))
    scale = reader.number("query_pre_attn_scalar", above=0.0)
    return replace(
        shape,
        post_norms=True,
        attention_scale=None if scale == shape.head_dim else scale,
        **read_keys(reader, GEMMA2_KEYS),
    )


def deepseek_v2(reader: ConfigReader) -> ModelShape:
    """Groups count by their best expert, and the chosen scores are never made to sum to 1, whatever norm_topk_prob
    says."""
    reader.only("mlp_bias", False, why=NO_BIAS)
    reader.only("topk_method", "greedy", "group_limited_greedy", why="must be greedy or group_limited_greedy")
    reader.only("norm_topk_prob", False, None, why="transformers does not normalise the scores: must be false")
    only_if_given(reader, "scoring_func", "softmax")
    router = Router(normalize_topk=False)
    grouped = reader.get("topk_method") == "group_limited_greedy"
    return _deepseek(reader, _in_groups(reader, router) if grouped else router)


def deepseek_v3(reader: ConfigReader) -> ModelShape:
    """Multi-token prediction stands in the file, and transformers builds none of it."""
    only_if_given(reader, "scoring_func", "sigmoid")
    only_if_given(reader, "topk_method", "noaux_tc")
    _remark_prediction(reader)
    return _deepseek(reader, _sigmoid_router(reader))


def deepseek_v32(reader: ConfigReader) -> ModelShape:
    """DeepSeek-V3 whose queries attend to the keys that an indexer chooses, as those of GLM-5 do."""
    reader.only("mlp_bias", False, None, why=NO_BIAS)
    for key in ("mlp_layer_types", "index_topk_pattern"):
        only_if_given(reader, key, None)
    only_if_given(reader, "index_topk_freq", 1)
    chosen = reader.values.get("indexer_types")
    if chosen is not None and (not isinstance(chosen, list) or any(kind != "full" for kind in chosen)):
        raise BadKey(
            ("indexer_types",), "layers that share what another has chosen are not supported: all must be full"
        )
    only_if_given(reader, "scoring_func", "sigmoid")
    only_if_given(reader, "topk_method", "noaux_tc")
    if reader.values.get("num_nextn_predict_layers"):
        reader.remark("multi-token prediction is left out, as transformers does")
    shape = _deepseek(reader, _sigmoid_router(reader))
    return replace(shape, indexer=Indexer(**read_keys(reader, INDEXER)))


def glm_moe_dsa(reader: ConfigReader) -> ModelShape:
    shape = deepseek_v32(reader)
    assert shape.indexer is not None
    only_if_given(reader, "indexer_rope_interleave", True)
    return replace(shape, indexer=replace(shape.indexer, interleaved=True))


def _remark_prediction(reader: ConfigReader) -> None:
    more = reader.values.get("num_nextn_predict_layers")
    if more:
        reader.remark(
            f"num_nextn_predict_layers={more} is left out, as transformers does; model.mtp_num_layers trains it with "
            "Megatron-LM"
        )


def _sigmoid_router(reader: ConfigReader) -> Router:
    """DeepSeek-V3's; one group of experts is none."""
    router = Router("sigmoid", expert_bias=True, **read_keys(reader, (NORMALIZED,)))
    return _in_groups(reader, router) if reader.size("n_group") > 1 else router


def _in_groups(reader: ConfigReader, router: Router) -> Router:
    return replace(router, groups=reader.size("n_group"), group_topk=reader.size("topk_group"))


def _deepseek(reader: ConfigReader, router: Router) -> ModelShape:
    reader.only("attention_bias", False, why=NO_BIAS)
    shape = _deepseek_experts(reader, router)
    mla = MlaShape(**read_keys(reader, LATENT))
    return replace(
        shape,
        mla=mla,
        num_query_groups=shape.num_attention_heads,
        head_dim=mla.qk_head_dim + mla.qk_pos_emb_head_dim,
    )


def _deepseek_experts(reader: ConfigReader, router: Router) -> ModelShape:
    """A decoder with the experts of DeepSeek, which GLM has too."""
    only_if_given(reader, "moe_layer_freq", 1)
    shape = silu_decoder(reader)
    dense = reader.size("first_k_dense_replace", least=0)
    experts = read_keys(reader, DEEPSEEK_EXPERTS)
    moe = MoeShape(
        **experts,
        shared_expert_ffn_hidden_size=reader.size("n_shared_experts", least=0) * experts["ffn_hidden_size"],
        layer_pattern=tuple(int(i >= dense) for i in range(shape.num_layers)),
        router=replace(router, **read_keys(reader, (SCALED,)), **_balancing(reader)),
    )
    return replace(shape, moe=moe)


def _balancing(reader: ConfigReader) -> dict[str, Any]:
    """DeepSeek's own code has an auxiliary loss, that of transformers none."""
    if reader.values.get("aux_loss_alpha") is None:
        return {"balancing": "none", "aux_loss_coeff": 0.0}
    by_sequence = reader.values.get("seq_aux", True)
    kind = "seq_aux_loss" if by_sequence else "aux_loss"
    return {"balancing": kind, "aux_loss_coeff": coefficient(reader, "aux_loss_alpha")}


def gpt2(reader: ConfigReader) -> ModelShape:
    reader.only("activation_function", "gelu_new", "gelu_pytorch_tanh", why="only gelu_new (by tanh) is supported")
    reader.only("scale_attn_weights", True, why="scores are always scaled here: must be true")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        reader.only(key, False, why="is not supported: must be false")
    values = read_keys(reader, GPT2_KEYS)
    if reader.rate("embd_pdrop") != values["hidden_dropout"]:
        raise BadKey(("embd_pdrop",), "must be equal to resid_pdrop: one rate drops out of the residual stream here")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        raise BadKey(("n_head",), f"n_embd {hidden} is not divisible by {heads} heads; give a number that divides it")
    return ModelShape(
        name="",
        **values,
        num_query_groups=heads,
        head_dim=hidden // heads,
        gated_mlp=False,
        linear_bias=True,
        normalization="LayerNorm",
        position_embedding="learned_absolute",
        activation="gelu",
    )


BUILDERS: Mapping[str, Callable[[ConfigReader], ModelShape]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
    "llama4_text": llama4_text,
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
    "glm4_moe": glm4_moe,
    "minimax_m2": minimax_m2,
    "phi3": phi3,
    "olmo3": olmo3,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "deepseek_v4": deepseek_v4,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
}
