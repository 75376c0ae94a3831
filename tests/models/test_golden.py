"""The model against answers that transformers gave for the same files, kept in golden/; needs neither it nor torch."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_course.interop.huggingface import import_model
from moe_course.models import deepseek
from tests.dispatch.dispatch_cases import QUICK
from tests.oracle import assert_close, path_terms

GOLDEN = np.load(Path(__file__).parent / "golden" / "deepseek_v3.npz")
TOKENS = GOLDEN["tokens"]


def answers(imported):
    model = deepseek.merger(imported.config)(imported.params, imported.bias)
    out = jax.jit(lambda t, s: model(t, s), compiler_options=QUICK)(TOKENS, np.zeros_like(TOKENS))
    return out.logits, out.mtp_logits[0][:, :-1]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The models, imported from files that safetensors' own library wrote."""
    return {name: stored_model(name, tmp_path_factory.mktemp(name)) for name in ("direct", "compressed")}


def stored_model(name, folder):
    prefix = f"{name}/weights/"
    weights = {name.removeprefix(prefix): GOLDEN[name] for name in GOLDEN.files if name.startswith(prefix)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(str(GOLDEN[f"{name}/config"]))
    return import_model(folder)


@pytest.mark.parametrize("name", ["direct", "compressed"])
def test_logits_and_mtp_logits(models, name):
    imported = models[name]
    logits, mtp_logits = answers(imported)
    terms = path_terms(imported.config, TOKENS.shape[1], 1)
    assert_close(logits, GOLDEN[f"{name}/logits"], jnp.float32, terms, "logits")
    assert_close(mtp_logits, GOLDEN[f"{name}/mtp_logits"], jnp.float32, terms, "MTP logits")


@pytest.mark.parametrize(
    "change",
    [{"rope_factor": 1.0}, {"num_groups": 1, "top_groups": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_broken_twin_is_noticed(models, change):
    imported = models["direct"]
    terms = path_terms(imported.config, TOKENS.shape[1], 1)
    broken = imported._replace(config=replace(imported.config, **change))
    for ours, theirs in zip(answers(broken), ("logits", "mtp_logits"), strict=True):
        with pytest.raises(AssertionError, match="rounding explains"):
            assert_close(ours, GOLDEN[f"direct/{theirs}"], jnp.float32, terms)


def test_the_file_says_where_it_comes_from():
    assert "python -m tests.parity.golden, with transformers 5." in str(GOLDEN["provenance"])
