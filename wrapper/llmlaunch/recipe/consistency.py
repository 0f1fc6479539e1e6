"""Checks across the parts of a recipe: those that no layout could pass, whatever the backend.

Each yields the key to mend and the sentence. What depends on the backend, or on values nobody fixed, is for the
backend's own rules and the planner. `cautions` warns about how a valid recipe would run at its site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import prod
from typing import Any

from llmlaunch.documents.slurm_options import sbatch_value_problem
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.recipe.containers import is_path
from llmlaunch.recipe.training import MOST_STEPS
from llmlaunch.recipe.types import AUTO_NODES, Recipe
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import counted

Problem = tuple[KeyPath, str]


def disagreements(recipe: Recipe) -> list[Problem]:
    """Return every contradiction between parts of the recipe, in the order of its keys."""
    return [
        *_neutral_arguments(recipe),
        *_model_and_training(recipe),
        *_nodes_and_budget(recipe),
        *_gpus_asked_of_slurm(recipe),
        *_coming_back(recipe),
        *_fewer_nodes(recipe),
        *_old_checkpoints(recipe),
        *_of_the_shipped_script(recipe),
        *_trained_model(recipe),
        *_slurm(recipe),
        *_pins_and_model(recipe),
        *_stages(recipe),
        *_pins_and_world(recipe),
        *_pins_and_batch(recipe),
    ]


def _model_and_training(recipe: Recipe) -> Iterator[Problem]:
    shape, sequence = recipe.model, recipe.workload.sequence_length
    if shape.position_embedding == "learned_absolute" and sequence > shape.max_position_embeddings:
        yield (
            ("training", "sequence_length"),
            f"{sequence} is more than the {shape.max_position_embeddings} positions {shape.name} has "
            f"learned embeddings for; use at most {shape.max_position_embeddings}",
        )
    vision = shape.vision
    if vision is not None and vision.tokens_per_sample > sequence:
        yield (
            ("model",),
            f"images are {vision.tokens_per_sample} tokens of a sequence of {sequence}; lower "
            "model.vision.images_per_sample or image_size, or raise training.sequence_length",
        )
    if recipe.training.steps > MOST_STEPS:
        yield (
            ("training", "tokens"),
            f"are {counted(recipe.training.steps, 'step')} of {recipe.workload.tokens_per_step} tokens; use at most "
            f"{MOST_STEPS} steps",
        )
    if recipe.data.python_source and shape.vocab_size < 256:
        yield (
            ("data", "python_source"),
            f"bytes need a vocabulary of at least 256, the model has {shape.vocab_size}; raise model.vocab_size",
        )


USUAL_RATES = {
    "LoRA": "2e-4 up to 13B parameters and 1e-4 above (QLoRA, Dettmers et al. 2023); ten times the rate of full "
    "fine-tuning (LoRA Without Regret, Thinking Machines 2025)",
    "full fine-tuning": "5e-6 for 8B parameters and 2e-6 for 70B (Tulu 3, Lambert et al. 2024); 2e-5 (Llama 2, Touvron "
    "et al. 2023)",
}
"""Peak learning rates by method, and whose they are."""


def fine_tuning_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield that a recipe without a learning rate trains weights that are trained already: the default is for random
    ones. Nothing is learned of data that nobody brings, and a script of one's own may have the rate in its own
    arguments."""
    backend, adapters = recipe.backend, recipe.techniques.adapters is not None
    told = backend.script is None or backend.on_megatron_core or backend.script_kind == "hugging-face"
    brought = recipe.data.path is not None or recipe.data.blend
    if not brought or not told or not (adapters or recipe.training.start_from is not None):
        return
    method = "LoRA" if adapters else "full fine-tuning"
    yield (
        ("training", "learning_rate"),
        f"is missing: {recipe.training.learning_rate:g}, the default, is for random weights. Write one; usual for "
        f"{method}: {USUAL_RATES[method]}",
    )


def _neutral_arguments(recipe: Recipe) -> Iterator[Problem]:
    backend = recipe.backend
    flags = {word.partition("=")[0] for word in (*backend.script_args, *backend.extra_args)}
    flags |= set(_dotted(backend.ds_config))
    for place, flag in enumerate(backend.neutral_args):
        if flag not in flags:
            yield (
                ("backend", "neutral_args", place),
                f"{flag} stands in neither extra_args nor script_args, nor is it a dotted key of ds_config; write what "
                "does, without its value",
            )


def _dotted(settings: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name, value in settings.items():
        yield from _dotted(value, f"{within}{name}.") if isinstance(value, Mapping) else (f"{within}{name}",)


def _nodes_and_budget(recipe: Recipe) -> Iterator[Problem]:
    most = recipe.budget.max_nodes
    if most is not None and recipe.nodes > most:
        yield ("nodes",), f"{recipe.nodes} are more than budget.max_nodes: {most}; change one of the two"


def _gpus_asked_of_slurm(recipe: Recipe) -> Iterator[Problem]:
    """Yield sbatch options of the recipe or site that request fewer GPUs than there are trainers.

    More may be all GPUs of a node, but a total is distributed over the nodes.
    """
    devices = recipe.cluster.devices_per_node
    if recipe.cluster.accelerator.kind != "gpu" or recipe.nodes == AUTO_NODES:
        return
    nodes = recipe.nodes + recipe.spare_nodes
    needed = {
        "gpus": nodes * devices,
        **dict.fromkeys(("gpus-per-node", "gpus-per-task", "gres", "tres-per-task"), devices),
    }
    for option, count in needed.items():
        requested = _gpu_count(option, recipe.slurm.get(option, False))
        if requested is not None and (requested < count or (requested > count and option == "gpus")):
            what = (
                f"{counted(nodes, 'node')} of {counted(devices, 'trainer')}"
                if option == "gpus"
                else f"the {devices} trainers of a node"
            )
            yield (
                ("slurm", option),
                f"{recipe.slurm[option]} asks for {requested} GPUs, but {what} need {count}; change one of the two, or "
                "leave it out: llmlaunch asks for the devices of each node itself",
            )


def _gpu_count(option: str, value: object) -> int | None:
    """Return the number of GPUs an sbatch option requests: 10 for `gpus: h100:8,a100:2`, None for a `gres` without
    GPUs.
    """
    if value is False or value is True:
        return None
    parts = str(value).split(",")
    if option in ("gres", "tres-per-task"):
        parts = [part for part in parts if re.search(r"(^|[:/])gpu\b", part)]
    counts = [int(number[0]) if (number := re.search(r"\d+$", part)) else 1 for part in parts]
    return sum(counts) if counts else None


def _fewer_nodes(recipe: Recipe) -> Iterator[Problem]:
    """Yield why a job could not go on with fewer nodes; whether its checkpoints can is the planner's to say."""
    if recipe.at_least_nodes is None:
        return
    if recipe.training.checkpoint_path is None:
        yield (
            ("nodes", "at_least"),
            "there is nothing to go on from: no checkpoints are written; add training.save_interval and "
            "training.checkpoint_path, or leave at_least out",
        )
    elif recipe.restart is None or recipe.restart.within != "job":
        yield (
            ("nodes", "at_least"),
            "the job goes on with fewer nodes in its own allocation, and from the queue it gets all of them again; "
            "write restart: {within: job}, or leave at_least out",
        )


def _coming_back(recipe: Recipe) -> Iterator[Problem]:
    if recipe.restart is not None and recipe.restart.slow_nodes == "replace":
        if recipe.restart.within != "job":
            yield (
                ("restart", "slow_nodes"),
                "spare nodes take the place of slow ones where the job's own script starts the training again; write "
                "within: job, or slow_nodes: tell",
            )
        elif not recipe.spare_nodes:
            yield (
                ("restart", "slow_nodes"),
                "there is no node to take the place of a slow one; add spare_nodes, or write slow_nodes: tell",
            )
    if recipe.restart is not None and recipe.training.checkpoint_path is None:
        yield (
            ("restart",),
            "there is nothing to come back to: no checkpoints are written; add training.save_interval and "
            "training.checkpoint_path, or remove restart",
        )
    if recipe.on_bad_loss.action != "rollback":
        return
    if recipe.training.checkpoint_path is None:
        yield (
            ("on_bad_loss",),
            "there is nothing to roll back to: no checkpoints are written; add training.save_interval and "
            "training.checkpoint_path, or write stop or tell",
        )
    elif recipe.backend.script is not None:
        yield (
            ("on_bad_loss",),
            "a script of your own cannot be told which batches to leave out, nor is it known how it lays out its "
            "checkpoints; write stop or tell",
        )
    elif any(word.split("=", 1)[0] == "--iterations-to-skip" for word in recipe.backend.extra_args):
        yield (
            ("on_bad_loss",),
            "a rollback hands Megatron-LM a list of steps to skip, which takes the place of your own; remove "
            "--iterations-to-skip from backend.extra_args, or write stop or tell",
        )


def _old_checkpoints(recipe: Recipe) -> Iterator[Problem]:
    backend = recipe.backend
    if recipe.training.keep_checkpoints is not None and backend.script and backend.script_kind != "hugging-face":
        yield (
            ("training", "keep_checkpoints"),
            "a script of one's own lays out its folder as it likes, so nothing is removed from it; remove the key, and "
            "have the script remove old ones (script_args)",
        )
    if recipe.training.non_persistent_save_interval is not None and backend.script:
        yield (
            ("training", "non_persistent_save_interval"),
            "a script of one's own lays out its folder as it likes, so nobody knows which checkpoint it goes on from; "
            "remove the key",
        )


def _of_the_shipped_script(recipe: Recipe) -> Iterator[Problem]:
    """Yield the keys that only the DeepSpeed trainer of ours reads, where another one trains."""
    training, backend = recipe.training, recipe.backend
    if backend.traits.ships_trainer and backend.script is None:
        return
    evaluation = training.evaluation
    asked = {
        ("training", "evaluation", "patience"): evaluation is not None and evaluation.patience is not None,
        ("training", "evaluation", "keep_best"): evaluation is not None and evaluation.keep_best,
        ("training", "samples"): bool(training.samples),
        ("training", "export"): training.export is not None,
    }
    for key, written in asked.items():
        if written:
            yield key, "is for the script that comes with llmlaunch, of backend: deepspeed; remove it"


def _trained_model(recipe: Recipe) -> Iterator[Problem]:
    """Yield why the best checkpoint cannot be kept, nothing answered or the model not be exported."""
    training = recipe.training
    if training.evaluation is not None and training.evaluation.keep_best and training.checkpoint_path is None:
        yield (
            ("training", "evaluation", "keep_best"),
            "no checkpoints are written; add training.save_interval and training.checkpoint_path, or remove it",
        )
    if training.samples and not recipe.data.learns_answers:
        yield (
            ("training", "samples"),
            "answers are to rows of data.format: chat or prompt-completion; add that, or remove it",
        )
    export = training.export
    if export is None:
        return
    if not export.merge_adapters and recipe.techniques.adapters is None:
        yield ("training", "export", "merge_adapters"), "there are no adapters; add training.adapters, or remove it"
    if export.path in (training.checkpoint_path, training.start_from):
        yield ("training", "export"), "is the folder of checkpoints or of weights to start from; name a new folder"


def _pinned(recipe: Recipe, name: str) -> tuple[int, ...]:
    """Return the values a pin allows; empty if the search chooses it."""
    pin = recipe.pins.get(name)
    if pin is None:
        return ()
    return tuple(int(value) for value in (pin if isinstance(pin, tuple) else (pin,)))


def _pins_and_model(recipe: Recipe) -> Iterator[Problem]:
    shape = recipe.model
    tensor = _pinned(recipe, "tensor")
    if tensor and all(shape.num_attention_heads % size for size in tensor):
        yield (
            ("layout", "tensor"),
            f"{shape.num_attention_heads} attention heads are not divisible by {_listed(tensor)}; "
            f"use a divisor of {shape.num_attention_heads}",
        )
    pipeline = _pinned(recipe, "pipeline")
    if pipeline and all(size > shape.num_layers for size in pipeline):
        yield (
            ("layout", "pipeline"),
            f"{_listed(pipeline)} stages for {counted(shape.num_layers, 'layer')}; use at most {shape.num_layers}",
        )
    if shape.moe is None:
        for name in ("expert", "expert_tensor"):
            sizes = _pinned(recipe, name)
            if sizes and 1 not in sizes:
                yield ("layout", name), f"shares out experts, and {shape.name} is a dense model without any; remove it"
        return
    expert, experts = _pinned(recipe, "expert"), shape.moe.num_experts
    if expert and all(experts % size for size in expert):
        yield (
            ("layout", "expert"),
            f"{experts} experts are not divisible by {_listed(expert)}; use a divisor of {experts}",
        )


def _slurm(recipe: Recipe) -> Iterator[Problem]:
    """Yield sbatch options that are valid alone but not together, and a node list longer than the job."""
    contradiction = sbatch_value_problem(recipe.slurm)
    if contradiction is not None:
        option, problem = contradiction
        yield ("slurm", option), problem
    hosts = recipe.slurm.get("nodelist", False)
    nodes = recipe.nodes + recipe.spare_nodes
    # a range with a character that is no digit is the site's own; sbatch reads it
    if isinstance(hosts, str) and recipe.nodes != AUTO_NODES and "/" not in hosts:
        from llmlaunch.cluster.slurm_site import host_count

        count = host_count(hosts)
        if count > nodes:
            yield (
                ("slurm", "nodelist"),
                f"names {count} nodes, and the job takes {nodes}; shorten the list or raise nodes:",
            )


def _stages(recipe: Recipe) -> Iterator[Problem]:
    named, layers = recipe.layers_by_stage, recipe.model.num_layers
    if not named:
        return
    key = ("layout", "layers_by_stage")
    if sum(named) != layers:
        yield (
            key,
            f"{_listed(named)} are {counted(sum(named), 'layer')}, {recipe.model.name} has {layers}; make them add up",
        )
    pipeline = _pinned(recipe, "pipeline") or range(1, len(named) + 1)
    chunks = _pinned(recipe, "virtual_pipeline")
    if any(len(named) % p == 0 and (not chunks or len(named) // p in chunks) for p in pipeline):
        return
    sizes = [
        f"{name}: {_listed(_pinned(recipe, name))}" for name in ("pipeline", "virtual_pipeline") if name in recipe.pins
    ]
    yield (
        key,
        f"{len(named)} stages are no pipeline x virtual_pipeline with {', '.join(sizes)}; name as many as that makes",
    )


def _pins_and_world(recipe: Recipe) -> Iterator[Problem]:
    if recipe.nodes == AUTO_NODES:
        return
    names = [name for name in ("tensor", "pipeline", "context", "data") if name in recipe.pins]
    world = recipe.world_size
    remedy = f"the {counted(world, 'device')} of {counted(recipe.nodes, 'node')}; change a size or `nodes`"
    parts = (list(some) for size in range(1, len(names) + 1) for some in combinations(names, size))
    clash = next((some for some in parts if not _divisors_among(recipe, some, world)), None)
    if clash is not None:  # the fewest that clash, not all that are pinned
        yield ("layout", clash[0]), f"{_product(recipe, clash)} does not divide {remedy}"
    elif len(names) == 4 and world not in _divisors_among(recipe, names, world):
        yield ("layout", names[0]), f"{_product(recipe, names)} is not {remedy}"


def _pins_and_batch(recipe: Recipe) -> Iterator[Problem]:
    names = [name for name in ("data", "micro_batch_size") if name in recipe.pins]
    batch = recipe.workload.global_batch_size
    if not _divisors_among(recipe, names, batch):
        yield (
            ("training", "global_batch_size"),
            f"{batch} is not divisible by {_product(recipe, names)}; use a multiple of it",
        )


def _divisors_among(recipe: Recipe, names: list[str], whole: int) -> set[int]:
    """Return the products of one value of each pin that divide `whole`.

    Only divisors are multiplied further: every factor of a divisor is a divisor.
    """
    products = {1}
    for name in names:
        products = {
            product * size for product in products for size in _pinned(recipe, name) if whole % (product * size) == 0
        }
    return products


def _product(recipe: Recipe, names: list[str]) -> str:
    values = [_pinned(recipe, name) for name in names]
    if len(values) == 1:
        return _listed(values[0])
    if any(len(sizes) > 1 for sizes in values):
        return f"any {' x '.join(names)} given"
    return f"{' x '.join(names)} = {prod(sizes[0] for sizes in values)}"


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:6])) + (", ..." if len(values) > 6 else "")


def cautions(recipe: Recipe) -> list[str]:
    """Return the sentences for `check`, `plan` and `submit`, each with what to write instead."""
    sentences = (_few_cores(recipe), _image_of_a_registry(recipe), _no_key(recipe), _preempted_writers(recipe))
    return [sentence for sentence in sentences if sentence]


def _preempted_writers(recipe: Recipe) -> str | None:
    """Return a warning about SLURM's SIGTERM to every process of a step, which Megatron's writers do not survive."""
    if not recipe.training.async_save:
        return None
    return (
        "training.async_save: a preemption ends the processes that write before their trainers can save, and the job "
        "goes on from the last checkpoint that the tracker names; told before its time limit or by the file stop, it "
        "saves"
    )


def _no_key(recipe: Recipe) -> str | None:
    """Return a warning if a run of Weights & Biases uploads, and no key of its is among the secrets."""
    run = recipe.tracking.wandb
    if run is None or run.mode != "online" or "WANDB_API_KEY" in recipe.secrets:
        return None
    return (
        "tracking.wandb: uploads while it trains, and no key is named; list WANDB_API_KEY under secrets: and export it "
        "where you submit, unless `wandb login` was typed in a home that the nodes share; mode: offline needs none"
    )


def _few_cores(recipe: Recipe) -> str | None:
    """Return a warning if a job on shared nodes gets fewer CPU cores than trainers.

    SLURM gives a task one core unless more are requested or the job has whole nodes (sbatch, --cpus-per-task).
    """
    trainers = recipe.cluster.devices_per_node
    if recipe.cluster.accelerator.kind != "gpu" or recipe.slurm.get("exclusive") in (True, "topo"):
        return None
    mend = "set cpus_per_node in the cluster profile, or slurm: {cpus-per-gpu: N} or {exclusive: true}"
    cores = _cores_asked(recipe)
    if cores is None:
        return (
            f"nothing asks SLURM for CPU cores: where nodes are shared, the {trainers} trainers of a node get 1 core "
            f"between them; {mend}"
        )
    if cores < trainers:
        return f"the {counted(trainers, 'trainer')} of a node get {counted(cores, 'CPU core')} between them; {mend}"
    return None


def _cores_asked(recipe: Recipe) -> int | None:
    """Return the cores that recipe and profile request for the one task of a node; None if neither does."""
    options = recipe.slurm
    if "cpu" in str(options.get("tres-per-task")):
        return recipe.cluster.devices_per_node  # in a form that only SLURM counts
    for option, times in (("cpus-per-task", 1), ("cpus-per-gpu", recipe.cluster.devices_per_node), ("mincpus", 1)):
        value = options.get(option)
        if value not in (None, False, True) and is_whole_number(str(value)):
            return int(value) * times
    return recipe.cluster.cpus_per_node


def _image_of_a_registry(recipe: Recipe) -> str | None:
    """Return a warning if every node would fetch the image.

    With pyxis job.sbatch has it imported once on each node, before the job's other steps; enroot keeps the layers of an
    image in a cache folder of each user, and Apptainer what it built.
    """
    box = recipe.container
    if box is None or is_path(box.image):
        return None
    if box.runtime == "apptainer":
        return (
            f"container.image: {box.image}: every node fetches and builds it; build it once (apptainer pull box.sif "
            f"{box.image}) and name the .sif file"
        )
    uri = box.image if "://" in box.image else f"docker://{box.image}"
    return (
        f"container.image: {box.image}: every node imports it at the start of each job; import it once (enroot import "
        f"-o box.sqsh {uri}) and name the .sqsh file"
    )
