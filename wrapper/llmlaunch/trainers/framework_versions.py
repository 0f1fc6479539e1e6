"""Reports the versions in a training environment as one JSON line on stdout. `llmlaunch doctor --container` runs it on
a node.

Standard library alone, Python 3.8 or newer; torch is imported, the others are looked up. Megatron core is the one of
the checkout ($MEGATRON_LM_PATH), which a training would take, else the one that is installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES_VARIABLE = "LLMLAUNCH_PROBE_PACKAGES"  # the packages to look up, with blanks between them
PACKAGE_INFO = Path("megatron/core/package_info.py")


def main() -> None:
    names = os.environ.get(PACKAGES_VARIABLE, "").split()
    packages = {name: version for name, version in ((name, installed(name)) for name in names) if version}
    checkout = os.environ.get("MEGATRON_LM_PATH") or ""
    core = core_version(Path(checkout) / PACKAGE_INFO) if checkout else ""
    if core or "megatron-core" not in packages:
        packages.update({"megatron-core": core or core_version(importable_core())})
    environment: dict[str, Any] = {
        "packages": {name: version for name, version in packages.items() if version},
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "node": socket.gethostname().split(".")[0],
        "driver": driver(),
        **torch_says(),
    }
    print(json.dumps(environment), flush=True)


def installed(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name) or ""
    return ""


def torch_says() -> dict[str, Any]:
    """The CUDA it was built for, and the devices it sees; why not, where it does not import."""
    try:
        import torch

        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return {"cuda": torch.version.cuda, "devices": names, "problem": ""}
    except Exception as failure:
        return {"cuda": None, "devices": [], "problem": f"torch: {type(failure).__name__}: {failure}"}


def core_version(path: Path | None) -> str:
    """MAJOR.MINOR.PATCH and PRE_RELEASE of a package_info.py, read as text; empty where there is none."""
    try:
        text = "" if path is None else path.read_text("utf-8", "replace")
    except OSError:
        return ""
    numbers = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    end = re.search(r"^PRE_RELEASE\s*=\s*[\"']([\w.+-]*)[\"']", text, re.MULTILINE)
    parts = [number.group(1) for number in numbers if number]
    return ".".join(parts) + (end.group(1) if end else "") if len(parts) == 3 else ""


def importable_core() -> Path | None:
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(PACKAGE_INFO.parts[0])
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(folder).parent / PACKAGE_INFO).is_file():
                return Path(folder).parent / PACKAGE_INFO
    return None


def driver() -> str | None:
    """NVIDIA's, of this node; None without one."""
    with contextlib.suppress(OSError):
        match = re.search(r"Kernel Module\D*?(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text("utf-8"))
        if match:
            return match.group(1)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return answer[0] if answer else None
    return None


if __name__ == "__main__":
    main()
