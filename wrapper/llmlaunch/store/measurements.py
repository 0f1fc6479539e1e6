"""Measurement records in the store: imported, collected or rehearsed, listed and exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, select

from llmlaunch.calibration.records import REHEARSED
from llmlaunch.documents.writing import replacing
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.ranks import RehearsedRank
from llmlaunch.rehearsal.records import shape_of
from llmlaunch.rehearsal.verdict import rehearsed_ranks
from llmlaunch.store.database import Store, batches
from llmlaunch.store.location import stored_json
from llmlaunch.store.record_files import (
    BadLine,
    RecordLine,
    columns,
    dump_all,
    read_records,
    same_content,
)
from llmlaunch.store.tables import measurements

_ROWS = 5000  # written by one statement, so that none takes minutes


@dataclass(frozen=True)
class ImportResult:
    """How many records of a file were new, replaced another, or were there already; and the lines left out."""

    added: int
    replaced: int
    unchanged: int
    bad: tuple[BadLine, ...] = ()


@dataclass(frozen=True)
class Filters:
    """Which records to list; None is any. Texts are compared without regard to case, `run` exactly."""

    family: str | None = None
    backend: str | None = None
    gpu: str | None = None
    kind: str | None = None
    run: str | None = None


def import_file(store: Store, path: Path, replace: bool = False, skip_bad: bool = False) -> ImportResult:
    """Import every record of a file, all or none; with `skip_bad` all good ones. A record that the store holds with
    equal content stays.

    Raises UserError for a bad file (see `read_records`), and for an id that is there with other content unless
    `replace`, which then keeps its place in the order.
    """
    read = read_records(path, skip_bad)
    return replace_fields(_import_lines(store, read.lines, str(path), replace), bad=read.bad)


def import_records(store: Store, records: Sequence[Mapping[str, Any]]) -> ImportResult:
    """Import records that were read of logs, in place of what an earlier reading of the same runs gave."""
    lines = [
        RecordLine(number, content, dict(record))
        for number, (content, record) in enumerate(zip(dump_all(records), records, strict=True), 1)
    ]
    return _import_lines(store, lines, "logs", replace=True)


def _import_lines(store: Store, lines: Sequence[RecordLine], name: str, replace: bool) -> ImportResult:
    with store.write() as connection:
        stored = _contents_by_id(connection, [line.id for line in lines])
        new: dict[str, str] = {}
        changed: dict[str, str] = {}
        records = {line.id: line.record for line in lines}
        for line in lines:
            before = stored.get(line.id)
            if before is None:
                new.setdefault(line.id, line.content)
            elif not same_content(before, line.content):
                if not replace:
                    raise UserError(
                        f"{name}, line {line.number}: the store holds {line.id!r} with other content; give it another "
                        "id, or use --replace to take the file's; nothing was imported"
                    )
                changed[line.id] = line.content
        _insert(connection, [(content, records[key]) for key, content in new.items()])
        _update(connection, [(content, records[key]) for key, content in changed.items()])
    return ImportResult(len(new), len(changed), len(lines) - len(new) - len(changed))


def put_collected(connection: Connection, records: Sequence[Mapping[str, Any]]) -> int:
    """Write the records of a run inside the caller's transaction, and return how many were new or changed."""
    stored = _contents_by_id(connection, [str(record["id"]) for record in records])
    new, changed = [], []
    for record, content in zip(records, dump_all(records), strict=True):
        before = stored.get(str(record["id"]))
        if before is None:
            new.append((content, record))
        elif not same_content(before, content):
            changed.append((content, record))
    _insert(connection, new)
    _update(connection, changed)
    return len(new) + len(changed)


def contents(store: Store, filters: Filters = Filters()) -> list[str]:
    """Return the records' own texts, in the order they came in."""
    wanted = select(measurements.c.content).order_by(measurements.c.position)
    folded = {"family": filters.family, "backend": filters.backend, "gpu": filters.gpu, "peak_kind": filters.kind}
    for column, value in folded.items():
        if value is not None:
            wanted = wanted.where(func.lower(measurements.c[column]) == value.lower())
    if filters.run is not None:
        wanted = wanted.where(measurements.c.run_id == filters.run)
    with store.read() as connection:
        return list(connection.execute(wanted).scalars())


def _contents_by_id(connection: Connection, ids: Iterable[str]) -> dict[str, str]:
    by_id: dict[str, str] = {}
    for some in batches(ids):
        wanted = select(measurements.c.id, measurements.c.content).where(measurements.c.id.in_(some))
        by_id.update((str(key), str(content)) for key, content in connection.execute(wanted))
    return by_id


def _insert(connection: Connection, written: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    if not written:
        return
    last = connection.execute(select(func.max(measurements.c.position))).scalar() or 0
    rows = [
        {"id": record["id"], "position": last + n, "content": content, **columns(record)}
        for n, (content, record) in enumerate(written, start=1)
    ]
    # The values go to the driver as they are: SQLAlchemy would handle each of them, longer than the database does.
    insert = measurements.insert().compile(dialect=connection.dialect)
    for some in batches(rows, _ROWS):
        values = [tuple(row[name] for name in insert.positiontup) for row in some] if insert.positiontup else some
        connection.exec_driver_sql(str(insert), values)


def _update(connection: Connection, written: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    if not written:
        return
    rows = [{"this_id": record["id"], "content": content, **columns(record)} for content, record in written]
    named: dict[str, Any] = {name: bindparam(name) for name in rows[0] if name != "this_id"}
    chosen = measurements.update().where(measurements.c.id == bindparam("this_id")).values(named)
    for some in batches(rows, _ROWS):
        connection.execute(chosen, some)


def put_rehearsed(store: Store, records: Sequence[Mapping[str, Any]]) -> int:
    """Write the records of rehearsed ranks and return how many changed. Raises UserError for a store that cannot be
    written."""
    with store.write() as connection:
        return write_rehearsed(connection, records)


def write_rehearsed(connection: Connection, records: Sequence[Mapping[str, Any]]) -> int:
    """Write the records of rehearsed ranks inside the caller's transaction. A rank rehearsed again replaces its earlier
    records, also of another kind: one that ran out of memory has no peak, and the other way about."""
    ids = [str(record["id"]) for record in records]
    table, changed = measurements, 0
    for place in {each.rpartition("/")[0] for each in ids}:
        of_place = table.c.id.startswith(f"{place}/", autoescape=True)
        changed += connection.execute(delete(table).where(of_place, table.c.id.not_in(ids))).rowcount
    return changed + put_collected(connection, records)


def rehearsed_of(store: Store, recipe: Recipe, plan: Plan) -> tuple[RehearsedRank, ...]:
    """Return the rehearsed pipeline ranks of the plan's very shape and framework version. `recipe` is as planned."""
    shape = shape_of(recipe, plan)["shape"]
    texts = contents(store, Filters(family=REHEARSED, backend=framework_of(recipe).recorded_name(recipe)))
    return rehearsed_ranks([stored_json(content) for content in texts], shape, recipe, plan)


def write_lines(lines: Iterable[str], path: Path) -> None:
    """Replace the content of a file by these lines, whole or not at all. A new file is for its owner alone, as the
    store is; an existing one keeps its permissions. Raises UserError if it cannot be written, or is a link to a
    file."""
    if path.exists() and not path.is_file() and not path.is_dir():
        try:
            with path.open("w", encoding="utf-8", newline="\n") as device:  # a device or a pipe takes no rename
                device.writelines(line + "\n" for line in lines)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        return
    with replacing(path, 0o600) as file:
        file.writelines(line + "\n" for line in lines)
