"""A picture with controls that is also a plain picture: :func:`explore`."""

import os
from collections.abc import Callable

from IPython.display import display

from moe_course.lessons import plots


def explore(draw: Callable, **controls) -> None:
    """Show ``draw(**values)``, and sliders or menus for the values where a front end can show them.

    Args:
      draw: takes the controls' values by name, returns ``(figure, caption)``.
      controls: name = ``(lowest, highest, default)`` for a slider (whole numbers or fractions, as the default
        is), or name = a list of choices, the first being the default.

    The figure at the defaults is a picture of its own, so the page reads without a kernel; moving a control
    draws over it. With ``MOE_COURSE_STATIC`` set, or without ipywidgets, there is the picture alone.
    """
    values = {name: spec[0] if isinstance(spec, list) else spec[2] for name, spec in controls.items()}
    made = {} if os.environ.get("MOE_COURSE_STATIC") else _made(controls)
    if made:
        from ipywidgets import HBox, Layout

        display(HBox(list(made.values()), layout=Layout(flex_flow="row wrap")))
    picture = display(plots.bundle(*draw(**values)), raw=True, display_id=True)

    def redraw(_change) -> None:
        values.update({name: control.value for name, control in made.items()})
        picture.update(plots.bundle(*draw(**values)), raw=True)

    for control in made.values():
        control.observe(redraw, "value")


def _made(controls) -> dict:
    try:
        from ipywidgets import Dropdown, FloatSlider, IntSlider
    except ImportError:
        return {}
    made = {}
    for name, spec in controls.items():
        label = name.replace("_", " ")
        if isinstance(spec, list):
            made[name] = Dropdown(options=spec, value=spec[0], description=label)
            continue
        low, high, default = spec
        kind = IntSlider if isinstance(default, int) else FloatSlider
        step = {} if isinstance(default, int) else {"step": (high - low) / 20}
        made[name] = kind(
            min=low, max=high, value=default, description=label, continuous_update=False, **step
        )
    return made
