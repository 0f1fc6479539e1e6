"""Every flag that Megatron-LM's own parser knows, as JSON: what `llmlaunch/frameworks/megatron/parsers/` is made of.

    .venv-frameworks/bin/python tests/frameworks/traced/dump_parser.py SOURCE [CHECKOUT] > 0.16.json

SOURCE is a sentence that says where the parser comes from, with its commit. CHECKOUT is a folder with `megatron/`
(git archive core_v0.16.1 megatron); without it the installed megatron-core answers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any
from unittest.mock import MagicMock

import stand_ins

stand_ins.install()


for name in ("six", "regex", "yaml"):  # which core 0.16 imports beside its parser
    sys.modules.setdefault(name, MagicMock(name=name))


def flag_of(action: argparse.Action) -> dict[str, Any]:
    """`values` is the number of words after the flag, or "?", "*", "+" as argparse has them; `sets` is what a flag
    without words puts into `dest`, `type` what makes a value of a word."""
    kept: dict[str, Any] = {"dest": action.dest, "values": 1 if action.nargs is None else action.nargs}
    if action.nargs == 0:
        kept["sets"] = str(action.const)
    if action.type is not None:
        kept["type"] = getattr(action.type, "__name__", "function")
    if action.choices is not None:
        kept["choices"] = [str(choice) for choice in action.choices]
    if action.default not in (None, argparse.SUPPRESS):
        kept["default"] = str(action.default)
    return kept


def main() -> None:
    source, *checkout = sys.argv[1:]
    os.environ["NO_VCS_VERSION"] = "1"
    sys.path[:0] = checkout
    from megatron.core import package_info
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    flags = {flag: flag_of(action) for action in parser._actions for flag in action.option_strings}
    found = {"version": package_info.__version__, "source": source}
    lines = ",\n".join(f" {json.dumps(flag)}: {json.dumps(flags[flag])}" for flag in sorted(flags))
    print(f'{json.dumps(found)[:-1]}, "flags": {{\n{lines}\n}}}}')


if __name__ == "__main__":
    main()
