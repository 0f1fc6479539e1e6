"""What is trained in one step and in which number formats, independent of how it is split."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import key, section
from llmlaunch.frozen import frozen


@frozen
class Workload:
    """One training step: `global_batch_size` sequences of `sequence_length` tokens in `precision`."""

    sequence_length: int
    global_batch_size: int
    precision: str = "bf16"

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.global_batch_size


Moment = Literal["fp32", "bf16", "fp16", "fp8"]


@section
class OptimizerFormats:
    """Formats of what AdamW keeps for each parameter. A framework has some of them: its requirements say which."""

    main_parameters: str = key(
        "Copy of the parameters it updates: fp32 or fp16 on megatron-lm, where fp32 takes 2 bytes beside bf16 "
        "parameters, the low ones; fp32 or bf16 on deepspeed",
        default="fp32",
        written=Literal["fp32", "bf16", "fp16"],
    )
    first_moment: str = key("Running mean of the gradients", default="fp32", written=Moment)
    second_moment: str = key("Running mean of their squares", default="fp32", written=Moment)


@frozen
class NumberFormats:
    """Number formats beside `Workload.precision`.

    `narrow` is the recipe by which linear layers multiply in 8 or 4 bits, in Transformer Engine's names ("delayed",
    "tensorwise", "blockwise", "mxfp8", "nvfp4"); None = in `Workload.precision`. With `narrow_parameters` the weights
    themselves have this format. `optimizer` None is the backend's own: fp32 throughout.
    """

    narrow: str | None = None
    narrow_parameters: bool = False
    optimizer: OptimizerFormats | None = None

    def beside(self, precision: str) -> str:
        """Return all formats of products as text: "bf16", "bf16 and fp8 (tensorwise)", "bf16 and nvfp4"."""
        if self.narrow is None:
            return precision
        return f"{precision} and {self.narrow if self.narrow == 'nvfp4' else f'fp8 ({self.narrow})'}"


NO_NUMBER_FORMATS = NumberFormats()


ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
