"""Which accelerator a card is, by the names that measured records, torch and nvidia-smi give it, and the machine that
stands for each accelerator where only the card is known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.cluster.load import accelerator_table, find_accelerator, load_cluster, profile_names, profile_path
from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.errors import UserError
from llmlaunch.units import GIB

# A machine of a card that no profile has: a node of eight with its data sheet's NVLink, or else PCI Express, and an
# adapter of 200 Gb/s for each device.
DEVICES_PER_NODE = 8
HOST_MEMORY_BYTES = 1024 * GIB
PCIE_BYTES_PER_SECOND = 31.5e9  # 16 lanes of PCIe 4.0, one direction
ADAPTER_BYTES_PER_SECOND = 25e9
NODE_LATENCY_SECONDS, FABRIC_LATENCY_SECONDS = 5e-6, 10e-6


def accelerator_of_card(card: object, memory_bytes: object = None) -> str | None:
    """Return the name of the accelerator (accelerators.json) that a card is, or None for an unknown card.

    Spelling, capitals and the maker's name do not matter. Cards of one name that differ in memory are told apart by
    `memory_bytes`: the nearest one counts, and without it the one that is called so first of all.
    """
    key = _key(card)
    named, sharing = _by_name().get(key), _sharing_name().get(key, ())
    if not sharing or not isinstance(memory_bytes, int | float) or memory_bytes <= 0:
        return named
    choices = [*([named] if named else []), *sharing]
    return min(choices, key=lambda name: abs(accelerator_table()[name]["memory_bytes"] - memory_bytes))


def capability_of_card(card: object) -> float | None:
    """Return the CUDA compute capability of a card; None if the card is unknown or has none."""
    name = accelerator_of_card(card)
    capability = None if name is None else accelerator_table()[name]["compute_capability"]
    return None if capability is None else float(capability)


def machines() -> dict[str, Cluster]:
    """Return for each accelerator, by its name, a machine that has it: of the shipped profiles the one with the largest
    nodes, for a card without a profile the default machine. An accelerator that only a site's own profile describes
    has that profile's machine."""
    by_accelerator: dict[str, Cluster] = {}
    for cluster in _profiles(shipped=True):
        name = cluster.accelerator.name
        if name not in by_accelerator or cluster.devices_per_node > by_accelerator[name].devices_per_node:
            by_accelerator[name] = cluster
    for name, row in accelerator_table().items():
        by_accelerator.setdefault(name, _default_machine(name, row))
    for cluster in _profiles(shipped=False):
        by_accelerator.setdefault(cluster.accelerator.name, cluster)
    return by_accelerator


def _profiles(*, shipped: bool) -> Iterator[Cluster]:
    """Yield the profiles that can be read. What is wrong with another one is said where a recipe names it."""
    folder = asset("slurm", "clusters")
    paths = sorted(folder.glob("*.yaml")) if shipped else [profile_path(name) for name in profile_names()]
    for path in paths:
        if shipped or path.parent != folder:
            with suppress(UserError):
                yield load_cluster(str(path))


def _default_machine(name: str, row: Mapping[str, Any]) -> Cluster:
    link = Link(row.get("nvlink_bytes_per_second") or PCIE_BYTES_PER_SECOND, NODE_LATENCY_SECONDS)
    return Cluster(
        name=f"{name}-x{DEVICES_PER_NODE}",
        accelerator=find_accelerator(name),
        devices_per_node=DEVICES_PER_NODE,
        host_memory_bytes=HOST_MEMORY_BYTES,
        nvlink_domain_devices=DEVICES_PER_NODE,
        node_link=link,
        domain_link=link,
        fabric_link=Link(ADAPTER_BYTES_PER_SECOND, FABRIC_LATENCY_SECONDS),
    )


@cache
def _by_name() -> dict[str, str]:
    return {_key(name): card for card, row in accelerator_table().items() for name in (card, *row.get("names", ()))}


@cache
def _sharing_name() -> dict[str, list[str]]:
    sharing: dict[str, list[str]] = {}
    for card, row in accelerator_table().items():
        for name in row.get("shared_names", ()):
            sharing.setdefault(_key(name), []).append(card)
    return sharing


def _key(card: object) -> str:
    """Return a card's name without its maker, in small letters, one space between words."""
    parts = re.findall(r"[a-z0-9.]+", card.lower()) if isinstance(card, str) else []
    return " ".join(word for word in parts if word not in ("nvidia", "tesla"))
