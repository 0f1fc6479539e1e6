"""The container of a job's steps: what is mounted into it, and the words of pyxis and Apptainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.containers import ContainerError, StepContainer, mounts

RECORD: dict[str, Any] = {
    "runtime": "pyxis", "image": "nvcr.io#nvidia/pytorch:25.04-py3", "mounts": [], "is_imported": True, "paths": [],
    "makes": "", "has_gpus": True,
}  # fmt: skip
JOB = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "alps"}


def mounted(run: Path, *wanted: str, paths: tuple[str, ...] = (), makes: str = "") -> list[str]:
    """The mounts beside the run directory's own."""
    record = {**RECORD, "mounts": list(wanted), "paths": list(paths), "makes": makes}
    return [mount for mount in mounts(record, run) if mount != f"{run}:{run}"]


def test_the_run_directory_is_in_it_at_its_own_place(tmp_path: Path) -> None:
    assert mounts(RECORD, tmp_path) == [f"{tmp_path}:{tmp_path}"]


def test_a_mount_within_another_comes_after_it(tmp_path: Path) -> None:
    assert mounted(tmp_path, "/b:/data/inner", "/a:/data", "/c:/") == ["/c:/", "/a:/data", "/b:/data/inner"]


def test_what_a_mount_brings_at_its_own_place_is_mounted_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = str(tmp_path / "data")
    folder = str(tmp_path.parent)
    assert mounted(tmp_path, f"{folder}:{folder}", paths=(data,)) == [f"{folder}:{folder}"]
    assert mounted(Path("/run-of-mine"), paths=(data, data)) == [f"{data}:{data}"]


@pytest.mark.parametrize("flags", ["ro", "x-create=dir+ro"])
def test_a_mount_that_is_read_only_does_not_bring_what_is_written(tmp_path: Path, flags: str) -> None:
    folder, written = str(tmp_path), tmp_path / "checkpoints"
    written.mkdir()
    above = f"{folder}:{folder}:{flags}"
    assert mounted(Path("/run-of-mine"), above, paths=(str(written),)) == [above, f"{written}:{written}"]


def test_of_a_file_or_the_beginning_of_names_the_folder_is_mounted(tmp_path: Path) -> None:
    for name in ("corpus [1]_text.bin", "corpus [1]_text.idx"):
        (tmp_path / name).touch()
    expected = [f"{tmp_path}:{tmp_path}"]
    assert mounted(Path("/run-of-mine"), paths=(f"{tmp_path}/corpus [1]_text",)) == expected
    assert mounted(Path("/run-of-mine"), paths=(f"{tmp_path}/corpus [1]_text.bin",)) == expected
    assert mounted(Path("/run-of-mine"), paths=(f"{tmp_path}/corpus *",)) == []


def test_what_this_host_does_not_have_is_not_mounted(tmp_path: Path) -> None:
    assert mounted(tmp_path, paths=("/no/such/folder",)) == []


def test_the_folder_of_checkpoints_is_made_where_it_can_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "a" / "b"
    assert mounted(Path("/run-of-mine"), paths=(str(made.parent),), makes=str(made)) == [f"{made.parent}:{made.parent}"]
    assert made.is_dir()
    (tmp_path / "file").touch()
    mounted(Path("/run-of-mine"), makes=str(tmp_path / "file" / "c"))
    assert "cannot make" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["a,b", "a:b", "a\nb"])
def test_a_run_directory_that_no_mount_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ContainerError, match="comma, colon or line break"):
        mounts(RECORD, Path("/runs") / name)


def test_pyxis_enters_the_imported_container_by_its_name(tmp_path: Path) -> None:
    container = StepContainer({**RECORD, "mounts": ["/data:/data:ro"]}, tmp_path, "2", JOB)
    own = f"{tmp_path}:{tmp_path}"
    both = ",".join(sorted(["/data:/data:ro", own], key=lambda mount: mount.split(":")[1]))
    assert container.options() == [
        f"--container-image={RECORD['image']}",
        "--container-name=llmlaunch-alps-7-2:no_exec",
        f"--container-mounts={both}",
        f"--container-workdir={tmp_path}",
        "--no-container-mount-home",
    ]
    assert container.enter() == []
    assert "--container-name=llmlaunch-alps-7-2:create" in container.import_options()


def test_an_image_that_is_a_file_needs_no_name(tmp_path: Path) -> None:
    container = StepContainer({**RECORD, "image": "/images/a.sqsh", "is_imported": False}, tmp_path, "0", JOB)
    assert not [word for word in container.options() if word.startswith("--container-name")]


@pytest.mark.parametrize("command", ["apptainer", "singularity"])
def test_apptainer_is_a_program_before_the_program(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / command).write_text("#!/bin/sh\n")
    (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    record = {**RECORD, "runtime": "apptainer", "image": "/images/a.sif", "is_imported": False}
    container = StepContainer(record, tmp_path, "0", JOB)
    bound = ["--bind", f"{tmp_path}:{tmp_path}"]
    words = [command, "exec", "--no-home", "--pwd", str(tmp_path), "--nv", *bound, "/images/a.sif"]
    assert (container.options(), container.enter()) == ([], words)
    assert "--nv" not in StepContainer({**record, "has_gpus": False}, tmp_path, "0", JOB).enter()


def test_without_apptainer_the_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ContainerError, match="modules: of the cluster profile"):
        StepContainer({**RECORD, "runtime": "apptainer"}, tmp_path, "0", JOB).enter()


ENROOT = """\
#!/bin/bash
case $1 in
list) printf '%s\\n' pyxis_llmlaunch-alps-7-2 pyxis_7_llmlaunch-alps-7-0 pyxis_llmlaunch-alps-8-0 \\
  pyxis_llmlaunch-alps-9-0 pyxis_mine pyxis_llmlaunch-other-7-0 ;;
remove) echo "$3" >>"${0%/*}/removed" ;;
esac
"""
SRUN = '#!/bin/bash\nwhile [[ $1 != bash ]]; do echo "$1" >>"${0%/*}/words"; shift; done\nexec "$@"\n'


def test_containers_of_this_job_and_of_jobs_that_are_no_more_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"enroot": ENROOT, "srun": SRUN, "squeue": "#!/bin/sh\necho 7; echo 8\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    container = StepContainer(RECORD, tmp_path, "2", JOB)
    container.remove(["srun", "--nodes=2", "--container-image=of-the-site"], "7", 60.0)
    removed = (tmp_path / "removed").read_text().split()
    assert removed == ["pyxis_llmlaunch-alps-7-2", "pyxis_7_llmlaunch-alps-7-0", "pyxis_llmlaunch-alps-9-0"]
    assert (tmp_path / "words").read_text().split() == ["--nodes=2", "--overlap", "--mem=0"]
