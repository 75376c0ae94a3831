"""Figures never raise on edge routings, and the widget is also a picture."""

import base64

import numpy as np
import pytest
from IPython.display import DisplayHandle

from moe_course.lessons import plots, widgets

EMPTY = np.zeros((0, 2), np.int32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: plots.routing_map(EMPTY, num_experts=4),
        lambda: plots.routing_map(np.array([[0, 4], [4, 4]]), np.zeros((2, 2)), num_experts=4, num_groups=2),
        lambda: plots.routing_map(np.array([[0, 63]]), np.array([[np.nan, 1.0]]), num_experts=64),
        lambda: plots.routing_map(np.zeros((100, 1), int), num_experts=1),
        lambda: plots.load_bars(np.zeros(4)),
        lambda: plots.load_bars(np.zeros(0)),
        lambda: plots.load_bars([5, 0, 1], fair=2.0),
        lambda: plots.group_bar([0, 0]),
        lambda: plots.group_bar([5, 0, 33], rows=64, align=8),
        lambda: plots.group_bar([]),
    ],
)
def test_edge_cases_draw(make):
    data = plots.bundle(make(), "a long caption " * 20)
    assert data["image/png"].startswith(b"\x89PNG")
    assert b"Software" not in data["image/png"], "the version of matplotlib would be in the file"
    assert data["text/plain"].startswith("figure: a long caption")


def test_same_picture_twice():
    draw = lambda: plots.png(plots.load_bars([3, 4, 9, 0]))  # noqa: E731
    assert draw() == draw()


def test_experts_keep_distinct_colours():
    colours = np.array([plots.expert_color(e) for e in range(64)])
    assert len(np.unique(colours.round(3), axis=0)) == 64
    near = [np.abs(colours[:8] - c).sum(-1) for c in colours[:8]]
    assert min(np.sort(row)[1] for row in near) > 0.4, "two of the first eight look alike"
    assert colours.min() >= 0
    assert colours.max() <= 1


class Screen:
    """What display() was given, and what was drawn over it."""

    def __init__(self, monkeypatch):
        self.shown, self.updates = [], []
        monkeypatch.setattr(widgets, "display", self.display)
        monkeypatch.setattr(DisplayHandle, "update", lambda _, data, raw: self.updates.append(data))

    def display(self, thing, raw=False, display_id=False):
        self.shown.append(thing)
        return DisplayHandle() if display_id else None


def draw(k, bias, mode):
    fig, ax = plots.figure()
    ax.plot([k, bias])
    return fig, f"{k} {bias:g} {mode}"


CONTROLS = {"k": (1, 4, 2), "bias": (-1.0, 1.0, 0.0), "mode": ["a", "b"]}


def test_controls_redraw_the_picture(monkeypatch):
    monkeypatch.delenv("MOE_COURSE_STATIC", raising=False)
    screen = Screen(monkeypatch)
    widgets.explore(draw, **CONTROLS)
    box, picture = screen.shown
    assert picture["text/plain"] == "figure: 2 0 a"
    slider, bias, menu = box.children
    slider.value = 4
    bias.value = 0.5
    menu.value = "b"
    assert [u["text/plain"] for u in screen.updates] == [
        "figure: 4 0 a",
        "figure: 4 0.5 a",
        "figure: 4 0.5 b",
    ]
    assert base64.b64encode(picture["image/png"])


@pytest.mark.parametrize("how", ["static", "no ipywidgets"])
def test_the_picture_stands_alone(monkeypatch, how):
    screen = Screen(monkeypatch)
    if how == "static":
        monkeypatch.setenv("MOE_COURSE_STATIC", "1")
    else:
        monkeypatch.delenv("MOE_COURSE_STATIC", raising=False)
        monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    widgets.explore(draw, **CONTROLS)
    (picture,) = screen.shown
    assert picture["text/plain"] == "figure: 2 0 a"
