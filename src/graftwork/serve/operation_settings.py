"""Settings of the endpoint's operation: keys, listeners, TLS, logs, spans and how long captures are kept."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import NotSecret, Record
from graftwork.text.redact import EndpointUrl, VariableName

CertificatePath = Annotated[str, NotSecret("the path of a file")]


class SpanSettings(Record):
    """Where spans of requests are sent."""

    url: EndpointUrl = Field(
        description="Where the collector takes traces over OTLP/HTTP, such as http://localhost:4318/v1/traces.",
    )

    headers_env: VariableName | None = Field(
        default=None,
        description="Name of the environment variable that holds headers for the collector, in the form of "
        "OTEL_EXPORTER_OTLP_HEADERS.",
    )

    service: str = Field(default="graftwork", min_length=1, description="The name of the service in spans.")


class OperationSettings(Record):
    """What an operator sets; `ServeSettings` has these too."""

    key_refresh_seconds: float = Field(
        default=1.0,
        gt=0,
        description="Seconds until a created key works and a revoked one stops.",
    )

    admin_host: str | None = Field(
        default=None,
        description="Address of the admin listener. None: 127.0.0.1. Anything but this machine itself needs "
        "keys, as for `host`.",
    )

    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a separate listener for /metrics and the details of /health, which `port` "
        "then no longer shows. None: no such listener.",
    )

    tls_certificate: CertificatePath | None = Field(
        default=None,
        description="PEM file with the certificate and its chain: the endpoint speaks HTTPS. It is read "
        "again when it changes.",
    )

    tls_key: CertificatePath | None = Field(
        default=None,
        description="PEM file with the key of the certificate, without a passphrase.",
    )

    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins whose web pages may call the endpoint, such as https://app.example.org.",
    )

    access_log: bool = Field(
        default=False,
        description="Write a line for each request to standard error, without prompts, answers and queries.",
    )

    log_format: Literal["text", "json"] = Field(
        default="text",
        description="The form of log lines on standard error.",
    )

    spans: SpanSettings | None = Field(
        default=None,
        description="Send an OpenTelemetry span for each request to a collector. None sends nothing.",
    )

    capture_journal_mib: float = Field(
        default=64,
        gt=0,
        description="Size of the file that keeps captures while the database is slow or fails; beyond it "
        "they are lost and counted.",
    )

    capture_keep_days: float | None = Field(
        default=None,
        gt=0,
        description="Captures that are older are deleted, with their feedback. None keeps all.",
    )

    capture_keep_mib: float | None = Field(
        default=None,
        gt=0,
        description="The oldest captures are deleted, with their feedback, when all take more. None: no "
        "limit.",
    )

    @model_validator(mode="after")
    def _has_both_files(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both `tls_certificate` and `tls_key`")
        return self
