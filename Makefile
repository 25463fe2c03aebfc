# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
#
# PYTHON         interpreter that the environment is made from
# TORCH_INDEX    URL of PyTorch's own index of CPU wheels; needed only where pip's default index has no CPU build of
#                torch: make demo TORCH_INDEX=...
# DEMO_FLAGS     more flags for the demo's `gk decode`

PYTHON ?= python3
TORCH_INDEX ?=
DEMO_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NEXT := .venv-vllm-next
NEXT_READY := $(NEXT)/.ready
PACKAGES := gk_core gk_kernels gk_adapters
MODEL := models/tiny-recall
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# The tests' and the demo's tensors are small: one thread is faster than two that wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: env demo test test-all test-vllm-next lint types unit bench clean

env: $(READY)

$(READY): pyproject.toml requirements/test.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/test.txt
	# These come with the vLLM wheel but do not import beside this torch, and nothing here needs them.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --no-deps nixl-cu12==1.5.1 nixl==1.5.1
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

demo: env
	$(BIN)/gk decode --checkpoint $(MODEL) --prompt-file $(MODEL)/prompts/prompt-100.txt \
	  --prompt-file $(MODEL)/prompts/prompt-255.txt --prompt-file $(MODEL)/prompts/prompt-256.txt \
	  --prompt-file $(MODEL)/prompts/prompt-600.txt --max-new-tokens 24 --compare-hf --compare-fp8 $(DEMO_FLAGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: env
	$(BIN)/mypy

unit: env
	$(BIN)/python -m pytest -m "not slow"

test: lint types unit

test-all: lint types
	$(BIN)/python -m pytest

# What of gk runs on a later vLLM, in an environment of its own (4 GB); no part of `make test`.
test-vllm-next: $(NEXT_READY)
	$(NEXT)/bin/python -m pytest tests/vllm_next tests/vllm -m "not slow"

$(NEXT_READY): pyproject.toml requirements/vllm-next.txt
	test -x $(NEXT)/bin/python || $(PYTHON) -m venv $(NEXT)
	$(NEXT)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/vllm-next.txt
	$(NEXT)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(NEXT)/bin/python -m pip install --quiet --no-deps nixl-cu12==1.5.1 nixl==1.5.1
	$(NEXT)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(NEXT_READY)

bench: env
	$(BIN)/gk bench all

clean:
	rm -rf $(VENV) $(NEXT) build dist *.egg-info
