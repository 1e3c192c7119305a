"""`vlmcourse launch`: files that the shell and YAML read back as they were meant, and two hosts that really train."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from two_hosts import HOSTS, LINK, TRAIN_S, two_hosts, why_not

from vlmcourse import cli
from vlmcourse.commands.pytorchjob import CONFIG_FOLDER, PodRequest, check_pods, suggest_name
from vlmcourse.config import load_config

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "tiny.toml")
ODD_NAMES = ["plain.toml", "with space.toml", "quo'te.toml", 'dou"ble.toml', "dollar$HOME.toml", "semi;rm -rf.toml"]


def launch(capsys: pytest.CaptureFixture[str], *argv: str, config: str = TINY) -> str:
    assert cli.main(["launch", config, *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["launch", TINY, *argv]) == 2
    return capsys.readouterr().err


def run_slurm(text: str, folder: Path, *, job: int = 7, code: int = 0) -> list[list[str]]:
    """Run a batch script with stand-ins for Slurm's programs; return the arguments that each was called with.

    Args:
        text: the script; it runs in plain bash, as Slurm would run it.
        folder: where it runs.
        job: the number that Slurm gives it.
        code: the exit code that it must have.
    """
    tools, seen = folder / "tools", folder / "seen"
    tools.mkdir(exist_ok=True)
    seen.write_text("")
    for name in ("srun", "scontrol"):
        answer = 'printf "node3\\nnode4\\n"' if name == "scontrol" else "true"
        (tools / name).write_text(
            f"#!/bin/bash\nprintf '%s\\0' {name} \"$@\" >> {seen}\nprintf '\\n' >> {seen}\n{answer}\n"
        )
        (tools / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[3-4]", "SLURM_NNODES": "2", "SLURM_JOB_ID": str(job), "HOME": "/nobody"}
    environment = os.environ | variables | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=text, text=True, env=environment, cwd=folder, timeout=60)
    assert done.returncode == code
    return [line.split("\0")[:-1] for line in seen.read_text().split("\n")[:-1]]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_slurm_script_hands_every_word_on_as_it_was(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / name
    shutil.copy(TINY, config)
    text = launch(capsys, "--target", "slurm", "--nodes", "2", "--set", "run.name=a b", config=str(config))
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60).returncode == 0
    calls = run_slurm(text, tmp_path)
    assert calls[0] == ["scontrol", "show", "hostnames", "node[3-4]"]
    torchrun = ["torchrun", "--nnodes", "2", "--nproc-per-node", "8", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    train = ["-m", "vlmcourse.cli", "train", str(config), "--set", "run.name=a b"]
    assert calls[1] == ["srun", *torchrun, "--rdzv-endpoint", "node3:20007", *train]


def test_two_slurm_jobs_meet_on_ports_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their first machine may be the same, and the second job of one port would end the first or itself."""
    text = launch(capsys, "--target", "slurm", "--nodes", "2")
    endpoints = [run_slurm(text, tmp_path, job=job)[1][11] for job in (1234567, 1234568)]
    assert endpoints == ["node3:24567", "node3:24568"]
    chosen = launch(capsys, "--target", "slurm", "--nodes", "2", "--port", "1234")
    assert run_slurm(chosen, tmp_path)[1][11] == "node3:1234"


@pytest.mark.parametrize("line", ["false", "no-such-program", "false | true", "source no/such/activate"])
def test_a_slurm_script_starts_nothing_after_a_setup_that_failed(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = launch(capsys, "--target", "slurm", "--setup", line, "--setup", "true")
    codes = {"no-such-program": 127}
    assert run_slurm(text, tmp_path, code=codes.get(line, 1)) == []
    assert len(run_slurm(launch(capsys, "--target", "slurm", "--setup", "unset HOME"), tmp_path)) == 2


def test_ranks_on_cpu_cores_see_no_gpu_whatever_starts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm = launch(capsys, "--target", "slurm", "--cpu", "--nodes", "2")
    assert run_slurm(slurm, tmp_path)[1][:4] == ["srun", "env", "CUDA_VISIBLE_DEVICES=", "torchrun"]
    assert "CUDA_VISIBLE_DEVICES" not in launch(capsys, "--target", "slurm", "--nodes", "2")
    for flags, variables in ((["--cpu"], [{"name": "CUDA_VISIBLE_DEVICES", "value": ""}]), ([], None)):
        _, job = read_job(launch(capsys, "--target", "k8s", "--image", "x", "--nodes", "2", *flags))
        for part in job["spec"]["pytorchReplicaSpecs"].values():
            (container,) = part["template"]["spec"]["containers"]
            assert container.get("env") == variables


def test_pods_take_a_folder_that_says_where_they_write(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", "k8s", "--image", "x", "--claim", "runs", "--set", "run.output_dir=/runs", "--resume"]
    _, job = read_job(launch(capsys, *flags))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["command"][-5:] == ["--set", "run.output_dir=/runs", "--resume", "--set", "run.output_dir=/runs"]


def test_a_slurm_script_asks_for_what_the_flags_say(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--partition", "gpu", "--account", "lab-1", "--minutes", "90", "--cpus-per-node", "32", "--resume"]
    setup = ["--setup", "module load cuda", "--setup", "source .venv/bin/activate"]
    text = launch(capsys, "--target", "slurm", "--nodes", "4", "--nproc-per-node", "4", *asked, *setup)
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "--job-name=tiny",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--cpus-per-task=32",
        "--time=90",
        "--partition=gpu",
        "--account=lab-1",
    ]
    assert text.index("module load cuda\nsource .venv/bin/activate\n") < text.index("srun --cpus-per-task 32 torchrun")
    assert text.rstrip().endswith("--resume")
    on_cores = launch(capsys, "--target", "slurm", "--cpu", "--nproc-per-node", "2")
    assert "gpus" not in on_cores.lower()


def read_job(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    config, job = yaml.safe_load_all(text)
    assert (config["kind"], job["kind"], job["apiVersion"]) == ("ConfigMap", "PyTorchJob", "kubeflow.org/v1")
    return config, job


def test_a_pytorchjob_carries_the_configuration_and_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "3", "--nproc-per-node", "4", "--image", "registry.example:5000/vlmcourse:gpu"]
    more = ["--name", "tiny-3", "--namespace", "lab", "--memory", "0.5Ti", "--cpus-per-node", "16", "--claim", "runs"]
    config, job = read_job(launch(capsys, "--target", "k8s", *flags, *more, "--set", "train.num_steps=20"))
    assert config["data"] == {"config.toml": Path(TINY).read_text(encoding="utf-8")}
    assert config["metadata"] == {"name": "tiny-3-config", "namespace": "lab"}
    assert job["metadata"] == {"name": "tiny-3", "namespace": "lab"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: part["replicas"] for name, part in replicas.items()} == {"Master": 1, "Worker": 2}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    assert (container["name"], container["image"]) == ("pytorch", "registry.example:5000/vlmcourse:gpu")
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 4, "cpu": 16, "memory": "0.5Ti"}}
    meeting = ["--node-rank", "$(RANK)", "--master-addr", "$(MASTER_ADDR)", "--master-port", "$(MASTER_PORT)"]
    train = ["-m", "vlmcourse.cli", "train", f"{CONFIG_FOLDER}/config.toml", "--set", "train.num_steps=20"]
    command = ["torchrun", "--nnodes", "3", "--nproc-per-node", "4", *meeting, *train]
    assert container["command"] == [*command, "--set", "run.output_dir=/runs"]
    volumes = {volume["name"]: volume for volume in replicas["Master"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["config"]["configMap"] == {"name": "tiny-3-config"}
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}


def test_a_configuration_of_any_text_comes_out_of_the_yaml_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "odd.toml"
    text = '# "odd": \'text\', tab\\there, trailing space \n[run]\nname = "größe"  # no: 1e3\n\n\n'
    config.write_text(text + '[parallel]\nstrategy = "ddp"\n', encoding="utf-8")
    written = launch(capsys, "--target", "k8s", "--name", "no", "--image", "y", config=str(config))
    data, job = read_job(written)
    assert data["data"]["config.toml"] == config.read_text(encoding="utf-8")
    assert job["metadata"]["name"] == "no" and job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert "is lost when its pods are removed" in written
    assert "Worker" not in job["spec"]["pytorchReplicaSpecs"], "one node has a master only"
    dollar = launch(capsys, "--target", "k8s", "--image", "x", "--name", "a", "--set", "run.name=a$(RANK)")
    assert "run.name=a$$(RANK)" in dollar, "Kubernetes would put a variable there"


@pytest.mark.parametrize("name", ["tiny", "a", "a-1", "a" * 54])
def test_names_that_kubernetes_takes(name: str) -> None:
    assert check_pods(PodRequest(name=name, nodes=1, nproc=1, image="x", namespace="1-a", gpus=0)) == []


@pytest.mark.parametrize("name", ["", "Tiny", "a_b", "-a", "a-", "1a", "a b", "größe", "a" * 55, "a.b", "a\n"])
def test_names_that_kubernetes_refuses_come_with_one_that_it_takes(name: str) -> None:
    pods = PodRequest(name=name, nodes=12, nproc=1, image="x", namespace="default", gpus=0)
    (problem,) = check_pods(pods)
    assert "RFC 1123" in problem
    better = suggest_name(name, 53)
    assert check_pods(PodRequest(name=better, nodes=12, nproc=1, image="x", namespace="default", gpus=0)) == []


def test_two_hosts_get_a_command_each(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--hosts", "10.0.0.1,gpu-2.lab", "--nproc-per-node", "4", "--interface", "eth0", "--port", "1234"]
    outcome = json.loads(launch(capsys, "--target", "torchrun", *flags, "--json"))
    assert (outcome["nodes"], outcome["nproc_per_node"], outcome["world_size"]) == (2, 4, 8)
    assert outcome["path"] is None
    common = ["--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-id", "vlmcourse"]
    for host, is_host, command in zip(("10.0.0.1", "gpu-2.lab"), ("true", "false"), outcome["commands"], strict=True):
        meeting = ["--rdzv-endpoint", "10.0.0.1:1234", "--rdzv-conf", f"is_host={is_host}", "--local-addr", host]
        environment = ["env", "GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0"]
        train = ["-m", "vlmcourse.cli", "train", TINY]
        assert shlex.split(command) == [*environment, "torchrun", *common, *meeting, *train]
        assert f"# on {host}:\n{command}\n" in outcome["text"]


def test_a_file_of_commands_says_that_it_is_no_script_and_where_each_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", "torchrun", "--hosts", "h1,h2", "--out", str(tmp_path / "t.sh")]
    shown = launch(capsys, *flags)
    outcome = json.loads(launch(capsys, *flags, "--force", "--json"))
    assert outcome["hosts"] == ["h1", "h2"]
    first, second = outcome["commands"]
    assert shown == (
        f"wrote {tmp_path}/t.sh, a list of commands, one a machine, and no script; start\n"
        f"  on h1: {first}\n  on h2: {second}\n"
    )
    assert (tmp_path / "t.sh").read_text().startswith("# A list of commands, one a machine, and no script: bash would")


def test_what_auto_chooses_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["launch", TINY, "--target", "slurm", "--nodes", "2", "--set", "parallel.strategy=auto"]
    assert cli.main(flags) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("#!/bin/bash\n")
    reason = "parallel.strategy = 'auto' chose fsdp: 16 ranks, at most 16: shards (fsdp), and the language tower's"
    assert shown.err.startswith(reason) and shown.err.count("\n") == 1
    assert cli.main([*flags, "--json"]) == 0
    shown = capsys.readouterr()
    outcome = json.loads(shown.out)
    assert (outcome["strategy"], outcome["choice"] + "\n") == ("fsdp", shown.err)
    assert cli.main([*flags, "--set", f"model.hf_folder={tmp_path}/none", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["strategy"] == "auto" and "is left to the ranks, which choose when they start" in outcome["choice"]
    outcome = json.loads(launch(capsys, "--target", "slurm", "--json"))
    assert (outcome["strategy"], outcome["choice"]) == ("ddp", "")


def test_one_host_needs_no_meeting_place(capsys: pytest.CaptureFixture[str]) -> None:
    text = launch(capsys, "--target", "torchrun", "--cpu", "--nproc-per-node", "2")
    train = ["-m", "vlmcourse.cli", "train", TINY]
    assert shlex.split(text) == [
        "env",
        "CUDA_VISIBLE_DEVICES=",
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        *train,
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--target", "slurm", "--nodes", "0"], "--nodes 0: must be 1 or greater"),
        (["--target", "slurm", "--nproc-per-node", "-1"], "--nproc-per-node -1: must be 1 or greater"),
        (["--target", "slurm", "--minutes", "0"], "--minutes 0: must be 1 or greater"),
        (["--target", "slurm", "--cpus-per-node", "-2"], "--cpus-per-node -2: must be 0 or greater"),
        (["--target", "slurm", "--partition", "a b"], "--partition 'a b': must be letters"),
        (["--target", "slurm", "--account", "x\n#SBATCH --exclusive"], "--account 'x\\n#SBATCH --exclusive': must be"),
        (["--target", "slurm", "--name", "a\nb"], "--name 'a\\nb': must be printable"),
        (["--target", "slurm", "--setup", "a\nb"], "must be one line of shell"),
        (["--target", "slurm", "--image", "x"], "--image: has no meaning for --target slurm, only for k8s"),
        (["--target", "slurm", "--hosts", "a,b"], "--hosts: has no meaning for --target slurm, only for torchrun"),
        (["--target", "slurm", "--force"], "--force without --out"),
        (["--target", "slurm", "--nproc-per-node", "1"], "'ddp' with 1 rank"),
        (["--target", "k8s"], "--image is missing"),
        (["--target", "k8s", "--image", "a b"], "--image 'a b': must be the name of a container image"),
        (["--target", "k8s", "--image", "x", "--name", "My Run"], "such as 'my-run'"),
        (["--target", "k8s", "--image", "x", "--namespace", "A"], "--namespace 'A': must be"),
        (["--target", "k8s", "--image", "x", "--claim", "a_b"], "--claim 'a_b': must be"),
        (["--target", "k8s", "--image", "x", "--memory", "lots"], "--memory 'lots': must be a number with a unit"),
        (["--target", "k8s", "--image", "x", "--memory", "0.0Gi"], "--memory '0.0Gi': must be a number with a unit"),
        (["--target", "k8s", "--image", "x", "--memory", "64"], "--memory '64': must be a number with a unit"),
        (["--target", "k8s", "--image", "x", "--memory", "1.5"], "--memory '1.5': must be a number with a unit"),
        (["--target", "k8s", "--image", "x", "--claim", ""], "--claim '': must not be empty"),
        (["--target", "k8s", "--image", "x", "--set", "run.output_dir=/data"], "a run writes to /runs, where --claim"),
        (["--target", "k8s", "--image", "x", "--resume"], "--resume without --claim: pods start with an empty folder"),
        (["--target", "k8s", "--image", "x", "--port", "1"], "--port: has no meaning for --target k8s, only for slurm"),
        (["--target", "slurm", "--port", "0"], "--port 0: must be from 1 to 65535"),
        (["--target", "torchrun", "--hosts", ""], "--hosts '': must be a host name"),
        (["--target", "torchrun", "--nodes", "2"], "--nodes 2 without --hosts"),
        (["--target", "torchrun", "--nodes", "3", "--hosts", "a,b"], "--nodes 3: --hosts names 2"),
        (["--target", "torchrun", "--hosts", "a,a"], "names a machine twice"),
        (["--target", "torchrun", "--hosts", "a,-b"], "--hosts '-b': must be a host name"),
        (["--target", "torchrun", "--hosts", "a,"], "--hosts '': must be a host name"),
        (["--target", "torchrun", "--hosts", "a,b", "--port", "70000"], "--port 70000: must be from 1 to 65535"),
        (["--target", "torchrun", "--hosts", "a,b", "--interface", "eth0; ls"], "--interface 'eth0; ls': must be"),
        (["--target", "torchrun", "--interface", "eth0"], "--interface: one machine needs none"),
        (["--target", "torchrun", "--cpus-per-node", "2"], "torchrun reserves no cores"),
        (["--target", "slurm", "--set", "train.num_step=1"], "did you mean 'num_steps'?"),
    ],
)
def test_what_a_cluster_would_refuse_is_refused_here(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, *argv)
    assert message.startswith("vlmcourse launch: ") and words in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "this is not valid JSON"),
        ('{"zero_optimisation": {"stage": 2}}', "did you mean 'zero_optimization'?"),
        ('{"zero_optimization": {"stage": 3}}', "parallel.strategy"),
        ('{"zero_optimization": {"stage": 2}, "train_batch_size": 7}', "train_batch_size"),
        (None, "There is no file"),
    ],
)
def test_a_bad_ds_config_is_refused_as_train_does_before_anything_is_written(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "ds_config.json", tmp_path / "job"
    if text is not None:
        path.write_text(text)
    given = ["--set", "parallel.strategy=deepspeed-zero2", "--deepspeed", str(path)]
    message = refusal(capsys, "--target", "slurm", "--nproc-per-node", "2", "--out", str(out), *given)
    assert words in message and not out.exists()
    assert cli.main(["train", TINY, "--nproc", "2", *given]) == 2
    assert capsys.readouterr().err == message.replace("vlmcourse launch: ", "vlmcourse train: ")


def test_pods_carry_the_ds_config_and_read_that_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my settings.json"
    path.write_text('{"zero_optimization": {"stage": 2}}\n')
    given = ["--set", "parallel.strategy=deepspeed-zero2", "--deepspeed", str(path)]
    text = launch(capsys, "--target", "k8s", "--image", "x", *given)
    config, job = yaml.safe_load_all(text)
    assert config["data"]["ds_config.json"] == path.read_text()
    command = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"]
    named = [word for word in command if word.startswith("parallel.deepspeed_config=")]
    assert named[-1] == f"parallel.deepspeed_config={CONFIG_FOLDER}/ds_config.json"  # what stands last wins


def test_all_problems_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "--target", "k8s", "--nodes", "0", "--name", "A", "--port", "1")
    assert message.count("\n  - ") == 4


def test_a_file_is_written_once_and_overwritten_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my job.sbatch"
    shown = launch(capsys, "--target", "slurm", "--out", str(out))
    assert shown == f"wrote {out}; start it with\n  sbatch {shlex.quote(str(out))}\n"
    first = out.read_text()
    assert first.startswith("#!/bin/bash\n") and first == launch(capsys, "--target", "slurm")
    assert "there is such a file already: choose another name, or add --force" in refusal(
        capsys, "--target", "slurm", "--nodes", "2", "--out", str(out)
    )
    assert out.read_text() == first
    outcome = json.loads(launch(capsys, "--target", "slurm", "--nodes", "2", "--out", str(out), "--force", "--json"))
    assert outcome["path"] == str(out) and outcome["text"] == out.read_text() != first
    assert "there is no folder" in refusal(capsys, "--target", "slurm", "--out", str(tmp_path / "none" / "a"))
    (tmp_path / "folder").mkdir()
    for force in ([], ["--force"]):
        message = refusal(capsys, "--target", "slurm", "--out", str(tmp_path / "folder"), *force)
        assert f"--out {tmp_path}/folder: this is a folder: name a file in it, such as {tmp_path}/folder/job" in message
        assert "--force" not in message
    assert "it cannot be written" in refusal(capsys, "--target", "slurm", "--out", str(tmp_path / ("a" * 300)))


def test_launch_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from vlmcourse.cli import main; sys.exit(main(['launch', {TINY!r}, '--target', 'slurm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "srun torchrun" in done.stdout, done.stderr


SHORT = {
    "train.num_steps": 3,
    "train.micro_batch_size": 4,
    "train.log_every": 1,
    "train.eval_every": 0,
    "optimizer.warmup_steps": 1,
    "data.num_train_samples": 64,
    "data.num_eval_samples": 2,
}


def test_hosts_that_fail_or_hang_leave_nothing_behind(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    started_s = time.time()
    with pytest.raises(AssertionError, match=r"(?s)ended with \[0, 3\].*it broke"), two_hosts() as hosts:
        hosts.run(["true", "bash -c 'echo it broke; exit 3'"], cwd=tmp_path)
    with pytest.raises(AssertionError, match="still running"), two_hosts() as hosts:
        hosts.run(["true", "bash -c 'setsid sleep 98 & sleep 99'"], cwd=tmp_path, timeout_s=1)
    assert not any(name in subprocess.check_output(["ip", "netns", "list"], text=True) for name in hosts.names)
    new = [process for process in psutil.process_iter(["cmdline"]) if process.create_time() >= started_s]
    assert not [process for process in new if process.info["cmdline"] in (["sleep", "98"], ["sleep", "99"])]


@pytest.mark.slow
@pytest.mark.timeout(TRAIN_S + 120)
def test_two_hosts_train_as_one_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    settings = {key: f"{key}={value}" for key, value in (SHORT | {"run.output_dir": tmp_path}).items()}
    sets = [part for setting in settings.values() for part in ("--set", setting)]
    flags = ["--cpu", "--nproc-per-node", "1", "--hosts", ",".join(HOSTS), "--interface", LINK]
    launched = launch(capsys, "--target", "torchrun", *flags, *sets, "--set", "run.name=two", "--json")
    with two_hosts() as hosts:
        hosts.run(json.loads(launched)["commands"], cwd=tmp_path)
        assert hosts.num_bytes() > 3 * 10**6, "in each of 3 steps, gradients of half a million weights have crossed"
    from vlmcourse.train.trainer import Trainer

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    alone = {"parallel.strategy": "single", "train.micro_batch_size": 8, "run.name": "one"}
    one = Trainer(load_config(TINY, SHORT | {"run.output_dir": str(tmp_path)} | alone), show_progress=False).fit()
    result = json.loads((tmp_path / "two" / "result.json").read_text(encoding="utf-8"))
    assert (result["world_size"], result["strategy"]) == (2, "ddp")
    log = (tmp_path / "two" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [row["loss/total"] for row in map(json.loads, log)]
    assert losses == pytest.approx(one.losses, abs=1e-5) and len(losses) == 3
