"""Small floats by explicit rules: E4M3, E5M2, E2M1, and E8M0 for scales.

All in integer arithmetic on the bits of float32. So nothing depends on how a compiler treats subnormal numbers
(XLA:CPU flushes them to 0), on a float ``log2`` (wrong beside powers of two), or on what a cast does out of range:
a plain cast to ``float8_e4m3fn`` turns 480 into NaN, and one to ``float8_e8m0fnu`` turns 0 into NaN.

Formats: OCP Microscaling Formats v1.0, section 5; OCP 8-bit Floating Point Specification. The casts saturate, as
NVIDIA's converts with ``SATFINITE`` do (CUDA Math API, ``__nv_cvt_float_to_fp8``).
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, Key, UInt, UInt8, UInt32

FormatName = Literal["e4m3", "e5m2", "e2m1", "e4m3fnuz", "e5m2fnuz"]
DTYPES = {
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e2m1": jnp.float4_e2m1fn,
    "e4m3fnuz": jnp.float8_e4m3fnuz,
    "e5m2fnuz": jnp.float8_e5m2fnuz,
}
Rounding = Literal["rceil", "floor", "ceil", "even"]

INF_BITS = 0x7F800000
"""float32 infinity. The bits of magnitudes order as the magnitudes do; NaN comes after infinity."""
FRACTION = 0x7FFFFF
NAN_SCALE = 255
"""The E8M0 byte that means NaN. Byte b means 2**(b - 127); there is no byte for 0."""


@dataclass(frozen=True)
class Format:
    """One element format; every number is read from its dtype."""

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number."""
    max: float
    """Largest finite value."""
    max_code: int
    inf_code: int | None
    nan_code: int | None
    negative_zero: bool

    @property
    def dtype(self):
        """The JAX dtype with these bits."""
        return DTYPES[self.name]


@cache
def format_of(name: FormatName) -> Format:
    """The format called ``name``; ValueError if there is none."""
    if name not in DTYPES:
        raise ValueError(f"unknown format {name!r}: choose one of {', '.join(DTYPES)}")
    info = jnp.finfo(DTYPES[name])

    def code_of(value: float) -> int:
        return int(np.array(value, np.float32).astype(DTYPES[name]).view(np.uint8))

    def value_of(value: float) -> float:
        return float(np.array(value, np.float32).astype(DTYPES[name]).astype(np.float32))

    return Format(
        name=name,
        bits=info.bits,
        mantissa_bits=info.nmant,
        min_exponent=math.frexp(float(info.smallest_normal))[1] - 1,
        max=float(info.max),
        max_code=code_of(float(info.max)),
        inf_code=code_of(math.inf) if math.isinf(value_of(math.inf)) else None,
        nan_code=code_of(math.nan) if math.isnan(value_of(math.nan)) else None,
        negative_zero=math.copysign(1.0, value_of(-0.0)) < 0,
    )


def to_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of ``x`` as float32. Wider types are refused: they would be rounded twice."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"needed float32, bfloat16 or float16, got {x.dtype}")
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def magnitude_bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """The bits of ``|x|``: their integer maximum is the amax, NaN and infinity included, subnormals too."""
    return to_bits(x) & 0x7FFFFFFF


def from_bits(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """float32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def encode(
    x: Float[Array, "..."],
    fmt: Format,
    exponent: Int[Array, "..."] | int = 0,
    key: Key[Array, ""] | None = None,
) -> UInt8[Array, "..."]:
    """Codes of ``x * 2**exponent``, rounded once: to nearest, ties to even, or at random if there is a ``key``.

    Saturating: whatever is above the largest finite value becomes it, infinity too. NaN becomes the format's NaN;
    E2M1 has none, and NaN becomes 6 there, so look for NaN before. Stochastic rounding goes up with a probability
    equal to the distance from the lower neighbour: right on average, never moves a value that the format has.
    """
    bits = to_bits(x)
    magnitude = bits & 0x7FFFFFFF
    field = (magnitude >> 23).astype(jnp.int32)
    significand = jnp.where(field > 0, magnitude & FRACTION | (FRACTION + 1), magnitude)
    leading = lax.clz(significand).astype(jnp.int32) - 8  # 0 unless subnormal
    significand = significand << leading.astype(jnp.uint32)
    power = jnp.maximum(field, 1) - 127 - leading + exponent  # floor(log2(|x| * 2**exponent))
    drop = 23 - fmt.mantissa_bits + jnp.maximum(fmt.min_exponent - power, 0)
    kept = _drop_bits(significand, drop, key).astype(jnp.int32)
    # A kept significand that rounded up to the next power of two carries into the exponent by itself.
    code = (jnp.maximum(power - fmt.min_exponent, 0) << fmt.mantissa_bits) + kept
    code = jnp.where(magnitude == 0, 0, jnp.minimum(code, fmt.max_code))
    code = jnp.where(magnitude == INF_BITS, fmt.max_code, code)
    negative = (bits >> 31).astype(jnp.int32)
    if not fmt.negative_zero:
        negative = jnp.where(code == 0, 0, negative)
    code = code | negative << (fmt.bits - 1)
    not_a_number = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return jnp.where(magnitude > INF_BITS, not_a_number, code).astype(jnp.uint8)


def _drop_bits(significand: Array, drop: Array, key) -> Array:
    """``significand / 2**drop`` as an integer. Significands have 24 bits."""
    if key is None:
        drop = jnp.minimum(drop, 26).astype(jnp.uint32)  # 26 is enough to leave nothing
        odd = significand >> drop & 1
        return (significand + (jnp.uint32(1) << (drop - 1)) - 1 + odd) >> drop
    kept = jnp.minimum(drop, 31)
    significand = significand >> jnp.minimum(drop - kept, 31).astype(jnp.uint32)
    kept = kept.astype(jnp.uint32)
    noise = jax.random.bits(key, significand.shape, jnp.uint32) >> (32 - kept)
    return (significand + noise) >> kept


def decode(
    codes: UInt8[Array, "..."], fmt: Format, exponent: Int[Array, "..."] | int = 0
) -> Float[Array, "..."]:
    """float32 values of ``codes``, times ``2**exponent``: exact, subnormal float32 results too."""
    codes = codes.astype(jnp.int32)
    sign = 1 << (fmt.bits - 1)
    magnitude = codes & (sign - 1)
    field = magnitude >> fmt.mantissa_bits
    hidden = jnp.where(field > 0, 1 << fmt.mantissa_bits, 0)
    significand = (magnitude & ((1 << fmt.mantissa_bits) - 1)) + hidden
    power = jnp.maximum(field, 1) - 1 + fmt.min_exponent - fmt.mantissa_bits + exponent
    bits = _integer_times_power(significand, power)
    special = (
        jnp.where(magnitude == fmt.inf_code, INF_BITS, INF_BITS | 1 << 22) if fmt.inf_code else 0x7FC00000
    )
    bits = jnp.where(magnitude > fmt.max_code, special, bits)
    bits = jnp.where(
        (codes & sign) > 0, bits.astype(jnp.uint32) | jnp.uint32(1 << 31), bits.astype(jnp.uint32)
    )
    if not fmt.negative_zero:  # what would be -0 is NaN
        bits = jnp.where(codes == sign, jnp.uint32(0x7FC00000), bits)
    return from_bits(bits)


def _integer_times_power(n: Array, power: Array) -> Array:
    """float32 bits of ``n * 2**power`` for small integers n >= 0, infinity where that is too large."""
    bits = lax.bitcast_convert_type(n.astype(jnp.float32), jnp.int32)
    field = (bits >> 23) + power
    subnormal = (bits & FRACTION | (FRACTION + 1)) >> jnp.clip(1 - field, 0, 31)
    scaled = jnp.where(field >= 1, bits + (power << 23), subnormal)
    return jnp.where(n == 0, 0, jnp.where(field >= 255, INF_BITS, scaled))


def cast(x: Float[Array, "..."], fmt: FormatName) -> Array:
    """``x`` in an FP8 dtype, saturating: what ``x.astype`` should do and does not."""
    return to_dtype(encode(x, format_of(fmt)), format_of(fmt))


def to_dtype(codes: UInt8[Array, "..."], fmt: Format) -> Array:
    """FP8 codes seen as their dtype."""
    return lax.bitcast_convert_type(codes, fmt.dtype)


def to_codes(data: Array) -> UInt8[Array, "..."]:
    """The inverse of :func:`to_dtype`."""
    return lax.bitcast_convert_type(data, jnp.uint8)


# E8M0: a power of two in one byte.


def encode_e8m0(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The byte of the smallest power of two that is at least ``|x|``; NaN is 255, infinity saturates to 254."""
    bits = magnitude_bits(x)
    field, fraction = (bits >> 23).astype(jnp.int32), bits & FRACTION
    above = jnp.where(field > 0, fraction > 0, fraction > 1 << 22)  # byte 0 means 2**-127, a subnormal number
    byte = jnp.minimum(field + above.astype(jnp.int32), 254)
    return jnp.where(bits > INF_BITS, NAN_SCALE, byte).astype(jnp.uint8)


def decode_e8m0(byte: UInt[Array, "..."]) -> Float[Array, "..."]:
    """``2**(byte - 127)`` as float32; byte 0 is a subnormal number, which the next operation may flush."""
    bits = byte.astype(jnp.uint32) << 23
    bits = jnp.where(byte == 0, jnp.uint32(1 << 22), bits)
    return from_bits(jnp.where(byte == NAN_SCALE, jnp.uint32(0x7FC00000), bits))


def shared_exponent(amax: UInt32[Array, "..."], fmt: Format, rounding: Rounding) -> UInt8[Array, "..."]:
    """E8M0 scale byte of a block from the bits of its amax; 255 if the block holds NaN or infinity.

    ``rceil``: ceil(log2(amax / max)), by which nothing clips (Transformer Engine, cuBLAS, cuDNN; arXiv 2506.08027).
    ``floor``: floor(log2 amax) - emax, the OCP sample algorithm (section 6.3), by which a significand of amax above
    that of max clips. ``ceil``: ceil(log2 amax) - emax. ``even``: as floor, after rounding amax to the element's
    mantissa. The last two are torchao's names.
    """
    limit = int(np.float32(fmt.max).view(np.uint32))
    field, fraction = (amax >> 23).astype(jnp.int32), amax & FRACTION
    if rounding == "rceil":
        field = field + (fraction > limit & FRACTION).astype(jnp.int32)
    elif rounding == "ceil":
        field = field + (fraction > 0).astype(jnp.int32)
    elif rounding == "even":
        field = ((amax + (1 << (22 - fmt.mantissa_bits))) >> 23).astype(jnp.int32)
    elif rounding != "floor":
        raise ValueError(f"unknown rounding {rounding!r}: choose rceil, floor, ceil or even")
    byte = jnp.clip(field - ((limit >> 23) - 127), 0, 254)
    return jnp.where(amax >= INF_BITS, NAN_SCALE, byte).astype(jnp.uint8)
