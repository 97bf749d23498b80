"""An S3 that the tests start: moto's server in a thread of this process, spoken to over HTTP."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "releases"


@contextmanager
def running_s3() -> Iterator[str]:
    """The address of a running S3 with one bucket. What fsspec needs to find it stands in the environment."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server_module = pytest.importorskip("moto.server", reason="moto[s3,server] is not installed")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ):
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET)
        try:
            yield address
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()


def new_url() -> str:
    """A folder in the bucket that nobody has used."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/copies"
