# The commands of the course. Each makes its own .venv when there is none, and brings it up to date when a
# requirement file has changed. Run them from this folder, or with `make -C FOLDER`.
#
#   make lab          open the course in JupyterLab
#   make check        whether this machine will do for the course: a minute, before a workshop
#   make run          execute every notebook into build/, with one progress bar
#   make test         everything that CI checks, fast failures first (DEEPSPEED=1: with the real DeepSpeed)
#   make notebooks    rebuild the notebooks from notebooks/src (ARGS="01 03" for some, ARGS=--check to compare only)
#   make bench        the costs of the library as ratios
#   make record       run the long experiments at full size and write data/records (ARGS=gpt2_chunks for one)
#   make ledger       check the explainers' claims again and write data/claims.json and their table in README.md
#   make colab-kernel the kernel with the widgets of Colab, on which `make test` runs every notebook once
#   make screenshots  pictures of notebooks and labs in a browser, light and dark (NOTEBOOK=03 for one, ARGS=--labs)

PYTHON ?= python3
VENV ?= .venv
# Empty: the newest versions that the requirement files allow.
CONSTRAINTS ?= constraints.txt
# Not empty: install the real DeepSpeed too, which is an extra. Without it, what needs it is skipped and says so.
DEEPSPEED ?=
# Passed on to the program that a target starts.
ARGS ?=
NOTEBOOK ?=

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
INSTALLED := $(VENV)/installed
INSTALLED_DEV := $(VENV)/installed-dev
INSTALLED_DEEPSPEED := $(VENV)/installed-deepspeed
INSTALLED_COLAB := $(VENV)-colab/installed

export PYTHONHASHSEED := 0
export COLAB_VENV := $(abspath $(VENV)-colab)
# Two processes with one thread each: the suites are many small steps, which threads cannot speed up.
PARALLEL := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2
COMMITTED := $(sort $(wildcard notebooks/*.ipynb notebooks/solutions/*.ipynb))

.NOTPARALLEL:
.PHONY: help lab check run test test-versions notebooks bench record ledger colab-kernel screenshots lint check-build unit nbval papermill browser

help:
	@sed -n 's/^#   //p' Makefile

$(INSTALLED): requirements.txt pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Say which one to use: make PYTHON=python3.12 ...")'
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) -r requirements.txt
	$(INSTALL) --no-deps --editable .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED) $(if $(DEEPSPEED),$(INSTALLED_DEEPSPEED)) requirements-dev.txt
	$(INSTALL) -r requirements-dev.txt
	@touch $@

$(INSTALLED_DEEPSPEED): $(INSTALLED) requirements-deepspeed.txt
	DS_BUILD_OPS=0 $(INSTALL) -r requirements-deepspeed.txt
	@touch $@

# An environment of its own, with what differs; all else it takes from $(VENV).
$(INSTALLED_COLAB): $(INSTALLED) requirements-colab.txt tests/notebooks/colab_kernel.py
	$(PY) tests/notebooks/colab_kernel.py
	@touch $@

lab: $(INSTALLED)
	$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

check: $(INSTALLED)
	$(PY) teaching/check.py

run: $(INSTALLED)
	$(PY) notebooks/run.py $(ARGS)

# The committed outputs show the real DeepSpeed.
notebooks: $(INSTALLED_DEV) $(INSTALLED_DEEPSPEED)
	$(PY) notebooks/build.py $(ARGS)

bench: $(INSTALLED_DEV)
	$(PY) tests/bench.py $(ARGS)

record: $(INSTALLED_DEEPSPEED)
	$(PY) -m memsave_lib.course.record $(ARGS)

ledger: $(INSTALLED_DEEPSPEED)
	$(PY) -m memsave_lib.course.claims --write $(ARGS)

colab-kernel: $(INSTALLED_COLAB)

screenshots: $(INSTALLED_DEV)
	$(PY) -m tests.browser.screenshots $(NOTEBOOK) $(ARGS)

test: lint check-build unit nbval papermill browser

# For other versions than those of constraints.txt, which the committed outputs and the formatter belong to.
test-versions: unit papermill browser

lint: $(INSTALLED_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib .
	$(PY) -m pymarkdown scan --recurse README.md CONTRIBUTING.md teaching
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) -m check_jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(PY) -m check_jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(PY) -m check_jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

check-build: $(INSTALLED_DEV)
	$(PY) notebooks/build.py --check

unit: $(INSTALLED_DEV)
	$(PARALLEL) -m "not notebooks and not browser" $(ARGS)

# In a browser somebody presses the Run button of a lab; here the cell does it and waits.
nbval: export MEMSAVE_PRESS_RUN := 1
nbval: $(INSTALLED_DEV)
	$(if $(COMMITTED),$(PARALLEL) --dist loadscope --nbval --nbval-current-env --nbval-cell-timeout=300 $(COMMITTED),@echo "no notebook has been built yet: nothing for nbval to compare")

papermill: export REQUIRE_COLAB_KERNEL := 1
papermill: $(INSTALLED_DEV) $(INSTALLED_COLAB)
	$(PARALLEL) -m notebooks tests/notebooks

browser: $(INSTALLED_DEV)
	$(PY) -m pytest -m browser tests/browser
