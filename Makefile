PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt
BACKENDS = cutile,triton,torch-reference

run: .venv/run; .venv/bin/python -m tilegym_mamba2 run --model mamba2-130m --seqlen 2048
test: .venv/test; .venv/bin/python -m pytest -n 2 --dist worksteal --require-backends=$(BACKENDS)
bench: .venv/test; .venv/bin/python -m pytest bench
lint: .venv/lint; .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright

.venv/pip:
	$(PYTHON) -m venv .venv && .venv/bin/pip install --quiet --disable-pip-version-check 'pip>=25.1' && touch $@
.venv/run: .venv/pip pyproject.toml constraints.txt
	$(PIP) --editable '.[cli]' && touch $@
.venv/test: .venv/run
	$(PIP) --group test --editable '.[bench,cli,triton,cutile]' && $(PIP) --no-deps tilegym && touch $@
.venv/lint: .venv/test
	$(PIP) --group lint && touch $@

.PHONY: run test bench lint
