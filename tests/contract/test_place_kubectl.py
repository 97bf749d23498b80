"""Kubernetes by the real kubectl against the stand-in, and the manifests of all three kinds."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from cloud_cases import open_case
from kubernetes_server import NAMESPACE, SmallKubectl, problems

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_samples import trial_bundle
from place_contract import order

from graftwork.fleet.kubernetes import CommandResult, KubernetesPlace, run_kubectl
from graftwork.fleet.manifests import manifest_of
from graftwork.fleet.place import Refused
from graftwork.fleet.settings import KubernetesSettings
from graftwork.fleet.simulator import CARD, USD_PER_HOUR, SimulatedProvider
from graftwork.records.fleet import PlacedJob

WORDS = ["python3", "/graftwork/jobs/it's/in/start.py", "--seconds", "60"]
JOBSET_FIELDS = {
    "replicatedJobs",
    "network",
    "successPolicy",
    "failurePolicy",
    "startupPolicy",
    "suspend",
    "coordinator",
    "managedBy",
    "ttlSecondsAfterFinished",
}
RAYJOB_FIELDS = {
    "activeDeadlineSeconds",
    "backoffLimit",
    "rayClusterSpec",
    "submitterPodTemplate",
    "metadata",
    "clusterSelector",
    "submitterConfig",
    "managedBy",
    "deletionStrategy",
    "entrypoint",
    "runtimeEnvYAML",
    "jobId",
    "submissionMode",
    "entrypointResources",
    "entrypointNumCpus",
    "entrypointNumGpus",
    "ttlSecondsAfterFinished",
    "shutdownAfterJobFinishes",
    "suspend",
}
"""The fields of `spec` in the published definitions: JobSet v1alpha2, RayJob v1."""


def settings(**changes):
    values = {"namespace": NAMESPACE, "image": "me/image:1", "claim": "files", "storage": "/tmp/none"}
    return KubernetesSettings(**(values | changes))


def make(**changes):
    return manifest_of("graft-x", WORDS, settings(**changes), seconds=600, secrets=True, gpu=True)


def test_a_job_has_a_time_limit_retries_a_card_and_its_secret():
    body = make(node_selector={"pool": "gpu"})
    assert problems("V1Job", body) == []
    assert body["spec"]["activeDeadlineSeconds"] == 1200
    pod = body["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert container["envFrom"] == [{"secretRef": {"name": "graft-x"}}]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert problems("V1Job", {**body, "spec": {**body["spec"], "backOffLimit": 1}})


def test_a_jobset_wraps_the_same_job():
    body = make(kind="JobSet")
    assert body["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert set(body["spec"]) <= JOBSET_FIELDS
    (replicated,) = body["spec"]["replicatedJobs"]
    assert set(replicated) <= {"name", "groupName", "template", "replicas", "dependsOn"}
    assert problems("V1JobSpec", replicated["template"]["spec"]) == []


def test_a_rayjob_ends_its_cluster_and_its_head_is_a_pod():
    body = make(kind="RayJob")
    assert body["apiVersion"] == "ray.io/v1"
    assert set(body["spec"]) <= RAYJOB_FIELDS
    assert body["spec"]["shutdownAfterJobFinishes"] is True
    assert "'/graftwork/jobs/it'\"'\"'s/in/start.py'" in body["spec"]["entrypoint"]
    head = body["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert set(head) <= {
        "serviceType",
        "headService",
        "enableIngress",
        "rayStartParams",
        "template",
        "resources",
    }
    assert problems("V1PodTemplateSpec", head["template"]) == []


@pytest.mark.parametrize("kind", ["Job", "JobSet", "RayJob"])
def test_a_queue_of_kueue_starts_the_job_itself(kind):
    body = make(kind=kind, queue="team")
    assert body["spec"]["suspend"] is True
    assert body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_no_kubectl_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="no kubectl") as caught:
        KubernetesPlace(settings()).list()
    assert "install kubectl" in caught.value.fix


def test_a_volume_that_is_not_mounted_is_explained_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    bundle, _ = trial_bundle(tmp_path)
    with open_case("kubernetes", SimulatedProvider(), tmp_path, monkeypatch) as case:
        run = SmallKubectl(case.url, case.token)
        place = KubernetesPlace(case.settings(storage=str(tmp_path / "file" / "x")), run=run)
        with pytest.raises(Refused, match="storage for the files of jobs cannot be used") as caught:
            place.submit(order(bundle, gpu=CARD), secrets={})
        assert "fleet.kubernetes.storage" in caught.value.fix
        with pytest.raises(Refused, match="has no card H200"):
            place.submit(order(bundle, gpu="H200"), secrets={})
        assert case.provider.machines == []


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with open_case("kubernetes", SimulatedProvider(jobs_only=True), tmp_path, monkeypatch) as case:
        # Without TLS kubectl sends no token.
        case.api.needs_token = False
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": case.api.url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        monkeypatch.setenv("HOME", str(tmp_path))
        yield case


@pytest.mark.slow
def test_the_real_kubectl_makes_lists_and_removes_a_job(kubectl, tmp_path):
    bundle, _ = trial_bundle(tmp_path)

    def run(words, given):
        # The stand-in publishes no OpenAPI description; it checks the objects itself.
        return run_kubectl([*words, "--validate=false"] if words[0] == "create" else words, given)

    place = KubernetesPlace(kubectl.settings(), run=run)
    assert place.offer()[0].gpu == CARD
    ordered = order(bundle, gpu=CARD, usd_per_hour=USD_PER_HOUR, seconds=600.0)
    job = place.submit(ordered, secrets={"TOKEN": "s3cr3t"})
    assert kubectl.api.secrets == {job.label: {"TOKEN": "s3cr3t"}}
    assert place.submit(ordered, secrets={}).label == job.label
    assert [found.label for found in place.list()] == [job.label]
    assert place.poll(job).phase == "starting"
    place.stop(job, at_once=True)
    assert place.list() == ()
    assert place.poll(job).phase == "gone"
    assert kubectl.api.secrets == {}
    assert json.dumps(place.log(job)) == '""'


KILLED = {"containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]}
NO_IMAGE = {
    "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}]
}
EVICTED = {"reason": "Evicted", "message": "The node was low on resource: memory."}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (KILLED, "its container: OOMKilled, exit code 137"),
        (NO_IMAGE, "its container: ImagePullBackOff not found"),
        (EVICTED, "the pod: Evicted The node was low on resource: memory."),
    ],
)
def test_a_job_that_failed_has_the_reason_of_its_pod(tmp_path, status, reason):
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    job = {"metadata": {"name": "graft-x"}, "status": {"conditions": [failed]}}

    def run(words, _given):
        found = {"items": [{"status": status}, {"status": status}]} if "pods" in words else job
        return CommandResult(0, json.dumps(found), "")

    place = KubernetesPlace(settings(storage=str(tmp_path)), run=run)
    placed = PlacedJob(place="kubernetes", id="graft-x", label="graft-x")
    assert place.poll(placed).message == f"BackoffLimitExceeded; {reason}"
