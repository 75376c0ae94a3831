"""Chapter 08, formats and blocks of 32: what right answers do. Oracles are float64 NumPy, which has room for 2**-127."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_course.lessons.compare import array_of, items, same, show
from moe_course.lessons.exercise import Broken, holds
from moe_course.lessons.learner import compiled

E4M3 = jnp.float8_e4m3fn
BLOCK = 32
FORMATS = {
    "float8_e4m3fn": (jnp.float8_e4m3fn, 3, -6, 448.0),
    "float8_e5m2": (jnp.float8_e5m2, 2, -14, 57344.0),
    "float8_e4m3fnuz": (jnp.float8_e4m3fnuz, 3, -7, 240.0),
}
"""Name -> dtype, mantissa bits, exponent of the smallest normal number, largest value."""


def nearest(x, mantissa_bits: int, min_exponent: int, largest: float) -> np.ndarray:
    """``x`` rounded to a small float, ties to even, saturating; float64 in and out."""
    x = np.asarray(x, np.float64)
    size = np.abs(np.where(np.isfinite(x), x, 0.0))
    exponent = np.maximum(np.frexp(size)[1] - 1, min_exponent)
    step = np.exp2(exponent - float(mantissa_bits))
    rounded = np.where(np.isinf(x), largest, np.minimum(np.round(size / step) * step, largest))
    return np.where(np.isnan(x), np.nan, np.copysign(rounded, x))


def exact(
    value, expected, *, case, axes=(), why="", suspects=None, dtype=None, what="result", zero_sign=True
):
    """Equal number by number, NaN where NaN is expected; with ``zero_sign`` -0 is not 0."""
    expected = np.asarray(expected, np.float64)
    yours = array_of(value, case=case, shape=expected.shape, kind="f", dtype=dtype, what=what)
    yours = yours.astype(np.float64)
    wrong = _unlike(yours, expected, zero_sign)
    if not wrong.any():
        return
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = ", ".join(f"{name} {i}" for name, i in zip(axes, index, strict=False))
    why = next(
        (
            line
            for line, twin in (suspects or {}).items()
            if not _unlike(yours, np.asarray(twin, np.float64), False).any()
        ),
        why,
    )
    yours, expected = yours[index], expected[index]
    if yours == expected == 0:
        raise Broken(case, f"{yours}", f"{expected}", why or "The sign of a zero is a bit too.", where)
    if show(yours) == show(expected):  # they differ in the last bits
        raise Broken(case, f"{yours!r}".strip(), f"{expected!r}", why, where)
    raise Broken(case, show(yours), show(expected), why, where)


def _unlike(yours, expected, zero_sign):
    if yours.shape != expected.shape:
        return np.ones(yours.shape, bool)
    wrong = ~((yours == expected) | (np.isnan(yours) & np.isnan(expected)))
    return wrong | (zero_sign & (yours == 0) & (expected == 0) & (np.signbit(yours) != np.signbit(expected)))


# ---------------------------------------------------------------- 08.1 E4M3 by hand


def value_of_code(code: int) -> float:
    """What a byte of E4M3 means, by the definition."""
    sign, field, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if field == 0 else (1 + mantissa / 8) * 2.0 ** (field - 7))


VALUES = np.array([value_of_code(code) for code in range(256)])


def _codes(fn, codes, case, why="") -> None:
    codes = np.asarray(codes, np.uint8)
    expected = VALUES[codes]
    c = codes.astype(np.int64)
    field, mantissa = c >> 3 & 15, c & 7
    sign = np.where(c & 128, -1.0, 1.0)
    hidden = sign * (1 + mantissa / 8) * 2.0 ** (field - 7.0)
    e5m2 = codes.view(jnp.float8_e5m2).astype(np.float64)
    suspects = {
        "Exponent field 0 has no hidden 1: those are the subnormal numbers, steps of 2^-9.": np.where(
            c & 127 == 127, np.nan, hidden
        ),
        "E4M3 has no infinity: all of field 15 is numbers, but for one code.": np.where(
            field == 15, np.where(mantissa == 0, sign * np.inf, np.nan), expected
        ),
        "The field is read with a bias of 8. Seven is the exponent of 1.": expected / 2,
        "The field is read as the exponent itself. Its bias is 7.": expected * 128,
        "The sign bit is lost.": np.abs(expected),
        "This is E5M2: one exponent bit more, one mantissa bit less.": e5m2,
        "Code 127 is NaN.": np.where(c & 127 == 127, sign * 480, expected),
    }
    exact(fn(codes), expected, case=case, axes=("code",), dtype=jnp.float32, why=why, suspects=suspects)


@holds("a few codes by hand")
def by_hand(fn) -> int:
    _codes(fn, [0x38, 0x39, 0x40, 0xB8, 0x7E, 0x01, 0x08], "codes 38 39 40 b8 7e 01 08 (hex)")
    return 7


@holds("all 256 codes, exactly")
def all_codes(fn) -> int:
    why = (
        "Exactly: jnp.exp2 is off by a bit for some whole exponents on a CPU. jnp.ldexp(number, exponent) is exact, and "
        "so is a product with a power of two from a table."
    )
    _codes(fn, np.arange(256), "codes 0 to 255, where", why)
    return 256


@holds("codes in any shape, under jit")
def codes_in_any_shape(fn) -> int:
    codes = np.random.default_rng(80).integers(0, 256, (3, 5)).astype(np.uint8)
    why = "Under jit codes are data: no NumPy, no int(), no if."
    result = compiled(jax.jit(fn), codes, case="codes [3, 5], under jit", why=why)
    exact(result, VALUES[codes], case="codes [3, 5], under jit", axes=("row", "column"), dtype=jnp.float32)
    return 1


# ---------------------------------------------------------------- 08.2 a cast that saturates


def _cast(fn, x, name, case, why="") -> None:
    dtype, *rule = FORMATS[name]
    expected = nearest(x.astype(np.float64), *rule)
    if name.endswith("fnuz"):
        expected = expected + 0.0  # no -0 there
    suspects = {
        "Beyond the largest value a plain cast gives NaN or inf: clip first.": x.astype(dtype),
        "NaN must stay NaN. It is not a large number.": nearest(
            np.where(np.isnan(x.astype(np.float32)), 0, x), *rule
        ),
    }
    result = fn(x, dtype)
    exact(
        result,
        expected,
        case=f"{case}, to {name}",
        axes=("number",),
        dtype=dtype,
        why=why,
        suspects=suspects,
        zero_sign=not name.endswith("fnuz"),
    )


def _numbers(seed, largest) -> np.ndarray:
    """float32 numbers over the whole range of a format and beyond it."""
    rng = np.random.default_rng([82, seed])
    size = largest * np.exp2(rng.uniform(-30, 3, 200))
    edges = largest * np.array([1.0, 1.03, 1.0358, 1.08, 1.5, 100.0, np.inf])
    return (np.concatenate([size, edges]) * rng.choice([-1, 1], 207)).astype(np.float32)


@holds("in range it is the cast")
def in_range(fn) -> int:
    x = np.array([0.0, -0.0, 1.0, 17.0, 19.0, -0.3, 448.0, 1e-3, -1e-6], np.float32)
    _cast(fn, x, "float8_e4m3fn", "0 to 448")
    return len(x)


@holds("beyond the largest value it stays there, infinity too, in each format")
def saturates(fn) -> int:
    for i, (name, (_, _, _, largest)) in enumerate(FORMATS.items()):
        why = f"The largest value of {name} is {largest:g}. Ask the dtype: jnp.finfo(dtype).max."
        _cast(fn, _numbers(i, largest), name, "numbers of every size", why)
    return 3


@holds("NaN stays NaN")
def nan_stays(fn) -> int:
    x = np.array([np.nan, 1.0, 1e9], np.float32)
    for name in FORMATS:
        _cast(fn, x, name, "[nan, 1, 1e9]")
    return 3


@holds("bfloat16 comes in as well")
def from_bfloat16(fn) -> int:
    x = _numbers(5, 448.0).astype(jnp.bfloat16)
    _cast(fn, x, "float8_e4m3fn", "bfloat16 numbers of every size")
    return 1


# ---------------------------------------------------------------- 08.3 the scale byte


def byte_of(amax, round_up: bool) -> np.ndarray:
    """E8M0 byte of blocks with these largest magnitudes; 255 if not finite."""
    amax = np.asarray(amax, np.float64)
    size = np.where(np.isfinite(amax), amax, 1.0)
    half, exponent = np.frexp(size)  # size = half 2^exponent, half in [0.5, 1)
    exponent = exponent - 1 - 8 + (round_up & (2 * half > 1.75))
    byte = np.where(size == 0, 0, np.clip(exponent + 127, 0, 254))
    return np.where(np.isfinite(amax), byte, 255)


def _bytes(result, amax, round_up, case) -> None:
    wide = amax.astype(np.float64)
    safe = np.where(np.isfinite(wide) & (wide > 0), wide, 1.0)

    def clamp(exponent):
        byte = np.where(wide == 0, 0, np.clip(exponent + 127, 0, 254))
        return np.where(np.isfinite(wide), byte, 255)

    suspects = {
        "Rounding up and down are swapped.": byte_of(amax, not round_up),
        "This rounds every significand above 1 up. Up only if the largest would be above 448.": clamp(
            np.ceil(np.log2(safe)) - 8
        ),
        "This rounds the exponent to nearest, as a cast to float8_e8m0fnu does.": clamp(
            np.round(np.log2(safe / 448))
        ),
        "The 8 is missing: 448 is 1.75 * 2^8.": clamp(np.floor(np.log2(safe))),
        "Byte 0 is a scale too: it means 2^-127.": np.maximum(byte_of(amax, round_up), 1),
        "The bias is missing: byte 127 means 2^0.": np.clip(
            byte_of(amax, round_up).astype(np.int64) - 127, 0, 254
        ),
    }
    why = (
        "Beside a power of two a float log2 is wrong; the bits of the float are not. The exponent is bits >> 23, the "
        "significand bits & 0x7fffff."
    )
    name = f"{case}, round_up={round_up}"
    found = array_of(result, case=name, shape=amax.shape, kind="i", dtype=jnp.uint8, what="byte")
    found, expected = found.astype(np.int64), byte_of(amax, round_up)
    if (found != expected).any():
        at = tuple(int(i) for i in np.argwhere(found != expected)[0])
        why = next((line for line, twin in suspects.items() if (found == twin).all()), why)
        raise Broken(
            name, f"byte {found[at]}", f"byte {expected[at]}", why, f"the largest is {float(amax[at])!r}"
        )


def _both_rules(fn, amax, case, jit=True) -> int:
    amax = np.asarray(amax, np.float32)
    for round_up in (True, False):
        if jit:
            why = "Under jit the numbers are data: no int(), no math.log2, no if."
            run = jax.jit(lambda a, up=round_up: fn(a, up))
            result = compiled(run, amax, case=case + ", under jit", why=why)
        else:
            result = fn(amax, round_up)
        _bytes(result, amax, round_up, case)
    return 2 * amax.size


@holds("a few maxima by hand")
def bytes_by_hand(fn) -> int:
    return _both_rules(
        fn, [[448.0, 449.0, 500.0], [512.0, 256.0, 1.0]], "[[448, 449, 500], [512, 256, 1]]", jit=False
    )


@holds("every exponent, on both sides of 1.75 and of 2")
def every_exponent(fn) -> int:
    one = np.float32(1.0)
    significands = [
        one,
        np.nextafter(one, np.float32(2)),
        np.float32(1.5),
        np.nextafter(np.float32(1.75), one),
        np.float32(1.75),
        np.nextafter(np.float32(1.75), np.float32(2)),
        np.nextafter(np.float32(2), one),
    ]
    powers = np.exp2(np.arange(-126, 128, dtype=np.float64)).astype(np.float32)
    return _both_rules(fn, np.outer(significands, powers), "all powers of two and their neighbours")


@holds("zero and what lies below every scale")
def zero_and_tiny(fn) -> int:
    tiny = [0.0, 1e-45, 1e-40, 1.17549435e-38, 2.6e-36, 2.633107345841924e-36, 2.7e-36]
    return _both_rules(fn, tiny, "zero and tiny numbers")


@holds("infinity and NaN give byte 255")
def not_finite(fn) -> int:
    return _both_rules(fn, [np.inf, np.nan, 3.4028235e38, 1.0], "[inf, nan, the largest float32, 1]")


@holds("the significands of one binade")
def one_binade(fn) -> int:
    steps = np.concatenate([np.arange(0, 2**23, 997), np.arange(2**23 - 200, 2**23), np.arange(200)])
    amax = (1 + steps / 2.0**23).astype(np.float32)
    return _both_rules(fn, np.concatenate([amax, amax * 256]), "9,000 significands of two binades")


# ---------------------------------------------------------------- 08.4 blocks of 32


def mx_of(x, round_up=True):
    """(scale bytes, elements as float64) of rows of whole blocks; a block that is not finite is NaN as a whole."""
    blocks = np.asarray(x, np.float64).reshape(x.shape[0], -1, BLOCK)
    byte = byte_of(np.abs(blocks).max(axis=-1), round_up)
    scale = np.exp2(byte[..., None] - 127.0)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = nearest(blocks / scale, 3, -6, 448.0)
    return byte, np.where(byte[..., None] == 255, np.nan, codes).reshape(x.shape)


def spread_rows(seed, rows, columns) -> np.ndarray:
    """Normal numbers, each block of 32 with a size of its own."""
    rng = np.random.default_rng([84, seed])
    size = np.exp2(rng.integers(-20, 20, (rows, columns // BLOCK, 1)))
    return (rng.normal(size=(rows, columns // BLOCK, BLOCK)) * size).reshape(rows, columns).astype(np.float32)


def _quantised(fn, x, case, why="", jit=True) -> None:
    if jit:
        how = "Under jit x is data: no NumPy, no int(), no if."
        result = compiled(jax.jit(fn), x, case=case + ", under jit", why=how)
    else:
        result = fn(x)
    scale, codes = items(result, 2, case=case, names="scale, codes")
    byte, values = mx_of(x)
    lines = {
        "This is FLOOR. Round the exponent up where the largest would clip.": mx_of(x, False)[0].astype(
            np.uint8
        ),
    }
    if x.shape[0] > 1:
        tensor = np.full_like(byte, byte_of(np.abs(x).max(), True))
        lines["One scale for the whole array: take the largest of each block."] = tensor.astype(np.uint8)
    found = array_of(scale, case=case, shape=byte.shape, kind="i", dtype=jnp.uint8, what="scale")
    same(found, byte.astype(np.uint8), case=f"{case}: scale", axes=("row", "block"), why=why, suspects=lines)
    exact(
        codes, values, case=f"{case}: codes", axes=("row", "column"), dtype=E4M3, why=why, what="codes array"
    )


@holds("one block by hand: 500 makes 512")
def one_block(fn) -> int:
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 500, -500, 31, 1
    _quantised(fn, x, "one block, 500, -500, 31, 1, then zeros", jit=False)
    return 1


@holds("each block has its own scale")
def own_scale(fn) -> int:
    for seed in (0, 1):
        x = spread_rows(seed, 4, 96)
        x = x.astype(jnp.bfloat16).astype(np.float32) if seed else x  # many of these are ties
        _quantised(fn, x, f"x [4, 96]{' of bfloat16 numbers' * seed}, blocks of very different sizes")
    _quantised(fn, spread_rows(2, 5, 32), "x [5, 32]")
    return 3


@holds("a block of zeros is zeros, and blocks below 448 * 2^-127 are not")
def zero_blocks(fn) -> int:
    x = spread_rows(3, 4, 96)
    x[1, 32:64] = 0
    x[2] = 0
    x[3, 5:32] = -0.0
    x[0, 0:32] = 0
    x[0, [1, 4, 9]] = 2.5e-36, -7.5e-37, 2e-38
    why = (
        "Byte 0 means 2^-127, which a CPU takes for 0: x / scale is 0 / 0 there. Multiply by 2^(127 - byte) instead, "
        "with jnp.ldexp."
    )
    _quantised(fn, x, "x [4, 96], some blocks zeros, one tiny", why)
    return 4


@holds("NaN and infinity make their own block NaN, and no other")
def not_finite_blocks(fn) -> int:
    x = spread_rows(4, 4, 96)
    x[0, 3], x[1, 40], x[2, 95], x[2, 64] = np.nan, np.inf, -np.inf, np.nan
    why = "A block that holds NaN or infinity has byte 255, and 32 NaN codes: it must not look like numbers."
    _quantised(fn, x, "x [4, 96], three blocks with NaN or infinity", why)
    return 3


@holds("the largest numbers there are")
def huge_blocks(fn) -> int:
    x = spread_rows(5, 4, 96)
    x[1, 7], x[1, 8], x[2, 50] = 3.4028235e38, 1e37, -2.0e38
    _quantised(fn, x, "x [4, 96], with numbers up to 3.4e38")
    return 2
