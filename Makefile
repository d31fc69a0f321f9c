# PYTHON set: use that interpreter as it is, and install nothing.  Unset: make a virtual environment under .venv.
PYTHON3 := python3
ifdef PYTHON
  PY := $(PYTHON)
  BOOK_PY := $(PYTHON)
  TEST_BIN :=
  BOOK_BIN :=
  export PYTHONPATH := $(CURDIR)/src:$(PYTHONPATH)
else
  PY := .venv/test/bin/python
  BOOK_PY := .venv/book/bin/python
  TEST_BIN := .venv/test/bin/
  BOOK_BIN := .venv/book/bin/
  TEST_ENV := .venv/test/made
  BOOK_ENV := .venv/book/made
endif
PIP := -m pip install --quiet --disable-pip-version-check
BUILD := build . --warningiserror --nitpick --keep-going --quiet
HTML := _build/html/index.html

.PHONY: help book serve test lint unit notebooks site record verify clean

help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

book: $(BOOK_ENV) ## build the book and print the page to open
	$(BOOK_BIN)jupyter-book $(BUILD)
	@echo "open file://$(CURDIR)/$(HTML)"

serve: book ## build the book and serve it at http://localhost:8000
	$(BOOK_PY) -m http.server --bind localhost --directory _build/html 8000

test: lint unit notebooks site ## everything that needs no GPU: lint, unit tests, notebooks, site

lint: $(TEST_ENV) ## check the style of code and notebooks
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

unit: $(TEST_ENV) ## run the unit tests
	$(PY) -m pytest tests

notebooks: $(TEST_ENV) ## re-execute the notebooks and compare every output
	$(PY) -m pytest --nbval --nbval-current-env book

site: $(TEST_ENV) ## build the site and check it
	$(TEST_BIN)jupyter-book $(BUILD)
	$(PY) -m pytest tests/test_site.py --site _build/html

record: $(TEST_ENV) ## on a GPU: run every experiment, execute every notebook in place
	$(PY) -m memtraffic record book

verify: $(TEST_ENV) ## on a GPU: notebooks, unit tests, and each experiment against its recording
	rm -rf book/_build/verify
	$(PY) -m pytest --nbval --nbval-current-env book
	$(PY) -m pytest tests
	$(PY) -m memtraffic drift book

clean: ## remove everything that was built
	rm -rf .venv _build book/_build

.venv/test/made: requirements.txt pyproject.toml
	$(PYTHON3) -m venv .venv/test
	.venv/test/bin/python $(PIP) -r requirements.txt
	touch $@

.venv/book/made: requirements.txt
	$(PYTHON3) -m venv .venv/book
	.venv/book/bin/python $(PIP) $$(grep -E '^(jupyter-book|myst|sphinx)' requirements.txt)
	touch $@
