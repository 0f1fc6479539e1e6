"""A profile drafted from what a site's SLURM says of itself loads, says what was read, and marks what was not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from slurm_texts import SLURM_22_05, SLURM_23_11, SLURM_26_05

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.profile import Cluster
from llmlaunch.cluster.profile_text import drafts
from llmlaunch.cluster.slurm_site import Answers, host_count, read_site
from llmlaunch.errors import UserError


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
        ("gpu:b200:8", "b200", "base: b200-x8"),
        ("gpu:a800:8", "a800-80gb", "set links.node"),
        ("gpu:h100:no_consume:8", "h100-80gb", "base: h100-80gb-x8"),
    ],
)
def test_gpu_types_become_our_accelerators(gres: str, accelerator: str, sentence: str, tmp_path: Path) -> None:
    (text,) = texts(replace(SLURM_22_05, nodes=SLURM_22_05.nodes.replace("gpu:h100:8", gres))).values()
    assert loaded(text, tmp_path).accelerator.name == accelerator
    assert sentence in text


@pytest.mark.parametrize(
    "gres", ["gpu:rtx4090:2", "gpu:nvidia_h100_nvl:8", "gpu:nvidia_a100_3g.20gb:8", "gpu:h100_pcie:8", "gpu:2(S:0)"]
)
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
