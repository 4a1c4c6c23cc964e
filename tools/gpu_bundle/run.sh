#!/bin/bash
# run.sh [--only PART] [--minutes N] [--limit N] [--out FOLDER]: runs the tests and benchmarks of this bundle on the
# GPUs of this machine, and writes one report.
#   --only PART    may be given several times. In the order in which they run:
#                    operators   doctor, attend --check, the attention operators against the oracle
#                    merges      merging partial results
#                    dense, ring, train, patterns, flex, longest     the parts of `annulus bench gpu`; flex:
#                                FlexAttention with the same patterns
#                    others      all other tests
#                    scaling, quickstart     the same work on 1, 2, 4, 8 GPUs; a short training
#                    memcheck    tests of kernels under compute-sanitizer, if it is here and a minute is left
#                  tests: operators, merges, others and memcheck; bench: dense to longest
#   --minutes N    how long it may take (default: 9); steps for which there is no time are left out, and named
#   --limit N      ends each case of a test, and each other step, after N seconds (default: 130, or a bit more than a fifth
#                  of --minutes if that is longer); scripts, FlexAttention, train and longest have up to twice as long
#   --out FOLDER   for the report (default: ./gpu-report), at most eight files at any moment: report.txt, report.json,
#                  journal.tsv (what ran), details.tar.gz (all output), running.* (the output of the step that runs)
# Called again with the same FOLDER and the same bundle it goes on: it runs what was left out, skipped or interrupted,
# and the report is that of all calls together. Results are on disk as soon as they are known, so nothing but the step
# that runs is lost if run.sh is killed; a test then goes on with the cases that have not run.
# run.sh -- COMMAND...: runs one command that finds the programs and libraries here, such as run.sh -- annulus bench gpu
# The machine needs an NVIDIA driver, and LibTorch of the version and for the CUDA in bundle.env: that in LIBTORCH
# (.../site-packages/torch, or an unpacked LibTorch), else the torch that python3 (or python3.12) imports. It needs
# neither MPI nor a network. This folder is only read. The exit code is 0 if nothing failed, also if there is no GPU and
# all steps are skipped.
# ANNULUS_ANY_LIBTORCH=1: accepts another version of LibTorch, with which programs may not start.
set -uo pipefail

bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
only=' ' minutes=9 most='' out=gpu-report command=()
devices=${ANNULUS_BUNDLE_DEVICES:-/dev} # tests set another folder
while (($#)); do
  case $1 in
    --only)
      case ${2-} in
        tests) only+='operators merges others memcheck ' ;;
        bench) only+='dense ring train patterns flex longest ' ;;
        operators | merges | dense | ring | train | patterns | flex | longest | others | scaling | quickstart | memcheck) only+="$2 " ;;
        *) echo "run.sh: --only needs tests, bench, or one of their parts (see --help), not \"${2-}\"" >&2 && exit 2 ;;
      esac
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
  mkdir -p "$out" && out=$(cd "$out" && pwd) && [[ -w $out ]] ||
    { echo "run.sh: $out cannot be written; name another folder with --out" >&2 && exit 8; }
fi
# shellcheck source=/dev/null
. "$bundle/bundle.env"
deadline=$((SECONDS + 60 * minutes))
# If a launcher or a batch system started this script, the ranks that it starts must not join that job.
unset "${!OMPI_@}" "${!PMIX_@}" "${!PMI_@}" "${!PRTE_@}" "${!SLURM_@}" "${!ANNULUS_WORLD@}"
# A short path, because MPI's sockets allow no long one.
scratch=$(mktemp -d /tmp/annulus.XXXXXX) || exit 8
python='' current=() step_pid='' latest='' kept='' began=0 worst=0
for p in python3 python3.12; do command -v "$p" >/dev/null && python=$p && break; done
export PYTHONDONTWRITEBYTECODE=1
end() {
  local rc=$? pid
  trap '' INT TERM HUP # a second signal must not interrupt the report
  # The shell's own list, because a process may exist before its number is in a variable.
  for pid in $(jobs -p); do kill "$pid" 2>/dev/null; done
  if ((${#command[@]} == 0)); then
    if ((${#current[@]})); then
      wait "$step_pid" # it still says what it knows
      note "${current[@]}" "left out" $((SECONDS - began)) "run.sh was ended from outside during it"
    fi
    [[ $kept ]] || keep
  fi
  wait
  rm -rf "$scratch"
  exit "$rc"
}
trap end EXIT
# The handler only notes the signal, and await() ends the script: bash 5.2 crashes now and then if it exits from a handler
# that runs within `read`.
interrupted=''
trap 'interrupted=1' INT TERM HUP

# Like `wait PID`, but a signal is handled at once. With `wait`, a signal that comes just before it would be handled
# only after the process has ended.
mkfifo "$scratch/never" && exec {never}<>"$scratch/never"
await() { # PID [WHEN]: if it still runs WHEN ($SECONDS), its errors say where it hangs
  local when=${2-}
  while kill -0 "$1" 2>/dev/null; do
    read -r -t 0.1 -u "$never"
    if [[ $interrupted ]]; then exit 130; fi
    if [[ $when ]] && ((SECONDS >= when)); then
      when=''
      timeout --kill-after=5 10 "$python" "$bundle/stuck.py" "$1" 2>>"$out/running.err" </dev/null &
    fi
  done
  wait "$1"
}

# ---- The report's folder. What a killed call leaves there is all that it knew: a line of the journal says which step
# began, and the output of that step is in running.out and running.err. When the step has ended, its output goes to
# details.tar.gz, which is replaced as a whole.

details=$scratch/details
declare -A attempts=() results=() # of each step, by its name
wanted() { [[ $only == ' ' || $only == *" $1 "* ]]; } # PART
journal() { # FIELD...
  local IFS=$'\t'
  printf '%s\n' "$*" >>"$out/journal.tsv"
}
fact() { journal fact "$1" "${2//[$'\t\n']/ }"; }
# note NAME PART KIND RESULT SECONDS REASON: records a step. RESULT is "began", an exit code, "skipped" or "left out".
note() {
  journal step "$1" "${attempts[$1]:=1}" "$2" "$3" "$4" "$5" "${6//[$'\t\n']/ }"
  results[$1]=$4
  [[ $4 == began ]] || printf '%-44s %s\n' "$1" "$4${6:+: $6}" >&2
}
log_of() { echo "$details/logs/$1.$2.$3"; } # NAME ATTEMPT out|err|nccl
# Moves the output of the step that ended to the details. Of a long output the beginning and the end are kept.
put_away() { # NAME ATTEMPT
  local stream from to size
  for stream in out err; do
    from=$out/running.$stream to=$(log_of "$1" "$2" $stream)
    [[ -e $from ]] || continue
    size=$(stat -c %s "$from")
    if ((size > 4 << 20)); then
      { head -c 1M "$from" && printf '\n... %s bytes ...\n' $((size - (4 << 20))) && tail -c 3M "$from"; } >"$to"
    else
      cp "$from" "$to"
    fi
  done
  # NCCL's own log has a file of its own, because tests count the lines of the others.
  for from in "$scratch"/nccl/*; do
    [[ -e $from ]] || continue
    { echo "== ${from##*/}" && tail -c 512K "$from"; } >>"$(log_of "$1" "$2" nccl)"
    rm -f "$from"
  done
}
# Puts away the output of the latest step and makes the report. $scratch/report is its summary or, with `--said NAME`,
# only the figures of this step.
keep() {
  [[ $latest ]] && put_away "$latest" "${attempts[$latest]}"
  cp "$out/clocks.csv" "$details" 2>/dev/null
  tar -C "$details" -czf "$scratch/packed" . && cp "$scratch/packed" "$out/details.tar.gz.new" &&
    mv "$out/details.tar.gz.new" "$out/details.tar.gz" && rm -f "$out"/running.*
  [[ ! $python ]] || "$python" "$bundle/report.py" "$out" "$@" >"$scratch/report" 2>&1
}
if ((!${#command[@]})); then
  mkdir -p "$details/logs" "$details/metrics" "$scratch"/{runs,nccl}
  if [[ $(head -n 1 "$out/journal.tsv" 2>/dev/null) == "bundle"$'\t'"$BUILT_DIGEST" ]]; then
    tar -C "$details" -xzf "$out/details.tar.gz" 2>/dev/null
    cp "$out/clocks.csv" "$details" 2>/dev/null
    [[ $(tail -c 1 "$out/journal.tsv") ]] && echo >>"$out/journal.tsv" # a killed call may have left half a line
    while IFS=$'\t' read -r line name attempt _ _ result _; do
      [[ $line == step ]] && attempts[$name]=$attempt results[$name]=$result && latest=$name
    done <"$out/journal.tsv"
    # The last step of a call that was killed.
    if [[ $latest && ! -e $(log_of "$latest" "${attempts[$latest]}" out) ]]; then
      put_away "$latest" "${attempts[$latest]}"
    fi
  else
    rm -f "$out"/{journal.tsv,details.tar.gz*,report.txt*,report.json*,clocks.csv}
    journal bundle "$BUILT_DIGEST"
  fi
  rm -f "$out"/running.*
  latest=''
  journal call "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
fi

# ---- LibTorch, Python, GPUs.

# shellcheck source=machine.sh
. "$bundle/machine.sh"
find_libtorch
count_gpus
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

read_ahead
note_facts
watch_gpus
note_machine
note_dmesg "at the start of the call of $(date -u +%Y-%m-%dT%H:%M:%SZ)"

# ---- Steps.

# The longest time of a step, so that two steps that hang do not use up the time of all others. It is never too short
# for a test of several ranks, because one that is cut is a failure and does not go on in the next call.
cap=${most:-$((minutes * 40 / 3 > 130 ? minutes * 40 / 3 : 130))}
reserve=0 # seconds that are reserved for later steps
left() { echo $((deadline - SECONDS - reserve)); }
at_most() { (($1 < $2)) && echo "$1" || echo "$2"; }
expected=0
# Whether a step has nothing left to do, because an earlier call ended it. Of a test, cases may be left after its time
# limit (124), or if cases.py has given up (75).
is_done() { # NAME KIND
  case ${results[$1]-} in
    '' | began | skipped | 'left out') return 1 ;;
    75 | 124) [[ $2 != gtest ]] ;;
    *) return 0 ;;
  esac
}
step() { # NAME PART KIND LIMIT COMMAND...; its exit code should be `expected`
  local name=$1 part=$2 kind=$3 wanted=$4 limit rc look=''
  limit=$(at_most "$wanted" "$(left)")
  shift 4
  if ((limit < 10)); then note "$name" "$part" "$kind" "left out" 0 "no time left of $minutes minutes" && return; fi
  [[ ${results[$name]-} ]] && ((++attempts[$name]))
  began=$SECONDS current=("$name" "$part" "$kind") latest=$name
  note "$name" "$part" "$kind" began 0 ''
  : >"$out/running.out" && : >"$out/running.err"
  (cd "$workfolder" && exec timeout --kill-after=15 "$limit" env "${environment[@]}" "$@") \
    >>"$out/running.out" 2>>"$out/running.err" </dev/null &
  step_pid=$! # in the background, so that Ctrl-C is handled at once
  # Before mpirun ends the ranks. cases.py looks at its program itself.
  if [[ $python && $kind != gtest ]]; then look=$((began + limit - 8)); fi
  await "$step_pid" "$look"
  rc=$?
  local reason=''
  if ((rc == 124 || rc == 137 && SECONDS - began >= limit)); then
    reason="did not end within $limit s" && rc=124
    if ((limit < wanted)) || [[ $kind == memcheck ]]; then reason="the time was up after $limit s" && rc='left out'; fi
  fi
  # A test that skips itself exits with 0, whatever else was expected.
  if [[ $rc != 'left out' ]] && ((rc != expected)) &&
    ! { ((rc == 0)) && grep -q '^SKIPPED: ' "$out/running.out"; }; then
    worst=1
    note_dmesg "after $name"
  fi
  note "$name" "$part" "$kind" "$rc" $((SECONDS - began)) "$reason"
  current=()
  keep --said "$name"
  cat "$scratch/report" >&2
  return 0
}
skip() { note "$1" "$2" "$3" skipped 0 "$4"; } # NAME PART KIND REASON

no_gpu="this machine has no GPU"
workfolder=$scratch
starts=''
if [[ ! $obstacle ]]; then
  in_bundle timeout --kill-after=5 120 "$annulus" version >"$scratch/version" 2>&1 </dev/null &
  if await $!; then
    starts=1
    [[ ${results[start]-} ]] && note start start plain 0 0 '' # an earlier call could not start it
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

nccl_log=(NCCL_DEBUG="${NCCL_DEBUG:-INFO}" NCCL_DEBUG_FILE="$scratch/nccl/%h.%p")
run_gtest() { # NAME PART PROCESSES LIMIT PROGRAM WORDS...; with `assigned`
  local name=$1 part=$2 limit=$4 runner=()
  cat "$details/logs/$name".[0-9]*.out >"$scratch/done" 2>/dev/null
  # A case that hangs leaves at least half of the step's time to the others. Without Python the program is run as it is.
  [[ $python ]] && runner=("$python" "$bundle/cases.py" --limit "$(at_most "$cap" $((limit / 2)))"
    --processes "$3" --time "$(at_most "$limit" "$(left)")" --done "$scratch/done")
  step "$name" "$part" gtest "$limit" env "${nccl_log[@]}" "${assigned[@]}" "${runner[@]}" "$bundle/tests/$5" "${@:6}"
}
run_mpi() { # NAME PART RANKS LIMIT TEST-PROGRAM WORDS...; with `assigned` and `mpi_words`
  local name=$1 part=$2 ranks=$3 limit=$4 program=$5 seconds mpirun
  shift 5
  seconds=$(at_most "$limit" "$(left)")
  mpirun=("$bundle/mpi/bin/mpirun" --timeout $((seconds - 5)))
  [[ $python ]] && mpirun=("$python" "$bundle/ranks.py" --time "$seconds" "$bundle/mpi/bin/mpirun")
  step "$name" "$part" mpi "$limit" env "${nccl_log[@]}" "${assigned[@]}" WANT_SIZE="$ranks" "${mpirun[@]}" \
    -np "$ranks" "${mpi_words[@]}" "$bundle/tests/$program" "$@"
}
ready() {
  why=$obstacle
  [[ $why ]] || { ((gpus)) || why=$no_gpu; }
  [[ ! $why ]]
}

run_memcheck() { # NAME PROGRAM WORDS...: a test again, with each access to the GPU's memory checked
  local sanitizer
  if ! ready; then skip "$1" memcheck memcheck "$why" && return; fi
  if ! sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer); then
    skip "$1" memcheck memcheck "there is no compute-sanitizer" && return
  fi
  if (($(left) < 60)); then note "$1" memcheck memcheck "left out" 0 "less than a minute was left" && return; fi
  # It takes as long as it takes: if the time is up, that is no failure.
  step "$1" memcheck memcheck "${most:-3600}" "$sanitizer" --tool memcheck --error-exitcode 99 "$bundle/tests/$2" "${@:3}"
}

# Runs the tests of this part that are not done. With "is_left", says only whether there are any; with "continue", runs
# only those whose time was up.
run_tests() { # PART [is_left|continue]
  local name part kind program processes expect limit variables mpi_args args
  while IFS=$'\t' read -r name part kind program processes expect limit variables mpi_args args <&3; do
    [[ $part == "$1" ]] && ! is_done "$name" "$kind" || continue
    [[ ${2-} == is_left ]] && return
    if [[ ${2-} == continue ]]; then
      [[ ${results[$name]-} == 124 || ${results[$name]-} == 'left out' ]] && (($(left) >= 30)) || continue
    fi
    if [[ ! $starts ]]; then skip "$name" "$part" "$kind" "$obstacle" && continue; fi
    read_test "$variables" "$mpi_args" "$args"
    workfolder=$scratch expected=$expect
    if [[ -d $bundle/runfiles ]]; then workfolder=$bundle/runfiles; fi
    case $kind in
      gtest) run_gtest "$name" "$part" "$processes" "$limit" "$program" "${words[@]}" ;;
      mpi) run_mpi "$name" "$part" "$processes" "$(at_most "$limit" "$cap")" "$program" "${words[@]}" ;;
      script) # it starts the program many times
        if [[ ! $python ]]; then skip "$name" "$part" "$kind" "no python3 here" && continue; fi
        step "$name" "$part" script "$(at_most "$limit" "${most:-$((2 * cap))}")" \
          env "${assigned[@]}" "$python" "$bundle/runfiles/$program" "${words[@]}"
        ;;
      memcheck) run_memcheck "$name" "$program" "${words[@]}" ;;
    esac
    workfolder=$scratch expected=0
  done 3<"$bundle/tests.tsv"
  [[ ${2-} != is_left ]]
}
# shellcheck source=measure.sh
. "$bundle/measure.sh"

# What tells most comes first (PARTS in collect.py). The operators leave time for the parts that come after them.
for part in dense ring train patterns; do
  if wanted $part && ! is_done "bench-$part" bench; then reserve=$((24 * minutes)); fi
done
if wanted others && run_tests others is_left; then reserve=$((30 * minutes)); fi
if wanted operators; then
  run_checks
  run_tests operators
fi
reserve=0
wanted merges && run_tests merges
run_bench dense "$cap"
run_bench ring "$cap"
run_model train "$((3 * cap / 2))"
run_bench patterns "$cap"
wanted flex && run_flex
longest=$(left)
wanted others && longest=$(at_most "$longest" $((2 * cap)))
run_model longest "$longest" --seconds $((longest > 10 ? longest * 8 / 10 : 8))
wanted others && run_tests others
# Whatever time is left goes to the tests whose time was up.
for part in operators merges others; do wanted $part && run_tests $part continue; done
wanted scaling && run_scaling
wanted quickstart && run_quickstart
wanted memcheck && run_tests memcheck

if [[ ! $python ]]; then
  echo "run.sh: no python3 here, so there is no report.json; the results are in $out/journal.tsv and details.tar.gz" >&2
  exit "$worst"
fi
note_dmesg "at the end"
keep
rc=$?
cat "$scratch/report"
[[ $interrupted ]] || kept=1 # Ctrl-C may have ended a part of keep, which end() then does again
exit "$rc"
