"""The notebook builder: marker grammar, identity of cells, and the check of committed notebooks."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

import build

SOURCE = '''# %% [markdown]
# # Tiny
#
# <!-- student -->
# Fill in the function.
# <!-- /student -->
# <!-- solved -->
# The function is filled in.
# <!-- /solved -->

# %% tags=["parameters"]
seq_len = 8

# %%
def total(sizes):
    """Add."""
    # <exercise>
    # <stub>
    return None  # your turn
    # <solution>
    return sum(sizes)
    # </exercise>


print("not tried yet" if total([1, 2]) is None else total([1, 2]))

# %% [markdown]
# <details><summary>Solution</summary>
#
# <!-- solution -->
#
# </details>
'''


def sources(variant: build.Variant, source: str = SOURCE) -> list[str]:
    return [cell.source for cell in build.generate(source, "tiny.py", variant).cells]


def test_the_student_gets_the_stub_and_the_solved_notebook_the_solution() -> None:
    check = 'print("not tried yet" if total([1, 2]) is None else total([1, 2]))'
    common = f'def total(sizes):\n    """Add."""\n    {{}}\n\n\n{check}'
    assert sources("student")[2] == common.format("return None  # your turn")
    assert sources("solved")[2] == common.format("return sum(sizes)")


def test_markdown_for_one_variant_is_left_out_of_the_other() -> None:
    assert sources("student")[0] == "# Tiny\n\nFill in the function."
    assert sources("solved")[0] == "# Tiny\n\nThe function is filled in."


def test_the_folded_solution_is_the_code_of_the_exercise_above() -> None:
    folded = "<details><summary>Solution</summary>\n\n```python\nreturn sum(sizes)\n```\n\n</details>"
    assert sources("student")[3] == sources("solved")[3] == folded


def test_a_cell_that_is_empty_in_one_variant_is_left_out_there() -> None:
    source = SOURCE + "\n# %% [markdown]\n# <!-- solved -->\n# Compare.\n# <!-- /solved -->\n"
    assert len(sources("solved", source)) == len(sources("student", source)) + 1


def test_ids_depend_on_the_text_alone_and_are_the_same_in_both_variants() -> None:
    student, solved = (build.generate(SOURCE, "tiny.py", variant) for variant in build.VARIANTS)
    assert [cell.id for cell in student.cells] == [cell.id for cell in solved.cells]
    longer = build.generate("# %%\nprint(1)\n\n" + SOURCE, "tiny.py", "student")
    assert [cell.id for cell in longer.cells[1:]] == [cell.id for cell in student.cells]
    twice = build.generate("# %%\nprint(1)\n\n# %%\nprint(1)\n", "tiny.py", "student")
    assert twice.cells[0].id != twice.cells[1].id
    assert all(re.fullmatch("[0-9a-f]{8}", cell.id) for cell in [*longer.cells, *twice.cells])


def test_tags_are_kept_and_an_exercise_is_tagged() -> None:
    tags = [cell.metadata.get("tags") for cell in build.generate(SOURCE, "tiny.py", "student").cells]
    assert tags == [None, ["parameters"], ["exercise"], None]


CODE_FAULTS = {
    "# <exercise>\n# <solution>\n1\n# </exercise>": (2, "expected the marker <stub>, got <solution>"),
    "# <exercise>\n# <stub>\n1\n# </exercise>": (4, "expected the marker <solution>, got </exercise>"),
    "# <exercise>\n# <stub>\n1\n# <solution>\n2": (5, "the exercise is left open: </exercise> is missing"),
    "1\n# </exercise>": (2, "expected the marker <exercise>, got </exercise>"),
    "# <stub>\n1": (1, "expected the marker <exercise>, got <stub>"),
    "# <exercise>\n# <exercise>": (2, "expected the marker <stub>, got <exercise>"),
    "# <exercise>\n1\n# <stub>": (2, "only <stub> may follow <exercise>, got '1'"),
    "# <exercise>\n# <stub>\n\n# <solution>\n2\n# </exercise>": (6, "the <stub> of this exercise is empty"),
    "# <exercise>\n# <stub>\n1\n# <solution>\n# </exercise>": (5, "the <solution> of this exercise is empty"),
    "# <exercise>\n# <stub>\n1\n# <solution>\n1\n# </exercise>": (6, "the <stub> of this exercise is its <solution>"),
    "# <solutoin>": (1, "unknown marker '# <solutoin>'; known are exercise, stub, solution, /exercise"),
    "x = 1  # <stub>": (1, "a marker stands alone on its line, got 'x = 1  # <stub>'"),
}


@pytest.mark.parametrize(("code", "fault"), CODE_FAULTS.items())
def test_a_malformed_exercise_stops_the_build_and_says_where(code: str, fault: tuple[int, str]) -> None:
    with pytest.raises(build.SourceError) as caught:
        sources("student", f"# %% [markdown]\n# # Title\n\n# %%\n{code}\n")
    assert str(caught.value) == f"tiny.py, cell 2 ({code.splitlines()[0]!r}), line {fault[0]} of the cell: {fault[1]}"


TEXT_FAULTS = {
    "<!-- student -->\nyou": (2, "<!-- /student --> is missing"),
    "<!-- /student -->": (1, "expected <!-- student --> or <!-- solved -->, got '<!-- /student -->'"),
    "<!-- student -->\n<!-- solved -->": (2, "expected <!-- /student -->, got '<!-- solved -->'"),
    "<!-- solution -->": (1, "<!-- solution --> outside <details> would show the answer at once"),
    "<details>\n\n<!-- solution -->": (3, "<!-- solution --> has no exercise above it"),
    "<!-- studnet -->": (
        1,
        "unknown marker '<!-- studnet -->'; known are student, /student, solved, /solved, solution, colab",
    ),
    "so <!-- solved -->": (1, "a marker stands alone on its line, got 'so <!-- solved -->'"),
}


@pytest.mark.parametrize(("text", "fault"), TEXT_FAULTS.items())
def test_a_malformed_text_stops_the_build_and_says_where(text: str, fault: tuple[int, str]) -> None:
    comment = "\n".join(f"# {line}".rstrip() for line in text.splitlines())
    with pytest.raises(build.SourceError) as caught:
        sources("student", f"# %% [markdown]\n{comment}\n")
    assert str(caught.value) == f"tiny.py, cell 1 ({text.splitlines()[0]!r}), line {fault[0]} of the cell: {fault[1]}"


def test_an_unknown_tag_stops_the_build() -> None:
    with pytest.raises(build.SourceError, match="unknown tag 'parameterz'; known are parameters, nbval-ignore-output"):
        sources("student", '# %% tags=["parameterz"]\nseq_len = 8\n')


@pytest.fixture
def course(tmp_path: Path) -> build.Course:
    """A course with one source and its two notebooks, not executed."""
    (tmp_path / "src").mkdir()
    (tmp_path / "solutions").mkdir()
    (tmp_path / "src" / "00_tiny.py").write_text(SOURCE)
    course = build.Course(tmp_path)
    for variant in build.VARIANTS:
        nbformat.write(course.generate("00_tiny", variant), course.target("00_tiny", variant))
    return course


def test_check_is_silent_about_notebooks_that_their_sources_give(course: build.Course) -> None:
    assert course.check(course.names()) == []


def test_check_names_the_cell_that_was_edited_by_hand(course: build.Course) -> None:
    target = course.target("00_tiny", "student")
    target.write_text(target.read_text().replace("seq_len = 8", "seq_len = 9"))
    assert course.check(course.names()) == [
        "00_tiny.ipynb (student): cell 2: source is 'seq_len = 9', the source gives 'seq_len = 8'"
    ]


def test_check_sees_a_changed_id_tag_and_metadata(course: build.Course) -> None:
    target = course.target("00_tiny", "solved")
    original = target.read_text()
    for old, new, part in (
        (build.generate(SOURCE, "", "solved").cells[1].id, "0badf00d", "cell 2: id is '0badf00d'"),
        ('"parameters"', '"nbval-skip"', "cell 2: metadata is {'tags': ['nbval-skip']}"),
        ('"T4"', '"A100"', "notebook metadata is"),
    ):
        target.write_text(original.replace(old, new))
        (complaint,) = course.check(course.names())
        assert complaint.startswith(f"00_tiny.ipynb (solved): {part}")


def test_check_sees_missing_and_left_over_notebooks(course: build.Course) -> None:
    course.target("00_tiny", "solved").unlink()
    course.target("99_old", "student").write_text("{}")
    assert course.check(course.names()) == [
        "99_old.ipynb has no source in src/: delete it",
        "00_tiny.ipynb (solved) is not built",
    ]


def test_check_sees_missing_cells(course: build.Course) -> None:
    target = course.target("00_tiny", "student")
    notebook = nbformat.read(target, as_version=4)
    notebook.cells.pop()
    nbformat.write(notebook, target)
    assert course.check(course.names()) == ["00_tiny.ipynb (student): it has 3 cells, the source gives 4"]


def test_the_link_to_colab_opens_this_very_notebook_and_is_left_out_without_a_repository(tmp_path: Path) -> None:
    folder = tmp_path / "notebooks"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "00_tiny.py").write_text("# %% [markdown]\n# # Tiny\n#\n# <!-- colab -->\n#\n# Text.\n")
    course = build.Course(folder)
    assert course.generate("00_tiny", "student").cells[0].source == "# Tiny\n\nText."
    for repository, ends in (("", ("", "")), ("ada/course", ("00_tiny.ipynb", "solutions/00_tiny.ipynb"))):
        (tmp_path / "pyproject.toml").write_text(f'[tool.memsave]\nrepository = "{repository}"\n')
        for variant, end in zip(build.VARIANTS, ends, strict=True):
            text = course.generate("00_tiny", variant).cells[0].source
            page = f"(https://colab.research.google.com/github/ada/course/blob/main/notebooks/{end})"
            assert text.endswith(f"{page}\n\nText.") if end else text == "# Tiny\n\nText."


def test_the_setup_cell_knows_the_repository_and_keeps_its_id(tmp_path: Path) -> None:
    source = '# %% tags=["nbval-ignore-output"]\n# <setup>\n\n# %%\n# <setup> in words\n'
    cells = [build.generate(source, "tiny.py", "student", repository).cells for repository in ("", "ada/course")]
    for (first, second), repository in zip(cells, ("", "ada/course"), strict=True):
        assert first.source == build.setup_cell(repository)
        assert f'REPOSITORY = "{repository}"' in first.source.splitlines()
        assert first.metadata.tags == ["nbval-ignore-output"]
        assert second.source == "# <setup> in words"
    assert cells[0][0].id == cells[1][0].id


def test_names_are_chosen_by_any_part_of_them(course: build.Course) -> None:
    (course.folder / "src" / "01_more.py").write_text(SOURCE)
    assert course.names() == ["00_tiny", "01_more"]
    assert course.names(("01",)) == course.names(("notebooks/01_more.ipynb",)) == ["01_more"]
    with pytest.raises(build.SourceError, match="no source matches '07'; there are 00_tiny, 01_more"):
        course.names(("07",))


@pytest.mark.notebooks
def test_build_executes_cleans_and_leaves_an_unchanged_notebook_alone(course: build.Course) -> None:
    source = course.folder / "src" / "00_tiny.py"
    source.write_text(
        SOURCE
        + "\n# %%\nimport ipywidgets\nipywidgets.IntSlider(3)\n"
        + "\n# %%\nimport os\nos.environ['OMP_NUM_THREADS'], "
        + "os.environ['MEMSAVE_PRESS_RUN'], os.path.basename(os.getcwd())\n"
        + '\n# %% tags=["nbval-ignore-output"]\nimport time\nprint(time.time())\n'
    )
    assert course.build("00_tiny", "student")
    target = course.target("00_tiny", "student")
    first = target.read_bytes()
    notebook = nbformat.read(target, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5]
    assert code[1].outputs[0].text == "not tried yet\n"
    assert dict(code[2].outputs[0].data) == {"text/plain": "IntSlider(value=3)"}
    assert code[3].outputs[0].data["text/plain"] == str(("2", "1", course.folder.name))
    assert notebook.metadata == build.METADATA
    assert {key for cell in notebook.cells for key in cell.metadata} == {"tags"}
    assert not course.build("00_tiny", "student")
    assert target.read_bytes() == first
    source.write_text(source.read_text().replace("IntSlider(3)", "IntSlider(4)"))
    assert course.build("00_tiny", "student")
    assert course.build("00_tiny", "solved")
    solved = nbformat.read(course.target("00_tiny", "solved"), as_version=4)
    assert solved.cells[2].outputs[0].text == "3\n"
    assert course.check(course.names()) == []
