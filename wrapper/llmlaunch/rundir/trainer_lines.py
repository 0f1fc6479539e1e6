"""The lines in which known trainers report their steps, as regular expressions: read on a login node and on a compute
node alike."""

from __future__ import annotations

# Named groups: step, steps, loss, tokens_per_second, seconds or milliseconds (of a step), and nan, which says in other
# words that the loss is NaN. They are also searched in bytes by Python 3.8 on the node, so nothing newer, and nothing
# outside ASCII.

# Our DeepSpeed script (trainers/deepspeed/train.py).
OURS = (
    r"\bstep (?P<step>\d+)/(?P<steps>\d+) \| loss (?P<loss>\S+)"
    r" \| (?P<seconds>[\d.]+) s/step \| (?P<tokens_per_second>\d+) tokens/s"
)
# Megatron-LM's training line (training_log of megatron/training/training.py, core 0.16 to 0.19). Which fields appear
# depends on the flags; the loss lacks until one step was not skipped, and is 0.0 where every step since the line
# before was (fp16's loss scale): no loss at all. A mean that is NaN is not printed (core 0.19: `if avg >= 0.0`): the
# norm of the gradients is, and iterations that were skipped for it are counted.
MEGATRON = (
    r"\biteration +(?P<step>\d+)/ *(?P<steps>\d+) \|"
    r"(?:.*? elapsed time per iteration \(ms\): (?P<milliseconds>[\d.]+) \|)?"
    r"(?:.*? lm loss: (?!0\.0+E\+00 )(?P<loss>\S+) \|)?"
    r"(?:.*? (?P<nan>grad norm: nan \||number of nan iterations: +[1-9]\d* \|))?"
)
# DeepSpeed's pipeline engine (runtime/pipe/engine.py), every steps_per_print steps.
DEEPSPEED_PIPELINE = r"\bsteps: (?P<step>\d+) loss: (?P<loss>\S+) (?:.*?iter time \(s\): (?P<seconds>[\d.]+))?"
# Its other engines, where the log level shows them (runtime/engine.py, _report_progress).
DEEPSPEED_ENGINE = r"\bstep=(?P<step>\d+), skipped=\d+, lr="
_LOSS = r"(?P<loss>(?i:[-+]?nan|[-+]?inf(?:inity)?)|[-+.\deE]+)"
# Hugging Face's Trainer: the dictionary has no step, the progress bar has; numbers are text since Transformers 5.
TRAINER = r"\{'loss': '?" + _LOSS + r"'?, .{0,400}?'epoch': "
# Scripts by hand say it in many ways, some in colours: "step: 12  loss: 3.1", "iter 7: loss 4.2, time 250ms".
# The loss of an evaluation is not the training's: "validation step 12 loss 3.1", "step 12 eval_loss=3.1".
_NO_EVALUATION = r"(?:(?!(?i:\b(?:val|valid|validation|eval|evaluation|test)(?![a-z])))."
BY_HAND = (
    r"^"
    + _NO_EVALUATION
    + r")*?(?:\b|\x1b\[\d+m)(?i:step|iter|iteration|batch)[ =:#]+(?P<step>\d+)(?: ?/ ?(?P<steps>\d+))?\b"
    + _NO_EVALUATION
    + r"){0,120}?(?i:loss)[ =:]+"
    + _LOSS
)

# Each is said when a save or an evaluation begins: Megatron-LM (megatron/training/checkpointing.py and training.py),
# DeepSpeed (runtime/engine.py), Hugging Face's Trainer, our script ("saving step 40").
SLOW = (
    r"(?i:\bsaving (?:step \d+|(?:model |a |the |full )?checkpoint)\b)",
    r"Evaluating on \d+ samples|Evaluating iter \d+/|\bevaluating at step \d+",
    r"\*\*\*\*\* Running (?:[Ee]valuation|[Pp]rediction)",
)
EXPORTING = r"\bexporting step \d+"  # by our DeepSpeed script

# What a person waits for besides steps: losses on validation data, in the words of our script and of Megatron-LM
# (training/training.py `evaluate_and_print_results`), and our script's answers and export.
RESULTS = (
    r"\bvalidation at step \d+/\d+ \| |\bvalidation loss at iteration \d+ |"
    r"\bended at step \d+: |\bexported step \d+ to |"
    r"^(?:\[rank\d+\]: )?(?:sample \d+/\d+$|(?:prompt|answer|reference): \")"
)

# Those a script that nobody here knows may print, but for progress bars, which show the steps of anything.
ANY_SCRIPT = (OURS, MEGATRON, DEEPSPEED_PIPELINE, DEEPSPEED_ENGINE, TRAINER, BY_HAND)
