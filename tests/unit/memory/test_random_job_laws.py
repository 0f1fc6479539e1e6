"""Random jobs of every trainer obey the laws of memory (`laws`); `make soak` tries tens of thousands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import LAWS
from random_jobs import TRAINERS, RandomJob, random_jobs

# 250 jobs in all; 24,000 in `make soak`
OF_EACH_TRAINER = 21 if settings().max_examples <= 100 else settings().max_examples


@pytest.mark.parametrize("name", TRAINERS)
@settings(max_examples=OF_EACH_TRAINER)
@given(data=st.data())
def test_every_job_obeys_the_laws_of_memory(name: str, data: st.DataObject) -> None:
    drawn: RandomJob = data.draw(random_jobs(name))
    for law in LAWS:
        law(drawn)
