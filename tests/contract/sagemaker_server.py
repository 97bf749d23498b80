# ruff: noqa: N802 - methods are named after the requests
"""A stand-in for SageMaker, S3, Secrets Manager and CloudWatch Logs.

Requests are checked by botocore's own models of the services: unknown and missing fields are refused.
"""

import json
from urllib.parse import unquote
from xml.sax.saxutils import escape

import botocore.session
from botocore.validate import ParamValidator
from cloud_server import PYTHON, Answer, CloudStandIn, Denied, python_path
from fleet_simulator import CARD

from graftwork.fleet.place import PlaceUnreachable

KEY_ID, BUCKET = "AKIASTANDIN", "bucket"
INSTANCE, OTHER_INSTANCE = "ml.g5.xlarge", "ml.g4dn.xlarge"
SERVICES = {
    "SageMaker": "sagemaker",
    "secretsmanager": "secretsmanager",
    "Logs_20140328": "logs",
}
MODELS = {}


def model_of(service):
    if service not in MODELS:
        MODELS[service] = botocore.session.get_session().get_service_model(service)
    return MODELS[service]


def problems(service, operation, body) -> list[str]:
    shape = model_of(service).operation_model(operation).input_shape
    found = [f"unknown field {name}" for name in body if name not in shape.members]
    report = ParamValidator().validate(body, shape)
    return found + ([report.generate_report()] if report.has_errors() else [])


class SageMakerStandIn(CloudStandIn):
    def __init__(self, provider, root):
        super().__init__(provider, root)
        self.objects: dict[str, bytes] = {}
        self.jobs, self.secrets = {}, {}
        self.is_s3 = False

    def error(self, status, message, code=None):
        code = code or {429: "ThrottlingException", 401: "UnrecognizedClientException"}.get(status, "Error")
        if self.is_s3:
            body = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode()
            return Answer(403 if status == 401 else status, body, {"Content-Type": "application/xml"})
        return Answer(status, {"__type": code, "message": message})

    def answer(self, request):
        target = request.headers.get("X-Amz-Target")
        self.is_s3 = target is None
        if f"Credential={KEY_ID}/" not in request.headers.get("Authorization", ""):
            raise Denied("The security token included in the request is invalid.")
        if target is None:
            return self.s3(request)
        prefix, operation = target.split(".")
        service = SERVICES[prefix]
        body = json.loads(request.raw)
        wrong = problems(service, operation, body)
        if wrong:
            return self.error(400, "; ".join(wrong), "ValidationException")
        return getattr(self, f"do_{operation}")(body)

    def s3(self, request):
        bucket, _, key = unquote(request.path).lstrip("/").partition("/")
        if bucket != BUCKET:
            return self.error(404, "The specified bucket does not exist", "NoSuchBucket")
        if request.method == "PUT":
            self.objects[key] = unchunk(request)
            return Answer(200, b"", {"ETag": '"x"'})
        if key:
            if key not in self.objects:
                return self.error(404, "The specified key does not exist.", "NoSuchKey")
            return Answer(200, self.objects[key])
        assert request.query["list-type"] == "2"
        self.collect()
        names = [name for name in sorted(self.objects) if name.startswith(request.query["prefix"])]
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size></Contents>"
            for name in names
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return Answer(200, body.encode(), {"Content-Type": "application/xml"})

    def do_CreateTrainingJob(self, body):
        name = body["TrainingJobName"]
        if name in self.jobs:
            return self.error(400, "Training job names must be unique", "ResourceInUse")
        if body["EnableManagedSpotTraining"]:
            stopping = body["StoppingCondition"]
            assert stopping["MaxWaitTimeInSeconds"] >= stopping["MaxRuntimeInSeconds"]
        self.creations += 1
        seconds = body["StoppingCondition"]["MaxRuntimeInSeconds"] - 600
        try:
            self.provider.create(name, gpu=CARD, seconds=seconds)
        except Exception as error:
            if "quota" in str(error):
                return self.error(
                    400, "The account-level service limit (quota) is 0", "ResourceLimitExceeded"
                )
            if isinstance(error, PlaceUnreachable) and self.machine(name) is not None:
                self.jobs[name] = body
                self.one_of_a_name(name)
            raise
        self.jobs[name] = body
        self.one_of_a_name(name)
        return Answer(200, {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:1:training-job/{name}"})

    def there(self, name):
        machine = self.machine(name)
        return machine if machine is not None and machine.created_at <= self.provider.now else None

    def do_DescribeTrainingJob(self, body):
        self.provider._answer()
        machine = self.there(body["TrainingJobName"])
        if machine is None:
            return self.error(400, "Requested resource not found.", "ValidationException")
        created = machine.created_at + self.provider.clock() - self.provider.now
        job = self.jobs[machine.label]
        instance = INSTANCE if machine.gpu == CARD else OTHER_INSTANCE
        return Answer(
            200,
            {
                "TrainingJobName": machine.label,
                "CreationTime": created,
                "ResourceConfig": {**job["ResourceConfig"], "InstanceType": instance},
                **self.state(machine),
            },
        )

    def state(self, machine):
        phase = self.phase(machine)
        status, second = {
            "waiting": ("InProgress", "Starting"),
            "running": ("InProgress", "Training"),
            "done": ("Completed", "Completed"),
            "ended": ("Stopped", "Stopped"),
        }[phase]
        if machine.boots_at is None and self.provider.now - machine.created_at > machine.seconds + 1200:
            return {"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxWaitTimeExceeded"}
        return {"TrainingJobStatus": status, "SecondaryStatus": second}

    def do_ListTrainingJobs(self, body):
        found = [machine for machine in self.provider.list() if machine.label in self.jobs]
        rows = [
            {"TrainingJobName": machine.label, "TrainingJobStatus": self.state(machine)["TrainingJobStatus"]}
            for machine in found
        ]
        status = body.get("StatusEquals")
        rows = [row for row in rows if status in (None, row["TrainingJobStatus"])]
        other = [{"TrainingJobName": "graft-of-another-person"}] if status == "InProgress" else []
        return Answer(200, {"TrainingJobSummaries": [*rows, *other]})

    def do_StopTrainingJob(self, body):
        machine = self.there(body["TrainingJobName"])
        if machine is None or self.phase(machine) in ("done", "ended"):
            return self.error(400, "The request was rejected because the training job is in status Completed")
        process = self.processes.get(machine.label)
        if process is not None and process.poll() is None:
            process.terminate()
        else:
            self.provider.terminate(machine.id)
        return Answer(200, {})

    def do_CreateSecret(self, body):
        self.secrets[body["Name"]] = body["SecretString"]
        return Answer(200, {"Name": body["Name"]})

    def do_GetSecretValue(self, body):
        return Answer(200, {"SecretString": self.secrets[body["SecretId"]]})

    def do_DeleteSecret(self, body):
        if self.secrets.pop(body["SecretId"], None) is None:
            return self.error(400, "not there", "ResourceNotFoundException")
        return Answer(200, {"Name": body["SecretId"]})

    def do_FilterLogEvents(self, body):
        label = body["logStreamNamePrefix"].rstrip("/")
        return Answer(200, {"events": [{"message": line} for line in self.output(label).splitlines()]})

    def command(self, label):
        job, folder = self.jobs[label], self.root / label
        for channel in job["InputDataConfig"]:
            source = channel["DataSource"]["S3DataSource"]
            for name, content in self.channel(source):
                target = folder / "ml" / "input" / "data" / channel["ChannelName"] / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        algorithm = job["AlgorithmSpecification"]
        words = [PYTHON, *algorithm["ContainerArguments"]]
        words = [
            word.replace("/opt/ml", f"{folder}/ml").replace("/tmp/graftwork", f"{folder}/tmp")
            for word in words
        ]
        environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": "of the role",
            "AWS_DEFAULT_REGION": "us-east-1",
            "PYTHONPATH": python_path(),
        }
        return words, environment, folder

    def channel(self, source):
        key = source["S3Uri"].removeprefix(f"s3://{BUCKET}/")
        if source["S3DataType"] == "S3Prefix":
            return [
                (name.removeprefix(key), data) for name, data in self.objects.items() if name.startswith(key)
            ]
        first, *names = json.loads(self.objects[key])
        prefix = first["prefix"].removeprefix(f"s3://{BUCKET}/")
        return [(name, self.objects[prefix + name]) for name in names]

    def collect(self):
        """What SageMaker copies from the checkpoint folder to S3."""
        for label, job in self.jobs.items():
            key = job["CheckpointConfig"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
            folder = self.root / label / "ml" / "checkpoints"
            for path in folder.rglob("*"):
                if path.is_file():
                    self.objects[f"{key}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
            machine = self.machine(label)
            if label not in self.processes and machine is not None and self.phase(machine) == "done":
                self.objects[f"{key}/exit.json"] = json.dumps(self.simulated_exit(machine)).encode()

    def phase(self, machine):
        found = super().phase(machine)
        if found == "done" and f"{machine.label}" not in getattr(self, "collected", set()):
            self.collected = getattr(self, "collected", set()) | {machine.label}
            self.collect()
        return found


def unchunk(request) -> bytes:
    """The body without the signatures that the client puts between its pieces."""
    if "aws-chunked" not in request.headers.get("Content-Encoding", ""):
        return request.raw
    rest, parts = request.raw, []
    while True:
        head, _, rest = rest.partition(b"\r\n")
        size = int(head.split(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(rest[:size])
        rest = rest[size + 2 :]
