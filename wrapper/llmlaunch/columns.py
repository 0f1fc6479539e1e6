"""Types of NumPy columns: one value per candidate, or per candidate and pipeline rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BoolColumn", "FloatColumn", "IntColumn"]

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]
BoolColumn = NDArray[np.bool_]
