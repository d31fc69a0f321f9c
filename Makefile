# PYTHON set: use that interpreter as it is, and install nothing. Unset: make virtual environments under .venv.
PYTHON3 := python3
ifdef PYTHON
  PY := $(PYTHON)
  BOOK_PY := $(PYTHON)
  export PYTHONPATH := $(CURDIR)/src:$(PYTHONPATH)
else
  PY := .venv/test/bin/python
  BOOK_PY := .venv/book/bin/python
  TEST_ENV := .venv/test/made
  BOOK_ENV := .venv/book/made
  LAB_ENV := .venv/test/lab
  MUTANTS_ENV := .venv/test/mutants
  PARALLEL := --numprocesses logical --maxprocesses 8 --dist worksteal
  export OMP_NUM_THREADS := 1
endif
unexport PYTHONDONTWRITEBYTECODE # without bytecode, each process would compile pytest and the tests anew
PIP := -m pip install --quiet --disable-pip-version-check
JUPYTER_BOOK := -c 'from jupyter_book.cli.main import main; main()'
HTML := _build/html
TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0
OTHERS_newest := triton
OTHERS_colab := numpy==2.1.3 pandas==2.2.3 pytz
SEED := $(shell date +%Y%m%d)
COLAB := tests/book/test_colab.py::test_notebook_runs_as_on_colab

.PHONY: help book serve pdf notebook colab check test environments lint quick unit weekly matrix notebooks site mutants \
  record record-experiments record-notebooks verify verify-notebooks verify-tests verify-drift gpu clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 27

book: $(BOOK_ENV) ## build the book and print the page to open
	rm -rf $(HTML) # or it would keep what is no page any more
	$(BOOK_PY) $(JUPYTER_BOOK) build . --all --warningiserror --nitpick --keep-going --quiet
	$(BOOK_PY) src/memtraffic_book/colab.py $(HTML)/_sources/book --markdown $(HTML)/memtraffic.md
	$(BOOK_PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(HTML) . # the first page offers it
	rm -rf build # of pip, which would go into the next wheel
	$(BOOK_PY) -m zipfile -c $(HTML)/notebooks.zip $(HTML)/_sources/book/*.ipynb
	git archive --prefix memtraffic/ --output $(HTML)/memtraffic.tar.gz HEAD # and these
	@echo "open file://$(CURDIR)/$(HTML)/index.html"

serve: book ## build the book and serve it at http://localhost:8000
	$(BOOK_PY) -m http.server --bind localhost --directory $(HTML) 8000

pdf: $(BOOK_ENV) ## print the whole book to _build/memtraffic.pdf, with Chromium
	$(BOOK_PY) $(JUPYTER_BOOK) build . --builder singlehtml --quiet
	cp _build/singlehtml/book/intro.html _build/singlehtml/print.html # where its images are found
	chromium --headless=new --no-sandbox --disable-gpu --no-pdf-header-footer --virtual-time-budget=20000 \
	  --print-to-pdf=$(CURDIR)/_build/memtraffic.pdf file://$(CURDIR)/_build/singlehtml/print.html

notebook: $(LAB_ENV) ## open the notebooks in JupyterLab
	$(PY) -m jupyterlab book $(if $(filter 0,$(shell id -u)),--allow-root)

colab: $(BOOK_ENV) ## write notebooks for Colab, which need nothing else, to _build/colab
	$(BOOK_PY) src/memtraffic_book/colab.py _build/colab

check: ## lint, types and the quick tests
	$(MAKE) --jobs 2 lint quick

test: ## everything that needs no GPU
	$(MAKE) --jobs 2 environments
	$(MAKE) unit
	$(MAKE) --jobs 3 --output-sync=target lint notebooks site

environments: $(TEST_ENV) $(BOOK_ENV)

lint: $(TEST_ENV) ## check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

quick: $(TEST_ENV) ## run the unit tests that have no marker
	$(PY) -m pytest $(PARALLEL) -m "not slow and not oracle and not browser and not gpu"

unit: $(TEST_ENV) ## run the unit tests; of the slow oracles, samples
	$(PY) -m pytest $(PARALLEL) -m "not (slow and oracle)"

weekly: $(TEST_ENV) ## run all unit tests, with samples drawn by SEED, by default today's date
	$(PY) -m pytest $(PARALLEL) --hypothesis-seed=$(SEED)

matrix: $(addprefix matrix-,$(TRITONS)) matrix-colab ## try the Tritons that people have, and the NumPy of Colab

# The meters, the kernels and two chapters, with what is in _build/matrix/NAME in front of all else.
matrix-%: export PYTHONPATH = $(CURDIR)/_build/matrix/$*:$(CURDIR)/src
matrix-%: export TRITON_CACHE_DIR = $(CURDIR)/_build/matrix/cache-$*
matrix-%: $(TEST_ENV)
	test -d _build/matrix/$* || $(PY) $(PIP) install --no-deps --target _build/matrix/$* $(or $(OTHERS_$*),triton==$*)
	ls -d _build/matrix/$*/*.dist-info # or what is pinned would be tried, and nothing said
	$(PY) -m pytest $(PARALLEL) -m "not slow and not oracle and not browser and not gpu" \
	  tests/contract tests/meters tests/compile tests/test_triton_adapter.py
	$(PY) -m pytest tests/test_packaging.py --quiet
	# The deselected cell tells how many programs fit by the registers of the pinned compiler.
	$(PY) -m pytest --nbval book/masked.ipynb book/occupancy.ipynb --deselect "book/occupancy.ipynb::Cell 9"

notebooks: $(TEST_ENV) ## re-execute the notebooks, compare every output, try the solutions
	$(PY) -m pytest --nbval $(PARALLEL) --dist loadfile

site: book $(TEST_ENV) ## build the book and check its pages
	$(PY) -m pytest tests/book/test_site.py --site $(HTML)

mutants: $(MUTANTS_ENV) ## plant one-line faults in the package and list those that no test sees
	$(PY) -m tests.mutation

record: record-experiments record-notebooks ## on a GPU: measure everything anew, in two steps

record-experiments: $(TEST_ENV) gpu ## on a GPU: run every experiment, write book/recordings/
	$(PY) -m memtraffic_book record

record-notebooks: $(TEST_ENV) ## draw the figures and execute the notebooks in place, from the recordings
	$(PY) -m memtraffic_book draw
	$(PY) -m memtraffic_book notebooks

verify: verify-drift verify-notebooks verify-tests ## on a GPU: all comparisons, in three steps

verify-drift: $(TEST_ENV) gpu ## on a GPU: measure everything again, compare each number with its recording
	$(PY) -m memtraffic_book drift

verify-notebooks: $(TEST_ENV) gpu ## on a GPU: re-execute the notebooks, compare all but measured numbers
	$(PY) -m pytest --nbval

verify-tests: $(TEST_ENV) gpu ## on a GPU: run the unit tests, but for those that need no GPU to be sure
	$(PY) -m pytest $(PARALLEL) -m "not oracle and not browser" --deselect $(COLAB)
	$(PY) -m pytest $(COLAB) # which measure, so nothing else may run

gpu: $(TEST_ENV)
	@$(PY) -c "import torch; torch.cuda.is_available() or exit('there is no GPU here')"

clean: ## remove everything that was built
	rm -rf .venv _build book/_build

.venv/test/made: requirements.txt constraints-test.txt pyproject.toml
	$(PYTHON3) -m venv .venv/test
	.venv/test/bin/python $(PIP) -r requirements.txt -c constraints-test.txt
	touch $@

.venv/test/lab: .venv/test/made
	.venv/test/bin/python $(PIP) -r requirements.txt -c constraints-test.txt jupyterlab==4.6.6
	touch $@

.venv/test/mutants: .venv/test/made
	.venv/test/bin/python $(PIP) -r requirements.txt -c constraints-test.txt cosmic-ray==8.7.0
	touch $@

.venv/book/made: requirements.txt constraints-book.txt
	$(PYTHON3) -m venv .venv/book
	.venv/book/bin/python $(PIP) -c constraints-book.txt $$(grep -E '^(brython|jupyter-book|myst|sphinx)' requirements.txt)
	touch $@
