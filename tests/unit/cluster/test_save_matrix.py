"""A measured matrix into a profile: the profile stays as the person wrote it, but for one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.matrix import BandwidthMatrix, matrix_text, merged, read_matrix
from llmlaunch.cluster.profile_text import destination
from llmlaunch.errors import UserError

TEXT = matrix_text(["a", "b"], [[0, 1e9], [2e9, 0]])
PROFILES = [
    "base: cpu-x1\n",
    "base: cpu-x1  # ours\n# no newline at the end\nhost_memory_gib: 64",
    "base: cpu-x1\nlinks:  # measured in spring\n    # the fabric\n    fabric: {gigabytes_per_second: 3}\nname: x\n",
    "base: cpu-x1\nlinks: {fabric: {gigabytes_per_second: 3}}  # flow\nname: x\n",
    'name: "links"\nbase: cpu-x1\nlinks:\n  fabric:\n    gigabytes_per_second: 3\n',
]


@pytest.mark.parametrize("text", PROFILES)
def test_a_profile_gets_one_line_more_and_keeps_every_other(text: str, tmp_path: Path) -> None:
    profile = tmp_path / "ours.yaml"
    profile.write_text(text)
    before = load_cluster("./ours.yaml", tmp_path)
    destination("./ours.yaml", tmp_path).save(TEXT)
    after = load_cluster("./ours.yaml", tmp_path)
    assert after.bandwidth == read_matrix(tmp_path / "ours.links.json")
    assert (after.name, after.fabric_link, after.host_memory_bytes) == (
        before.name,
        before.fabric_link,
        before.host_memory_bytes,
    )
    assert all(word in profile.read_text() for word in text.split("#")[1:])
    # again: the profile names it already
    again = destination("./ours.yaml", tmp_path)
    assert again.profile_text is None
    assert again.matrix == tmp_path / "ours.links.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.links.json", "ours.yaml"]


def test_a_shipped_profile_is_started_from_not_changed(tmp_path: Path) -> None:
    destination("h100-80gb-x8", tmp_path).save(TEXT)
    cluster = load_cluster("./h100-80gb-x8.yaml", tmp_path)
    assert cluster.bandwidth is not None
    assert cluster.accelerator.name == "h100-80gb"
    assert load_cluster("h100-80gb-x8").bandwidth is None
    with pytest.raises(UserError, match=r"exists already; save into it with --save \./h100-80gb-x8\.yaml"):
        destination("h100-80gb-x8", tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('base: cpu-x1\n"links":\n  fabric: {gigabytes_per_second: 3}\n', "add under links: `matrix: ours.links.json`"),
        ('{"base": "cpu-x1", "links": {}}\n', "add under links: `matrix: ours.links.json`"),
        ("base: cpu-x1\nlinks: {matrix: 7}\n", "links.matrix: must be text"),
        ("base: [\n", "is not valid YAML"),
    ],
)
def test_a_profile_that_cannot_be_changed_safely_is_left_alone(text: str, sentence: str, tmp_path: Path) -> None:
    profile = tmp_path / "ours.yaml"
    profile.write_text(text)
    with pytest.raises(UserError) as caught:
        destination("./ours.yaml", tmp_path)
    assert sentence in str(caught.value)
    assert profile.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["ours.yaml"]


def test_an_unknown_profile_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown cluster 'h900'"):
        destination("h900", tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        destination("./nowhere.yaml", tmp_path)


def test_a_broken_old_matrix_does_not_keep_a_new_one_from_being_saved(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("base: cpu-x1\nlinks: {matrix: old.json}\n")
    (tmp_path / "old.json").write_text("{")
    destination("./ours.yaml", tmp_path).save(TEXT)
    assert read_matrix(tmp_path / "old.json").nodes == ("a", "b")


def test_some_nodes_measured_again_change_their_links_alone() -> None:
    old = BandwidthMatrix(("a", "b", "c"), ((0, 1, 2), (3, 0, 4), (5, 6, 0)))
    again = BandwidthMatrix(("c", "a"), ((0, 50), (20, 0)))
    assert merged(old, again) == BandwidthMatrix(("a", "b", "c"), ((0, 1, 20), (3, 0, 4), (50, 6, 0)))
    other = BandwidthMatrix(("c", "d"), ((0, 50), (20, 0)))
    assert merged(old, other) == other
