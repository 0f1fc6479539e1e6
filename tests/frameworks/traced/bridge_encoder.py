"""What Megatron-Bridge's own vision encoder of Qwen3-VL keeps for its backward pass, under fake tensors
(megatron/bridge/models/qwen_vl/modelling_qwen3_vl, 0.6).

Run inside a process that has Megatron core and its groups (megatron_judge.py). What reads values of the images' grid,
which fake tensors have not, is done here: positions, turns and the lengths of images; blocks and projectors are
Bridge's.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._subclasses.fake_tensor import FakeTensorMode

from live_storages import STORAGES

SITE = Path(sys.prefix) / "bridge-0.6"
MODELS = "megatron.bridge.models.qwen_vl"
SIZES = {
    **{"depth": 3, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
    **{"temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2, "num_position_embeddings": 2304},
    **{"out_hidden_size": 4096, "deepstack_visual_indexes": [1]},
}
SIDE, IMAGES = 24, 2  # patches along a side


def encoder_bytes(config: Any) -> dict[str, Any]:
    """Return the parameters, and the bytes kept: of a trained encoder, of a frozen one, and with its blocks computed
    again. `config` is the decoder's."""
    import_bridge()
    with FakeTensorMode(allow_non_fake_inputs=True), STORAGES:
        _kept(config, "trained")  # which leaves the workspace of products
        kept = {case: _kept(config, case) for case in ("trained", "frozen", "recomputed")}
        return {"parameters": sum(each.numel() for each in _encoder(config, "trained").parameters()), **kept}


def import_bridge() -> None:
    """Leave out what packages import beside the encoder."""
    import absent_packages

    import bridge_packages

    sys.path.insert(0, str(SITE))
    for name, module in sys.modules.items():  # of stand-ins, for which packages of Bridge's look
        if "." not in name and getattr(module, "__spec__", module) is None:
            module.__spec__ = ModuleSpec(name, None)
    absent_packages.install()
    packages = bridge_packages.install()
    for name in (MODELS, f"{MODELS}.modelling_qwen3_vl"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(packages.joinpath(*name.split(".")))]


def _encoder(decoder: Any, case: str) -> Any:
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import get_vision_model_config
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import PatchMergerSubmodules
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    config = get_vision_model_config(SimpleNamespace(**SIZES), decoder)
    config.params_dtype, config.bf16, config.gradient_accumulation_fusion = torch.bfloat16, True, False
    if case == "recomputed":
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    layers = get_vit_layer_with_transformer_engine_spec()
    layers.submodules.self_attention.module = Qwen3VLSelfAttention
    projectors = PatchMergerSubmodules(TENorm, TEColumnParallelLinear, TERowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = Qwen3VLVisionModel(config, layers, projectors, pg_collection=groups).cuda().bfloat16().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "merger" in name or case != "frozen"
    return model


def _kept(decoder: Any, case: str) -> int:
    """Return the bytes alive after the forward pass that were not before, but for what projectors put out."""
    model, patches = _encoder(decoder, case), IMAGES * SIDE**2
    gc.collect()
    before = set(STORAGES._live)
    tokens, deepstack = _forward(model, patches)
    gc.collect()
    outputs = STORAGES.mark([tokens, *deepstack], "output")
    return sum(STORAGES._births[key].bytes for key in STORAGES._live - before) - outputs


def _forward(model: Any, patches: int) -> Any:
    width = SIZES["in_channels"] * SIZES["temporal_patch_size"] * SIZES["patch_size"] ** 2
    hidden = model.patch_embed(torch.zeros((patches, width), device="cuda"))
    places = torch.zeros((4, patches), dtype=torch.int64, device="cuda")
    weights = torch.zeros((4, patches), dtype=torch.bfloat16, device="cuda")
    hidden = hidden + (model.pos_embed(places) * weights[:, :, None]).sum(0)
    turns = torch.zeros((patches, 1, 1, SIZES["hidden_size"] // SIZES["num_heads"]), device="cuda")
    ends = torch.zeros(IMAGES + 1, dtype=torch.int32, device="cuda")
    lengths = {"max_seqlen_q": SIDE**2, "max_seqlen_kv": SIDE**2}
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **lengths)
    hidden, deepstack = model.decoder(
        hidden_states=hidden[:, None], attention_mask=None, rotary_pos_emb=turns, packed_seq_params=packed
    )
    return model.merger(hidden), deepstack
