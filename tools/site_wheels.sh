#!/bin/bash
# tools/site_wheels.sh: installs Sphinx and what it needs (PyPI wheels, docs/site/requirements.txt) into .venv-docs, apart from
# .venv, whose versions of the same packages tests depend on. Called by tools/setup.sh --docs; nothing else needs them.
# Exit code 9: they could not be installed; the message says what to do. It uses the variable PYTHON.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/live.sh
. tools/venv.sh
mark=.venv-docs/.installed
if cmp -s docs/site/requirements.txt "$mark"; then exit 0; fi
rm -rf .venv-docs
make_environment .venv-docs 11 "The site is built by Sphinx, which is for Python"
install_into .venv-docs Sphinx -r docs/site/requirements.txt
cp docs/site/requirements.txt "$mark"
