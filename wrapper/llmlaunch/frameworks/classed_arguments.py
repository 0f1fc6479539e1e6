"""Arguments that a person passes on to a framework, in three classes: those that the formula prices, those that change
no GPU memory, and unknown ones, which count where they could matter (planner/doubt.py)."""

from __future__ import annotations

from llmlaunch.frozen import frozen

PRICED, NEUTRAL, UNKNOWN = "priced", "neutral", "unknown"
# What an unknown argument may do: need more or less of what a step adds than was priced, or either; need less of the
# model states, too; or decide the memory outright.
MORE, LESS, EITHER, LESS_OF_STATES, DECIDES = "more", "less", "either", "less of the model states", "decides"


@frozen
class FlagClass:
    """What is known of a flag: `kind` is PRICED, NEUTRAL or UNKNOWN, `why` the reason, and `key` the recipe keys that
    say the same, empty where there are none. `effect` is what an unknown one may do to what was priced: MORE, LESS,
    EITHER, LESS_OF_STATES or DECIDES. One that may need more adds at most `times` what a step adds to the model
    states."""

    kind: str
    why: str
    key: str = ""
    effect: str = EITHER
    times: float = 1.0


OF_THE_SCRIPT = FlagClass("", "an argument of your own script, whose memory is your word")


@frozen
class ClassedArgument:
    """One flag of a person's own, with its values as written, and its class."""

    flag: str
    values: tuple[str, ...]
    flag_class: FlagClass

    @property
    def text(self) -> str:
        return " ".join((self.flag, *self.values))

    @property
    def sentence(self) -> str:
        """Return the class and the reason for it, as `llmlaunch explain-args` shows them."""
        kind, key = self.flag_class.kind, self.flag_class.key
        mend = f"; the recipe says it as {key}" if key else ""
        return f"{kind}: {self.flag_class.why}{mend}" if kind else self.flag_class.why


@frozen
class ClassedArguments:
    """All arguments of a person's own in one job, in their order."""

    arguments: tuple[ClassedArgument, ...] = ()

    def of_kind(self, kind: str) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.flag_class.kind == kind)

    @property
    def unknown(self) -> tuple[ClassedArgument, ...]:
        return self.of_kind(UNKNOWN)

    @property
    def deciding(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments that decide memory outright, such as another optimizer."""
        return self._with_effect(DECIDES)

    @property
    def costing(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments with which a job may need more than was priced."""
        return self._with_effect(MORE, EITHER)

    @property
    def sparing(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments with which a job may need less than was priced."""
        return self._with_effect(LESS, EITHER, LESS_OF_STATES)

    def _with_effect(self, *effects: str) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.unknown if argument.flag_class.effect in effects)

    @property
    def of_the_script(self) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.flag_class == OF_THE_SCRIPT)

    def as_json(self) -> dict[str, list[str]] | None:
        """Return the arguments by class; None where the recipe has none."""
        if not self.arguments:
            return None
        return {kind: [argument.text for argument in self.of_kind(kind)] for kind in (PRICED, NEUTRAL, UNKNOWN)}


NO_ARGUMENTS = ClassedArguments()
