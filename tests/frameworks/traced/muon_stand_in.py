"""What Megatron core imports for Muon of emerging-optimizers, which is not among the packages that the tests install:
the optimizer's state, and the tensors that the steps of Newton-Schulz make, in bf16 (orthogonalized_optimizer.py and
muon_utils.py of emerging_optimizers/orthogonalized_optimizers, NVIDIA-NeMo/Emerging-Optimizers fd77292). The buffers,
shards and optimizers around it are Megatron core's own."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType
from typing import Any, Literal

VERSION = "0.5.0"


def install() -> None:
    import torch

    class OrthogonalizedOptimizer(torch.optim.Optimizer):
        """An fp32 momentum for each matrix, orthogonalized by what the class below it hands over."""

        def __init__(
            self,
            params: Any,
            lr: float,
            momentum: float,
            *,
            nesterov: bool,
            weight_decay: float,
            weight_decay_method: str,
            fp32_matmul_prec: str,
            scaled_orthogonalize_fn: Any,
        ) -> None:
            super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
            self.nesterov, self.scaled_orthogonalize_fn = nesterov, scaled_orthogonalize_fn

        def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
            for p in group["params"]:
                if not self.state[p] and not (skip_non_grad_params and p.grad is None):
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.data)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                self._init_group(group)
                for p in group["params"]:
                    if p.grad is not None:
                        p.mul_(1.0 - group["lr"] * group["weight_decay"])
                        momentum = self.state[p]["momentum_buffer"]
                        momentum.lerp_(p.grad, 1.0 - group["momentum"])
                        update = p.grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum
                        p.add_(self.orthogonalize(p, update), alpha=-group["lr"])

        def orthogonalize(self, p: Any, grad: Any) -> Any:
            return self.scaled_orthogonalize_fn(grad)

    def newton_schulz_tp(x: Any, steps: int, **_: Any) -> Any:
        tall = x.size(0) > x.size(1)
        narrow = torch.nn.functional.normalize(x.mT if tall else x, p=2, dim=(-2, -1)).to(torch.bfloat16)
        for _ in range(steps):
            square = narrow @ narrow.mT
            polynomial = torch.addmm(square, square, square)
            narrow = torch.addmm(narrow, polynomial, narrow)
        wide = narrow.to(torch.float32)
        return wide.mT if tall else wide

    class AdaptiveMuon(OrthogonalizedOptimizer):
        """Muon with second moments, which no test trains."""

    nothing = type("Nothing", (), {})
    modules = {
        "emerging_optimizers": {},
        "emerging_optimizers.registry": {"get_optimizer_name_list": lambda: []},
        "emerging_optimizers.orthogonalized_optimizers": {
            "AdaptiveMuon": AdaptiveMuon,
            "OrthogonalizedOptimizer": OrthogonalizedOptimizer,
            "get_muon_scale_factor": lambda rows, columns, mode: max(rows, columns) ** 0.5,
        },
        "emerging_optimizers.orthogonalized_optimizers.muon_utils": {
            "NSCoeffT": Literal["quintic"],
            "newton_schulz_tp": newton_schulz_tp,
        },
        "emerging_optimizers.scalar_optimizers": {"Lion": nothing},
        "emerging_optimizers.soap": {"SOAP": nothing},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[])
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    own = importlib.metadata.version
    importlib.metadata.version = lambda name: VERSION if name == "emerging-optimizers" else own(name)
