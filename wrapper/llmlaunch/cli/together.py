"""`llmlaunch submit` of several runs at once: which they are, and how they hang together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.errors import UserError
from llmlaunch.recipe.overrides import shown_word

if TYPE_CHECKING:
    from llmlaunch.launchers.sweep import How

__all__ = ["RUN", "SubmitCommand", "Together", "Variant", "together_options"]

RUN = "{run}"
"""In a word of several runs: the number of the run, from 0 on."""


@dataclass(frozen=True)
class Variant:
    """One run to be: a recipe file and its override words."""

    recipe: str
    overrides: tuple[str, ...]
    own: tuple[str, ...]
    """Those in which it differs from others of the same recipe."""

    @property
    def shown(self) -> str:
        return " ".join([self.recipe, *(shown_word(word) for word in self.own)])


@dataclass(frozen=True)
class Together:
    """What the options say of several runs, and of the jobs before them."""

    array: bool
    array_limit: int | None
    chain: str | None
    dependency: str | None
    after: str | None
    grid: tuple[str, ...]

    @property
    def how(self) -> How:
        if self.array:
            return "array"
        return "afterany" if self.chain == "afterany" else "afterok" if self.chain else "independent"

    def variants(self, recipe: str, words: Sequence[str]) -> list[Variant]:
        """`words` are more recipes and key=value words; those apply to every recipe. Raises UserError where the
        options do not go together."""
        from llmlaunch.recipe.variants import variants

        recipes = [recipe, *(word for word in words if _is_recipe(word))]
        overrides = [word for word in words if not _is_recipe(word)]
        found = []
        for path in recipes:
            each = variants(path, overrides, self.grid)
            shared = set(each[0]).intersection(*each[1:])
            found += [Variant(path, own, tuple(word for word in own if word not in shared)) for own in each]
        self._refuse(len(found))
        return [_numbered(variant, number) for number, variant in enumerate(found)] if len(found) > 1 else found

    def sbatch_words(self) -> list[str]:
        """What sbatch is told of jobs before this one."""
        from llmlaunch.cli.submitted import submission_of
        from llmlaunch.launchers.sweep import after

        if self.dependency:
            return [f"--dependency={self.dependency}"]
        if self.after is None:
            return []
        submission = submission_of(self.after)
        if submission.launcher != "slurm":
            raise UserError(f"--after {self.after}: that run is no SLURM job, so none can wait for it")
        return after(submission)

    def _refuse(self, count: int) -> None:
        if self.array and self.chain:
            raise UserError("--array, --chain: tasks of an array do not wait for each other; choose one")
        if self.array_limit is not None and not self.array:
            raise UserError("--array-limit: says how many tasks of an array run at a time; add --array")
        if self.dependency and self.after:
            raise UserError("--dependency, --after: both say what the job waits for; choose one")
        if count == 1 and (self.array or self.chain):
            raise UserError(
                f"{'--array' if self.array else '--chain'}: there is one run only; name several recipes, or several "
                "values (training.steps=100,200; --grid model=llama3-8b,llama3-70b)"
            )


class SubmitCommand(click.Command):
    """`--chain` alone is `--chain=afterok`; click would take the next word for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--chain=afterok" if word == "--chain" else word for word in args])


def together_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `Together`, handed over as `together`."""

    @click.option("--array", is_flag=True, help="Several runs as one job array.")
    @click.option("--array-limit", type=click.IntRange(min=1), metavar="N", help="So many tasks of it run at a time.")
    @click.option(
        "--chain",
        type=click.Choice(["afterok", "afterany"]),
        help="Several runs one after the other; afterok, unless given: an end without success ends the rest.",
    )
    @click.option("--grid", multiple=True, metavar="KEY=A,B", help="One run for each value, whatever the key holds.")
    @click.option("--after", metavar="RUN|DIR", help="Start when that run has succeeded.")
    @click.option("--dependency", metavar="WORD", help="As sbatch's own --dependency.")
    @functools.wraps(function)
    def wrapped(
        *args: Any,
        array: bool,
        array_limit: int | None,
        chain: str | None,
        grid: tuple[str, ...],
        after: str | None,
        dependency: str | None,
        **others: Any,
    ) -> Any:
        return function(*args, together=Together(array, array_limit, chain, dependency, after, grid), **others)

    return wrapped


def _numbered(variant: Variant, number: int) -> Variant:
    return replace(variant, overrides=tuple(word.replace(RUN, str(number)) for word in variant.overrides))


def _is_recipe(word: str) -> bool:
    return "=" not in word or Path(word).is_file()
