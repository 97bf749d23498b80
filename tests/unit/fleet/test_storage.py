"""Files of jobs below a URL: what is not there is not read, and a write that fails is an error."""

import pytest
from fleet_samples import LARGE, memory_limit

from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.fleet.places.storage import MachinePrices, UrlStorage, fetch_results, read_file
from graftwork.fleet.runner import RunMirror
from graftwork.records.errors import UserError
from graftwork.records.hardware import Offer


def raise_not_found(*_words, **_options):
    raise FileNotFoundError("no such bucket")


def test_a_missing_file_reads_as_none_and_a_missing_folder_is_empty(tmp_path):
    storage = UrlStorage(str(tmp_path / "none"), setting="fleet.x.storage")
    assert read_file(storage, "a") is None
    assert storage.sizes("jobs/") == {}


def test_a_write_to_a_bucket_that_does_not_exist_is_an_error(tmp_path, monkeypatch):
    storage = UrlStorage(str(tmp_path), setting="fleet.x.storage")
    monkeypatch.setattr(storage._files.system, "pipe_file", raise_not_found)
    with pytest.raises(PlaceUnreachable, match="FileNotFoundError") as caught:
        storage.write("jobs/a", b"x")
    assert "fleet.x.storage" in caught.value.fix


def test_a_package_that_is_missing_here_leaves_no_job_open(monkeypatch):
    def lacks(*_words, **_options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", lacks)
    with pytest.raises(Refused, match="not installed"):
        UrlStorage("s3://bucket", setting="fleet.x.storage").sizes("blobs/")


def test_an_address_of_no_known_kind_is_a_mistake_in_the_settings():
    with pytest.raises(UserError) as caught:
        UrlStorage("nosuch://bucket", setting="fleet.x.storage").sizes("blobs/")
    assert caught.value.where == "fleet.x.storage"


def test_a_job_is_listed_with_its_price_whatever_machines_the_settings_name():
    row = Offer(place="x", gpu="A10G", usd_per_hour=1.4, instance="g5", source="list", dated="2026-01-01")
    prices = MachinePrices("x", {"unknown": 9.0}, [row])
    with pytest.raises(Refused, match="the catalog has no machine unknown"):
        prices.rows()
    job = prices.placed("label", "g5")
    assert (job.gpu, job.usd_per_hour) == ("A10G", 1.4)
    assert MachinePrices("x", {"g5": 2.0}, [row]).placed("label", "g5").usd_per_hour == 2.0
    assert prices.placed("label", "other").gpu == ""


def test_weights_go_to_the_storage_and_back_piece_by_piece(tmp_path):
    source = tmp_path / "weights"
    with source.open("wb") as content:
        content.truncate(LARGE)
    storage = UrlStorage(str(tmp_path / "bucket"), setting="fleet.x.storage")
    with memory_limit(LARGE // 8):
        storage.put("jobs/a/out/run/adapter/weights", source)
        assert fetch_results(storage, "a", tmp_path / "run")
    assert (tmp_path / "run/adapter/weights").stat().st_size == LARGE


def test_the_mirror_of_a_job_gets_the_adapter_piece_by_piece(tmp_path):
    adapter = tmp_path / "run" / "adapter" / "weights"
    adapter.parent.mkdir(parents=True)
    with adapter.open("wb") as content:
        content.truncate(LARGE)
    with memory_limit(LARGE // 8):
        RunMirror(f"file://{tmp_path}/mirror", "r1").copy(tmp_path / "run")
    assert (tmp_path / "mirror/r1/run/adapter/weights").stat().st_size == LARGE
