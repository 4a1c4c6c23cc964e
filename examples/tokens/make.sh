#!/bin/bash
# Makes corpora and tokenizers from files of this machine; see `make.sh --help` and make.py.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=$("$here/../../tools/tokenizer_wheels.sh" --python)
exec "$python" -I -B "$here/make.py" "$@"
