"""Logs of trainers that somebody else launched: what they say of memory and time, in which units, and what they do not
say. Excerpts of real logs are in tests/data/logs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.command_lines.training_log import TrainingLog
from llmlaunch.errors import UserError
from llmlaunch.imports.logs import is_record_file, read_logs
from support.training_logs import (
    LLAMA,
    LOGS,
    OOM,
    megatron_arguments,
    megatron_log,
    megatron_memory,
    megatron_step,
)

GIB, MIB = 2**30, 2**20
Read = Callable[..., TrainingLog]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def one_log(text: str | bytes, name: str = "some.file") -> TrainingLog:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        [log] = read_logs(path)
        return log

    return one_log


def peaks(log: TrainingLog) -> dict[tuple[str, int | None], int | None]:
    return {(peak.kind, peak.rank): peak.peak_bytes for peak in log.peaks}


class TestMegatron:
    def test_a_real_log_tells_its_arguments_and_steps(self) -> None:
        [log] = read_logs(LOGS / "megatron-core-0.19.log")
        assert log.printed_by == {"Megatron-LM"}
        wanted = {"num_layers": 4, "swiglu": True, "tensor_model_parallel_size": 2, "cp_comm_type": ["p2p"]}
        assert {name: log.values[name] for name in wanted} == wanted
        assert log.values["layernorm_epsilon"] == 1e-05
        assert log.values["main_grads_dtype"] == "torch.float32"
        assert log.steps_run == 5
        assert log.step_seconds == pytest.approx((0.7462 + 0.8102) / 2)  # the first of five is left out
        assert log.peaks == ()  # a CPU has no memory of a device

    def test_a_mb_is_2_to_the_20_bytes(self, read: Read) -> None:
        log = read(megatron_log(memory=[megatron_memory(0, 40960.25, 45056.0), megatron_memory(4, 30000.0, 31000.0)]))
        assert peaks(log) == {
            ("allocated", 0): round(40960.25 * MIB),
            ("reserved", 0): 45056 * MIB,
            ("allocated", 4): 30000 * MIB,
            ("reserved", 4): 31000 * MIB,
        }
        first = log.peaks[0]
        assert (first.steps, first.line, first.statistic) == (2, 42, "allocated_bytes.all.peak")
        assert first.rounding_bytes == pytest.approx(0.01 * MIB, abs=1)

    def test_the_device_of_newer_versions_is_a_lower_bound(self, read: Read) -> None:
        line = megatron_memory(0, 100.0, 200.0) + " | total device memory used: 300.00"
        peak = next(peak for peak in read(line).peaks if peak.kind == "device")
        assert peak.peak_bytes == 300 * MIB
        assert "lower bound" in str(peak.note)

    def test_older_versions_print_every_digit(self, read: Read) -> None:
        line = (
            "[Rank 1] (after 100 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.34619140625 |"
            " reserved: 4.0 | max reserved: 4.0"
        )
        log = read(line)
        assert peaks(log)["allocated", 1] == 2.34619140625 * MIB
        assert log.peaks[0].rounding_bytes is None

    def test_a_gb_of_megatron_bridge_is_10_to_the_9_bytes(self, read: Read) -> None:
        line = (
            "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 10.0 |"
            " mem-max-allocated-gigabytes: 45.678 | mem-max-reserved-gigabytes: 50.012 | mem-alloc-retires: 0"
        )
        log = read(line)
        assert peaks(log) == {("allocated", 0): 45_678_000_000, ("reserved", 0): 50_012_000_000}
        assert log.peaks[0].rounding_bytes == 1_000_000

    def test_the_highest_report_of_a_rank_counts(self, read: Read) -> None:
        lines = [megatron_memory(0, 100.0, 200.0, 1), megatron_memory(0, 150.0, 190.0, 2)]
        log = read("\n".join(lines))
        assert peaks(log) == {("allocated", 0): 150 * MIB, ("reserved", 0): 200 * MIB}
        assert [peak.steps for peak in log.peaks] == [2, 2]

    @pytest.mark.parametrize(
        "prefix", ["[rank0]: ", "0: ", "node7: ", "2026-01-02 03:04:05 ", "\x1b[32m", "old 50%|##\r"]
    )
    def test_what_launchers_put_before_lines_changes_nothing(self, read: Read, prefix: str) -> None:
        text = megatron_log(memory=[megatron_memory(0, 40960.0, 45056.0)])
        plain, prefixed = read(text), read("".join(f"{prefix}{line}\r\n" for line in text.splitlines()))
        assert plain.values == prefixed.values
        assert plain.values["hidden_size"] == 4096
        assert peaks(plain) == peaks(prefixed)
        assert plain.step_seconds == prefixed.step_seconds

    def test_other_ranks_may_print_between_the_arguments(self, read: Read) -> None:
        lines = megatron_arguments(LLAMA)
        mixed = [text for line in lines for text in (line, "[rank3]: UserWarning: a word ..... 7")]
        values = read("\n".join([*mixed, megatron_step(2, 1.0)])).values
        assert values == read("\n".join([*lines, megatron_step(2, 1.0)])).values

    def test_a_job_that_began_again_in_its_log_is_another_run(self, tmp_path: Path) -> None:
        path = tmp_path / "slurm-1.out"
        second = megatron_log({**LLAMA, "micro_batch_size": 2}, [megatron_memory(0, 200.0, 300.0)])
        path.write_text(megatron_log(memory=[megatron_memory(0, 100.0, 150.0)]) + second)
        logs = read_logs(path)
        assert [log.values["micro_batch_size"] for log in logs] == [1, 2]
        assert [peaks(log)["allocated", 0] for log in logs] == [100 * MIB, 200 * MIB]
        assert len({log.identity for log in logs}) == 2
        assert logs[1].first_line > logs[0].first_line == 1


class TestOutOfMemory:
    def test_each_rank_that_died_has_its_numbers(self, read: Read) -> None:
        lines = [f"[rank{rank}]: {OOM}" for rank in (3, 1)]
        log = read(megatron_log() + "Traceback (most recent call last):\n" + "\n".join(lines))
        assert [death.rank for death in log.deaths] == [3, 1]
        numbers = log.deaths[0].numbers
        assert numbers["asked_bytes"] == 2 * GIB
        assert numbers["allocated_bytes"] == 70 * GIB
        assert numbers["reserved_bytes"] == 75 * GIB
        assert log.deaths[0].text.startswith("torch.OutOfMemoryError: CUDA out of memory")

    def test_one_that_training_survived_is_no_end(self, read: Read) -> None:
        steps = "\n".join(megatron_step(n, 1000.0) for n in range(7, 10))
        assert read(f"{megatron_log()}{OOM}\n{steps}\n").deaths == ()

    def test_main_memory_is_another_matter(self, read: Read) -> None:
        assert read(megatron_log() + "RuntimeError: [enforce fail] DefaultCPUAllocator: out of memory\n").deaths == ()


class TestDeepSpeed:
    def test_a_real_log_tells_its_batch_and_steps(self) -> None:
        [log] = read_logs(LOGS / "deepspeed-0.19.log")
        assert log.printed_by == {"DeepSpeed"}
        facts = log.facts
        assert (facts.data, facts.micro_batch_size, facts.global_batch_size, facts.zero_stage) == (1, 4, 8, 2)
        assert log.steps_run == 10
        # reports every two steps, at .030, .113, .205, .313 and .405; the first interval is left out
        assert log.step_seconds == pytest.approx(0.046)
        assert peaks(log) == {("allocated", 0): round(0.42 * GIB)}
        assert log.peaks[0].line > 20  # not what was said before training

    def test_a_gb_is_2_to_the_30_bytes_and_the_highest_line_counts(self, read: Read) -> None:
        usage = "MA {} GB         Max_MA {} GB         CA {} GB         Max_CA {} GB "
        lines = ["before", usage.format(1, 99, 1, 99), "[INFO] [utils.py:781:see_memory_usage] Engine after forward"]
        lines += [usage.format(10.0, 30.25, 12.0, 34), "Engine after step", usage.format(10.0, 28.0, 12.0, 33)]
        log = read("\n".join(lines))
        assert peaks(log) == {("allocated", 0): round(30.25 * GIB), ("reserved", 0): 34 * GIB}
        assert [peak.rounding_bytes for peak in log.peaks] == [GIB // 100, GIB]

    def test_its_pipeline_engine_times_every_report(self, read: Read) -> None:
        lines = [f"steps: {n} loss: 1.5 iter time (s): {t} samples/sec: 9.0" for n, t in ((10, 9.0), (20, 2.0))]
        assert read("\n".join(lines)).step_seconds == 2.0

    def test_its_timer_counts_whole_batches(self, read: Read) -> None:
        lines = ["[INFO] [config.py:1:print]   train_batch_size ............. 64"]
        lines += ["epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=16.0, CurrSamplesPerSec=15.0,"]
        log = read(" ".join(lines[1:]).join([lines[0] + "\n", " MemAllocated=10.0GB, MaxMemAllocated=20.5GB"]))
        assert log.step_seconds == 4.0
        assert peaks(log) == {("allocated", 0): round(20.5 * GIB)}


def memory_metrics() -> dict[str, int]:
    """What TrainerMemoryTracker adds on a GPU: 1 GiB before, 15 more by __init__, 20 by training, 5 above its end."""
    return {
        "before_init_mem_gpu": GIB,
        "init_mem_gpu_alloc_delta": 15 * GIB,
        "init_mem_gpu_peaked_delta": 0,
        "train_mem_gpu_alloc_delta": 20 * GIB,
        "train_mem_gpu_peaked_delta": 5 * GIB,
    }


class TestTransformers:
    def test_the_peak_is_the_sum_of_what_was_added(self, read: Read) -> None:
        state = json.loads((LOGS / "trainer_state.json").read_text())
        state["log_history"][-1] |= memory_metrics()
        log = read(json.dumps(state, indent=2), "renamed")
        assert log.printed_by == {"Transformers"}
        assert peaks(log) == {("allocated", 0): 41 * GIB}
        assert log.steps_run == 8
        assert log.step_seconds == pytest.approx(4.7994 / 8)
        assert log.facts.micro_batch_size == 4

    def test_a_difference_without_its_base_is_no_peak(self, read: Read) -> None:
        results = {**memory_metrics(), "train_runtime": 10.0, "train_steps_per_second": 2.0}
        del results["before_init_mem_gpu"]
        log = read(json.dumps(results, indent=4))
        assert log.peaks == ()
        assert "before_init_mem_gpu" in log.notes[0]
        assert log.step_seconds == 0.5

    def test_stdout_says_the_same_in_mib(self, read: Read) -> None:
        values = {name: f"{size >> 20}MB" for name, size in memory_metrics().items()}
        block = "".join(f"  {name: <28} = {value:>12}\n" for name, value in values.items())
        log = read(f"***** train metrics *****\n{block}  train_runtime                = 0:00:10.00\n")
        assert peaks(log) == {("allocated", 0): 41 * GIB}
        assert log.peaks[0].rounding_bytes == 4 * MIB

    @pytest.mark.parametrize("quote", ["", "'"])
    def test_the_last_dictionary_tells_the_speed(self, read: Read, quote: str) -> None:
        dictionary = f"{{'train_runtime': {quote}99.5{quote}, 'train_steps_per_second': {quote}0.25{quote}}}"
        log = read(f" 50%|##   | 1/2 [00:01<00:01]\r100%|#####| 2/2 [00:02<00:00]\r      {dictionary}\n")
        assert log.step_seconds == 4.0


class TestWandb:
    def test_system_metrics_are_sampled_peaks_of_a_device(self, read: Read) -> None:
        rows = [
            {"_timestamp": 1.0, "system.gpu.0.memoryAllocatedBytes": 50 * GIB, "system.gpu.0.memoryAllocated": 62.5},
            {"_timestamp": 16.0, "system.gpu.1.memoryAllocatedBytes": 60 * GIB, "system.gpu.1.memoryAllocated": 75.0},
            {"_timestamp": 31.0, "system.gpu.process.0.memoryAllocatedBytes": 99 * GIB},
        ]
        log = read("".join(json.dumps(row) + "\n" for row in rows) + '{"_timestamp": 46.0, "sys')
        assert peaks(log) == {("device", None): 60 * GIB}
        assert "or more" in str(log.peaks[0].note)
        assert log.peaks[0].line == 2

    def test_a_share_of_the_card_stays_one(self, read: Read) -> None:
        rows = [{"_runtime": n, "system.gpu.0.memoryAllocated": share} for n, share in ((1, 40.0), (2, 62.5))]
        [peak] = read("".join(json.dumps(row) + "\n" for row in rows)).peaks
        assert (peak.kind, peak.peak_bytes, peak.share) == ("device", None, 0.625)

    def test_the_history_of_megatron_times_steps(self, read: Read) -> None:
        rows = [{"_step": n, "_runtime": 1.0, "iteration-time": 30.0 if n == 1 else 2.0} for n in range(1, 8)]
        rows[3]["memory/mem-max-reserved-gigabytes"] = 70.0
        log = read("".join(json.dumps(row) + "\n" for row in rows))
        assert log.step_seconds == 2.0
        assert peaks(log) == {("reserved", None): 70_000_000_000}

    def test_the_history_of_a_trainer_is_timed_by_its_clock(self, read: Read) -> None:
        rows = [{"_step": n, "_runtime": 50.0 + 30 * n, "train/global_step": 10 * n} for n in range(1, 6)]
        log = read("".join(json.dumps(row) + "\n" for row in rows))
        assert (log.step_seconds, log.steps_run) == (3.0, 50)

    def test_each_run_of_a_chart_is_told_apart(self, tmp_path: Path) -> None:
        key = "system/gpu.0.memoryAllocatedBytes"
        columns = ["Relative Time (Process)", *(f"{run} - {key}{e}" for run in "ab" for e in ("", "__MIN", "__MAX"))]
        rows = [["0", 10 * GIB, 10 * GIB, 12 * GIB, "", "", ""], ["15", "", "", "", 20 * GIB, 20 * GIB, 21 * GIB]]
        path = tmp_path / "wandb_export.csv"
        path.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in [columns, *rows]) + "\n")
        assert [peaks(log) for log in read_logs(path)] == [{("device", None): 12 * GIB}, {("device", None): 21 * GIB}]

    def test_the_summary_and_the_configuration_beside_it(self, read: Read, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text(
            "wandb_version: 1\n\n_wandb:\n  value: {cli_version: 0.1}\n"
            "tensor_model_parallel_size:\n  desc: null\n  value: 4\nparams_dtype:\n  value: torch.bfloat16\n"
        )
        summary = {
            "_step": 9, "_runtime": 3, "_wandb": {}, "train/train_runtime": 8.0, "train/train_steps_per_second": 4,
        }  # fmt: skip
        log = read(json.dumps({**summary, **{f"train/{k}": v for k, v in memory_metrics().items()}}))
        assert log.values == {"tensor_model_parallel_size": 4, "params_dtype": "torch.bfloat16"}
        assert peaks(log) == {("allocated", 0): 41 * GIB}
        assert log.step_seconds == 0.25


class TestAnyFile:
    @pytest.mark.parametrize(
        "content", [b"", b"hello\n", b"\x7fELF\0\0\1", b"\x1f\x8b\x08\0\0", b"{}", b"[1, 2]", b"a,b\n1,2\n"]
    )
    def test_what_is_no_log_is_one_message_that_lists_what_is(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "training.log"
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"holds no log .* Megatron-LM, .*DeepSpeed.*Transformers.*W&B") as refusal:
            read_logs(path)
        assert ("unpack it" in str(refusal.value)) == content.startswith(b"\x1f\x8b")

    def test_a_pipe_a_folder_and_nothing_are_refused_without_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for name in ("pipe", ".", "missing"):
            with pytest.raises(UserError, match="cannot be read"):
                read_logs(tmp_path / name)

    def test_a_line_of_any_length_costs_no_more_than_its_start(self, read: Read) -> None:
        log = read(b"x" * (9 * MIB) + b"\n" + megatron_memory(0, 100.0, 200.0).encode())
        assert peaks(log)["allocated", 0] == 100 * MIB

    def test_a_log_that_grew_or_was_moved_is_the_same_run(self, read: Read) -> None:
        text = megatron_log(memory=[megatron_memory(0, 100.0, 200.0)])
        grown = read(text + megatron_memory(0, 300.0, 400.0, 500), "elsewhere.txt")
        assert grown.identity == read(text).identity
        assert grown.identity != read(text.replace("50000.0", "50000.1")).identity

    def test_measurement_records_are_known_by_their_id(self, tmp_path: Path) -> None:
        path = tmp_path / "some.log"
        for text, answer in (
            ('{"id": "a"}\n', True),
            ('{"id": "a", \n', True),
            ("hello", False),
        ):
            path.write_text(text)
            assert is_record_file(path) == answer
        assert is_record_file(tmp_path / "missing")

    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.binary(max_size=80),
                st.sampled_from(
                    [line.encode() for line in megatron_log(memory=[megatron_memory(0, 9.0, 9.0)]).split("\n")]
                ),
                st.sampled_from((LOGS / "deepspeed-0.19.log").read_bytes().split(b"\n")),
                st.sampled_from(
                    [OOM.encode(), b"***** train metrics *****", b"{'train_runtime': {'a': [", b'{"_step": 1']
                ),
            ),
            max_size=40,
        )
    )
    def test_no_content_is_more_than_a_refusal(
        self, tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
    ) -> None:
        path = tmp_path_factory.mktemp("logs") / "log"
        path.write_bytes(b"\n".join(lines))
        try:
            logs = read_logs(path)
        except UserError:
            return
        assert all(peak.peak_bytes is None or peak.peak_bytes > 0 for log in logs for peak in log.peaks)


class TestUnreadableValues:
    """Numbers and literals that no program of a training prints cost themselves alone, and are counted."""

    @pytest.mark.parametrize("value", ["{[]: 1}", "1+1j", "9" * 5000, "[" * 90 + "]" * 90, "1e999"])
    def test_an_argument_is_skipped_and_counted(self, read: Read, value: str) -> None:
        log = read(megatron_log({**LLAMA, "seed": value}, memory=[megatron_memory(0, 40000, 45000)]))
        assert "seed" not in log.values
        assert log.values["num_layers"] == 32
        assert log.unreadable is not None
        assert (log.unreadable.count, log.unreadable.name) == (1, "seed")
        assert log.notes == (f"1 value cannot be read and was skipped: seed, line {log.unreadable.line}",)

    def test_the_peaks_of_a_rank_of_5000_digits_are_skipped_and_counted(self, read: Read) -> None:
        hostile = megatron_memory(0, 40000, 45000).replace("[Rank 0]", f"[Rank {'9' * 5000}]")
        log = read(megatron_log(memory=[hostile, megatron_memory(4, 30000, 31000)]))
        assert set(peaks(log)) == {("allocated", 4), ("reserved", 4)}
        assert log.unreadable is not None
        assert log.unreadable.count == 1

    @pytest.mark.parametrize("size", ["1e999", "9" * 400, "1.2.3"])
    def test_a_peak_that_is_no_amount_of_memory_is_skipped_and_counted(self, read: Read, size: str) -> None:
        line = megatron_memory(0, 40000, 45000).replace("45000", size)
        assert size in line
        log = read(megatron_log(memory=[line]))
        assert set(peaks(log)) == {("allocated", 0)}
        assert log.unreadable is not None

    def test_a_request_of_400_digits_is_still_a_death(self, read: Read) -> None:
        log = read(megatron_log() + f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {'9' * 400} GiB.\n")
        [death] = log.deaths
        assert death.numbers == {}
        assert log.unreadable is not None
        assert log.unreadable.name == "Tried to allocate"

    def test_a_timer_of_5000_digits_is_skipped_and_counted(self, read: Read) -> None:
        line = "epoch=0/micro_step=1/global_step={}, RunningAvgSamplesPerSec=1.5, MaxMemAllocated=1.5GB\n"
        log = read(line.format("9" * 5000) + line.format("7"))
        assert log.steps_run == 7
        assert peaks(log) == {("allocated", 0): GIB * 3 // 2}
        assert log.unreadable is not None

    def test_a_share_above_the_card_is_skipped_and_counted(self, read: Read) -> None:
        log = read('{"_step": 1, "gpu.0.memoryAllocated": 120.5}\n{"_step": 2, "gpu.0.memoryAllocated": 50}\n')
        assert [peak.share for peak in log.peaks] == [0.5]
        assert log.unreadable is not None

    def test_a_cell_longer_than_the_csv_module_takes_is_skipped_and_counted(self, read: Read) -> None:
        rows = ["Step,gpu.0.memoryAllocatedBytes", "1,1000", f'2,"{"9" * 200_000}"', "3,2000"]
        log = read("\n".join(rows), "chart.csv")
        assert peaks(log) == {("device", None): 2000}
        assert log.unreadable is not None

    def test_more_than_one_is_told_in_one_sentence(self, read: Read) -> None:
        log = read(megatron_log({**LLAMA, "seed": "1j", "tensorboard_dir": "b'x'"}))
        assert log.notes[-1].startswith("2 values cannot be read and were skipped, the first in line ")

    @settings(max_examples=30)
    @given(
        st.lists(
            st.sampled_from(
                ["[Rank ", "9" * 30, "²", "] (after ", " iterations) memory (MB) | max reserved: ", "1e999", " | ",
                 "CUDA out of memory. Tried to allocate ", " GiB", " GPU ", "global_step=", "nan}", "[rank", "]: ",
                 ", RunningAvgSamplesPerSec=", "iteration ", "/ 5 | elapsed time per iteration (ms): ", "4", "\n",
                 "MA 1.2.3 GB Max_MA ", "{'train_runtime': ", "NVRM: Xid (PCI:0): ", "  x ...... "]
            ),
            max_size=40,
        )
    )  # fmt: skip
    def test_no_mixture_of_such_lines_raises(self, tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
        path = tmp_path_factory.mktemp("logs") / "a.log"
        path.write_text("\n".join([megatron_step(1, 900), "".join(parts)]))
        assert read_logs(path)
