"""Wrong answers to chapter 08 that a person could give, and right ones unlike the solution."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.bench.kill_rate import alternative, mutant
from moe_course.quant import quantize_mxfp8, quantize_nvfp4
from moe_course.quant.blocks import codes_of
from moe_course.quant.formats import decode, encode, format_of, shared_exponent
from moe_course.quant.groups import align_groups, take_rows

E4M3, E2M1 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bits_of(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


# ---------------------------------------------------------------- 08.1 E4M3 by hand


@alternative("08.1", "the dtype, looked through")
def _(codes):
    return jax.lax.bitcast_convert_type(codes, E4M3).astype(jnp.float32)


@alternative("08.1", "a table of 256")
def _(codes):
    return jnp.asarray(np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32))[codes]


@alternative("08.1", "powers from a table")
def _(codes):
    c = codes.astype(jnp.int32)
    field, mantissa = c // 8 % 16, c % 8
    power = jnp.array([2.0 ** (max(f, 1) - 7) for f in range(16)], jnp.float32)[field]
    value = power * (mantissa / 8 + (field > 0))
    value = jnp.where(c >= 128, -value, value)
    return jnp.where(c % 128 == 127, jnp.nan, value).astype(jnp.float32)


def make_decoder(
    bias=7,
    hidden=True,
    subnormal=True,
    nan=lambda c: (c & 127) == 127,
    sign=lambda c, v: jnp.where(c & 128, -v, v),
    field=lambda c: (c >> 3) & 15,
    mantissa=lambda c: c & 7,
    lowest=1,
    steps=8,
):
    def values(codes):
        c = codes.astype(jnp.int32)
        f, m = field(c), mantissa(c)
        one = jnp.where((f > 0) | (not subnormal), steps, 0) if hidden else 0
        power = jnp.maximum(f, lowest) if subnormal else f
        value = jnp.ldexp((one + m).astype(jnp.float32), power - bias - int(np.log2(steps)))
        return jnp.where(nan(c), jnp.nan, sign(c, value))

    return values


alternative("08.1", "a mutant's frame with every part right")(make_decoder())
mutant("08.1", "bias 8")(make_decoder(bias=8))
mutant("08.1", "bias 6")(make_decoder(bias=6))
mutant("08.1", "no bias")(make_decoder(bias=0))
mutant("08.1", "no hidden one")(make_decoder(hidden=False))
mutant("08.1", "a hidden one below the smallest normal number")(make_decoder(subnormal=False))
mutant("08.1", "subnormal numbers at exponent field 0")(make_decoder(lowest=0))
mutant("08.1", "no NaN: 480")(make_decoder(nan=lambda c: c < 0))
mutant("08.1", "NaN for code 127 alone")(make_decoder(nan=lambda c: c == 127))
mutant("08.1", "all of field 15 is NaN")(make_decoder(nan=lambda c: (c & 127) >= 120))
mutant("08.1", "code 126 is NaN")(make_decoder(nan=lambda c: (c & 127) >= 126))
mutant("08.1", "no sign")(make_decoder(sign=lambda c, v: v))
mutant("08.1", "the sign upside down")(make_decoder(sign=lambda c, v: jnp.where(c & 128, v, -v)))
mutant("08.1", "the sign is two's complement")(make_decoder(sign=lambda c, v: jnp.where(c & 128, v - 256, v)))
mutant("08.1", "minus zero is zero")(make_decoder(sign=lambda c, v: jnp.where(c & 128, -v, v) + 0.0))
mutant("08.1", "E5M2")(make_decoder(15, field=lambda c: (c >> 2) & 31, mantissa=lambda c: c & 3, steps=4))
mutant("08.1", "the mantissa read backwards")(
    make_decoder(mantissa=lambda c: (c & 1) * 4 + (c & 2) + (c >> 2 & 1))
)


@mutant("08.1", "field 15, mantissa 0 is infinity")
def _(codes):
    value = make_decoder()(codes)
    return jnp.where((codes & 127) == 120, jnp.sign(value) * jnp.inf, value)


@mutant("08.1", "fnuz")
def _(codes):
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fnuz).astype(jnp.float32)


@mutant("08.1", "bfloat16 comes back")
def _(codes):
    return make_decoder()(codes).astype(jnp.bfloat16)


@mutant("08.1", "NumPy inside")
def _(codes):
    return jnp.asarray(np.asarray(codes).view(E4M3).astype(np.float32))


# ---------------------------------------------------------------- 08.2 a cast that saturates


@alternative("08.2", "two minima")
def _(x, dtype):
    limit = jnp.asarray(jnp.finfo(dtype).max).astype(x.dtype)
    return jnp.maximum(jnp.minimum(x, limit), -limit).astype(dtype)


@alternative("08.2", "where")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(x) > limit, jnp.sign(x) * limit, x).astype(dtype)


@alternative("08.2", "the largest value read from its code")
def _(x, dtype):
    codes = jnp.arange(256, dtype=jnp.uint8)
    values = jax.lax.bitcast_convert_type(codes, dtype).astype(jnp.float32)
    limit = jnp.max(jnp.where(jnp.isfinite(values), values, 0))
    return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(dtype)


@mutant("08.2", "the plain cast")
def _(x, dtype):
    return x.astype(dtype)


@mutant("08.2", "448 for every format")
def _(x, dtype):
    return jnp.clip(x, -448, 448).astype(dtype)


@mutant("08.2", "240 for every E4M3")
def _(x, dtype):
    limit = 57344 if dtype == jnp.float8_e5m2 else 240
    return jnp.clip(x, -limit, limit).astype(dtype)


@mutant("08.2", "only from above")
def _(x, dtype):
    return jnp.minimum(x, float(jnp.finfo(dtype).max)).astype(dtype)


@mutant("08.2", "NaN becomes 0")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.nan_to_num(jnp.clip(x, -limit, limit)).astype(dtype)


@mutant("08.2", "NaN becomes the largest value")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(x) <= limit, x, jnp.sign(x) * limit).astype(dtype) + jnp.where(
        jnp.isnan(x), limit, 0
    ).astype(dtype)


@mutant("08.2", "NaN counts as beyond the limit")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.abs(x) <= limit, x, limit * jnp.where(x < 0, -1, 1)).astype(dtype)


@mutant("08.2", "cast first")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(dtype).astype(jnp.float32), -limit, limit).astype(dtype)


@mutant("08.2", "what is too large becomes 0")
def _(x, dtype):
    return jnp.where(jnp.abs(x) > float(jnp.finfo(dtype).max), 0, x).astype(dtype)


@mutant("08.2", "divided to fit")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return (x * jnp.minimum(1, limit / jnp.abs(x).max())).astype(dtype)


@mutant("08.2", "infinity stays a NaN")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -limit, limit)).astype(dtype)


@mutant("08.2", "the type of x comes back")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype).astype(x.dtype)


@mutant("08.2", "rounded to whole numbers on the way")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.round(jnp.clip(x, -limit, limit)).astype(dtype)


@mutant("08.2", "through float16")
def _(x, dtype):
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float16), -limit, limit).astype(dtype)


@mutant("08.2", "always E4M3")
def _(x, dtype):
    return jnp.clip(x, -448, 448).astype(E4M3)


# ---------------------------------------------------------------- 08.3 the scale byte


@alternative("08.3", "the package's")
def _(amax, round_up):
    return shared_exponent(bits_of(amax), format_of("e4m3"), "rceil" if round_up else "floor")


@alternative("08.3", "a carry in place of a comparison")
def _(amax, round_up):
    bits = bits_of(amax).astype(jnp.int32) + (0x7FFFFF - 0x600000 if round_up else 0)
    byte = jnp.clip((bits >> 23) - 8, 0, 254)
    return jnp.where(jnp.isfinite(amax), byte, 255).astype(jnp.uint8)


@alternative("08.3", "frexp")
def _(amax, round_up):
    safe = jnp.where(jnp.isfinite(amax), amax, 1.0)
    half, exponent = jnp.frexp(safe)
    byte = exponent - 1 - 8 + 127 + (half > 0.875 if round_up else 0)
    byte = jnp.where(safe < 2.0**-126, 0, jnp.clip(byte, 0, 254))
    return jnp.where(jnp.isfinite(amax), byte, 255).astype(jnp.uint8)


def make_byte(
    up=lambda m: m > 0x600000,
    offset=8,
    low=0,
    high=254,
    special=255,
    field=lambda b: b >> 23,
    dtype=jnp.uint8,
):
    def byte(amax, round_up):
        bits = bits_of(amax)
        exponent = field(bits).astype(jnp.int32) - offset
        if round_up:
            exponent = exponent + up(bits & 0x7FFFFF)
        exponent = jnp.clip(exponent, low, high)
        if special is not None:
            exponent = jnp.where(bits >= 0x7F800000, special, exponent)
        return exponent.astype(dtype)

    return byte


alternative("08.3", "a mutant's frame with every part right")(make_byte())
mutant("08.3", "1.75 itself rounds up")(make_byte(up=lambda m: m >= 0x600000))
mutant("08.3", "up above 1: CEIL")(make_byte(up=lambda m: m > 0))
mutant("08.3", "up above 1.5: nearest")(make_byte(up=lambda m: m > 0x400000))
mutant("08.3", "always up")(make_byte(up=lambda m: 1))
mutant("08.3", "never up")(make_byte(up=lambda m: 0))
mutant("08.3", "up above 1.875")(make_byte(up=lambda m: m > 0x700000))
mutant("08.3", "1.75 in bfloat16's bits")(make_byte(up=lambda m: m > 0x600))
mutant("08.3", "the 8 missing")(make_byte(offset=0))
mutant("08.3", "7 for 8")(make_byte(offset=7))
mutant("08.3", "9 for 8")(make_byte(offset=9))
mutant("08.3", "the bias missing")(make_byte(offset=135))
mutant("08.3", "the bias twice")(make_byte(offset=8 - 127))
mutant("08.3", "the 15 of E5M2")(make_byte(offset=15))
mutant("08.3", "at least 1, so that the scale is no subnormal")(make_byte(low=1))
mutant("08.3", "byte 127 for zero")(make_byte(low=127))
mutant("08.3", "infinity is a large number")(make_byte(special=None))
mutant("08.3", "infinity and NaN give 254")(make_byte(special=254))
mutant("08.3", "infinity and NaN give 0")(make_byte(special=0))
mutant("08.3", "not clamped: it wraps")(make_byte(low=-512, high=512))
mutant("08.3", "int32")(make_byte(dtype=jnp.int32))
mutant("08.3", "int8")(make_byte(dtype=jnp.int8))
mutant("08.3", "the sign shifted in")(make_byte(field=lambda b: (b >> 22) // 2 + 1))


@mutant("08.3", "the rules swapped")
def _(amax, round_up):
    return make_byte()(amax, not round_up)


@mutant("08.3", "always rounding up")
def _(amax, round_up):
    return make_byte()(amax, True)


def by_log(up, down, safe=lambda a: a):
    def byte(amax, round_up):
        exponent = up(safe(amax)) if round_up else down(safe(amax))
        byte = jnp.where(amax > 0, jnp.clip(exponent + 127, 0, 254), 0)
        return jnp.where(jnp.isfinite(amax), byte, 255).astype(jnp.uint8)

    return byte


mutant("08.3", "float log2")(
    by_log(lambda a: jnp.ceil(jnp.log2(a / 448)), lambda a: jnp.floor(jnp.log2(a)) - 8)
)
mutant("08.3", "float log2, with something added")(
    by_log(lambda a: jnp.ceil(jnp.log2(a / 448 + 1e-12)), lambda a: jnp.floor(jnp.log2(a + 1e-12)) - 8)
)
mutant("08.3", "natural logarithm")(
    by_log(lambda a: jnp.ceil(jnp.log(a / 448) / np.log(2)), lambda a: jnp.floor(jnp.log(a) / np.log(2)) - 8)
)
mutant("08.3", "FLOOR of amax / 448")(
    by_log(lambda a: jnp.ceil(jnp.log2(a / 448)), lambda a: jnp.floor(jnp.log2(a / 448)))
)


@mutant("08.3", "the cast to E8M0, nearest")
def _(amax, round_up):
    return jax.lax.bitcast_convert_type((amax / 448).astype(jnp.float8_e8m0fnu), jnp.uint8)


@mutant("08.3", "through bfloat16")
def _(amax, round_up):
    return make_byte()(amax.astype(jnp.bfloat16).astype(jnp.float32), round_up)


@mutant("08.3", "math.log2")
def _(amax, round_up):
    import math

    return jnp.array([[math.ceil(math.log2(float(a) / 448)) + 127 for a in row] for row in amax], jnp.uint8)


# ---------------------------------------------------------------- 08.4 blocks of 32


@alternative("08.4", "the package's")
def _(x):
    q = quantize_mxfp8(x)
    return q.scale, q.data


@alternative("08.4", "two multiplications, each by half of the exponent")
def _(x):
    blocks = x.reshape(-1, 32)
    byte = make_byte()(jnp.abs(blocks).max(axis=1, keepdims=True), True)
    exponent = 127 - byte.astype(jnp.int32)

    def power(k):
        return jax.lax.bitcast_convert_type((k + 127).astype(jnp.uint32) << 23, jnp.float32)

    scaled = blocks * power(exponent // 2) * power(exponent - exponent // 2)
    scaled = jnp.where(byte == 255, jnp.nan, jnp.clip(scaled, -448, 448))
    return byte.reshape(x.shape[0], -1), scaled.reshape(x.shape).astype(E4M3)


@alternative("08.4", "a block at a time, by vmap")
def _(x):
    def one(block):
        byte = make_byte()(jnp.max(jnp.abs(block)), True)
        scaled = jnp.clip(jnp.ldexp(block, 127 - byte.astype(jnp.int32)), -448, 448)
        return byte, jnp.where(byte == 255, jnp.nan, scaled).astype(E4M3)

    byte, codes = jax.vmap(jax.vmap(one))(x.reshape(x.shape[0], -1, 32))
    return byte, codes.reshape(x.shape)


def make_blocks(
    byte=lambda a: make_byte()(a, True),
    amax=lambda b: jnp.abs(b).max(axis=-1),
    scaled=lambda b, e: jnp.ldexp(b, 127 - e),
    nan=lambda byte, s: jnp.where(byte == 255, jnp.nan, s),
    cast=lambda s: jnp.clip(s, -448, 448).astype(E4M3),
    split=lambda x: x.reshape(x.shape[0], -1, 32),
    join=lambda c, x: c.reshape(x.shape),
):
    def blocks(x):
        b = split(x)
        scale = byte(amax(b))
        values = scaled(b, scale[..., None].astype(jnp.int32))
        return scale, join(cast(nan(scale[..., None], values)), x)

    return blocks


alternative("08.4", "a mutant's frame with every part right")(make_blocks())
mutant("08.4", "FLOOR")(make_blocks(byte=lambda a: make_byte()(a, False)))
mutant("08.4", "CEIL")(make_blocks(byte=lambda a: make_byte(up=lambda m: m > 0)(a, True)))
mutant("08.4", "divided by the scale")(
    make_blocks(scaled=lambda b, e: b / jnp.ldexp(jnp.float32(1), e - 127))
)
mutant("08.4", "divided by exp2")(
    make_blocks(scaled=lambda b, e: b / jnp.exp2((e - 127).astype(jnp.float32)))
)
mutant("08.4", "divided by the scale, NaN turned to 0")(
    make_blocks(scaled=lambda b, e: jnp.nan_to_num(b / jnp.ldexp(jnp.float32(1), e - 127)))
)
mutant("08.4", "byte 1 at least, stored as 0")(
    make_blocks(scaled=lambda b, e: jnp.ldexp(b, 127 - jnp.maximum(e, 1)))
)
mutant("08.4", "a block of zeros gets byte 127")(
    make_blocks(byte=lambda a: jnp.where(a == 0, jnp.uint8(127), make_byte()(a, True)))
)
mutant("08.4", "multiplied by the scale")(make_blocks(scaled=lambda b, e: jnp.ldexp(b, e - 127)))
mutant("08.4", "the largest without its sign's help")(make_blocks(amax=lambda b: b.max(axis=-1)))
mutant("08.4", "the mean in place of the largest")(make_blocks(amax=lambda b: jnp.abs(b).mean(axis=-1)))
mutant("08.4", "the largest skips NaN")(make_blocks(amax=lambda b: jnp.nanmax(jnp.abs(b), axis=-1)))
mutant("08.4", "one scale for each row")(
    make_blocks(
        amax=lambda b: jnp.broadcast_to(jnp.abs(b).max(axis=(1, 2), keepdims=True)[..., 0], b.shape[:2])
    )
)
mutant("08.4", "one scale for all")(
    make_blocks(amax=lambda b: jnp.broadcast_to(jnp.abs(b).max(), b.shape[:2]))
)
mutant("08.4", "NaN passes as a number")(make_blocks(nan=lambda byte, s: jnp.nan_to_num(s)))
mutant("08.4", "only the NaN element is NaN")(make_blocks(nan=lambda byte, s: s))
mutant("08.4", "a block that is not finite becomes zeros")(
    make_blocks(nan=lambda byte, s: jnp.where(byte == 255, 0, s))
)
mutant("08.4", "NaN spreads over its row")(
    make_blocks(nan=lambda byte, s: jnp.where((byte == 255).any(axis=1, keepdims=True), jnp.nan, s))
)
mutant("08.4", "a large number gets byte 255")(
    make_blocks(byte=lambda a: jnp.where(a > 1e38, jnp.uint8(255), make_byte()(a, True)))
)
mutant("08.4", "E5M2 codes")(make_blocks(cast=lambda s: jnp.clip(s, -448, 448).astype(jnp.float8_e5m2)))
mutant("08.4", "the float values")(make_blocks(cast=lambda s: jnp.clip(s, -448, 448)))
mutant("08.4", "rounded to whole numbers")(
    make_blocks(cast=lambda s: jnp.round(jnp.clip(s, -448, 448)).astype(E4M3))
)
mutant("08.4", "clipped at 240")(make_blocks(cast=lambda s: jnp.clip(s, -240, 240).astype(E4M3)))
mutant("08.4", "minus zero lost")(
    make_blocks(cast=lambda s: jnp.where(s == 0, 0, jnp.clip(s, -448, 448)).astype(E4M3))
)
mutant("08.4", "blocks of every n-th number")(
    make_blocks(
        split=lambda x: x.reshape(x.shape[0], 32, -1).swapaxes(1, 2),
        join=lambda c, x: c.swapaxes(1, 2).reshape(x.shape),
    )
)
mutant("08.4", "codes left in blocks")(make_blocks(join=lambda c, x: c))


@mutant("08.4", "blocks down the columns")
def _(x):
    q = quantize_mxfp8(jnp.pad(x, ((0, -x.shape[0] % 32), (0, 0))), axis=0)
    return q.scale, q.data[: x.shape[0]]


@mutant("08.4", "blocks of 16")
def _(x):
    scale, codes = make_blocks(split=lambda x: x.reshape(x.shape[0], -1, 16))(x)
    return scale[:, ::2], codes


@mutant("08.4", "codes and scale swapped")
def _(x):
    return make_blocks()(x)[::-1]


@mutant("08.4", "the scale as a float")
def _(x):
    scale, codes = make_blocks()(x)
    return jnp.ldexp(jnp.float32(1), scale.astype(jnp.int32) - 127), codes


@mutant("08.4", "scales flat")
def _(x):
    scale, codes = make_blocks()(x)
    return scale.reshape(-1), codes


# ---------------------------------------------------------------- 08.5 three products, six copies


@alternative("08.5", "weights transposed before they are quantised")
def _(x, w, d_y, q):
    return q(x, -1) @ q(w.T, 1).T, q(d_y, -1) @ q(w.T, 0), q(x.T, 1) @ q(d_y, 0)


@alternative("08.5", "einsum")
def _(x, w, d_y, q):
    return (
        jnp.einsum("mk,kn->mn", q(x, 1), q(w, 0)),
        jnp.einsum("mn,kn->mk", q(d_y, 1), q(w, 1)),
        jnp.einsum("mk,mn->kn", q(x, 0), q(d_y, 0)),
    )


def make_products(x=(1, 0), w=(0, 1), d_y=(1, 0), order=(0, 1, 2)):
    def products(a, b, c, q):
        found = q(a, x[0]) @ q(b, w[0]), q(c, d_y[0]) @ q(b, w[1]).T, q(a, x[1]).T @ q(c, d_y[1])
        return tuple(found[i] for i in order)

    return products


alternative("08.5", "a mutant's frame with every part right")(make_products())
mutant("08.5", "x: one copy, along the rows")(make_products(x=(1, 1)))
mutant("08.5", "x: one copy, down the columns")(make_products(x=(0, 0)))
mutant("08.5", "x: the copies swapped")(make_products(x=(0, 1)))
mutant("08.5", "w: one copy, the forward one")(make_products(w=(0, 0)))
mutant("08.5", "w: one copy, the backward one")(make_products(w=(1, 1)))
mutant("08.5", "w: the copies swapped")(make_products(w=(1, 0)))
mutant("08.5", "d_y: one copy, along the rows")(make_products(d_y=(1, 1)))
mutant("08.5", "d_y: one copy, down the columns")(make_products(d_y=(0, 0)))
mutant("08.5", "d_y: the copies swapped")(make_products(d_y=(0, 1)))
mutant("08.5", "all along the rows")(make_products((1, 1), (1, 1), (1, 1)))
mutant("08.5", "all down the columns")(make_products((0, 0), (0, 0), (0, 0)))
mutant("08.5", "all six the wrong way")(make_products((0, 1), (1, 0), (0, 1)))
mutant("08.5", "the saved copies used again")(make_products((1, 1), (0, 0), (1, 1)))
mutant("08.5", "d_x and d_w swapped")(make_products(order=(0, 2, 1)))


@mutant("08.5", "nothing quantised")
def _(x, w, d_y, q):
    return x @ w, d_y @ w.T, x.T @ d_y


@mutant("08.5", "quantised forward, exact backward")
def _(x, w, d_y, q):
    return q(x, 1) @ q(w, 0), d_y @ w.T, x.T @ d_y


@mutant("08.5", "wgrad in high precision")
def _(x, w, d_y, q):
    return q(x, 1) @ q(w, 0), q(d_y, 1) @ q(w, 1).T, x.T @ d_y


@mutant("08.5", "quantised copies quantised again")
def _(x, w, d_y, q):
    x, w, d_y = q(x, 1), q(w, 0), q(d_y, 1)
    return x @ w, d_y @ q(w, 1).T, q(x, 0).T @ q(d_y, 0)


@mutant("08.5", "quantised along both axes")
def _(x, w, d_y, q):
    x, w, d_y = (q(q(a, 1), 0) for a in (x, w, d_y))
    return x @ w, d_y @ w.T, x.T @ d_y


@mutant("08.5", "the results quantised, not the operands")
def _(x, w, d_y, q):
    return q(x @ w, 1), q(d_y @ w.T, 1), q(x.T @ d_y, 1)


@mutant("08.5", "results quantised too")
def _(x, w, d_y, q):
    return tuple(q(a, 1) for a in make_products()(x, w, d_y, q))


@mutant("08.5", "transposed, then the axis of the original")
def _(x, w, d_y, q):
    return q(x, 1) @ q(w, 0), q(d_y, 1) @ q(w.T, 1), q(x.T, 0) @ q(d_y, 0)


@mutant("08.5", "the gradient of what was rounded")
def _(x, w, d_y, q):
    y, pull = jax.vjp(lambda x, w: x @ w, q(x, 1), q(w, 0))
    return y, *pull(q(d_y, 1))


# ---------------------------------------------------------------- 08.6 blocks of one expert


@alternative("08.6", "the package's")
def _(rows, group_sizes, block, num_places):
    ends = jnp.cumsum(group_sizes)
    _, source = align_groups(group_sizes, ends, len(rows), block)
    full = take_rows(rows, source)
    return jnp.pad(full, ((0, max(0, num_places - len(full))), (0, 0)))[:num_places]


@alternative("08.6", "a scatter of the rows")
def _(rows, group_sizes, block, num_places):
    ends = jnp.cumsum(group_sizes)
    whole = (group_sizes + block - 1) // block * block
    row = jnp.arange(len(rows))
    expert = (row[:, None] >= ends).sum(axis=1)
    shift = jnp.append(jnp.cumsum(whole) - whole - (ends - group_sizes), 0)[expert]
    place = jnp.where(expert < len(group_sizes), row + shift, num_places)
    return jnp.zeros((num_places, rows.shape[1]), rows.dtype).at[place].set(rows, mode="drop")


def make_aligned(
    whole=lambda s, b: -(-s // b) * b,
    own=lambda rank, size, expert: rank < size[expert],
    first=lambda s: jnp.cumsum(s) - s,
    begin=lambda w: jnp.cumsum(w) - w,
    none=lambda rows: len(rows),
    gather=lambda rows, source: rows.at[source].get(mode="fill", fill_value=0),
    edge=lambda place, ends: (place[:, None] >= ends).sum(axis=1),
):
    def align(rows, group_sizes, block, num_places):
        w = whole(group_sizes, block)
        place = jnp.arange(num_places)
        expert = jnp.minimum(edge(place, jnp.cumsum(w)), len(group_sizes) - 1)
        rank = place - begin(w)[expert]
        source = first(group_sizes)[expert] + rank
        return gather(rows, jnp.where(own(rank, group_sizes, expert), source, none(rows)))

    return align


alternative("08.6", "a mutant's frame with every part right")(make_aligned())
mutant("08.6", "not aligned")(make_aligned(whole=lambda s, b: s))
mutant("08.6", "one block more when it fits")(make_aligned(whole=lambda s, b: (s // b + 1) * b))
mutant("08.6", "rounded down")(make_aligned(whole=lambda s, b: s // b * b))
mutant("08.6", "a block for an empty expert")(make_aligned(whole=lambda s, b: jnp.maximum(-(-s // b), 1) * b))
mutant("08.6", "one row more")(make_aligned(own=lambda r, s, e: r <= s[e]))
mutant("08.6", "one row less")(make_aligned(own=lambda r, s, e: r < s[e] - 1))
mutant("08.6", "filled up with the neighbour's rows")(make_aligned(own=lambda r, s, e: r >= 0))
mutant("08.6", "index -1 for none")(make_aligned(none=lambda rows: -1))
mutant("08.6", "the last row for none")(make_aligned(none=lambda rows: len(rows) - 1))
mutant("08.6", "row 0 for none")(make_aligned(none=lambda rows: 0))
mutant("08.6", "clipped: the last row fills up")(
    make_aligned(gather=lambda rows, s: rows[jnp.minimum(s, len(rows) - 1)])
)
mutant("08.6", "filled up with NaN")(make_aligned(gather=lambda rows, s: rows.at[s].get(mode="fill")))
mutant("08.6", "filled up with ones")(
    make_aligned(gather=lambda rows, s: rows.at[s].get(mode="fill", fill_value=1))
)
mutant("08.6", "multiplied by a mask: NaN stays")(
    make_aligned(gather=lambda rows, s: rows[jnp.minimum(s, len(rows) - 1)] * (s < len(rows))[:, None])
)
mutant("08.6", "the rows of the aligned order read at aligned places")(
    make_aligned(first=lambda s: jnp.cumsum(-(-s // 32) * 32) - -(-s // 32) * 32)
)
mutant("08.6", "ends for beginnings")(make_aligned(first=jnp.cumsum))
mutant("08.6", "one expert further at the edge")(
    make_aligned(edge=lambda place, ends: (place[:, None] > ends).sum(axis=1))
)
mutant("08.6", "block 32 whatever is asked")(make_aligned(whole=lambda s, b: -(-s // 32) * 32))


@mutant("08.6", "as many places as rows")
def _(rows, group_sizes, block, num_places):
    return make_aligned()(rows, group_sizes, block, len(rows))


@mutant("08.6", "all experts padded to the largest")
def _(rows, group_sizes, block, num_places):
    largest = (-(-group_sizes // block) * block).max()
    return make_aligned(whole=lambda s, b: jnp.full_like(s, largest))(rows, group_sizes, block, num_places)


@mutant("08.6", "sizes read on the host")
def _(rows, group_sizes, block, num_places):
    out, begin = [], 0
    for size in group_sizes.tolist():
        out.append(jnp.pad(rows[begin : begin + size], ((0, -size % block), (0, 0))))
        begin += size
    out = jnp.concatenate(out)
    return jnp.pad(out, ((0, num_places - len(out)), (0, 0)))


@mutant("08.6", "zeros at the end alone")
def _(rows, group_sizes, block, num_places):
    live = (jnp.arange(len(rows)) < group_sizes.sum())[:, None]
    padded = jnp.pad(jnp.where(live, rows, 0), ((0, max(0, num_places - len(rows))), (0, 0)))
    return padded[:num_places]


# ---------------------------------------------------------------- 08.7 two levels of scale


@alternative("08.7", "the package's, by its codes")
def _(x):
    q = quantize_nvfp4(x)
    scale = decode(q.scale[:, 0], format_of("e4m3")).astype(E4M3)
    tensor = jnp.where(q.tensor_scale > 0, q.tensor_scale, 1).reshape(())
    codes = jnp.where(
        q.scale > 0, decode(codes_of(q), format_of("e2m1")), 0
    )  # it leaves 6 times scale 0, as TE does
    return tensor, scale, codes.astype(E2M1)


@alternative("08.7", "scales decoded by hand, division in two steps")
def _(x):
    amax = jnp.max(jnp.abs(x), axis=1)
    top = jnp.max(amax)
    tensor = jnp.where(top == 0, 1.0, top / 2688).astype(jnp.float32)
    scale = jnp.clip(amax / tensor / 6, 0, 448).astype(E4M3)
    step = scale.astype(jnp.float32)[:, None]
    live = step > 0
    codes = jnp.where(live, x / tensor / jnp.where(live, step, 1), 0)
    return tensor, scale, jnp.clip(codes, -6, 6).astype(E2M1)


def make_levels(
    top=6 * 448,
    tensor=lambda amax, top: jnp.where(amax.max() > 0, amax.max() / top, 1.0),
    scale=lambda amax, t: jnp.minimum(amax / 6 / t, 448).astype(E4M3),
    step=lambda s, t, amax: s.astype(jnp.float32) * t,
    divide=lambda x, step: jnp.where(step > 0, x / jnp.where(step > 0, step, 1), 0),
    cast=lambda s: jnp.clip(s, -6, 6).astype(E2M1),
    amax=lambda x: jnp.abs(x).max(axis=-1),
):
    def levels(x):
        a = amax(x)
        t = tensor(a, top)
        s = scale(a, t)
        return t, s, cast(divide(x, step(s, t, a)[:, None]))

    return levels


alternative("08.7", "a mutant's frame with every part right")(make_levels())
mutant("08.7", "tensor scale without the 6")(make_levels(top=448))
mutant("08.7", "tensor scale without the 448")(make_levels(top=6))
mutant("08.7", "tensor scale of 240s")(make_levels(top=6 * 240))
mutant("08.7", "no tensor scale")(make_levels(tensor=lambda a, top: jnp.float32(1)))
mutant("08.7", "the tensor scale upside down")(make_levels(tensor=lambda a, top: top / a.max()))
mutant("08.7", "a tensor of zeros divides by 0")(make_levels(tensor=lambda a, top: a.max() / top))
mutant("08.7", "tensor scale from the mean")(
    make_levels(tensor=lambda a, top: jnp.where(a.mean() > 0, a.mean() / top, 1.0))
)
mutant("08.7", "a tensor scale that is a power of two")(
    make_levels(
        tensor=lambda a, top: jnp.where(a.max() > 0, jnp.exp2(jnp.ceil(jnp.log2(a.max() / top))), 1.0)
    )
)
mutant("08.7", "block scale without the 6")(
    make_levels(scale=lambda a, t: jnp.minimum(a / t, 448).astype(E4M3))
)
mutant("08.7", "block scale times 6")(
    make_levels(scale=lambda a, t: jnp.minimum(a * 6 / t, 448).astype(E4M3))
)
mutant("08.7", "block scale without the tensor's")(
    make_levels(scale=lambda a, t: jnp.minimum(a / 6, 448).astype(E4M3))
)
mutant("08.7", "block scale in float32")(
    make_levels(scale=lambda a, t: a / 6 / t, step=lambda s, t, a: s * t)
)
mutant("08.7", "block scale in E5M2")(make_levels(scale=lambda a, t: (a / 6 / t).astype(jnp.float8_e5m2)))
mutant("08.7", "block scale a power of two")(
    make_levels(scale=lambda a, t: jnp.where(a > 0, jnp.exp2(jnp.round(jnp.log2(a / 6 / t))), 0).astype(E4M3))
)
mutant("08.7", "block scale at least 2^-6")(
    make_levels(scale=lambda a, t: jnp.clip(a / 6 / t, 2.0**-6, 448).astype(E4M3))
)
mutant("08.7", "block scale of 1 for zeros")(
    make_levels(scale=lambda a, t: jnp.where(a > 0, jnp.minimum(a / 6 / t, 448), 1).astype(E4M3))
)
mutant("08.7", "elements divided by the exact scale")(make_levels(step=lambda s, t, a: a / 6))
mutant("08.7", "elements not divided by the tensor scale")(
    make_levels(step=lambda s, t, a: s.astype(jnp.float32))
)
mutant("08.7", "elements divided by the tensor scale alone")(
    make_levels(step=lambda s, t, a: jnp.full_like(a, t))
)
mutant("08.7", "0 / 0")(make_levels(divide=lambda x, step: x / step))
mutant("08.7", "something small added")(make_levels(divide=lambda x, step: x / (step + 1e-6)))
mutant("08.7", "multiplied")(make_levels(divide=lambda x, step: x * step))
mutant("08.7", "not clipped, and beyond 6 nothing")(
    make_levels(cast=lambda s: jnp.where(jnp.abs(s) > 6, 0, s).astype(E2M1))
)
mutant("08.7", "clipped at 4")(make_levels(cast=lambda s: jnp.clip(s, -4, 4).astype(E2M1)))
mutant("08.7", "integers")(make_levels(cast=lambda s: jnp.round(jnp.clip(s, -6, 6)).astype(E2M1)))
mutant("08.7", "E4M3 elements")(make_levels(cast=lambda s: jnp.clip(s, -6, 6).astype(E4M3)))
mutant("08.7", "the largest without its sign")(make_levels(amax=lambda x: x.max(axis=-1)))
mutant("08.7", "one scale for all blocks")(
    make_levels(amax=lambda x: jnp.broadcast_to(jnp.abs(x).max(), x.shape[:1]))
)


@mutant("08.7", "scales down the columns")
def _(x):
    return make_levels(amax=lambda x: jnp.abs(x).max(axis=0))(x)


@mutant("08.7", "the scales swapped")
def _(x):
    tensor, scale, codes = make_levels()(x)
    return scale, tensor, codes


# ---------------------------------------------------------------- 08.8 stochastic rounding


@alternative("08.8", "noise of one step, then down")
def _(x, key):
    size = jnp.minimum(jnp.abs(x), 6)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    noisy = jnp.floor(size / step + jax.random.uniform(key, x.shape)) * step
    return jnp.copysign(jnp.minimum(noisy, 6), x)


@alternative("08.8", "up where the draw is high")
def _(x, key):
    grid = jnp.asarray(GRID, jnp.float32)
    size = jnp.clip(jnp.abs(x), 0, 6)
    index = jnp.clip(jnp.searchsorted(grid, size, side="right") - 1, 0, 6)
    low, high = grid[index], grid[index + 1]
    up = 1 - jax.random.uniform(key, x.shape) <= (size - low) / (high - low)
    return jnp.sign(x) * jnp.where(up, high, low)


@alternative("08.8", "the package's")
def _(x, key):
    return decode(encode(x, format_of("e2m1"), key=key), format_of("e2m1"))


def make_rounding(
    chance=lambda size, low, high: (size - low) / (high - low),
    draw=lambda key, x: jax.random.uniform(key, x.shape),
    sign=lambda x, y: jnp.sign(x) * y,
    grid=GRID,
    limit=6.0,
):
    def rounding(x, key):
        values = jnp.asarray(grid, jnp.float32)
        size = jnp.minimum(jnp.abs(x), limit)
        index = jnp.clip(jnp.searchsorted(values, size, side="right") - 1, 0, len(grid) - 2)
        low, high = values[index], values[index + 1]
        return sign(x, jnp.where(draw(key, x) < chance(size, low, high), high, low))

    return rounding


alternative("08.8", "a mutant's frame with every part right")(make_rounding())
mutant("08.8", "nearest")(make_rounding(draw=lambda key, x: 0.5))
mutant("08.8", "up or down with equal chance")(
    make_rounding(chance=lambda s, low, high: jnp.where(s > low, 0.5, 0.0))
)
mutant("08.8", "always down")(make_rounding(chance=lambda s, low, high: 0.0 * s))
mutant("08.8", "always up")(make_rounding(chance=lambda s, low, high: jnp.where(s > low, 1.0, 0.0)))
mutant("08.8", "the chances swapped")(
    make_rounding(chance=lambda s, low, high: jnp.where(s > low, (high - s) / (high - low), 0.0))
)
mutant("08.8", "the distance, not in units of the step")(make_rounding(chance=lambda s, low, high: s - low))
mutant("08.8", "steps of one half everywhere")(make_rounding(chance=lambda s, low, high: (s - low) * 2))
mutant("08.8", "the distance squared")(
    make_rounding(chance=lambda s, low, high: ((s - low) / (high - low)) ** 2)
)
mutant("08.8", "relative to the number")(
    make_rounding(chance=lambda s, low, high: (s - low) / jnp.maximum(s, 1e-6))
)
mutant("08.8", "one draw for all")(make_rounding(draw=lambda key, x: jax.random.uniform(key, ())))
mutant("08.8", "one draw for each column")(
    make_rounding(draw=lambda key, x: jax.random.uniform(key, x.shape[-1:]))
)
mutant("08.8", "one draw for each row")(
    make_rounding(draw=lambda key, x: jax.random.uniform(key, (*x.shape[:-1], 1)))
)
mutant("08.8", "a key of its own")(
    make_rounding(draw=lambda key, x: jax.random.uniform(jax.random.key(0), x.shape))
)
mutant("08.8", "normal draws")(make_rounding(draw=lambda key, x: jax.random.normal(key, x.shape)))
mutant("08.8", "draws from -1 to 1")(
    make_rounding(draw=lambda key, x: jax.random.uniform(key, x.shape, minval=-1.0))
)
mutant("08.8", "a coin")(
    make_rounding(draw=lambda key, x: jax.random.bernoulli(key, 0.5, x.shape).astype(jnp.float32))
)
mutant("08.8", "the sign lost")(make_rounding(sign=lambda x, y: y))
mutant("08.8", "the sign drawn from nowhere")(make_rounding(sign=lambda x, y: -jnp.sign(x) * y))
mutant("08.8", "5 in the grid")(make_rounding(grid=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)))
mutant("08.8", "no 0.5 in the grid")(make_rounding(grid=(0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)))
mutant("08.8", "the grid of E3M0")(make_rounding(grid=(0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0), limit=8.0))
mutant("08.8", "saturates at 4")(make_rounding(limit=4.0))
mutant("08.8", "beyond 6 nothing")(lambda x, key: make_rounding()(jnp.where(jnp.abs(x) > 6, 0, x), key))


@mutant("08.8", "noise of half a step around, then the cast")
def _(x, key):
    noise = jax.random.uniform(key, x.shape, minval=-0.25, maxval=0.25)
    return jnp.clip(x + noise, -6, 6).astype(E2M1).astype(jnp.float32)


@mutant("08.8", "towards minus infinity for negative numbers")
def _(x, key):
    low = jnp.floor(x)
    return jnp.clip(low + (jax.random.uniform(key, x.shape) < x - low), -6, 6)


@mutant("08.8", "E2M1 comes back")
def _(x, key):
    return make_rounding()(x, key).astype(E2M1)


@mutant("08.8", "rounded up too often at the grid")
def _(x, key):
    return make_rounding(chance=lambda s, low, high: jnp.maximum((s - low) / (high - low), 0.01))(x, key)


# ---------------------------------------------------------------- 08.9 the amax history


@alternative("08.9", "a roll")
def _(history, scale, amax, limit):
    history = jnp.roll(history, 1, axis=0).at[0].set(amax)
    top = jnp.max(history, axis=0)
    wanted = jnp.minimum(limit / top, 3.4028235e38)
    return history, jnp.where(top == 0, scale, wanted).astype(jnp.float32)


@alternative("08.9", "the largest kept apart")
def _(history, scale, amax, limit):
    top = jnp.maximum(history[:-1].max(axis=0, initial=0.0), amax)
    new = jnp.clip(limit / jnp.where(top > 0, top, limit), 0, jnp.finfo(jnp.float32).max)
    return jnp.vstack([amax, history[:-1]]), jnp.where(top > 0, new, scale)


def make_state(
    shift=lambda h, a: jnp.concatenate([a[None], h[:-1]]),
    top=lambda new, old, a: new.max(axis=0),
    scale=lambda limit, top: jnp.minimum(limit / jnp.where(top > 0, top, 1), jnp.finfo(jnp.float32).max),
    keep=lambda top, new, old: jnp.where(top > 0, new, old),
):
    def state(history, old, amax, limit):
        new = shift(history, amax)
        largest = top(new, history, amax)
        return new, keep(largest, scale(limit, largest), old)

    return state


alternative("08.9", "a mutant's frame with every part right")(make_state())
mutant("08.9", "newest last")(make_state(shift=lambda h, a: jnp.concatenate([h[1:], a[None]])))
mutant("08.9", "the newest leaves")(make_state(shift=lambda h, a: jnp.concatenate([a[None], h[1:]])))
mutant("08.9", "the history grows")(make_state(shift=lambda h, a: jnp.concatenate([a[None], h])))
mutant("08.9", "the history does not move")(make_state(shift=lambda h, a: h))
mutant("08.9", "rolled, the oldest comes round")(make_state(shift=lambda h, a: jnp.roll(h, 1, axis=0)))
mutant("08.9", "rolled over the experts")(make_state(shift=lambda h, a: jnp.roll(h, 1, axis=1).at[0].set(a)))
mutant("08.9", "the newest amax alone")(make_state(top=lambda new, old, a: a))
mutant("08.9", "the history before this step")(make_state(top=lambda new, old, a: old.max(axis=0)))
mutant("08.9", "the oldest leaves too late for the scale")(
    make_state(top=lambda new, old, a: jnp.maximum(old.max(axis=0), a))
)
mutant("08.9", "the mean of the history")(make_state(top=lambda new, old, a: new.mean(axis=0)))
mutant("08.9", "the largest over all experts")(
    make_state(top=lambda new, old, a: jnp.broadcast_to(new.max(), a.shape))
)
mutant("08.9", "the largest over the experts of a step")(
    make_state(top=lambda new, old, a: jnp.broadcast_to(new.max(axis=1)[0], a.shape))
)
mutant("08.9", "upside down")(make_state(scale=lambda limit, top: top / limit))
mutant("08.9", "no limit")(make_state(scale=lambda limit, top: 1 / jnp.where(top > 0, top, 1)))
mutant("08.9", "448 in both formats")(make_state(scale=lambda limit, top: 448 / jnp.where(top > 0, top, 1)))
mutant("08.9", "not capped")(make_state(scale=lambda limit, top: limit / jnp.where(top > 0, top, 1)))
mutant("08.9", "something small added")(make_state(scale=lambda limit, top: limit / (top + 1e-12)))
mutant("08.9", "a power of two")(
    make_state(scale=lambda limit, top: jnp.exp2(jnp.floor(jnp.log2(limit / jnp.where(top > 0, top, 1)))))
)
mutant("08.9", "half of the range left free")(
    make_state(scale=lambda limit, top: limit / jnp.where(top > 0, top, 1) / 2)
)
mutant("08.9", "1 where there was nothing")(make_state(keep=lambda top, new, old: jnp.where(top > 0, new, 1)))
mutant("08.9", "0 where there was nothing")(make_state(keep=lambda top, new, old: jnp.where(top > 0, new, 0)))
mutant("08.9", "infinity where there was nothing")(
    make_state(keep=lambda top, new, old: jnp.where(top > 0, new, jnp.inf))
)
mutant("08.9", "never grows again")(make_state(keep=lambda top, new, old: jnp.minimum(new, old)))
mutant("08.9", "the old scale, always")(make_state(keep=lambda top, new, old: old))


@mutant("08.9", "kept where this step had no rows")
def _(history, scale, amax, limit):
    new, wanted = make_state()(history, scale, amax, limit)
    return new, jnp.where(amax > 0, wanted, scale)


@mutant("08.9", "scale and history swapped")
def _(history, scale, amax, limit):
    return make_state()(history, scale, amax, limit)[::-1]


@mutant("08.9", "an if on the device")
def _(history, scale, amax, limit):
    new = jnp.concatenate([amax[None], history[:-1]])
    return new, jnp.stack([limit / t if t > 0 else s for t, s in zip(new.max(axis=0), scale, strict=True)])
