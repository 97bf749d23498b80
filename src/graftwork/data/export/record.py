"""What is asked of an export, and what it says of itself afterwards."""

from graftwork.data.export.sink import LeftOut
from graftwork.records.base import Record
from graftwork.records.dataset import Split

EXPORT_FILE = "graftwork.json"


class ExportOptions(Record):
    """`name` is what the other side calls the dataset: OWNER/slug on Kaggle, s3://bucket/prefix for
    SageMaker, a word for the others."""

    name: str | None = None
    title: str | None = None
    license: str | None = None


class ExportedFile(Record):
    """`rows` is None for a file that describes the others."""

    file: str
    rows: int | None
    sha256: str


class Export(Record):
    """Which dataset it is, which files it became, what the format could not hold."""

    format: str
    dataset: str
    base: str
    template_fingerprint: str
    splits: dict[Split, int]
    rows: int
    preference_rows: int
    files: tuple[ExportedFile, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
