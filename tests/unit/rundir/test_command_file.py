"""command.txt: what is rendered comes back as the same words, and what a person edits means what it does in a shell."""

from __future__ import annotations

import shlex
from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.frameworks.argument import NodeVariable, Word, argument
from llmlaunch.frameworks.base import Rendered
from llmlaunch.rendering.launch import command_text
from llmlaunch.rundir.command_file import CommandError, command_words
from support.recipes import small
from support.soak import examples

VARIABLES = {"HERE": '/runs/it\'s "my" $(a) `run`\\\n', "EMPTY": ""}
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8) | st.text(
    " \t\r\n'\"\\$#{}`~*=-aHERE", max_size=12
)
WORDS = st.lists(TEXT | st.builds(NodeVariable, st.sampled_from(sorted(VARIABLES)), TEXT), min_size=1, max_size=6)


def value(word: Word) -> str:
    return VARIABLES[word.name] + word.suffix if isinstance(word, NodeVariable) else word


@examples(40, 2000)
@given(WORDS, TEXT)
def test_any_words_with_any_reasons_come_back_as_they_were(words: list[Word], why: str) -> None:
    explained = argument("--lr", *words, of="training.learning_rate", why=why)
    rendered = Rendered(
        program=("train.py", *words, *explained.words), environment={}, files={}, arguments=(explained,)
    )
    text = command_text(small(), rendered, None)
    assert command_words(text, VARIABLES) == ["train.py", *map(value, words), "--lr", *map(value, words)]


def test_each_argument_has_its_own_line_and_says_why_it_is_there() -> None:
    explained = (argument("--lr", "3e-4", of="training.learning_rate"), argument("--bf16", why="the default"))
    program = ("train.py", "--lr", "3e-4", "--bf16", "--mine", "1", "2")
    text = command_text(small(), Rendered(program, {}, {}, arguments=explained), None)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [" ".join(line.split()) for line in lines] == [
        "train.py",
        "--lr 3e-4 # training.learning_rate",
        "--bf16 # the default",
        "--mine 1 2",
    ]


@examples(40, 2000)
@given(st.lists(TEXT, min_size=1).map(lambda words: " ".join(map(shlex.quote, words)) + "\n"))
def test_words_quoted_by_python_for_a_shell_are_read_as_a_shell_reads_them(line: str) -> None:
    assert command_words(line, {}) == shlex.split(line)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  b\t'c d'\n\n# nothing\ne # why\n", ["a", "b", "c d", "e"]),
        ("a#b '#c' \"#d\"", ["a#b", "#c", "#d"]),
        ("--steps 5\r\n--bf16\r\n", ["--steps", "5", "--bf16"]),  # from an editor of Windows
        ("--steps \\\n  5 \\\r\n  --bf16", ["--steps", "5", "--bf16"]),  # as in a script
        ("lo\\\nng \"lo\\\nng\" 'as\\\nis'", ["long", "long", "as\\\nis"]),
        ("'' \"\" a''b", ["", "", "ab"]),
        (r"a\ b \' \$HERE \# \\", ["a b", "'", "$HERE", "#", "\\"]),
        (r'"\"q\"" "\$HERE" "\\" "\`" "\n" "a $ b"', ['"q"', "$HERE", "\\", "`", r"\n", "a $ b"]),
        ("'$HERE' $EMPTY x$EMPTY/y \"${EMPTY}z\"", ["$HERE", "", "x/y", "z"]),
        ("*.bin ~ {a,b} a;b a|b >x & (c) `d` !e", ["*.bin", "~", "{a,b}", "a;b", "a|b", ">x", "&", "(c)", "`d`", "!e"]),
    ],
)
def test_quotes_comments_and_variables_mean_what_they_do_in_a_shell_and_nothing_else_means_anything(
    text: str, words: list[str]
) -> None:
    assert command_words(text, VARIABLES) == words


def test_the_value_of_a_variable_is_one_word_and_is_not_read_again() -> None:
    hostile = "a b 'c' $HERE # \\ \n\""
    assert command_words('$V "${V}" x$V', {"V": hostile}) == [hostile, hostile, f"x{hostile}"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\n'b\nc\n", "line 2: the quote ' is not closed"),
        ('a\n\n"b \\" c\n', 'line 3: the quote " is not closed'),
        ("a 'b\n\n' $MISSING", "line 3: the variable MISSING is not set on this node"),
        ('a\nx"1\n${MISSING}"', "line 2: the variable MISSING is not set on this node"),
        ("a\n--cost $5", "line 2: a $ stands before no name; put the word in single quotes"),
        ("a $(hostname)", "line 1: a $ stands before no name; put the word in single quotes"),
        ("a\nb\\", "line 2: a \\ ends the file"),
        ("", "holds no command"),
        ("# a\n\n  # b", "holds no command"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(CommandError) as error:
        command_words(text, {})
    assert str(error.value) == problem


def test_what_is_no_utf_8_stays_as_it_is() -> None:
    """A path on a node may hold any bytes."""
    path = b"/data/\xff".decode("utf-8", "surrogateescape")
    assert command_words(f"'{path}' {path}/x", {}) == [path, f"{path}/x"]


def test_words_below_the_source_tree_name_the_snapshot() -> None:
    rendered = Rendered(("/src/train.py", "--data", "/src/x y", "/srcs/z"), {}, {})
    text = command_text(small(), rendered, PurePath("/src"))
    words = command_words(text, {"LLMLAUNCH_RUN_DIR": "/run"})
    assert words == ["/run/code/train.py", "--data", "/run/code/x y", "/srcs/z"]
