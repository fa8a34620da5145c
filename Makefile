# `make help` lists the targets. Nothing here reads standard input, so every target works in a pipe or from cron
# (only `make lab` wants a terminal).

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
# Two measurements at once, with -j, would slow each other.
.NOTPARALLEL:

# Settings are for make's command line; from the environment names this short would be accidents.
VENV = .venv
# Three on two cores, as tests often wait for processes of their own; two took some per cent longer, four no less.
WORKERS = $(if $(HAS_GPU),0,3)
FUZZ_S = 600
PAGE =
ARGS =

BIN := $(VENV)/bin
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU ' | head -1)
# An environment names its own path in every script, so a copy of it elsewhere still runs the original.
MOVED := $(filter-out $(CURDIR),$(file <$(VENV)/.a2lib-where))
# An environment that is there is up to date, unless another one is asked for.
ASKED := $(and $(filter install,$(MAKECMDGOALS)),$(filter PYTHON=% TORCH=% PINS=%,$(MAKEOVERRIDES)))
# One stamp for each kind of build, so that a machine that gains a GPU gets the CUDA build.
STAMP := $(VENV)/.a2lib-$(if $(HAS_GPU),cuda,cpu)

NOTEBOOKS := $(patsubst notebooks/%.ipynb,%,$(wildcard notebooks/*.ipynb))
RAN := $(NOTEBOOKS:%=build/data/.ran-%)
BOOK := book/_build/.complete
INDEX := book/_build/html/index.html

FIND = find $(1) -type f ! -path '*/_build/*' ! -path '*/__pycache__/*' ! -path '*/.ipynb_checkpoints/*' \
	! -name '.*' ! -name '*.lock' ! -name '*.tmp' 2>/dev/null | LC_ALL=C sort
LIBRARY := $(shell $(call FIND,src/a2lib))
# What a page is made from: the report reads data/ and what this machine measured, build/data.
BOOK_INPUTS := $(LIBRARY) _config.yml _toc.yml \
	$(shell $(call FIND,book notebooks data build/data))
# A change of the report or of theory measures nothing new.
EXPERIMENT_INPUTS := $(filter-out src/a2lib/report/%,$(LIBRARY))
# matplotlib's list of fonts: one that another environment left names fonts that are gone.
export MPLCONFIGDIR := $(CURDIR)/build/matplotlib

# What is set on make's own command line and is no setting of this file is a parameter of the notebook.
PARAMETERS = $(filter-out VENV=% WORKERS=% FUZZ_S=% PAGE=% ARGS=% PYTHON=% TORCH=% PINS=% A2LIB_DATA=% CUDA_VISIBLE_DEVICES=%, \
	$(MAKEOVERRIDES))

TARGETS := help install book html page pdf test fuzz lint lab pins clean distclean $(NOTEBOOKS)
.PHONY: $(TARGETS) FORCE

help:
	@echo 'make book                 run every notebook at the size of this machine, then build the book'
	@echo 'make html                 build the book from the data there is; measure nothing'
	@echo 'make page PAGE=flash      one page of the book, to look at a change: no links to other pages, figures numbered anew'
	@echo 'make pdf                  the built book as one PDF (Chromium or Chrome prints it)'
	@echo 'make test                 every test            (ARGS="tests/setup -x" to choose, WORKERS=n)'
	@echo 'make fuzz                 the property tests with other examples each time, for FUZZ_S=600 seconds'
	@echo 'make lint                 ruff, and the direction of imports'
	@echo 'make lab                  JupyterLab for the notebooks      (as root: ARGS=--allow-root)'
	@echo 'make flash SEQ_LEN=65536  measure into data/ (no GPU: build/data/): any parameter of the notebook, in capitals'
	@echo '                          (notebooks: $(NOTEBOOKS))'
	@echo 'make install              the environment alone (PYTHON=python3.12, TORCH=torch==2.11.0, PINS= for the newest)'
	@echo 'make pins                 write the versions installed here to dev/constraints.txt'
	@echo 'make clean, distclean     remove what can be made again; distclean: also $(VENV). Measured rows stay'

install: $(STAMP)

$(STAMP): pyproject.toml dev/constraints.txt dev/install.sh $(if $(MOVED)$(ASKED),FORCE)
	@dev/install.sh $(VENV)
	@touch $(VENV)/.a2lib-cpu $(if $(HAS_GPU),$(VENV)/.a2lib-cuda)

book: $(RAN)
	@$(MAKE) --no-print-directory html

# Measured rows go to build/data, beside the committed ones, never into them. exec: what ends make ends the run
# (here and below).
$(RAN): build/data/.ran-%: notebooks/%.ipynb $(EXPERIMENT_INPUTS) $(STAMP)
	@mkdir -p build/runs build/data
	exec env A2LIB_DATA="$$PWD/build/data" $(BIN)/papermill $< build/runs/$*.ipynb </dev/null
	@touch $@

html: $(BOOK)
	@echo "The book: $$PWD/$(INDEX)"

# About a sixth of the book's time. What a lone page says of other pages is missing in it, and warned of.
page: $(STAMP)
	@[ -f 'book/$(PAGE).md' ] || { echo 'make: no page book/$(PAGE).md; for example: make page PAGE=flash' >&2; exit 1; }
	@echo 'One page alone: what it links to on other pages (terms, labels, citations) is warned of below.'
	@env -u A2LIB_DATA $(BIN)/jupyter-book build book/$(PAGE).md --config book/_config.yml -q </dev/null

pdf: $(BOOK)
	@$(BIN)/python dev/print_book.py

# Built from nothing each time: Sphinx does not know that a page reads data/, and -W is silent about pages it skips.
$(BOOK): $(BOOK_INPUTS) build/.book-inputs $(STAMP)
	@for link in _config.yml _toc.yml notebooks; do \
		[ -L book/$$link ] && [ -e book/$$link ] || { \
			echo "make: book/$$link is not the symbolic link to ../$$link that git holds. Checked out as text (a zip file, or Windows): run 'git config core.symlinks true && git checkout -- book/$$link', or: ln -sfn ../$$link book/$$link" >&2; \
			exit 1; }; \
	done
	@rm -rf book/_build
	@$(BIN)/python -m a2lib.report.readme </dev/null
	env -u A2LIB_DATA $(BIN)/jupyter-book build book/ -W -n --keep-going </dev/null
	@touch $@

# Changes when a file is added or removed, which no file's own time shows. Two GPUs' rows are more names than a command takes.
build/.book-inputs: FORCE
	@mkdir -p build
	@$(call FIND,src/a2lib book notebooks data build/data) >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# exec: pytest's last line is the last line. The order of files is that of tests/conftest.py, slow ones first; pytest-xdist's
# own puts those of many tests first. Some two hundred processes import the package: it is compiled once.
test: $(STAMP)
	@exec env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) </dev/null

# Pass after pass, each with a seed of its own; the last one runs to its end.
fuzz: $(STAMP)
	@end=$$(( $$(date +%s) + $(FUZZ_S) )); \
	while [ $$(date +%s) -lt $$end ]; do \
		$(BIN)/python -m pytest -n $(WORKERS) -q -x -m hypothesis --hypothesis-profile=fuzz \
			--hypothesis-seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ') $(ARGS) </dev/null || exit 1; \
	done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python dev/format_book.py --check
	$(BIN)/python dev/check_imports.py

# A notebook's kernel runs in the notebook's folder, where a relative path would be another.
lab: $(STAMP)
	@case "$$A2LIB_DATA" in ''|/*|~*) ;; *) A2LIB_DATA="$$PWD/$$A2LIB_DATA" ;; esac; \
	exec $(BIN)/jupyter lab $(ARGS)

$(NOTEBOOKS): $(STAMP)
	@exec $(BIN)/python dev/run_notebook.py $@ $(PARAMETERS) </dev/null

pins: $(STAMP)
	@$(BIN)/python dev/pins.py

# What is no target: the nearest is named, by any Python 3.
.DEFAULT:
	@python3 -c 'import difflib, sys; near = difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1); \
		hint = f" (did you mean {near[0]}?)" if near else ""; \
		sys.exit(f"make: no target {sys.argv[1]}{hint}; make help lists them")' '$@' $(TARGETS)

clean:
	rm -rf book/_build build/cache build/runs build/.book-inputs build/data/.ran-* .jupyter_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) build/matplotlib src/a2lib.egg-info
