"""What is said of a person's own script: its lines, flags and settings in place of the keys of a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.documents.nested import leaves
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.frameworks.framework import framework_named
from llmlaunch.rundir.values import shortened

if TYPE_CHECKING:
    from llmlaunch.frameworks.base import Rendered
    from llmlaunch.frameworks.framework import Framework


SETTINGS_FILES = ("--deepspeed", "--deepspeed-config")


@dataclass(frozen=True)
class ScriptWords:
    """The words of one script, or of arguments without a script, for what a recipe would call otherwise. `document` is
    the recipe that was read of it, and `text` the script."""

    path: Path
    command: TrainerCommand | None
    document: Mapping[str, Any]
    text: str

    @cached_property
    def place(self) -> str:
        """The place of the command that trains: `job.sh:12`."""
        command = self.command
        return str(self.path) if command is None else command.place

    @cached_property
    def flags(self) -> Mapping[str, str]:
        """The trainer's flags as the script spells them, with their values, by their names without dashes in front and
        with dashes inside. Of a flag that comes twice the last counts."""
        groups: dict[str, str] = {}
        name = ""
        for word in () if self.command is None else self.command.arguments:
            if re.match(r"--?[A-Za-z]", word):
                name = _plain_name(word.partition("=")[0])
                groups[name] = word
            elif name:
                groups[name] += f" {word}"
        return groups

    @property
    def framework(self) -> Framework:
        return framework_named(_backend_name(self.document))

    def line_of(self, pattern: str) -> int:
        """Return the line of the script that holds what matches `pattern`: in the command that trains, else the last
        one before it, else any; 0 where there is none."""
        lines = self.text.splitlines()
        number = self.place.rpartition(":")[2]
        first = int(number) if number.isdigit() and self.place.startswith(f"{self.path.name}:") else 0
        last = first
        while first and last < len(lines) and lines[last - 1].rstrip().endswith("\\"):
            last += 1
        found = [place for place, line in enumerate(lines, start=1) if re.search(pattern, line.partition(" #")[0])]
        inside = [place for place in found if first <= place <= last]
        before = [place for place in found if place < first]
        return (inside or before or found or [0])[-1]

    def at(self, flag: str) -> str:
        """Return the place of a flag of the trainer, by any spelling: `job.sh:14`."""
        spelling = self.flags.get(_plain_name(flag), flag).split()[0].partition("=")[0]
        line = self.line_of(rf"(?<![\w-]){re.escape(spelling)}(?![\w-])")
        return f"{self.path.name}:{line}" if line else self.place

    def spelled(self, flag: str, values: str = "") -> str:
        """Return a flag with a value, as the script spells the flag where it has it."""
        spelling = self.flags.get(_plain_name(flag), flag).split()[0].partition("=")[0]
        return f"{spelling} {values}".rstrip()

    @property
    def settings_file(self) -> str:
        """The file of the script in which DeepSpeed finds its settings; "" where it names none."""
        groups = (self.flags.get(_plain_name(name), "") for name in SETTINGS_FILES)
        words = (re.split(r"[ =]", group, maxsplit=1) for group in groups if group)
        return next((word[1] for word in words if len(word) == 2), "")

    def places(self, document: Mapping[str, Any]) -> dict[KeyPath, str]:
        """Return where the script says each key of the recipe that was read of it, with the words it uses. What no
        line says alone is at the command that trains."""
        places: dict[KeyPath, str] = {(): self.place}
        spellings = self.framework.spellings()
        for key, _ in leaves(document):
            path = tuple(key.split("."))
            place = self._place(path, spellings.get(key, ()))
            if place:
                places[path] = place
        return places

    def _place(self, path: KeyPath, names: tuple[str, ...]) -> str:
        section, name = str(path[0]), str(path[-1])
        patterns = {"slurm": rf"^#SBATCH.*--?{re.escape(name)}\b", "environment": rf"\b{re.escape(name)}="}
        if section in patterns and len(path) > 1:
            line = self.line_of(patterns[section])
            shown = f"#SBATCH --{name}" if section == "slurm" else name
            return f"{self.path.name}:{line} ({shown})" if line else ""
        for flag in names:
            written = self.flags.get(_plain_name(flag)) if flag.startswith("-") else None
            if written:
                return f"{self.at(flag)} ({shortened(written, 60)})"
        in_file = next((each for each in names if not each.startswith("-")), "")
        return f"{self.settings_file} ({in_file})" if in_file and self.settings_file else ""

    def change(self, settings: Mapping[str, Any], before: Rendered, after: Rendered) -> str:
        """Return what a person changes in the script, as one clause, so that it becomes a job that renders as `after`
        where it rendered as `before`. `settings` are the changed keys of the recipe, None for one that is removed."""
        clauses = list(dict.fromkeys(self._changed(settings, before, after)))
        runs: dict[str, list[str]] = {}
        for verb, what in clauses:
            runs.setdefault(verb, []).append(what)
        return " and ".join(f"{verb} {' and '.join(what)}" for verb, what in runs.items())

    def _changed(self, settings: Mapping[str, Any], before: Rendered, after: Rendered) -> Iterator[tuple[str, str]]:
        said = set()
        old, new = _by_flag(before), _by_flag(after)
        in_old_file, in_file = _in_file(before), _in_file(after)
        for flag in dict.fromkeys((*old, *new)):
            if flag in self.framework.flags_for_speed():
                continue
            keys = {key for each in (old.get(flag), new.get(flag)) if each for key in each[1]} & settings.keys()
            if old.get(flag, ("",))[0] == new.get(flag, ("",))[0] and (flag in old) == (flag in new):
                continue
            if keys:
                said |= keys
                yield self._flag_clause(flag, new.get(flag))
        for name in dict.fromkeys((*in_old_file, *in_file)):
            reason = after.settings.get(name) or before.settings.get(name)
            keys = set() if reason is None else set(reason.keys) & settings.keys()
            if keys - said and in_old_file.get(name) != in_file.get(name):
                said |= keys
                yield self._setting_clause(name, in_file.get(name))
        for key, value in settings.items():
            if key not in said and not (key == "layout.data" and len(settings) > 1):
                yield self._other_clause(key, value)

    def _flag_clause(self, flag: str, new: tuple[str, Any] | None) -> tuple[str, str]:
        if new is None:
            return "remove", f"{self.spelled(flag)}{self._where(flag)}"
        stated = _plain_name(flag) in self.flags
        return "set" if stated else "add", f"{self.spelled(flag, new[0])}{self._where(flag) if stated else ''}"

    def _where(self, flag: str) -> str:
        line = self.at(flag).rpartition(":")[2]
        return f" (line {line})" if line.isdigit() else ""

    def _setting_clause(self, name: str, new: Any) -> tuple[str, str]:
        file = self.settings_file or "a ds_config.json (--deepspeed FILE)"
        if new is None:
            return "remove", f"{name} from {file}"
        return "set", f"{name}: {json.dumps(new)} in {file}"

    def _other_clause(self, key: str, value: Any) -> tuple[str, str]:
        section, _, name = key.partition(".")
        if key == "nodes" or section == "slurm":
            option = f"--{name or key}={value}"
            line = self.line_of(rf"^#SBATCH.*--{re.escape(name or key)}\b")
            return "set", f"#SBATCH {option}{f' (line {line})' if line else ''}"
        if section == "environment":
            return "add", f"export {name}={value}"
        return ("remove", key) if value is None else ("set", f"{key}: {json.dumps(value)}")


def _plain_name(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def _backend_name(document: Mapping[str, Any]) -> str:
    backend = document.get("backend")
    return str(backend.get("name")) if isinstance(backend, Mapping) else str(backend)


def _by_flag(rendered: Rendered) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {each.flag: (" ".join(map(str, each.values)), each.reason.keys) for each in rendered.arguments}


def _in_file(rendered: Rendered) -> dict[str, Any]:
    """Return the settings of the rendered file by dotted names; none where there is no such file."""
    return dict(leaves(json.loads(rendered.files[rendered.settings_file]))) if rendered.settings_file else {}
