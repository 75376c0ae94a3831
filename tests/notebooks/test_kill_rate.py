"""Every exercise's check rejects its wrong answers and accepts its right ones."""

import json

import jax
import jax.numpy as jnp
import pytest

from moe_course.bench import kill_rate
from moe_course.bench import main as bench
from moe_course.errors import RunError
from moe_course.lessons import exercise
from moe_course.lessons.learner import examine

EXERCISES = [e for chapter in exercise.chapters() for e in exercise.exercises(chapter)]
each_exercise = pytest.mark.parametrize("asked", EXERCISES, ids=[e.id for e in EXERCISES])
ATTEMPTS = {chapter: kill_rate.attempts(chapter) for chapter in exercise.chapters()}


@pytest.mark.slow
@each_exercise
def test_wrong_answers_are_rejected_and_right_ones_accepted(asked):
    attempts = [a for a in ATTEMPTS[asked.chapter] if a.id == asked.id]
    wrong = [a for a in attempts if not a.right]
    assert len({a.says for a in attempts}) == len(attempts), "two attempts of one name"
    assert len(wrong) >= 3
    assert len(attempts) > len(wrong), "no right answer unlike the solution"
    assert [a.says for a in wrong if not kill_rate.rejected(a)] == []
    for attempt in (*(a for a in attempts if a.right), last_hint(asked)):
        outcome = examine(asked, attempt.fn)
        assert outcome.passed, (attempt.says, [(f.name, f.lines) for f in outcome.failures])
    jax.clear_caches()  # hundreds of small programs, and nothing after this exercise calls them


def last_hint(asked):
    names = {"jax": jax, "jnp": jnp}
    exec(asked.hints[-1], names)
    functions = [value for name, value in names.items() if callable(value) and name not in ("jax", "jnp")]
    return kill_rate.Attempt(asked.id, "the last hint", functions[-1], right=True)


@each_exercise
def test_the_text_is_complete(asked):
    assert asked.hints[0].count("?"), "the first hint asks a question"
    assert all(text.strip() for text in (asked.title, asked.goal, *asked.hints))
    assert 1 <= asked.minutes <= 60
    assert all(len(chapter) == 2 and chapter > asked.chapter for chapter in asked.used_again)


def test_every_attempt_belongs_to_an_exercise():
    known = {e.id for e in EXERCISES}
    assert {a.id for chapter in ATTEMPTS.values() for a in chapter} == known


def test_the_bench_counts_and_names_survivors(monkeypatch, capsys):
    wrong = kill_rate.Attempt("02.1", "a stub", lambda *_: (_ for _ in ()).throw(NotImplementedError), False)
    right = kill_rate.Attempt("02.1", "nonsense", lambda *_: None, True)
    killed = kill_rate.Attempt("02.1", "nothing", lambda *_: None, False)
    monkeypatch.setattr(kill_rate, "attempts", lambda chapter: [wrong, right, killed])
    monkeypatch.setattr("moe_course.bench.setup", lambda **_: None, raising=False)  # JAX runs already
    bench(["kill-rate", "--json", "--chapters", "02"])
    figures = json.loads(capsys.readouterr().out)
    assert (figures["mutants"], figures["killed"]) == (2, 1)
    assert (figures["alternatives"], figures["accepted"]) == (1, 0)
    assert figures["survivors"] == ["02.1 a stub"]
    assert figures["refused"] == ["02.1 nonsense"]
    bench(["kill-rate", "--chapters", "02"])
    assert "a stub" in capsys.readouterr().out


def test_outside_a_checkout_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_rate, "root", lambda: tmp_path)
    with pytest.raises(RunError, match=r"there is no tests/notebooks/mutants/ch02\.py"):
        kill_rate.attempts("02")
