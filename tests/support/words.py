"""A tokenizer of Hugging Face's whose tokens are words."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = ("<eos>", "user:", "assistant:", "two", "and", "three?", "five", "what", "is", "it?", "a", "cat")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }} <eos>{% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
)


def word_tokenizer(folder: Path) -> Path:
    """Make the folder, and return it."""
    folder.mkdir(exist_ok=True)
    kind = {"type": "WordLevel", "vocab": {word: place for place, word in enumerate(WORDS)}, "unk_token": "<eos>"}
    special = {"id": 0, "content": "<eos>", "special": True} | dict.fromkeys(
        ("single_word", "lstrip", "rstrip", "normalized"), False
    )
    parts = {"model": kind, "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [special]}
    (folder / "tokenizer.json").write_text(json.dumps(parts), "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder
