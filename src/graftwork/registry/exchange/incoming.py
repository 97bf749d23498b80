"""A folder for what is on its way into the store.

In: the store's root. Out: an empty folder beside the releases, gone after the block. What a killed process
leaves of it is no release, and garbage collection takes it away.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.files.disk import explain_os_error, make_folder
from graftwork.registry import guard
from graftwork.registry.blobs import PART


@contextmanager
def incoming_folder(root: Path) -> Iterator[Path]:
    """Nothing is collected while the block runs."""
    with guard.adding(root):
        folder = root / f".incoming.{uuid.uuid4().hex[:8]}{PART}"
        try:
            make_folder(folder)
        except OSError as error:
            raise explain_os_error(error, folder) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
