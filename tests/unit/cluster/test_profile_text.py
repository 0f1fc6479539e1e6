"""Texts of profiles: drafted from what a site's SLURM says of itself, and kept as they are when a matrix is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.matrix import BandwidthMatrix, matrix_text, merged, read_matrix
from llmlaunch.cluster.profile import Cluster
from llmlaunch.cluster.profile_text import destination, drafts
from llmlaunch.cluster.slurm_site import Answers, host_count, read_site
from llmlaunch.errors import UserError
from support.slurm_answers import SLURM_22_05, SLURM_23_11, SLURM_26_05


def texts(answers: Answers, partition: str | None = None) -> dict[str, str]:
    return {draft.kind: draft.text for draft in drafts(read_site(answers), partition)}


def loaded(text: str, folder: Path) -> Cluster:
    (folder / "draft.yaml").write_text(text, encoding="utf-8")
    return load_cluster("./draft.yaml", folder)


def test_a_tree_of_switches_typed_gpus_and_memory_that_is_handed_out(tmp_path: Path) -> None:
    ((kind, text),) = texts(SLURM_22_05).items()
    cluster = loaded(text, tmp_path)
    assert (kind, cluster.accelerator.name, cluster.devices_per_node) == ("h100-x8", "h100-80gb", 8)
    assert (cluster.cpus_per_node, cluster.host_memory_bytes, cluster.nodes_per_switch) == (16, 62 * 2**30, 2)
    assert cluster.slurm == {"partition": "train", "exclusive": True, "mem": 0}
    assert (cluster.gpu_request, cluster.site.gpu_type, cluster.site.container.runtime) == ("gpus-per-node", None, None)
    assert "# Cluster llmlaunch, SLURM 22.05.8." in text
    assert "# Nodes: 4, node1 to node4." in text
    assert "neither pyxis nor apptainer seen here" in text
    assert "AccountingStorageEnforce=none: SLURM takes wrong accounts" in text


def test_several_kinds_of_gpus_have_a_draft_each_that_asks_for_its_own(tmp_path: Path) -> None:
    texts_by_kind = texts(SLURM_23_11)
    assert set(texts_by_kind) == {"h100-x8", "h200-x8"}
    cluster = loaded(texts_by_kind["h200-x8"], tmp_path)
    assert (cluster.accelerator.name, cluster.site.gpu_type) == ("h200-141gb", "H200")
    assert loaded(texts_by_kind["h100-x8"], tmp_path).site.gpu_type == "H100"
    assert (cluster.cpus_per_node, cluster.host_memory_bytes) == (104, 1757 * 2**30)
    assert (cluster.nodes_per_switch, cluster.site.container.runtime) == (None, "pyxis")
    assert "mem" not in cluster.slurm


def test_what_the_person_must_choose_is_told_and_not_chosen(tmp_path: Path) -> None:
    text = texts(SLURM_23_11)["h100-x8"]
    assert "account" not in loaded(text, tmp_path).slurm
    for line in (
        "  # account: one of yours: proj-1, no",
        "  # qos: one of yours where the default is not right: normal, long",
        "# mpi: none   # the site's default is pmix",
        "# restart_by: chain   # jobs are not requeued by default here",
        "# Jobs may be preempted: REQUEUE.",
        "# EnforcePartLimits=NO: SLURM takes jobs it will never start",
        "# CPUs are bound by task/affinity,task/cgroup.",
        "# Longest job in dev: 04:00:00, 16 nodes at most (slurm: {time: ...} of the recipe).",
    ):
        assert line in text
    only = replace(SLURM_23_11, associations="no|normal\n")
    assert loaded(texts(only)["h100-x8"], tmp_path).slurm["account"] == "no"  # and not YAML's false


def test_what_a_site_forbids_as_far_as_its_slurm_says(tmp_path: Path) -> None:
    config = SLURM_22_05.config.replace("accounting_storage/slurmdbd", "accounting_storage/none")
    partitions = SLURM_22_05.partitions.replace("OverSubscribe=NO", "OverSubscribe=FORCE:2")
    partitions = partitions.replace("AllowAccounts=ALL", "AllowAccounts=theirs,mine")
    strict = replace(SLURM_22_05, config=f"{config}JobSubmitPlugins = lua\n", partitions=partitions)
    text = texts(replace(strict, associations="mine|normal\nold|normal\n"))["h100-x8"]
    assert loaded(text, tmp_path).slurm == {"partition": "train", "account": "mine", "exclusive": False, "mem": 0}
    assert "rules of the site's own (JobSubmitPlugins=lua)" in text
    assert "No accounts are kept" in text
    # where no account of theirs may use the larger partition, the other one
    text = texts(replace(strict, associations="old|normal\n"))["h100-x8"]
    assert loaded(text, tmp_path).slurm["partition"] == "debug"
    text = texts(replace(strict, associations="old|normal\n"), "train")["h100-x8"]
    assert "  # account: train takes none of yours, but theirs, mine" in text


def test_gpus_without_a_type_are_told_apart_by_the_features_of_their_nodes(tmp_path: Path) -> None:
    texts_by_kind = texts(SLURM_26_05)
    assert set(texts_by_kind) == {"h100-x8", "h200-x8"}
    cluster = loaded(texts_by_kind["h200-x8"], tmp_path)
    assert (cluster.accelerator.name, cluster.site.gpu_type) == ("h200-141gb", None)
    assert cluster.slurm == {"partition": "batch", "exclusive": False, "constraint": "H200"}
    assert (cluster.nodes_per_block, cluster.site.container.runtime) == (16, "apptainer")


@pytest.mark.parametrize(
    ("gres", "accelerator", "sentence"),
    [
        ("gpu:nvidia_h100_80gb_hbm3:4(S:0-1)", "h100-80gb", "devices_per_node: 4"),
        ("gpu:a100:8", "a100-40gb", "SLURM does not say 40 or 80 GB"),
        ("gpu:a100_80gb:8", "a100-80gb", "base: a100-80gb-x8"),
        ("gpu:gb200:4", "gb200", "base: gb200-nvl72"),
        ("gpu:gb300:4", "gb300", "base: gb300-nvl72"),
        ("gpu:h20:8", "h20-96gb", "base: h100-80gb-x8"),
        ("gpu:h800:8", "h800-80gb", "set links.node"),
        ("gpu:h100:no_consume:8", "h100-80gb", "base: h100-80gb-x8"),
    ],
)
def test_gpu_types_become_our_accelerators(gres: str, accelerator: str, sentence: str, tmp_path: Path) -> None:
    (text,) = texts(replace(SLURM_22_05, nodes=SLURM_22_05.nodes.replace("gpu:h100:8", gres))).values()
    assert loaded(text, tmp_path).accelerator.name == accelerator
    assert sentence in text


@pytest.mark.parametrize("gres", ["gpu:rtx4090:2", "gpu:nvidia_a100_3g.20gb:8", "gpu:h100_pcie:8", "gpu:2(S:0)"])
def test_a_type_nobody_knows_is_left_to_be_filled_in(gres: str, tmp_path: Path) -> None:
    (text,) = texts(replace(SLURM_22_05, nodes=SLURM_22_05.nodes.replace("gpu:h100:8", gres))).values()
    assert "fill in a base (slurm/clusters/), or accelerator and links" in text
    with pytest.raises(UserError, match="is missing `accelerator`"):
        loaded(text, tmp_path)
    assert loaded(text.replace("# base: ", "base: "), tmp_path).devices_per_node == int(gres.split("(")[0][-1])


def test_a_cluster_without_gpus_has_a_draft_for_its_cpus(tmp_path: Path) -> None:
    ((kind, text),) = texts(replace(SLURM_22_05, nodes=SLURM_22_05.nodes.replace("gpu:h100:8", "(null)"))).items()
    cluster = loaded(text, tmp_path)
    assert (kind, cluster.accelerator.kind, cluster.gpu_request) == ("cpu", "cpu", "none")


def test_only_the_nodes_of_a_partition(tmp_path: Path) -> None:
    (text,) = texts(SLURM_22_05, "debug").values()
    assert loaded(text, tmp_path).slurm["partition"] == "debug"
    assert "# Nodes: 1, node1." in text
    with pytest.raises(UserError, match="no partition 'gpu'; there are: train, debug"):
        texts(SLURM_22_05, "gpu")


def test_an_old_way_of_handing_out_gpus_asks_by_gres(tmp_path: Path) -> None:
    old = replace(SLURM_22_05, config=SLURM_22_05.config.replace("cons_tres", "cons_res"))
    assert loaded(next(iter(texts(old).values())), tmp_path).gpu_request == "gres"


def test_a_slurm_that_shows_no_nodes_is_said() -> None:
    with pytest.raises(UserError, match=r"SLURM shows no nodes \(PrivateData"):
        texts(replace(SLURM_22_05, nodes=""))
    assert texts(Answers("", SLURM_22_05.partitions, SLURM_22_05.nodes))  # a bare minimum is enough


@pytest.mark.parametrize(
    ("hosts", "count"),
    [("n1", 1), ("n1,n3", 2), ("n[01-16,20]", 17), ("a[1-2]-b[1-4],c", 9), ("25a-hgpn[001-124,142-145]", 128), ("", 0)],
)
def test_hosts_are_counted_as_slurm_lists_them(hosts: str, count: int) -> None:
    assert host_count(hosts) == count


MATRIX = matrix_text(["a", "b"], [[0, 1e9], [2e9, 0]])
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
    destination("./ours.yaml", tmp_path).save(MATRIX)
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
    destination("h100-80gb-x8", tmp_path).save(MATRIX)
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
    destination("./ours.yaml", tmp_path).save(MATRIX)
    assert read_matrix(tmp_path / "old.json").nodes == ("a", "b")


def test_some_nodes_measured_again_change_their_links_alone() -> None:
    old = BandwidthMatrix(("a", "b", "c"), ((0, 1, 2), (3, 0, 4), (5, 6, 0)))
    again = BandwidthMatrix(("c", "a"), ((0, 50), (20, 0)))
    assert merged(old, again) == BandwidthMatrix(("a", "b", "c"), ((0, 1, 20), (3, 0, 4), (50, 6, 0)))
    other = BandwidthMatrix(("c", "d"), ((0, 50), (20, 0)))
    assert merged(old, other) == other
