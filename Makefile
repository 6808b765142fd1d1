# Everything a newcomer, CI and a developer run. Each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := .tools
COMETBFT_VERSION := v0.40.0

.PHONY: demo test lint types format bench attacks cometbft proto clean

demo: $(READY) ## seven processes, two liars, one model
	$(BIN)/torchbft demo --out runs/demo

test: $(READY) ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(READY) ## style, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=src $(BIN)/mypy -p torchbft
	$(BIN)/lint-imports

bench: $(READY) ## round and transport figures, as ratios to a reference in the same run
	$(BIN)/python benchmarks/round.py --json
	$(BIN)/python benchmarks/transport.py --json

attacks: $(READY) ## every attack, seeds 0 to 4 (long)
	$(BIN)/python benchmarks/attacks.py --seeds 0-4 --json

proto: $(READY) ## Python for the messages of the ordering engine, from the .proto files
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src \
		src/torchbft/node/ordering/proto/*.proto

cometbft: ## the pinned ordering engine, into the project's tool folder (needs Go)
	GOBIN=$(CURDIR)/$(TOOLS) go install github.com/cometbft/cometbft/cmd/cometbft@$(COMETBFT_VERSION)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$$(sed -n 's/^uv==//p' constraints.txt)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) $(TOOLS) runs build dist
