"""Records as a table: each comes back equal, and no cell is a formula."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.store.database import Store, open_store
from llmlaunch.store.location import where
from llmlaunch.store.measurements import contents, csv_lines, import_file, write_lines
from llmlaunch.store.record_files import read_records, same_content, value_of

DATA = Path(__file__).resolve().parents[2] / "data" / "measurements"

tricky = st.sampled_from([
    *("", " ", "null", "true", "TRUE", "1", "-1", "1e3", "07", "+5", "=1+1", "@x", "-", "a;=1", 'a;"=1', "\t=1", "\r"),
    *('"', '"a"', "[", "[1]", "{}", "a,b", "a\nb", " a", "\x00", "\ud800", "\ufeff", "NaN", "Infinity", "1e999"),
    *("\uff1dx", "\u00fcmlaut", ".", "a.b", "id", "\u2028"),
])  # fmt: skip
texts = st.text(max_size=8) | tricky
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
records = st.lists(st.dictionaries(texts.filter(lambda key: key not in ("id", "peak_bytes")), values, max_size=5))


def through_csv(folder: Path, given_records: list[str]) -> list[str]:
    write_lines(csv_lines(given_records), folder / "out.csv")
    return [line.content for line in read_records(folder / "out.csv").lines]


@settings(max_examples=60)
@given(bodies=records)
@example(
    bodies=[{"a": None, "b": ""}, {"a": {"b": 12}, "b": 12.0}, {"a": {}, "b": {"": []}}, {"a": {"b": {"c": True}}}]
)
def test_what_is_exported_is_imported_equal(tmp_path_factory: pytest.TempPathFactory, bodies: list[Any]) -> None:
    texts_given = [json.dumps({**body, "id": f"r{number}"}) for number, body in enumerate(bodies)]
    back = through_csv(tmp_path_factory.mktemp("csv"), texts_given)
    assert len(back) == len(texts_given)
    for line, other in zip(back, texts_given, strict=True):
        assert same_content(line, other), (line, other)


def cells_as_seen(line: str, separator: str) -> list[str]:
    return next(csv.reader(io.StringIO(line), delimiter=separator), [])


@settings(max_examples=60)
@given(bodies=records, name=texts.filter(bool), separator=st.sampled_from([",", ";", "\t"]))
def test_no_cell_is_a_formula_however_the_line_is_cut(bodies: list[Any], name: str, separator: str) -> None:
    texts_given = [json.dumps({**body, "id": f"{name}{number}"}) for number, body in enumerate(bodies)]
    number = re.compile(r"-[0-9.]+([eE][+-]?[0-9]+)?(,.*)?", re.DOTALL)  # a negative one is what it says
    for line in csv_lines(texts_given):
        for cell in cells_as_seen(line, separator):
            bare = cell.lstrip(" \t\r\n'")
            assert not re.match("[=+@\uff1d\uff0b\uff0d\uff20]", bare) or cell.startswith("'"), line
            assert not bare.startswith("-") or number.fullmatch(cell), line


def test_every_measured_record_comes_back_equal(store: Store, tmp_path: Path) -> None:
    for name in ("fit.jsonl", "outcomes.jsonl"):
        import_file(store, DATA / name)
    write_lines(csv_lines(contents(store)), tmp_path / "all.csv")
    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "other.db")})) as other:
        assert import_file(other, tmp_path / "all.csv").added == len(contents(store))
        for line, another in zip(contents(store), contents(other), strict=True):
            assert same_content(line, another)
    assert import_file(store, tmp_path / "all.csv").unchanged == len(contents(store))


def test_the_table_is_plain_where_it_can_be() -> None:
    record = {
        "id": "a", "gpu": "H100", "model": {"num_layers": 2, "moe": None, "name": "12"}, "peak_bytes": 5, "rate": 2.0,
        "layers": [1, 2], "exact": True, "note": "=HYPERLINK(1)", "of.site": {"": "x"}, "none": {},
    }  # fmt: skip
    lines = list(csv_lines([json.dumps(record)]))
    assert lines == [
        'id,gpu,model.num_layers,model.moe,model.name,peak_bytes,rate,layers,exact,note,"""of.site"".""""",none',
        'a,H100,2,null,"""12""",5,2.0,"[1,2]",true,"""=HYPERLINK(1)""",x,{}',
    ]
    assert list(csv_lines([])) == []


@pytest.mark.parametrize(
    ("cell", "value"),
    [("TRUE", True), ("1.50", 1.5), ("007", "007"), ("12 GiB", "12 GiB"), ("None", "None"), ("NaN", "NaN")],
)
def test_what_a_person_or_a_spreadsheet_types(cell: str, value: Any) -> None:
    assert value_of(cell) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu\nH100\n", "names no column `id`"),
        ("id,x,x\na,1,2\n", "two columns are named 'x'"),
        ("id,x.,y\na,1,2\n", "line 1: the heading 'x.' is none"),
        ("id,x,x.y\na,1,\na,1,2\n", "line 3: has a value for x and one for x.y"),
        ("id,x.y,x\na,1,2\n", "line 2: has a value for x and one for a key in it"),
        ("id\na,b\n", "line 2: has 2 cells, but the heading line has 1"),
        ("id,x\na,[1\n", "line 2: the cell '[1' is no JSON"),
        ('id,x\na,"""b\n', "line 2: unexpected end of data"),
        ("id,x\n,1\n", "line 2: the record has no `id`"),
        ("id,peak_bytes\na,1.5\n", "line 2: `peak_bytes` of 'a' must be a whole number"),
        ("id,x\na,1\na,2\n", "line 3: the id 'a' is already on line 2"),
    ],
)
def test_a_bad_table_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "in.csv").write_text(text)
    with pytest.raises(UserError) as caught:
        read_records(tmp_path / "in.csv")
    assert message in str(caught.value)
    assert str(caught.value).endswith("; nothing was imported")
    assert "\n" not in str(caught.value)


def test_bad_rows_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b'\xef\xbb\xbfid,note\r\na,"two\nlines"\r\nb,\xff\r\n\r\nc,[\r\nd,2,3\r\ne,f\r\n')
    read = read_records(path, skip_bad=True)
    assert [json.loads(line.content) for line in read.lines] == [
        {"id": "a", "note": "two\nlines"},
        {"id": "e", "note": "f"},
    ]
    assert [(bad.number, bad.why) for bad in read.bad] == [
        (4, "not UTF-8 text"),
        (6, "the cell '[' is no JSON"),
        (7, "has 3 cells, but the heading line has 2"),
    ]


def test_reading_a_long_cell_leaves_the_csv_modules_limit_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(f"id,note\na,{'x' * 200_000}\n")
    limit = csv.field_size_limit()
    assert len(read_records(path).lines) == 1
    assert csv.field_size_limit() == limit
