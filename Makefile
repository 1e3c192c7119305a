# make lab | test | check | demo: each sets up .venv first where that is needed. PYTHON=... chooses the interpreter.
SHELL := /bin/bash
PY := .venv/bin/python
LAB_NOTEBOOK ?= chapters/ch01_parallelism/ch01_parallelism.ipynb
LAB_FLAGS ?=
ROOT_FLAG := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.PHONY: help lab test check demo setup format release lock

help:
	@echo "make lab      set up everything and open JupyterLab on chapter 1"
	@echo "make test     set up everything and run all tests"
	@echo "make check    the tests that start no notebook"
	@echo "make demo     train the tiny model on 2 ranks, run part one of chapter 1, grade two submissions"
	@echo "make format   format and fix the code;  make release: chapters/ from solutions/;  make lock: constraints.txt anew"

setup:
	@PYTHON='$(PYTHON)' scripts/setup.sh

lab: setup
	@$(PY) -m jupyterlab $(ROOT_FLAG) --ServerApp.root_dir="$(CURDIR)" $(LAB_FLAGS) $(LAB_NOTEBOOK)

test: setup
	@$(PY) -m pytest

check: setup
	@$(PY) -m pytest -m "not notebook"

demo: setup
	@$(PY) -m vlmcourse.cli demo

format: setup
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

release: setup
	@$(PY) -m vlmcourse.grading.release

lock:
	@PYTHON='$(PYTHON)' scripts/lock.sh
