"""Types of NumPy columns: one value per candidate, or per candidate and pipeline rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]
NarrowColumn = NDArray[np.int32]  # of columns that may have ten million rows
BoolColumn = NDArray[np.bool_]
