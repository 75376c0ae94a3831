"""check(), hint(), yours(), quiz(), predict(): what they print for every kind of function, right and wrong."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_course.lessons import check, compare, hint, learner, predict, quiz, yours
from moe_course.lessons import exercise as registry
from moe_course.lessons.exercise import Broken, Exercise, Quiz, holds


@holds("doubles every element")
def doubles(fn) -> int:
    for n in (4, 0, 7):
        x = np.random.default_rng(n).normal(size=n).astype(np.float32)
        compare.close(
            fn(x),
            2.0 * x,
            case=f"x [{n}]",
            axes=("token",),
            why="Twice, not squared.",
            suspects={"You squared.": x * x},
        )
    return 3


@holds("its gradient is 2")
def gradient(fn) -> int:
    grad = jax.grad(lambda x: fn(x).sum())(jnp.array([1.0, -2.0, 3.0]))
    compare.close(grad, np.full(3, 2.0), case="x [1, -2, 3]", axes=("token",))
    return 1


TWICE = Exercise(
    "99.1",
    "twice",
    "Double an array.",
    1,
    1,
    ("98",),
    ("What is two?", "x [T] -> [T]", "return ... * x", "return 2 * x"),
    (doubles, gradient),
)
QUESTIONS = (
    Quiz("99.q1", "b", {"a": "That is K.", "b": "E experts."}),
    Quiz("99.q2", 0.4, {0.4: "Unbiased.", 0.7: "That is the biased one."}, within=0.01),
)


@pytest.fixture(autouse=True)
def chapter_99(monkeypatch, tmp_path):
    chapter = type("Chapter", (), {"EXERCISES": (TWICE,), "QUIZZES": QUESTIONS})
    real = registry._chapter
    monkeypatch.setattr(registry, "_chapter", lambda name: chapter if name == "99" else real(name))
    monkeypatch.setenv("MOE_COURSE_PROGRESS", str(tmp_path / "progress.json"))
    # The package's attribute `check` is the function, so reach the module by its globals.
    monkeypatch.setitem(check.__globals__, "_passed", {})
    monkeypatch.setitem(check.__globals__, "_hints_given", {})


def printed(capsys, fn, id="99.1") -> str:
    check(id, fn)
    return capsys.readouterr().out


GREEN = "99.1  twice   3 of 3 properties, 5 cases   used again in 98\n"


def stub(x):
    """Shapes."""
    raise NotImplementedError("exercise: write this")


@pytest.mark.parametrize(
    "fn",
    [lambda x: 2 * x, jax.jit(lambda x: x + x), functools.partial(jnp.multiply, jnp.float32(2))],
    ids=["plain", "jitted", "partial"],
)
def test_right(capsys, fn):
    assert printed(capsys, fn) == GREEN
    assert yours("99.1", stub) is fn


def test_stub_is_not_attempted(capsys):
    result = check("99.1", stub)
    assert capsys.readouterr().out == "99.1  twice   not attempted\n"
    assert not result
    assert yours("99.1", len) is len


def test_wrong_names_the_property_case_place_and_mistake(capsys):
    assert printed(capsys, lambda x: x * x) == (
        "99.1  twice                                 0 of 3 properties hold\n"
        "  x doubles every element\n"
        "      case  x [4]\n"
        "      yours [0.4248, 0.03053, 2.768, 0.4345]   expected [-1.304, -0.3494, 3.327, 1.318]   (token 0)\n"
        "      You squared.\n"
        "  x its gradient is 2\n"
        "  x the same input gives the same answer\n"
        '  Stuck? hint("99.1") gives a hint.\n'
    )


def no_return(x):
    2 * x


def crashes(x):
    wrong = x @ jnp.ones(99)
    return wrong


def leaves(x):
    raise SystemExit(3)


def half_done(x):
    if x.shape == (4,):
        return 2 * x
    raise NotImplementedError("sizes other than 4")


def recursion(x):
    return recursion(x)


class Liar:
    """Claims to be an array and is none."""

    dtype, shape = np.dtype("float32"), (4,)

    def __array__(self, *_, **__):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (no_return, "is a return missing?"),
        (lambda x: (2 * x,), "not a tuple"),
        (lambda x: (2 * x).astype(jnp.float16), "dtype float16"),
        (lambda x: jnp.round(2 * x).astype(jnp.int32), "dtype int32"),
        (lambda x: (2 * x)[:, None], "shape (4, 1)"),
        (lambda x: [float(v) for v in 2 * x], "JAX array"),
        (lambda x: "2x", "JAX array"),
        (lambda: 0, "TypeError: <lambda>() takes 0 positional arguments"),
        (crashes, "of test_check.py, in crashes: "),
        (jnp.zeros, "properties hold"),
        (crashes, "wrong = x @ jnp.ones(99)"),
        (leaves, "SystemExit: 3"),
        (half_done, "NotImplementedError: sizes other than 4"),
        (recursion, "RecursionError"),
        (lambda x: Liar(), "could not read what you returned (RuntimeError: no)"),
        (3, "int is not a function"),
        (None, "without calling it"),
        (lambda x: np.asarray(2 * x), "its gradient is 2"),
        (lambda x: x * jnp.nan, "yours [nan, nan, nan, nan]"),
    ],
)
def test_every_kind_of_wrong_is_a_line_not_an_exception(capsys, fn, says):
    text = printed(capsys, fn)
    assert "properties hold" in text
    assert says in text
    assert "/" not in text, "no path belongs in a notebook"


def test_ctrl_c_gets_through():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("99.1", interrupted)


def test_prints_of_the_function_are_shown_only_where_they_help(capsys):
    def chatty(factor, x):
        print("x is", x.shape)
        return factor * x

    assert printed(capsys, functools.partial(chatty, 2)) == GREEN
    assert "your function printed: x is (4,)" in printed(capsys, functools.partial(chatty, 3))


def test_state_between_calls_is_noticed(capsys):
    count = itertools.count()
    text = printed(capsys, lambda x: 2 * x + (0 if next(count) < 4 else 1))
    assert "the same input gives the same answer" in text
    assert "Something is kept between calls" in text


def test_inputs_are_fresh():
    seen = []

    @holds("mutates")
    def mutates(fn) -> int:
        given, listed = np.ones(3, np.float32), [1, 2]
        fn(given, listed)
        seen.extend([given.sum(), listed])
        return 1

    def spoil(x, values):
        assert isinstance(x, jax.Array)
        values.clear()
        return x

    exercise = Exercise("99.2", "t", "g", 1, 1, (), ("", "", "", ""), (mutates,))
    assert learner.examine(exercise, spoil).passed
    assert seen == [3, [1, 2]]


def test_the_verdict_does_not_depend_on_the_callers_numerics(capsys):
    def mixed(x):  # int32 and float32, rank 0 and 1: errors under this test session's settings
        return x * jnp.arange(2, 3) + jnp.zeros((1,) * 1)

    assert printed(capsys, mixed) == GREEN


def test_a_broken_property_is_not_the_learners_exception(capsys):
    @holds("broken")
    def broken(fn) -> int:
        return fn(1)["no such key"]

    exercise = Exercise("99.3", "t", "g", 1, 1, (), ("", "", "", ""), (broken,))
    outcome = learner.examine(exercise, lambda x: {})
    assert not outcome.passed
    assert "KeyError" in outcome.failures[0].lines[0]


def test_a_later_failure_takes_yours_back(capsys):
    check("99.1", lambda x: 2 * x)
    check("99.1", lambda x: 3 * x)
    assert yours("99.1", stub) is stub


def test_unknown_ids_are_lines(capsys):
    for call in (lambda: check("99.7", stub), lambda: hint("77.1"), lambda: quiz("99.q9", "a")):
        call()
        assert capsys.readouterr().out.startswith("there is no ")


def test_result_shows_nothing_and_is_a_truth_value():
    assert check("99.1", lambda x: 2 * x)
    assert check("99.1", stub)._ipython_display_() is None


def test_hints_climb_the_ladder(capsys):
    for _ in range(5):
        hint("99.1")
    text = capsys.readouterr().out
    steps = [line for line in text.splitlines() if line.startswith("99.1  hint")]
    assert [s.rpartition(": ")[2] for s in steps] == ["idea", "shapes", "nearly code", "solution", "solution"]
    check("99.1", lambda x: x)
    assert "Stuck" not in capsys.readouterr().out, "there is nothing left to offer"


@pytest.mark.parametrize(
    ("id", "answer", "says"),
    [
        ("99.q1", "b", "right. E experts."),
        ("99.q1", " B ", "right. E experts."),
        ("99.q1", "a", "not yet. That is K."),
        ("99.q1", "z", "not yet. Not one of"),
        ("99.q1", ["b"], "not yet."),
        ("99.q1", ..., "not answered"),
        ("99.q2", 0.4001, "right. Unbiased."),
        ("99.q2", 0.7, "not yet. That is the biased one."),
        ("99.q2", "b", "not yet."),
        ("99.q2", jnp.float32(0.4), "right."),
    ],
)
def test_quiz(capsys, id, answer, says):
    assert bool(quiz(id, answer)) == ("right." in says)
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prediction", "measured", "within", "says"),
    [
        (24, 24, 0.0, "predicted 24 rows, measured 24 rows: they agree"),
        (24, 12.0, 0.0, "off by a factor of 2"),
        (5.3, 5.295, 0.01, "they agree"),
        (1, 0, 0.0, "they differ"),
        ("many", 3, 0.0, "a prediction is a number, not str"),
    ],
)
def test_predict(capsys, prediction, measured, within, says):
    predict("sent", prediction, measured, unit="rows", within=within)
    assert says in capsys.readouterr().out


def test_no_prediction_gives_nothing_away(capsys):
    assert not predict("sent", ..., 12345)
    assert "12345" not in capsys.readouterr().out


# ---------------------------------------------------------------- comparing


def test_close_accepts_rounding_and_no_more():
    x = np.random.default_rng(0).normal(size=(5, 8))
    compare.close(x.astype(np.float32), x, case="c")
    with pytest.raises(Broken) as caught:
        compare.close((x * (1 + 1e-5)).astype(np.float32), x, case="c", axes=("token", "expert"))
    assert caught.value.where.startswith("token 0, expert")


def test_close_measures_each_row_against_itself():
    x = np.array([[1e6, 2e6], [1e-3, 2e-3]])
    with pytest.raises(Broken, match=r"0\.003"):
        compare.close(np.array([[1e6, 2e6], [1e-3, 3e-3]], np.float32), x, case="c")


def test_nan_must_meet_nan():
    x = np.array([1.0, np.nan])
    compare.close(x.astype(np.float32), x, case="c")
    with pytest.raises(Broken):
        compare.close(np.array([1.0, 0.0], np.float32), x, case="c")


def test_the_expert_is_named():
    with pytest.raises(Broken) as caught:
        compare.close(
            np.array([[0.7, 0.3]], np.float32),
            [[0.4, 0.6]],
            case="c",
            axes=("token", "pick"),
            experts=[[3, 1]],
        )
    assert caught.value.where == "token 0, pick 0, expert 3"


def test_same_is_exact_and_shows_the_row():
    with pytest.raises(Broken) as caught:
        compare.same(jnp.array([[0, 1], [3, 2]]), [[0, 1], [2, 3]], case="c", axes=("token", "pick"))
    error = caught.value
    assert (error.yours, error.expected, error.where) == ("[3, 2]", "[2, 3]", "token 1, pick 0")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.7, "0.70"), (1 / 3, "0.3333"), (123456.0, "1.235e+05"), (7, "7"), (True, "True"), (1e-261, "0.00")],
)
def test_numbers_have_four_digits(value, text):
    assert compare.show(value) == text


def test_colours_are_for_people(monkeypatch):
    """Green and red in a live notebook; plain where outputs are compared, and where there is no notebook."""
    module = importlib.import_module("moe_course.lessons.check")  # the package gives the function that name
    assert module.tinted("3 of 3", good=True) == "3 of 3"
    monkeypatch.setattr(module, "get_ipython", object)
    monkeypatch.delenv("MOE_COURSE_STATIC", raising=False)
    assert module.tinted("3 of 3", good=True) == "\x1b[32m3 of 3\x1b[0m"
    assert module.tinted("x order", good=False) == "\x1b[31mx order\x1b[0m"
    monkeypatch.setenv("MOE_COURSE_STATIC", "1")
    assert module.tinted("3 of 3", good=True) == "3 of 3"
