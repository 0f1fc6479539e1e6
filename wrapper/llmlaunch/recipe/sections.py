"""Sections of a recipe that stand alone: the number of nodes, how full memory may be, notices, the
trackers, and what a model is trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from llmlaunch.documents.keys import key, name_or_mapping, section
from llmlaunch.documents.text import EnvironmentName, Line, PathText
from llmlaunch.documents.yaml_strict import KeyPath
from llmlaunch.recipe.training import Training
from llmlaunch.units import GIB

# wandb refuses these in a project's name (wandb/sdk/wandb_settings.py validate_project, 0.31); a comma would part paths
WandbName = Annotated[Line, Field(pattern=r"^[^/\\#?%:,]{1,128}$")]


@section
class WandbRun:
    """One run of Weights & Biases for the whole job: restarts, follow-up jobs and fallback layouts go on with it."""

    project: WandbName = key("Project of the run")
    entity: WandbName | None = key("User or team that owns the project; absent = the key's own", default=None)
    name: Line | None = key("Name to show; absent = the name of llmlaunch's run", default=None, max_length=128)
    mode: str = key(
        "online: uploads while it trains, with WANDB_API_KEY among `secrets` or `wandb login` on the nodes; offline: "
        "writes files, which `wandb sync` uploads",
        default="online",
        written=Literal["online", "offline"],
    )
    save_dir: PathText | None = key(
        "Folder in which the run's files are kept, in wandb/; absent = the run directory", default=None
    )


@section
class Tracking:
    """What the training framework writes besides its log."""

    wandb: WandbRun | None = key("Weights & Biases", default=None)
    tensorboard: PathText | None = key("Folder on the cluster for TensorBoard", default=None)


NO_TRACKING = Tracking()


def tracking_problems(tracking: Tracking, training: Training) -> Iterator[tuple[KeyPath, str]]:
    """Yield the key that says the same as another one."""
    if tracking.tensorboard is not None and training.tensorboard is not None:
        yield ("training", "tensorboard"), "says what tracking.tensorboard says; remove one of the two"


def tracking_with_absolute_paths(tracking: Tracking, absolute: Callable[[str | None], str | None]) -> Tracking:
    """Return the tracking with its folders as `absolute` makes them."""
    run = tracking.wandb
    return replace(
        tracking,
        tensorboard=absolute(tracking.tensorboard),
        wandb=None if run is None else replace(run, save_dir=absolute(run.save_dir)),
    )


MOST_NODES = 100_000
AUTO_NODES = 0  # a recipe whose number of nodes the planner has not chosen yet
NodeCount = Annotated[int, Field(ge=1, le=MOST_NODES)]


def _nodes(value: Any, check: ValidatorFunctionWrapHandler) -> int:
    nodes: int = AUTO_NODES if value == "auto" and isinstance(value, str) else check(value)
    return nodes


Nodes = Annotated[
    NodeCount,
    WrapValidator(_nodes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST_NODES}, {"const": "auto"}]}),
]


@section
class NodeRange:
    """How many nodes train, and with how few the job goes on where it has lost some and no spare node is left."""

    count: int = key("Number of nodes", written=NodeCount)
    at_least: int | None = key(
        "Go on with so few nodes in the same allocation, with a layout planned at submit, rather than back to the "
        "queue; absent = with all of them only",
        default=None,
        written=NodeCount | None,
    )

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where the fewest nodes are not fewer."""
        fewest = keys.get("at_least")
        if fewest is not None and fewest >= keys["count"]:
            raise ValueError(f"at_least: {fewest} is not fewer than count: {keys['count']}; lower it, or leave it out")


FLOOR_GIB = 4.0  # 20 % of a 40 GB card is too thin


IN_USE, NO_CALIBRATION = "in-use", "none"


@section
class MemoryPolicy:
    """When a plan is called safe. Without a word here, and with a `risk`, measured runs set the limit of a GPU where
    there are enough of them. With a `limit` alone, and wherever they do not, it is a share of device memory, and at
    least `floor_gib` stay free."""

    limit: float | None = key(
        "Share of device memory that may be used (Fujii's rule is 0.8), in place of measured runs",
        default=None,
        gt=0,
        le=1,
    )
    floor_gib: float | None = key(
        "What must stay free at least, in units of 2**30 bytes (GPUs only); absent = 4.0 beside a share",
        default=None,
        ge=0,
        le=1024,
    )
    risk: float | None = key(
        "Share of runs that may need more than predicted and the margin; absent = 0.07",
        default=None,
        gt=0,
        le=0.5,
    )
    calibration: str = key(
        "What measured runs say of predictions: in-use (for its backend and accelerator), none, or an id",
        default=IN_USE,
        pattern=r"^[A-Za-z0-9.-]+$",
    )
    accept: str | None = key(
        "tight: run also what fits the card only if its prediction is not too low, with a layout to fall back on",
        default=None,
        written=Literal["tight"],
    )

    @property
    def floor_bytes(self) -> int:
        """What stays free beside a share of memory."""
        return int((FLOOR_GIB if self.floor_gib is None else self.floor_gib) * GIB)

    @property
    def by_runs(self) -> bool:
        """Whether measured runs may set the limit."""
        return self.limit is None or self.risk is not None


Event = Literal["start", "first_step", "stall", "restart", "slow", "bad_loss", "end"]


@section
class Notices:
    """Notices of what becomes of a job."""

    webhook: EnvironmentName | None = key(
        "Name of a variable, set where you submit, with the address to which notices are posted as Slack's JSON",
        default=None,
    )
    command: tuple[Line, ...] = key(
        "Program and arguments, run on the job's first node with each notice as JSON on its standard input", default=()
    )
    events: tuple[str, ...] | None = key(
        "The events that are told; absent = all",
        default=None,
        written=tuple[Event, ...] | None,
        min_length=1,
    )

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError where nobody would hear of anything, or the variable may be one of job.sbatch's own."""
        if keys.get("webhook") is None and not keys.get("command"):
            raise ValueError("names neither a webhook nor a command; name one of them, or remove notify")
        if (name := keys.get("webhook")) and name != name.upper():
            raise ValueError(
                f"webhook is {name}; write the variable in capitals, as the job script has its own in small ones"
            )


def receivers(notices: Notices, environment: Mapping[str, str]) -> str:
    """Return where notices go, of an address its host alone, and which: the row of a dry run."""
    parts = []
    if notices.webhook is not None:
        host = webhook_host(environment.get(notices.webhook, ""))
        parts.append(f"{host or 'an address that is missing'} (${notices.webhook})")
    if notices.command:
        parts.append(f"the command {notices.command[0]}")
    events = "all" if notices.events is None else ", ".join(notices.events)
    return f"{' and '.join(parts)}: {events}"


def webhook_host(address: str) -> str | None:
    """Return the host of an http or https address; None for anything else."""
    try:
        parts = urlsplit(address.strip())
        return parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        return None


Problem = tuple[KeyPath, str]
SHARES = re.compile(r"(?:[1-9]\d*(?:\.\d+)?|0\.\d*[1-9]\d*)(?:,\d+(?:\.\d+)?){2}")  # something to train on
# Megatron's types that need no `tokenizer` beside them, and those whose `tokenizer` is a file
WITHOUT_MODEL = ("NullTokenizer", "GPT2BPETokenizer")
OF_A_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
OF_MEGATRON = ("cache_path", "tokenizer_type")
DEFAULT_SPLIT = "99,1,0"


def _shares(text: str) -> str:
    if not SHARES.fullmatch(text):
        raise ValueError("must be three shares, for training (not 0), validation and test, such as 99,1,0")
    return text


Shares = Annotated[str, AfterValidator(_shares), WithJsonSchema({"type": "string", "pattern": f"^{SHARES.pattern}$"})]
TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
]


@section
class BlendPart:
    """An indexed dataset and its weight beside the others'."""

    path: PathText = key("Indexed dataset: the prefix of its .bin and .idx files")
    weight: float = key("Share of the samples that come from it, in any unit", gt=0, le=10**12)


def _parts(value: list[BlendPart] | str) -> tuple[BlendPart, ...]:
    return (BlendPart(value, 1.0),) if isinstance(value, str) else tuple(value)


@section
class Data:
    """What it is trained on: exactly one of mock, path, blend and python_source. None is the backend's choice."""

    mock: bool = key("Made-up tokens of the framework: for measuring speed and memory", default=False)
    path: PathText | None = key("The framework's own format, a text file or a folder of text files", default=None)
    # nothing is downloaded
    python_source: bool = key("Source files of Python's standard library, byte by byte", default=False)
    tokenizer: Line | None = key(
        "Tokenizer of `path` or `blend`: a Hugging Face one, or a file as `tokenizer_type` says", default=None
    )
    blend: tuple[BlendPart, ...] = key(
        "Several indexed datasets and their weights, instead of `path`",
        default=(),
        written=tuple[BlendPart, ...] | None,
        min_length=1,
        max_length=10_000,
    )
    validation: tuple[BlendPart, ...] = key(
        "What training.evaluation reads instead of a share of `path` or `blend`: a dataset, or several and their "
        "weights",
        default=(),
        written=lambda: Annotated[
            name_or_mapping(PathText, Annotated[list[BlendPart], Field(min_length=1, max_length=10_000)]),
            AfterValidator(_parts),
        ],
    )
    split: Shares | None = key(
        "Shares of `path` or `blend` for training, validation and test; absent = 99,1,0 (deepspeed: where "
        "training.evaluation needs one)",
        default=None,
    )
    cache_path: PathText | None = key("megatron-lm: folder for the indexes; absent = beside the dataset", default=None)
    sft: str | None = key(
        "megatron-bridge: `path` is a folder whose training.jsonl (and validation.jsonl for training.evaluation) has a "
        "conversation or a prompt with its completion in each line; answers alone are learned",
        default=None,
        written=Literal["chat", "prompt-completion"] | None,
    )
    packed: bool = key(
        "megatron-bridge: a sequence holds as many rows of `sft` as fit into it, each attending to itself alone; "
        "training.global_batch_size counts such sequences",
        default=False,
    )
    attention_masks: bool = key(
        "megatron-lm: the loader makes an attention mask of sequence x sequence bytes of every sample, which fused "
        "attention does not read",
        default=False,
    )
    tokenizer_type: str | None = key(
        "megatron-lm: what `tokenizer` is; absent = HuggingFaceTokenizer, and NullTokenizer without one",
        default=None,
        written=TokenizerType | None,
    )

    @property
    def datasets(self) -> tuple[str, ...]:
        """Paths that data is read from."""
        return (*(() if self.path is None else (self.path,)), *(part.path for part in (*self.blend, *self.validation)))

    @property
    def shares(self) -> str:
        """Return the shares for training, validation and test."""
        return self.split or DEFAULT_SPLIT

    @staticmethod
    def check_keys(keys: Mapping[str, Any]) -> None:
        """Raise ValueError unless there is exactly one source of data, and a tokenizer where its type needs one."""
        sources = [keys.get("mock"), keys.get("python_source"), keys.get("path"), keys.get("blend")]
        if sum(bool(source) for source in sources) != 1:
            raise ValueError("give exactly one of mock: true, path: ..., blend: ... or python_source: true")
        tokenizer, kind = keys.get("tokenizer"), keys.get("tokenizer_type")
        if keys.get("sft") is not None:
            Data._check_sft(keys)
        elif keys.get("packed"):
            raise ValueError("packed: rows of sft are packed; add sft: chat or sft: prompt-completion, or remove it")
        for name in ("tokenizer", "tokenizer_type", "split", "validation", "cache_path"):
            if keys.get(name) is not None and not (keys.get("path") or keys.get("blend")):
                raise ValueError(f"{name} belongs to path or blend; remove it")
        if keys.get("split") is not None and keys.get("validation") is not None:
            raise ValueError("split cuts a share for validation off, and validation names other data; remove one")
        if kind is None or (tokenizer is None) == (kind in WITHOUT_MODEL):
            return
        if tokenizer is None:
            raise ValueError(f"tokenizer_type {kind} needs tokenizer; name it, or remove the type")
        raise ValueError(f"tokenizer_type {kind} reads no tokenizer; remove one of the two")

    @staticmethod
    def _check_sft(keys: Mapping[str, Any]) -> None:
        """Rows lie in files of known names, and are tokenized while the job runs."""
        if keys.get("path") is None:
            raise ValueError("sft: reads one folder; name it in path")
        for name in ("split", "validation", "cache_path"):
            if keys.get(name) is not None:
                raise ValueError(
                    f"sft: what is trained on and evaluated with lies in training.jsonl and validation.jsonl of path; "
                    f"remove {name}"
                )
        if keys.get("tokenizer") is None:
            raise ValueError("sft: rows are text; name the tokenizer")


def data_problems(data: Data, megatron: bool, bridge: bool) -> Iterator[Problem]:
    """Yield the keys that only scripts with Megatron's arguments read, or Bridge alone, where the job's is none of
    them."""
    if data.sft is not None and not bridge:
        yield ("data", "sft"), "is a word of megatron-bridge; remove it, or take backend: megatron-bridge"
    if data.attention_masks and (bridge or not megatron):
        yield ("data", "attention_masks"), "is a key of megatron-lm; remove it, or take backend: megatron-lm"
    if megatron:
        return
    for name in OF_MEGATRON:
        if getattr(data, name) is not None:
            yield ("data", name), "is a word of megatron-lm; remove it for deepspeed"


def evaluation_problems(data: Data, evaluated: bool) -> Iterator[Problem]:
    """Yield validation data that nothing reads, and an evaluation without any."""
    if data.validation and not evaluated:
        yield ("data", "validation"), "is read by training.evaluation alone; add that, or remove it"
    if evaluated and data.split is not None and float(data.split.split(",")[1]) == 0:
        yield (
            ("data", "split"),
            f"{data.split} leaves nothing for training.evaluation; give the second share, such as 99,1,0, or name "
            "data.validation",
        )


def with_absolute_paths(data: Data, absolute: Callable[[str], str]) -> Data:
    """Return `data` with `absolute` of every path. A tokenizer is a path where its type reads a file; else it may be a
    name."""
    in_a_file = data.tokenizer is not None and data.tokenizer_type in OF_A_FILE
    return replace(
        data,
        path=None if data.path is None else absolute(data.path),
        blend=tuple(BlendPart(absolute(part.path), part.weight) for part in data.blend),
        validation=tuple(BlendPart(absolute(part.path), part.weight) for part in data.validation),
        cache_path=None if data.cache_path is None else absolute(data.cache_path),
        tokenizer=absolute(str(data.tokenizer)) if in_a_file else data.tokenizer,
    )
