"""Strict numerics for every test, on 8 simulated devices."""

import os
import tempfile

# One compilation cache for both workers and for the runs that tests start: the same small configurations come again and
# again. Made by the first process, inherited by the others, deleted at its end. Also before JAX is imported.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="moe-course-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
# Before JAX is imported: more worker threads than cores, or an un-blocked loop of collectives over
# more devices than cores can deadlock on JAX 0.10 (see moe_course.environment).
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile(
    "moe", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("moe")


@pytest.fixture(scope="session")
def devices():
    """The 8 simulated devices."""
    return jax.devices()
