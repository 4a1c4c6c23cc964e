#!/bin/bash
# ./annulus docs: builds one site of the documents and of the references (subcommands, Python, C++), with search, and prints
# the path of its first page, which a browser opens without a network. docs/site/build.py says what it is made of.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_arguments docs "$@"
tools/setup.sh --docs
. tools/live.sh
# The reference of the subcommands is what they print, and `bench` is a program of its own.
build_or_exit //launcher:annulus //benchmarks/program:annulus_bench
.venv-docs/bin/python docs/site/build.py --program .bazel/bin/launcher/annulus --work .bazel/docs
