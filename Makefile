# A thin wrapper: everything here can be done with cmake, ctest and pytest directly (see CONTRIBUTING.md).
.DEFAULT_GOAL := help
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.PHONY: help demo test bench lint format clean uninstall

SETUP := cmake/setup/setup.sh
JOBS ?= $(shell nproc)
# What tenants and the demo need of the C++ side.
PROGRAMS := sliced slice-executor slice slicectl
# The compiled library, its Python binding and the programs of one build folder, as tenants and tests see them.
ENVIRONMENT = PYTHONPATH=$(CURDIR)/torch_plugin SLICE_BUILD_DIR=$(CURDIR)/build/$(1) \
              SLICE_LIBRARY=$(CURDIR)/build/$(1)/lib/libslice.so

help:  ## this text
	@echo "SliceScheduler: make TARGET"
	grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  \1\t/' | expand -t 14
	echo "Variables: PYTHON=interpreter with the pins of torch_plugin/requirements.txt; SLICE_CACHE=folder of the Python"
	echo "environment; JOBS=parallel compiles; ARGS=arguments of the demo, e.g. make demo ARGS='--trace FILE'."

demo:  ## installs what is missing, builds, runs two online and one offline tenant under three policies, prints a report
	@python=$$($(SETUP))
	cmake --preset release -DSLICE_PYTHON="$$python" --log-level=WARNING
	cmake --build --preset release -j $(JOBS) --target $(PROGRAMS)
	$(call ENVIRONMENT,release) "$$python" tools/demo/demo.py --build build/release $(ARGS)

test:  ## installs what is missing, builds everything, runs every test
	@python=$$($(SETUP))
	cmake --preset dev -DSLICE_PYTHON="$$python" --log-level=WARNING
	cmake --build --preset dev -j $(JOBS)
	failed=0
	ctest --preset dev -j 2 || failed=1
	# Background jobs ignore SIGINT; the tests of Ctrl-C need it.
	pytest="env --default-signal=INT $$python -m pytest -c torch_plugin/tests/pytest.ini -p no:cacheprovider"
	export $(call ENVIRONMENT,dev)
	echo "--- the plugin's runtime on a real daemon"
	$$python tests/plugin/on_daemon.py build/dev $$pytest torch_plugin/tests tests/plugin -k runtime || failed=1
	echo "--- plugin and demo"
	$$pytest torch_plugin/tests tests/demo || failed=1
	if [ $$failed -ne 0 ]; then echo "make test: some tests FAILED (see above)"; exit 1; fi

bench:  ## release build, measures the core's and the system's figures, writes out/bench/*.json
	@python=$$($(SETUP))
	cmake --preset release -DSLICE_PYTHON="$$python" --log-level=WARNING
	cmake --build --preset release -j $(JOBS)
	"$$python" tools/bench/core_bench.py --build build/release --out out/bench
	$(call ENVIRONMENT,release) "$$python" tools/bench/system_bench.py --build build/release --out out/bench/system.json

SOURCES = $$(git ls-files '*.h' '*.cc' '*.c')
lint:  ## formatting, includes between layers, file lengths
	@$(SETUP) lint
	failed=0
	python3 tests/lint/check_layers.py || failed=1
	clang-format --dry-run -Werror $(SOURCES) || failed=1
	exit $$failed

format:  ## clang-format on every C and C++ file
	@$(SETUP) lint
	clang-format -i $(SOURCES)

clean:  ## removes build folders and results
	rm -rf build out

uninstall:  ## removes the Python environment from the cache folder
	@$(SETUP) uninstall
