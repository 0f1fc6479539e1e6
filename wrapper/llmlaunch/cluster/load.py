"""Cluster profiles by name or path or inline in a recipe, and the accelerators they name (accelerators.json, with the
source of every figure)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.assets import asset
from llmlaunch.cluster.profile import Accelerator, Cluster, HostLink, Link, Site, SiteContainer, cluster_form
from llmlaunch.documents.keys import dotted, key_names
from llmlaunch.documents.secrets import refuse_secrets
from llmlaunch.documents.validate import BadKey, validate
from llmlaunch.documents.yaml_strict import Document, read_document
from llmlaunch.errors import UserError
from llmlaunch.units import GB, GIB
from llmlaunch.user_data import with_home

if TYPE_CHECKING:
    from llmlaunch.cluster.matrix import BandwidthMatrix


FOLDERS_VARIABLE = "LLMLAUNCH_CLUSTERS"

_MAX_BASES = 8
_TERA, _MICRO = 1e12, 1e-6
_REQUIRED = ("accelerator", "devices_per_node", "host_memory_gib", "links")


def profile_names() -> tuple[str, ...]:
    """Return the names of all profiles, the site's own and the shipped, sorted."""
    return tuple(sorted({path.stem for folder in _folders() for path in folder.glob("*.yaml")}))


def profile_path(spec: str, base_dir: Path = Path(), *, other_than: Path | None = None) -> Path:
    """The file of a profile: a name, looked for in the folders of LLMLAUNCH_CLUSTERS and then among the shipped ones,
    or a path relative to `base_dir`. A profile may start from another one of its own name (`other_than` itself).
    Raises `UserError` naming the known."""
    if "/" in spec or spec.endswith((".yaml", ".yml", ".json")):
        return base_dir / spec
    candidates = (path for path in (folder / f"{spec}.yaml" for folder in _folders()) if path != other_than)
    path = None if "\0" in spec else next((path for path in candidates if path.is_file()), None)
    if path is not None:
        return path
    lost = [str(folder) for folder in _folders() if not folder.is_dir()]
    gone = f"; {FOLDERS_VARIABLE} names {', '.join(lost)}, which is no folder here" if lost else ""
    from llmlaunch.documents.likely_meaning import known_and_nearest

    near = known_and_nearest(spec, profile_names())
    raise UserError(f"unknown cluster {spec!r}; {near} (or give the path of a profile){gone}")


def _folders() -> tuple[Path, ...]:
    """Return the folders that are searched for profiles by name, in order."""
    named = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    return (*(with_home(folder) for folder in named if folder), asset("slurm", "clusters"))


def load_cluster(spec: str | Mapping[str, Any], base_dir: Path = Path()) -> Cluster:
    """Return the cluster that `spec` names or describes (`cluster_form`); relative paths start in `base_dir`.

    Raises `UserError`; `BadKey` for a wrong key of an inline mapping.
    """
    if isinstance(spec, str):
        return _from_file(profile_path(spec, base_dir))
    values = _with_absolute_matrix(validate(cluster_form(), Document("cluster", "", spec, {}, {})), base_dir)
    base = values.pop("base", None)
    inherited = _merged_file(profile_path(base, base_dir)) if base is not None else {}
    return _cluster(_merge(inherited, values), str(values.get("name") or base or "inline"))


def _from_file(path: Path) -> Cluster:
    values = _merged_file(path)
    try:
        return _cluster(values, str(values.get("name") or path.stem))
    except BadKey as error:
        raise UserError(f"{path}: {error}") from None


def _merged_file(path: Path, depth: int = 0) -> dict[str, Any]:
    document = read_document(path)
    refuse_secrets(document, document.value.get("not_secrets"))
    values = _with_absolute_matrix(validate(cluster_form(), document), path.parent)
    base = values.pop("base", None)
    if base is None:
        return values
    if depth == _MAX_BASES:
        raise UserError(
            f"{document.where(('base',))}: base: more than {_MAX_BASES} profiles deep; does it name itself?"
        )
    try:
        below = profile_path(base, path.parent, other_than=path)
    except UserError as error:
        raise UserError(f"{document.where(('base',))}: base: {error}") from None
    return _merge(_merged_file(below, depth + 1), values)


def _with_absolute_matrix(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values with the absolute path of the matrix, which lies beside the profile that names it."""
    links = values.get("links") or {}
    if links.get("matrix") is None:
        return values
    return {**values, "links": {**links, "matrix": str((folder / with_home(links["matrix"])).absolute())}}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `above` over `below`, mapping by mapping. An accelerator's name becomes the base of changes to it."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if key == "accelerator" and isinstance(value, dict) and isinstance(old, str):
            old = {"base": old}
        merged[key] = _merge(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def _cluster(values: Mapping[str, Any], name: str) -> Cluster:
    for key in _REQUIRED:
        if values.get(key) is None:
            raise BadKey((), f"is missing `{key}`; give it, or `base:` with a profile that has it")
    accelerator = _accelerator(values["accelerator"])
    devices = values["devices_per_node"]
    domain = values.get("nvlink_domain_devices") or devices
    if domain % devices and devices % domain:
        raise BadKey(
            ("nvlink_domain_devices",),
            f"{domain} devices are not whole nodes of {devices}; give a multiple of {devices}",
        )
    links = values["links"]
    node = _link(links, "node")
    container = SiteContainer(**_given(SiteContainer, values.get("container") or {}))
    written = _given(Cluster, values) | {
        "name": name,
        "nvlink_domain_devices": domain,
        "slurm": {**(values.get("slurm") or {}), **(values.get("slurm_plugins") or {})},
    }
    written.setdefault("gpu_request", "none" if accelerator.kind == "cpu" else "gpus-per-node")
    return Cluster(
        **written,
        accelerator=accelerator,
        host_memory_bytes=int(values["host_memory_gib"] * GIB),
        node_link=node,
        domain_link=_link(links, "domain") if links.get("domain") else node,
        fabric_link=_link(links, "fabric"),
        host_copy_bytes_per_second=_host_copies(links.get("host") or {}),
        bandwidth=_matrix(links.get("matrix")),
        site=Site(**_given(Site, values) | {"container": container}),
    )


def _given(cls: type[Cluster | Site | SiteContainer], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are keys of a section, without those that are null."""
    return {name: values[name] for name in key_names(cls) if values.get(name) is not None}


def _matrix(path: str | None) -> BandwidthMatrix | None:
    if path is None:
        return None
    from llmlaunch.cluster.matrix import read_matrix  # loads NumPy

    try:
        return read_matrix(Path(path))
    except UserError as error:
        raise BadKey(("links", "matrix"), str(error)) from None


def _link(links: Mapping[str, Any], tier: str) -> Link:
    link = links.get(tier) or {}
    for key in ("gigabytes_per_second", "latency_microseconds"):
        if link.get(key) is None:
            raise BadKey(("links", tier, key), "is missing; give the speed of this tier")
    speed, latency = link["gigabytes_per_second"] * GB, link["latency_microseconds"] * _MICRO
    return Link(speed, latency, bool(link.get("measured", False)))


def _host_copies(host: Mapping[str, Any]) -> float | None:
    speed = host.get("gigabytes_per_second")
    return None if speed is None else float(speed * GB)


def _accelerator(spec: str | Mapping[str, Any]) -> Accelerator:
    if isinstance(spec, str):
        return _known(spec, ("accelerator",))
    values = {key: value for key, value in spec.items() if value is not None}
    flops = {key.removesuffix("_tflops"): value * _TERA for key, value in values.items() if key.endswith("_tflops")}
    if "base" in values:
        device = _known(values["base"], ("accelerator", "base"))
    else:
        device = _new_accelerator(values, flops)
    changes: dict[str, Any] = {key: values[key] for key in ("name", "kind", "compute_capability") if key in values}
    if "memory_gib" in values:
        changes |= {
            "memory_bytes": int(values["memory_gib"] * GIB),
            "memory_source": "given in the cluster's own profile",
        }
    if "memory_gigabytes_per_second" in values:
        changes["memory_bytes_per_second"] = values["memory_gigabytes_per_second"] * GB
    return replace(device, flops_per_second={**device.flops_per_second, **flops}, **changes)


def _known(name: str, key: tuple[str, ...]) -> Accelerator:
    try:
        return find_accelerator(name)
    except UserError as error:
        raise BadKey(key, str(error)) from None


def _new_accelerator(values: Mapping[str, Any], flops: Mapping[str, float]) -> Accelerator:
    missing = [key for key in ("name", "kind", "memory_gib", "memory_gigabytes_per_second") if key not in values]
    if not flops:
        missing.append("bf16_tflops")
    if missing:
        raise BadKey(
            ("accelerator",),
            f"is missing {', '.join(missing)}; give {dotted(('accelerator', 'base'))} or describe it in full",
        )
    return Accelerator(values["name"], values["kind"], 0, "", {}, 0.0)


_TABLE = Path(__file__).with_name("accelerators.json")


def accelerator_names() -> tuple[str, ...]:
    """Return the names of the accelerators in accelerators.json, in its order."""
    return tuple(accelerator_table())


def find_accelerator(name: str) -> Accelerator:
    """Return an accelerator by its name. Raises `UserError` with the known names.

    `flops_per_second` has the dense peaks of "bf16", "fp16", "fp8", "fp4", "tf32" and "fp32" (without tensor cores), as
    far as the device has them; where "fp4" is not among them, it is twice the peak of "fp8".
    """
    try:
        row = accelerator_table()[name]
    except KeyError:
        from llmlaunch.documents.likely_meaning import known_and_nearest

        near = known_and_nearest(name, accelerator_names())
        raise UserError(f"unknown accelerator {name!r}; {near} (or describe it: base, memory_gib ...)") from None
    return Accelerator(
        name=name,
        kind=row["kind"],
        memory_bytes=row["memory_bytes"],
        memory_source=row["memory_source"],
        flops_per_second=row["flops_per_second"],
        memory_bytes_per_second=row["memory_bytes_per_second"],
        compute_capability=row["compute_capability"],
        host_link=HostLink(**row["host_link"]) if "host_link" in row else None,
        platform=row.get("platform", "cuda"),
    )


@cache
def accelerator_table() -> dict[str, dict[str, Any]]:
    """Return accelerators.json: a row for each accelerator, by its name."""
    table: dict[str, dict[str, Any]] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table
