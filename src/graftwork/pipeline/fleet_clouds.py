"""The places of providers, as graft.yaml configures them.

In: the `fleet` settings. Out: a place. The provider's client is imported when the place is first asked.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from graftwork.fleet.azureml import AzureMLPlace
from graftwork.fleet.huggingface import HuggingFacePlace
from graftwork.fleet.kaggle import KagglePlace
from graftwork.fleet.lambda_cloud import LambdaPlace
from graftwork.fleet.place import Place
from graftwork.fleet.runpod import RunPodPlace
from graftwork.fleet.sagemaker import SageMakerPlace
from graftwork.fleet.settings import FleetSettings
from graftwork.fleet.skypilot import SkyPilotPlace
from graftwork.plan.catalog.prices import list_offers
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Offer

CLOUDS = {
    "runpod": "{}",
    "lambda": "{}",
    "kaggle": "{}",
    "sagemaker": "{role: ARN, bucket: NAME}",
    "huggingface": "{repository: ME/jobs}",
    "azureml": "{subscription: ID, resource_group: NAME, workspace: NAME}",
    "skypilot": "{bucket: URL, accelerators: {A10G: 1.5}}",
}
"""Each needs an entry below `fleet` in graft.yaml; this is the shortest one."""
IN_SETTINGS = {"lambda": "lambda_cloud"}
"""Places whose entry has another name: `lambda` is a word of Python."""
IN_CATALOG = {"huggingface": "huggingface-jobs", "azureml": "azure-ml", "local": "own", "manual": "own"}
"""Places whose name in the catalog is another one."""


def cloud_settings(kind: str, settings: FleetSettings) -> Any:
    """The entry of a place; None: it is not configured."""
    return getattr(settings, IN_SETTINGS.get(kind, kind))


def open_cloud(kind: str, settings: FleetSettings, *, state: Path) -> Place:
    openers: dict[str, Callable[[Any], Place]] = {
        "runpod": lambda found: RunPodPlace(found, state=state),
        "lambda": lambda found: LambdaPlace(found, state=state, prices=_listed(kind)),
        "azureml": lambda found: AzureMLPlace(found, prices=_listed(kind)),
        "kaggle": KagglePlace,
        "sagemaker": lambda found: SageMakerPlace(found, prices=_listed(kind)),
        "huggingface": HuggingFacePlace,
        "skypilot": SkyPilotPlace,
    }
    found = cloud_settings(kind, settings)
    if found is not None:
        return openers[kind](found)
    entry = IN_SETTINGS.get(kind, kind)
    raise UserMistake(
        f"the place {kind} is not configured",
        fix=f"add `fleet: {{{entry}: {CLOUDS[kind]}}}` to graft.yaml; docs/places/{kind}.md has the rest",
        where=f"fleet.{entry}",
    )


def _listed(place: str) -> tuple[Offer, ...]:
    return tuple(offer for offer in list_offers() if offer.place == IN_CATALOG.get(place, place))
