"""The kinds of jobs that the corpus holds, told from a case and its answer: a draw wants them, a test counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import yaml

Case = Mapping[str, Any]
Answer = Mapping[str, Any]
HYBRIDS = ("nemotron", "qwen3-next", "qwen3.5")


def is_of(kind: str, case: Case, answer: Answer) -> bool:
    """Return whether a case is of a kind and was planned."""
    return "plan" in answer and KINDS[kind](case, answer)


def _document(case: Case) -> dict[str, Any]:
    return _parsed(case["recipe"])


@cache
def _parsed(text: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def _model(case: Case) -> str:
    model = _document(case)["model"]
    return str(model.get("base", model)) if isinstance(model, dict) else str(model)


def _hybrid(case: Case) -> bool:
    return any(name in _model(case) for name in HYBRIDS)


def _layout(answer: Answer) -> Mapping[str, Any]:
    return answer["plan"]["layout"]  # type: ignore[no-any-return]


def _techniques(answer: Answer) -> Mapping[str, Any]:
    return answer["plan"]["techniques"]  # type: ignore[no-any-return]


def _offloads(answer: Answer) -> bool:
    offloads = any(name.startswith("offload") and value for name, value in _techniques(answer).items())
    return offloads or bool(_layout(answer).get("offload_layers"))


def _zero_with_offload(answer: Answer, stage: int) -> bool:
    techniques = _techniques(answer)
    return _layout(answer)["zero_stage"] == stage and bool(
        techniques.get("offload_optimizer") or techniques.get("offload_parameters")
    )


def _measured_model(answer: Answer) -> Mapping[str, Any]:
    return answer["record"]["recipe"]["model"]  # type: ignore[no-any-return]


KINDS: Mapping[str, Callable[[Case, Answer], bool]] = {
    "hybrid-offload": lambda case, answer: _hybrid(case) and _offloads(answer),
    "hybrid-interleaved": lambda case, answer: _hybrid(case) and _layout(answer)["virtual_pipeline"] > 1,
    "wide-tensor": lambda case, answer: (
        "record" in answer
        and _layout(answer)["tensor"] > _measured_model(answer).get("num_query_groups", 1 << 20)
        and "mla" not in _measured_model(answer)
    ),
    "prediction-heads": lambda case, answer: any(
        word.startswith("model.mtp_num_layers=") for word in case.get("overrides", ())
    ),
    "zero2-offload": lambda case, answer: _zero_with_offload(answer, 2),
    "zero3-offload": lambda case, answer: _zero_with_offload(answer, 3),
    "lora": lambda case, answer: "adapters" in _document(case)["training"],
    "vision": lambda case, answer: "-vl-" in _model(case),
    "uneven": lambda case, answer: bool(_layout(answer)["layers_by_stage"]),
    "switch": lambda case, answer: case.get("needs_switch", False) and answer["plan"]["verdict"] == "safe",
    "folder": lambda case, answer: _model(case).startswith("./"),
    "random": lambda case, answer: True,
}
"""What makes a case one of a kind. `wide-tensor`: more tensor ranks than groups of keys and values. `switch`: with
`techniques: asked`, and the chosen layout otherwise the same, nothing is safe."""
