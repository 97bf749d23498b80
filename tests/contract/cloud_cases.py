"""Every cloud place with its stand-in, for the tests of the contract that they share."""

import atexit
import getpass
import os
import re
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from fleet_simulator import CARD, OTHER_GPU, USD_PER_HOUR, SimulatedProvider

from graftwork.records.fleet import PlacedJob
from graftwork.records.hardware import Offer

LABEL = "graft-00000000-00000000ffff"


@dataclass
class CloudCase:
    """How a test meets one place. `CARD` of the simulator is the card of every stand-in."""

    api: object
    provider: SimulatedProvider
    monkeypatch: object
    library: str
    extra: str
    gpu: str = CARD
    usd_per_hour: float = USD_PER_HOUR
    stops_by_flag: bool = False
    keeps_files: bool = True
    """Whether files that were sent are there for the next job."""
    rents: str = "jobs"

    def place(self):
        raise NotImplementedError

    def unknown_job(self):
        return PlacedJob(place=self.place().name, id=LABEL, label=LABEL)

    def run(self, label):
        code = self.api.run(label)
        assert code == 0, self.api.output(label)

    def run_and_stop(self, place, job):
        """Ask for a stop; where only a flag is looked for, before the job starts."""
        self.provider.advance(120)
        if self.stops_by_flag:
            place.stop(job)
            self.api.start(job.label)
        else:
            self.api.start(job.label)
            self.api.wait_for_checkpoint(job.label)
            place.stop(job)
        self.api.finish(job.label)

    def may_hold_secret(self, raw):
        return False

    def sent_bytes(self, place):
        """By the submission of a job that has run."""
        return place.sent_bytes

    def give_back(self, place, job):
        """End what bills after the job's own end."""

    @contextmanager
    def wrong_login(self):
        raise NotImplementedError

    @contextmanager
    def no_network(self):
        raise NotImplementedError


class KaggleCase(CloudCase):
    @classmethod
    @contextmanager
    def open(cls, provider, tmp_path: Path, monkeypatch):
        from cloud_server import serving
        from kaggle_server import KEY, USER, KaggleStandIn
        from kagglesdk import kaggle_env

        import graftwork.fleet.places.kaggle as module

        monkeypatch.setitem(module.GPUS, "NvidiaTeslaT4", CARD)
        monkeypatch.setenv("KAGGLE_USERNAME", USER)
        monkeypatch.setenv("KAGGLE_KEY", KEY)
        monkeypatch.delenv("KAGGLE_API_TOKEN", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("KAGGLE_API_ENVIRONMENT", "TEST")
        with serving(KaggleStandIn(provider, tmp_path / "kaggle")) as api:
            monkeypatch.setitem(kaggle_env._env_to_endpoint, kaggle_env.KaggleEnv.TEST, api.url)
            yield cls(api, provider, monkeypatch, "kagglesdk", "kaggle", usd_per_hour=0.0, stops_by_flag=True)

    def place(self):
        from graftwork.fleet.places.kaggle import KagglePlace, KaggleSettings

        return KagglePlace(KaggleSettings())

    def run(self, label):
        self.api.secrets = {"HF_TOKEN": "hf_s3cr3tvalue"}
        super().run(label)

    @contextmanager
    def wrong_login(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("KAGGLE_KEY", "wrong")
            yield

    @contextmanager
    def no_network(self):
        from kagglesdk import kaggle_env

        with self.monkeypatch.context() as patch:
            patch.setitem(kaggle_env._env_to_endpoint, kaggle_env.KaggleEnv.TEST, "http://127.0.0.1:1")
            yield


class SageMakerCase(CloudCase):
    @classmethod
    @contextmanager
    def open(cls, provider, tmp_path: Path, monkeypatch):
        from cloud_server import serving
        from sagemaker_server import KEY_ID, SageMakerStandIn

        with serving(SageMakerStandIn(provider, tmp_path / "sagemaker")) as api:
            for name, value in (
                ("AWS_ENDPOINT_URL", api.url),
                ("AWS_ACCESS_KEY_ID", KEY_ID),
                ("AWS_SECRET_ACCESS_KEY", "test"),
                ("AWS_DEFAULT_REGION", "us-east-1"),
                ("AWS_EC2_METADATA_DISABLED", "true"),
                ("AWS_MAX_ATTEMPTS", "1"),
                ("AWS_CONFIG_FILE", str(tmp_path / "none")),
                ("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none")),
            ):
                monkeypatch.setenv(name, value)
            yield cls(api, provider, monkeypatch, "boto3", "sagemaker")

    def place(self):
        from sagemaker_server import BUCKET, INSTANCE, OTHER_INSTANCE

        from graftwork.fleet.places.sagemaker import SageMakerPlace, SageMakerSettings

        prices = [
            Offer(
                place="sagemaker",
                gpu=gpu,
                usd_per_hour=usd,
                instance=name,
                source="a list",
                dated="2026-11-01",
            )
            for gpu, usd, name in ((CARD, USD_PER_HOUR, INSTANCE), ("T4", 0.7, OTHER_INSTANCE))
        ]
        role = "arn:aws:iam::123456789012:role/train"
        return SageMakerPlace(SageMakerSettings(role=role, bucket=BUCKET, image="me/image:1"), prices=prices)

    def may_hold_secret(self, raw):
        return b"secretsmanager.CreateSecret" in raw

    @contextmanager
    def wrong_login(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONG")
            yield

    @contextmanager
    def no_network(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            yield


class HuggingFaceCase(CloudCase):
    @classmethod
    @contextmanager
    def open(cls, provider, tmp_path: Path, monkeypatch):
        import huggingface_hub.utils._http as http
        from cloud_server import serving
        from huggingface_hub import constants
        from huggingface_server import TOKEN, HuggingFaceStandIn

        monkeypatch.setattr(http, "time", SimpleNamespace(sleep=lambda _s: None, time=time.time))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        with serving(HuggingFaceStandIn(provider, tmp_path / "huggingface")) as api:
            monkeypatch.setenv("HF_ENDPOINT", api.url)
            yield cls(api, provider, monkeypatch, "huggingface_hub", "huggingface", stops_by_flag=True)

    def place(self):
        from huggingface_server import REPOSITORY

        from graftwork.fleet.places.huggingface import HuggingFacePlace, HuggingFaceSettings

        return HuggingFacePlace(HuggingFaceSettings(repository=REPOSITORY))

    def may_hold_secret(self, raw):
        head, _, body = raw.partition(b"\n\n")
        return head.startswith(b"POST /api/jobs/me ") and body.count(b"hf_s3cr3tvalue") == 1

    @contextmanager
    def wrong_login(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("HF_TOKEN", "hf_wrong")
            yield

    @contextmanager
    def no_network(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
            yield


class SkyPilotCase(CloudCase):
    @classmethod
    @contextmanager
    def open(cls, provider, tmp_path: Path, monkeypatch):
        from cloud_server import serving
        from skypilot_server import SkyPilotStandIn

        with serving(SkyPilotStandIn(provider, tmp_path / "skypilot")) as api:
            yield cls(api, provider, monkeypatch, "", "", stops_by_flag=True)

    def place(self):
        from graftwork.fleet.places.skypilot import SkyPilotPlace, SkyPilotSettings

        cards = {CARD: USD_PER_HOUR, OTHER_GPU: 0.2}
        settings = SkyPilotSettings(
            bucket="s3://bucket", local_storage=str(self.api.storage), accelerators=cards
        )
        return SkyPilotPlace(settings, run=self.api)

    @contextmanager
    def wrong_login(self):
        self.api.logged_in = False
        yield

    @contextmanager
    def no_network(self):
        self.api.reachable = False
        yield


class AzureMLCase(CloudCase):
    @classmethod
    @contextmanager
    def open(cls, provider, tmp_path: Path, monkeypatch):
        pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is not installed")
        from azureml_server import HEADER, AzureMLStandIn
        from cloud_server import serving

        import graftwork.fleet.places.azureml as module

        monkeypatch.setattr(module, "RETRIES", 0)
        for name in ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "MSI_ENDPOINT"):
            monkeypatch.delenv(name, raising=False)
        with serving(AzureMLStandIn(provider, tmp_path / "azureml")) as api:
            for name, value in (
                ("AZUREML_DEV_URL_MFE", api.url),
                ("IDENTITY_ENDPOINT", f"{api.url}/token"),
                ("IDENTITY_HEADER", HEADER),
                ("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential"),
            ):
                monkeypatch.setenv(name, value)
            case = cls(api, provider, monkeypatch, "azure", "azureml", stops_by_flag=True)
            case.url = api.url
            yield case

    def place(self):
        from azureml_server import ACCOUNT, CONTAINER, GROUP, OTHER_SIZE, SIZE, SUBSCRIPTION, WORKSPACE

        from graftwork.fleet.places.azureml import AzureMLPlace, AzureMLSettings

        prices = [
            Offer(
                place="azure-ml",
                gpu=gpu,
                usd_per_hour=usd,
                instance=name,
                source="a list",
                dated="2026-11-01",
            )
            for gpu, usd, name in ((CARD, USD_PER_HOUR, SIZE), ("T4", 0.7, OTHER_SIZE))
        ]
        named = {"subscription": SUBSCRIPTION, "resource_group": GROUP, "workspace": WORKSPACE}
        named |= {"container": f"{self.url}/{ACCOUNT}/{CONTAINER}", "vault": f"{self.url}/vault"}
        return AzureMLPlace(AzureMLSettings(**named, image="me/image:1"), prices=prices)

    def may_hold_secret(self, raw):
        return raw.startswith(b"PUT /vault/secrets/")

    @contextmanager
    def wrong_login(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("IDENTITY_HEADER", "wrong")
            yield

    @contextmanager
    def no_network(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("AZUREML_DEV_URL_MFE", "http://127.0.0.1:1")
            yield


@cache
def shared_sshd():
    """The port and the GRAFT_SSH of an sshd that all tests of this process use."""
    from ssh_server import running_sshd

    stack = ExitStack()
    folder = stack.enter_context(TemporaryDirectory())
    command = stack.enter_context(running_sshd(Path(folder)))
    atexit.register(stack.close)
    return int(re.search(r"-p (\d+)", command)[1]), command.partition(" -o UserKnown")[0]


class RentedCase(CloudCase):
    """Machines: the bundle goes there over SSH, and they are billed until they are given back."""

    python = sys.executable

    @classmethod
    def start(cls, api, provider, tmp_path, monkeypatch):
        case = cls(api, provider, monkeypatch, "", "", keeps_files=False, rents="machines")
        case.port, case.orders, case.delivered, case.root = 22, {}, None, tmp_path
        return case

    def make_place(self, kind, settings, client):
        orders = self.orders

        class RecordingPlace(kind):
            def submit(self, order, *, secrets):
                found = super().submit(order, secrets=secrets)
                orders.setdefault(order.label, (order, found, secrets))
                return found

        return RecordingPlace(settings, state=self.root / "state", client=client)

    def bring_up(self):
        """Machines boot, with the sshd of this machine as theirs."""
        self.port, command = shared_sshd()
        self.monkeypatch.setenv("GRAFT_SSH", command)
        self.provider.advance(120)
        self.api.has_address, self.api.ssh_port = True, self.port

    def deliver(self, label):
        order, job, secrets = self.orders[label]
        self.bring_up()
        self.delivered = self.place()
        assert self.delivered.deliver(order, job, secrets=secrets)
        return self.delivered, job

    def run(self, label):
        from place_contract import wait_for

        place, job = self.deliver(label)
        assert wait_for(place, job, "ended").exit_code == 0, place.log(job)

    def run_and_stop(self, place, job):
        from cloud_server import has_checkpoint
        from place_contract import wait_for

        delivered, job = self.deliver(job.label)
        while not has_checkpoint(self.root):
            time.sleep(0.05)
        delivered.stop(job)
        wait_for(delivered, job, "ended")

    def sent_bytes(self, place):
        return self.delivered.sent_bytes

    def give_back(self, place, job):
        place.stop(job, at_once=True)


class LambdaCase(RentedCase):
    @classmethod
    @contextmanager
    def open(cls, provider, tmp_path: Path, monkeypatch):
        from cloud_server import serving
        from lambda_server import KEY, LambdaStandIn

        provider.jobs_only = False
        with serving(LambdaStandIn(provider, tmp_path / "lambda")) as api:
            monkeypatch.setenv("LAMBDA_API_BASE_URL", api.url)
            monkeypatch.setenv("LAMBDA_API_KEY", KEY)
            yield cls.start(api, provider, tmp_path / "lambda", monkeypatch)

    def place(self):
        from graftwork.fleet.places.lambda_cloud import LambdaClient, LambdaPlace, LambdaSettings

        settings = LambdaSettings(ssh_key="mine", python=self.python)
        machine = {"user": getpass.getuser(), "ssh_port": self.port, "folder": str(self.root / "machine")}
        for name, value in machine.items():
            self.monkeypatch.setattr(LambdaPlace, name, value)
        base_url = os.environ["LAMBDA_API_BASE_URL"]
        client = LambdaClient(os.environ["LAMBDA_API_KEY"], base_url=base_url, wait=lambda _seconds: None)
        return self.make_place(LambdaPlace, settings, client)

    @contextmanager
    def wrong_login(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("LAMBDA_API_KEY", "wrong")
            yield

    @contextmanager
    def no_network(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("LAMBDA_API_BASE_URL", "http://127.0.0.1:1")
            yield


class RunPodCase(RentedCase):
    @classmethod
    @contextmanager
    def open(cls, provider, tmp_path: Path, monkeypatch):
        from runpod_server import KEY, running_runpod

        provider.jobs_only = False
        folder = tmp_path / "runpod"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key.pub").write_text("ssh-ed25519 AAAA me@here\n")
        with running_runpod(provider) as (api, url):
            api.card = CARD
            monkeypatch.setenv("RUNPOD_API_BASE_URL", url)
            monkeypatch.setenv("RUNPOD_API_KEY", KEY)
            yield cls.start(api, provider, folder, monkeypatch)

    def place(self):
        from graftwork.fleet.places.runpod import RunPodClient, RunPodPlace, RunPodSettings

        settings = RunPodSettings(public_key=str(self.root / "key.pub"), python=self.python)
        self.monkeypatch.setattr(RunPodPlace, "folder", str(self.root / "machine"))
        base_url = os.environ["RUNPOD_API_BASE_URL"]
        client = RunPodClient(os.environ["RUNPOD_API_KEY"], base_url=base_url, wait=lambda _seconds: None)
        return self.make_place(RunPodPlace, settings, client)

    @contextmanager
    def wrong_login(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("RUNPOD_API_KEY", "wrong")
            yield

    @contextmanager
    def no_network(self):
        with self.monkeypatch.context() as patch:
            patch.setenv("RUNPOD_API_BASE_URL", "http://127.0.0.1:1")
            yield


CASES = {
    "lambda": LambdaCase,
    "runpod": RunPodCase,
    "azureml": AzureMLCase,
    "kaggle": KaggleCase,
    "sagemaker": SageMakerCase,
    "huggingface": HuggingFaceCase,
    "skypilot": SkyPilotCase,
}


def open_case(name, provider, tmp_path, monkeypatch):
    return CASES[name].open(provider, tmp_path, monkeypatch)
