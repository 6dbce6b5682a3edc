# Everything a developer calls. Each target says what it does and is fast when there is nothing to do.
.DEFAULT_GOAL := help
.PHONY: help setup programs build demo test quick deny bench clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup: ## Install what is missing: packages, Python environment, SDK
	@scripts/setup.sh

programs: ## Build the static programs a node starts
	@scripts/programs.sh

build: setup ## Build corral into target/libexec
	@scripts/build.sh

demo: build ## Start 100 sandboxes that run a real test suite, and print what it took (root)
	@scripts/demo.sh $(ARGS)

test: build ## Run all checks and tests (root); ARGS="-k name" narrows the black-box tests
	@scripts/test.sh $(ARGS)

quick: setup programs ## Run what needs no root, in a few minutes
	@scripts/quick.sh

deny: ## Check licences, bans and sources of dependencies; builds cargo-deny once
	@scripts/deny.sh

bench: build ## Measure (root)
	@.venv/bin/python bench/run.py $(ARGS)

clean: ## Remove what was built; caches of downloads stay in target/demo and target/tests
	@cargo clean --quiet --release && rm -rf target/static target/static-init target/libexec .venv
