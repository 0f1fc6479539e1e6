"""A factor makes its own kind of seconds longer, all of them together the whole step, and none changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timed_jobs import BASE, H100, MIXTRAL, RACK, job, term, time_of, total

from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.layout import Layout
from llmlaunch.memory.job import Job
from llmlaunch.techniques import Techniques
from llmlaunch.timing.correction import FACTORS, NO_TIME_CORRECTION, TimeCorrection, corrected_cluster
from llmlaunch.workload import Workload

SPREAD = Layout(2, 4, data=8, expert=16, zero_stage=1, sequence_parallel=1)
OFFLOADED = job(techniques=Techniques(offload_optimizer=1.0))


def test_no_correction_is_the_cluster_itself() -> None:
    assert corrected_cluster(H100, NO_TIME_CORRECTION) is H100


@pytest.mark.parametrize(
    ("factor", "name", "layout", "of"),
    [
        ("compute", "matrix_products", BASE, job()),
        ("compute", "attention", BASE, job()),
        ("compute", "element_wise", BASE, job()),
        ("fabric", "pipeline_transfer", BASE, job()),
        ("fabric", "expert_parallel", SPREAD, job(MIXTRAL)),
        ("host", "optimizer", BASE, OFFLOADED),
    ],
)
def test_a_factor_makes_its_own_seconds_longer_and_no_others(factor: str, name: str, layout: Layout, of: Job) -> None:
    slower = corrected_cluster(H100, TimeCorrection(**{factor: 1.5}))
    before, after = (term(name, layout, of, at) for at in (H100, slower))
    assert 1.3 * before < after <= 1.501 * before
    others = {"matrix_products", "attention"} if factor != "compute" else {"pipeline_transfer"}
    for other in others:
        assert term(other, layout, of, slower) == term(other, layout, of, H100)


@pytest.mark.parametrize(
    ("layout", "of"), [(replace(BASE, tensor=8, data=2), job()), (SPREAD, job(MIXTRAL))], ids=["dense", "mixture"]
)
def test_devices_that_wait_for_a_slower_host_wait_longer(layout: Layout, of: Job) -> None:
    short = replace(of, workload=Workload(256, 512))
    slower = corrected_cluster(H100, TimeCorrection(host=1.5))
    assert term("kernel_launches", layout, short, slower) > 1.4 * term("kernel_launches", layout, short)
    assert 1.15 < total(layout, short, slower) / total(layout, short) < 1.5


def test_links_in_a_rack_have_a_factor_of_their_own_and_elsewhere_are_the_nodes() -> None:
    wide = replace(BASE, tensor=8, pipeline=1, data=4)
    domain = TimeCorrection(domain=2.0)
    assert total(wide, cluster=corrected_cluster(RACK, domain)) > 1.05 * total(wide, cluster=RACK)
    assert total(wide, cluster=corrected_cluster(H100, domain)) == total(wide, cluster=H100)


def test_a_measured_network_is_corrected_too() -> None:
    matrix = BandwidthMatrix(("n0", "n1", "n2", "n3"), ((0.0, *[9e9] * 3), (9e9, 0.0, 9e9, 9e9)) + ((9e9,) * 4,) * 2)
    at = replace(H100, bandwidth=matrix).between(4)
    assert term("pipeline_transfer", BASE, cluster=corrected_cluster(at, TimeCorrection(fabric=2.0))) == pytest.approx(
        2.0 * term("pipeline_transfer", BASE, cluster=at)
    )


@pytest.mark.parametrize("layout", [BASE, replace(BASE, tensor=8), replace(BASE, pipeline=4, virtual_pipeline=2)])
def test_a_job_that_is_slower_throughout_takes_that_much_longer(layout: Layout) -> None:
    slower = corrected_cluster(H100, TimeCorrection(job_factor=1.2))
    assert total(layout, cluster=slower) == pytest.approx(1.2 * total(layout), rel=0.02)
    terms = time_of(layout, cluster=slower).terms
    assert sum(float(column[0]) for column in terms.values()) == pytest.approx(total(layout, cluster=slower))


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_is_a_positive_number(name: str) -> None:
    with pytest.raises(ValueError, match="positive"):
        TimeCorrection(**{name: 0.0})
