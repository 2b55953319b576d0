# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv demo test lint types format

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/pyright

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: venv
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py
