"""Reading HLO text: how often things run, which mesh axis a group is, bytes and FLOPs. No compiler needed."""

import math
import re
from pathlib import Path

import pytest

from moe_course.aot import hlo

MESH = {"data": 1, "fsdp": 4, "expert": 8}

PROGRAM = (Path(__file__).parent / "loop.hlo.txt").read_text()
"""A loop of 5 iterations: a gather and a scatter (asynchronous, one in a wrapped computation), a product in a fusion."""


def test_collectives_of_a_loop_count_as_often_as_it_runs():
    found = hlo.collectives(hlo.parse(PROGRAM), MESH)
    seen = {(c.kind, c.axis, c.group, c.count, c.operand_bytes, c.dtype) for c in found}
    assert seen == {
        ("all-gather", "fsdp", 4, 5, 16 * 8 * 2, "bf16"),
        ("reduce-scatter", "fsdp", 4, 5, 64 * 8 * 2, "bf16"),
        ("all-reduce", "expert", 8, 1, 16 * 8 * 4, "f32"),
    }


def test_products_in_fusions_and_library_calls():
    found = hlo.products(hlo.parse(PROGRAM))
    assert {(p.how, p.flops, p.count, p.phase) for p in found} == {
        ("dot", 2 * 16 * 4 * 8, 5, "recompute"),
        ("__cublas$lt$matmul", 2 * 16 * 4 * 8, 1, "forward"),
    }


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text.replace('"n":"5"', '"n":"4"'),
        lambda text: text.replace(
            "bf16[64,8]{1,0} all-gather-done(%ags)", "bf16[64,8]{1,0} all-gather(%ags)"
        ),
        lambda text: text.replace("T(1,0), dimensions={0}, to_apply", ", dimensions={0}, to_apply"),
        lambda text: text.replace("f32[16,8]{1,0} all-reduce(%cast)", "f32[16,8]{1,0} all-reduce(%w.1)"),
    ],
    ids=["trips", "counts-done", "other-axis", "other-dtype"],
)
def test_a_changed_program_gives_other_collectives(spoil):
    assert spoil(PROGRAM) != PROGRAM
    right, wrong = (hlo.collectives(hlo.parse(text), MESH) for text in (PROGRAM, spoil(PROGRAM)))
    assert right != wrong


def test_a_loop_without_a_trip_count_is_named():
    module = hlo.parse(re.sub(r", backend_config=\{\"known.*", "", PROGRAM))
    assert {c.count for c in hlo.collectives(module, MESH)} == {1}
    assert module.unknown_loops == ["loop"]
    assert not (lambda m: (list(m.walk()), m.unknown_loops)[1])(hlo.parse(PROGRAM))


@pytest.mark.parametrize(
    ("groups", "axis", "size"),
    [
        ("replica_groups={{0,8,16,24},{1,9,17,25}}", "fsdp", 4),
        ("replica_groups=[4,8]<=[32]", "expert", 8),
        ("replica_groups=[8,4]<=[4,8]T(1,0)", "fsdp", 4),
        ("replica_groups=[1,32]<=[32]", "fsdp+expert", 32),
        ("replica_groups={}", "fsdp+expert", 32),
        ("replica_groups={{}}", "fsdp+expert", 32),
        ("replica_groups=mesh['fsdp'=4,'expert'=8] {'fsdp'}", "fsdp", 4),
        ("replica_groups=mesh['axis_0'=32] {'axis_0'}", "fsdp+expert", 32),
        ("replica_groups=mesh['a'=1,'b'=4,'c'=8], device_ids=([4,8]) {'c'}", "expert", 8),
        ("replica_groups=mesh['a'=8,'b'=4], device_ids=([4,8]T(1,0)) {'b'}", "fsdp", 4),
        ("replica_groups={{0,1},{2,3}}", "?", 2),
        ("replica_groups={{0},{1}}", "none", 1),
        ("source_target_pairs={{0,8},{8,16}}", "fsdp", 2),
        ("dimensions={0}", "?", 0),
    ],
)
def test_groups_by_mesh_axis(groups, axis, size):
    assert hlo.group_axes(f", channel_id=1, {groups}, use_global_device_ids=true", MESH) == (axis, size)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[2,3]{1,0}", 24),
        ("bf16[]", 2),
        ("(f32[4]{0}, pred[8]{0}, s4[10]{0})", 16 + 8 + 5),
        ("f8e4m3fn[32]{0}", 32),
        ("f8e8m0fnu[7]{0}", 7),
        ("token[]", 0),
        ("bf16[0,5]{1,0}", 0),
    ],
)
def test_bytes_of_types(text, size):
    assert hlo.bytes_of(text) == size


@pytest.mark.parametrize("n", [2, 8])
def test_wire_bytes_of_a_ring(n):
    """A gather and a scatter of the same whole move the same; an all-reduce is both."""
    whole = 1 << 20
    gather = hlo.wire_bytes("all-gather", whole / n, n)
    assert gather == hlo.wire_bytes("reduce-scatter", whole, n) == hlo.wire_bytes("all-to-all", whole, n)
    assert hlo.wire_bytes("all-reduce", whole, n) == 2 * gather
    assert math.isclose(gather, whole * (n - 1) / n)


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("fn main() {}")
