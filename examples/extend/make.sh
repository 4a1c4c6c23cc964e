#!/bin/bash
# Makes FOLDER/model, a small model and its tokenizer in Hugging Face's layout, from files of this machine. It downloads
# only the tokenizer libraries, once. The model is a Llama of a million weights, trained on rows of 512 tokens
# (base.toml), with which docs/tutorials/extend.md begins.
#
#   make.sh FOLDER [OPTION ...] [-- OPTION ...]
#
# Options before -- go to examples/tokens/make.py, options after it to the training. FOLDER gets the folders text
# (corpora and tokenizers), shards (of tokens), runs (of the training) and model.
set -euo pipefail
[[ ${1-} == -h || ${1-} == --help || $# == 0 ]] && { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0; }
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
annulus=${ANNULUS_SCRIPT:-$here/../../annulus}
out=$1
[[ $out ]] || { echo "make.sh: FOLDER is empty: name one" >&2 && exit 2; }
shift
text=(--megabytes 4 --vocab 2000)
while (($#)) && [[ $1 != -- ]]; do
  text+=("$1")
  shift
done
shift $(($# > 0))

"$here/../tokens/make.sh" "$out/text" "${text[@]}"
"$annulus" tokenize --tokenizer "$out/text/tokenizers/llama3" --input "$out/text/python.jsonl" --output "$out/shards"
"$annulus" launch -n 2 train "$here/base.toml" --set "data.train=[\"$out/shards/*.tokens\"]" --set "run.folder=$out/runs" "$@"
"$annulus" export "$out/runs/base-001" "$out/model"
