# The steps of run.sh that are not tests: checks of the program, benchmarks, training. run.sh reads this file and calls
# the functions, which share its variables.
# shellcheck shell=bash disable=SC2034,SC2154

run_checks() {
  [[ $starts ]] && ! is_done doctor plain && step doctor operators plain 60 "$annulus" doctor
  attend_check attend-check queries=704,keys=704,heads=8,kv_heads=2,dim=128,dtype=bf16,seed=7
  attend_check attend-check-window queries=512,keys=512,heads=4,kv_heads=4,dim=64,dtype=f32,seed=8 \
    --pattern '{ kind = "window", left = 100, right = 0 }'
}
attend_check() { # NAME RANDOM WORDS...
  is_done "$1" plain && return
  if ! ready; then skip "$1" operators plain "$why" && return; fi
  step "$1" operators plain "$cap" "$annulus" attend --device cuda --backward --check --random "${@:2}"
}
text_of_training() { # prints the options for another text if LibTorch has no Python sources to train on
  compgen -G "$torch/*.py" >/dev/null || printf -- '--set\ndata.train=["%s/text/documents.txt"]\n' "$bundle"
}

run_bench() { # PART LIMIT WORDS...
  wanted "$1" && ! is_done "bench-$1" bench || return
  if ! ready; then skip "bench-$1" "$1" bench "$why" && return; fi
  step "bench-$1" "$1" bench "$2" "$annulus" bench gpu --part "$1" "${@:3}"
}
run_model() { # PART LIMIT WORDS...
  mapfile -t text < <(text_of_training)
  run_bench "$1" "$2" --config "$bundle/configs/llama-1b.toml" "${@:3}" "${text[@]}"
}

run_flex() {
  is_done flex-attention flex && return
  if ! ready; then skip flex-attention flex flex "$why" && return; fi
  local reason='' compiler
  compiler=${CC:-$(command -v gcc || command -v clang)}
  if [[ ! $torch_python ]]; then
    reason="no Python here has this torch"
  elif [[ ! $compiler ]]; then
    reason="Triton needs a C compiler, and there is none"
  elif ! "$torch_python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null; then
    reason="Triton needs Python.h, and $torch_python has none"
  else
    timeout --kill-after=5 60 "$torch_python" -c 'import torch, triton' 2>"$details/logs/flex-import.err" </dev/null &
    await $! || reason="$torch_python cannot import torch and triton within 60 s"
  fi
  if [[ $reason ]]; then skip flex-attention flex flex "$reason" && return; fi
  # It runs in the environment of its own torch, not in that of the bundle.
  environment_before=("${environment[@]}")
  environment=(TMPDIR="$scratch" TORCHINDUCTOR_CACHE_DIR="$scratch/inductor" TRITON_CACHE_DIR="$scratch/triton" HOME="${HOME:-$scratch}")
  step flex-attention flex flex "${most:-$((2 * cap))}" "$torch_python" "$bundle/benchmarks/flex_attention.py"
  environment=("${environment_before[@]}")
}

run_quickstart() {
  is_done train-quickstart train && return
  if ! ready; then skip train-quickstart quickstart train "$why" && return; fi
  mapfile -t text < <(text_of_training)
  run_training quickstart train-quickstart "$cap" train "$bundle/configs/quickstart.toml" --set run.steps=200 "${text[@]}"
}
run_training() { # PART NAME LIMIT WORDS...: keeps the run's metrics and removes its checkpoints, which are large
  local log
  step "$2" "$1" train "$3" "$annulus" "${@:4}" --set device=cuda --set "run.folder=$scratch/runs" --set "run.name=$2"
  for log in "$scratch/runs/$2"-*/metrics.jsonl; do [[ -f $log ]] && cp "$log" "$details/metrics/$2.jsonl"; done
  rm -rf "$scratch/runs/$2"-*
  keep
}

# Runs the same work on 1, 2, 4 and 8 GPUs: tests with as many ranks, attention compared with the reference, and
# training.
run_scaling() {
  local n name kind program ranks expect limit variables mpi_args args
  if ! ready; then skip scaling scaling plain "$why" && return; fi
  if ((gpus < 2)); then skip scaling scaling plain "this machine has one GPU" && return; fi
  mapfile -t text < <(text_of_training)
  for n in 1 2 4 8; do
    is_done "scaling-$n" train && continue
    if ((n > gpus)); then skip "scaling-$n" scaling train "this machine has $gpus GPUs" && continue; fi
    if ((n > 1)); then
      while IFS=$'\t' read -r name _ kind program ranks expect limit variables mpi_args args <&3; do
        [[ $kind == mpi && $expect == 0 && $mpi_args == - && $args == - ]] || continue
        assigned=() mpi_words=()
        run_mpi "$name-over-$n" scaling "$n" "$(at_most "$limit" "$cap")" "$program"
      done 3< <(sort -t $'\t' -u -k4,4 "$bundle/tests.tsv")
      step "attend-over-$n" scaling plain "$cap" "$annulus" launch -n "$n" attend --device cuda --backward --check \
        --random queries=1024,keys=1024,heads=8,kv_heads=8,dim=64,dtype=bf16,seed=9 --layout zigzag --schedule ring
    fi
    run_training scaling "scaling-$n" "$cap" launch -n "$n" train "$bundle/configs/quickstart.toml" \
      --set run.steps=20 --set run.log_every=5 \
      --set data.context=65536 --set data.validation_fraction=0 --set validation.every=0 --set checkpoint.every=0 \
      --set model.layers=4 --set model.dim=1024 --set model.heads=8 --set model.ffn=2816 \
      --set model.dtype=bf16 "${text[@]}"
  done
}
