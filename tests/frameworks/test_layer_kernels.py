"""Kernels that transformers' own layers launch and elements that they move, counted by torch's dispatcher on the meta
device, against the facts that step times read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from llmlaunch.frameworks.deepspeed.facts import EAGER_KERNELS

pytestmark = pytest.mark.frameworks

TOKENS = 64
# what launches nothing: views, and numbers on the host
FREE = ("_unsafe_view", "scalar_tensor", "ones", "detach", "empty", "empty_like", "empty_strided", "new_empty")
ATTENTION = (1.0, 3.0)  # kernels of flash attention, which the meta device does not have


def counted(run: Any) -> tuple[Counter[str], float]:
    """Return the operators that `run` dispatches by name, and the elements that those other than products move for each
    token."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    operators: Counter[str] = Counter()
    moved = 0

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal moved
            result = function(*args, **(kwargs or {}))
            name = function._schema.name.split("::")[1]
            view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
            if not view and name not in FREE:
                operators[name] += 1
                tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
                moved += 0 if name == "mm" else sum(t.numel() * t.element_size() for t in tensors)
            return result

    with Mode():
        run()
    return operators, moved / TOKENS / 2.0


def layer(hidden: int, width: int, heads: int, groups: int) -> tuple[Any, Any, Any]:
    """Return a Llama layer without attention kernels, its input, and its rotary positions."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Nothing(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
            context.like = query, key, value
            return torch.empty_like(query.transpose(1, 2))

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return tuple(torch.empty_like(tensor) for tensor in context.like)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        return Nothing.apply(query, key, value), None

    ALL_ATTENTION_FUNCTIONS.register("nothing", attention)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=width, num_attention_heads=heads, num_key_value_heads=groups
    )
    config._attn_implementation = "nothing"
    with torch.device("meta"):
        made = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
        like = {"dtype": torch.bfloat16}
        entering = torch.empty(1, TOKENS, hidden, requires_grad=True, **like)
        positions = [torch.empty(1, TOKENS, hidden // heads, **like) for _ in range(2)]
    return made, entering, positions


def both_passes(*sizes: int) -> list[tuple[Counter[str], float]]:
    import torch

    made, entering, positions = layer(*sizes)
    results: list[Any] = []
    forward = counted(lambda: results.append(made(entering, position_embeddings=positions)))
    gradient = torch.empty_like(results[0])
    return [forward, counted(lambda: results[0].backward(gradient))]


def test_a_layer_of_transformers_launches_as_many_kernels_as_the_facts_say() -> None:
    for each, (operators, _) in enumerate(both_passes(512, 1024, 4, 2)):
        launched = sum(operators.values()) + ATTENTION[each]
        assert launched == pytest.approx(EAGER_KERNELS.launched[each], abs=1)  # a copy between attention and projection
        assert operators["mm"] == 7 * (1 + each)


@pytest.mark.parametrize("sizes", [(512, 1024, 4, 4), (512, 4096, 4, 2), (1024, 1024, 8, 1)])
def test_its_element_wise_kernels_move_as_much(sizes: tuple[int, int, int, int]) -> None:
    hidden, width, heads, groups = sizes
    facts = EAGER_KERNELS
    for each, (_, elements) in enumerate(both_passes(*sizes)):
        stream = (2.0 * facts.norm_elements[each] + facts.stream_elements[each]) * hidden
        rotary = facts.rotary_elements[each] * (hidden + hidden // heads * groups)
        fused = (3.0, 5.0)[each]
        expected = stream + rotary + (fused + facts.activation_elements[each]) * width
        assert elements == pytest.approx(expected, rel=0.02)
