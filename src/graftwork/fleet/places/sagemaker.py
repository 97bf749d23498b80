"""SageMaker as a place, by boto3. Contract-tested against a stand-in, not live-validated.

Input: an order. Output: a training job whose name is the job's label: SageMaker refuses a second one of that
name. Bundles and results go through S3; the work folder is the job's checkpoint folder, which SageMaker
copies to S3 and brings back after a spot machine was taken away. Secrets go through Secrets Manager.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, Self

from pydantic import Field

from graftwork.fleet.bundle import BUNDLE_FILE
from graftwork.fleet.place import LABEL, Login, NotThere, PlaceUnreachable, Refused
from graftwork.fleet.places.storage import START, MachinePrices, StoragePlace, read_file
from graftwork.records.base import NotSecret, Record
from graftwork.records.errors import GraftError, needs_extra
from graftwork.records.fleet import JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

SPARE_SECONDS = 600
"""SageMaker's own limit comes this long after that of the job: for the download of the image and the data."""
WAIT_SECONDS = 3600
"""How long a spot job may wait for a machine, in all."""
FOLDER = "graftwork"
"""Folder in the bucket."""
INPUT, CHECKPOINTS = "/opt/ml/input/data", "/opt/ml/checkpoints"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
RUNNING = ("Downloading", "Training", "Uploading", "Stopping", "Interrupted", "Restarting")
ENDED = ("Completed", "Failed", "Stopped")
DENIED = (
    "UnrecognizedClientException", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken",
    "ExpiredTokenException", "InvalidClientTokenId", "AccessDenied", "AccessDeniedException",
    "NoCredentialsError", "NoRegionError", "PartialCredentialsError",
)  # fmt: skip


class SageMakerSettings(Record):
    """Training jobs of SageMaker. The login and the region are those of boto3."""

    role: Annotated[str, NotSecret("the name of a role")] = Field(
        description="ARN of the role that jobs run as; it needs the bucket and Secrets Manager."
    )
    bucket: str = Field(min_length=3, description="S3 bucket for bundles, checkpoints and results.")
    image: str = Field(
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.11.0-gpu-py312-cu128-ubuntu24.04-sagemaker",
        description="Docker image in ECR with Python 3.11 or later and boto3 (`graft fleet image`).",
    )
    instances: dict[str, float] = Field(
        {},
        description="Instance types to use, with their hourly on-demand price in your region. Default: those "
        "in the catalog.",
    )
    spot: bool = Field(
        True, description="Use managed spot training: cheaper, may be interrupted and resumed."
    )
    volume_gb: int = Field(50, ge=10, description="Disk of the machine in GB.")


class SageMakerPlace(StoragePlace):
    name = "sagemaker"
    login = Login(
        "AWS",
        (("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_PROFILE",), ("AWS_WEB_IDENTITY_TOKEN_FILE",)),
        ".aws/credentials",
        "SageMaker, a mirror at s3://",
        url="https://sts.amazonaws.com",
    )
    example = "{role: ARN, bucket: NAME}"

    @classmethod
    def open(cls, settings: SageMakerSettings, *, state: Path, prices: Iterable[Offer]) -> Self:
        del state
        return cls(settings, prices=prices)

    def __init__(self, settings: SageMakerSettings, *, prices: Iterable[Offer] = ()) -> None:
        self._settings = settings
        self._machines = MachinePrices(self.name, settings.instances, prices)
        self._aws = AwsClients()
        self._storage = self._bucket = S3Storage(self._aws, settings.bucket, FOLDER)

    def offer(self) -> tuple[Offer, ...]:
        """The instance types of the settings, or of the catalog, at their on-demand price.

        The price of managed spot is not known before; it is never above the on-demand price.
        """
        _ask(lambda: self._aws.client("sagemaker").list_training_jobs(MaxResults=1))
        return self._machines.rows()

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        offer = self._machines.choose(order)
        job = self._machines.placed(order.label, offer.instance)
        if self._describe(order.label) is not None:
            return job
        listed = [{"prefix": self._bucket.url("blobs/")}, *self.ship(order)]
        self._storage.write(f"jobs/{order.label}/blobs.manifest", json.dumps(listed).encode())
        if secrets:
            stored = {"Name": order.label, "SecretString": json.dumps(dict(secrets))}
            with suppress(_InUse):
                _ask(lambda: self._aws.client("secretsmanager").create_secret(**stored))
        request = self.request_of(order, offer.instance, with_secrets=bool(secrets))
        try:
            _ask(lambda: self._aws.client("sagemaker").create_training_job(**request))
        except _InUse:
            return job
        except Refused:
            self.forget_secrets(order.label)
            raise
        return job

    def request_of(self, order: JobOrder, instance: str, *, with_secrets: bool = False) -> dict[str, Any]:
        """The request that creates the job."""
        settings, label = self._settings, order.label
        seconds = int(order.seconds) + SPARE_SECONDS
        arguments = [f"{INPUT}/job/{START}", "--manifest", f"{INPUT}/job/{BUNDLE_FILE}"]
        arguments += ["--blobs", f"{INPUT}/blobs"]
        arguments += ["--work", CHECKPOINTS, "--scratch", "/tmp/graftwork"]
        arguments += ["--seconds", f"{order.seconds:.0f}", "--label", label]
        arguments += ["--secrets", f"aws:{label}"] if with_secrets else []
        spot = {"MaxWaitTimeInSeconds": seconds + WAIT_SECONDS} if settings.spot else {}
        return {
            "TrainingJobName": label,
            "AlgorithmSpecification": {
                "TrainingImage": settings.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["python3"],
                "ContainerArguments": arguments,
            },
            "RoleArn": settings.role,
            "InputDataConfig": [
                _channel("job", "S3Prefix", self._bucket.url(f"jobs/{label}/in/")),
                _channel("blobs", "ManifestFile", self._bucket.url(f"jobs/{label}/blobs.manifest")),
            ],
            "OutputDataConfig": {"S3OutputPath": self._bucket.url(f"jobs/{label}/model")},
            "ResourceConfig": {
                "InstanceType": instance,
                "InstanceCount": 1,
                "VolumeSizeInGB": settings.volume_gb,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": seconds, **spot},
            "EnableManagedSpotTraining": settings.spot,
            "CheckpointConfig": {
                "S3Uri": self._bucket.url(f"jobs/{label}/out"),
                "LocalPath": CHECKPOINTS,
            },
            "Tags": [{"Key": "graftwork", "Value": label}],
        }

    def show(self, job: PlacedJob) -> JobPoll | None:
        description = self._describe(job.label)
        if description is None:
            return None
        status, second = description["TrainingJobStatus"], description.get("SecondaryStatus", "")
        if status not in ENDED:
            return JobPoll(phase="running" if second in RUNNING else "starting", message=second)
        # A job that was stopped, or ran into a limit, has its checkpoints on S3.
        why, code = description.get("FailureReason") or second, 1 if status == "Failed" else 75
        return JobPoll(phase="ended", exit_code=code, message=f"SageMaker: {status.lower()}, {why}")

    def log(self, job: PlacedJob) -> str:
        if self._describe(job.label) is None:
            return ""
        with suppress(GraftError):
            pages = _ask(
                lambda: self._aws.client("logs").filter_log_events(
                    logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job.label}/"
                )
            )
            if events := pages.get("events", ()):
                return "".join(f"{event['message']}\n" for event in events)
        # Not every user may read logs: what the worker wrote is on S3, too.
        worker = read_file(self._storage, f"jobs/{job.label}/out/run/worker.log") or b""
        return worker.decode(errors="replace")

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        """SageMaker sends TERM and allows two minutes: enough for a checkpoint either way."""
        if not at_once:
            with suppress(GraftError):
                self.ask_to_stop(job.label)
        with suppress(_NotRunning, NotThere):
            _ask(lambda: self._aws.client("sagemaker").stop_training_job(TrainingJobName=job.label))
        if at_once:
            self.forget_secrets(job.label)

    def list(self) -> tuple[PlacedJob, ...]:
        def pages() -> list[dict[str, Any]]:
            lister = self._aws.client("sagemaker").get_paginator("list_training_jobs")
            return [
                page
                for status in ("InProgress", "Stopping")
                for page in lister.paginate(NameContains="graft-", StatusEquals=status)
            ]

        labels = {str(row["TrainingJobName"]) for page in _ask(pages) for row in page["TrainingJobSummaries"]}
        jobs = []
        for label in sorted(label for label in labels if LABEL.fullmatch(label)):
            description = self._describe(label) or {}
            instance = str(description.get("ResourceConfig", {}).get("InstanceType", ""))
            created_at = description["CreationTime"].timestamp() if description.get("CreationTime") else 0.0
            jobs.append(self._machines.placed(label, instance, created_at=created_at))
        return tuple(jobs)

    def _describe(self, label: str) -> dict[str, Any] | None:
        try:
            description: dict[str, Any] = _ask(
                lambda: self._aws.client("sagemaker").describe_training_job(TrainingJobName=label)
            )
        except NotThere:
            return None
        return description

    def forget(self, label: str) -> None:
        client = self._aws.client("secretsmanager")
        with suppress(NotThere):
            _ask(lambda: client.delete_secret(SecretId=label, ForceDeleteWithoutRecovery=True))


class S3Storage:
    """The files of jobs in a folder of a bucket."""

    def __init__(self, aws: "AwsClients", bucket: str, prefix: str) -> None:
        self._aws = aws
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""

    def url(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{name}"

    def sizes(self, prefix: str) -> dict[str, int]:
        def pages() -> dict[str, int]:
            lister = self._aws.client("s3").get_paginator("list_objects_v2")
            return {
                entry["Key"].removeprefix(self._prefix): int(entry["Size"])
                for page in lister.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
                for entry in page.get("Contents", ())
            }

        found: dict[str, int] = _ask(pages)
        return found

    def put(self, name: str, source: Path) -> None:
        _ask(lambda: self._aws.client("s3").upload_file(str(source), self._bucket, self._prefix + name))

    def write(self, name: str, content: bytes) -> None:
        _ask(
            lambda: self._aws.client("s3").put_object(
                Bucket=self._bucket, Key=self._prefix + name, Body=content
            )
        )

    def flush(self) -> None:
        """Every write is complete when it returns."""

    def copy(self, name: str, target: IO[bytes]) -> None:
        def download() -> None:
            body = self._aws.client("s3").get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"]
            shutil.copyfileobj(body, target)

        _ask(download)


class _InUse(Refused):
    """The name is taken: the job or secret already exists."""


class _NotRunning(Refused):
    """The job has ended."""


class AwsClients:
    """Clients of one session of boto3, created on first use."""

    def __init__(self) -> None:
        self._session: Any = None
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        if service not in self._clients:
            with needs_extra("sagemaker", why="the place `sagemaker` is used"):
                import boto3
            self._session = self._session or boto3.Session()
            self._clients[service] = self._session.client(service)
        return self._clients[service]


def _channel(name: str, kind: str, url: str) -> dict[str, Any]:
    source = {"S3DataType": kind, "S3Uri": url, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": "File"}


def _ask(call: Callable[[], Any]) -> Any:
    """Call AWS; errors become what, why and fix."""
    with needs_extra("sagemaker", why="the place `sagemaker` is used"):
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError
    try:
        return call()
    except S3UploadFailedError as error:
        raise _explain("AccessDenied" if "AccessDenied" in str(error) else "upload", str(error), 0) from None
    except ClientError as error:
        details = error.response.get("Error", {})
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        raise _explain(str(details.get("Code", "")), str(details.get("Message", "")), status) from None
    except BotoCoreError as error:
        raise _explain(type(error).__name__, str(error), 0) from None


def _explain(code: str, message: str, status: int) -> GraftError:
    text = message[:300]
    if code in DENIED:
        return Refused(
            f"AWS rejected the login: {text}",
            fix="make `aws sts get-caller-identity` work and set AWS_DEFAULT_REGION; the user needs "
            "SageMaker, S3 and Secrets Manager",
            where="AWS_PROFILE",
        )
    for kind, codes, parts in _KINDS:
        if code in codes or any(part in message for part in parts):
            return kind(text, fix="check the names in fleet.sagemaker", where="fleet.sagemaker")
    if code == "ResourceLimitExceeded":
        return Refused(
            f"the quota of the account does not allow this machine: {text}",
            why="SageMaker has a quota for each instance type, and a separate one for spot instances, "
            "which starts at 0",
            fix="request more in Service Quotas (`<type> for spot training job usage`), or use another GPU",
        )
    if status == 429 or status >= 500 or "Throttl" in code or not status:
        return PlaceUnreachable(f"AWS returned an unexpected response: {code} {text}", fix="try again later")
    fix = "check role, image, instances and bucket in fleet.sagemaker"
    if code == "NoSuchBucket":
        fix = "create it, or use another one in fleet.sagemaker.bucket"
    return Refused(f"AWS rejected the request: {text}", why=f"{code}, status {status}", fix=fix)


_KINDS: tuple[tuple[type[Refused], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        NotThere,
        ("NoSuchKey", "ResourceNotFound", "ResourceNotFoundException"),
        ("Requested resource not found",),
    ),
    (_InUse, ("ResourceInUse", "ResourceExistsException"), ("already exists",)),
    (_NotRunning, (), ("The request was rejected because the training job is in status",)),
)
