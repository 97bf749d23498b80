"""The engine without a model that the tests use, for what is measured in front of engines."""

import os
import sys
from pathlib import Path

MODULE = "stub_engine"
_FOLDER = str(Path(__file__).parents[1] / "tests" / "stand_ins")
sys.path.insert(0, _FOLDER)
os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])])
