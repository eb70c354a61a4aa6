"""The last cell of a notebook under test: every slider of every lab goes to both of its ends.

It runs in the kernel of the notebook, whichever versions that has, and prints what it found as one line
of JSON.
"""

import gc
import json

import IPython
import ipywidgets

from memsave_lib.labs import Lab

#: Public attributes, no traits, that widgets give themselves.
OWN_ATTRIBUTES = {"equals"}


def parts(widget):
    """A widget with all that it holds: children, layout, style."""
    yield widget
    for name in widget.keys:
        value = getattr(widget, name)
        for part in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(part, ipywidgets.Widget):
                yield from parts(part)


def kind(widget):
    return f"{type(widget).__module__}.{type(widget).__name__}"


def traits_set(widget):
    """The traits that a browser is told of and that are not as in a new widget."""
    return [name for name in widget.keys if getattr(widget, name) != widget.trait_defaults(name)]


def attributes_set(widget):
    """What was set on a widget and is no trait: ipywidgets keeps it without a word, and no browser learns of it."""
    return sorted(name for name in set(vars(widget)) - OWN_ATTRIBUTES if not name.startswith("_"))


def ends(slider):
    """What a browser sends when the handle is at the one end and at the other."""
    if hasattr(slider, "options"):
        return [{"index": 0}, {"index": len(slider.options) - 1}]
    return [{"value": slider.min}, {"value": slider.max}]


def move(lab, slider):
    """The sentences of the prediction at both ends of a slider; raises what a callback raised."""
    start, sentences = slider.value, []
    for state in ends(slider):
        slider.set_state(state)
        lab.wait()
        sentences.append(lab.predicted.value)
    slider.value = start
    return sentences


def drive(lab):
    widgets = list(parts(lab.view))
    return {
        "view": lab.view.model_id,
        "ran_or_refused": bool(lab.runs) or "Refused at" in lab.status.value,
        "unmoved": [name for name, slider in lab.sliders.items() if len(set(move(lab, slider))) < 2],
        "traits": [[kind(widget), traits_set(widget)] for widget in widgets],
        "no_traits": [[kind(widget), attributes_set(widget)] for widget in widgets if attributes_set(widget)],
    }


# Not isinstance(): it asks every object for its __class__, and some answer with a warning.
labs = [drive(thing) for thing in gc.get_objects() if issubclass(type(thing), Lab)]
print(json.dumps({"ipywidgets": ipywidgets.__version__, "IPython": IPython.__version__, "labs": labs}))
