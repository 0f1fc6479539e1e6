"""The file of measured bandwidths: read strictly, written so that it reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.matrix import matrix_text, read_matrix
from llmlaunch.errors import UserError

GOOD = """\
{
 "schema": 1,
 "nodes": ["a", "b", "c"],
 "gigabytes_per_second": [
  [null, 18.5, 17],
  [16.25, 0, 19.5],
  [18, 17.5, null]
 ]
}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "links.json"
    path.write_text(text)
    return path


def test_a_matrix_is_bytes_per_second_and_its_diagonal_means_nothing(tmp_path: Path) -> None:
    matrix = read_matrix(written(tmp_path, GOOD))
    assert matrix.nodes == ("a", "b", "c")
    assert matrix.bytes_per_second == ((0.0, 18.5e9, 17e9), (16.25e9, 0.0, 19.5e9), (18e9, 17.5e9, 0.0))


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    speeds = [[0.0, 1.5e9], [2.5e9, 0.0]]
    path = written(tmp_path, matrix_text(["n1", "n2"], speeds, {"message_bytes": 1, "backend": "gloo"}))
    assert read_matrix(path).bytes_per_second == tuple(map(tuple, speeds))
    assert json.loads(path.read_text())["measured"]["backend"] == "gloo"


@pytest.mark.parametrize(
    ("old", "new", "line", "sentence"),
    [
        ("18.5", "NaN", 5, "a to b is NaN, no finite number"),
        ("19.5", "Infinity", 6, "b to c is Infinity, no finite number"),
        ("19.5", "1e999", 6, "b to c is Infinity, no finite number"),
        ("17.5", "-17.5", 7, "c to b is -17.5, negative"),
        ("17.5", "1e12", 7, "more than any network does"),
        ("17.5", "1" + "0" * 400, 7, "more than any network does"),
        ("17.5", "true", 7, "c to b is true, no number"),
        ("17.5", '"fast"', 7, 'c to b is "fast", no number'),
        ("17.5", "null", 7, "c to b is null, no number"),
        ("18.5", "0", 5, "a to b is 0, though b to a is 16.25"),
        ("16.25", "0.0", 6, "b to a is 0, though a to b is 18.5"),
        ("[16.25, 0, 19.5]", "[16.25, 0]", 6, "the row of b has 2 numbers for 3 nodes; a matrix is square"),
        ("[16.25, 0, 19.5]", "[16.25, 0, 19.5, 3]", 6, "the row of b has 4 numbers for 3 nodes"),
        ("[16.25, 0, 19.5]", "7", 6, "the row of b is no list"),
        ('"b", "c"]', '"b"]', 4, "there are 2 nodes but 3 rows"),
        ('"b", "c"]', '"b", "a"]', 3, "a stands twice"),
        ('"b", "c"]', '"b", "c d"]', 3, '"c d" is no node name'),
        ('"b", "c"]', '"b", 3]', 3, "3 is no node name"),
        ('["a", "b", "c"]', '["a"]', 3, "at least two node names"),
        ('"schema": 1', '"schema": 2', 2, "another version of the format"),
        (' "schema": 1,\n', "", 1, "schema: is missing"),
        ('"schema": 1', '"schema": 1, "unit": "MB"', 2, "unit: is not a known key"),
        ('"schema": 1', '"schema": 1, "schema": 1', 1, "'schema' stands twice"),
        ("18.5,", "18.5 ", 5, "is not valid JSON"),
        (GOOD, "[1, 2]", 1, "is no JSON object"),
        (GOOD, "[" * 100_000, None, ""),
        (GOOD, "", 1, "is not valid JSON"),
    ],
    ids=range(27),
)
def test_a_bad_matrix_is_refused_with_its_line(
    old: str, new: str, line: int | None, sentence: str, tmp_path: Path
) -> None:
    assert GOOD.count(old) == 1
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UserError) as caught:
        read_matrix(path)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert message.startswith(f"{path}:{line}: " if line else str(path))


def test_zeros_both_ways_are_refused_too(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("18.5", "0").replace("16.25", "0"))
    with pytest.raises(UserError, match="a to b is 0, and so is the way back"):
        read_matrix(path)


def test_the_profile_names_its_matrix_relative_to_itself(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    (tmp_path / "site.yaml").write_text("base: cpu-x1\nlinks: {matrix: links.json}\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "ours.yaml").write_text("base: ../site.yaml\nnodes_per_switch: 4\n")
    cluster = load_cluster("deeper/ours.yaml", tmp_path)
    assert cluster.bandwidth is not None
    assert cluster.bandwidth.nodes == ("a", "b", "c")
    assert cluster.nodes_per_switch == 4
    inline = load_cluster({"base": "cpu-x1", "links": {"matrix": "links.json"}}, tmp_path)
    assert inline.bandwidth == cluster.bandwidth


def test_a_bad_matrix_is_told_with_the_profile_that_names_it(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("18.5", "NaN"))
    (tmp_path / "site.yaml").write_text("base: cpu-x1\nlinks: {matrix: links.json}\n")
    with pytest.raises(UserError) as caught:
        load_cluster("./site.yaml", tmp_path)
    assert f"site.yaml: links.matrix: {path}:5: " in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=r"links\.json: cannot be read"):
        load_cluster("./site.yaml", tmp_path)
