#!/bin/bash
# Shows what a longer context is worth (docs/long-context.md): a small model is trained on rows of 256 tokens and then
# continued on rows of 2,048, which two ranks share by the ring. Before and after, it measures perplexity by position and
# what the model retrieves from how far back. All of it takes less than 30 minutes on two cores.
#
#   run.sh [--short | --all] [FOLDER]
#
#   --short  a few steps of everything, in less than two minutes: every command runs, and nothing is learned
#   --all    also 4,096 tokens, the same curve on 1, 2 and 4 ranks, and attention patterns compared at equal compute, a
#            quarter of what the model above took
#
# FOLDER (by default long-context) must be new. It gets text/, runs/, the folder of the short model in Hugging Face's
# layout, results/ with an evaluation's JSON and pictures each, measured.jsonl and summary.md.
set -euo pipefail
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
annulus=${ANNULUS_SCRIPT:-$here/../../annulus}
size=usual out=long-context
while (($#)); do
  case $1 in
    -h | --help) usage && exit 0 ;;
    --short | --all) size=${1#--} ;;
    -*) echo "run.sh: there is no option $1: see run.sh --help" >&2 && exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
[[ $out ]] || { echo "run.sh: FOLDER is empty: name one" >&2 && exit 2; }
[[ ! -e $out ]] || { echo "run.sh: $out exists already: name another folder, or remove it" >&2 && exit 2; }

text=() short=() long=() trials=20 lengths=256,512,1024,2048 longest=2048
if [[ $size == short ]]; then
  text=(--short-documents 400 --long-documents 100 --held-out-documents 4)
  short=(--set run.steps=6 --set validation.every=0 --set checkpoint.every=0)
  long=(--set run.steps=4 --set validation.every=0 --set checkpoint.every=0)
  trials=1 lengths=256,2048
elif [[ $size == all ]]; then
  text=(--longest 4096)
  lengths=256,512,1024,2048,4096 longest=4096
fi

# Prints a command and runs it. What it took goes to measured.jsonl, as NAME.
measured() { # NAME COMMAND...
  local name=$1
  shift
  printf '\n$ annulus'
  printf ' %q' "${@:2}"
  printf '\n'
  python3 -B "$here/report.py" measure "$out/measured.jsonl" "$name" "$@"
}
train() { # NAME RANKS CONFIG TEXT [OPTION...]
  measured "train $1" "$annulus" launch -n "$2" train "$here/$3" --set "run.name=\"$1\"" --set "run.folder=\"$out/runs\"" \
    --set "data.train=[\"$out/text/$4/*.txt\"]" "${@:5}"
}
evaluate() { # NAME RANKS RUN LENGTH [OPTION...]
  measured "evaluate $1" "$annulus" launch -n "$2" evaluate "$out/runs/$3" --data "$out/text/held-out/*.txt" --packing document \
    --length "$4" --task kv --pairs 32 --lengths "$lengths" --depths 0,25,50,75,100 --trials "$trials" \
    --json "$out/results/$1.json" --pictures "$out/results/$1" --label "$1" "${@:5}"
}

mkdir -p "$out/results"
python3 -B "$here/make.py" "$out/text" "${text[@]}"

echo "== A model that was trained on rows of 256 tokens"
train short 2 short.toml short "${short[@]}"
evaluate before 2 short-001 "$longest"

echo "== The same model, continued on rows of 2,048"
measured "export short" "$annulus" export "$out/runs/short-001" "$out/short"
train long 2 long.toml long --init "$out/short" "${long[@]}"
evaluate after 2 long-001 "$longest" --beside "before=$out/results/before.json"

if [[ $size == all ]]; then
  echo "== The same numbers on 1, 2 and 4 ranks"
  for ranks in 1 2 4; do evaluate "ranks-$ranks" "$ranks" long-001 2048; done

  echo "== Patterns, each trained with a quarter of the operations of the model above"
  patterns=(
    full '{ kind = "causal" }'
    window '{ kind = "window", left = 255, right = 0 }'
    dilated '{ kind = "dilated", segment_lengths = [256, 1024, 2048], dilation_rates = [1, 4, 8], causal = true }'
    bigbird '{ kind = "blocks", map = "bigbird", block = 32, window_blocks = 4, global_blocks = 1, random_blocks = 4, causal = true }'
    strided '{ kind = "blocks", map = "strided", block = 32, window_blocks = 4, stride = 8, causal = true }'
  )
  for ((i = 0; i < ${#patterns[@]}; i += 2)); do
    name=${patterns[i]} pattern=${patterns[i + 1]}
    steps=$(python3 -B "$here/report.py" steps "$annulus" "$out/runs/long-001" "$pattern" 0.25)
    train "$name" 2 long.toml long --init "$out/short" --set "model.pattern=$pattern" --set "run.steps=$steps"
    evaluate "$name" 2 "$name-001" 2048
  done

  echo "== Once more, on rows of 4,096"
  measured "export long" "$annulus" export "$out/runs/long-001" "$out/long"
  train longest 2 long.toml longest --init "$out/long" --set data.context=4096 --set model.rope_theta=1e6 --set run.steps=1000
  evaluate longest 2 longest-001 4096 --beside "before=$out/results/before.json" --beside "after=$out/results/after.json"
fi

python3 -B "$here/report.py" print "$out"
