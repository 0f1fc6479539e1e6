"""The telling lines of a log: real messages of torch, NCCL, CUDA, the kernel and SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.causes.log_scan import device_numbers, read_log, scan

MIB, GIB = 2**20, 2**30
NOW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 25.31 GiB. GPU 0 has a total capacity of 79.25 GiB "
    "of which 24.65 GiB is free. Including non-PyTorch memory, this process has 54.59 GiB memory in use. Of the "
    "allocated memory 23.57 GiB is allocated by PyTorch, with 9.93 GiB allocated in private pools (e.g., CUDA Graphs), "
    "and 30.41 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
CAPACTY = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 3 has a total capacty of 23.69 "
    "GiB of which 7.11 GiB is free. Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch memory, this "
    "process has 16.31 GiB memory in use. Of the allocated memory 16.01 GiB is allocated by PyTorch, and 7.47 MiB is "
    "reserved by PyTorch but unallocated."
)
ONCE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 46.00 MiB (GPU 0; 2.00 GiB total capacity; 54.79 MiB already "
    "allocated; 0 bytes free; 74.00 MiB reserved in total by PyTorch)"
)


def only(text: str) -> tuple[str, str]:
    """Kind and line of a log's one telling line."""
    (hit,) = scan(text)
    return hit.kind, hit.line


def test_todays_message_gives_all_its_numbers() -> None:
    assert device_numbers(NOW) == {
        "asked_bytes": int(25.31 * GIB), "gpu": 0, "total_bytes": int(79.25 * GIB), "free_bytes": int(24.65 * GIB),
        "process_bytes": int(54.59 * GIB), "allocated_bytes": int(23.57 * GIB), "private_pools_bytes": int(9.93 * GIB),
        "unallocated_bytes": int(30.41 * GIB), "reserved_bytes": int(23.57 * GIB) + int(30.41 * GIB),
        "non_torch_bytes": int(54.59 * GIB) - int(23.57 * GIB) - int(30.41 * GIB),
    }  # fmt: skip


def test_the_misspelt_one_with_a_neighbour_on_the_gpu() -> None:
    numbers = device_numbers(CAPACTY)
    assert numbers["gpu"] == 3
    assert numbers["total_bytes"] == int(23.69 * GIB)
    assert numbers["other_processes_bytes"] == 256 * MIB
    assert numbers["non_torch_bytes"] / MIB == pytest.approx(299.7, abs=0.1)


def test_torch_before_2_1() -> None:
    assert device_numbers(ONCE) == {
        "asked_bytes": 46 * MIB, "gpu": 0, "total_bytes": 2 * GIB, "free_bytes": 0, "allocated_bytes": int(54.79 * MIB),
        "reserved_bytes": 74 * MIB,
    }  # fmt: skip


def test_a_message_that_a_logger_broke_into_lines() -> None:
    (hit,) = scan("[rank5]: " + NOW.replace(". ", ".\n[rank5]: "))
    assert (hit.kind, hit.rank) == ("oom", 5)
    assert hit.numbers["unallocated_bytes"] == int(30.41 * GIB)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (NOW, "oom"),
        (CAPACTY, "oom"),
        (ONCE, "oom"),
        ("torch.AcceleratorError: CUDA error: out of memory", "oom"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "oom"),
        ("n1:71:903 [2] enqueue.cc:9 NCCL WARN Cuda failure 'out of memory'", "oom"),
        ("n1:71:903 [0] NCCL WARN Failed to CUDA calloc 4194304 bytes", "oom"),
        ("ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 'out of memory'", "oom"),
        ("cudaMalloc failed: out of memory", "oom"),
        ("thrust::system::detail::bad_alloc: std::bad_alloc: cudaErrorMemoryAllocation: out of memory", "oom"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host_oom"),
        ("std::runtime_error: Workspace can't be allocated, not enough memory", "oom"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
         "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)", "host_oom"),
        ("MemoryError", "host_oom"),
        ("OSError: [Errno 12] Cannot allocate memory", "host_oom"),
        ("n1:71:903 [0] NCCL WARN Failed to CUDA host alloc 65536 bytes", "host_oom"),
        ("slurmstepd: error: Detected 2 oom_kill events in StepId=7.0. Some of the step tasks have been OOM Killed.",
         "host_oom"),
        ("slurmstepd-n1: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been "
         "killed by the cgroup out-of-memory handler.", "host_oom"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "ecc"),
        ("NVRM: Xid (PCI:0000:06:00): 95, pid=7, Uncontained: FBHUB", "ecc"),
        ("NVRM: Xid (PCI:0000:06:00): 79, pid=7, GPU has fallen off the bus.", "gpu_lost"),
        ("NVRM: Xid (PCI:0000:06:00): 119, pid=7, Timeout after 6s of waiting for RPC response from GPU0 GSP!", "xid"),
        ("nvidia-smi: Unable to determine the device handle for GPU0: GPU is lost.", "gpu_lost"),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "nvlink"),
        ("Failed to initialize NVML: Driver/library version mismatch", "driver"),
        ("n1:71:90 [0] NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic error", "nccl"),
        ("n1:71:90 [0] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)", "nccl"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/iter_10'", "disk_full"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk_full"),
        ("step 1201: the loss is nan; lower the learning rate or check the data", "bad_loss"),
        ("Unexpected result nan on rank 3 at iteration #1201 invocation #1 "
         "(message='found NaN in local forward loss calculation')", "bad_loss"),
        ("RuntimeError: Rank 3, node n1, device 0, iteration 1201: Unexpected result inf "
         "(message='found Inf in local grad norm for bucket #0 in backward pass before data-parallel communication "
         "collective')", "bad_loss"),
        # NCCL 2.30, torch 2.13's DataLoader and MapAllocator, Python
        ("n1:71:90 [2] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12Cd to 33030532 bytes, "
         "error: No space left on device (28)", "shm_full"),
        ("n1:71:90 [2] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Ab12Cd (size 9637888), "
         "error: No space left on device (28)", "shm_full"),
        ("RuntimeError: DataLoader worker (pid 81) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory. Please try to raise your shared memory limit.", "shm_full"),
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
         "shm_full"),
        ("RuntimeError: unable to open shared memory object </torch_81_3> in read-write mode: No space left on device "
         "(28)", "shm_full"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "shm_full"),
        ("RuntimeError: unable to open shared memory object </torch_81_3> in read-write mode: Too many open files (24)",
         "open_files"),
        ("OSError: [Errno 24] Too many open files", "open_files"),
        # enroot 4.1.2 by way of pyxis 0.24.0
        ("slurmstepd-n1: error: pyxis:     [ERROR] File already exists: /run/enroot/pyxis_7.0", "container_busy"),
        ("slurmstepd: error: pyxis:     [ERROR] URL https://nvcr.io/v2/x/manifests/1 returned error code: 429 ",
         "container_busy"),
        ("slurmstepd: error: pyxis:     [ERROR] URL https://nvcr.io/v2/x/manifests/1 returned error code: 503 Service "
         "Unavailable", "container_busy"),
        ("slurmstepd: error: pyxis:     curl: (28) Connection timed out after 30001 milliseconds", "container_busy"),
        ("slurmstepd: error: pyxis:     curl: (22) The requested URL returned error: 429", "container_busy"),
        ("slurmstepd: error: pyxis:     [ERROR] URL https://nvcr.io/v2/x/manifests/1 returned error code: 404 Not "
         "Found", "container"),
        ("slurmstepd: error: pyxis:     [ERROR] No such file or directory: /images/box.sqsh", "container"),
        ("slurmstepd: error: pyxis:     enroot-mount: failed to mount: /lustre at /x/lustre: No such file or directory",
         "container"),
        ("slurmstepd: error: pyxis: --container-mounts: source path does not exist: /lustre", "container"),
        ("slurmstepd: error: pyxis:     Write on output file failed because No space left on device", "disk_full"),
        # Apptainer 1.4
        ("FATAL:   could not open image /images/box.sif: failed to retrieve path for /images/box.sif: lstat /images: "
         "no such file or directory", "container"),
        ("FATAL:   container creation failed: mount hook function failure: mount /lustre->/lustre error: while "
         "mounting /lustre: mount source /lustre doesn't exist", "container"),
        ("FATAL:   Unable to handle docker://x/y uri: failed to get checksum for docker://x/y: reading manifest latest "
         "in docker.io/x/y: errors: denied: requested access to the resource is denied", "container"),
        ("FATAL:   Unable to handle docker://x/y uri: failed to get checksum for docker://x/y: pinging container "
         "registry registry-1.docker.io: Get \"https://registry-1.docker.io/v2/\": net/http: TLS handshake timeout",
         "container_busy"),
        ("FATAL:   Unable to handle docker://x/y uri: while building SIF from layers: conveyor failed to get: reading "
         "blob: toomanyrequests: You have reached your pull rate limit", "container_busy"),
        ("FATAL:   Unable to handle docker://x/y uri: while building SIF from layers: packer failed to pack: write "
         "/home/a/.apptainer/cache: disk quota exceeded", "disk_full"),
        # torch 2.13: no failure of the network
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
         "port: 20555, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "port_taken"),
        ("RuntimeError: [enforce fail at tcp/listener.cc:33] bind: Address already in use", "port_taken"),
        ("Megatron-LM refuses its arguments: unrecognized arguments: --foo 3", "bad_arguments"),
        ("pretrain_gpt.py: error: unrecognized arguments: --foo 3", "bad_arguments"),
        ("deepspeed_llama.py: error: argument --adapter-rank: invalid int value: 'x'", "bad_arguments"),
    ],
)  # fmt: skip
def test_what_a_line_means(line: str, kind: str) -> None:
    assert [hit.kind for hit in scan(line) if not hit.consequence] == [kind]


CUDA_802 = (
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
)
CONFIG = "https://huggingface.co/meta-llama/Meta-Llama-3-8B/resolve/main/config.json"
NO_IPV6 = (
    "The IPv6 network addresses of (node1, 29500) cannot be retrieved (gai error: -2 - Name or service not known)."
)


@pytest.mark.parametrize(
    ("line", "kind", "sick"),
    [
        ("RuntimeError: No CUDA GPUs are available", "driver", True),
        ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.", "driver", True),
        ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "driver", True),
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", "driver", True),
        ("torch.AcceleratorError: CUDA error: system not yet initialized", "driver", True),
        ("torch.AcceleratorError: CUDA error: no CUDA-capable device is detected", "driver", True),
        (CUDA_802, "driver", True),
        ("Failed to initialize NVML: Unknown Error", "driver", True),
        ("NVRM: GPU 0000:06:00.0: RmInitAdapter failed! (0x62:0x40:1777)", "driver", True),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded", "driver", True),
        ("OSError: [Errno 5] Input/output error: '/lustre/data/text_document.bin'", "file_system", True),
        ("OSError: [Errno 116] Stale file handle", "file_system", True),
        ("OSError: [Errno 121] Remote I/O error", "file_system", True),
        ("OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'", "file_system", True),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable: '/nfs/x.lock'", "file_system", True),
        ("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/gcs'", "file_system", True),
        ("OSError: [Errno 19] No such device: '/data'", "file_system", True),
        ("bash: /home/me/train.sh: Stale file handle", "file_system", True),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "name_resolution", True),
        (f"torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of "
         f"(node1, 29500). {NO_IPV6}", "name_resolution", True),
        ("httpx.ConnectError: [Errno -3] Temporary failure in name resolution", "hub", False),
        ("urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded "
         "with url: /x (Caused by NameResolutionError(\"Failed to resolve 'huggingface.co' ([Errno -2] Name or service "
         "not known)\"))", "hub", False),
        (f"requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: {CONFIG}", "hub", False),
        (f"huggingface_hub.errors.HfHubHTTPError: 503 Server Error: Service Unavailable for url: {CONFIG}",
         "hub", False),
        (f"httpx.HTTPStatusError: Server error '502 Bad Gateway' for url '{CONFIG}'", "hub", False),
        (f"429 Too Many Requests for url: {CONFIG}.", "hub", False),
        ("429 Too Many Requests: you have reached your 'api' rate limit.", "hub", False),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the "
         "cached files.", "hub", False),
    ],
)  # fmt: skip
def test_what_another_try_elsewhere_may_mend(line: str, kind: str, sick: bool) -> None:
    hits = [hit for hit in scan(f"Traceback (most recent call last):\n  File\n{line}") if not hit.consequence]
    assert [(hit.kind, hit.sick) for hit in hits] == [(kind, sick)]


@pytest.mark.parametrize(
    "line",
    [
        "UserWarning: CUDA initialization: Found no NVIDIA driver on your system. Please check that you have an NVIDIA "
        "GPU and installed a driver (Triggered internally at c10/cuda/CUDAFunctions.cpp:109.)",
        f"[W1122 12:00:00.1 socket.cpp:755] [c10d] {NO_IPV6}",
        f"HTTP Error 429 thrown while requesting GET {CONFIG}",
        "wandb: Network error (ConnectTimeout), entering retry loop.",
        "CUDA OutOfMemoryError encountered during tensors merging. Switching (Error: CUDA out of memory.)",
        "llmlaunch: status.json not written: No space left on device",
        "llmlaunch: n1: cannot write the done marker (No space left on device); the job will count as failed",
        " [2026-11-21] iteration 3/ 10 | consumed samples: 24 | lm loss: 1.0 |",
    ],
)
def test_what_the_program_survives_is_no_cause(line: str) -> None:
    assert scan(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "OSError: [Errno 107] Transport endpoint is not connected",  # of a socket: its peer has gone
        f"huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. Repository Not Found for url: {CONFIG}",
        f"huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo for url {CONFIG}",
    ],
)
def test_what_every_node_would_meet_stays_a_crash(line: str) -> None:
    (hit,) = scan(f"Traceback (most recent call last):\n  File\n{line}")
    assert (hit.kind, hit.sick) == ("crash", False)


def test_pyxis_own_words_on_a_failure_say_less_than_enroots() -> None:
    """Seen with pyxis 0.24.0 and enroot 4.1.2, where a folder was left behind."""
    lines = [
        "slurmstepd-n1: pyxis: creating container filesystem: pyxis_7.0",
        "slurmstepd-n1: error: pyxis: failed to create container filesystem for image: /box.sqsh",
        "slurmstepd-n1: error: pyxis: printing enroot log file:",
        "slurmstepd-n1: error: pyxis:     [ERROR] File already exists: /run/enroot/data/user-0/pyxis_7.0",
    ]
    assert [hit.kind for hit in scan("\n".join(lines)) if not hit.consequence] == ["container_busy"]


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: unspecified launch failure",
        "NVRM: Xid (PCI:0000:06:00): 31, pid=7, MMU Fault",
        "NVRM: Xid (PCI:0000:06:00): 43, pid=7, Ch 00000010",
    ],
)
def test_a_programs_own_mistake_is_no_sick_gpu(line: str) -> None:
    assert not any(hit.sick for hit in scan(f"Traceback (most recent call last):\n  File\n{line}"))


@pytest.mark.parametrize(
    "line",
    [
        "NCCL WARN NET/IB: Got completion from peer 10.0.0.2<5> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=0",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2345",
        "torch.distributed.DistBackendError: NCCL error ... ncclRemoteError: A call failed",
        "[rank1]:[E1121 12:00:00 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: Work",
        "torch.distributed.DistBackendError: ncclSystemError: socketProgress: Connection closed by remote peer",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15",
    ],
)
def test_news_of_anothers_end_is_a_consequence(line: str) -> None:
    hits = scan(f"Traceback (most recent call last):\n  File\n{line}")
    assert hits
    assert all(hit.consequence for hit in hits)


def test_a_chain_of_exceptions_is_told_by_its_last_but_never_hides_a_sign() -> None:
    traceback = "Traceback (most recent call last):\n  File"
    during = "During handling of the above exception, another exception occurred:"
    chain = f"{traceback}\n{{}}\n\n{during}\n\n{traceback}\nRuntimeError: training failed"
    assert only(chain.format("KeyError: 'loss'")) == ("crash", "RuntimeError: training failed")
    assert only(chain.format(NOW))[0] == "oom"


def test_ranks_that_write_at_the_same_time_are_told_apart() -> None:
    text = (
        "[rank0]: Traceback (most recent call last):\n[rank1]: Traceback (most recent call last):\n"
        "[rank1]:   File a\n[rank0]:   File b\n[rank1]: ValueError: one\n[rank0]: ValueError: zero"
    )
    assert [(hit.rank, hit.line) for hit in scan(text)] == [(1, "ValueError: one"), (0, "ValueError: zero")]


def test_the_programs_own_text_in_a_traceback_says_nothing() -> None:
    quoted = "    raise RuntimeError('CUDA out of memory. Tried to allocate')"
    assert only(f"Traceback (most recent call last):\n{quoted}\nKeyError: 1") == ("crash", "KeyError: 1")


def test_pinned_memory_is_the_hosts() -> None:
    text = "Traceback (most recent call last):\n    x = t.pin_memory()\nRuntimeError: CUDA error: out of memory"
    assert only(text)[0] == "host_oom"


def test_colours_progress_bars_and_damaged_text(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"\xff\xfe 10%|#\r 20%|##\r\x1b[31m[rank2]: " + NOW.encode() + b"\x1b[0m\r\n\x80")
    (hit,) = scan(read_log(log))
    assert (hit.kind, hit.rank, hit.line[:26]) == ("oom", 2, "torch.OutOfMemoryError: CU")


def test_of_a_long_log_the_ends_are_read(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    middle = b"x" * (2**20 - 9) + b"\n" + b"MemoryError\n" + b"y" * (5 * 2**20)
    log.write_bytes(b"GPU is lost\n" + middle + b"\n" + ONCE.encode())
    assert [hit.kind for hit in scan(read_log(log))] == ["gpu_lost", "oom"]
    assert read_log(tmp_path / "none.log") == ""


def test_what_is_kept_of_a_line_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "ValueError")
    error = f"ValueError: hf_abcdefgh\x07 of \x1b[31mred\x1b[0m \x9b2J {'x' * 500}"
    kind, line = only(f"Traceback (most recent call last):\n{error}")
    assert (kind, line[:33], len(line)) == ("crash", "ValueError: ***  of red  2J xxxxx", 400)


MEGATRON_FRAME = '  File "/opt/megatron/training/checkpointing.py", line 1603, in load_checkpoint'
BRIDGE_FRAME = '  File "/opt/megatron/bridge/training/checkpointing.py", line 1720, in _load_checkpoint_from_path'
DEEPSPEED_FRAME = '  File "/v/site-packages/deepspeed/runtime/engine.py", line 4535, in load_checkpoint'
OTHER_FRAME = '  File "/opt/megatron/training/training.py", line 900, in pretrain'


def kinds_of_traceback(*lines: str) -> list[str]:
    return [hit.kind for hit in scan("\n".join(["Traceback (most recent call last):", *lines]))]


@pytest.mark.parametrize("frame", [MEGATRON_FRAME, BRIDGE_FRAME, DEEPSPEED_FRAME])
def test_an_exception_out_of_the_loading_of_a_checkpoint_is_no_damage_by_itself(frame: str) -> None:
    odd = "RuntimeError: Tensors must have the same layout"
    assert kinds_of_traceback(OTHER_FRAME, frame, "    x()", odd) == ["checkpoint_load"]
    assert kinds_of_traceback(OTHER_FRAME, "    load_checkpoint()", odd) == ["crash"]
    assert kinds_of_traceback(frame, "RuntimeError: PytorchStreamReader failed reading zip archive") == ["checkpoint"]
    assert kinds_of_traceback(frame, "KeyError: 'optimizer'") == ["checkpoint_mismatch"]
    assert kinds_of_traceback(OTHER_FRAME, "KeyError: 'optimizer'") == ["crash"]


@pytest.mark.parametrize("line", ["FileNotFoundError: [Errno 2] No such file or directory: 'x'", "TimeoutError"])
def test_what_the_system_raised_while_a_checkpoint_was_loaded_is_not(line: str) -> None:
    assert kinds_of_traceback(MEGATRON_FRAME, line) == ["crash"]


def test_of_a_distributed_load_the_ranks_own_exception_counts() -> None:
    wrapper = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])"
    nested = (wrapper, "Traceback (most recent call last): (RANK 0)", '  File "/v/torch/utils.py", line 9, in reduce')
    assert kinds_of_traceback(MEGATRON_FRAME, *nested, "KeyError: 'model.bias'") == ["crash", "checkpoint_mismatch"]
    stale = "OSError: [Errno 116] Stale file handle: '/scratch/iter_0000100/__0_0.distcp'"
    assert kinds_of_traceback(MEGATRON_FRAME, *nested, stale) == ["crash", "file_system"]


@pytest.mark.parametrize(
    "line",
    [
        "step 1201: the loss is inf; lower the learning rate or check the data",
        "[rank3]: RuntimeError: Rank 3, node n1, device 0, iteration 1201: Unexpected result nan "
        "(message='found NaN in local forward loss calculation')",
    ],
)
def test_a_bad_loss_names_its_step(line: str) -> None:
    (hit,) = scan(line)
    assert (hit.kind, hit.numbers) == ("bad_loss", {"since_step": 1201})


@pytest.mark.parametrize("digits", ["9" * 3000, "1.2.3", "1" + "0" * 30])
def test_a_size_that_cannot_be_read_does_not_hide_the_cause(digits: str) -> None:
    [hit] = scan(f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {digits} GiB. GPU 0 has a total "
                 "capacity of 79.25 GiB of which 1.00 GiB is free.")  # fmt: skip
    assert hit.kind == "oom"
    assert "asked_bytes" not in hit.numbers
    assert hit.numbers["free_bytes"] == GIB


def test_no_number_of_a_log_raises() -> None:
    scan("[rank" + "9" * 3000 + "]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.")
    scan("torch.OutOfMemoryError: CUDA out of memory. GPU " + "9" * 4000)
    scan("NVRM: Xid (PCI:0000:01:00): " + "9" * 4000 + ", pid=1\nNVRM: Xid (PCI:0000:01:00): ²")
