"""Model shapes the memory tests share."""

from __future__ import annotations

from llmlaunch.models.shape import ModelShape, MoeShape

LLAMA3_8B = ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
LLAMA3_70B = ModelShape("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
LLAMA2_7B = ModelShape("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096)
MIXTRAL = ModelShape("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, 32768, moe=MoeShape(8, 2, 14336, 0, (1,) * 32))
ALTERNATING = ModelShape(
    "alternating", 32, 2048, 8192, 16, 16, 128, 32000, 4096, moe=MoeShape(16, 2, 8192, 0, (0, 1) * 8 + (1, 1) * 8)
)
