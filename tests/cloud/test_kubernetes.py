"""Manifests of JobSets, validated by the schemas of Kubernetes and by one of ours."""

import json
import pathlib
import subprocess

import pytest

from cloud.bundle import EXCLUDED
from cloud.kubernetes import KubernetesJob
from moelib.cli.main import run
from moelib.core.errors import UserError

jsonschema = pytest.importorskip("jsonschema")  # Of the extra dev.
kubernetes_validate = pytest.importorskip("kubernetes_validate")

# Our own: the fields of JobSet v1alpha2 that we write, after the types of JobSet 0.8.
_JOB_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object", "required": ["name", "namespace"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "network": {
                    "type": "object",
                    "additionalProperties": {"type": "boolean"},
                    "propertyNames": {"enum": ["enableDNSHostnames", "publishNotReadyAddresses"]},
                },
                "failurePolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "maxRestarts": {"type": "integer", "minimum": 0},
                        "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
                        "rules": {
                            "items": {
                                "additionalProperties": False,
                                "required": ["name", "action"],
                                "properties": {
                                    "name": {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                                    "action": {"enum": ["FailJobSet", "RestartJobSet"]},
                                    "onJobFailureReasons": {
                                        "items": {
                                            "enum": ["BackoffLimitExceeded", "PodFailurePolicy"]
                                        }
                                    },
                                },
                            }
                        },
                    },
                },
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        "additionalProperties": False,
                        "required": ["name", "replicas", "template"],
                        "properties": {
                            "name": {"type": "string"},
                            "replicas": {"type": "integer", "minimum": 1},
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}
_TPU = {"tpu_accelerator": "tpu-v6e-slice", "tpu_topology": "4x4"}


def job(**fields):
    fields = {"arguments": ["train"], "folder": "jobs/a", "image": "r/m:1", **fields}
    return KubernetesJob.default_config().set(**fields).instantiate()


def job_spec(**fields):
    """Returns the job of the manifest, after validating both."""
    manifest = json.loads(job(**fields).files()["jobset.json"])
    jsonschema.validate(manifest, _JOB_SET)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec}
    kubernetes_validate.validate(as_job, "1.31", strict=True)
    return spec


def container(spec):
    (found,) = spec["template"]["spec"]["containers"]
    return found


def variables(spec):
    return {each.pop("name"): each for each in container(spec)["env"]}


def test_gpu_nodes_form_a_job():
    spec = job_spec(
        name="small",
        num_processes=4,
        gpus_per_node=8,
        cpu="96",
        memory="512Gi",
        volumes={"/runs": "runs", "/data": "corpus"},
        secrets={"HF_TOKEN": "hugging-face/token"},
        node_selector={"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
        env={"NCCL_DEBUG": "WARN"},
    )
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert container(spec)["resources"] == {
        "requests": {"cpu": "96", "memory": "512Gi", "nvidia.com/gpu": "8"},
        "limits": {"memory": "512Gi", "nvidia.com/gpu": "8"},
    }
    found = variables(spec)
    assert found["JAX_COORDINATOR_ADDRESS"]["value"] == "small-worker-0-0.small:8476"
    assert found["JAX_NUM_PROCESSES"]["value"] == "4"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["JAX_PROCESS_ID"]["valueFrom"] == {"fieldRef": {"fieldPath": index}}
    secret = {"secretKeyRef": {"name": "hugging-face", "key": "token"}}
    assert found["HF_TOKEN"] == {"valueFrom": secret}
    pod = spec["template"]["spec"]
    mounted = {each["mountPath"]: each["name"] for each in container(spec)["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounted["/data"]]["persistentVolumeClaim"] == {"claimName": "corpus"}
    assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips", "hosts", "limit"),
    [  # cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
        ("tpu-v6e-slice", "4x4", 4, 4, "4"),
        ("tpu-v6e-slice", "16x16", 4, 64, "4"),
        ("tpu-v6e-slice", "1x1", 4, 1, "1"),
        ("tpu-v6e-slice", "2x4", 8, 1, "8"),
        ("tpu-v5-lite-podslice", "2x4", 4, 2, "4"),
        ("tpu-v5p-slice", "2x2x1", 4, 1, "4"),
        ("tpu-v5p-slice", "4x4x8", 4, 32, "4"),
    ],
)
def test_the_hosts_of_a_slice_follow_from_its_topology(accelerator, topology, chips, hosts, limit):
    fields = {"tpu_topology": topology, "tpu_chips_per_host": chips}
    spec = job_spec(tpu_accelerator=accelerator, **fields)
    assert spec["completions"] == spec["parallelism"] == hosts
    assert container(spec)["resources"]["limits"] == {"google.com/tpu": limit}
    assert spec["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert not any(name.startswith("JAX_") for name in variables(spec))  # GKE sets its own.


def test_slices_are_replicas_on_node_pools_of_their_own():
    manifest = job(**_TPU, num_slices=2, queue="research").manifest()
    jsonschema.validate(manifest, _JOB_SET)
    assert manifest["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    (topology,) = manifest["metadata"]["annotations"].values()
    assert topology == "cloud.google.com/gke-nodepool"


def test_a_lost_process_restarts_the_job_and_an_error_ends_it():
    manifest = job(max_restarts=3).manifest()
    policy = manifest["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    assert policy["maxRestarts"] == 3
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    spec = job_spec()
    assert spec["backoffLimit"] == 0
    evicted, failed = spec["podFailurePolicy"]["rules"]
    assert (evicted["action"], failed["action"]) == ("Count", "FailJob")
    codes = failed["onExitCodes"]
    assert codes["operator"] == "NotIn"
    assert codes["values"] == [75, 87, 88, 134, 135, 137, 139, 143]
    own = job(stopped_status=80).manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert 80 in own["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
    assert not {1, 2} & set(codes["values"])
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 600)


def test_kubernetes_expands_nothing():
    spec = job_spec(arguments=["train", "--set=x=$(HOME)"], env={"A": "$(B) $"})
    assert container(spec)["command"] == ["moelib", "train", "--set=x=$$(HOME)"]
    assert variables(spec)["A"]["value"] == "$$(B) $$"


def test_a_secret_in_the_wrong_field_is_not_shown():
    with pytest.raises(UserError, match=r"secrets\['HF_TOKEN'\]") as error:
        job(secrets={"HF_TOKEN": "hf_1234"})
    assert "1234" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "My_Run"}, "name='My_Run'"),
        ({"name": "4b"}, "name='4b'"),
        ({"name": "a" * 47}, "name='a+'.* at most 46 characters"),
        ({"name": "a" * 46, "num_processes": 11}, "at most 45 characters"),
        ({"image": "a b"}, "image='a b'"),
        ({"namespace": "A"}, "namespace='A'"),
        ({"memory": "512GB"}, "memory='512GB'.*512Gi"),
        ({"env": {"A-B": "1"}}, "env has 'A-B'"),
        ({"secrets": {"1A": "s/k"}}, "secrets has '1A'"),
        ({"env": {"A": "1"}, "secrets": {"A": "s/k"}}, "A is in env and in secrets"),
        ({"volumes": {"runs": "c"}}, "'runs' is no absolute path"),
        ({"volumes": {"/dev/shm": "c"}}, "'/dev/shm' is no"),
        ({"volumes": {"/runs": "C D"}}, "volumes.*'C D'"),
        ({"gpus_per_node": 0}, "gpus_per_node=0"),
        ({**_TPU, "gpus_per_node": 8}, "gpus_per_node=8"),
        ({**_TPU, "num_processes": 3}, "num_processes=3.*4 hosts"),
        ({**_TPU, "tpu_topology": "4x4x4"}, "tpu_topology='4x4x4'.*2 dimensions.*4x4"),
        ({**_TPU, "tpu_topology": "4 by 4"}, "tpu_topology='4 by 4'"),
        ({**_TPU, "tpu_topology": "3x3"}, "tpu_topology='3x3' has 9 chips"),
        ({**_TPU, "tpu_topology": None}, "tpu_topology=None"),
        ({**_TPU, "tpu_accelerator": "v6e"}, "tpu_accelerator='v6e'.*tpu-v6e-slice"),
        ({**_TPU, "tpu_topology": "2x2", "num_slices": 2}, "num_slices=2"),
        ({"tpu_topology": "4x4"}, "tpu_topology='4x4'.*tpu_accelerator"),
        ({"stop_seconds": 0}, "stop_seconds=0"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        job(**fields)


_TRAIN = "launch", "--dry_run", "--module=tests.cli.test_launch", "--config=tiny"
_FLAGS = "--job=kubernetes", "--job_set=image=r/m:1"


def test_the_command_prints_the_manifest_and_what_to_run(capsys):
    fields = "--job_set=volumes={'/runs': 'claim'}", "--job_set=gpus_per_node=8"
    assert run([*_TRAIN, *_FLAGS, *fields, "--trainer_dir=/runs/small"]) == 0
    out = capsys.readouterr().out
    assert "EXTRA=gpu,gcs,s3 --tag r/m:1 ." in out
    assert "# docker push r/m:1\n" in out
    assert out.endswith("\nkubectl apply -f jobs/small/jobset.json\n")
    assert '"--trainer_dir=/runs/small"' in out


def test_an_image_with_the_key_of_an_account_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-project.json").write_text('{"private_key": "x"}')
    with pytest.raises(UserError, match=r"my-project\.json"):
        job(build=True).commands()


def test_an_image_is_built_before_the_job_is_created():
    build, push, apply = job(**_TPU, build=True).commands()
    dockerfile = pathlib.Path(build[build.index("--file") + 1])
    assert "EXTRA=tpu,gcs,s3" in build
    ignored = dockerfile.with_name("Dockerfile.dockerignore").read_text().splitlines()[1:]
    assert ignored == [*(f"**/{name}" for name in EXCLUDED), "runs/", "jobs/", "tmp/"]
    assert push == ["docker", "push", "r/m:1"]
    assert apply[0] == "kubectl"


@pytest.mark.parametrize(
    "folder", ["runs/small", "/other/small", "/runs-2/small", "/runs/../small"]
)
def test_a_run_outside_of_the_volumes_is_refused(capsys, folder):
    volume = "--job_set=volumes={'/runs': 'claim'}"
    assert run([*_TRAIN, *_FLAGS, volume, f"--trainer_dir={folder}"]) == 2
    assert f"--trainer_dir={folder}" in capsys.readouterr().err


def test_a_job_without_an_image_is_refused(capsys):
    assert run([*_TRAIN, "--job=kubernetes", "--trainer_dir=/runs/a"]) == 2
    assert "image" in capsys.readouterr().err


def test_the_shell_commands_of_the_image_are_valid():
    text = pathlib.Path("cloud/docker/Dockerfile").read_text()
    commands = text.replace("\\\n", "").split("RUN ")[1:]
    shell = "\n".join(
        line.splitlines()[0].removeprefix("--mount=type=bind,target=/context") for line in commands
    )
    subprocess.run(["sh", "-n"], input=shell, text=True, check=True)
