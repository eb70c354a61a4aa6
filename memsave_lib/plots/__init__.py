"""Figures of the course: each function turns data into a picture and a sentence that holds its numbers.

Nothing here touches a model. Functions keep no state; the pictures of labs, classes, keep a figure that they draw again
and again, because making one takes longer than a reader's key may. Figures are built without pyplot, so that any thread
may draw.
Colors are those of Okabe and Ito, which people with any kind of color vision can tell apart; hatches, markers and
line styles repeat what the color says. Memory is drawn in binary units, with one unit for the whole figure.
"""

from memsave_lib.plots.bars import block_terms, bytes_by_category, bytes_per_flop, predicted_and_measured
from memsave_lib.plots.budgets import budget_curve
from memsave_lib.plots.choices import ChoicePicture
from memsave_lib.plots.curves import Option, bytes_against, pareto_front, trade_off
from memsave_lib.plots.drawing import LOOKS, Shown
from memsave_lib.plots.guesses import predictions
from memsave_lib.plots.lanes import stream_lanes
from memsave_lib.plots.live import MemoryPicture, moment_place
from memsave_lib.plots.live_lanes import LanesPicture
from memsave_lib.plots.plans import plan_picture
from memsave_lib.plots.scenes import Ghost, Scene, pace_of
from memsave_lib.plots.timeline import memory_timeline, place

__all__ = [
    "LOOKS",
    "ChoicePicture",
    "Ghost",
    "LanesPicture",
    "MemoryPicture",
    "Option",
    "Scene",
    "Shown",
    "block_terms",
    "budget_curve",
    "bytes_against",
    "bytes_by_category",
    "bytes_per_flop",
    "memory_timeline",
    "moment_place",
    "pace_of",
    "pareto_front",
    "place",
    "plan_picture",
    "predicted_and_measured",
    "predictions",
    "stream_lanes",
    "trade_off",
]
