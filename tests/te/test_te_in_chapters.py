"""Every call of Transformer Engine that a chapter shows as text: its names, its arguments, and its trace for Blackwell."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moe_course.te import native
from tests.te.test_te_signatures import parameters, te_sources  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:transformer_engine"),
]
SOLUTIONS = Path(__file__).parents[2] / "solutions"

SHOWN_ONLY: dict[str, tuple[str, tuple[str, ...]]] = {
    "QuantizerFactory.create": (
        "jax.quantize.quantizer",
        ("n_quantizers", "scaling_mode", "q_dtype", "q_layout", "n_groups", "checkpoint_name"),
    ),
    "autocast": ("jax.quantize.helper", ("enabled", "recipe", "mesh_resource")),
    "MXFP8BlockScaling": (
        "common.recipe",
        ("margin", "fp8_format", "fp8_dpa", "fp8_mha", "backward_override"),
    ),
}
"""Calls that chapters show and our adapters do not make: module and parameters, as in :data:`native.CALLS`."""
WITHOUT_CALL = {"ScalingMode", "QuantizeLayout", "TensorUsage", "checkpoint_policies", "QuantizerFactory"}
"""Names that chapters import for what is in them; what they call in them is traced below, or listed above."""


def blocks(chapter: str) -> list[str]:
    """The Python that the chapter's sections about TE show and do not run."""
    source = next(SOLUTIONS.glob(f"{chapter}_*.py")).read_text()
    prose = "\n".join(
        line.removeprefix("#").removeprefix(" ") for line in source.splitlines() if line.startswith("#")
    )
    sections = [part for part in re.split(r"^## ", prose, flags=re.M) if "from transformer_engine" in part]
    return [
        block for part in sections for block in re.findall(r"^```python\n(.*?)^```", part, flags=re.M | re.S)
    ]


CHAPTERS = [path.name[:2] for path in sorted(SOLUTIONS.glob("[0-9]*.py")) if blocks(path.name[:2])]


def imported(tree: ast.AST) -> dict[str, str]:
    """Names that come from TE, and what TE calls them."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("transformer_engine")
        for alias in node.names
    }


def complaints(source: str) -> list[str]:
    """What is wrong with the calls of TE in ``source``, against the signatures that we know."""
    tree, known = ast.parse(source), native.CALLS | SHOWN_ONLY
    names = imported(tree)
    unknown = sorted(set(names.values()) - set(known) - WITHOUT_CALL)
    found = [f"{name} is not among the calls we test" for name in unknown]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, *rest = ast.unparse(node.func).split(".")
        if first not in names:
            continue
        name = ".".join([names[first], *rest])
        if name not in known:
            found.append(f"{name} is not among the calls we test")
            continue
        allowed = known[name][1]
        found += [f"{name} has no {k.arg}" for k in node.keywords if k.arg not in allowed]
        found += [f"{name} takes {len(allowed)} arguments"] * (len(node.args) > len(allowed))
    return found


def test_most_chapters_show_calls():
    assert len(CHAPTERS) >= 10


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_calls_what_there_is(chapter):
    assert complaints("\n".join(blocks(chapter))) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "from transformer_engine.jax.dense import grouped_dense\ngrouped_dense(x, k, s, align=1)",
            "has no align",
        ),
        ("from transformer_engine.jax.router import top\ntop(x)", "not among the calls"),
        ("from transformer_engine.jax.router import fused_moe_aux_loss as f\nf(1, 2, 3, 4, 5)", "takes 4"),
        (
            "from transformer_engine.jax.ep import ep_dispatch\nep_dispatch(1, 2, 3, 4, 5, 6)",
            "takes 5 arguments",
        ),
    ],
)
def test_a_wrong_call_is_noticed(source, complaint):
    assert any(complaint in text for text in complaints(source))


@pytest.mark.parametrize("name", SHOWN_ONLY)
def test_te_has_what_is_only_shown(te_sources, name):  # noqa: F811
    module, want = SHOWN_ONLY[name]
    path = te_sources / (module.replace(".", "/") + ".py")
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    have = parameters(path.read_text(), name)
    assert [p for p in have if p in want] == list(want)


T, E, K, D, F, ROWS = 256, 8, 2, 256, 128, 1024


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


TOKENS = {
    "x": shape(T, D),
    "routing_map": shape(T, E, dtype=jnp.int32),
    "probs": shape(T, E, dtype=jnp.float32),
}
EXPERTS = {"gate_up": shape(E, D, 2 * F), "down": shape(E, F, D)}
LOGITS = {"logits": shape(T, 256, dtype=jnp.float32)}
GIVEN: dict[str, tuple[dict, dict, str]] = {
    "01": (TOKENS | EXPERTS, {}, "te_grouped_gemm"),
    "02": (LOGITS | {"bias": shape(256, dtype=jnp.float32)}, {}, "te_fused_topk"),
    "03": (LOGITS | {"load": shape(256, dtype=jnp.int32)}, {}, "te_fused_moe_aux_loss"),
    "04": (TOKENS | {"expert_outputs": shape(T * K + E * 127, D)}, {}, ""),
    "05": (
        {"rows": shape(ROWS, D), "kernels": shape(E, D, F), "group_sizes": shape(E, dtype=jnp.int32)},
        {},
        "te_grouped_gemm",
    ),
    "06": (TOKENS | EXPERTS, {}, "te_grouped_gemm"),
    "08": (
        {"x": shape(ROWS, D), "kernels": shape(E, D, F), "sizes": shape(E, dtype=jnp.int32)},
        {"variables": None},
        "te_grouped_gemm",
    ),
    "09": ({"x": shape(ROWS, D)}, {"layer": lambda x: x}, ""),
}
"""Chapter -> (arrays that its text takes as given, other values, a custom call that its trace must hold).

07 and 10 need several GPUs; ``lowered.py`` traces the calls of 07 (``dispatch_and_combine``), 10 makes a mesh only.
"""


def test_all_chapters_but_two_are_traced():
    assert set(CHAPTERS) - set(GIVEN) == {"07", "10"}


@pytest.mark.parametrize("chapter", GIVEN)
def test_a_chapters_text_traces_for_blackwell(load_te, chapter):
    """Run the text itself on shapes; lower what it computes for CUDA."""
    load_te(100)
    arrays, others, target = GIVEN[chapter]

    class Model:
        """Stands for a Flax model."""

        def apply(self, variables, x):
            return x

    def text(arrays):
        space = {"jax": jax, "jnp": jnp, "T": T, "E": E, "K": K, "D": D, "model": Model()} | others | arrays
        made = []
        for block in blocks(chapter):
            exec(compile(block, chapter, "exec"), space)
            made += [v for name, v in space.items() if name not in arrays and isinstance(v, jax.Array)]
        return made

    # As a reader's program has them.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        lowered = jax.jit(text).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert target in lowered
