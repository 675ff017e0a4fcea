# Needs python3 (3.11 or newer, with venv), make and a package registry. Everything is installed in .venv: what training
# needs by `make train`, the tools and tests too by the others.
#   PYTHON=python3.12   another interpreter        ARGS=…   passed on to the command that a target runs
#   WORKERS='-n 4'      processes that run the tests: where all are run two more than cores, as many tests wait, 8 at most; else one

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(if $(ARGS),,-n $(shell expr $(CORES) + 2) --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
INSTALLED := .venv/.installed
TRAINABLE := .venv/.trainable
CLIENTS := build/clients
MUTANTS := build/mutants/environment

help:
	@echo 'make train [DATA=log.tsv] [ARGS=…]   train the example DLRM, on a generated log without DATA'
	@echo 'make test [ARGS=…]                   run the tests'
	@echo 'make test-clients [ARGS=…]           convert and train models of deepctr-torch, pykeen, recbole, …'
	@echo 'make lint                            ruff and mypy'
	@echo 'make docs                            build the documentation into build/docs; a warning is an error'
	@echo 'make dist                            build the wheel and the sdist into dist, and check them'
	@echo 'make newcomer [VENV=.venv]           run what README and guides show, on a fresh clone, with a clock'
	@echo 'make bench [ARGS=…]                  run the benchmarks, keep the results, write tables and charts'
	@echo 'make mutants [ARGS=…]                break the code in 200 places, one by one, and see whether tests fail; hours'
	@echo 'make clean                           remove .venv and what the tools left'

train: $(TRAINABLE)
	$(BIN)/python -m examples.dlrm train $(if $(DATA),--data "$(DATA)") --plot runs/dlrm.png $(ARGS)

# bytecode is kept, whatever the environment says: many processes of the tests import the same files
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q docs build/docs
	@echo 'build/docs/index.html'

# what does not pass the checks is not left in dist
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m pytest tests/test_dist.py --built-into dist || { rm -rf dist; exit 1; }
	@ls dist/*

# VENV: an environment in which all is installed; without it the README's lines make one, which takes minutes
newcomer:
	$(PYTHON) tools/newcomer.py $(if $(VENV),--venv $(VENV)) $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(ARGS)

# may be interrupted: the same command goes on
mutants: $(MUTANTS)/.installed
	$(MUTANTS)/bin/python -m tools.mutants $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,extra): with a GPU, and a torch that can use it, the CuPy that fits that torch is installed too
# setuptools first: the project is then built by the pinned one, not by whichever is newest
define install
@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	"tieredemb needs Python 3.11 or newer, $(PYTHON) is %d.%d; install one and run: make PYTHON=python3.11" % v[:2])'
@$(PYTHON) -c 'import venv, ensurepip' || \
	{ echo '$(PYTHON) has no venv; on Debian or Ubuntu: apt-get install python3-venv' >&2; exit 1; }
$(PYTHON) -m venv .venv
$(PIP) install --constraint constraints.txt setuptools
$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[$(1)]'
@nvidia-smi -L >/dev/null 2>&1 || exit 0; \
	cuda=$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "").partition(".")[0])'); \
	test -z "$$cuda" || $(PIP) install --constraint constraints.txt --no-build-isolation --editable ".[$(1),cuda$$cuda]"
endef

$(TRAINABLE): pyproject.toml constraints.txt
	$(call install,train)
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(call install,dev)
	@touch $(TRAINABLE) $@

# $(call beside,directory,requirements): an environment of its own, in which the packages of .venv are found as well:
# torch is not installed twice, and the libraries add nothing to .venv
define beside
$(BIN)/python -m venv --without-pip --clear $(1)
$(PIP) --python $(1)/bin/python install --no-deps --requirement $(2)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	>"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
endef

$(CLIENTS)/.installed: $(INSTALLED) tests/clients/requirements.txt
	$(call beside,$(CLIENTS),tests/clients/requirements.txt)
	@touch $@

$(MUTANTS)/.installed: $(INSTALLED) tools/mutants/requirements.txt
	$(call beside,$(MUTANTS),tools/mutants/requirements.txt)
	@touch $@

.PHONY: help train test test-clients lint docs dist newcomer bench mutants clean
