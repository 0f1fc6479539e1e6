"""The job's last word: did every trainer succeed, and if not, which failed first and how."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .files import attempt_directory, read_json, replace_json, say
from .signals import signal_number

if TYPE_CHECKING:
    from .files import Record

POLL_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Write `status.json` and one line to stderr; returns the exit code of the job."""
    options = _arguments(argv)
    directory = attempt_directory(options.run_dir, options.attempt)
    done = _done_markers(directory, options)
    ranks = _rank_records(directory)
    nodes = _nodes(done, ranks, options.nodes)
    code, why = judge(options.code, ranks, nodes)
    status: Record = {
        "schema": 1,
        "attempt": options.attempt,
        "state": "succeeded" if code == 0 else "failed",
        "exit_code": code,
        "nodes": nodes,
        "ranks": ranks,
        "ended_at": time.time(),
        "why": why,
    }
    try:
        replace_json(options.run_dir / "status.json", status)
    except OSError as error:
        say(f"status.json not written: {error.strerror}")
    say(f"attempt {options.attempt} {status['state']}: {why}")
    return code


def judge(launcher_code: int, ranks: list[Record], nodes: list[Record]) -> tuple[int, str]:
    """The job's exit code and the reason in words.

    0 only where the launcher returned 0, every node left its done marker and no rank failed. A rank without an
    end in its record did not fail by that: a full disk may have kept it from being written.
    """
    failed = sorted((rank for rank in ranks if _failed(rank)), key=_blame)
    missing = [node["node"] for node in nodes if not node["done"]]
    if launcher_code == 0 and not failed and not missing:
        return 0, f"{_count(len(nodes), 'node')}, {_count(len(ranks), 'rank')}"
    if failed:
        first = failed[0]
        others = f" (first of {len(failed)} failed ranks)" if len(failed) > 1 else ""
        why = f"rank {first['rank']} on node {first['node']} {_ending(first)}{others}"
        return launcher_code or _own_code(first), why
    if missing:
        named = [node for node in missing if node is not None]
        parts = [f"node {node} left no done marker" for node in named]
        if len(named) < len(missing):
            parts.append(f"{_count(len(missing) - len(named), 'node')} left no trace")
        why = "; ".join(parts)
        return launcher_code or 1, f"the launcher returned {launcher_code}; {why}" if launcher_code else why
    return launcher_code, f"the launcher returned {launcher_code}, though every trainer ended with 0"


def _failed(rank: Record) -> bool:
    return rank.get("signal") is not None or rank.get("exit_code") not in (None, 0)


def _blame(rank: Record) -> tuple[bool, float]:
    """Order of failed ranks: those torchrun took down with SIGTERM after another had failed come last."""
    return rank.get("signal") == "SIGTERM", rank.get("ended_at") or float("inf")


def _own_code(rank: Record) -> int:
    if rank.get("signal") is not None:
        return 128 + signal_number(rank["signal"])
    return int(rank["exit_code"])


def _ending(rank: Record) -> str:
    if rank.get("signal") is not None:
        return f"was ended by {rank['signal']}"
    return f"exited with {rank['exit_code']}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _done_markers(directory: Path, options: argparse.Namespace) -> list[str]:
    """Names of the nodes that are done.

    Where the launcher was content but markers of other nodes are missing, look again for `--wait` seconds: an
    NFS client may show an old listing for as long as `acdirmax`, 60 s (nfs(5)).
    """
    patience = options.wait if options.code == 0 and options.nodes > 1 else 0.0
    give_up_at = time.monotonic() + patience
    while True:
        try:
            found = sorted(path.name for path in (directory / "done").iterdir())
        except OSError:
            found = []
        if len(found) >= options.nodes or time.monotonic() >= give_up_at:
            return found
        time.sleep(POLL_SECONDS)


def _rank_records(directory: Path) -> list[Record]:
    records = [read_json(path) for path in (directory / "ranks").glob("*.json")]
    return sorted((r for r in records if r is not None and "rank" in r), key=lambda record: record["rank"])


def _nodes(done: list[str], ranks: list[Record], count: int) -> list[Record]:
    """Every node by name; `null` for each that left neither a marker nor a rank record."""
    names = sorted({*done, *(str(rank["node"]) for rank in ranks)})
    nodes: list[Record] = [{"node": name, "done": name in done} for name in names]
    return nodes + [{"node": None, "done": False} for _ in range(count - len(names))]


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="node.pyz finish")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--code", type=int, required=True, help="what the launcher returned")
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for late markers of a file system")
    return parser.parse_args(argv)
