#!/bin/bash
# run.sh [--only PART] [--minutes N] [--limit N] [--out FOLDER]: runs the tests and benchmarks of this bundle on the
# GPUs of this machine, and writes one report.
#   --only PART    tests (also doctor and attend --check), bench, train or scaling; may be given several times
#   --minutes N    how long it may take (default: 9); steps for which there is no time are left out, and named
#   --limit N      ends each step after N seconds at the latest (default: 120 for 9 minutes, in proportion to --minutes)
#   --out FOLDER   for the report (default: ./gpu-report): report.txt, report.json, and details.tar.gz with all output
# The report is made again after each part, and when run.sh is ended from outside (Ctrl-C, TERM), with what was
# measured.
# run.sh -- COMMAND...: runs one command that finds the programs and libraries here, such as run.sh -- annulus bench gpu
# The machine needs an NVIDIA driver, and LibTorch of the version in bundle.env: that in LIBTORCH
# (.../site-packages/torch, or an unpacked LibTorch), else the torch that python3 (or python3.12) imports. It needs
# neither MPI nor a network. This folder is only read. The exit code is 0 if nothing failed, also if there is no GPU and
# all steps are skipped.
# ANNULUS_ANY_LIBTORCH=1: accepts another version of LibTorch, with which programs may not start.
set -uo pipefail

bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
only=() minutes=9 most='' out=gpu-report command=()
devices=${ANNULUS_BUNDLE_DEVICES:-/dev} # tests set another folder
while (($#)); do
  case $1 in
    --only)
      only+=("${2-}")
      [[ ${2-} =~ ^(tests|bench|train|scaling)$ ]] ||
        { echo "run.sh: --only tests, bench, train or scaling; not \"${2-}\"" >&2 && exit 2; }
      shift 2
      ;;
    --minutes)
      minutes=${2-}
      [[ $minutes =~ ^[1-9][0-9]{0,3}$ ]] || { echo "run.sh: --minutes needs a number from 1 to 9999" >&2 && exit 2; }
      shift 2
      ;;
    --out)
      out=${2-}
      [[ $out ]] || { echo "run.sh: --out needs a folder" >&2 && exit 2; }
      shift 2
      ;;
    --limit)
      most=${2-}
      [[ $most =~ ^[1-9][0-9]{0,4}$ ]] || { echo "run.sh: --limit needs a number of seconds" >&2 && exit 2; }
      shift 2
      ;;
    --)
      command=("${@:2}")
      ((${#command[@]})) || { echo "run.sh: a command is expected after --" >&2 && exit 2; }
      break
      ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$bundle/run.sh" && exit 0 ;;
    *) echo "run.sh: unknown option $1; see --help" >&2 && exit 2 ;;
  esac
done
if ((!${#command[@]})); then
  mkdir -p "$out/logs" "$out/xml" "$out/bench" && out=$(cd "$out" && pwd) && [[ -w $out ]] ||
    { echo "run.sh: $out cannot be written; name another folder with --out" >&2 && exit 8; }
  rm -f "$out"/logs/* "$out"/xml/* "$out"/bench/* "$out"/steps.tsv "$out"/facts.tsv "$out"/report.* "$out"/*.csv "$out"/details.tar.gz
fi
# shellcheck source=/dev/null
. "$bundle/bundle.env"
deadline=$((SECONDS + 60 * minutes))
# If a launcher or a batch system started this script, the ranks that it starts must not join that job.
unset "${!OMPI_@}" "${!PMIX_@}" "${!PMI_@}" "${!PRTE_@}" "${!SLURM_@}" "${!ANNULUS_WORLD@}"
# A short path, because MPI's sockets allow no long one.
scratch=$(mktemp -d /tmp/annulus.XXXXXX) || exit 8
python='' current=() began=0 worst=0
for p in python3 python3.12; do command -v "$p" >/dev/null && python=$p && break; done
export PYTHONDONTWRITEBYTECODE=1
end() {
  local rc=$? pid
  trap '' INT TERM HUP # a second signal must not interrupt the report
  # The shell's own list, because a process may exist before its number is in a variable.
  for pid in $(jobs -p); do kill "$pid" 2>/dev/null; done
  if ((${#command[@]} == 0)); then
    ((${#current[@]})) && note "${current[@]}" "left out" $((SECONDS - began)) "run.sh was ended from outside during it"
    report
    pack
  fi
  wait
  rm -rf "$scratch"
  ((${#command[@]})) || rm -rf "$out/runs" # checkpoints of an interrupted run
  exit "$rc"
}
trap end EXIT
trap 'exit 130' INT TERM HUP

# Like `wait PID`, but a signal is handled at once. With `wait`, a signal that comes just before it would be handled
# only after the process has ended.
mkfifo "$scratch/never" && exec {never}<>"$scratch/never"
await() { # PID
  while kill -0 "$1" 2>/dev/null; do read -r -t 0.1 -u "$never"; done
  wait "$1"
}

report() { # makes the report from the results so far
  [[ ! $python ]] || "$python" "$bundle/report.py" "$out" >"$scratch/report" 2>&1
}
pack() { # packs the files from which the report was made into one, because few files are easy to copy back
  local name details=()
  for name in logs xml bench steps.tsv facts.tsv gpus.csv clocks.csv; do [[ -e $out/$name ]] && details+=("$name"); done
  tar -C "$out" -czf "$out/details.tar.gz" "${details[@]}" 2>/dev/null
  (($? <= 1)) || return 0 # 1: a file was still being written
  (cd "$out" && rm -rf "${details[@]}")
}

wanted() { # PART
  ((${#only[@]} == 0)) || [[ " ${only[*]} " == *" $1 "* ]]
}
fact() { printf '%s\t%s\n' "$1" "${2//[$'\t\n']/ }" >>"$out/facts.tsv"; }
# note NAME PART KIND RESULT SECONDS REASON: records a step. RESULT is an exit code, "skipped" or "left out".
note() {
  printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$5" "${6//[$'\t\n']/ }" >>"$out/steps.tsv"
  printf '%-44s %s\n' "$1" "$4${6:+: $6}" >&2
}

# ---- LibTorch, Python, GPUs.

find_torch() { # PYTHON: prints where its torch is, without importing it
  "$1" -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")' 2>/dev/null
}
torch=${LIBTORCH-} torch_python=''
for p in python3 python3.12; do
  command -v "$p" >/dev/null || continue
  found=$(find_torch "$p")
  [[ $found ]] || continue
  [[ $torch ]] || torch=$found
  [[ $found == "$torch" ]] && torch_python=$p && break
done
obstacle='' kind=fault # why the program cannot run; kind: "fault" counts as a failure, "none" (no GPU) does not
if [[ ! $torch ]]; then
  obstacle="no LibTorch: LIBTORCH is not set, and neither python3 nor python3.12 has torch; set LIBTORCH=/path/to/libtorch"
elif [[ ! -e $torch/lib/libtorch_cpu.so ]]; then
  obstacle="there is no lib/libtorch_cpu.so in $torch; LIBTORCH should be .../site-packages/torch, or an unpacked LibTorch"
fi
version=unknown
if [[ ! $obstacle ]]; then
  for file in "$torch/version.py" "$torch/build-version"; do
    [[ -r $file ]] || continue
    version=$(grep -oE '[0-9]+\.[0-9]+\.[0-9]+' "$file" | head -n 1)
    break
  done
  if [[ ${version%.*} != "${BUILT_LIBTORCH%.*}" && ! ${ANNULUS_ANY_LIBTORCH-} ]]; then
    obstacle="LibTorch $version in $torch, but this bundle was built with $BUILT_LIBTORCH, and only ${BUILT_LIBTORCH%.*} fits it; make a bundle with that one, or set ANNULUS_ANY_LIBTORCH=1"
  elif [[ ! -e $torch/lib/libtorch_cuda.so ]]; then
    obstacle="the LibTorch in $torch has no CUDA (no lib/libtorch_cuda.so)"
  fi
fi
gpus=0
if [[ -e $devices/nvidiactl ]]; then gpus=$(compgen -G "$devices/nvidia[0-9]*" | wc -l); fi
if [[ ${CUDA_VISIBLE_DEVICES+set} ]]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
  ((${#visible[@]} < gpus)) && gpus=${#visible[@]}
  [[ ${visible[0]-} == -1 ]] && gpus=0
fi
# On a machine without a GPU, it is no failure if LibTorch is missing or has another version.
((gpus)) || kind=none

libraries=$bundle/lib:$torch/lib
for folder in "${torch%/*}"/nvidia/*/lib; do [[ -d $folder ]] && libraries+=:$folder; done
libraries+=${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
environment=(
  LD_LIBRARY_PATH="$libraries" LIBTORCH="$torch" TMPDIR="$scratch" HOME="${HOME:-$scratch}"
  MPI_HOME="$bundle/mpi" OPAL_PREFIX="$bundle/mpi" OPAL_BINDIR="$bundle/mpi/bin" OPAL_LIBDIR="$bundle/lib"
  OPAL_PKGLIBDIR="$bundle/mpi/plugins" OPAL_PKGDATADIR="$bundle/mpi/share" OPAL_SYSCONFDIR="$bundle/mpi/etc"
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  TEST_TMPDIR="$scratch" ANNULUS_PROGRAM=annulus
)
# The C library may lack arc4random, which libraries here need (entropy.c).
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) && glibc=${glibc#* } || glibc=unknown
if [[ $glibc == 2.* ]] && ((${glibc#2.} < 36)) || [[ ${ANNULUS_BUNDLE_ENTROPY-} ]]; then
  environment+=(LD_PRELOAD=libannulus_entropy.so)
fi
in_bundle() { env "${environment[@]}" "$@"; }
annulus=$bundle/bin/annulus

if ((${#command[@]})); then
  [[ ! $obstacle ]] || { echo "run.sh: $obstacle" >&2 && exit 9; }
  in_bundle PATH="$bundle/bin:$bundle/mpi/bin:$PATH" "${command[@]}"
  exit
fi

fact built_from "$BUILT_COMMIT"
fact "annulus" "$BUILT_ANNULUS"
fact "built with" "LibTorch $BUILT_LIBTORCH, CUDA $BUILT_CUDA, NCCL $BUILT_NCCL, Open MPI $BUILT_MPI, $BUILT_COMPILER"
fact "date" "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
fact "system" "$( (. /etc/os-release && echo "$PRETTY_NAME") 2>/dev/null || echo unknown), Linux $(uname -r), glibc $glibc"
fact "cpu" "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(getconf _NPROCESSORS_ONLN) cores"
fact "memory" "$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
fact "gpus" "$gpus"
fact "driver" "$(sed -n 's/^NVRM version: //p' /proc/driver/nvidia/version 2>/dev/null)"
fact "libtorch" "$version, ${torch:-none}"
fact "libtorch's wheels" "$(for d in "${torch%/*}"/nvidia_*.dist-info; do [[ -d $d ]] && basename "$d" .dist-info; done | paste -sd' ')"
if ((gpus)) && command -v nvidia-smi >/dev/null; then
  # If the driver does not know one of the fields, nvidia-smi prints nothing. Then only fields that all drivers know are
  # requested.
  for fields in ,clocks.max.sm,clocks.max.mem,clocks.sm,memory.total,power.limit,mig.mode.current,persistence_mode ''; do
    timeout 30 nvidia-smi --query-gpu=index,name,uuid,driver_version$fields --format=csv \
      >"$out/gpus.csv" 2>"$out/logs/nvidia-smi.err" </dev/null &
    await $! && break
    rm -f "$out/gpus.csv"
  done
  timeout 30 nvidia-smi topo -m >"$out/logs/topology.out" 2>&1 </dev/null &
  await $!
  # Records the actual clocks, temperature and power while the steps run.
  stdbuf -oL nvidia-smi --query-gpu=index,clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv,noheader,nounits -lms 500 \
    >"$out/clocks.csv" 2>/dev/null </dev/null &
fi

# ---- Steps.

# The longest time of a step, so that two steps that hang do not use up the time of all others.
cap=${most:-$((minutes * 40 / 3 > 60 ? minutes * 40 / 3 : 60))}
reserve=0 # seconds that are reserved for later steps
left() { echo $((deadline - SECONDS - reserve)); }
allowed() { # LIMIT: prints the seconds that a step with this limit may take now
  local limit=$1 now
  now=$(left)
  ((limit > cap)) && limit=$cap
  ((limit > now)) && limit=$now
  echo "$limit"
}
expected=0
step() { # NAME PART KIND LIMIT COMMAND...; its exit code should be `expected`
  local name=$1 part=$2 kind=$3 limit rc pid
  limit=$(allowed "$4")
  shift 4
  if (($(left) < 10)); then note "$name" "$part" "$kind" "left out" 0 "no time left of $minutes minutes" && return; fi
  began=$SECONDS current=("$name" "$part" "$kind")
  (cd "$workfolder" && exec timeout --kill-after=15 "$limit" env "${environment[@]}" "$@") \
    >"$out/logs/$name.out" 2>"$out/logs/$name.err" </dev/null &
  pid=$! # in the background, so that Ctrl-C is handled at once
  await "$pid"
  rc=$?
  local reason=''
  if ((rc == 124 || rc == 137 && SECONDS - began >= limit)); then reason="did not end within $limit s" && rc=124; fi
  # A test that skips itself exits with 0, whatever else was expected.
  if ((rc != expected)) && ! { ((rc == 0)) && grep -q '^SKIPPED: ' "$out/logs/$name.out"; }; then worst=1; fi
  note "$name" "$part" "$kind" "$rc" $((SECONDS - began)) "$reason"
  current=()
  return 0
}
skip() { note "$1" "$2" "$3" skipped 0 "$4"; } # NAME PART KIND REASON

no_gpu="this machine has no GPU"
workfolder=$out
starts=''
if [[ ! $obstacle ]]; then
  in_bundle timeout 120 "$annulus" version >"$scratch/version" 2>&1 </dev/null &
  if await $!; then
    starts=1
  else
    obstacle="the program does not start: $(tail -n 1 "$scratch/version")"
  fi
fi
if [[ $obstacle ]]; then
  if [[ $kind == fault ]]; then
    note start start plain 1 0 "$obstacle"
    worst=1
  else
    note start start plain skipped 0 "$no_gpu, and $obstacle"
  fi
fi
fact "cannot run" "$obstacle"

# Parses fields of a line of tests.tsv into words, assigned and mpi_words.
read_test() { # ENV MPI_ARGS ARGS
  words=() assigned=() mpi_words=()
  [[ $1 == - ]] || read -ra assigned <<<"$1"
  [[ $2 == - ]] || read -ra mpi_words <<<"$2"
  [[ $3 == - ]] || eval "words=($3)" # with the quoting of Bazel's args; $bundle is this folder
}

run_mpi() { # NAME PART RANKS LIMIT TEST-PROGRAM WORDS...; with `assigned` and `mpi_words`
  local name=$1 part=$2 ranks=$3 limit=$4 program=$5
  shift 5
  step "$name" "$part" mpi "$limit" env "${assigned[@]}" WANT_SIZE="$ranks" "$bundle/mpi/bin/mpirun" \
    --timeout $(($(allowed "$limit") - 5)) -np "$ranks" "${mpi_words[@]}" "$bundle/tests/$program" "$@"
}

run_tests() { # KIND: the tests of this kind
  local name kind program ranks expect limit variables mpi_args args
  while IFS=$'\t' read -r name kind program ranks expect limit variables mpi_args args <&3; do
    [[ $kind == "$1" ]] || continue
    if [[ ! $starts ]]; then skip "$name" tests "$kind" "$obstacle" && continue; fi
    read_test "$variables" "$mpi_args" "$args"
    workfolder=$out expected=$expect
    if [[ -d $bundle/runfiles ]]; then workfolder=$bundle/runfiles; fi
    case $kind in
      gtest)
        step "$name" tests gtest "$limit" env "${assigned[@]}" GTEST_OUTPUT="xml:$out/xml/$name.xml" \
          "$bundle/tests/$program" "${words[@]}"
        ;;
      mpi) run_mpi "$name" tests "$ranks" "$limit" "$program" "${words[@]}" ;;
      script)
        if [[ ! $python ]]; then skip "$name" tests "$kind" "no python3 here" && continue; fi
        step "$name" tests script "$limit" env "${assigned[@]}" "$python" "$bundle/runfiles/$program" "${words[@]}"
        ;;
    esac
    workfolder=$out expected=0
  done 3<"$bundle/tests.tsv"
}
run_checks() {
  [[ $starts ]] && step doctor tests plain 60 "$annulus" doctor
  if ! ready; then skip attend-check tests plain "$why" && return; fi
  step attend-check tests plain 120 "$annulus" attend --device cuda --backward --check \
    --random queries=704,keys=704,heads=8,kv_heads=2,dim=128,dtype=bf16,seed=7
  step attend-check-window tests plain 120 "$annulus" attend --device cuda --backward --check \
    --random queries=512,keys=512,heads=4,kv_heads=4,dim=64,dtype=f32,seed=8 \
    --pattern '{ kind = "window", left = 100, right = 0 }'
}
ready() {
  why=$obstacle
  [[ $why ]] || { ((gpus)) || why=$no_gpu; }
  [[ ! $why ]]
}

text_of_training() { # prints the options for another text if LibTorch has no Python sources to train on
  compgen -G "$torch/*.py" >/dev/null || printf -- '--set\ndata.train=["%s/text/documents.txt"]\n' "$bundle"
}

run_attention_bench() {
  local part
  for part in dense ring patterns; do
    if ! ready; then skip "bench-$part" bench bench "$why" && continue; fi
    step "bench-$part" bench bench 150 "$annulus" bench gpu --part "$part" --json "$out/bench/$part.json"
  done
}

run_model() { # PART LIMIT
  local limit model=$bundle/configs/llama-1b.toml
  if ! ready; then skip "bench-$1" bench bench "$why" && return; fi
  if [[ ! -e $model ]]; then skip "bench-$1" bench bench "the bundle has no configs/llama-1b.toml" && return; fi
  mapfile -t text < <(text_of_training)
  limit=$(allowed "$2")
  step "bench-$1" bench bench "$limit" "$annulus" bench gpu --part "$1" --seconds $((limit > 10 ? limit * 8 / 10 : 8)) --config "$model" \
    --json "$out/bench/$1.json" "${text[@]}"
}

run_flex() {
  if ! ready; then skip flex-attention bench plain "$why" && return; fi
  local reason='' compiler
  compiler=${CC:-$(command -v gcc || command -v clang)}
  if [[ ! $torch_python ]]; then
    reason="no Python here has this torch"
  elif [[ ! $compiler ]]; then
    reason="Triton needs a C compiler, and there is none"
  elif ! "$torch_python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null; then
    reason="Triton needs Python.h, and $torch_python has none"
  else
    timeout 60 "$torch_python" -c 'import torch, triton' 2>"$out/logs/flex-import.err" </dev/null &
    await $! || reason="$torch_python cannot import torch and triton within 60 s"
  fi
  if [[ $reason ]]; then skip flex-attention bench plain "$reason" && return; fi
  # It runs in the environment of its own torch, not in that of the bundle.
  environment_before=("${environment[@]}")
  environment=(TMPDIR="$scratch" TORCHINDUCTOR_CACHE_DIR="$scratch/inductor" TRITON_CACHE_DIR="$scratch/triton" HOME="${HOME:-$scratch}")
  step flex-attention bench flex 240 "$torch_python" "$bundle/benchmarks/flex_attention.py"
  environment=("${environment_before[@]}")
}

run_quickstart() {
  if ! ready; then skip train-quickstart train train "$why" && return; fi
  mapfile -t text < <(text_of_training)
  step train-quickstart train train 150 "$annulus" train "$bundle/configs/quickstart.toml" --set device=cuda \
    --set run.steps=200 --set "run.folder=$out/runs" --set run.name=quickstart "${text[@]}"
  keep_metrics quickstart
}
keep_metrics() { # RUN: keeps its metrics and removes its checkpoints, which are large
  local log
  for log in "$out/runs/$1"-*/metrics.jsonl; do [[ -f $log ]] && cp "$log" "$out/bench/$1.jsonl"; done
  rm -rf "$out/runs/$1"-*
}

# Runs the same work on 1, 2, 4 and 8 GPUs: tests with as many ranks, attention compared with the reference, and
# training.
run_scaling() {
  local n name kind program ranks expect limit variables mpi_args args
  if ! ready; then skip scaling scaling plain "$why" && return; fi
  if ((gpus < 2)); then skip scaling scaling plain "this machine has one GPU" && return; fi
  mapfile -t text < <(text_of_training)
  for n in 1 2 4 8; do
    if ((n > gpus)); then skip "scaling-$n" scaling train "this machine has $gpus GPUs" && continue; fi
    if ((n > 1)); then
      while IFS=$'\t' read -r name kind program ranks expect limit variables mpi_args args <&3; do
        [[ $kind == mpi && $expect == 0 && $mpi_args == - && $args == - ]] || continue
        assigned=() mpi_words=()
        run_mpi "$name-over-$n" scaling "$n" "$limit" "$program"
      done 3< <(sort -t $'\t' -u -k3,3 "$bundle/tests.tsv")
      step "attend-over-$n" scaling plain 120 "$annulus" launch -n "$n" attend --device cuda --backward --check \
        --random queries=1024,keys=1024,heads=8,kv_heads=8,dim=64,dtype=bf16,seed=9 --layout zigzag --schedule ring
    fi
    step "scaling-$n" scaling train 150 "$annulus" launch -n "$n" train "$bundle/configs/quickstart.toml" --set device=cuda \
      --set "run.folder=$out/runs" --set "run.name=scaling-$n" --set run.steps=20 --set run.log_every=5 \
      --set data.context=65536 --set data.validation_fraction=0 --set validation.every=0 --set checkpoint.every=0 \
      --set model.layers=4 --set model.dim=1024 --set model.heads=8 --set model.ffn=2816 \
      --set model.dtype=bf16 "${text[@]}"
    keep_metrics "scaling-$n"
  done
}

# The steps that tell most come first. Steps that may hang, with ranks that wait for one another, come after the others.
if wanted tests; then
  run_checks
  wanted bench && reserve=$((24 * minutes))
  run_tests gtest
  reserve=0
  report
fi
if wanted bench; then
  run_attention_bench
  run_model train 180
  report
fi
if wanted tests; then
  run_tests mpi
  report
  cap_before=$cap cap=${most:-$((2 * cap))} # scripts start the program many times
  run_tests script
  cap=$cap_before
  report
fi
if wanted scaling; then
  run_scaling
  report
fi
if wanted train; then
  run_quickstart
  report
fi
if wanted bench; then
  run_flex
  report
  cap=${most:-$((60 * minutes))}
  run_model longest "$(left)" # the last step may use all the time that is left
fi

if [[ ! $python ]]; then
  echo "run.sh: no python3 here, so there is no report.json; the results are in $out/details.tar.gz" >&2
  exit "$worst"
fi
report
rc=$?
cat "$scratch/report"
exit "$rc"
