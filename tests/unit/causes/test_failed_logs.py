"""What a person is told of runs that failed in public, from their logs alone: a row for each log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.cause import (
    advice,
    cause_from_log,
    cause_from_ranks,
    likelier,
    sentence,
)
from llmlaunch.causes.cause_kind import NEVER
from llmlaunch.causes.kinds import kind_of
from llmlaunch.causes.log_scan import MOST_OF_KIND, scan, with_last_message

LOGS = Path(__file__).parents[2] / "data" / "failed_logs"
# log: kind, the rank that said it, what the telling line holds, what the advice holds
ANSWERS = {
    "c02": ("checkpoint_format", 0, "flattened_range is not supported", "--dist-ckpt-optim-fully-reshardable"),
    "c03": ("checkpoint_mismatch", 2, "Global shape mismatch", "[4, 8192], this job has 16, 2048"),
    "c04": ("checkpoint_mismatch", 0, "KeyError: 'optimizer'", "holds no optimizer"),
    "c05": ("checkpoint_mismatch", 7, "KeyError: 'state'", "--no-load-optim"),
    "d01": ("index_cache", 9, "GPTDataset_indices", "all nodes share"),
    "f01": ("oom", 52, "Triton Error [CUDA]: out of memory", "llmlaunch plan"),
    "h02": ("hung", 3, "Watchdog caught collective operation timeout", "leaf module"),
    "h03": ("hung", 1, "Watchdog caught collective operation timeout", "began in a save"),
    "k03": ("host_oom", None, "node running low on memory", "--mem"),
    "m01": ("illegal_access", 0, "illegal memory access", "layout.offload_optimizer"),
    "v01": ("bad_arguments", 7, "number of contiguous micro-batches", "refuses an argument"),
    "v02": ("bad_arguments", 14, "divisible by the pipeline-model-parallel size", "refuses an argument"),
    "w01": ("wandb", 0, "Run initialization has timed out", "WANDB_MODE=offline"),
    "x03": ("kernel_resources", 0, "out of resource: shared memory", "smaller block"),
    "x04": ("host_oom", 2, "killed by signal: Killed", "data workers"),
    "x05": ("gpu_code", 2, "no kernel image is available", "TORCH_CUDA_ARCH_LIST"),
    "x06": ("step_refused", None, "Memory required by task is not available", "--mem"),
    "x07": ("no_program", None, "execve(): torchrun: No such file", "activate the training environment"),
    "x08": ("damaged_file", 0, "MetadataIncompleteBuffer", "copy it again"),
    "x09": ("gpu_busy", 3, "Process 991 has 61.20 GiB", "the GPU was not free"),
    "x10": ("checkpoint_mismatch", 0, "size mismatch for embedding", "--make-vocab-size-divisible-by"),
    "x11": ("attention_backend", 0, "No dot product attention backend", "NVTE_DEBUG"),
    "x12": ("no_ssh", None, "ssh: connect to host n2", "srun"),
}
QUIET = {"n01"}  # nothing ended it


def cause_of(log: str, *ranks: dict[str, Any]) -> dict[str, Any] | None:
    return cause_from_log(scan(log), "n1", ranks)


def said(log: str, *ranks: dict[str, Any]) -> tuple[str, str]:
    """Kind and advice."""
    record = cause_of(log, *ranks)
    assert record is not None
    return record["kind"], advice(record)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_to_a_log(name: str) -> None:
    kind, rank, line, way_out = ANSWERS[name]
    record = cause_of((LOGS / f"{name}.log").read_text())
    assert record is not None
    assert (record["kind"], record["rank"]) == (kind, rank)
    assert line in sentence(record)
    assert way_out in advice(record)


def test_every_log_has_an_answer() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == {*ANSWERS} | QUIET
    assert all(cause_of((LOGS / f"{name}.log").read_text()) is None for name in QUIET)


@pytest.mark.parametrize("name", ["c03", "c04", "c05", "x10"])
def test_a_mismatch_ends_the_run_and_touches_no_checkpoint(name: str) -> None:
    row = kind_of(cause_of((LOGS / f"{name}.log").read_text()))
    assert row.retry == NEVER
    assert not row.damages_checkpoint


TRACE = "Traceback (most recent call last):\n"
FRAME = '  File "/w/megatron/training/checkpointing.py", line 1402, in load_checkpoint\n'
OOM = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 3 has a total capacity of "
    "79.10 GiB of which {free} GiB is free. {others}Including non-PyTorch memory, this process has 60.00 GiB memory in "
    "use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and {unallocated} GiB is reserved by PyTorch but "
    "unallocated."
)


def oom(asked: str = "2.00", free: str = "1.05", others: str = "", unallocated: str = "0.50") -> str:
    return OOM.format(asked=asked, free=free, others=others, unallocated=unallocated)


def test_reserved_memory_that_is_not_in_use_is_fragmentation() -> None:
    kind, way_out = said(oom(unallocated="30.41"))
    assert kind == "oom"
    assert "30.4 GiB were reserved but not in use" in way_out
    assert "expandable_segments:True" in way_out


def test_a_process_that_is_another_rank_shares_the_gpu() -> None:
    line = oom(others="Process 991 has 61.20 GiB memory in use. ")
    ranks = [{"rank": 3, "pid": 980, "program_pid": 981}, {"rank": 2, "pid": 990, "program_pid": 991}]
    kind, way_out = said(line, *ranks)
    assert kind == "gpu_shared"
    assert "LOCAL_RANK" in way_out


def test_of_several_processes_on_the_gpu_one_that_is_a_rank_tells() -> None:
    line = oom(others="Process 70 has 9.89 GiB memory in use. Process 991 has 35.03 GiB memory in use. ")
    ranks = [{"rank": 3, "pid": 980, "program_pid": 981}, {"rank": 2, "pid": 990, "program_pid": 991}]
    assert said(line, *ranks)[0] == "gpu_shared"
    kind, way_out = said(line)
    assert kind == "gpu_busy"
    assert "Other processes held 44.9 GiB" in way_out
    assert "LOCAL_RANK" in way_out


def test_a_small_neighbour_or_one_whose_memory_would_not_be_enough_is_not_to_blame() -> None:
    assert said(oom(others="Process 991 has 512.00 MiB memory in use. "))[0] == "oom"
    assert said(oom(asked="40.00", others="Process 991 has 2.00 GiB memory in use. "))[0] == "oom"


@pytest.mark.parametrize(
    "line",
    [
        "E1129 10:00:00.1 12 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 0",
        "  traceback : Signal 9 (SIGKILL) received by PID 4711",
        "[2026-11-29 10:00:00,000] [ERROR] [launch.py:325:sigkill_handler] exits with return code = -9",
    ],
)
def test_sigkill_is_probably_main_memory(line: str) -> None:
    kind, way_out = said(line)
    assert kind == "killed"
    assert "main memory" in way_out
    assert "Otherwise" in way_out


@pytest.mark.parametrize(
    ("line", "kind", "way_out"),
    [
        ("n1:9:9 [0] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
         "memlock", "LimitMEMLOCK"),
        ("n1:9:9 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found", "network_interface", "IFNAME"),
        ("RuntimeError: [enforce fail] Unable to find address for: ib0", "network_interface", "ip -br"),
        ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
         "rendezvous", "1 of 2 came"),
        ("DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
         "(localhost, 29500).", "rendezvous", "Trying again cannot help"),
        ("AssertionError: num_layers value from checkpoint (32) is not equal to the input argument value (24).",
         "checkpoint_mismatch", "num_layers: 32, this job has 24"),
        ("ZeROError: The checkpoint being loaded used a DP world size of 8 but "
         "the current world size is 4.", "checkpoint_mismatch", "DP world size: 8, this job has 4"),
        ("RuntimeError: (TP, PP) mismatch after resume ((2, 4) vs (4, 2) from checkpoint): not supported",
         "checkpoint_mismatch", "TP, PP: (4, 2), this job has (2, 4)"),
        ("[0] init.cc:1 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device c1000", "gpu_shared",
         "Ranks 0 and 1"),
        ("wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login", "wandb", "WANDB_API_KEY"),
        (f"{TRACE}{FRAME}FileNotFoundError: [Errno 2] No such file: '/s/iter_0000600/mp_rank_03/model_optim_rng.pt'",
         "checkpoint_load", "Either the job differs"),
        (f"{TRACE}RuntimeError: CUDA error: invalid device ordinal", "crash", "as many ranks on a node as it has GPUs"),
        (f"{TRACE}RuntimeError: DataLoader worker (pid(s) 41, 42) exited unexpectedly", "crash", "num_workers=0"),
        (f"{TRACE}ModuleNotFoundError: No module named 'flash_attn'", "crash", "lacks this module"),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "device_assert", "vocab_size"),
        ("bash: line 3: torchrun: command not found", "no_program", "activate the training environment"),
        ("_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two "
         "options", "checkpoint_load", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
        (f"{TRACE}{FRAME}_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed the default",
         "checkpoint_load", "Unsupported operand"),
        (f"{TRACE}DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
         "key-value store by key '0', but store->get('0') got error: Socket Timeout", "hung", "raise the limit"),
        ("RuntimeError: Missing key in checkpoint state_dict: loader.dp_rank_15.", "checkpoint_mismatch",
         "holds no loader.dp_rank_15, which"),
        (f"{TRACE}{FRAME}ValueError: Cannot merge two lists with different lengths (1 and 5, encountered at (0,))",
         "checkpoint_mismatch", "fully-reshardable"),
        (f"{TRACE}{FRAME}AssertionError: OptimizerParamScheduler: class input value 640 and checkpointvalue 384 for "
         "total number of iterations do not match", "checkpoint_mismatch", "--override-opt-param-scheduler"),
        ("Unable to load optimizer from checkpoint /s/x.pt. Specify --no-load-optim or --finetune to prevent "
         "attempting to load the optimizer state, exiting ...", "checkpoint_mismatch", "--no-load-optim"),
        (f"{TRACE}ValueError: Can't find a valid checkpoint at /s/out/checkpoint-500", "checkpoint_load",
         "save_only_model"),
        (f'{TRACE}ValueError: Trying to set a tensor of shape torch.Size([32000, 4096]) in "weight" (which has shape '
         "torch.Size([0])), this look incorrect.", "checkpoint_mismatch", "GatheredParameters"),
        ("\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([32001, 64]) from checkpoint, the "
         "shape in current model is torch.Size([32000, 64]).", "checkpoint_mismatch", "vocabulary"),
        (f"{TRACE}RuntimeError: decoder world_size (4) is not divisible by expert_tensor_model_pipeline_parallel size "
         "(8)", "bad_arguments", "refuses an argument"),
        (f"{TRACE}AssertionError: num_layers should be divisible by pipeline_model_parallel_size", "bad_arguments",
         "refuses an argument"),
        ("AssertionError: Check batch related parameters. train_batch_size is not", "bad_arguments", "recipe"),
        ("RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error", "rendezvous",
         "GLOO_SOCKET_IFNAME"),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:34567: Connection "
         "refused", "rendezvous", "here 127.0.1.1"),
        (f"{TRACE}torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "rendezvous", "--nnodes"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error\nLast error:\n"
         "Net : Connect to 10.0.0.9<54263> failed : No route to host", "nccl", "NCCL_SOCKET_IFNAME"),
        (f"{TRACE}torch.distributed.DistBackendError: NCCL error in: x.cpp:1, internal error\nLast error:\n"
         "Message truncated : received 1024 bytes instead of 256", "crash", "different versions of NCCL"),
        ("n1:1:1 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device", "shm_full",
         "--shm-size"),
        ("[W] Sending process 7 closing signal SIGTERM\nfailed (exitcode: -7) local_rank: 0 (pid: 8)", "crash",
         "/dev/shm"),
        ("[h1:3039 :0:3095] Caught signal 7 (Bus error: nonexistent physical address)", "crash", "/dev/shm"),
        ("  traceback : Signal 11 (SIGSEGV) received by PID 6421", "crash", "PYTHONFAULTHANDLER"),
        (f"{TRACE}requests.exceptions.ConnectionError: HTTPSConnectionPool(host='blob.example.net', port=443): Max "
         "retries exceeded with url: /x.tiktoken (Caused by NameResolutionError(\"Failed to resolve 'blob.example.net' "
         "([Errno -3] Temporary failure in name resolution)\"))", "hub", "TIKTOKEN_CACHE_DIR"),
        (f"{TRACE}LookupError: \n****\n  Resource punkt not found.\n", "crash", "NLTK_DATA"),
        (f"{TRACE}ConnectionError: Couldn't reach 'allenai/c4' on the Hub (LocalEntryNotFoundError)", "hub", "paths"),
        (f"{TRACE}x.OfflineModeIsEnabled: Cannot reach https://huggingface.co/api: offline mode is enabled.", "hub",
         "paths"),
        (f"{TRACE}OSError: You are trying to access a gated repo.", "crash", "HF_TOKEN"),
        (f"{TRACE}RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "crash",
         "no memory left for cuBLAS"),
        (f"{TRACE}ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable "
         "MASTER_ADDR expected, but not set", "crash", "torchrun"),
        (f"{TRACE}ValueError: Some specified arguments are not used by the HfArgumentParser: ['--x']", "bad_arguments",
         "refuses an argument"),
        ("n1:9:9 [0] net.cc:100 NCCL WARN Error: network IB not found.", "network_interface", "NCCL_IB_HCA"),
        (f"{TRACE}AssertionError: One or both of the .idx and .bin files cannot be found at the path prefix /d/text",
         "crash", "all nodes share"),
        ("srun: error: Task launch for StepId=4711.0 failed on node n2: Invalid job credential", "step_refused",
         "--exclude"),
        (f"{TRACE}RuntimeError: Using hostfile at hosts but host=n2 was not reachable via ssh. If you are", "no_ssh",
         "srun"),
        (f"{TRACE}RuntimeError: launcher 'pdsh' not installed.", "no_ssh", "srun"),
        (f"{TRACE}op_builder.builder.MissingCUDAException: CUDA_HOME does not exist", "crash", "CUDA_HOME"),
    ],
)  # fmt: skip
def test_what_a_line_shows_is_what_the_advice_follows_from(line: str, kind: str, way_out: str) -> None:
    told, text = said(line)
    assert told == kind
    assert way_out in text


@pytest.mark.parametrize(
    "line",
    [
        "+ ulimit -l unlimited",
        "srun: error: Unable to create step for job 4711: Job/step already completing or completed",
        "wandb: WARNING Path /home/u/wandb was not writable",
        "ImportError is ignored: No module named apex",
        "Missing keys (not found in the checkpoint):",
        "E1129 torch/_inductor/select_algorithm.py:1134] Runtime error during autotuning: OutOfResources: out of "
        "resource: shared memory, Required: 163840, Hardware limit: 101376. Ignoring this choice.",
        "++ python -c 'import torch; torch.OutOfMemoryError: x'",
        "INFO: again after torch.cuda.OutOfMemoryError, with a micro-batch of 4",
        "(TP, PP) mismatch after resume ((1, 4) vs (2, 2) from checkpoint): RNG state will be ignored",
        "'(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.\"), '(ID: 1)')' "
        "thrown while requesting HEAD https://huggingface.co/gpt2/resolve/main/config.json",
        "WARNING:urllib3:Retrying (Retry(total=2)) after connection broken by 'NewConnectionError(Connection refused)'",
    ],
)
def test_what_only_looks_like_a_cause_is_none(line: str) -> None:
    assert cause_of(line) is None


def test_a_command_that_is_not_found_gives_way_to_what_ended_the_run() -> None:
    assert said(f"bash: module: command not found\n{TRACE}ValueError: bad sample")[0] == "crash"


def test_a_command_that_is_not_found_did_not_end_ranks_that_started() -> None:
    log = "slurm_script: line 12: module: command not found\n{0} (pid: 8)\nx.ChildFailedError:"
    assert said(log.format("failed (exitcode: -11) local_rank: 0"))[0] == "crash"
    assert said(log.format("failed (exitcode: 1) local_rank: 0"))[0] == "crash"


def test_nccls_last_error_is_quoted() -> None:
    log = (
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL "
        "version 2.30.1\n[rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed.\n"
        "[rank0]: Last error:\n[rank0]: socketStartConnect: Connect to 10.0.0.7<51234> failed : Software caused abort"
    )
    record = cause_of(log)
    assert record is not None
    assert record["kind"] == "nccl"
    assert "NCCL's last error: socketStartConnect: Connect to 10.0.0.7" in record["line"]


@pytest.mark.parametrize(
    ("before", "way_out"),
    [
        ("Loading checkpoint shards:  33%|###      | 1/3", "about loading"),
        ("Map (num_proc=8):  12%|#   | 120/1000", "preparing data"),
        ("saving checkpoint at iteration     400 to /scratch/out", "began in a save"),
        ("[INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving /s/mp_rank_00_model_states.pt...", "in a save"),
        (" loading distributed checkpoint from /s/out at iteration 600", "about loading"),
        (" iteration      12/  100 | consumed samples:  96 |", "If it was only slow"),
    ],
)
def test_a_hang_is_told_with_what_the_log_was_doing_before(before: str, way_out: str) -> None:
    log = (LOGS / "h03.log").read_text().splitlines()[-1]
    assert way_out in said(f"{before}\n{log}")[1]


def test_a_crash_of_two_ranks_names_both() -> None:
    trace = (
        '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "t.py", line 3\n[rank{0}]: ValueError: bad\n'
    )
    record = cause_of(trace.format(0) + trace.format(5))
    assert record is not None
    assert sentence(record).startswith("crashed (ranks 0 and 5 on n1): ValueError: bad")


TORCHRUN = (
    "E1129 10:00:01.0 12 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0\n"
    "Traceback (most recent call last):\n"
    '  File "/usr/bin/torchrun", line 8, in <module>\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    "============================================================\n"
    "/run/trainer/train.py FAILED\n"
    "Failures:\n  <NO_OTHER_FAILURES>\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-29_10:00:01\n  exitcode  : 1 (pid: 13)\n"
)
OWN = "data.bin has 86 tokens, a sequence needs 129: give more text"


@pytest.mark.parametrize("steps", ["", "step 3/10 | loss 3.1 | 1 s/step\n"])
@pytest.mark.parametrize("ranks", [[], [{"rank": 0, "node": "n1", "exit_code": 1, "signal": None, "ended_at": 1.0}]])
def test_the_trainers_last_message_is_quoted_and_torchruns_words_are_not(ranks: list[Any], steps: str) -> None:
    log = f"llmlaunch: n1: training with /usr/bin/python3\n{OWN}\n{steps}{TORCHRUN}"
    record = with_last_message(likelier(cause_from_log(scan(log), "n1", ranks), cause_from_ranks("n1", ranks)), log)
    assert record is not None
    assert record["kind"] == "crash"
    assert record["line"].endswith(OWN)
    assert "ChildFailedError" not in sentence(record)


def test_of_a_message_of_several_lines_that_with_both_sides_is_told_in_a_loader_too() -> None:
    record = cause_of(
        f"{TRACE}{FRAME}RuntimeError: Error(s) in loading state_dict for GPTModel:\n"
        "\tsize mismatch for layers.0.qkv.weight: copying a param with shape torch.Size([768, 64]) from checkpoint, "
        "the shape in current model is torch.Size([1536, 64])."
    )
    assert record is not None
    assert record["kind"] == "checkpoint_mismatch"
    assert "The checkpoint has layers.0.qkv.weight: [768, 64], this job has [1536, 64]" in advice(record)


def test_a_rank_that_torchrun_killed_after_the_first_failure_was_not_out_of_memory() -> None:
    end = "  exitcode  : {0} (pid: 7)\n  traceback : {1}\n"
    killed, failed = end.format(-9, "Signal 9 (SIGKILL) received by PID 7"), end.format(1, "To enable traceback see:")
    listed = "ChildFailedError:\nFailures:\n[1]:\n{0}------\nRoot Cause (first observed failure):\n[0]:\n{1}======"
    assert said(listed.format(killed, failed))[0] == "crash"
    assert said(listed.format(killed, killed))[0] == "killed"


@pytest.mark.parametrize("before", ["[default7]:[rank7]: ", "10.0.0.9: [rank7]: ", "n2: "])
def test_launchers_that_begin_each_line_do_not_hide_an_exception(before: str) -> None:
    lines = (TRACE + FRAME + "KeyError: 'state'").splitlines()
    record = cause_of("\n".join(before + line for line in lines))
    assert record is not None
    assert record["kind"] == "checkpoint_mismatch"
    assert record["rank"] == (7 if "rank7" in before else None)
    assert record["line"] == "KeyError: 'state'"


def test_in_a_container_torch_takes_itself_for_another_process() -> None:
    line = oom(others="Process 3456 has 78.00 GiB memory in use. ", unallocated="58.00").replace("this process has", "")
    assert said(line)[0] == "oom"
    line = oom(others="Process 3456 has 58.00 GiB memory in use. Process 9 has 20.60 GiB memory in use. ")
    kind, way_out = said(line.replace("this process has", ""))
    assert kind == "gpu_busy"
    assert "Process 3456 held 58.0 GiB" in way_out


def test_tracebacks_of_two_hosts_in_turn_are_kept_apart() -> None:
    ours, theirs = (TRACE + FRAME + "KeyError: 'state'").splitlines(), (TRACE + "ValueError: bad sample").splitlines()
    log = "\n".join([f"n2: {ours[0]}", f"n3: {theirs[0]}", f"n2: {ours[1]}", f"n3: {theirs[1]}", f"n2: {ours[2]}"])
    assert said(log)[0] == "checkpoint_mismatch"


def test_of_very_many_crashes_the_last_is_known_whatever_came_between() -> None:
    crashes = "".join(f"{TRACE}ValueError: sample {number}\n" for number in range(MOST_OF_KIND + 5))
    log = f"{crashes}[rank0]: ChildFailedError\n1 nccl: Connection closed by peer\n{TRACE}ValueError: the last"
    record = cause_of(log)
    assert record is not None
    assert record["line"] == "ValueError: the last"
    assert len(scan(log)) <= MOST_OF_KIND + 2
