"""The lines by which logs tell of a checkpoint or of another file that could not be read: rows of `patterns.py`."""

from __future__ import annotations

from .pattern import Pattern

# A file of torch.save that is cut short or overwritten.
_UNREADABLE = (
    r"PytorchStreamReader failed (reading|locating|finding)|_pickle\.UnpicklingError: |^EOFError: Ran out of input"
)
_TORCH_FILES = "torch 2.13, caffe2/serialize/inline_container.cc and torch/serialization.py"

FILE_PATTERNS = (
    # --- the checkpoint
    Pattern(
        # Usually the file is not damaged: it holds more than tensors, and torch no longer loads those by default.
        "checkpoint_load",
        r"UnpicklingError: Weights only load failed",
        "torch 2.4 on, torch/serialization.py",
    ),
    Pattern("checkpoint", _UNREADABLE, _TORCH_FILES, phase="loading"),
    Pattern("damaged_file", _UNREADABLE, _TORCH_FILES),
    Pattern("damaged_file", r"SafetensorError: Error while deserializing header", "safetensors 0.8"),
    Pattern(
        "checkpoint_mismatch",
        r"Missing key in checkpoint state_dict: (?P<missing>[\w.]{0,200}\w)",
        "torch 2.13, distributed/checkpoint/default_planner.py",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"Size mismatch between saved torch\.Size\((?P<theirs>\[[\d, ]{0,100}\])\) and current: "
        r"torch\.Size\((?P<ours>\[[\d, ]{0,100}\])\) for (?P<of>[\w.]{1,200})",
        "torch 2.13, distributed/checkpoint/default_planner.py",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"\bsize mismatch for (?P<of>[\w.]{1,200}): "
        r"copying a param with shape torch\.Size\((?P<theirs>\[[\d, ]{0,100}\])\) from "
        r"checkpoint, the shape in current model is torch\.Size\((?P<ours>\[[\d, ]{0,100}\])\)",
        "torch 2.13, nn/modules/module.py",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"Error\(s\) in loading state_dict for |loaded state dict (has a different number of parameter groups"
        r"|contains a parameter group that doesn't match)",
        "torch 2.13, nn/modules/module.py and optim/optimizer.py",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"Trying to set a tensor of shape torch\.Size\((?P<theirs>\[[\d, ]{0,100}\])\) in \"(?P<of>\w{1,100})\" "
        r"\(which has shape torch\.Size\((?P<ours>\[[\d, ]{0,100}\])\)\)",
        "accelerate 1.x, utils/modeling.py",
    ),
    Pattern(
        "checkpoint_load",
        r"ValueError: Can't find a valid checkpoint at ",
        "Transformers 4 and 5, trainer.py and integrations/deepspeed.py",
    ),
    Pattern("crash", r"^\s{0,9}Resource \S{1,100} not found\.$", "NLTK 3, data.py, below an empty LookupError"),
)
