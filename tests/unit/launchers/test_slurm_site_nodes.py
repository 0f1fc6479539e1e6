"""Which sick nodes a job is kept from: only nodes its partition has, and never so many that it could not start."""

from __future__ import annotations

import pytest

from llmlaunch.launchers.slurm.site import exclusion

LISTED = """\
n1|train*|idle
n1|debug|idle
n2|train*|alloc
n3|train*|mix
n4|train*|down*
n5|big|idle
"""


@pytest.mark.parametrize(
    ("sick", "directives", "excluded"),
    [
        (["n2", "gone", "n5"], ["--nodes=2"], "n2"),
        (["n5", "n2"], ["-N1", "--partition", "train,big"], "n5"),  # one node of so few, the first named
        (["n2"], ["-p", "debug"], None),
        (["n2"], ["--exclude=n[3-4]"], "n[3-4],n2"),  # what the job leaves out itself stays left out
        (["n2"], ["--clusters=red"], None),
        (["n2"], ["-M", "red"], None),
        (["n2"], ["-w", "n[1-2]"], None),  # asked for by name
    ],
)
def test_sick_nodes_of_the_jobs_partition_are_left_out(
    sick: list[str], directives: list[str], excluded: str | None
) -> None:
    assert exclusion(sick, directives, LISTED).words == ((f"--exclude={excluded}",) if excluded else ())


def test_no_more_than_one_node_in_twenty_is_left_out() -> None:
    listed = "".join(f"n{number}|train*|idle\n" for number in range(60))
    nodes = exclusion(["n9", "gone", "n7", "n5", "n3", "n1"], ["--nodes=2"], listed)
    assert (nodes.words, nodes.beyond, nodes.most) == (("--exclude=n9,n7,n5",), ("n3", "n1"), 3)


def test_a_job_that_could_not_start_gets_its_sick_nodes() -> None:
    nodes = exclusion(["n2"], ["--nodes=3"], LISTED)  # n4 is down
    assert (nodes.names, nodes.words, nodes.too_few) == (("n2",), (), True)
    assert exclusion(["n2"], ["--nodes=2", "--exclude=n3"], LISTED).too_few
