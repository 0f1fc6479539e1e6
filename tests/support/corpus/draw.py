"""Drawing the recipes of the corpus: so many of each kind on each backend, by seed. What is drawn is stored as text, so
that a changed generator changes no case."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from support import random_recipes
from support.corpus.kinds import is_of
from support.corpus.program import answer_of, gallery

Case = dict[str, Any]
Row = dict[str, Any]

DATA = Path(__file__).resolve().parents[2] / "data"
QUOTAS: Mapping[str, Mapping[str, int]] = {
    "megatron-lm": {
        "hybrid-offload": 12,
        "hybrid-interleaved": 12,
        "wide-tensor": 12,
        "prediction-heads": 14,
        "vision": 12,
        "uneven": 14,
        "random": 124,
    },
    "megatron-bridge": {
        "hybrid-offload": 6,
        "hybrid-interleaved": 4,
        "wide-tensor": 12,
        "prediction-heads": 14,
        "lora": 14,
        "vision": 8,
        "uneven": 10,
        "random": 132,
    },
    "deepspeed": {
        "zero2-offload": 20,
        "zero3-offload": 24,
        "lora": 20,
        "folder": 30,
        "switch": 10,
        "random": 96,
    },
}
"""How many of each kind are drawn on each backend: 200 together. A kind that is not named is none of the backend's."""
MOST_DRAWS = 60  # for one case; a kind that so many draws do not give is none of the backend's
MAY_BE_REFUSED = 8
MOST_SEARCHED = 3_000_000  # layouts: a case takes well below a second on average
HYBRIDS = ("nemotron-3-nano", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b")
DENSE = ("llama3-8b", "llama3.2-1b", "qwen3-8b", "qwen2.5-7b")
FOLDERS = ("qwen3-8b", "llama3.2-1b", "llama3-8b", "gemma2-9b", "mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b",
           "gpt-oss-20b", "phi-4", "olmo3-7b", "qwen2.5-0.5b", "gemma3-1b", "llama3.2-3b")  # fmt: skip

HYBRID_PINS: random_recipes.Values = {
    "tensor": ((1, 2, 4), 0.8),
    "micro_batch_size": ((1, 2), 0.7),
    "techniques": (("asked", "bit-equal"), 0.8),
}
LEFT_OPEN = {
    "arrays.sh": ("data.mock=true",),
    "accelerate.sbatch": ("model=llama3.2-1b", "training.global_batch_size=64", "training.sequence_length=2048",
                          "training.steps=100", "layout.zero_stage=2"),
    "chat.sh": ("training.sequence_length=2048", "training.global_batch_size=64", "training.steps=100"),
    "choice.sh": ("data.mock=true", "training.global_batch_size=64"),
    "mock_data.sh": ("model.max_position_embeddings=8192",),
    "per_rank.sh": ("training.sequence_length=2048", "data.mock=true"),
    "sizes.slurm": ("model=llama3.2-1b", "training.sequence_length=2048", "training.steps=100"),
    "sweep.sh": ("model=llama3.2-1b", "training.sequence_length=2048", "training.global_batch_size=64",
                 "training.steps=100", "layout.zero_stage=2"),
}  # fmt: skip
"""What a script of tests/data leaves open, as `--set` says it; the others are read as they are, or refused."""


def gallery_cases() -> Iterator[Case]:
    """Yield a case for each recipe of the gallery."""
    for name, text in gallery().items():
        yield {"name": f"gallery/{name}", "kind": "gallery", "recipe": text}


def places(backend: str) -> list[tuple[str, str, int]]:
    """Return what is to be drawn of a backend: backend, kind and number of each case."""
    return [(backend, kind, number) for kind, quota in QUOTAS[backend].items() for number in range(quota)]


def drawn(place: tuple[str, str, int]) -> Row:
    """Return a case of a kind with its answer. Of the random ones every `MAY_BE_REFUSED`-th may be refused, which is an
    answer, too.

    Raises:
        LookupError: no draw gave one.
    """
    backend, kind, number = place
    for attempt in range(MOST_DRAWS):
        row = _row(
            f"{backend}/{kind}-{number:03}", kind, backend, random.Random(f"{backend}/{kind}/{number}/{attempt}")
        )
        answer = row.get("answer", {})
        if "plan" in answer and answer["plan"]["searched"] > MOST_SEARCHED:
            continue
        if is_of(kind, row, answer) or (kind == "random" and number % MAY_BE_REFUSED == 0 and "refused" in answer):
            return row
    raise LookupError(f"{backend}: {MOST_DRAWS} draws gave no {kind}")


def _row(name: str, kind: str, backend: str, rnd: random.Random) -> Row:
    document = random_recipes._random_recipe(rnd) | {"backend": backend}
    if not isinstance(document["model"], dict) and document["model"] not in random_recipes.MODELS[backend]:
        document["model"] = rnd.choice(random_recipes.MODELS[backend])
    case: Case = {"name": name, "kind": kind}
    if kind == "random":
        _thin(rnd, document)
    else:
        document["training"] = {key: document["training"][key] for key in ("sequence_length", "steps")}
        document["training"] |= {"sequence_length": rnd.choice((2048, 4096, 8192)), "global_batch_size": 128}
        document |= {"nodes": rnd.choice((1, 2, 4)), "layout": {}, "what_if": {}, "model": rnd.choice(DENSE)}
        _shape(rnd, kind, document, case)
    document["name"] = f"{kind}-job"
    row = case | {"recipe": yaml.safe_dump(document, sort_keys=False)}
    return _with_a_tight_limit(row) if kind == "switch" else row | {"answer": answer_of(row)}


def _thin(rnd: random.Random, document: dict[str, Any]) -> None:
    """Take most of the techniques away, so that few recipes contradict themselves, and mostly search for none, so that
    a plan takes a part of a second."""
    layout = document["layout"]
    names = [key for key in layout if key in random_recipes.TECHNIQUES and key != "techniques"]
    for key in names[rnd.choice((0, 0, 1, 2)) :]:
        del layout[key]
    layout["techniques"] = rnd.choice(("asked", "asked", "asked", "bit-equal"))
    if rnd.random() < 0.15:
        del layout["techniques"]
    if rnd.random() < 0.7:
        document["what_if"] = {}
    for key in ("optimizer", "trained_layers", "adapters"):
        if rnd.random() < 0.6:
            document["training"].pop(key, None)
    if "adapters" not in document["training"]:
        document["training"].pop("start_from", None)


def _shape(rnd: random.Random, kind: str, document: dict[str, Any], case: Case) -> None:
    """Make a recipe of a kind by construction, as far as a recipe can."""
    layout, megatron = document["layout"], document["backend"] != "deepspeed"
    if kind.startswith("hybrid"):
        document |= {"model": rnd.choice(HYBRIDS), "nodes": rnd.choice((2, 4)), "cluster": "h100-80gb-x8"}
        layout |= random_recipes._some(rnd, HYBRID_PINS)
    if kind == "hybrid-offload":
        layout |= rnd.choice(({"offload_optimizer": rnd.choice((0.5, 1.0))}, {"offload_modules": ["core_attn"]},
                              {"offload_modules": ["qkv_linear"]}, {"offload_layers": 2}))  # fmt: skip
    elif kind == "hybrid-interleaved":
        layout |= {"pipeline": rnd.choice((2, 4)), "virtual_pipeline": rnd.choice((2, 3, 4))}
    elif kind == "wide-tensor":
        document["model"] = rnd.choice(("qwen3-30b-a3b", "qwen2.5-7b", "gemma3-1b",
                                        {"base": "llama3-8b", "num_query_groups": rnd.choice((1, 2))}))  # fmt: skip
        layout |= {"tensor": rnd.choice((4, 8)), "techniques": rnd.choice(("asked", "bit-equal"))}
    elif kind == "prediction-heads":
        case["overrides"] = [f"model.mtp_num_layers={rnd.choice((1, 1, 2))}"]
        document["model"] = rnd.choice((*DENSE, "qwen3-30b-a3b", "deepseek-v2-lite"))
        layout |= {"pipeline": rnd.choice((1, 2, 4)), "techniques": rnd.choice(("asked", "bit-equal"))}
    elif kind.startswith("zero"):
        layout |= {"zero_stage": int(kind[4]), "offload_optimizer": rnd.choice((0.5, 1.0)) if not megatron else 1.0}
        if kind == "zero3-offload" and rnd.random() < 0.5:
            layout |= {"offload_parameters": True, "offload_optimizer": 1.0}
        layout |= {"techniques": rnd.choice(("asked", "bit-equal"))}
    elif kind == "lora":
        modules = rnd.choice((None, ["q_proj", "v_proj"], ["linear_qkv"]))
        document["training"] |= {
            "adapters": {"rank": rnd.choice((8, 16, 64)), **({"target_modules": modules} if modules else {})},
            "start_from": "/weights",
            "learning_rate": 1e-4,
        }
    elif kind == "vision":
        document |= {"model": rnd.choice(("qwen3-vl-8b", "qwen3-vl-30b-a3b")), "nodes": rnd.choice((1, 2, 4))}
        layout |= random_recipes._some(rnd, random_recipes.PINS)
    elif kind == "uneven":
        document["model"] = {"base": rnd.choice(DENSE), "num_layers": rnd.choice((26, 30, 34, 46))}
        layout |= {"pipeline": 4, "virtual_pipeline": 1, "techniques": rnd.choice(("asked", "bit-equal"))}
    elif kind == "switch":
        document["model"] = rnd.choice((*DENSE, "qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"))
        document["training"] |= {"sequence_length": rnd.choice((8192, 16384)), "global_batch_size": 32}
        layout |= {"tensor": rnd.choice((1, 2)), "pipeline": 1, "context": 1, "micro_batch_size": 1}
        layout |= {"recompute": "none", "offload_optimizer": 0.0}
        if not megatron:
            layout |= {"tensor": 1, "zero_stage": 3}
    elif kind == "folder":
        model = rnd.choice(FOLDERS)
        case["files"] = {"weights/config.json": (DATA / "configs" / f"{model}.json").read_text()}
        document["model"] = "./weights"
        layout |= random_recipes._some(rnd, {"zero_stage": ((1, 2, 3), 0.5), "micro_batch_size": ((1, 2), 0.5)})


def _with_a_tight_limit(row: Row) -> Row:
    """Return the case with a limit between what it needs at least with any switch, and with those alone that its recipe
    names; as it is where no switch saves anything."""
    any_switch, asked = (
        answer_of({**row, "overrides": ["memory={limit: 0.001, floor_gib: 0}", *more]}).get("plan")
        for more in ((), ("layout.techniques=asked",))
    )
    if any_switch is None or asked is None:
        return row
    least, without = (max(rank["device_bytes"] for rank in plan["memory"]["ranks"]) for plan in (any_switch, asked))
    if least > 0.99 * without:
        return row
    share = round((least + without) / 2 / any_switch["memory"]["memory_bytes"], 4)
    recipe = row["recipe"] + f"memory: {{limit: {share}, floor_gib: 0}}\n"
    answers = [answer_of({**row, "recipe": recipe, "overrides": more}) for more in ([], ["layout.techniques=asked"])]
    needed = [answer.get("plan", {}).get("verdict") for answer in answers] == ["safe", "unsafe"]
    return row | {"recipe": recipe, "answer": answers[0], "needs_switch": needed}


def script_cases() -> Iterator[Case]:
    """Yield a case for each script of tests/data, and for each command line there, as a script that starts it."""
    folder = DATA / "command_lines"
    for path in sorted((folder / "scripts").iterdir()):
        if path.suffix != ".json":
            yield _script(path.name, {path.name: path.read_text()}, "h100-80gb-x8", LEFT_OPEN.get(path.name, ()))
    for path in sorted((*(folder / "megatron").glob("*.json"), *(folder / "deepspeed").glob("*.json"))):
        facts = json.loads(path.read_text())
        supplied = dict(facts.get("supplied", {}))
        cluster = supplied.pop("cluster", None) or facts["cluster"]
        settings = [f"{key}={json.dumps(value)}" for key, value in supplied.items()]
        files = {name: json.dumps(values) for name, values in facts.get("files", {}).items()}
        if isinstance(cluster, dict):
            files["cluster.yaml"], cluster = json.dumps(cluster), "./cluster.yaml"
        yield _script(path.stem, {f"{path.stem}.sh": _text_of(facts), **files}, cluster, settings)


def _script(name: str, files: Mapping[str, str], cluster: str | None, settings: Sequence[str]) -> Case:
    case = {"name": f"scripts/{name}", "kind": "script", "script": next(iter(files)), "files": dict(files)}
    return case | {"cluster": cluster, "settings": list(settings)}


def _text_of(facts: Mapping[str, Any]) -> str:
    """Return a script that starts the command of which these are the facts."""
    nodes, devices, launcher = facts["nodes"], facts["devices_per_node"], facts.get("launcher", "torchrun")
    words = list(facts.get("positional", ()))
    for flag, value in facts["arguments"].items():
        words += [flag, *([] if value is True else value if isinstance(value, list) else [value])]
    start = {
        "torchrun": f"torchrun --nnodes {nodes} --nproc_per_node {devices}",
        "deepspeed": f"deepspeed --num_nodes {nodes} --num_gpus {devices}",
        "accelerate": f"accelerate launch --num_machines {nodes} --num_processes {nodes * devices}",
    }[launcher]
    for option, value in facts.get("launcher_options", {}).items():
        start += f" --{option}" + ("" if value is True else f" {value}")
    slurm = [f"#SBATCH --{name}={value}" for name, value in facts.get("slurm", {}).items() if value is not True]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in facts.get("environment", {}).items()]
    quoted = " ".join(word if word.startswith("$") else shlex.quote(str(word)) for word in words)
    return "\n".join(["#!/bin/bash", *slurm, *exports, f"{start} {facts['trainer']} {quoted}", ""])
