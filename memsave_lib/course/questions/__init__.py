"""The numbers that each notebook asks the learner to predict, with the reasons behind wrong ones: a module a notebook.

Each function takes the notebook's parameters and returns a :class:`~memsave_lib.course.predictions.Question`, so that
every set of parameters is fair.
"""
