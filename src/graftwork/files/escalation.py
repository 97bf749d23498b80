"""The last forecast of escalation, in the project's state folder."""

from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import write_atomic
from graftwork.records.routing import EscalationForecast

FILE = "escalation.json"


def write_forecast(state: Path, forecast: EscalationForecast) -> Path:
    write_atomic(state / FILE, forecast.to_json())
    return state / FILE


def read_forecast(state: Path) -> EscalationForecast | None:
    """None where there is none, or one of another version."""
    try:
        return EscalationForecast.from_json((state / FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
