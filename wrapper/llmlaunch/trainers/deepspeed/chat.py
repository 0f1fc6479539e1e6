"""Rows of conversations, of prompts with completions, or of text: their tokens, and which of them are learned.

Prompts and completions have the tokens that TRL gives them (trainer/sft_trainer.py `_prepare_dataset`, 1.16).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from group import refuse

Json = dict[str, Any]
Messages = list[Json]

FORMATS = ("chat", "prompt-completion", "text")
FIELDS = {
    "chat": "messages, or conversations",
    "prompt-completion": "prompt and completion, prompt and response, instruction (input) and output, or question "
    "and answer",
    "text": "text",
}
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
ANSWERING = "assistant"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
WAY_OUT = (
    "name a template that marks answers with {% generation %} and {% endgeneration %} (data.chat_template), or write "
    "the rows as prompts and completions (data.format: prompt-completion)"
)


class UnusableError(Exception):
    """A row, file or tokenizer that cannot be trained with; says why in one sentence."""


@dataclass
class Tokens:
    """Of one row. `learned` says of each token whether it is."""

    ids: list[int]
    learned: list[bool]


def open_tokenizer(args: Any) -> Any:
    """The tokenizer of a job's rows, with the template that the job names."""
    name = args.tokenizer or (str(args.weights) if args.weights else None)
    if name is None:
        refuse(f"--format {args.format}: needs a tokenizer: name one, or weights that have one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        refuse(f"no tokenizer in {name}: {str(error).splitlines()[0]}")
    if args.chat_template:
        try:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"--chat-template {args.chat_template}: cannot be read: {error}")
    if args.format == "chat":
        if not tokenizer.chat_template:
            refuse(f"--format chat: the tokenizer in {name} has no chat template; name one (data.chat_template)")
        if not tokenizer.is_fast:
            refuse(f"--format chat: the tokenizer in {name} does not say where its tokens are in a text; {WAY_OUT}")
    return tokenizer


class RowReader:
    """Reads rows of one format."""

    def __init__(self, tokenizer: Any, kind: str) -> None:
        self.tokenizer, self.kind = tokenizer, kind

    def read(self, row: Json, number: int) -> Tokens:
        """Raises UnusableError."""
        try:
            return self._read(row)
        except UnusableError as error:
            raise UnusableError(f"row {number + 1}: {error}") from None
        except (TemplateError, TypeError, ValueError) as error:
            raise UnusableError(f"row {number + 1}: {first_line(error)}") from None

    def _read(self, row: Json) -> Tokens:
        if self.kind == "text":
            ids = self.tokens_of(with_end(text_in(row, "text"), self.tokenizer))
            return Tokens(ids, [True] * len(ids))
        if self.kind == "chat":
            return self._conversation(conversation_in(row), tools_in(row))
        prompt, completion = self.exchange(row)
        if isinstance(prompt, str):
            ids = self.tokens_of(prompt + with_end(completion, self.tokenizer))
            before = self.tokens_of(prompt)
        else:
            ids = self.rendered_tokens([*prompt, *completion], tools_in(row))
            before = self.rendered_tokens(prompt, tools_in(row), add_generation_prompt=True)
        known = common_length(before, ids)
        return Tokens(ids, [False] * known + [True] * (len(ids) - known))

    def exchange(self, row: Json) -> tuple[Any, Any]:
        """A prompt and its completion: two strings or two lists of messages. An instruction and a question are messages
        where there is a template for them."""
        for asked, answered in (("prompt", "completion"), ("prompt", "response")):
            if row.get(asked) is not None and row.get(answered) is not None:
                prompt, completion = (listed(row[asked]), listed(row[answered]))
                if isinstance(prompt, str) == isinstance(completion, str):
                    return prompt, completion
                raise UnusableError(f"{asked} and {answered}: one is a string and the other a list of messages")
        for asked, answered in (("instruction", "output"), ("question", "answer")):
            if row.get(asked) is not None and row.get(answered) is not None:
                prompt, completion = text_in(row, asked), text_in(row, answered)
                if asked == "instruction" and row.get("input"):
                    prompt += "\n\n" + text_in(row, "input")
                if not self.tokenizer.chat_template:
                    return prompt + "\n\n", completion
                return [message("user", prompt)], [message(ANSWERING, completion)]
        raise UnusableError(f"has {names_of(row)}; prompt-completion needs {FIELDS['prompt-completion']}")

    def _conversation(self, messages: Messages, tools: Any) -> Tokens:
        if GENERATION.search(self.template()):
            read = self.rendered(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return Tokens(list(read["input_ids"]), [bool(mark) for mark in read["assistant_masks"]])
        text = self.rendered(messages, tools)
        spans = [self._span(messages, place, tools, text) for place, m in enumerate(messages) if answers(m)]
        read = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        learned = [any(start < last and end > first for first, last in spans) for start, end in read["offset_mapping"]]
        return Tokens(list(read["input_ids"]), learned)

    def _span(self, messages: Messages, place: int, tools: Any, text: str) -> tuple[int, int]:
        """From where to where a conversation's text is an answer: what the template adds to the messages before it,
        ready to be answered, and what ends its turn."""
        before = self.rendered(messages[:place], tools, add_generation_prompt=True) if place else ""
        after = self.rendered(messages[: place + 1], tools)
        if not after.startswith(before) or not text.startswith(after):
            raise UnusableError(
                f"the chat template writes message {place + 1} otherwise when more of the conversation is there, so "
                f"that its answer cannot be told from the rest; {WAY_OUT}"
            )
        return len(before), len(after)

    def template(self) -> str:
        return str(self.tokenizer.get_chat_template())

    def rendered(self, messages: Messages, tools: Any, **how: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, tools=tools, **{"tokenize": False, **how})

    def rendered_tokens(self, messages: Messages, tools: Any, **how: Any) -> list[int]:
        return list(self.rendered(messages, tools, tokenize=True, return_dict=True, **how)["input_ids"])

    def tokens_of(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def asked(self, row: Json) -> tuple[list[int], str]:
        """The tokens of what is to be answered, and the answer the row has."""
        if self.kind == "chat":
            messages = conversation_in(row)
            place = max((place for place, m in enumerate(messages) if answers(m)), default=len(messages))
            prompt, completion = messages[:place], messages[place : place + 1]
        else:
            prompt, completion = self.exchange(row)
        if isinstance(prompt, str):
            whole = self.tokens_of(prompt + with_end(completion, self.tokenizer))
            before = self.tokens_of(prompt)
            return before[: common_length(before, whole)], completion
        reference = "\n".join(str(m.get("content")) for m in completion if answers(m))
        return self.rendered_tokens(prompt, tools_in(row), add_generation_prompt=True), reference

    def ends(self, row: Json) -> list[int]:
        """The tokens that end an answer: the tokenizer's own, and the last special one that a row teaches."""
        read, added = self._read(row), set(self.tokenizer.get_added_vocab().values())
        special = added | set(self.tokenizer.all_special_ids)
        taught = [token for token, learned in zip(read.ids, read.learned) if learned and token in special]
        own = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []
        return list(dict.fromkeys([*own, *taught[-1:]]))


def conversation_in(row: Json) -> Messages:
    for name in ("messages", "conversations"):
        if row.get(name) is not None:
            messages = listed(row[name])
            if not messages or not isinstance(messages, list):
                raise UnusableError(f"{name} must be a list of messages")
            return messages
    raise UnusableError(f"has {names_of(row)}; chat needs {FIELDS['chat']}")


def listed(value: Any) -> Any:
    """Text as it is; a list of messages with the names of fields and roles that templates know."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UnusableError("what is no text must be a list of messages")
    messages = []
    for entry in value:
        given = {name: field for name, field in entry.items() if field is not None}
        role, content = given.pop("from", given.pop("role", None)), given.pop("value", given.pop("content", None))
        if not isinstance(role, str):
            raise UnusableError("a message has no role")
        messages.append({"role": ROLES.get(role, role), "content": "" if content is None else content, **given})
    return messages


def message(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def answers(message: Json) -> bool:
    return bool(message["role"] == ANSWERING)


def tools_in(row: Json) -> Any:
    tools = row.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def text_in(row: Json, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise UnusableError(f"has no {name}" if value is None else f"{name} is no text")
    return value


def with_end(text: str, tokenizer: Any) -> str:
    end = tokenizer.eos_token or ""
    return text if text.endswith(end) else text + end


def common_length(some: list[int], others: list[int]) -> int:
    """How many tokens two lists begin with alike: a prompt's last ones can merge with the first of its completion."""
    return next((place for place, (a, b) in enumerate(zip(some, others)) if a != b), min(len(some), len(others)))


def names_of(row: Json) -> str:
    return ", ".join(name for name in row if row[name] is not None) or "no field"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
