"""PyTorch and transformers, or a skip of the test module that asks for them; and how their tests are marked."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

MARKS = [
    pytest.mark.parity,
    # Theirs, not ours: deprecations inside torch and transformers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
