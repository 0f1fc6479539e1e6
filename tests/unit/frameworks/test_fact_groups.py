"""Groups of facts: each field has one home, and none is a framework's that only trainers of public records set."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import pytest

from llmlaunch.assets import asset
from llmlaunch.facts import ForeignFacts, HostFacts, MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts, resident_facts
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.sharding_rules import megatron_fsdp_facts
from support.changed_facts import FACT_GROUPS, changed
from support.recipes import recipe_of

GALLERY = sorted(path.stem for path in asset("recipes").glob("*.yaml"))
OPTIONS = {
    "megatron": megatron_facts(),
    "megatron in fp32": megatron_facts(MegatronOptions("fp32")),
    "megatron's eager layers": megatron_facts(MegatronOptions(eager_layers=True, transformer_engine=False)),
    "megatron in 8 bits": megatron_facts(MegatronOptions(fp8_recipe="mxfp8", fp8_parameters=True, muon=True)),
    "megatron-fsdp": megatron_fsdp_facts(MegatronOptions()),
    "deepspeed": deepspeed_facts(),
    "deepspeed with Liger": deepspeed_facts(DeepSpeedOptions(liger=True, offload_optimizer=True)),
    "deepspeed on a CPU": resident_facts(deepspeed_facts(DeepSpeedOptions("fp32"))),
}


@pytest.mark.parametrize("name", GALLERY)
def test_no_recipe_has_what_only_trainers_of_public_records_do(name: str) -> None:
    recipe = recipe_of(name)
    assert backend_for(recipe).facts(recipe).foreign == ForeignFacts()


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_of_a_framework_does_either(name: str) -> None:
    assert OPTIONS[name].foreign == ForeignFacts()


def test_each_field_has_one_home() -> None:
    facts = megatron_facts()
    names = Counter(each.name for group in FACT_GROUPS if group != "host" for each in fields(getattr(facts, group)))
    names.update(each.name for each in fields(MemoryFacts))
    assert not [name for name, count in names.items() if count > 1]


def test_facts_of_tests_change_in_the_group_that_has_the_field() -> None:
    facts = megatron_facts()
    other = changed(facts, expert_imbalance=2.0, pipeline_buffers=3, host=HostFacts())
    assert (other.mixture.expert_imbalance, other.exchange.pipeline_buffers, other.host) == (2.0, 3, HostFacts())
    assert replace(other, mixture=facts.mixture, exchange=facts.exchange, host=facts.host) == facts
    with pytest.raises(TypeError, match="no group of facts has a field process_bytes"):
        changed(facts, process_bytes=1.0)
