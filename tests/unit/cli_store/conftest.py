from __future__ import annotations

import sys
from pathlib import Path

UNIT = Path(__file__).parents[1]
sys.path.insert(0, str(UNIT / "store"))  # store_run_dirs: run directories made by hand
sys.path.insert(0, str(UNIT / "calibration"))  # measured_runs: records made by hand
