"""TE's sources, read with ``ast``, have the signatures that the adapters were written against."""

import ast
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_course.te import native
from moe_course.te.capability import TESTED, _package

SOURCES = find_spec("transformer_engine")
"""Looked up, not imported: the meta wheel alone has the sources, and does not import."""

DIFFERENCES = {
    "2.21": {
        # ep_axis and data_parallelism_axes are deprecated for mesh_resource: native.moe_axes
        "moe": {"mesh_resource", "quant_before_fsdp_ag"},
    }
}
"""Release -> name -> parameters that it has besides those of 2.20.2, which ``native`` handles."""


def parameters(source: str, name: str) -> list[str]:
    """Parameter names of a function or ``Class.method``, or the fields of a dataclass; [] for another class."""
    found = ast.parse(source)
    for part in name.split("."):
        (found,) = (node for node in found.body if getattr(node, "name", None) == part)
    if isinstance(found, ast.ClassDef):
        return [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]
    arguments = found.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def drift(name: str, have: list[str], version: str) -> str:
    """What differs from :data:`native.CALLS`, in words; "" if nothing that matters."""
    want = list(native.CALLS[name][1])
    extra = set(have) - set(want) - DIFFERENCES.get(".".join(version.split(".")[:2]), {}).get(name, set())
    gone = [p for p in want if p not in have]
    if gone:
        return f"{name} lost {', '.join(gone)}"
    if [p for p in have if p in want] != want:
        return f"{name} has its parameters in another order: {', '.join(have)}"
    return f"{name} has new parameters: {', '.join(sorted(extra))}" if extra and version == TESTED else ""


@pytest.fixture(scope="module")
def te_sources():
    if SOURCES is None or not SOURCES.submodule_search_locations:
        reason = "Transformer Engine's Python sources are not installed here. Run: make te-wheel"
        if os.environ.get("MOE_COURSE_TE") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(SOURCES.submodule_search_locations[0])


@pytest.mark.parametrize("name", native.CALLS)
def test_te_has_the_signature_that_we_call(te_sources, name):
    path = te_sources / (native.CALLS[name][0].replace(".", "/") + ".py")
    assert drift(name, parameters(path.read_text(), name), _package("transformer-engine")) == ""


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def dense(x, kernel): ...", "lost"),
        (
            "def dense(kernel, x, bias=0, contracting_dims=0, transpose_batch_sequence=0, input_axes=0, kernel_axes=0,"
            " output_axes=0, collective_op_set=0, quantizer_set=0): ...",
            "another order",
        ),
        (
            "def dense(x, kernel, bias=0, contracting_dims=0, transpose_batch_sequence=0, input_axes=0, kernel_axes=0,"
            " output_axes=0, collective_op_set=0, quantizer_set=0, *, precision): ...",
            "new parameters: precision",
        ),
    ],
)
def test_a_drift_is_noticed(source, complaint):
    assert complaint in drift("dense", parameters(source, "dense"), TESTED)


def test_known_differences_of_a_newer_release_are_none():
    have = [*native.CALLS["moe"][1], "mesh_resource", "quant_before_fsdp_ag"]
    assert drift("moe", have, "2.21.0") == ""
    assert "mesh_resource" in drift("moe", have, TESTED)


def test_parameters_reads_functions_methods_and_dataclasses():
    source = "class A:\n    x: int\n    y: int = 1\n    @staticmethod\n    def make(a, *, b): ...\ndef f(p, /, q): ..."
    assert parameters(source, "A") == ["x", "y"]
    assert parameters(source, "A.make") == ["a", "b"]
    assert parameters(source, "f") == ["p", "q"]
