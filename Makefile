# Everything a developer or CI runs. `make help` lists it. Needs make and Python 3.11 or newer, nothing else.

PYTHON ?= python3
VENV ?= .venv
# Test processes, two more than there are cores: tests wait, too. JOBS=0 runs the tests in this process, for a debugger.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(shell expr 2 + $(CORES))
# Further arguments for pytest, the bench and the resolver: make test ARGS='-k cursor', make lock ARGS=--upgrade
ARGS ?=

BIN := $(VENV)/bin
RUN := $(VENV)/.installed-run
DEV := $(VENV)/.installed-dev
# What a user's command needs. A development install holds all of the run lock, so it is never installed over.
INSTALLED := $(if $(wildcard $(DEV)),$(DEV),$(RUN))

.DEFAULT_GOAL := help
# Two goals would otherwise set up the same environment at the same time.
.NOTPARALLEL:

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(INSTALLED) ## Fetch 10,000 URLs from a small site on loopback
	$(BIN)/conveyor demo $(ARGS)

.PHONY: python-check
python-check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import-linter

.PHONY: quick
quick: python-check ## Run the inner loop: Python checks, unit tests, conformance on SQLite
	$(BIN)/python -m pytest -q -n $(CORES) --dist worksteal -m "not server and not slow" tests/unit tests/conformance $(ARGS)

.PHONY: test
test: check packages ## Run the checks, then every test
	$(BIN)/python -m tests.suite -n $(JOBS) --dist worksteal $(ARGS)

# How long the nets are out, together.
MINUTES ?= 60

.PHONY: soak
soak: $(DEV) ## Run the nets for MINUTES=60 from random seeds
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

# Requests for each route, at least.
EXAMPLES ?= 100

.PHONY: fuzz
fuzz: $(DEV) ## Send requests made from the OpenAPI document, EXAMPLES=100 for each route
	$(BIN)/python -m tests.fuzz --examples $(EXAMPLES) $(ARGS)

# Builds the image without a daemon, and starts it as a container would. Debian's packages for it are installed once.
.PHONY: image
image: PROGRAMS = buildah debootstrap
image: $(DEV) packages ## Build the container image, start it, and print its size and times
	$(BIN)/python -m tests.image

.PHONY: release
release: $(DEV) ## Build wheel, sdist, SBOM and checksums into dist/, and try them on every Python here
	$(BIN)/python -m tests.release

# The dashboard's JavaScript, under deno.json. Nothing is fetched, nothing is left outside .cache.
PAGES = src/conveyor/dashboard/static
DENO = DENO_DIR=.cache/deno DENO_NO_UPDATE_CHECK=1 $(BIN)/deno

.PHONY: check
check: python-check ## Check format, lint, types and import rules
	$(DENO) fmt --quiet --check $(PAGES)
	$(DENO) lint --quiet $(PAGES)
	$(DENO) check --quiet $(PAGES)/main.js

# Debian's own packages for the tests, installed once: the browser of the dashboard, because the test library brings none,
# a connection pooler for Postgres, and the proxies of deploy/. Another process may hold apt's lock.
PROGRAMS = chromium pgbouncer nginx caddy curl
MISSING = $(shell export PATH="$$PATH:/usr/sbin"; for each in $(PROGRAMS); do command -v $$each > /dev/null || echo $$each; done)
APT = apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 -y --no-install-recommends install $(MISSING) > /dev/null

# apt-get waits for the lock of dpkg by itself, for that of the lists of packages it does not.
UPDATE = for n in $$(seq 60); do said=$$(LC_ALL=C apt-get -qq update 2>&1) && break; \
	case $$said in *'get lock'*) sleep 5 ;; *) echo "$$said" >&2; exit 1 ;; esac; done

.PHONY: packages
packages:
	@[ -z '$(MISSING)' ] || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; } || \
		{ echo 'The tests need $(MISSING): install it first (Debian, Ubuntu: apt-get install $(MISSING)).' >&2; exit 1; }
	@[ -z '$(MISSING)' ] || { echo 'Installing $(MISSING)'; export DEBIAN_FRONTEND=noninteractive; \
		$(APT) 2> /dev/null || { $(UPDATE) && $(APT); }; }

.PHONY: format
format: $(DEV) ## Format the source and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(DENO) fmt --quiet $(PAGES)

.PHONY: docs
docs: $(DEV) ## Build the documentation site into build/docs/site
	rm -rf build/docs
	mkdir -p build/docs
	cp -r docs zensical.toml build/docs
	cd build/docs && $(abspath $(BIN))/zensical build --strict

.PHONY: bench
bench: $(INSTALLED) ## Run the benchmarks, each figure as a ratio to a bare limit
	$(BIN)/python -m bench $(ARGS)

PEERS = .venv-peers

.PHONY: bench-peers
bench-peers: $(DEV) $(PEERS)/.installed ## Measure peers beside Conveyor (needs nginx, aria2, curl)
	$(BIN)/python -m bench.peers --python $(abspath $(PEERS))/bin/python $(ARGS)

$(PEERS)/.installed: requirements/peers.txt
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --disable-pip-version-check -qq --no-compile --require-hashes --only-binary :all: \
		-r requirements/peers.txt
	@touch $@

# --no-config and the two --no-emit options keep this machine's registry out of the lock.
LOCK = $(BIN)/uv pip compile --no-config --quiet --universal --python-version 3.11 --only-binary :all: \
	--generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' $(ARGS)

.PHONY: lock
lock: $(DEV) ## Rewrite the lock files (ARGS=--upgrade for newer versions)
	$(LOCK) -o requirements/run.txt --extra server pyproject.toml
	$(LOCK) -o requirements/build.txt -c requirements/run.txt requirements/build.in
	$(LOCK) -o requirements/image.txt -c requirements/run.txt --extra aws --extra otel --extra postgres pyproject.toml
	$(LOCK) -o requirements/parquet.txt requirements/parquet.in
	$(LOCK) -o requirements/dev.txt -c requirements/image.txt -c requirements/parquet.txt -c requirements/build.txt --extra dev pyproject.toml
	$(filter-out --universal,$(LOCK)) -o requirements/peers.txt requirements/peers.in

.PHONY: clean
clean: ## Remove the environment, caches and builds; data stays
	rm -rf $(VENV) $(PEERS) .cache .hypothesis build dist
	find src tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The development lock holds the build backend, too.
$(RUN): requirements/run.txt requirements/build.txt pyproject.toml
	$(call install,run,-r requirements/build.txt)

$(DEV): requirements/dev.txt pyproject.toml
	$(call install,dev)

# --no-compile: compiling all modules takes a quarter of the set-up. The install below compiles those that every start
# imports, even where the environment forbids Python to store bytecode: otherwise each start would compile them again.
PIP = $(BIN)/python -m pip install --disable-pip-version-check -qq --no-compile
# What a start imports late: an import of the modules alone does not reach it.
LATE = src/conveyor $(addprefix $(VENV)/lib/python3*/site-packages/,attr attrs litestar typer uvicorn uvloop)

define install
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Conveyor needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo 'Setting up $(VENV) from requirements/$(1).txt'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --require-hashes --only-binary :all: -r requirements/$(1).txt $(2)
	@$(PIP) --no-deps --no-build-isolation -e .
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import conveyor.cli.command_list, conveyor.api.server, conveyor.embedded'
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -q $$(ls -d $(LATE) 2>/dev/null)
	@touch $@
endef
