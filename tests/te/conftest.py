"""Where Transformer Engine's JAX extension is built, tests use it; elsewhere they are skipped with the reason."""

import os

import pytest

from moe_course.te import without_gpu


@pytest.fixture(scope="session")
def te_pieces():
    """Transformer Engine can be loaded here without a GPU. ``make test-te`` fails where it cannot: it built them."""
    if reason := without_gpu.missing():
        if os.environ.get("MOE_COURSE_TE") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
