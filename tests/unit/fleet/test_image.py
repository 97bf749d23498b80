"""The image of a job has every package that graftwork needs, in the versions of this environment."""

import pytest

from graftwork.fleet.bundle import installed_package, pin_packages, write_image
from graftwork.records.errors import UserError

KNOWN = {
    "graftwork": (
        "1.0",
        [
            "numpy>=1.26",
            'torch>=2.11; extra == "train"',
            'graftwork[mirror]; extra == "s3"',
            'fsspec; extra == "mirror"',
            'boto3; extra == "sagemaker"',
        ],
    ),
    "torch": ("2.13.0+cpu", ["sympy", 'pytest; extra == "test"', 'absent; sys_platform == "win32"']),
    "numpy": ("2.4.0", []),
    "sympy": ("1.14", ["mpmath"]),
    "mpmath": ("1.3", ["sympy"]),
    "fsspec": ("2026.9.0", []),
    "boto3": ("1.44.0", []),
}


def test_packages_of_packages_are_pinned_and_extras_only_where_asked_for():
    pins = pin_packages(("train",), KNOWN.get)
    assert pins == {"numpy": "2.4.0", "torch": "2.13.0", "sympy": "1.14", "mpmath": "1.3"}
    assert pin_packages(("s3", "sagemaker"), KNOWN.get).keys() == {"numpy", "fsspec", "boto3"}


def test_the_folder_has_a_dockerfile_pins_and_the_wheel(tmp_path):
    made = write_image(tmp_path / "image", image="me/cuda:1")
    text = (tmp_path / "image" / "Dockerfile").read_text()
    (wheel,) = (tmp_path / "image").glob("*.whl")
    assert text.startswith("# Runs the jobs of graftwork")
    assert "FROM me/cuda:1" in text
    assert wheel.name in text
    pins = (tmp_path / "image" / "requirements.txt").read_text().splitlines()
    version, _ = installed_package("pydantic")
    assert f"pydantic=={version}" in pins
    assert made.packages == len(pins)
    assert not any("+" in pin for pin in pins)
    with pytest.raises(UserError, match="already exists"):
        write_image(tmp_path / "image")
