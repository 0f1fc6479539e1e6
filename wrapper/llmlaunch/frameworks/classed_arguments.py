"""Arguments that the user passes on to a framework, in three classes: priced by the formula, neutral to GPU memory, and
unknown. Unknown arguments count where they could matter (planner/refusal.py)."""

from __future__ import annotations

from llmlaunch.frozen import frozen

PRICED, NEUTRAL, UNKNOWN = "priced", "neutral", "unknown"
# What an unknown argument may do: make a step add more or less than was priced, or either; make the model states
# smaller as well; or decide the memory by itself.
MORE, LESS, EITHER, LESS_OF_STATES, DECIDES = "more", "less", "either", "less of the model states", "decides"


@frozen
class FlagClass:
    """What is known about a flag. `kind` is PRICED, NEUTRAL or UNKNOWN, `why` is the reason, and `key` names the recipe
    keys with the same meaning, if there are any. `effect` is what an unknown flag may do to the priced memory: MORE,
    LESS, EITHER, LESS_OF_STATES or DECIDES. A flag that may need more memory adds at most `times` what a step adds to
    the model states."""

    kind: str
    why: str
    key: str = ""
    effect: str = EITHER
    times: float = 1.0


OF_THE_SCRIPT = FlagClass("", "an argument of your own script, whose memory is your word")


@frozen
class ClassedArgument:
    """One flag that the user wrote, with its values as written, and its class."""

    flag: str
    values: tuple[str, ...]
    flag_class: FlagClass

    @property
    def text(self) -> str:
        return " ".join((self.flag, *self.values))

    @property
    def sentence(self) -> str:
        """The class and the reason for it, as `llmlaunch explain-args` shows them."""
        kind, key = self.flag_class.kind, self.flag_class.key
        mend = f"; the recipe says it as {key}" if key else ""
        return f"{kind}: {self.flag_class.why}{mend}" if kind else self.flag_class.why


@frozen
class ClassedArguments:
    """All arguments that the user wrote for one job, in order."""

    arguments: tuple[ClassedArgument, ...] = ()

    def of_kind(self, kind: str) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.flag_class.kind == kind)

    @property
    def unknown(self) -> tuple[ClassedArgument, ...]:
        return self.of_kind(UNKNOWN)

    @property
    def deciding(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments that decide memory by themselves, such as another optimizer."""
        return self._with_effect(DECIDES)

    @property
    def costing(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments that may make a job need more memory than was priced."""
        return self._with_effect(MORE, EITHER)

    @property
    def sparing(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments that may make a job need less memory than was priced."""
        return self._with_effect(LESS, EITHER, LESS_OF_STATES)

    def _with_effect(self, *effects: str) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.unknown if argument.flag_class.effect in effects)

    @property
    def of_the_script(self) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.flag_class == OF_THE_SCRIPT)

    def as_json(self) -> dict[str, list[str]] | None:
        """Return the arguments by class, or None if the recipe has none."""
        if not self.arguments:
            return None
        return {kind: [argument.text for argument in self.of_kind(kind)] for kind in (PRICED, NEUTRAL, UNKNOWN)}


NO_ARGUMENTS = ClassedArguments()
