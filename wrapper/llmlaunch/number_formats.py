"""In which number formats linear layers multiply and the optimizer keeps what it knows, beside `Workload.precision`.

Every default changes nothing. Recipe, rules, estimator and backends share these types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmlaunch.documents.keys import key, section

__all__ = ["ELEMENT_BYTES", "NO_NUMBER_FORMATS", "NumberFormats", "OptimizerFormats"]


Moment = Literal["fp32", "bf16", "fp16", "fp8"]


@section
class OptimizerFormats:
    """Formats of what the precision-aware optimizer keeps for each parameter."""

    main_parameters: str = key(
        "Copy of the parameters it updates; fp32 takes 2 bytes beside bf16 parameters, the low ones",
        default="fp32",
        written=Literal["fp32", "fp16"],
    )
    first_moment: str = key("Running mean of the gradients", default="fp32", written=Moment)
    second_moment: str = key("Running mean of their squares", default="fp32", written=Moment)


@dataclass(frozen=True)
class NumberFormats:
    """`narrow` is how linear layers multiply in 8 or 4 bits, in Transformer Engine's names ("delayed", "tensorwise",
    "blockwise", "mxfp8", "nvfp4"); None = as `Workload.precision` says. With `narrow_parameters` the weights themselves
    are kept so. `optimizer` None is the backend's own: fp32 throughout."""

    narrow: str | None = None
    narrow_parameters: bool = False
    optimizer: OptimizerFormats | None = None

    def beside(self, precision: str) -> str:
        """All that is multiplied in, in words: "bf16", "bf16 and fp8 (tensorwise)", "bf16 and nvfp4"."""
        if self.narrow is None:
            return precision
        return f"{precision} and {self.narrow if self.narrow == 'nvfp4' else f'fp8 ({self.narrow})'}"


NO_NUMBER_FORMATS = NumberFormats()


ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
