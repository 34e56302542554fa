# Each target works alone on a fresh machine with Python 3.11 or 3.12, a C++ compiler and Java 17 or newer.
#
#   make demo    set up, then train on real flights on a local Spark cluster that loses an executor
#   make test    set up, then run all tests
#   make test-compat    the oldest releases of Spark, MLflow and numpy that it works with, in build/compat
#   make test-stock     churn schedules on a Horovod without the mends
#   make test-browser   the pages in a real browser; needs chromium and chromium-driver; screenshots in build/screenshots
#   make check   set up, then lint, types, import rules (under a minute)
#
# Options: VENV=.venv, PYTHON=python3.11, TORCH=torch==2.13.0, EXTRAS=test,dev,tested, ARGS="extra arguments".
VENV ?= .venv
ARGS ?=
STAMP := $(VENV)/.setup-done
export EXTRAS
# Stands before every command that runs Python: the environment's programs first, and its Java where it brings one.
RUN = env PATH="$(abspath $(VENV))/bin:$$PATH" $$(test -s $(VENV)/java-home && echo JAVA_HOME="$$(cat $(VENV)/java-home)")

.PHONY: demo test test-compat test-stock test-browser fuzz check setup clean bench-recovery bench-data bench-state bench-kills

demo: setup
	@$(RUN) python jobs/demo.py $(ARGS)

test: setup
	@$(RUN) python -m tests $(ARGS)

# The oldest releases of what it is used with, in an environment of its own.
COMPAT = tests/core tests/test_tracking.py tests/test_tracking_parts.py tests/test_checkpoint.py tests/test_freeze.py \
  tests/test_reader.py tests/test_marks.py tests/test_estimator.py tests/cluster/test_churn.py
test-compat:
	@$(MAKE) --no-print-directory test VENV=build/compat EXTRAS=test,oldest ARGS="$(COMPAT) $(ARGS)"

# Churn schedules on a Horovod without the mends, as a cluster may have installed: processes may die, states may not.
test-stock: setup
	@$(RUN) python -m elastic_spark.build_horovod --stock --target build/stock
	@PYTHONPATH=build/stock $(RUN) python -m tests.chaos.fuzz --seeds 0:25 $(ARGS)

test-browser: setup
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { echo 'needs chromium and its driver: apt-get install -y chromium chromium-driver' >&2; exit 1; }
	@$(RUN) python -c 'import selenium' 2>/dev/null || $(RUN) python -m pip install -q -e '.[browser]'
	@$(RUN) python -m pytest tests/browser/check_pages.py $(ARGS)

check: setup
	@echo '[check] ruff' && $(RUN) ruff check -q . && $(RUN) ruff format -q --check .
	@echo '[check] mypy' && $(RUN) mypy
	@echo '[check] import rules' && $(RUN) lint-imports --no-logo

setup: $(STAMP)

# What the environment is made from. A change here, and only here, sets it up again.
$(STAMP): pyproject.toml .ci/setup elastic_spark/horovod_mends.py elastic_spark/build_horovod.py
	@.ci/setup $(VENV)
	@touch $@

# Measurements: each is one script, which says in its docstring what it does and which ARGS it takes.
bench-recovery: script := bench_recovery.py
bench-data:     script := bench_data.py
bench-state:    script := bench_state.py
bench-kills:    script := horovod_kills.py
bench-recovery bench-data bench-state bench-kills: setup
	@$(RUN) python tests/bench/$(script) $(ARGS)

# Churn schedules on real worker processes, without Spark, for as long as it takes: ARGS="--seeds 0:500".
fuzz: setup
	@$(RUN) python -m tests.chaos.fuzz $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
