import pytest
from pydantic import ValidationError

from graftwork.data.settings import DataSettings


def test_splits_that_leave_nothing_to_train_on_are_refused():
    with pytest.raises(ValidationError, match="leave nothing to train on"):
        DataSettings(validation=0.5, test=0.5)
