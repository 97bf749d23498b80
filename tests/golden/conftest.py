import pytest


@pytest.fixture(scope="session")
def update_golden(request) -> bool:
    """Whether to store what a test sees as what is expected from now on."""
    return request.config.getoption("--update-golden")
