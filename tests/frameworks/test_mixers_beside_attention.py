"""Layers of Falcon-H1, a Mamba-2 mixer beside attention, against transformers itself: what they keep for the backward
pass and what is alive in it, around a stand-in for mamba-ssm's kernel."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from test_family_bytes import kept, model_of, priced

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.layers.block import Behind
from llmlaunch.layers.mamba import Mamba2
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import ModelShape
from llmlaunch.workload import Workload
from support.soak import in_soak

pytestmark = pytest.mark.frameworks

SEQUENCES = 2


def small(layers: int, norm: bool, hidden: int = 128) -> ModelShape:
    mamba = Mamba("H" * layers, 8, hidden // 8, 64, 2, chunk=64, gated_norm=norm)
    return replace(
        load_preset("falcon-h1-34b"),
        **{"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": 5 * hidden // 2, "head_dim": hidden // 8},
        **{"num_attention_heads": 8, "num_query_groups": 2, "vocab_size": 256, "max_position_embeddings": 512},
        mamba=mamba,
    )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    from mixer_stand_in import fused_kernel
    from transformers.models.falcon_h1 import modeling_falcon_h1

    def put(told: Callable[[], None] | None = None) -> None:
        monkeypatch.setattr(modeling_falcon_h1, "mamba2_split_conv1d_scan_combined", fused_kernel(told))

    return put


@pytest.mark.parametrize("norm", [True, *in_soak(False)])
def test_a_layer_keeps_what_is_priced(norm: bool, stand_in: Callable[..., None]) -> None:
    """The difference of three layers and two. The class keeps the decay of each head, too, in fp32."""
    stand_in()
    measured = kept(model_of(small(3, norm))) - kept(model_of(small(2, norm)))
    assert priced(small(3, norm)) == measured - 4 * 8


class Live:
    """Bytes of the storages that operators made and that are still there, those of `own` tensors aside."""

    def __init__(self, own: set[int]) -> None:
        self.bytes, self._own, self._references = 0, own, dict[int, Any]()

    def meet(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if not storage.nbytes() or tensor.data_ptr() in self._own or storage._cdata in self._references:
            return
        self.bytes += storage.nbytes()
        gone = partial(self._gone, storage._cdata, storage.nbytes())
        self._references[storage._cdata] = weakref.ref(storage, gone)

    def _gone(self, key: int, size: int, reference: Any) -> None:
        del self._references[key]
        self.bytes -= size


@pytest.mark.parametrize(("norm", "length"), [(True, 64), *in_soak((True, 512), (False, 512))])
def test_a_mixer_runs_backward_when_attention_has_let_go(
    norm: bool, length: int, stand_in: Callable[..., None]
) -> None:
    """The gradient of the layer's output, which the caller holds, is one tensor more than is alive in a model."""
    import torch
    from torch.autograd.graph import GradientEdge
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    shape, alive = small(1, norm, 256), list[int]()
    model = model_of(shape)
    layer = model.model.layers[0]
    states = torch.randn(SEQUENCES, length, 256, dtype=torch.bfloat16, requires_grad=True)
    turns = model.model.rotary_emb(states, position_ids=torch.arange(length)[None])
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *turns)}
    live = Live(own)

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    live.meet(leaf)
            return result

    stand_in(lambda: alive.append(live.bytes))
    for parameter in layer.parameters():  # gradients are reduced and let go of
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    with Mode():
        output = layer(states, position_embeddings=turns)[0]
        gradient, edge = torch.ones_like(output), GradientEdge(output.grad_fn, 0)
        del output
        torch.autograd.backward((edge,), (gradient,))
    stream = 2 * SEQUENCES * length * 256
    assert alive == [pytest.approx(at_the_scan(shape, length) + stream, abs=256)]


def at_the_scan(shape: ModelShape, length: int) -> float:
    """What is priced: all that a layer keeps, the gradient of the stream, and the mixer's own less what is free."""
    facts = deepspeed_facts(DeepSpeedOptions(precision="bf16"))
    job = Job(shape, Workload(length, SEQUENCES, "bf16"), facts)
    layers = layers_of(job, all_ranks(job, LayoutColumns.of([Layout(micro_batch_size=SEQUENCES)])))
    branches = layers.model.kinds[0].branches
    mixer, attention = branches[0].blocks
    assert isinstance(mixer, Mamba2)
    behind = Behind(partial(layers._freed_behind, branches, 0, (attention,)))
    own = float(np.ravel(mixer.backward(layers.columns, layers.tensors[0], behind))[0])
    return float(layers.totals[0][0] + layers.stream[0]) + own
