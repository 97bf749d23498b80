"""Files of jobs below a URL: what is not there is not read, and a write that fails is an error."""

import pytest

from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.fleet.storage import UrlStorage


def raise_not_found(*_words, **_options):
    raise FileNotFoundError("no such bucket")


def test_a_missing_file_reads_as_none_and_a_missing_folder_is_empty(tmp_path):
    storage = UrlStorage(str(tmp_path / "none"), setting="fleet.x.storage")
    assert storage.read("a") is None
    assert storage.sizes("jobs/") == {}


def test_a_write_to_a_bucket_that_does_not_exist_is_an_error(tmp_path, monkeypatch):
    storage = UrlStorage(str(tmp_path), setting="fleet.x.storage")
    monkeypatch.setattr(storage._files, "pipe_file", raise_not_found)
    with pytest.raises(PlaceUnreachable, match="FileNotFoundError") as caught:
        storage.write("jobs/a", b"x")
    assert "fleet.x.storage" in caught.value.fix


def test_a_package_that_is_missing_here_leaves_no_job_open(monkeypatch):
    def lacks(*_words, **_options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", lacks)
    with pytest.raises(Refused, match="not installed"):
        UrlStorage("s3://bucket", setting="fleet.x.storage")
