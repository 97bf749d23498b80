"""The places of providers, by the name that --place takes.

A cloud is one file here: settings, `Login` (which `graft doctor` checks), offers and jobs. It needs a line in
`CLOUDS` and a section in `FleetSettings`; `fleet/place.py` has the protocol and every further step.
"""

from graftwork.fleet.place import CloudPlace
from graftwork.fleet.places.azureml import AzureMLPlace
from graftwork.fleet.places.huggingface import HuggingFacePlace
from graftwork.fleet.places.kaggle import KagglePlace
from graftwork.fleet.places.lambda_cloud import LambdaPlace
from graftwork.fleet.places.runpod import RunPodPlace
from graftwork.fleet.places.sagemaker import SageMakerPlace
from graftwork.fleet.places.skypilot import SkyPilotPlace

CLOUDS: dict[str, type[CloudPlace]] = {
    place.name: place
    for place in (
        RunPodPlace,
        LambdaPlace,
        KagglePlace,
        SageMakerPlace,
        HuggingFacePlace,
        AzureMLPlace,
        SkyPilotPlace,
    )
}
