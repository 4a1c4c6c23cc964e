#!/bin/bash
# Corpora and tokenizers from what this machine has; `make.sh --help` and make.py say more.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=$("$here/../../tools/tokenizer_wheels.sh" --python)
exec "$python" -I -B "$here/make.py" "$@"
