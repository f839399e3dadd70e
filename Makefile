# Every target makes its own environment: Python >= 3.11 and make are all that is needed.
#
#   make demo                 train one model in four precisions; table and loss curves in demo_out/
#   make test                 the fast tests; make test-slow the slow ones
#   make test-expensive       those that repeat a behaviour of a fast test in other combinations, and
#                             slow ones that need XLA's GPU compiler: EXTRA=aot, Python >= 3.12
#   make test-versions        of the first two, those that depend on the versions of JAX and Flax
#   make test-all             all, with the rest of each grid of which the others run a subset
#   make test VENV=.venv-old PYTHON=python3.11 JAX=0.10.2     another leg
#   make test-lowest VENV=.venv-lowest    a short training with the lowest versions of all packages
#   make bench                the benchmarks that require only a CPU, and docs/benchmarks.md
#   make docs                 the site, in docs/_build/html; warnings are errors
#   make links                the links of the site to other servers
#   make lint                 ruff and pyright

VENV   ?= .venv
PYTHON ?= python3
# A version such as 0.10.2, or latest: the newest that this Python can install.
JAX    ?= latest
# An extra of pyproject.toml that the tests get too, such as aot.
EXTRA  ?=
# More for the command that runs, as in: make test ARGS="-x tests/test_policy.py"
ARGS   ?=

BIN    := $(VENV)/bin
# A worker starts with consecutive tests, which share models and compiled steps. At the end, idle
# workers take over tests of the others.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
# One file per installed extra; made anew when pyproject.toml, this file or JAX changes.
STAMP  := $(VENV)/jaxmp-with-jax-$(JAX)$(EXTRA:%=-%)
PIN    := $(if $(filter latest,$(JAX)),jax,jax==$(JAX) jaxlib==$(JAX))

# The extras for users, whose lowest versions are tested together.
LOWEST := flax cli examples
COMMA  := ,
SPACE  := $(subst ,, )

# Python compiles the modules that it imports, a fraction of those that pip would compile. Their
# compiled forms are kept, and those of the tests, in which pytest has rewritten the assertions.
export PYTHONDONTWRITEBYTECODE =

.PHONY: env demo test test-versions test-expensive test-slow test-all test-lowest bench docs links lint format clean
.DELETE_ON_ERROR:

demo: $(STAMP)/examples
	$(BIN)/python examples/demo.py $(ARGS)

# All that the tests need, and nothing run.
env: $(STAMP)/dev

test: $(STAMP)/dev
	$(PYTEST) -m "not slow and not expensive" $(ARGS)

test-expensive: $(STAMP)/dev
	$(PYTEST) --durations=30 -m "(expensive and not slow) or (gpu_compiler and slow and not exhaustive)" $(ARGS)

test-versions: $(STAMP)/dev
	$(PYTEST) -m versions $(ARGS)

test-slow: $(STAMP)/dev
	$(PYTEST) --durations=30 -m "slow and not exhaustive" $(ARGS)

test-all: $(STAMP)/dev
	$(PYTEST) $(ARGS)

# Imports, the command and a short training with the lowest versions that pyproject.toml allows.
test-lowest: | $(BIN)/python
	pins=$$($(BIN)/python .ci/lowest.py $(LOWEST)) && \
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[$(subst $(SPACE),$(COMMA),$(LOWEST))]" $$pins
	$(BIN)/python -c "import jaxmp, jaxmp._tools.cli, jaxmp.errors, jaxmp.fp8, jaxmp.losses, jaxmp.nnx, jaxmp.optim, jaxmp.typing"
	$(BIN)/jaxmp show bf16 >/dev/null
	$(BIN)/jaxmp audit examples/train_lm.py:make_step --recipe bf16 >/dev/null
	$(BIN)/python examples/five_lines.py

bench: $(STAMP)/dev
	$(BIN)/python benchmarks/overhead.py --out benchmarks/results/overhead_cpu.json
	$(BIN)/python benchmarks/tables.py

docs: $(STAMP)/docs
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html $(ARGS)

links: $(STAMP)/docs
	$(BIN)/python -m sphinx -b linkcheck -q -D nb_execution_mode=off -D suppress_warnings=myst-nb.lexer docs docs/_build/links $(ARGS)

lint: $(STAMP)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo_out dist build

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxmp needs Python 3.11 or newer; this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(STAMP)/%: pyproject.toml Makefile | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --upgrade --editable ".[$*$(EXTRA:%=,%)]" $(PIN)
	@rm -rf $(filter-out $(STAMP),$(wildcard $(VENV)/jaxmp-with-jax-*))
	@mkdir -p $(STAMP)
	@touch $@
