"""Dropless Mixture-of-Experts training in JAX: the package under the course.

Importing this package imports nothing heavy, so that ``moe_course.environment.setup`` can still
prepare JAX (device count, threads) before JAX starts.
"""

__version__ = "0.1.0"
