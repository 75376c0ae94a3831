"""The ragged exchange: offsets by hand, the emulation against a loop over ranks, and the real one lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_course.dispatch.exchange import (
    Chunks,
    Layout,
    emulate_ragged_all_to_all,
    exchange,
    plan_exchange,
    route_of_rank,
)
from moe_course.parallel import EXPERT, per_device
from tests.dispatch.dispatch_cases import T, mesh_for, plan_for, routing_case, scaling_layer

COUNTS = np.array([[2, 1, 0], [0, 3, 1], [4, 0, 2]], np.int32)
"""Rows that each sender has for each receiver. Not symmetric, so that no mistake of sides hides."""


def arguments(counts, capacity):
    layout = plan_exchange(jnp.asarray(counts)[:, :, None], capacity)
    return [route_of_rank(layout, rank).there for rank in range(len(counts))]


def stacked(chunks, name):
    return [getattr(c, name).tolist() for c in chunks]


def test_b54_offsets_are_the_senders_and_address_the_receiver():
    chunks = arguments(COUNTS, 99)
    assert stacked(chunks, "input_offsets") == [[0, 2, 3], [0, 0, 3], [0, 4, 4]]
    assert stacked(chunks, "send_sizes") == COUNTS.tolist()
    assert stacked(chunks, "output_offsets") == [[0, 0, 0], [2, 1, 0], [2, 4, 1]]
    assert stacked(chunks, "recv_sizes") == COUNTS.T.tolist()


def test_b54_the_receivers_view_is_another_matrix():
    """The mistake, in numbers: where a rank's own buffer receives, instead of where its chunks land."""
    by_receiver = np.cumsum(COUNTS, axis=0) - COUNTS
    assert by_receiver.T.tolist() == [[0, 2, 2], [0, 1, 4], [0, 0, 1]]
    assert by_receiver.T.tolist() != stacked(arguments(COUNTS, 99), "output_offsets")


def test_b55_the_way_back_is_the_transposed_matrix():
    """Input and output offsets of the forward, swapped and transposed."""
    layout = plan_exchange(jnp.asarray(COUNTS)[:, :, None], 99)
    back = [route_of_rank(layout, rank).back for rank in range(3)]
    there = [route_of_rank(layout, rank).there for rank in range(3)]
    assert stacked(back, "send_sizes") == COUNTS.T.tolist()
    assert stacked(back, "input_offsets") == np.transpose(stacked(there, "output_offsets")).tolist()
    assert stacked(back, "output_offsets") == np.transpose(stacked(there, "input_offsets")).tolist()
    assert stacked(back, "recv_sizes") == COUNTS.tolist()


def test_b56_cut_sizes_go_into_sends_and_landings_not_into_the_source():
    chunks = arguments(COUNTS, 5)
    assert stacked(chunks, "send_sizes") == [[2, 1, 0], [0, 3, 1], [3, 0, 2]]
    assert stacked(chunks, "recv_sizes") == np.transpose([[2, 1, 0], [0, 3, 1], [3, 0, 2]]).tolist()
    assert stacked(chunks, "input_offsets") == [[0, 2, 3], [0, 0, 3], [0, 4, 4]]
    assert stacked(chunks, "output_offsets") == [[0, 0, 0], [2, 1, 0], [2, 4, 1]]


def test_no_room_for_a_whole_sender():
    """Chunks past the end keep a legal landing offset and no rows."""
    chunks = arguments(COUNTS, 1)
    assert stacked(chunks, "send_sizes") == [[1, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert max(max(row) for row in stacked(chunks, "output_offsets")) <= 1


def by_a_loop(operands, outputs, chunks, num_chunks):
    """``jax.lax.ragged_all_to_all`` as its documentation tells it, sender by sender, chunk by chunk."""
    results = [np.array(o) for o in outputs]
    for sender, mine in enumerate(chunks):
        for i in range(len(mine.send_sizes)):
            size, start, landing = (
                int(a[i]) for a in (mine.send_sizes, mine.input_offsets, mine.output_offsets)
            )
            results[i // num_chunks][landing : landing + size] = operands[sender][start : start + size]
    return results


@pytest.mark.parametrize("capacity", [8, 5])
def test_b55_the_emulation_equals_a_loop_and_leaves_the_rest_of_the_buffer(capacity):
    """Three ranks, two chunks for each, and a poisoned buffer: what does not land keeps the poison."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 3, (3, 3, 2)).astype(np.int32)
    sizes[:, 1] = 0, 2  # rank 1 is asked for six rows, all for its second chunk
    layout = plan_exchange(jnp.asarray(sizes), capacity)
    chunks = [route_of_rank(layout, rank).there for rank in range(3)]
    operands = rng.standard_normal((3, 20, 4)).astype(np.float32)
    outputs = np.full((3, capacity, 4), np.nan, np.float32)
    want = by_a_loop(operands, outputs, chunks, 2)

    def one_rank(operand, output, chunks):
        c = jax.tree.map(lambda a: a[0], chunks)
        fields = c.input_offsets, c.send_sizes, c.output_offsets, c.recv_sizes
        return emulate_ragged_all_to_all(operand[0], output[0], *fields, axis_name=EXPERT)[None]

    mesh = jax.make_mesh((3,), (EXPERT,), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    all_chunks = jax.tree.map(lambda *a: jnp.stack(a), *chunks)
    with jax.set_mesh(mesh):
        run = jax.jit(per_device(one_rank, in_specs=P(EXPERT), out_specs=P(EXPERT)))
        got = np.asarray(run(operands, outputs, all_chunks))
        wrong = Chunks(
            all_chunks.input_offsets,
            all_chunks.send_sizes,
            all_chunks.output_offsets,
            all_chunks.recv_sizes + 1,
        )
        refused = np.asarray(run(operands, outputs, wrong))
    assert np.array_equal(got, np.stack(want), equal_nan=True)
    assert np.isnan(got).any() == (capacity == 8)
    assert np.isnan(refused).all()  # sizes that disagree never arrive


def test_b55_there_and_back_is_the_identity_and_so_is_its_gradient():
    rows = np.arange(3 * 8 * 2, dtype=np.float32).reshape(24, 2) + 1
    sent = np.concatenate([np.arange(8) < COUNTS[rank].sum() for rank in range(3)])[:, None]
    probe = np.random.default_rng(3).standard_normal(rows.shape).astype(np.float32)

    def one_rank(rows, probe):
        layout = plan_exchange(jnp.asarray(COUNTS)[:, :, None], 7)
        route = route_of_rank(layout, jax.lax.axis_index(EXPERT))
        there = exchange(rows, route, 7)
        return there, exchange(there, route.reversed(), rows.shape[0])

    mesh = jax.make_mesh((3,), (EXPERT,), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])

    def loss(rows, probe):
        there, back = per_device(one_rank, in_specs=P(EXPERT), out_specs=P(EXPERT))(rows, probe)
        return jnp.vdot(back, probe), (there, back)

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, (there, back)), gradient = step(jnp.asarray(rows), jnp.asarray(probe))
    assert np.array_equal(back, np.where(sent, rows, 0))
    assert np.array_equal(gradient, np.where(sent, probe, 0))
    receiver_0 = [*rows[0:2], *rows[16:20]]  # sender 0's two rows, then sender 2's four
    assert np.array_equal(there[:6], receiver_0)


@pytest.mark.parametrize("dispatcher", ["ragged", "dedup", "hierarchical"])
def test_b55_a_gpu_program_uses_the_real_operation(dispatcher):
    """Lowered for CUDA without a GPU, forward and backward: ragged all-to-alls, none of the emulation."""
    shape = (1, 1, 4)
    x, ids, weights = routing_case("random")
    plan = plan_for(shape, dispatcher)

    def loss(x, weights, ids):
        return scaling_layer(x, ids, weights, plan)[0].sum()

    with jax.set_mesh(mesh_for(shape, dispatcher)):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(x, weights, ids)
        text = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu")}
    assert text["cuda"].count("ragged_all_to_all") >= 5
    assert "ragged_all_to_all" not in text["cpu"]
    rows = f"tensor<{T // 4 * 3}x5xf32>" if dispatcher == "ragged" else f"tensor<{plan.capacity}x5xf32>"
    gathers = [line for line in text["cuda"].splitlines() if "all_gather" in line]
    assert not [line for line in gathers if "f32" in line], rows


def test_layouts_are_plain_data():
    layout = plan_exchange(jnp.asarray(COUNTS)[:, :, None], 9)
    assert isinstance(layout, Layout)
    assert layout.kept.sum() == COUNTS.sum()
