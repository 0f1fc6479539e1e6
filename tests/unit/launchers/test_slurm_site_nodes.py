"""Which sick nodes a job is kept from: only nodes its partition has, and never so many that it could not start."""

from __future__ import annotations

from llmlaunch.launchers.slurm.site import exclusion

LISTED = """\
n1|train*|idle
n1|debug|idle
n2|train*|alloc
n3|train*|mix
n4|train*|down*
n5|big|idle
"""


def test_sick_nodes_of_the_jobs_partition_are_left_out() -> None:
    nodes = exclusion(["n2", "gone", "n5"], ["--nodes=2"], LISTED)
    assert (nodes.names, nodes.words) == (("n2",), ("--exclude=n2",))
    assert exclusion(["n2", "n5"], ["-N1", "--partition", "train,big"], LISTED).names == ("n2", "n5")
    assert exclusion(["n2"], ["-p", "debug"], LISTED).words == ()


def test_what_the_job_leaves_out_itself_stays_left_out() -> None:
    assert exclusion(["n2"], ["--exclude=n[3-4]"], LISTED).words == ("--exclude=n[3-4],n2",)


def test_a_job_that_could_not_start_gets_its_sick_nodes() -> None:
    nodes = exclusion(["n2"], ["--nodes=3"], LISTED)  # n4 is down
    assert (nodes.names, nodes.words, nodes.too_few) == (("n2",), (), True)
    assert exclusion(["n2"], ["--nodes=2", "--exclude=n3"], LISTED).too_few


def test_a_job_for_another_cluster_is_left_alone() -> None:
    assert exclusion(["n2"], ["--clusters=red"], LISTED).words == exclusion(["n2"], ["-M", "red"], LISTED).words == ()


def test_a_node_that_the_job_asks_for_by_name_is_its_own_choice() -> None:
    assert exclusion(["n2"], ["-w", "n[1-2]"], LISTED).words == ()
