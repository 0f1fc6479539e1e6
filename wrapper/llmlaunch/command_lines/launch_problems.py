"""Launches that cannot work: what srun, a launcher and a rendezvous do together, by their manuals and sources.

A rule that does not know what it needs, such as a variable without a value, says nothing: a launch that works is never
refused. Sources: srun(1) of Slurm 26.11, torch/distributed/run.py and elastic/rendezvous of torch 2.13,
deepspeed/launcher/runner.py, accelerate/utils/launch.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmlaunch.command_lines.command import LaunchProblem, is_unset
from llmlaunch.command_lines.sbatch import Options, device_count, node_count

LOOPBACK = re.compile(r"(localhost|127(\.\d+){3}|\[?::1\]?)?(:\d*)?", re.IGNORECASE)
OF_SUBMISSION = re.compile(r"\$\{SLURM_SUBMIT_HOST\}")
# a shell of each task names its own host as the one where all meet
OWN_HOST = re.compile(
    r"(?:MASTER_ADDR=|--(?:master[-_]addr|rdzv[-_]endpoint|main_process_ip)[ =])"
    r"[\"']?(?:\$\(hostname|`hostname|\$\{?HOSTNAME)"
)
# of srun: some of the nodes, or several commands
_PARTS = {"nodelist", "relative", "exclude", "het-group", "multi-prog"}
OF_TASKS = re.compile(r"\bSLURM_(NODEID|PROCID|LOCALID)\b")
BRANCHES = re.compile(r"\b(if|case)\b|\]\]?\s*(&&|\|\|)|\(\(")
DECIDES = re.compile(r"\b(if|case|cat|scontrol|srun)\b|&&|\|\|")


@dataclass(frozen=True)
class ScriptLaunch:
    """How one command of a script starts a training.

    `nodes` are the fewest and the most that its launcher waits for, `ranks_per_node` is how many ranks it starts on
    each; None where that is not known. `options` are the launcher's, `partly`: some of them are not known. `elsewhere`:
    ssh, pdsh or MPI starts it, on hosts of their own. `text` is that of a shell that srun starts for each task.
    `training` is what it runs, and `times` how often the script starts that. `nodes_option` is that of its launcher,
    empty where srun or MPI starts each rank; `by_hosts`: it reaches the nodes that a file of hosts names.
    """

    launcher: str
    training: tuple[str, ...]
    family: str = ""
    nodes_option: str = ""
    by_hosts: bool = False
    line: int = 0
    nodes: tuple[int, int] | None = None
    ranks_per_node: int | None = None
    options: Mapping[str, str | bool] = field(default_factory=dict)
    partly: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    slurm: Options = field(default_factory=dict)
    srun: Options = field(default_factory=dict)
    has_srun: bool = False
    elsewhere: bool = False
    text: str = ""
    times: int = 1

    @property
    def step(self) -> Options:
        """The options of the step: srun's over those of the job."""
        return {**self.slurm, **self.srun}

    @property
    def step_nodes(self) -> int | None:
        """The nodes that its tasks start on, srun's or the job's; those of a list of names are not known."""
        return None if _PARTS & set(self.srun) else node_count(self.step)

    @property
    def tasks_per_node(self) -> int | None:
        """How many tasks srun starts on a node: one by default, which --cpus-per-task changes (srun(1), -n)."""
        for options in (self.srun, self.slurm):
            for name in ("ntasks-per-node", "tasks-per-node"):
                if name in options and "ntasks" not in self.srun:
                    return _whole(options[name])
            if "ntasks" in options:
                tasks, nodes = _whole(options["ntasks"]), self.step_nodes
                return -(-tasks // nodes) if tasks and nodes else None
            if "ntasks-per-gpu" in options or "cpus-per-task" in self.srun:
                return None
        return 1

    @property
    def agents(self) -> int | None:
        """How many times srun starts the launcher."""
        tasks, nodes = self.tasks_per_node, self.step_nodes
        total = _whole(self.srun["ntasks"]) if "ntasks" in self.srun else None
        return total or (tasks * nodes if tasks and nodes else None)

    @property
    def gpus_per_node(self) -> int | None:
        """The GPUs of a node that the step has."""
        return device_count(self.srun) or device_count(self.slurm)

    @property
    def visible(self) -> int | None:
        """The GPUs that the script itself leaves visible, by CUDA_VISIBLE_DEVICES."""
        text = self.environment.get("CUDA_VISIBLE_DEVICES", "")
        return text.count(",") + 1 if text and not is_unset(text) else None

    @property
    def gpus_per_task(self) -> int | None:
        """The GPUs that a task of srun sees where they are bound to it, None otherwise: --gpus-per-task implies
        --tres-bind=gres/gpu:per_task, and --ntasks-per-gpu implies single (srun(1))."""
        bound = str(self.step.get("gpu-bind", self.step.get("tres-bind", ""))).replace("gres/gpu:", "")
        if not self.has_srun or "CUDA_VISIBLE_DEVICES" in self.environment:
            return None
        if bound:
            match = re.search(r"\bper_task:(\d+)|\b(single|map_gpu|map):", bound)
            return None if match is None else int(match[1] or 1)
        if "ntasks-per-gpu" in self.step:
            return 1
        match = re.fullmatch(r"(?:[a-z]\w*:)?(\d+)", str(self.step.get("gpus-per-task", "")))
        return None if match is None else int(match[1])

    def says(self, *names: str) -> str:
        """Return how the script writes the first of these options that it has, for messages."""
        name = next((name for name in names if name in self.step), names[0])
        return f"--{name}={self.step.get(name)}"


Rule = Callable[[ScriptLaunch], "LaunchProblem | None"]


def launch_problems(starts: Sequence[ScriptLaunch]) -> list[tuple[LaunchProblem, ...]]:
    """Return the problems of each start, those first with which it cannot train."""
    problems: list[tuple[LaunchProblem, ...]] = []
    for each in starts:
        start = replace(each, times=sum(other.training == each.training for other in starts))
        if OF_TASKS.search(start.text) and BRANCHES.search(start.text):
            problems.append(())  # its tasks do not all do the same
            continue
        fatal = [found for rule in FATAL if (found := rule(start)) is not None]
        rules = WARNINGS if len(starts) == 1 and not fatal else ()
        problems.append((*fatal, *(found for rule in rules if (found := rule(start)) is not None)))
    return problems


def _one_gpu_a_task(start: ScriptLaunch) -> LaunchProblem | None:
    """A task sees only the GPUs that srun binds to it (srun(1), --gpus-per-task and --tres-bind); torchrun's rank 1
    then asks for a second one ("invalid device ordinal"). Ranks that srun starts itself take the one of their
    LOCAL_RANK (Megatron's initialize.py and accelerate's state.py: torch.cuda.set_device(local_rank))."""
    seen, ranks = start.gpus_per_task, start.ranks_per_node
    if seen is None or ranks is None:
        return None
    words = start.says("gpu-bind", "tres-bind", "gpus-per-task", "ntasks-per-gpu")
    if start.nodes_option and ranks > seen:
        problem = (
            f"{words} shows {seen} GPU{'s' * (seen > 1)} to each task, and {start.launcher} starts {ranks} ranks in it"
        )
        return _fatal(start, problem, f"ask for --gpus-per-node={ranks} in its place")
    of_task = "SLURM_LOCALID" in start.environment.get("LOCAL_RANK", "")
    if start.launcher == "srun" and start.family and of_task and seen < ranks:
        problem = f"{words} shows {seen} GPU to each task, and LOCAL_RANK=$SLURM_LOCALID counts on to {ranks - 1}"
        return _fatal(start, problem, "add --gpu-bind=none to srun, or set LOCAL_RANK=0")
    return None


def _more_ranks_than_gpus(start: ScriptLaunch) -> LaunchProblem | None:
    """Ranks of a node take one GPU each, by their LOCAL_RANK; SLURM gives a job those that it asks for."""
    gpus, ranks = start.visible or start.gpus_per_node, start.ranks_per_node
    if gpus is None or ranks is None or ranks <= gpus or _one_gpu_a_task(start) is not None:
        return None
    words = start.says("gres", "gpus-per-node", "gpus-per-task", "gpus")
    words = "CUDA_VISIBLE_DEVICES" if start.visible else words
    return _fatal(
        start, f"{ranks} ranks start on each node, where the job has {gpus} GPUs ({words})",
        f"start {gpus} ranks on a node, or ask for {ranks} GPUs",
    )  # fmt: skip


def _several_agents(start: ScriptLaunch) -> LaunchProblem | None:
    """srun starts its command once for each task; --ntasks-per-node of the job counts for srun, too (srun(1), INPUT
    ENVIRONMENT VARIABLES). torchrun's rendezvous admits --nnodes agents (elastic/rendezvous/dynamic_rendezvous.py)."""
    tasks, agents = start.tasks_per_node, start.agents
    if not start.has_srun or not start.nodes_option or not tasks or tasks < 2 or not agents:
        return None
    if start.nodes is None or start.ranks_per_node is None or start.ranks_per_node < 2 or agents <= start.nodes[1]:
        return None
    where = f"{tasks} tasks on each of {agents // tasks} nodes" if agents > tasks else f"{tasks} tasks on the node"
    admitted = f"{start.launcher} starts {agents} times, and {start.nodes[1]} can join"
    return _fatal(start, f"srun starts {where}: {admitted}", "write srun --ntasks-per-node=1")


def _too_few_agents(start: ScriptLaunch) -> LaunchProblem | None:
    """A batch script runs on the first node alone (sbatch(1)); torchrun and accelerate start ranks on their own node
    and wait for the others, deepspeed starts those that its file of hosts names and refuses --num_nodes without one
    (runner.py main, "no extra nodes available via hostfile")."""
    if start.nodes is None or start.nodes[0] < 2 or start.elsewhere or not start.nodes_option or not start.slurm:
        return None
    if start.by_hosts and {"hostfile", "include", "no_ssh", "H"} & set(start.options):
        return None
    if start.launcher == "accelerate" and _by_pdsh(start):
        return None
    if is_unset(str(start.srun.get("nodelist", ""))):
        return None  # a loop over the nodes, whose names only the run knows, is read once
    started = start.agents if start.has_srun else 1
    if started is None or started * start.times >= start.nodes[0]:
        return None
    if start.by_hosts and not start.has_srun:
        problem = f"{start.launcher} reaches {start.nodes[0]} nodes by a file of hosts, and none is given"
        return _fatal(start, problem, "write the nodes to a file and add --hostfile FILE, or start torchrun by srun")
    what = (
        f"srun starts {start.launcher} {_times(started)}" if start.has_srun else f"{start.launcher} starts on one node"
    )
    problem = f"{what}{'' if start.has_srun else ' (no srun before it)'}, and waits for {start.nodes[0]} nodes"
    return _fatal(start, problem, f"srun --nodes={start.nodes[0]} --ntasks-per-node=1 {start.launcher} ...")


def _no_rendezvous(start: ScriptLaunch) -> LaunchProblem | None:
    """torchrun meets at --master_addr (static, the default; 127.0.0.1 unless given) or at --rdzv_endpoint (c10d; its
    own host unless given). It does not read MASTER_ADDR, and c10d does not read --master_addr (run.py
    get_rdzv_endpoint, config_from_args)."""
    if start.nodes is None or start.nodes[0] < 2 or start.partly or not start.has_srun or start.agents == 1:
        return None  # typed on each node, the first may wait for others at its own address
    backend, endpoint = str(start.options.get("rdzv_backend", "static")), str(start.options.get("rdzv_endpoint", ""))
    option = "--rdzv_endpoint" if backend == "c10d" or endpoint else "--master_addr"
    if start.launcher == "accelerate" and "main_process_ip" in start.options and not _by_pdsh(start):
        option, host = "--main_process_ip", str(start.options["main_process_ip"])
    elif start.launcher != "torchrun" or backend not in ("static", "c10d"):
        return None
    else:
        host = endpoint or str(start.options.get("master_addr", "127.0.0.1") if backend == "static" else "")
    given = str(start.slurm.get("export", ""))  # of sbatch, which expands nothing in its lines
    if OF_SUBMISSION.match(host) or ("${MASTER_ADDR}" in host and OWN_HOST.search(given)):
        return _fatal(start, f"{option} is the host that submitted the job, which is none of its nodes", _HEAD)
    if OWN_HOST.search(start.text) and not DECIDES.search(start.text):
        return _fatal(start, "each task names its own host as the one where all meet", _HEAD)
    if not LOOPBACK.fullmatch(host):
        return None
    given = f"{option} is {host}" if host and option.lstrip("-") in start.options else f"{option} is not given"
    return _fatal(start, f"{given}, so each of {start.nodes[0]} nodes waits for the others at its own address", _HEAD)


_HEAD = "let all nodes meet at the first one: $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"


def _same_rank(start: ScriptLaunch) -> LaunchProblem | None:
    """SLURM_NODEID, SLURM_PROCID and SLURM_LOCALID are those of a task inside of srun (srun(1), OUTPUT ENVIRONMENT
    VARIABLES) and 0 in the batch script. --node_rank is 0 unless given, and decides in a static rendezvous (run.py);
    accelerate's --machine_rank becomes --node_rank (utils/launch.py)."""
    agents = start.agents
    if not start.has_srun or start.partly or not agents or agents < 2 or start.times > 1:
        return None
    if start.launcher == "srun":
        names = [name for name in ("RANK", "LOCAL_RANK") if start.environment.get(name, "").isdecimal()]
        own_gpu = start.gpus_per_task is not None or "CUDA_VISIBLE_DEVICES" in start.environment
        if not start.family or (names == ["LOCAL_RANK"] and (start.tasks_per_node in (None, 1) or own_gpu)):
            return None
        words = [f"{name}={start.environment[name]}" for name in names]
    elif start.nodes is None or start.nodes[0] < 2 or str(start.options.get("rdzv_backend", "static")) != "static":
        return None
    elif start.launcher == "torchrun":
        words = [f"--node_rank {start.options.get('node_rank', 0)}"]
    elif start.launcher == "accelerate" and not _by_pdsh(start) and "machine_rank" in start.options:
        words = [f"--machine_rank {start.options['machine_rank']}"]
    else:
        return None
    if not words or not words[0].rpartition(" ")[2].rpartition("=")[2].isdecimal():
        return None
    if start.launcher == "torchrun" and "node_rank" not in start.options:
        if _no_rendezvous(start) is not None:
            return None
        problem = "--node_rank is not given, and is 0 on every node of a static rendezvous"
        return _fatal(start, problem, f"--rdzv_backend c10d --rdzv_endpoint HOST:PORT; {_HEAD}")
    who = "task" if start.launcher == "srun" else "node"
    problem = f"every {who} gets {words[0]} (the batch script expands $SLURM_PROCID and $SLURM_NODEID once, to 0)"
    return _fatal(start, problem, "let each task expand it: srun bash -c '... $SLURM_PROCID ...', in single quotes")


def _idle_nodes(start: ScriptLaunch) -> LaunchProblem | None:
    """A rendezvous admits --nnodes agents, one by default; the others wait for its end and exit 1
    (dynamic_rendezvous.py, RendezvousClosedError), and SLURM calls a job failed of which a task failed."""
    nodes = node_count(start.slurm)
    if nodes is None or start.nodes is None or start.elsewhere or start.partly or not start.nodes_option:
        return None
    if "-" in str(start.slurm["nodes"]):
        return None  # a range: the job may get as few
    if start.nodes[1] >= nodes or _PARTS & set(start.srun):
        return None
    agents = start.agents if start.has_srun else 1
    if agents and agents > 1 and start.nodes[1] == 1:
        problem = f"each of {agents} nodes trains by itself: {start.launcher} waits for one node"
        return _warning(start, problem, f"--{start.nodes_option} {nodes} if all are to train together")
    problem = f"{nodes - start.nodes[1]} of {nodes} nodes stay idle"
    if agents is None or agents > start.nodes[1]:
        problem += ", and what srun starts there exits 1 at the end, so SLURM calls the job failed"
    return _warning(start, problem, f"--nodes={start.nodes[1]}, or --{start.nodes_option} {nodes}")


def _idle_gpus(start: ScriptLaunch) -> LaunchProblem | None:
    """A rank uses one GPU."""
    gpus, ranks = start.gpus_per_node, start.ranks_per_node
    if "gpus" in start.step and node_count(start.step) is None:
        return None  # GPUs of an open number of nodes
    if gpus is None or ranks is None or ranks >= gpus or start.visible or not start.nodes_option:
        return None
    if start.has_srun and start.tasks_per_node != 1:
        return None
    words = start.says("gres", "gpus-per-node", "gpus")
    return _warning(
        start,
        f"{gpus - ranks} of {gpus} GPUs of a node stay idle: {ranks} ranks start there",
        f"{words} asks for {gpus}; start {gpus} ranks, or ask for {ranks}",
    )


FATAL: tuple[Rule, ...] = (
    _several_agents, _one_gpu_a_task, _more_ranks_than_gpus, _too_few_agents, _no_rendezvous, _same_rank,
)  # fmt: skip
WARNINGS: tuple[Rule, ...] = (_idle_nodes, _idle_gpus)


def _by_pdsh(start: ScriptLaunch) -> bool:
    """Return whether accelerate starts the other machines itself, or may: with DeepSpeed, unless it is told not to
    (utils/launch.py prepare_deepspeed_cmd_env), and where its file is not known."""
    by_itself = start.options.get("deepspeed_multinode_launcher", "pdsh") != "standard"
    return start.partly or (bool(start.options.get("use_deepspeed")) and by_itself)


def _fatal(start: ScriptLaunch, problem: str, fix: str) -> LaunchProblem:
    return LaunchProblem(start.line, problem, fix)


def _warning(start: ScriptLaunch, problem: str, fix: str) -> LaunchProblem:
    return LaunchProblem(start.line, problem, fix, fatal=False)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
