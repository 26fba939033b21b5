# Everything works from a fresh clone: the first target that needs the environment makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTO := protocol/wire/peer.proto
PROTOC = $(BIN)/python -m grpc_tools.protoc --proto_path=.
DOCKER ?= docker
IMAGE ?= gossamer
TORCH ?= cpu
TORCH_CPU ?=
PEERS ?= 4
STEPS ?= 600
STAGES ?= 1
WORKERS ?= $(shell nproc)
PYTEST := pytest -n $(WORKERS) --maxprocesses 8 --dist loadscope --no-loadscope-reorder

unexport PYTHONDONTWRITEBYTECODE # a test run starts hundreds of processes: each would compile our sources anew

.PHONY: help docs faults attacks lab demo image swarm release test coverage check format proto pictures clean install

help:
	@echo "make demo    train a swarm of $(PEERS) peers on this machine and compare it with one peer alone (PEERS=, STEPS=, STAGES=)"
	@echo "make image   build the container image $(IMAGE) (TORCH=cpu or cuda, TORCH_CPU=URL of torch's builds for CPUs, BUILD='more options of docker build') and print its sizes"
	@echo "make swarm   train a swarm of containers on this machine, and compare it with one peer alone (STEPS=)"
	@echo "make release build the wheel in dist/, and try it in new environments of each Python here, once with the oldest packages (RELEASE=python3.12)"
	@echo "make test    run the tests on all cores (WORKERS=)"
	@echo "make coverage  run them and print which lines and branches of the code they ran"
	@echo "make faults  the whole fault suite, one core for five hours; FAULTS='R1 R5' for some of it"
	@echo "make attacks every attack of a member on swarms of 4, 8 and 10, one core for an hour; ATTACKS='ascent stale' for some of it"
	@echo "make lab     peers behind routers of four kinds meet, in network namespaces (as root)"
	@echo "make check   formatting, lint, types, and whether the generated wire code is fresh"
	@echo "make format  format the sources"
	@echo "make proto   generate the wire code from $(PROTO)"
	@echo "make pictures  make the pictures in docs/ anew, ten minutes (needs chromium and chromium-driver)"
	@echo "make docs    build docs/ as a site in site/"
	@echo "make clean   remove the environment and all caches"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt optim/compiled.c
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit("error: $(PYTHON) is Python %d.%d; Gossamer needs 3.11, 3.12 or 3.13\nhint: make $(MAKECMDGOALS) PYTHON=python3.11" % v[:2])'
	@echo "installing torch and the other packages into $(VENV), which takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages || true # on all cores, pip on one; some files need a newer Python
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/peer demo --peers $(PEERS) --steps $(STEPS) $(if $(filter-out 1,$(STAGES)),--stages $(STAGES))

image:
	DOCKER="$(DOCKER)" IMAGE="$(IMAGE)" TORCH="$(TORCH)" TORCH_CPU="$(TORCH_CPU)" docker/build $(BUILD)

swarm: image
	DOCKER="$(DOCKER)" GOSSAMER_IMAGE="$(IMAGE)" STEPS="$(STEPS)" docker/swarm

release: $(STAMP)
	$(BIN)/python -m tests.release $(RELEASE)

test: $(STAMP)
	$(BIN)/python -m $(PYTEST)

coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

faults: $(STAMP)
	$(BIN)/python -m tests.faults $(FAULTS)

attacks: $(STAMP)
	$(BIN)/python -m tests.attacks $(ATTACKS)

lab: $(STAMP)
	$(BIN)/python -m tests.lab.pairs --bulk

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@new=$$(mktemp -d) && $(PROTOC) --python_out=$$new --pyi_out=$$new $(PROTO) && \
	for file in peer_pb2.py peer_pb2.pyi; do diff -q $$new/protocol/wire/$$file protocol/wire/$$file || exit 1; done && rm -r $$new || \
	{ echo "error: the generated wire code is stale; run make proto" >&2; exit 1; }

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

proto: $(STAMP)
	$(PROTOC) --python_out=. --pyi_out=. $(PROTO)

pictures: $(STAMP)
	$(BIN)/python -m benchmarks.pictures docs/pictures training-wide-light training-narrow-dark run-wide-light small-run-narrow-dark machines-wide-light
	$(BIN)/python -m benchmarks.pictures.recording docs/pictures/demo.svg --title 'make demo' -- $(BIN)/peer demo

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) build dist site *.egg-info .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
