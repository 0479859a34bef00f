"""What tests share: hypothesis on cores that others use too (a slow example is no failure), and one thread of torch."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared-cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-cores")


@pytest.fixture(scope="module")
def one_thread():
    """Matrices this small gain nothing from a second thread, and lose much where another process wants the core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
