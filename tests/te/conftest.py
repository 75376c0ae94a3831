"""Where Transformer Engine's JAX extension is built, tests use it; elsewhere they are skipped with the reason.

``MOE_COURSE_TE=required`` (``make test-te``) fails where it is missing; ``MOE_COURSE_TE=python`` runs TE's own Python
without its libraries (``fake_extension.py``).
"""

import os
from collections.abc import Callable

import pytest

from moe_course.te import without_gpu
from tests.te import fake_extension


@pytest.fixture(scope="session")
def load_te() -> Callable[[int], None]:
    """``load_te(100)``: TE for a GPU of that compute capability, which is not there; one per process."""
    chosen = os.environ.get("MOE_COURSE_TE")
    if chosen == "python":
        return fake_extension.install
    if reason := without_gpu.missing():
        if chosen == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    return without_gpu.load
