"""A JobSet of Kubernetes: processes on GPU or CPU nodes, or on TPU slices of GKE.

Sources: JobSet 0.8 (jobset.sigs.k8s.io; types and webhook of v1alpha2), Kubernetes 1.31 (pod
failure policy of jobs), cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (TPU slices).
"""

import json
import math
import os
import pathlib
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.errors import UserError

from .bundle import check_image_context
from .job import LABEL, Job, check_form, is_below

_MANIFEST = "jobset.json"
_PODS = "worker"  # Name of the replicated job, and of the container.
_PORT = 8476  # Each pod has an address of its own.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_USER = 1000  # Of docker/Dockerfile.
_DOCKERFILE = pathlib.Path(__file__).parent / "docker/Dockerfile"

_SUBDOMAIN = rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?"
_FORMS = {
    "image": (r"[^\s-]\S*", "an image such as europe-docker.pkg.dev/project/images/moelib:1"),
    "namespace": (LABEL, "the name of a namespace"),
    "queue": (_SUBDOMAIN, "the name of a local queue of Kueue"),
    "service_account": (_SUBDOMAIN, "the name of a service account"),
    "cpu": (_QUANTITY, "a number of cores such as 96"),
    "memory": (_QUANTITY, "a size such as 512Gi"),
    "shared_memory": (_QUANTITY, "a size such as 16Gi"),
}

# Dimensions of the topologies of each accelerator, from the page on TPU slices.
_TPU_DIMENSIONS = {"tpu-v5-lite-podslice": 2, "tpu-v5p-slice": 3, "tpu-v6e-slice": 2}


class KubernetesJob(Job):
    """A JobSet with one process per node, which restarts whole when a process is lost.

    `num_processes` is the number of nodes; for TPUs, it follows from the topology.
    """

    shares_files = False

    @config_class
    class Config(Job.Config):
        program: Sequence[str] = ("moelib",)  # Command in the image before the arguments.
        image: Required[str] = REQUIRED  # Image of the container, with moelib and the user's code.
        build: bool = False  # Builds the image from the current folder and pushes it first.
        namespace: str = "default"  # Namespace of the job.
        queue: str | None = None  # Local queue of Kueue; None for a cluster without Kueue.
        gpus_per_node: int | None = None  # NVIDIA GPUs of each node; None for nodes without.
        tpu_accelerator: str | None = None  # TPU of GKE, such as tpu-v6e-slice.
        tpu_topology: str | None = None  # Topology of each slice, such as 4x4.
        tpu_chips_per_host: int = 4  # 8 for machines such as ct6e-standard-8t.
        num_slices: int = 1  # Number of TPU slices.
        node_selector: dict[str, str] = {}  # Labels of the nodes, such as the model of their GPUs.
        cpu: str | None = None  # CPU cores that each process requests.
        memory: str | None = None  # Memory of each process, such as 512Gi.
        shared_memory: str = "16Gi"  # Limit of /dev/shm, which NCCL uses; counts as memory.
        volumes: dict[str, str] = {}  # {path: persistent volume claim that is mounted there}.
        secrets: dict[str, str] = {}  # {environment variable: "secret/key"} of Kubernetes secrets.
        service_account: str | None = None  # Service account; None for no access to the cluster.
        stop_seconds: int = 600  # Seconds that a run has to save after SIGTERM.

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        for field, (form, what) in _FORMS.items():
            check_form(field, getattr(cfg, field), form, what)
        self._num_hosts, self._chips = self._slice() if cfg.tpu_accelerator else (0, 0)
        if cfg.tpu_topology and not cfg.tpu_accelerator:
            raise UserError(f"tpu_topology={cfg.tpu_topology!r}: set tpu_accelerator, too.")
        if cfg.num_slices != 1 and self._num_hosts < 2:
            raise UserError(
                f"num_slices={cfg.num_slices}: GKE connects several slices only if each has more "
                "than one TPU host; set 1, or a larger tpu_topology."
            )
        if cfg.gpus_per_node is not None and (cfg.gpus_per_node < 1 or self._num_hosts):
            raise UserError(
                f"gpus_per_node={cfg.gpus_per_node}: set 1 or more, or None for nodes without GPUs."
            )
        if cfg.stop_seconds < 1:
            raise UserError(f"stop_seconds={cfg.stop_seconds}: set 1 or more.")
        self._check_name()
        self._check_variables()
        for path, claim in cfg.volumes.items():
            if posixpath.normpath(path) != path or path in ("/", "/dev/shm") or path[0] != "/":
                raise UserError(f"volumes={cfg.volumes}: {path!r} is no absolute path for a mount.")
            check_form(f"volumes[{path!r}]", claim, _SUBDOMAIN, "the name of a claim")

    def _slice(self) -> tuple[int, int]:
        """Returns the number of hosts of a TPU slice, and of the chips of each."""
        cfg = self.config
        topology = cfg.tpu_topology or ""
        dimensions = _TPU_DIMENSIONS.get(cfg.tpu_accelerator or "")
        if dimensions is None:
            known = ", ".join(_TPU_DIMENSIONS)
            raise UserError(f"tpu_accelerator={cfg.tpu_accelerator!r}: set one of {known}.")
        example = "x".join("4" * dimensions)
        if not re.fullmatch("x".join(["[1-9][0-9]*"] * dimensions), topology):
            raise UserError(
                f"tpu_topology={cfg.tpu_topology!r}: {cfg.tpu_accelerator} has {dimensions} "
                f"dimensions; set a topology such as {example}."
            )
        num_chips = math.prod(map(int, topology.split("x")))
        chips = min(cfg.tpu_chips_per_host, num_chips)
        if chips not in (1, 4, 8) or num_chips % chips:
            raise UserError(
                f"tpu_topology={cfg.tpu_topology!r} has {num_chips} chips, which do not divide "
                f"into hosts of tpu_chips_per_host={cfg.tpu_chips_per_host}; set a topology such "
                f"as {example}, and 1, 4 or 8 chips per host."
            )
        num_hosts = num_chips // chips
        if cfg.num_processes not in (1, num_hosts * cfg.num_slices):
            raise UserError(
                f"num_processes={cfg.num_processes}: {cfg.num_slices} x {cfg.tpu_topology} have "
                f"{num_hosts * cfg.num_slices} hosts; leave num_processes unset."
            )
        return num_hosts, chips

    def _check_name(self) -> None:
        cfg, pods = self.config, self._num_hosts or self.config.num_processes
        # Names of pods have the indices of job and pod, and five random letters.
        limit = 63 - len(f"-{_PODS}-{cfg.num_slices - 1}-{pods - 1}-abcde")
        if len(cfg.name) > limit or not re.fullmatch(rf"(?=[a-z]){LABEL}", cfg.name):
            raise UserError(
                f"name={cfg.name!r}: set at most {limit} characters of a-z, 0-9 and -, which begin "
                "with a letter and do not end with -."
            )

    def _check_variables(self) -> None:
        cfg = self.config
        self.check_variables("secrets", cfg.secrets)
        if both := sorted(set(cfg.env) & set(cfg.secrets)):
            raise UserError(f"{both[0]} is in env and in secrets; remove it from env.")
        form = rf"{_SUBDOMAIN.replace('$', '/')}/[-._a-zA-Z0-9]+"
        for name, secret in cfg.secrets.items():
            if not re.fullmatch(form, secret):  # Not shown: it might be the secret's value.
                raise UserError(
                    f"secrets[{name!r}] must be the name of a Kubernetes secret and its key, as "
                    "secret/key; `kubectl create secret generic` stores the value."
                )

    def check_trainer_dir(self, folder: str) -> None:
        """Raises UserError if the folder of the run is in no volume and no bucket: it is lost."""
        if "://" not in folder and not is_below(folder, self.config.volumes):
            raise UserError(
                f"--trainer_dir={folder}: a pod loses what it writes there; set a bucket, such as "
                "gs://BUCKET/NAME, or a path in a volume: "
                "--job_set \"volumes={'/runs': 'CLAIM'}\" --trainer_dir=/runs/NAME"
            )

    def files(self) -> Mapping[str, str]:
        """Returns the manifest of the JobSet, as JSON."""
        return {_MANIFEST: json.dumps(self.manifest(), indent=2) + "\n"}

    def manifest(self) -> dict[str, Any]:
        """Returns the JobSet."""
        cfg = self.config
        num_pods = self._num_hosts or cfg.num_processes
        metadata: dict[str, Any] = {"name": cfg.name, "namespace": cfg.namespace}
        if cfg.queue:
            metadata["labels"] = {"kueue.x-k8s.io/queue-name": cfg.queue}
        if self._num_hosts > 1:  # A node pool is a slice; each slice gets one.
            key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
            metadata["annotations"] = {key: "cloud.google.com/gke-nodepool"}
        job = {
            "completionMode": "Indexed",
            "completions": num_pods,
            "parallelism": num_pods,
            "backoffLimit": 0,  # The JobSet restarts all pods, never one alone.
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Count",  # Evicted or preempted: restart.
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    {
                        "action": "FailJob",  # An error, which would come back.
                        "onExitCodes": {
                            "containerName": _PODS,
                            "operator": "NotIn",
                            "values": self.continued,
                        },
                    },
                ]
            },
            "template": {"spec": self._pod()},
        }
        failure_policy = {
            "maxRestarts": cfg.max_restarts,
            # Two starts of a run must not write to its folder at once.
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {
                    "name": "error",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        }
        replicated = {"name": _PODS, "replicas": cfg.num_slices, "template": {"spec": job}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "failurePolicy": failure_policy,
                "replicatedJobs": [replicated],
            },
        }

    def _pod(self) -> dict[str, Any]:
        cfg = self.config
        selector = dict(cfg.node_selector)
        devices: dict[str, str] = {}
        if self._num_hosts:
            selector["cloud.google.com/gke-tpu-accelerator"] = cfg.tpu_accelerator or ""
            selector["cloud.google.com/gke-tpu-topology"] = cfg.tpu_topology or ""
            devices = {"google.com/tpu": str(self._chips)}
        elif cfg.gpus_per_node:
            devices = {"nvidia.com/gpu": str(cfg.gpus_per_node)}
        sizes = {"cpu": cfg.cpu, "memory": cfg.memory}
        requests = {name: size for name, size in sizes.items() if size} | devices
        limits = {name: size for name, size in requests.items() if name != "cpu"}
        volumes: list[dict[str, Any]] = [
            {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}}
            for i, claim in enumerate(cfg.volumes.values())
        ]
        mounts = [{"name": f"claim-{i}", "mountPath": path} for i, path in enumerate(cfg.volumes)]
        memory = {"medium": "Memory", "sizeLimit": cfg.shared_memory}
        # No probe: a run that hangs ends itself, with `crash_on_hang_timeout_seconds`.
        container = {
            "name": _PODS,
            "image": cfg.image,
            "command": [_literal(word) for word in self.command_of_process()],
            "env": self._variables(),
            "resources": {"requests": requests, "limits": limits},
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
        }
        account = cfg.service_account
        return {
            "restartPolicy": "Never",  # Which a pod failure policy requires.
            "terminationGracePeriodSeconds": cfg.stop_seconds,
            **(
                {"serviceAccountName": account}
                if account
                else {"automountServiceAccountToken": False}
            ),
            "nodeSelector": selector,
            "tolerations": [
                {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in devices
            ],
            "securityContext": {"fsGroup": _USER, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [container],
            "volumes": [*volumes, {"name": "shared-memory", "emptyDir": memory}],
        }

    def _variables(self) -> list[dict[str, Any]]:
        cfg = self.config
        texts = {"PYTHONUNBUFFERED": "1", **cfg.env}
        variables: list[dict[str, Any]] = []
        # Of a TPU slice, GKE sets variables, which moelib reads.
        if cfg.num_processes > 1 and not self._num_hosts:
            texts["JAX_COORDINATOR_ADDRESS"] = f"{cfg.name}-{_PODS}-0-0.{cfg.name}:{_PORT}"
            texts["JAX_NUM_PROCESSES"] = str(cfg.num_processes)
            index = {"fieldRef": {"fieldPath": _INDEX}}
            variables.append({"name": "JAX_PROCESS_ID", "valueFrom": index})
        for name, secret in cfg.secrets.items():
            secret_name, _, key = secret.partition("/")
            reference = {"secretKeyRef": {"name": secret_name, "key": key}}
            variables.append({"name": name, "valueFrom": reference})
        return [{"name": name, "value": _literal(x)} for name, x in texts.items()] + variables

    def commands(self) -> Sequence[Sequence[str]]:
        """Returns the command that creates the JobSet, after those of its image if it is built."""
        apply = ["kubectl", "apply", "-f", self.path(_MANIFEST)]
        if not self.config.build:
            return [apply]
        check_image_context()
        return [*self._image_commands(), apply]

    def _image_commands(self) -> Sequence[Sequence[str]]:
        cfg = self.config
        extra = "tpu," if self._num_hosts else "gpu," if cfg.gpus_per_node else ""
        dockerfile = os.path.relpath(_DOCKERFILE)
        build = ["docker", "build", "--file", dockerfile, "--build-arg", f"EXTRA={extra}gcs,s3"]
        return [[*build, "--tag", cfg.image, "."], ["docker", "push", cfg.image]]

    def describe(self) -> str:
        """Returns the manifest and the commands; those of the image as comments if not built."""
        if self.config.build:
            return super().describe()
        lines = [f"# {shlex.join(command)}\n" for command in self._image_commands()]
        return "# Commands for the image:\n" + "".join(lines) + super().describe()


def _literal(text: str) -> str:
    """Returns text in which Kubernetes expands no $(NAME)."""
    return text.replace("$", "$$")
