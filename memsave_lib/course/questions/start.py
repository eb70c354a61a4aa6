"""The predictions of notebook 00: the peak of the first step, and what stays after it.

Both are multiples of the bytes of the parameters. What is measured decides which mistakes can be told from the answer:
with a short text the peak itself is hardly more than what stays.
"""

from __future__ import annotations

from memsave_lib.course.predictions import Question, apart_from

#: Parameters, gradients, and AdamW's two averages of each gradient.
STAYS = 4


def first_peak(found: float) -> Question:
    """How many times the parameters are alive at the fullest moment of the first step.

    Args:
        found: the answer.
    """
    within = 0.2
    mistakes = {
        "That is the parameters alone: gradients and AdamW's averages have their size too, and forward keeps tensors "
        "until backward needs them.": 1,
        "Parameters and gradients make 2: AdamW adds two averages of each gradient, and forward keeps tensors until "
        "backward needs them.": 2,
        "One of parameters, gradients and AdamW's two averages is missing, and so is what forward keeps until backward "
        "needs it.": 3,
        "You counted parameters, gradients and AdamW's two averages, but nothing that forward keeps for backward, or "
        "that operations hand to each other.": STAYS,
    }
    return Question(
        "peak of the first step, in parameters",
        apart_from(found, within, mistakes),
        "Gradients and each of AdamW's two averages have the size of the parameters; what forward keeps for backward "
        "grows with the batch, and can be many times as much.",
        within,
    )


def after_the_step(peak: float) -> Question:
    """How many times the parameters are alive between two steps.

    Args:
        peak: how many times they are alive at the peak of the step.
    """
    within = 0.1
    mistakes = {
        "The parameters are not alone: the gradients stay until the next zero_grad(), and AdamW's two averages of each "
        "gradient for good.": 1,
        "Two of four are missing: parameters and gradients stay, and so do both averages that AdamW keeps of each "
        "gradient.": 2,
        "One of four is missing: AdamW keeps two averages of each gradient, and the gradients themselves stay until "
        "the next zero_grad().": 3,
        "That is the peak: backward has let go of what forward kept, and operations of what they handed to each "
        "other.": peak,
    }
    return Question(
        "what stays after the step, in parameters",
        apart_from(STAYS, within, mistakes),
        "Activations are gone; count what the next step starts with, each as large as the parameters.",
        within,
    )
