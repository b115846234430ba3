# Every target makes .venv itself on first use; nothing else needs to be installed but Python 3.11-3.13, git and make.
# PYTHON=... picks the interpreter, pip's own environment variables (PIP_INDEX_URL and so on) pick the package index.

PYTHON ?= python3
# Arguments of the whole suite: up to four workers, each test file kept in one of them.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile

VENV := .venv
PY := $(VENV)/bin/python
# The same pins hold inside pip's isolated builds: older releases of pip read the first variable there, newer ones the second.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help sweep report test unit coverage lint types format wheel clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

sweep: $(VENV)/installed  ## install what a sweep needs, train the default sweep, write its report to reports/default/
	$(PY) -m grpo_sweeps.run +sweeps=default
	$(PY) -m grpo_sweeps.report sweep=default

report: $(VENV)/installed  ## write the report of the default sweep again from its records
	$(PY) -m grpo_sweeps.report sweep=default

test: $(VENV)/installed-dev  ## install what the tests need, run the whole test suite
	$(PY) -m pytest $(PYTEST_ARGS)

unit: $(VENV)/installed-dev  ## the unit tests and the examples in docstrings (two minutes on two cores)
	$(PY) -m pytest -q $(PYTEST_ARGS) tests/unit grpo_sweeps

coverage: $(VENV)/installed-dev  ## the whole suite with the lines and branches of the package that it reaches
	$(PY) -m pytest $(PYTEST_ARGS) --cov --cov-report=term

lint: $(VENV)/installed-dev  ## ruff: lint, import order and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/installed-dev  ## mypy
	$(PY) -m mypy

format: $(VENV)/installed-dev  ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: $(VENV)/installed-dev  ## build dist/grpo_sweeps-*.whl
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## remove caches and build outputs; keeps .venv, runs/ and reports/
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage .coverage.*
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	rm -rf $(VENV)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || \
		{ echo "grpo_sweeps needs Python 3.11, 3.12 or 3.13, but '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there): name another one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | $(PY)
	@echo "Installing the locked versions into $(VENV) (minutes, once)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(PY)
	@echo "Installing the locked versions and the test tools into $(VENV) (minutes, once)"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/installed $@
