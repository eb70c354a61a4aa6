"""Each rule for notebooks finds the fault that it is there for, and nothing in a good notebook."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_output

import build
from tests.notebooks import rules

PARAMETERS = 'seq_len = 8\ncheckpoint_every = 1\nn_layers = 1\nhidden = 64\nbatch_size = 1\nsteps = 1\ndevice = "auto"'
SETUP = "import math\n\nhere = setup(seq_len, checkpoint_every, n_layers, hidden, batch_size, steps, device)"


def good() -> NotebookNode:
    """A notebook that no rule complains about."""
    cells: list[tuple[str, list[str]]] = [("REPOSITORY = ''", []), (PARAMETERS, ["parameters"]), (SETUP, [])]
    cells += [(f"print({number})", []) for number in range(8)]
    source = "# %% [markdown]\n# # A title\n"
    for number, (code, tags) in enumerate(cells):
        source += f"\n# %% [markdown]\n# ## Part {number}\n#\n# " + "word " * 60 + "\n"
        source += f"\n# %% tags={tags}\n{code}\n".replace("'", '"')
    notebook = build.generate(source, "good.py", "student")
    for count, cell in enumerate(rules.code_cells(notebook), start=1):
        cell.execution_count = count
        cell.outputs = [new_output("stream", name="stdout", text=f"{count} MiB, 16 units of sbh\n")]
    return notebook


def test_a_good_notebook_has_no_faults() -> None:
    assert [fault for rule in (*rules.RULES, rules.short_code) for fault in rule(good())] == []


def test_a_lab_with_a_still_has_no_fault() -> None:
    notebook = good()
    lab({"image/png": "", "text/plain": "Predicted: saved 8 bytes."})(notebook)
    assert list(rules.labs_have_a_still(notebook)) == []


def says(text: str) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        rules.code_cells(notebook)[4].outputs = [new_output("stream", name="stdout", text=text)]

    return change


def last_code(**changes: object) -> Callable[[NotebookNode], None]:
    return lambda notebook: rules.code_cells(notebook)[-1].update(changes)


def parameters(old: str, new: str) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        cell = rules.code_cells(notebook)[1]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)

    return change


def markdown(text: str) -> Callable[[NotebookNode], None]:
    return lambda notebook: notebook.cells[1].update(source=text)


def figure(text: str) -> Callable[[NotebookNode], None]:
    return last_code(outputs=[new_output("display_data", data={"image/png": "", "text/plain": text})])


def lab(still: dict[str, str]) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        *_, before, last = rules.code_cells(notebook)
        before.outputs = [new_output("execute_result", data=still)]
        last.outputs = [new_output("execute_result", data={"text/plain": "A lab with sliders for seq_len: run it."})]

    return change


FAULTS = [
    (rules.labs_have_a_still, lab({"text/plain": "8 bytes"}), "no picture with its bytes in words"),
    (rules.labs_have_a_still, lab({"image/png": "", "text/plain": "a picture"}), "no picture with its bytes in words"),
    (rules.executed_in_order, last_code(execution_count=None), "code cell 11 has the execution count None"),
    (rules.executed_in_order, last_code(execution_count=40), "code cell 11 has the execution count 40"),
    (rules.one_title, markdown("# Another"), "one heading of level 1, found 2"),
    (
        rules.one_title,
        lambda notebook: notebook.cells.insert(0, notebook.cells.pop(1)),
        "the first cell must be markdown",
    ),
    (rules.headings_without_gaps, markdown("### Deep"), "'Deep' has level 3 below level 1"),
    (
        rules.no_errors,
        last_code(outputs=[new_output("error", ename="ValueError", evalue="", traceback=[])]),
        "ended in ValueError",
    ),
    (rules.no_errors, last_code(outputs=[new_output("stream", name="stderr", text="oh")]), "wrote to stderr: 'oh'"),
    (rules.clean_metadata, lambda notebook: notebook.metadata.update(widgets={}), "metadata.widgets is {}"),
    (rules.clean_metadata, lambda notebook: notebook.metadata.update(papermill={}), "metadata.papermill is {}"),
    (rules.clean_metadata, lambda notebook: notebook.metadata.pop("colab"), "metadata.colab is None"),
    (
        rules.clean_metadata,
        lambda notebook: notebook.metadata.language_info.update(version="3.13"),
        "metadata.language_info",
    ),
    (rules.clean_metadata, last_code(metadata=nbformat.from_dict({"execution": {}})), "has the metadata execution"),
    (rules.clean_metadata, last_code(metadata=nbformat.from_dict({"tags": ["extra"]})), "unknown tag 'extra'"),
    (
        rules.clean_metadata,
        last_code(outputs=[new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}})]),
        "stores a widget",
    ),
    (rules.unique_ids, lambda notebook: notebook.cells[0].update(id=notebook.cells[1].id), "each its own"),
    (rules.nothing_variable, says("in /home/ada/course"), "a path"),
    (rules.nothing_variable, says("C:\\Users\\ada"), "a path"),
    (rules.nothing_variable, says("lib/site-packages/torch"), "a path"),
    (rules.nothing_variable, says("<object at 0x7f3a2b1c>"), "an object's address"),
    (rules.nothing_variable, says("it took 3.2 s"), "a time"),
    (rules.nothing_variable, says("15 ms a step"), "a time"),
    (rules.nothing_variable, says("2 seconds"), "a time"),
    (rules.nothing_variable, says("loss 4.6051"), "a loss or perplexity"),
    (rules.nothing_variable, says("UserWarning: no"), "a warning"),
    (rules.figures_say_their_numbers, figure("<Figure size 800x360 with 1 Axes>"), "has no sentence"),
    (rules.figures_say_their_numbers, figure(""), "has no sentence"),
    (rules.parameters_first, lambda notebook: rules.code_cells(notebook)[1].metadata.clear(), "found at []"),
    (rules.parameters_first, parameters("steps = 1\n", ""), "it assigns seq_len"),
    (rules.parameters_first, parameters("steps = 1", "steps = int(1)"), "plain values"),
    (rules.parameters_first, parameters('"auto"', '"cpu"'), 'device = "auto"'),
    (rules.parameters_first, lambda notebook: rules.code_cells(notebook)[2].update(source="1"), "must call setup"),
    (rules.parameters_first, lambda notebook: rules.code_cells(notebook)[0].update(source="1"), "finds the library"),
    (rules.right_number_of_cells, lambda notebook: notebook.cells.__delitem__(slice(19, None)), "it has 19 cells"),
    (rules.right_number_of_words, markdown("word " * 700), "words outside <details>, expected 600 to 1,200"),
    (rules.right_number_of_words, markdown("<details>" + "word " * 700 + "</details>"), None),
    (rules.short_code, last_code(source="1\n" * 16), "has 16 lines"),
    (rules.nothing_variable, says("64sbh + 16 s b, 16 s·b·h, 37.5 MiB of loss, GPT-2 124M, 2/3 of a step"), None),
    (rules.figures_say_their_numbers, figure("The peak is 12 MiB."), None),
]


@pytest.mark.parametrize(("rule", "change", "message"), FAULTS)
def test_rule_finds_its_fault(
    rule: Callable[[NotebookNode], Iterator[str]], change: Callable[[NotebookNode], None], message: str | None
) -> None:
    notebook = copy.deepcopy(good())
    change(notebook)
    found = list(rule(notebook))
    if message is None:
        assert found == []
    else:
        assert len(found) == 1
        assert message in found[0]


def test_a_time_in_an_output_that_is_not_compared_is_allowed() -> None:
    notebook = good()
    says("it took 3.2 s")(notebook)
    rules.code_cells(notebook)[4].metadata = nbformat.from_dict({"tags": ["nbval-ignore-output"]})
    assert list(rules.nothing_variable(notebook)) == []


def exercise(text: str) -> NotebookNode:
    notebook = good()
    cell = rules.code_cells(notebook)[4]
    cell.metadata = nbformat.from_dict({"tags": ["exercise"]})
    cell.outputs = [new_output("stream", name="stdout", text=text)]
    return notebook


def test_an_untouched_stub_must_say_so_and_a_solution_must_be_right() -> None:
    untried, right, wrong = (
        exercise("Not tried yet: replace the line.\n"),
        exercise("Right. So it is.\n"),
        exercise("Not yet. Why?"),
    )
    assert list(rules.exercises_tried(untried, solved=False)) == []
    assert list(rules.exercises_tried(right, solved=True)) == []
    for notebook, solved, fault in (
        (right, False, "the untouched exercise in code cell 5 says 'Right. So it is.'"),
        (untried, True, "the solved exercise in code cell 5 says 'Not tried yet: replace the line.'"),
        (wrong, True, "the solved exercise in code cell 5 says 'Not yet. Why?'"),
        (
            exercise("Right. Not yet. Second case"),
            True,
            "the solved exercise in code cell 5 says 'Right. Not yet. Second case'",
        ),
    ):
        assert list(rules.exercises_tried(notebook, solved)) == [fault]


STATED = "# Exercise: difficulty 2 of 3, {} minutes. For: counting bytes.\ndef count(): ..."
PROMISE = "# A title\n\n**After these 30 minutes, and {} of exercises, you can**"


def workbook(minutes: tuple[int, ...], promise: str) -> NotebookNode:
    notebook = good()
    notebook.cells[0].source = promise
    for cell, number in zip(rules.code_cells(notebook)[3:], minutes, strict=False):
        cell.update(source=STATED.format(number), metadata=nbformat.from_dict({"tags": ["exercise"]}))
    return notebook


@pytest.mark.parametrize(
    ("minutes", "promise", "fault"),
    [
        ((2, 5, 10), PROMISE.format(17), None),
        ((2, 5, 10, 1, 1), PROMISE.format(19), None),
        ((2, 5), PROMISE.format(7), "it has 2 exercises, expected 3 to 5"),
        ((1, 1, 1, 1, 1, 1), PROMISE.format(6), "it has 6 exercises, expected 3 to 5"),
        ((2, 5, 10), PROMISE.format(15), "its exercises take 17 minutes, its first cell says 15"),
        ((2, 5, 10), "# A title", "its first cell must say **After these N minutes, and M of exercises, you can**"),
    ],
)
def test_minutes_of_exercises_are_stated_and_add_up(minutes: tuple[int, ...], promise: str, fault: str | None) -> None:
    notebook = workbook(minutes, promise)
    assert list(rules.exercises_state_what_they_take(notebook)) == ([fault] if fault else [])
    rules.code_cells(notebook)[3].source = "def count(): ..."
    found = list(rules.exercises_state_what_they_take(notebook))
    assert any("the exercise 'def count(): ...' lacks a line '# Exercise: difficulty" in line for line in found)


def test_a_line_of_a_solution_is_found_wherever_a_student_could_see_it() -> None:
    line = "return sum(sizes) * element_size"
    cuts = [build.Cut("", ("return 0",), (f"total = 0\n{line}",))]
    in_code, in_output, in_text, folded = good(), good(), good(), good()
    rules.code_cells(in_code)[5].source = f"def f(sizes):\n    {line}"
    says(line)(in_output)
    markdown(f"Say\n\n{line}\n")(in_text)
    markdown(f"<details>\n\n{line}\n\n</details>")(folded)
    in_a_sentence = good()
    markdown("In words: `return sum( sizes )*element_size`, that is all.")(in_a_sentence)
    fault = [f"the student notebook shows a line of a solution: {line.replace(' ', '')!r}"]
    telling = (in_code, in_output, in_text, in_a_sentence)
    assert [list(rules.nothing_revealed(notebook, cuts)) for notebook in telling] == [fault] * 4
    assert list(rules.nothing_revealed(folded, cuts)) == []
