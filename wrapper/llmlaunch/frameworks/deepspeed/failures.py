"""How DeepSpeed says what ended it: rows of the table of causes (`causes/kinds.py`), packed in `node.pyz`."""

from __future__ import annotations

from ...causes.pattern import Frame, Pattern

_ENGINE = "DeepSpeed 0.19.8, runtime/engine.py"

PATTERNS = (
    Pattern(
        "oom", r"Workspace can't be allocated, (no|not) enough memory", "DeepSpeed 0.19, csrc/transformer/inference"
    ),
    Pattern(
        "checkpoint",
        r"/latest names \S{1,200}, which (is missing|holds) ",
        "llmlaunch, trainers/deepspeed/checkpoints.py",
    ),
    Pattern(
        "checkpoint_mismatch",
        r"checkpoint being loaded used a (?P<of>DP world size) of (?P<theirs>\d{1,20}) but the current world size is "
        r"(?P<ours>\d{1,20})",
        _ENGINE,
    ),
    Pattern(
        "checkpoint_mismatch",
        r"^(KeyError: '?(?P<missing>[^']{0,300})|AssertionError: .{0,300}(checkpoint|universal|world size))",
        f"{_ENGINE}, runtime/zero: what the loader looks for is not in the file",
        phase="loading",
    ),
    Pattern(
        "checkpoint_load",
        r"FileNotFoundError: .{0,300}(zero_pp_rank_\d{1,20}_mp_rank_\d{1,20}\w{0,100}_optim_states"
        r"|mp_rank_\d{1,20}_model_states|/zero/\S{1,200}/(fp32|exp_avg|exp_avg_sq))\.pt",
        f"{_ENGINE}: a file of another split, or one that is missing",
        phase="loading",
    ),
    Pattern(
        "bad_arguments",
        r"Error: (Check batch related parameters\. |Please correct the following DeepSpeed config values that mis)",
        "DeepSpeed 0.3 to 0.19, runtime/config.py; Transformers 4 and 5, integrations/deepspeed.py",
    ),
    Pattern("bad_loss", r"^step \d{1,20}: the loss is (nan|-?inf)\b", "llmlaunch, trainers/deepspeed/train.py"),
    Pattern(
        "no_ssh",
        r"ssh: connect to host \S{1,200} port \d{1,20}: |^pdsh@\S{1,200}: \S{1,200}: ssh exited with exit code 255",
        "DeepSpeed 0.19, launcher/multinode_runner.py: pdsh and ssh",
    ),
    Pattern(
        "no_ssh",
        r"Error: (Using hostfile at .{0,300} was not reachable via ssh|launcher 'pdsh' not installed)",
        "DeepSpeed 0.19, launcher/runner.py",
    ),
)

FRAMES = (
    Frame(
        "arguments",
        r'\s+File "[^"]*deepspeed/runtime/(zero/)?config\.py", line \d+, in '
        r"(_do_sanity_check|_batch_assertion|__init__)$",
        "DeepSpeed 0.19.8, runtime/config.py",
        cause="bad_arguments",
    ),
    Frame(
        "loading",
        r'\s+File "[^"]*deepspeed/runtime/engine\.py", line \d+, in (load_checkpoint|_load_\w+)$',
        _ENGINE,
        cause="checkpoint_load",
    ),
)
