"""A training run as a Kubernetes PyTorchJob: one pod a machine, each with one `torchrun`.

Enters: names, numbers and the text of the TOML file, and of the ds_config.json that it names. Leaves: YAML of two
objects: a ConfigMap with these texts, and a `kubeflow.org/v1` PyTorchJob, whose operator tells every pod where the
first is (MASTER_ADDR, MASTER_PORT) and which it is itself (RANK, counted over pods here).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

CONFIG_FOLDER = "/etc/vlmcourse"
CONFIG_NAME = "config.toml"
DEEPSPEED_NAME = "ds_config.json"
RUNS_FOLDER = "/runs"
SHARED_MEMORY = "/dev/shm"
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""RFC 1123."""
MAX_LABEL_CHARS = 63
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
QUANTITY = re.compile(r"(?=.*[1-9])(0|[1-9]\d*)(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)")
"""Kubernetes reads a number without a unit as bytes, which nobody means."""
CONTAINER = "pytorch"
"""The operator looks for a container of this name."""
HEAD = """\
# Written by vlmcourse launch. It needs the Kubeflow training operator (kubeflow.org/v1) in the cluster.
# Paths in the configuration (data.path, model.hf_folder) are looked up in the container; runs are written to /runs.
"""
LOST = "# Without --claim what the run writes is lost when its pods are removed.\n"


@dataclass(frozen=True, kw_only=True)
class PodRequest:
    """What a job asks of a cluster."""

    name: str
    nodes: int
    nproc: int
    """Ranks in each pod."""
    image: str
    namespace: str
    gpus: int
    """Of each pod; 0 for none."""
    cpus: int = 0
    """Cores of each pod; 0 leaves it to the cluster."""
    memory: str = ""
    """Of each pod, such as 64Gi; empty leaves it to the cluster."""
    claim: str = ""
    """A PersistentVolumeClaim that keeps what the run writes; empty for none."""


def check_pods(pods: PodRequest) -> list[str]:
    """Return what a cluster would refuse, one sentence each."""
    found = []
    # The operator names a service after each pod: a label that begins with a letter (RFC 1035).
    longest = MAX_LABEL_CHARS - len(f"-worker-{max(0, pods.nodes - 2)}")
    if not LABEL.fullmatch(pods.name) or not pods.name[0].isalpha() or len(pods.name) > longest:
        found.append(
            f"--name {pods.name!r}: must be at most {longest} small letters, digits and '-', begin with a letter and "
            f"not end with '-' (RFC 1123), such as {suggest_name(pods.name, longest)!r}"
        )
    for flag, value in {"--namespace": pods.namespace, "--claim": pods.claim}.items():
        if value and (not LABEL.fullmatch(value) or len(value) > MAX_LABEL_CHARS):
            found.append(
                f"{flag} {value!r}: must be at most {MAX_LABEL_CHARS} small letters, digits and '-' (RFC 1123)"
            )
    if not pods.image:
        found.append("--image is missing: name an image with vlmcourse in it (docker/gpu.Dockerfile makes one)")
    elif not IMAGE.fullmatch(pods.image):
        found.append(f"--image {pods.image!r}: must be the name of a container image, such as registry/vlmcourse:gpu")
    if pods.memory and not QUANTITY.fullmatch(pods.memory):
        found.append(
            f"--memory {pods.memory!r}: must be a number with a unit, such as 64Gi (Ki, Mi, Gi, Ti; k, M, G, T)"
        )
    return found


def suggest_name(name: str, longest: int) -> str:
    """Return the nearest name that a cluster takes."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}"
    return label[:longest].strip("-")


def write_pytorchjob(pods: PodRequest, toml: str, train_flags: tuple[str, ...], deepspeed_json: str = "") -> str:
    """Return the YAML.

    Args:
        pods: checked.
        toml: text of the configuration.
        train_flags: for `vlmcourse train`, after the file.
        deepspeed_json: text of the ds_config.json that the configuration names; pods read this one instead.
    """
    names = {"namespace": pods.namespace}
    if deepspeed_json:
        train_flags = (*train_flags, "--set", f"parallel.deepspeed_config={CONFIG_FOLDER}/{DEEPSPEED_NAME}")
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{pods.name}-config", **names},
        "data": {CONFIG_NAME: toml} | ({DEEPSPEED_NAME: deepspeed_json} if deepspeed_json else {}),
    }
    replicas = {"Master": _describe_replicas(pods, 1, train_flags)}
    if pods.nodes > 1:
        replicas["Worker"] = _describe_replicas(pods, pods.nodes - 1, train_flags)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": pods.name, **names},
        "spec": {"runPolicy": {"cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": replicas},
    }
    head = HEAD if pods.claim else HEAD + LOST
    return head + yaml.dump_all(
        [config, job], Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=1000
    )


def build_command(pods: PodRequest, train_flags: tuple[str, ...]) -> list[str]:
    """Return what a pod runs; Kubernetes puts the operator's variables in the place of $(...).

    Pods do not know each other's host names, so they meet at the first pod's service, and each says which one it is.
    """
    meeting = ["--node-rank", "$(RANK)", "--master-addr", "$(MASTER_ADDR)", "--master-port", "$(MASTER_PORT)"]
    command = ["torchrun", "--nnodes", str(pods.nodes), "--nproc-per-node", str(pods.nproc), *meeting]
    # What stands last wins: the container's folder holds what the run writes.
    train = ["-m", "vlmcourse.cli", "train", f"{CONFIG_FOLDER}/{CONFIG_NAME}", *map(escape, train_flags)]
    return [*command, *train, "--set", f"run.output_dir={RUNS_FOLDER}"]


def escape(word: str) -> str:
    """Return a word that Kubernetes leaves as it is: it reads $(NAME) as a variable, and $$ as one dollar."""
    return word.replace("$", "$$")


def _describe_replicas(pods: PodRequest, count: int, train_flags: tuple[str, ...]) -> dict[str, Any]:
    wanted = {"nvidia.com/gpu": pods.gpus, "cpu": pods.cpus, "memory": pods.memory}
    limits = {name: amount for name, amount in wanted.items() if amount}
    mounts = {"config": CONFIG_FOLDER, "runs": RUNS_FOLDER, "shared-memory": SHARED_MEMORY}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": pods.image,
        "command": build_command(pods, train_flags),
        "volumeMounts": [{"name": name, "mountPath": folder} for name, folder in mounts.items()],
    }
    if not pods.gpus:  # a node's container runtime may hand in GPUs that nobody asked for
        container["env"] = [{"name": "CUDA_VISIBLE_DEVICES", "value": ""}]
    if limits:
        container["resources"] = {"limits": limits}
    runs = {"persistentVolumeClaim": {"claimName": pods.claim}} if pods.claim else {"emptyDir": {}}
    volumes = [
        {"name": "config", "configMap": {"name": f"{pods.name}-config"}},
        {"name": "runs", **runs},
        # NCCL and data loaders share memory between the ranks of a pod; a container has 64 MiB of it by default.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "replicas": count,
        "restartPolicy": "Never",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and nothing as a reference to what stood before."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out twice."""
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _write_text)
