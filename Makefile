# `make demo` on a fresh machine sets everything up first. For another interpreter: rm -r .venv; make setup PYTHON=python3.12
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-sampled docs test test-docs test-long test-browser pictures foreign engines lint mutants fuzz model bench bench-consensus bench-transport wheel sbom clean

PYTHON ?=
BIN := .venv/bin
STAMP := .venv/.setup-complete
help:
	@echo "make setup   install everything, pinned, into .venv"
	@echo "make demo    four peers on this machine train a transformer together; one of them lies"
	@echo "make demo-sampled  the same with sampled audits: the liar is convicted, and its updates are taken out of the model"
	@echo "make test    the test suite without its longest tests"
	@echo "make test-long  the longest tests, which make test leaves out: liars of every kind, whole demos"
	@echo "make engines  the engines beside torch: tinygrad with clang, and jax, where this machine can have them"
	@echo "make docs    the site of docs/ in runs/site; a broken link fails"
	@echo "make test-docs  executes the code blocks of tutorials and how-to pages"
	@echo "make test-browser  the pages in a real browser; fails where there is none"
	@echo "make pictures  the screenshots of README and pages, made anew from peers that run"
	@echo "make foreign the SDK tinker, each version in an environment of its own (1.2 GB), for python -m scenarios.tinker"
	@echo "make lint    style, types, import layers and prose"
	@echo "make mutants planted bugs: the simulator must notice each"
	@echo "make fuzz MINUTES=60  other examples for each property, then random and changed bytes for all that reads what others sent"
	@echo "make bench   the benchmarks behind the figures in the documents"
	@echo "make bench-consensus  that of the agreement alone, as JSON in runs/benchmarks"
	@echo "make bench-transport  that of the links alone, beside plain TCP and TLS"
	@echo "make wheel   a wheel and an sdist in dist/"
	@echo "make sbom    the bill of materials of the installed product, as CycloneDX JSON in dist/"
	@echo "make clean   delete dist/, build/ and runs/, where demos and benchmarks write (some 40 MB a demo)"
	@echo "make model   the model of the agreement, checked by spin (needs spin and gcc)"

setup: $(STAMP)

# The stamp is written last, so an interrupted set-up is taken up again by the next command.
$(STAMP): pyproject.toml constraints.txt
	@python="$(PYTHON)"; \
	for candidate in $${python:-python3 python3.13 python3.12 python3.11 python}; do \
		if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
		echo "make: no Python 3.11 or newer with venv and pip was found (tried: $${python:-python3 python3.13 python3.12 python3.11 python})." >&2; \
		echo "make: install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "set-up: creating .venv with $$("$$found" --version)"; "$$found" -m venv --clear .venv; \
	fi
	@echo "set-up: installing the pinned packages into .venv, once; a minute or two with a fast link, most of it for torch"
	@echo "set-up: 5.0 GB with the build of torch that the ordinary package index has for Linux (it includes CUDA), 1.5 GB with the one for"
	@echo "set-up: processors alone: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup. Every build of this version will do"
	@set -e; SECONDS=0; \
	$(BIN)/python -m pip install --constraint constraints.txt setuptools; \
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev,web,upnp,mdns,data,train]'; \
	echo "set-up: done after $$SECONDS s; .venv takes $$(du -sh .venv | cut -f1)"
	@touch $@

demo: setup
	$(BIN)/peer demo

demo-sampled: setup
	$(BIN)/peer demo --audit sampled --attack false-update --seed 1

test: setup
	@echo "the tests take about 9 minutes on two idle cores, and up to 25 on a busy machine; lint, types and simulations have their own commands"
	$(BIN)/python -m tests.run virtual real

DOCS_STAMP := .venv/.docs-complete
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt mkdocs mkdocs-material
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir runs/site
	@echo "the site is in runs/site: open runs/site/index.html"

test-docs: setup
	$(BIN)/python -m tools.run_pages

test-long: setup
	$(BIN)/python -m tests.run long

test-browser: setup
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { echo "make: no browser and driver; Debian: apt install chromium chromium-driver" >&2; exit 1; }
	$(BIN)/python -m pytest tests/browser tests/web/test_defence_scripts.py

pictures: setup
	$(BIN)/python -m scenarios.pictures

# The SDK's requirements stay out of .venv. torch is there for custom losses, which the SDK computes in the program.
FOREIGN := .venv-foreign-0.38.0 .venv-foreign-0.25.0
foreign: $(FOREIGN:%=%/.complete)
.venv-foreign-%/.complete: $(STAMP)
	$(BIN)/python -m venv --clear .venv-foreign-$*
	.venv-foreign-$*/bin/python -m pip install --quiet tinker==$* $$(grep ^torch== constraints.txt)
	@touch $@

# The compiler of tinygrad comes from the system's packages. Tests of an engine that is missing are skipped with its remedy.
engines: setup
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[tinygrad,jax]'
	@if $(BIN)/python -c "import sys; from training.engines.tinygrad.compiler import find_compiler; sys.exit(not find_compiler())"; then \
	  echo "clang is installed"; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then apt-get install --yes --no-install-recommends clang; \
	else $(BIN)/python -c "from training.engines.tinygrad.compiler import REMEDY; print(f'tinygrad needs clang: {REMEDY}')" >&2; fi

lint: setup
	$(BIN)/python -m tests.run lint

mutants: setup
	$(BIN)/python -m tests.sim.mutants --jobs 2

MINUTES ?= 10
fuzz: setup
	$(BIN)/python -m pytest --quiet -m "hypothesis and not large" --hypothesis-profile others
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

bench: setup .venv-foreign-0.38.0/.complete
	$(BIN)/python -m benchmarks

bench-consensus: setup
	mkdir -p runs/benchmarks
	$(BIN)/python -m benchmarks.consensus --json runs/benchmarks/consensus.json

bench-transport: setup
	mkdir -p runs/benchmarks
	$(BIN)/python -m benchmarks.transport --json runs/benchmarks/transport.json

model:
	python3 docs/model/check.py

DIST ?= dist
# The wheel is built from the sdist, so that the sdist is complete and no file of an earlier build gets into the wheel. pip's cache
# would return the wheel of an earlier sdist of the same name.
wheel: setup
	rm -f $(DIST)/folkmoot-*
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("$(DIST)")'
	$(BIN)/python -m pip wheel --no-cache-dir --no-index --no-deps --no-build-isolation --wheel-dir $(DIST) $(DIST)/folkmoot-*.tar.gz
	rm -rf folkmoot.egg-info

sbom: setup
	$(BIN)/python -m tools.sbom $(DIST)/sbom.json

clean:
	rm -rf runs dist build
