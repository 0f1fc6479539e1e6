"""The lines by which logs tell that something outside the program failed: a checkpoint or another file that could not
be read, a site on the internet that did not answer, a host without an address. Rows of `patterns.py`."""

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


_ERROR = ("Error: ",)

WEB_PATTERNS = (
    Pattern(
        "hub",
        r"(huggingface\.co|hf\.co).{0,300}?(Max retries exceeded|timed out|Failed to resolve)"
        r"|Error: We couldn't connect to '|(on|to) the Hub,? and we cannot find"
        r"|Error: (Connection error, and we cannot find the requested files|Couldn't reach '.{1,300}' on the Hub)"
        r"|OfflineModeIsEnabled: "
        r"|^429 Too Many Requests(:| for url)|Error: (Client|Server) error '(429|50[0234]) "
        r"|^httpx2?\.\w{1,100}: .{0,300}\[Errno -\d\]",
        "huggingface_hub 0.11 to 2.4 (utils/_http.py, file_download.py), requests, urllib3, httpx, transformers 5.23",
    ),
    Pattern("hub", r"(429|50[0234]) (Client|Server) Error", "huggingface_hub 0.11 to 2.4; requests", after=_ERROR),
    Pattern(
        "wandb",
        r"^wandb\..{0,300}: .{0,300}(?P<login>api_key not configured|No API key|not logged in)",
        "wandb 0.16 on",
    ),
    Pattern(
        "wandb",
        r"^wandb\.\S{0,200}(CommError|Error): .{0,300}(timed out|network|connect)|api\.wandb\.ai.{0,300}(Max retries"
        r"|timed out|Failed to)",
        "wandb 0.16 on; requests",
    ),
    Pattern(
        "hub",
        r"(HTTPS?ConnectionPool\(host='.{1,300}Max retries exceeded|<urlopen error \[Errno (-\d|1\d\d)\])",
        "urllib3 and requests; urllib: NLTK, tiktoken, torch.hub",
        after=_ERROR,
    ),
    # --- any other name: of a host of the job, say
    Pattern(
        "name_resolution",
        r"(Temporary failure in name resolution|Name or service not known|No address associated with hostname)",
        "glibc 2.36, gai_strerror: EAI_AGAIN, EAI_NONAME, EAI_NODATA",
        True,
        after=("rror", "Exception"),
    ),
)
