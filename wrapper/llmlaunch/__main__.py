"""`python -m llmlaunch` is the `llmlaunch` command."""

from llmlaunch.cli.main import main

main()
