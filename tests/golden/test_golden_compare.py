import pytest
from compare import check


def test_a_changed_value_fails_with_the_lines_that_differ_until_it_is_stored(tmp_path):
    path = tmp_path / "expected" / "value.json"
    with pytest.raises(pytest.fail.Exception, match="missing"):
        check(path, {"rows": 4}, update=False)
    check(path, {"rows": 4}, update=True)
    check(path, {"rows": 4}, update=False)
    with pytest.raises(pytest.fail.Exception, match=r'-  "rows": 4\n\+  "rows": 5'):
        check(path, {"rows": 5}, update=False)
    check(path, {"rows": 5}, update=True)
    check(path, {"rows": 5}, update=False)
