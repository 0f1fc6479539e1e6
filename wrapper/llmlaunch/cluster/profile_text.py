"""Texts of cluster profiles: drafts from a site's SLURM, with comments about what it does not report, and extensions by
a measured matrix."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.assets import asset
from llmlaunch.cluster.gpu_names import gpu_named
from llmlaunch.cluster.load import profile_path
from llmlaunch.cluster.profile import cluster_form
from llmlaunch.cluster.slurm_site import Gpus, Partition, SlurmNode, SlurmSite
from llmlaunch.documents.validate import validate
from llmlaunch.documents.writing import new_place, write_whole
from llmlaunch.documents.yaml_strict import Document, parse_document, read_text
from llmlaunch.errors import UserError
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import counted
from llmlaunch.user_data import with_home

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


@dataclass(frozen=True)
class Draft:
    """A drafted profile: the cluster's name and the kind of node, which make up the file name, and its text."""

    cluster: str
    kind: str
    text: str


_BASE_DEVICES = {"gb200-nvl72": 4, "gb300-nvl72": 4}  # all others have eight


@dataclass(frozen=True)
class _Kind:
    """Nodes with the same devices; `feature` identifies the GPUs if their GRES has no type."""

    gpu_type: str | None
    feature: str | None
    devices: int
    nodes: tuple[SlurmNode, ...]

    @property
    def name(self) -> str:
        return "cpu" if not self.devices else f"{(self.gpu_type or self.feature or 'gpu').lower()}-x{self.devices}"


def drafts(site: SlurmSite, partition: str | None = None) -> list[Draft]:
    """Return a draft for each kind of GPU node (in `partition`), or for the CPU nodes if there are no GPUs.

    Raises UserError for an unknown partition, and if SLURM shows no nodes.
    """
    names = [entry.name for entry in site.partitions]
    if partition is not None and partition not in names:
        raise UserError(f"init --site: no partition {partition!r}; there are: {', '.join(names) or 'none'}")
    nodes = [node for node in site.nodes if node.partitions and (partition is None or partition in node.partitions)]
    if not nodes:
        raise UserError(
            "init --site: SLURM shows no nodes"
            f"{f' of partition {partition}' if partition else ''} (PrivateData may hide them); ask the site, or start "
            "from a shipped profile: base: h100-80gb-x8"
        )
    kinds = _kinds(nodes)
    return [Draft(site.setting("ClusterName") or "site", kind.name, _text(site, kind, partition)) for kind in kinds]


def _kinds(nodes: Iterable[SlurmNode]) -> list[_Kind]:
    groups: dict[tuple[str | None, str | None, int], list[SlurmNode]] = {}
    for node in nodes:
        for gpus in node.gpus or (Gpus(None, 0),):
            groups.setdefault((gpus.type, _feature(node, gpus), gpus.count), []).append(node)
    kinds = [_Kind(*devices, tuple(group)) for devices, group in groups.items()]
    return [kind for kind in kinds if kind.devices] or kinds


def _feature(node: SlurmNode, gpus: Gpus) -> str | None:
    """Return the node feature that names the type of GPUs without a GRES type."""
    untyped = gpus.count and gpus.type is None
    return next((feature for feature in node.features if untyped and gpu_named(feature)), None)


def _text(site: SlurmSite, kind: _Kind, wanted: str | None) -> str:
    partition = _partition(site, kind, wanted)
    lines = [
        *_head(site, kind, partition),
        *_devices(kind),
        f"cpus_per_node: {min(node.cpus for node in kind.nodes)}{_smallest_of(kind, 'cpus')}",
        f"host_memory_gib: {min(node.memory_mib for node in kind.nodes) // 1024}{_smallest_of(kind, 'memory_mib')}",
        *_topology(site),
        *_request(site, kind),
        *_options(site, kind, partition),
        *_running(site),
        *_containers(site),
        "# environment: {NCCL_SOCKET_IFNAME: ib0}   # what your network needs",
        "# exclude: []   # nodes that no job shall get",
    ]
    return "\n".join(lines) + "\n"


def _partition(site: SlurmSite, kind: _Kind, wanted: str | None) -> Partition | None:
    """Return the requested partition. Without a request, return the partition that accepts an account of this user and
    gives a job the most nodes of this kind; among equals, the default partition comes first."""
    counts = Counter(name for node in kind.nodes for name in node.partitions)
    there = [partition for partition in site.partitions if counts[partition.name]]
    return min(
        there,
        key=lambda entry: (
            entry.name != wanted,
            bool(site.accounts) and not _accounts(site, entry),
            -_most_nodes(entry, counts[entry.name]),
            not entry.default,
        ),
        default=None,
    )


def _accounts(site: SlurmSite, partition: Partition | None) -> tuple[str, ...]:
    allowed = () if partition is None else partition.accounts
    return tuple(name for name in site.accounts if not allowed or name in allowed)


def _most_nodes(partition: Partition, count: int) -> int:
    return min(count, int(partition.max_nodes)) if is_whole_number(partition.max_nodes) else count


def _head(site: SlurmSite, kind: _Kind, partition: Partition | None) -> Iterator[str]:
    config = site.setting
    yield f"# Cluster {config('ClusterName') or '(no name)'}, SLURM {config('SLURM_VERSION') or '(version not told)'}."
    yield "# Drafted by llmlaunch init --site; what stands behind a # is for you to decide."
    nodes = [kind.nodes[0].name, kind.nodes[-1].name][: len(kind.nodes)]
    yield f"# Nodes: {len(kind.nodes)}, {' to '.join(nodes)}."
    others = [other.name for other in site.partitions if any(other.name in node.partitions for node in kind.nodes)]
    yield f"# Partitions that have them: {', '.join(others)}."
    if partition is not None and partition.max_time:
        most = f", {counted(int(partition.max_nodes), 'node')} at most" if is_whole_number(partition.max_nodes) else ""
        yield f"# Longest job in {partition.name}: {partition.max_time}{most} (slurm: {{time: ...}} of the recipe)."
    preempt = (partition.preempt_mode if partition else "") or config("PreemptMode")
    if preempt and preempt != "OFF":
        grace = f", grace time {partition.grace_time} s" if partition and partition.grace_time.strip("0") else ""
        yield f"# Jobs may be preempted: {preempt}{grace}."
    if config("EnforcePartLimits") in ("", "NO"):
        yield "# EnforcePartLimits=NO: SLURM takes jobs it will never start; submit --test-only does not see them."
    if config("AccountingStorageType").endswith("slurmdbd") and not config("AccountingStorageEnforce"):
        yield "# AccountingStorageEnforce=none: SLURM takes wrong accounts and QoS; --test-only does, too."
    if config("JobSubmitPlugins"):
        plugins = config("JobSubmitPlugins")
        yield f"# Jobs are looked at by rules of the site's own (JobSubmitPlugins={plugins}), whose words submit shows."
    if site.config.get("AccountingStorageType") in ("accounting_storage/none", "(null)"):
        yield "# No accounts are kept: how a run ended is known from its own directory."
    if config("TaskPlugin") not in ("", "task/none"):
        yield f"# CPUs are bound by {config('TaskPlugin')}."


def _devices(kind: _Kind) -> Iterator[str]:
    if not kind.devices:
        yield "base: cpu-x1                  # no GPU here: processes on the CPUs"
        return
    gpu = gpu_named(kind.gpu_type or kind.feature or "")
    if gpu is None:
        shown = f"unknown type {kind.gpu_type}" if kind.gpu_type else "SLURM does not say what GPUs these are"
        yield f"# {shown}: fill in a base (slurm/clusters/), or accelerator and links (docs/recipe.md)"
        yield "# base: h100-80gb-x8"
    else:
        whence = f"GRES type {kind.gpu_type}" if kind.gpu_type else f"the nodes' feature {kind.feature}"
        yield f"base: {gpu.base}   # from {whence}; its links are data sheet figures: measure with"
        yield "                     # llmlaunch doctor --network"
        yield f"accelerator: {gpu.accelerator}{f'   # {gpu.note}' if gpu.note else ''}"
    if gpu is None or kind.devices != _BASE_DEVICES.get(gpu.base, 8):
        yield f"devices_per_node: {kind.devices}"


@dataclass(frozen=True)
class SiteOffer:
    """What a site offers for one recipe: its nodes of one kind. `base` is the shipped profile to start from, or None if
    `gpu`, the site's own name for its GPUs, is unknown. `nodes` is the maximum number for a job in `partition`."""

    gpu: str | None
    base: str | None
    remark: str
    devices: int
    nodes: int
    partition: Partition | None
    accounts: tuple[str, ...]

    def suits(self, cluster: str) -> bool:
        """Whether these nodes may be those of a shipped profile. SLURM may not distinguish 40 GB from 80 GB."""
        if self.base is None or self.devices != _BASE_DEVICES.get(self.base, 8):
            return False
        return self.base == cluster or (bool(self.remark) and self.base.split("-")[0] == cluster.split("-")[0])

    def notes(self, nodes: int | str) -> list[str]:
        """Return what the user should know before submitting a job with this many nodes here, as sentences."""
        lines = []
        name = "" if self.partition is None else f" in {self.partition.name}"
        if self.devices:
            shown = f"{self.devices} GPUs, which SLURM calls {self.gpu}" if self.gpu else f"{self.devices} GPUs each"
            lines.append(f"Here SLURM shows {counted(self.nodes, 'node')}{name} with {shown}.")
        else:
            lines.append(f"SLURM shows no GPUs here; {counted(self.nodes, 'node')}{name}.")
        if self.devices and self.base is None:
            lines.append("No shipped profile is known for them: llmlaunch init --site drafts one.")
        elif self.remark:
            lines.append(f"Look at the card: {self.remark}.")
        if isinstance(nodes, int) and nodes > self.nodes:
            lines.append(f"The recipe asks for {nodes} nodes; nodes: auto finds the fewest that fit.")
        if self.partition is not None and self.partition.max_time:
            lines.append(f"Longest job{name}: {self.partition.max_time}.")
        if len(self.accounts) > 1:
            lines.append(f"Your accounts: {', '.join(self.accounts)}.")
        return lines


def offer_of(site: SlurmSite, cluster: str) -> SiteOffer | None:
    """Return the nodes of a site that suit a shipped profile, or else those with the most GPUs, or None if there are
    none."""
    nodes = [node for node in site.nodes if node.partitions]
    offers = [_offer(site, kind) for kind in _kinds(nodes)] if nodes else []
    return max(offers, key=lambda offer: (offer.suits(cluster), offer.devices * offer.nodes), default=None)


def _offer(site: SlurmSite, kind: _Kind) -> SiteOffer:
    gpu = gpu_named(kind.gpu_type or kind.feature or "")
    partition = _partition(site, kind, None)
    there = sum(1 for node in kind.nodes if partition is None or partition.name in node.partitions)
    return SiteOffer(
        gpu=kind.gpu_type or kind.feature,
        base=None if gpu is None else gpu.base,
        remark="" if gpu is None else gpu.note,
        devices=kind.devices,
        nodes=there if partition is None else _most_nodes(partition, there),
        partition=partition,
        accounts=site.accounts,
    )


def _smallest_of(kind: _Kind, what: str) -> str:
    return "" if len({getattr(node, what) for node in kind.nodes}) == 1 else "   # the least any of them has"


def _topology(site: SlurmSite) -> Iterator[str]:
    if site.nodes_per_switch is not None:
        yield f"nodes_per_switch: {site.nodes_per_switch}   # of the smallest leaf ({site.setting('TopologyPlugin')})"
    if site.nodes_per_block is not None:
        yield f"nodes_per_block: {site.nodes_per_block}"


def _request(site: SlurmSite, kind: _Kind) -> Iterator[str]:
    if not kind.devices:
        yield "gpu_request: none"
        return
    modern = site.setting("SelectType") == "select/cons_tres"
    note = "" if modern else f"   # {site.setting('SelectType') or 'SelectType not told'}: --gpus-... needs cons_tres"
    yield f"gpu_request: {'gpus-per-node' if modern else 'gres'}{note}"
    types = {gpus.type for node in site.nodes for gpus in node.gpus}
    if kind.gpu_type and len(types) > 1:
        yield f"gpu_type: {quoted(kind.gpu_type)}   # the cluster has others, too"


def _options(site: SlurmSite, kind: _Kind, partition: Partition | None) -> Iterator[str]:
    yield "slurm:"
    if partition is not None:
        yield f"  partition: {quoted(partition.name)}"
    accounts = _accounts(site, partition)
    if len(accounts) == 1:
        yield f"  account: {quoted(accounts[0])}"
    elif accounts:
        yield f"  # account: one of yours: {', '.join(accounts)}"
    elif partition is not None and partition.accounts:
        yield f"  # account: {partition.name} takes none of yours, but {', '.join(partition.accounts[:8])}"
    else:
        yield "  # account: sacctmgr names none of yours"
    if len(site.qos) > 1:
        yield f"  # qos: one of yours where the default is not right: {', '.join(site.qos)}"
    whole = (partition is not None and partition.whole_nodes) or site.setting("SelectType") == "select/linear"
    if partition is not None and partition.shared:
        yield "  exclusive: false   # nodes are shared here, whatever is asked for (OverSubscribe=FORCE)"
    else:
        yield f"  exclusive: {'false   # nodes are given whole here anyway' if whole else 'true'}"
    if kind.feature and len({_feature(node, gpus) for node in site.nodes for gpus in node.gpus}) > 1:
        yield f"  constraint: {quoted(kind.feature)}   # there are GPUs of other kinds, too"
    if "MEMORY" in site.setting("SelectTypeParameters").upper():
        yield "  mem: 0   # memory is handed out here; 0 = all of the node's"


def _running(site: SlurmSite) -> Iterator[str]:
    mpi = site.setting("MpiDefault")
    if mpi:
        yield f"# mpi: none   # the site's default is {mpi}; torchrun needs none"
    if site.setting("JobRequeue") == "0":
        yield "# restart_by: chain   # jobs are not requeued by default here (JobRequeue=0); where it is refused, chain"
    yield "# setup: []   # shell lines to run first, such as source /etc/profile.d/modules.sh"
    yield "# modules: []   # environment modules the training needs"


def _containers(site: SlurmSite) -> Iterator[str]:
    runner = next((name for name in ("apptainer", "singularity") if name in site.programs), None)
    if site.has_pyxis:
        yield "container: {runtime: pyxis}"
    elif runner is not None:
        yield f"container: {{runtime: apptainer}}   # {runner} is on PATH here; is it on the nodes?"
    else:
        yield "# container: {runtime: apptainer}   # neither pyxis nor apptainer seen here; it may be a module"


def quoted(text: str) -> str:
    """Return text as a YAML value, in quotes if it would otherwise be read as something else."""
    return text if _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS else json.dumps(text)


@dataclass(frozen=True)
class Destination:
    """The files to which a matrix is saved.

    `profile_text` is the new text of the profile, or None if the profile already names the matrix.
    """

    profile: Path
    matrix: Path
    profile_text: str | None

    def save(self, text: str) -> None:
        """Write the matrix, then the profile that names it, each completely or not at all. Raises `UserError`."""
        write_whole(self.matrix, text)
        if self.profile_text is not None:
            write_whole(self.profile, self.profile_text)


def destination(spec: str, base_dir: Path = Path()) -> Destination:
    """Return the destination for a profile: the file itself if it is given by path, or a new profile in `base_dir` that
    starts from a shipped one given by name.

    Raises:
        UserError: there is no such profile, it cannot be read or changed, or a file is in the way.
    """
    path = profile_path(spec, base_dir)
    if path.is_relative_to(asset("slurm", "clusters")):
        path, text = base_dir / f"{spec}.yaml", None
        if path.exists():
            raise UserError(f"{path}: exists already; save into it with --save ./{path.name}")
    else:
        text = read_text(path)
    name = f"{path.stem}.links.json"
    if text is None:
        place = Destination(path, path.with_name(name), f"base: {spec}\nlinks: {{matrix: {name}}}\n")
    else:
        place = _of_profile(path, text, name)
    for path in (place.profile, place.matrix):
        new_place(path)
    for folder in {place.profile.parent, place.matrix.parent}:
        if not os.access(folder, os.W_OK):
            raise UserError(f"{folder}: cannot be written to; copy the profile to a folder of yours")
    return place


def _of_profile(path: Path, text: str, name: str) -> Destination:
    document = parse_document(text, str(path))
    validate(cluster_form(), document)
    links = document.value.get("links") or {}
    if links.get("matrix"):
        return Destination(path, path.parent / with_home(links["matrix"]), None)
    changed = _with_matrix(text, document, name)
    wanted = {**document.value, "links": {**links, "matrix": name}}
    if parse_document(changed, str(path)).value != wanted:
        raise UserError(f"{path}: is written so that no line can be added safely; add under links: `matrix: {name}`")
    return Destination(path, path.with_name(name), changed)


def _with_matrix(text: str, document: Document, name: str) -> str:
    """Return the profile's text with one more line, and comments and order unchanged. Return the text itself if that is
    impossible."""
    lines = text.splitlines(keepends=True)
    if "links" not in document.value:
        end = "" if text.endswith("\n") else "\n"
        return f"{text}{end}links: {{matrix: {name}}}\n"
    at = next((number for number, line in enumerate(lines) if line.startswith("links:")), None)
    if at is None:  # written in an unusual way
        return text
    head, brace, rest = lines[at].partition("{")
    if brace:
        lines[at] = f"{head}{{matrix: {name}, {rest.lstrip()}"
    else:
        below = lines[at + 1] if at + 1 < len(lines) else ""
        indent = below[: len(below) - len(below.lstrip())] or "  "
        lines.insert(at + 1, f"{indent}matrix: {name}\n")
    return "".join(lines)
