"""Manifests of Kubernetes for a job: Job, JobSet or RayJob, and the secret that goes with it. Pure.

In: the label, the command and the settings of the cluster. Out: objects as `kubectl create -f -` takes them.
The volume claim is mounted; a time limit, a number of retries and the removal of finished objects are set.
"""

import shlex
from typing import Any

from graftwork.fleet.settings import KubernetesSettings

MOUNT = "/graftwork"
MARK = "graftwork"
"""The label that names the job on every object."""
RETRIES = 3
"""A pod whose node was lost is made again, and goes on from its checkpoint."""
GRACE_SECONDS = 120
KEPT_SECONDS = 86_400
SPARE_SECONDS = 600
API = {"Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2", "RayJob": "ray.io/v1"}
RESOURCES = {"Job": "jobs.batch", "JobSet": "jobsets.jobset.x-k8s.io", "RayJob": "rayjobs.ray.io"}


def manifest_of(
    label: str, words: list[str], settings: KubernetesSettings, *, seconds: float, secrets: bool, gpu: bool
) -> dict[str, Any]:
    """The object that runs the job."""
    kind = settings.kind
    queue = {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}
    pod = _pod(words, label, settings, secrets=secrets, gpu=gpu)
    limit = int(seconds) + SPARE_SECONDS
    if kind == "RayJob":
        spec = _ray_job(words, pod, limit)
    else:
        job: dict[str, Any] = {"backoffLimit": RETRIES, "activeDeadlineSeconds": limit, "template": pod}
        if kind == "JobSet":
            replicated = {"name": "job", "replicas": 1, "template": {"spec": job}}
            spec = {"replicatedJobs": [replicated], "failurePolicy": {"maxRestarts": RETRIES}}
            spec["ttlSecondsAfterFinished"] = KEPT_SECONDS
        else:
            spec = {**job, "ttlSecondsAfterFinished": KEPT_SECONDS}
    # Kueue starts what is suspended once its queue has room.
    spec |= {"suspend": True} if settings.queue else {}
    metadata = {"name": label, "namespace": settings.namespace, "labels": {MARK: label, **queue}}
    return {"apiVersion": API[kind], "kind": kind, "metadata": metadata, "spec": spec}


def secret_of(label: str, secrets: dict[str, str], settings: KubernetesSettings) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": label, "namespace": settings.namespace, "labels": {MARK: label}},
        "type": "Opaque",
        "stringData": secrets,
    }


def _pod(
    words: list[str], label: str, settings: KubernetesSettings, *, secrets: bool, gpu: bool
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "job",
        "image": settings.image,
        "command": words,
        "volumeMounts": [{"name": "files", "mountPath": MOUNT}],
    }
    if gpu:
        container["resources"] = {"limits": {settings.resource: "1"}}
    if secrets:
        container["envFrom"] = [{"secretRef": {"name": label}}]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": settings.claim}}],
    }
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    return {"metadata": {"labels": {MARK: label}}, "spec": spec}


def _ray_job(words: list[str], pod: dict[str, Any], limit: int) -> dict[str, Any]:
    """A cluster of one node for one job; Kueue refuses a RayJob whose cluster stays."""
    spec = pod["spec"]
    container = {name: value for name, value in spec["containers"][0].items() if name != "command"}
    node = {name: value for name, value in spec.items() if name != "restartPolicy"}
    head = {"metadata": pod["metadata"], "spec": {**node, "containers": [container]}}
    return {
        "entrypoint": shlex.join(words),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "activeDeadlineSeconds": limit,
        "backoffLimit": RETRIES,
        "rayClusterSpec": {"headGroupSpec": {"rayStartParams": {}, "template": head}},
    }
