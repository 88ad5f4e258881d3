# make install   the environment in .venv (uv; nothing outside this folder but the package cache)
# make demo      install, then the demonstration: speed and quality of reuse side by side (MODEL=FOLDER: of a model of yours)
# make clients   client libraries (openai, langchain, ...) in .venv-clients, for the tests with them
# make gateway   SGLang's model gateway, for the tests with it (docs/fleet.md)
# make mooncake   Mooncake's store, master and the system libraries they need (unpacked in .tools), for the tests with them
# make peers      ContextPilot, in .cache/peers, for the serving benchmark (`--systems stock,contextpilot,...`)
# make chromium   Debian's browser and its driver (apt-get, as root or by sudo), for the tests of the page and its picture
# make test      install, then fast tests, then tests with real servers
# make test-all  every test and the full matrix of server configurations
# make lint      ruff, mypy, import contracts
# make check-sglang VERSION=x.y.z   whether the project fits another SGLang (docs/upgrading.md)
# make bench     stock SGLang, the reordering baseline and reuse under load, side by side (17 to 30 minutes on two cores)
# make bench-ttft, make bench-index   the measurements behind the README's figures
# make bench-tiers, make soak-tiers   what loading from slow tiers costs; twenty minutes of traffic over them
# make soak-fleet   twenty minutes of a fleet in which one process after the other is killed (STORE=mooncake: on that store)
# make gpu-check   on a CUDA host: checks and measures all that needs a GPU, about an hour, one report (docs/gpu.md);
#                  GPU_CHECK="--rehearse" tries it on a CPU
# make bench-quality   answers of the trained models under every method and ratio (hours on two cores)
# make bundle   SGLang and this project in parts for a CUDA host without internet, in build/bundle (BUNDLE='--gpu 90'; docs/gpu.md)
# make docs      the documentation as a web site, in build/site
# make wheel     dist/*.whl: the tools alone, and beside SGLang all of it (README.md)
# make clean     caches and results of tests; `make distclean` also the environment

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install clients gateway mooncake peers chromium demo test test-all lint format check-sglang bench bench-ttft bench-index bench-tiers soak-tiers soak-fleet bench-quality gpu-check bundle docs wheel \
	clean distclean

BIN := .venv/bin
PY := $(BIN)/python
# Two processes share the tests: most of the time goes into imports, which use one core. Each needs about 6 GiB.
TEST_JOBS ?= 2
# Which tests stay together: pytest_xdist_make_scheduler in test/conftest.py.
SHARED := -n $(TEST_JOBS)
# The name holds the folder, so that an environment that came along with a copied tree is rebuilt, not trusted.
STAMP := .venv/.installed-$(shell pwd | cksum | cut -d ' ' -f 1)
CLIENTS_STAMP := $(STAMP:.venv/%=.venv-clients/%)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml .ci/install
	.ci/install $(STAMP) --editable '.[server,dev,bench]'

clients: $(CLIENTS_STAMP)

$(CLIENTS_STAMP): pyproject.toml .ci/install
	.ci/install $(CLIENTS_STAMP) --group clients --editable .

gateway: $(STAMP)
	.ci/install $(STAMP) --editable '.[server,dev,bench,gateway]'

mooncake: $(STAMP)
	.ci/install $(STAMP) --editable '.[server,dev,bench,mooncake]'
	$(PY) -c 'import mooncake.store' 2>/dev/null || (mkdir -p .tools/mooncake && cd .tools/mooncake && \
		apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 && for file in *.deb; do dpkg-deb -x $$file .; done)

# Not in .venv: a file that comes with it hooks into SGLang at every start of Python.
peers: $(STAMP)
	.ci/install --target .cache/peers --no-deps contextpilot==0.5.0

chromium:
	$(if $(filter 0,$(shell id -u)),,sudo) sh -c 'apt-get update && apt-get install --yes --no-install-recommends chromium chromium-driver'

demo: $(STAMP)
	$(PY) benchmark/demo/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(QUESTIONS),--questions $(QUESTIONS))

test: $(STAMP)
	$(PY) -m pytest $(SHARED) -m "not server and not slow and not all" test
	$(PY) -m pytest $(SHARED) -m "(server or slow) and not all" test

test-all: $(STAMP) $(CLIENTS_STAMP)
	$(PY) -m pytest --all $(SHARED) test/unit test/server
	$(PY) -m pytest --all $(SHARED) --summary benchmark/results/exactness/summary.md test/exactness

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check-sglang: $(STAMP)
	$(PY) test/check_sglang.py $(VERSION) $(if $(WITH),--with $(WITH))

bench: $(STAMP)
	$(PY) benchmark/serving/bench_serving.py

bench-ttft: $(STAMP)
	$(PY) benchmark/ttft/bench_ttft.py

bench-index: $(STAMP)
	$(PY) benchmark/index/bench_lookup.py

bench-tiers: $(STAMP)
	$(PY) benchmark/tiers/bench_loading.py

soak-tiers: $(STAMP)
	$(PY) benchmark/tiers/soak.py

soak-fleet: gateway
	$(PY) test/server/soak_fleet.py $(if $(STORE),--store $(STORE))

bench-quality: $(STAMP)
	$(PY) benchmark/quality/evaluate.py

gpu-check: $(STAMP)
	$(PY) benchmark/gpu/check.py $(GPU_CHECK)

bundle: $(STAMP)
	$(PY) benchmark/gpu/bundle.py $(BUNDLE)

docs: $(STAMP)
	$(PY) docs/site.py

wheel:
	.ci/install --wheel dist

clean:
	rm -rf .cache .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache build dist
	find . -path './.venv*' -prune -o -path ./.tools -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-clients .tools
