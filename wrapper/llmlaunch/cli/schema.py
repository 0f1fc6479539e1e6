"""`llmlaunch schema`: the JSON Schemas of what llmlaunch reads and prints, for editors and for programs."""

from __future__ import annotations

from pathlib import Path

import click

from llmlaunch.cli.output import notify
from llmlaunch.errors import UserError


@click.command("schema")
@click.argument("name", metavar="[NAME]", default="recipe")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write it to FILE; only an older schema of llmlaunch is replaced.",
)
def schema_command(name: str, output: Path | None) -> int:
    """Print the JSON Schema NAME: of a recipe unless named, of a cluster profile, a plan or another result.

    \b
    llmlaunch schema -o llmlaunch.schema.json    what a starter's first line names
    llmlaunch schema cluster                     of a cluster profile
    llmlaunch schema plan                        of what check --json prints

    An editor that knows YAML schemas reads the first line that `llmlaunch init` writes, completes keys and marks
    mistakes while you type. It needs no network.

    Exit code 2: there is no such schema, or FILE is something else.
    """
    from llmlaunch.recipe.key_reference import published_schema

    text = published_schema(name)
    if output is None:
        click.echo(text, nl=False)
        return 0
    _replace(output, text)
    notify(
        f"wrote {output}; a file beside it names it in its first line: # yaml-language-server: $schema={output.name}"
    )
    return 0


def _replace(path: Path, text: str) -> None:
    from llmlaunch.documents.writing import write_whole
    from llmlaunch.rundir.files import object_of
    from llmlaunch.rundir.regular_files import read_bytes

    try:
        older = object_of(read_bytes(path, follow=True))
        is_schema = "$schema" in older and "llmlaunch" in str(older.get("title"))
    except FileNotFoundError:
        is_schema = True
    except (OSError, ValueError):
        is_schema = False
    if not is_schema:
        raise UserError(f"schema: {path} is no schema of llmlaunch and is left as it is; choose another file with -o")
    write_whole(path, text)
