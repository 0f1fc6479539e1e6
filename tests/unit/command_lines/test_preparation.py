"""What a script does around its training becomes setup lines of the job, or is named with its line as left out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.imports.recipe_file import read_source

TRAINING = "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --lr 1e-4"
HEAD = "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=8\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def prepared(folder: Path, before: str, training: str = TRAINING, after: str = "") -> TrainerCommand:
    """Return the training of a script with these lines before and after it; the first of them is line 3."""
    script = folder / "job.sbatch"
    script.write_text(f"{HEAD}{before}\n{training}\n{after}\n")
    command = read_source(script, (), {"HOME": "/home/me", "USER": "me"}).command
    assert command is not None
    return command


@pytest.mark.parametrize(
    ("line", "setup"),
    [
        ("module load cuda/12.4", "module load cuda/12.4"),
        ("module use $SITE/modules", 'module use "${SITE}/modules"'),
        ("ulimit -n 65536", "ulimit -n 65536"),
        ("unset LD_PRELOAD", "unset LD_PRELOAD"),
        ("source ./site.env fast", "source HERE/site.env fast"),
        ("source ~/.bashrc", "source /home/me/.bashrc"),
        ("mkdir -p logs /x/y", "mkdir -p HERE/logs /x/y"),
        ("export PATH=/x/bin:$PATH", 'export PATH="/x/bin:${PATH}"'),
        ('export PYTHONPATH="$PWD/src:.:$PYTHONPATH"', 'export PYTHONPATH="HERE/src:HERE:${PYTHONPATH}"'),
        ('export X="a\\"b\\`c\\\\d $Y"', 'export X="a\\"b\\`c\\\\d ${Y}"'),
        ("module load 'a b;touch c'", "module load 'a b;touch c'"),
    ],
)
def test_what_prepares_a_training_is_a_setup_line(line: str, setup: str, folder: Path) -> None:
    command = prepared(folder, line)
    assert command.setup == (setup.replace("HERE", str(folder)),)
    assert command.left_out == ()


def test_a_file_that_is_read_leaves_its_variables_and_no_line(folder: Path) -> None:
    (folder / "site.env").write_text("export SITE=ours\nmodule load cuda\n")
    command = prepared(folder, "source site.env")
    assert (command.setup, command.environment["SITE"]) == (("module load cuda",), "ours")


@pytest.mark.parametrize("path", ["venv/bin/activate", "miniconda3/etc/profile.d/conda.sh"])
def test_a_file_that_prepares_a_shell_is_run_by_the_job_and_not_read(path: str, folder: Path) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text("export OF_THIS_MACHINE=1\nconda() { touch canary; }\n")
    command = prepared(folder, f"source {folder / path}\nconda activate llm")
    hook = () if "activate" not in path else ('eval "$(conda shell.bash hook)"',)
    assert command.setup == (f"source {folder / path}", *hook, "conda activate llm")
    assert "OF_THIS_MACHINE" not in command.environment


@pytest.mark.parametrize("program", ["conda", "micromamba"])
def test_an_environment_manager_is_made_known_to_the_batch_shell_first(program: str, folder: Path) -> None:
    hook, activate = prepared(folder, f"{program} activate llm").setup
    assert hook.startswith(f'eval "$({program} shell')
    assert "hook" in hook
    assert activate == f"{program} activate llm"


@pytest.mark.parametrize(
    ("lines", "python"),
    [
        ("conda activate /envs/llm", "/envs/llm/bin/python"),
        ("conda activate /envs/llm\nconda activate other", None),
        ("conda activate llm", None),
        ("source /venv/bin/activate", "/venv/bin/python"),
        ("source venv/bin/activate", "HERE/venv/bin/python"),
        ("source $ENVS/venv/bin/activate", None),
    ],
)
def test_an_environment_named_by_its_path_names_the_interpreter(lines: str, python: str | None, folder: Path) -> None:
    assert prepared(folder, lines).python == (python and python.replace("HERE", str(folder)))


@pytest.mark.parametrize("launcher", ["/opt/llm/bin/python -m torch.distributed.run", "/opt/llm/bin/torchrun"])
def test_the_interpreter_of_the_launcher_is_that_of_the_job(launcher: str, folder: Path) -> None:
    command = prepared(folder, "conda activate /envs/other", TRAINING.replace("torchrun", launcher))
    assert command.python is not None
    assert command.python.startswith("/opt/llm/bin/python")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("for node in a b; do ssh $node nvidia-smi; done", "starts the ranks of every node itself"),
        ("docker run -d --gpus all redis", "pyxis or Apptainer"),
        ("rsync -a data/ $TMPDIR/", "stage them before you submit"),
        ("trap 'rsync out host:' EXIT", "traps of its own"),
        ("pip install -e .", "install it once"),
        ("nvidia-smi dmon > gpu.log &", "monitor records the memory"),
        ("sbatch --dependency=afterok:$SLURM_JOB_ID next.sh", "starts and ends no other job"),
        ("python tools/preprocess.py --input a.json", "write it under setup:"),
        ("./prepare_nodes", "write it under setup:"),
    ],
)
def test_what_a_recipe_cannot_keep_is_named_with_its_line_and_why(line: str, reason: str, folder: Path) -> None:
    command = prepared(folder, f"{line}\necho started")
    assert command.setup == ()
    sentences = [sentence for sentence in command.left_out if reason in sentence]
    assert sentences
    assert sentences[0].startswith("job.sbatch:3, `")


@pytest.mark.parametrize("line", ["rsync -a out host:", "python convert.py out"])
def test_what_follows_the_training_is_named_too(line: str, folder: Path) -> None:
    (sentence,) = prepared(folder, "", after=line).left_out
    assert sentence.startswith(f"job.sbatch:5, `{line.split()[0]}")


@pytest.mark.parametrize("line", ["export HF_TOKEN_PATH", "export A=$A", "export MASTER_ADDR=$(hostname)"])
def test_what_the_rendered_job_has_anyway_is_in_no_line(line: str, folder: Path) -> None:
    command = prepared(folder, line)
    assert (command.setup, command.left_out) == ((), ())


def test_a_variable_that_each_task_has_for_itself_is_in_no_line(folder: Path) -> None:
    command = prepared(folder, "", f"srun bash -c 'export NODE_RANK=$SLURM_NODEID; {TRAINING}'")
    assert (command.setup, dict(command.environment)) == ((), {})


def test_what_only_prints_or_waits_is_no_loss(folder: Path) -> None:
    lines = "echo a; date; nvidia-smi; env | sort; sleep 3; module list; python -c 'import torch'; srun hostname"
    command = prepared(folder, lines)
    assert (command.setup, command.left_out) == ((), ())


@pytest.mark.parametrize("option", ["--mpi=pmix", "--container-mount-home"])
def test_an_option_that_only_srun_has_is_named(option: str, folder: Path) -> None:
    (sentence,) = prepared(folder, "", f"srun {option} -l {TRAINING}").left_out
    assert f"srun {option}" in sentence


def test_options_of_srun_that_the_rendered_job_has_as_well_are_not_named(folder: Path) -> None:
    options = "--nodes 1 --ntasks-per-node=1 -l -u --kill-on-bad-exit=1 --cpu-bind=none --mpi=none --export=ALL"
    assert prepared(folder, "", f"srun {options} {TRAINING}").left_out == ()


@pytest.mark.parametrize(
    "line",
    [
        "wandb login 0123456789abcdef0123456789abcdef01234567",
        "huggingface-cli login --token hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
        "export OTHER=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH:$X",
        "module load --token=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    ],
)
def test_no_secret_is_in_a_setup_line_or_a_sentence(line: str, folder: Path) -> None:
    command = prepared(folder, line)
    text = " ".join((*command.setup, *command.left_out))
    assert "abcdef" not in text


@pytest.mark.parametrize(
    "word",
    [
        "$(touch {canary})",
        "; touch {canary}",
        "' ; touch {canary} '",
        '"; touch {canary}; "',
        "${{X:-$(touch {canary})}}",
    ],
)
def test_no_word_of_a_script_becomes_shell(word: str, folder: Path) -> None:
    canary = folder / "canary"
    quoted = "'" + word.format(canary=canary).replace("'", "'\\''") + "'"
    command = prepared(folder, f"module load {quoted} $OTHER\nmkdir -p {quoted}x$OTHER\nexport A={quoted}:$OTHER")
    assert len(command.setup) == 3
    functions = "module() { :; }; mkdir() { :; }"
    subprocess.run(["bash", "-c", "\n".join((functions, *command.setup))], check=True, cwd=folder, timeout=20)
    assert not canary.exists()


def test_a_word_that_only_the_run_knows_is_named_and_not_guessed(folder: Path) -> None:
    command = prepared(folder, "module load $(cat wanted) $1")
    assert command.setup == ()
    assert "only the run knows its words" in command.left_out[0]


def test_a_line_break_in_a_word_makes_no_second_line(folder: Path) -> None:
    assert all("\n" not in line for line in prepared(folder, "module load $'a\\nb' 'c\nd'").setup)


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("", None),
        ("cd /opt/llm", "/opt/llm"),
        ("cd $CHECKOUT", None),
        ("(cd /elsewhere; make)", None),
        ("cd $SLURM_SUBMIT_DIR/code", "HERE/code"),
        ("#SBATCH --chdir=/proj/code", "/proj/code"),
        ("pushd /a; cd b", "/a/b"),
    ],
)
def test_the_folder_in_which_the_trainer_starts_is_that_which_the_script_enters(
    text: str, workdir: str | None, folder: Path
) -> None:
    expected = None if workdir is None else workdir.replace("HERE", str(folder))
    assert prepared(folder, text).workdir == expected


def test_without_a_cd_the_trainer_starts_in_the_folder_where_it_is(folder: Path) -> None:
    (folder / "pretrain_gpt.py").write_text("")
    assert prepared(folder, "").workdir == str(folder)


@pytest.mark.parametrize(
    ("launcher", "workdir"),
    [
        ("srun --chdir=/x ", "/x"),
        ("srun --container-image=a.sqsh --container-workdir=/w ", "/w"),
        ("apptainer exec --nv --pwd /w a.sif ", "/w"),
        ("srun --container-image=a.sqsh ", None),
        ("srun --container-image=a.sqsh bash -c 'cd /w; {}'", "/w"),
    ],
)
def test_options_of_srun_and_containers_say_the_folder_too(launcher: str, workdir: str | None, folder: Path) -> None:
    training = launcher.format(TRAINING) if "{}" in launcher else launcher + TRAINING
    assert prepared(folder, "", training).workdir == workdir


def test_files_of_a_mounted_folder_are_looked_for_on_the_host(folder: Path) -> None:
    (folder / "code").mkdir()
    options = f"--container-image=a.sqsh --container-mounts={folder}:/w --container-workdir=/w/code"
    command = prepared(folder, "", f"srun {options} {TRAINING}")
    assert (command.workdir, command.folder) == ("/w/code", folder / "code")


def test_set_a_exports_all_and_secrets_stay_names(folder: Path) -> None:
    (folder / "site.env").write_text("DATA=/d\nHF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH\n")
    (folder / "job.sbatch").write_text(f"{HEAD}set -a; source site.env; set +a\nOWN=1\n{TRAINING}\n")
    document = read_source(folder / "job.sbatch").reading.document
    assert document["environment"] == {"DATA": "/d"}
    assert document["secrets"] == ["HF_TOKEN"]


def test_variables_for_a_container_are_its_own(folder: Path) -> None:
    command = prepared(folder, "", f"apptainer exec --env A=1,B=x:y --env C=2 a.sif {TRAINING}")
    assert command.environment == {"A": "1", "B": "x:y", "C": "2"}


def test_the_environment_of_a_project_is_its_folder_or_is_asked_for(folder: Path) -> None:
    assert "python: PATH" in prepared(folder, "", f"uv run {TRAINING}").left_out[0]
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").touch()
    assert prepared(folder, "", f"uv run {TRAINING}").python == str(folder / ".venv" / "bin" / "python")
