"""Records go in and come out as they were; a bad file changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store, open_store
from llmlaunch.store.history import last_true_peaks
from llmlaunch.store.location import where
from llmlaunch.store.measurements import (
    Filters,
    ImportResult,
    contents,
    import_file,
    put_rehearsed,
    rehearsed_of,
    write_lines,
)
from llmlaunch.store.record_files import columns, dump, dump_all, same_content
from support.rehearsed_plans import PINS, on_gpu, planned, records, traced
from support.soak import examples
from support.store_run_dirs import RUN_ID, finished_cpu_run

DATA = Path(__file__).resolve().parents[2] / "data" / "measurements"
FILES = (DATA / "fit.jsonl", DATA / "outcomes.jsonl")


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_every_measured_record_comes_out_as_it_went_in(store: Store, tmp_path: Path) -> None:
    given_lines = [line for path in FILES for line in lines_of(path)]
    for path in FILES:
        import_file(store, path)
    write_lines(contents(store), tmp_path / "out.jsonl")
    exported = lines_of(tmp_path / "out.jsonl")
    assert [json.loads(line) for line in exported] == [json.loads(line) for line in given_lines]
    assert exported == given_lines  # to the last digit, key and blank


def test_absent_keys_stay_absent_and_unknown_ones_stay(store: Store, tmp_path: Path) -> None:
    line = '{"id": "a", "of_the_site": {"rack": 7}, "x": [0.1, 12, 12.0, 1e3, -0.0, "\\u00fc\\u0000\\ud800"]}'
    import_file(store, written(tmp_path / "in.jsonl", line))
    assert contents(store) == [line]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)

other_keys = st.text().filter(lambda key: key not in ("id", "peak_bytes"))


@examples(25)
@given(
    parts=st.lists(st.dictionaries(other_keys, json_values, max_size=4), min_size=1, max_size=3),
    chosen=st.lists(st.tuples(st.integers(0, 2), st.dictionaries(other_keys, json_values, max_size=2)), max_size=8),
)
def test_records_that_share_values_are_put_into_words_as_any(
    parts: list[dict[str, object]], chosen: list[tuple[int, dict[str, object]]]
) -> None:
    records = [{"id": f"r{n}", **parts[part % len(parts)], **own} for n, (part, own) in enumerate(chosen)]
    texts = dump_all(records)
    assert len(texts) == len(records)
    for text, record in zip(texts, records, strict=True):
        assert same_content(text, dump(record))


def test_windows_line_ends_a_byte_order_mark_and_empty_lines_do_no_harm(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a"}\r\n\r\n{"id": "b"}')
    assert import_file(store, path).added == 2
    assert contents(store) == ['{"id": "a"}', '{"id": "b"}']


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ('{"id":"a","x":1e3,"y":0.1}', '{"y": 0.10, "x": 1000.0, "id": "a"}', True),
        ('{"id":"a","x":12}', '{"id":"a","x":12.0}', False),
        ('{"id":"a","x":1}', '{"id":"a","x":true}', False),
        ('{"id":"a","x":null}', '{"id":"a"}', False),
        ('{"id":"a","x":[1,2]}', '{"id":"a","x":[2,1]}', False),
    ],
)
def test_what_equal_means(left: str, right: str, same: bool) -> None:
    assert same_content(left, right) is same


def test_an_id_with_other_content_is_refused_and_nothing_is_written(store: Store, tmp_path: Path) -> None:
    import_file(store, written(tmp_path / "a.jsonl", '{"id": "a", "x": 1}', '{"id": "b"}'))
    changed = written(tmp_path / "b.jsonl", '{"id": "new"}', '{"id": "a", "x": 2}')
    with pytest.raises(UserError, match=r"b\.jsonl, line 2: the store holds 'a' with other content.*--replace"):
        import_file(store, changed)
    assert contents(store) == ['{"id": "a", "x": 1}', '{"id": "b"}']


def test_replacing_keeps_the_place_in_the_order(store: Store, tmp_path: Path) -> None:
    import_file(store, written(tmp_path / "a.jsonl", '{"id": "a", "gpu": "A100"}', '{"id": "b"}'))
    changed = written(tmp_path / "b.jsonl", '{"id": "new"}', '{"id": "a", "gpu": "H100"}')
    assert import_file(store, changed, replace=True) == ImportResult(added=1, replaced=1, unchanged=0)
    assert contents(store) == ['{"id": "a", "gpu": "H100"}', '{"id": "b"}', '{"id": "new"}']
    assert contents(store, Filters(gpu="h100")) == ['{"id": "a", "gpu": "H100"}']


def test_the_same_record_twice_in_a_file_is_one(store: Store, tmp_path: Path) -> None:
    assert import_file(store, written(tmp_path / "a.jsonl", '{"id": "a"}', '{"id":"a"}')).added == 1
    with pytest.raises(UserError, match="line 2: the id 'a' is already on line 1"):
        import_file(store, written(tmp_path / "b.jsonl", '{"id": "a"}', '{"id": "a", "x": 1}'))


BAD_LINES = [
    ('{"id": "x"', "not JSON"),
    ("{'id': 'x'}", "not JSON"),
    ('{"id": "x"} {"id": "y"}', "not JSON"),
    ('{"id": "x", "peak_bytes": NaN}', "NaN is not a number JSON knows"),
    ('{"id": "x", "loss": -Infinity}', "-Infinity is not a number JSON knows"),
    ('{"id": "x", "loss": 1e999}', "1e999 is larger than any number"),
    ('{"id": "x", "n": ' + "9" * 5000 + "}", "is larger than any number"),
    ('{"id": "x", "a": 1, "a": 2}', 'the key "a" stands twice'),
    ('["id", "x"]', "is a JSON object"),
    ("12", "is a JSON object"),
    ("null", "is a JSON object"),
    ("{}", "has no `id`"),
    ('{"id": null}', "`id` must be"),
    ('{"id": ""}', "`id` must be"),
    ('{"id": 7}', "`id` must be"),
    ('{"id": "a\\u0000b"}', "`id` must be"),
    ('{"id": "\\ud800"}', "`id` must be"),
    ('{"id": "x", "peak_bytes": -1}', "`peak_bytes`"),
    ('{"id": "x", "peak_bytes": 1.5}', "`peak_bytes`"),
    ('{"id": "x", "peak_bytes": true}', "`peak_bytes`"),
    ('{"id": "x", "peak_bytes": 9223372036854775808}', "`peak_bytes`"),
    ("[" * 200_000, "not"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[line[:40] for line, _ in BAD_LINES])
def test_a_bad_line_is_named_and_nothing_is_written(store: Store, tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "bad.jsonl", '{"id": "good"}', "", line)
    with pytest.raises(UserError) as caught:
        import_file(store, path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(store) == []


def test_bytes_that_are_no_text_are_named(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "\xff"}\n')
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        import_file(store, path)
    assert contents(store) == []


def test_a_file_that_cannot_be_read_or_written_is_one_message(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        import_file(store, tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        import_file(store, tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        write_lines(["{}"], tmp_path / "absent" / "out.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        write_lines(["{}"], tmp_path)


def test_a_failed_export_leaves_the_older_file(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", "older")
    with pytest.raises(UnicodeEncodeError):
        write_lines(["{}", "\ud800"], path)
    assert path.read_text() == "older\n"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_filters_narrow_the_list(store: Store) -> None:
    for path in FILES:
        import_file(store, path)
    records = [json.loads(line) for path in FILES for line in lines_of(path)]

    def chosen(**wanted: str) -> list[str]:
        return [r["id"] for r in records if all(r[key] == value for key, value in wanted.items())]

    def listed(**filters: str) -> list[str]:
        return [json.loads(content)["id"] for content in contents(store, Filters(**filters))]

    assert listed(gpu="h100") == chosen(gpu="H100") != []
    assert listed(kind="oom", family="amp") == chosen(peak_kind="oom", family="amp")
    assert listed(backend="Megatron-LM", kind="allocated") == chosen(backend="megatron-lm", peak_kind="allocated") != []
    assert listed(run="nobody") == []


def test_values_that_no_column_can_hold_stay_in_the_record_alone() -> None:
    row = columns({"id": "a", "gpu": "\ud800", "family": 7, "peak_bytes": 2**70, "pipeline_rank": True})
    assert set(row.values()) == {None}


IMPORT = """
import sys
from pathlib import Path
from llmlaunch.store.measurements import import_file
from llmlaunch.store.database import open_store
with open_store() as store:
    import_file(store, Path(sys.argv[1]))
"""


def importing(store_path: Path, path: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "LLMLAUNCH_STORE": str(store_path)}
    return subprocess.Popen([sys.executable, "-c", IMPORT, str(path)], env=env, stderr=subprocess.PIPE)


def test_programs_may_import_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    running = [importing(path, file) for file in (*FILES, FILES[0])]
    assert [process.communicate()[1] for process in running] == [b""] * 3
    with open_store(where({"LLMLAUNCH_STORE": str(path)})) as store:
        lines = contents(store)
    assert sorted(lines) == sorted(line for file in FILES for line in lines_of(file))
    assert lines[:300] in (lines_of(FILES[0])[:300], lines_of(FILES[1])[:300])  # one file after the other


@pytest.mark.faults
def test_an_import_that_is_killed_leaves_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    padding = "x" * 2000  # more than SQLite's page cache (2 MB), so that pages reach the file before the end
    many = written(tmp_path / "many.jsonl", *(json.dumps({"id": f"m{n}", "pad": padding}) for n in range(5_000)))
    with open_store(where({"LLMLAUNCH_STORE": str(path)})) as store:
        import_file(store, FILES[0])
        before = contents(store)
    small = path.stat().st_size
    process = importing(path, many)
    while process.poll() is None and path.stat().st_size < small + 1_000_000:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.with_name("store.db-journal").exists()  # killed in mid-transaction, pages already written
    with open_store(where({"LLMLAUNCH_STORE": str(path)})) as store:
        assert contents(store) == before
        with store.read() as connection:
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert import_file(store, many).added == 5_000


def test_what_was_rehearsed_is_found_for_this_very_shape_alone(store: Store) -> None:
    job = planned()
    ranks = (traced(job, 0), on_gpu(job, 3, ran_out=True))
    assert put_rehearsed(store, records(job, *ranks)) == 2
    assert rehearsed_of(store, job.recipe, job.plan) == ranks
    other = planned(*PINS, "training.sequence_length=4096")
    assert rehearsed_of(store, other.recipe, other.plan) == ()


def test_rehearsed_again_takes_the_place_of_before(store: Store) -> None:
    job = planned()
    put_rehearsed(store, records(job, traced(job, 0, 1.3), traced(job, 1)))
    assert put_rehearsed(store, records(job, traced(job, 0, 1.3), traced(job, 1))) == 0
    assert put_rehearsed(store, records(job, traced(job, 0, 1.1))) == 1
    assert rehearsed_of(store, job.recipe, job.plan) == (traced(job, 0, 1.1), traced(job, 1))
    assert len(contents(store)) == 2


def test_what_ran_out_before_has_peaks_now_and_the_other_way_about(store: Store) -> None:
    job = planned()
    put_rehearsed(store, records(job, on_gpu(job, 0, ran_out=True), on_gpu(job, 1)))
    assert len(contents(store)) == 4
    put_rehearsed(store, records(job, on_gpu(job, 0), on_gpu(job, 1, ran_out=True)))
    assert rehearsed_of(store, job.recipe, job.plan) == (on_gpu(job, 0), on_gpu(job, 1, ran_out=True))
    assert len(contents(store)) == 4


def test_an_export_takes_them_along(store: Store, tmp_path: Path) -> None:
    job = planned()
    ranks = (traced(job, 0), on_gpu(job, 3))
    put_rehearsed(store, records(job, *ranks))
    path = tmp_path / "out.jsonl"
    write_lines(contents(store), path)
    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "other.db")})) as other:
        assert import_file(other, path).added == 4
        assert rehearsed_of(other, job.recipe, job.plan) == ranks
        assert put_rehearsed(other, records(job, *ranks)) == 0  # and is the same rehearsal there


def test_a_record_that_only_looks_like_one_does_no_harm(store: Store, tmp_path: Path) -> None:
    job = planned()
    good = records(job, traced(job, 0))
    shape = good[0]["rehearsal"]["shape"]
    bad = [
        {"id": "a", "family": "rehearsed", "rehearsal": {"shape": shape}},
        {"id": "b", "family": "rehearsed", "rehearsal": 7},
        {**good[0], "id": "c", "observed": [], "pipeline_rank": "x"},
    ]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(each) + "\n" for each in bad))
    import_file(store, tmp_path / "bad.jsonl")
    put_rehearsed(store, good)
    assert rehearsed_of(store, job.recipe, job.plan) == (traced(job, 0),)


def test_they_are_listed_as_rehearsed_and_are_no_last_true_peak_even_of_a_run_they_name(
    store: Store, tmp_path: Path
) -> None:
    job = planned()
    put_rehearsed(store, records(job, on_gpu(job, 0)))
    assert len(contents(store, Filters(family="rehearsed"))) == 3
    assert last_true_peaks(store, job.recipe.digest, job.recipe.name) is None
    collect(store, [finished_cpu_run(tmp_path / "run").path])
    named = [{**record, "run_id": RUN_ID, "attempt": "9"} for record in records(job, on_gpu(job, 0), at=2e9)]
    put_rehearsed(store, named)
    past = last_true_peaks(store, "d1", "tiny")
    assert past is not None
    assert {peak.peak_kind for peak in past.peaks} == {"resident"}
