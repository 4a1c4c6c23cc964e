#!/bin/bash
# Tests ./annulus and tools/setup.sh as a user runs them, in a folder of their own. Small scripts replace Bazel and apt-get;
# the latter must never be called. Libraries are looked for on the real machine.
#   setup_test.sh ANNULUS SCRIPTS_OF_TOOLS...
set -u
scripts=()
for script; do scripts+=("$(readlink -f "$script")"); done
work=$(mktemp -d /tmp/annulus_setup_test.XXXXXX) # a place that another user can read
trap 'rm -rf "$work"' EXIT
failures=0

fail() { echo "FAILED: $*" && ((++failures)); }
# Runs a command; its exit code goes to rc, its output to $work/out.
run() { "$@" >"$work/out" 2>&1 </dev/null && rc=0 || rc=$?; }
exits() { [[ $rc == "$1" ]] || { fail "$2: exit code $rc, expected $1; it said:" && cat "$work/out"; }; }
says() { grep -qF -- "$1" "$work/out" || { fail "missing in the output: $1; it said:" && cat "$work/out"; }; }
silent() { [[ ! -s $work/out ]] || { fail "$1: should say nothing, said:" && cat "$work/out"; }; }

# A checkout, and a folder of commands that comes first in PATH.
home=$work/check\ out bin=$work/bin
fresh() {
  rm -rf "$home" "$bin" && mkdir -p "$home"/{tools,launcher,tests/launcher} "$bin" "$work/torch"/{lib,include/ATen/core,include/torch}
  cp "${scripts[0]}" "$home/annulus"
  cp "${scripts[@]:1}" "$home/tools/"
  touch "$home"/{WORKSPACE,BUILD.bazel,.bazelrc,launcher/BUILD,launcher/main.cc,tests/launcher/BUILD}
  # A LibTorch of its own, so that nothing is downloaded.
  touch "$work/torch/lib/libtorch_cpu.so" "$work/torch/include/ATen/core/Tensor.h"
  printf '#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n#define TORCH_VERSION_PATCH 0\n' \
    >"$work/torch/include/torch/version.h"
  cat >"$bin/bazel" <<'END'
#!/bin/bash
# Stands in for Bazel: notes how it was called; its "program" says how it was called, and by what it was built.
[[ $1 == --version ]] && echo "bazel 6.5.0" && exit
echo "$*" >>../bazel.calls
echo "[1 / 3] Compiling launcher/main.cc; 1s linux-sandbox" >&2
if [[ -e launcher/broken ]]; then
  echo "ERROR: $PWD/launcher/BUILD:4:8: Compiling launcher/main.cc failed: (Exit 1): gcc failed: error executing command /usr/bin/gcc -U_FORTIFY" >&2
  echo "launcher/main.cc:1:1: error: this is not C++" >&2
  exit 1
fi
mkdir -p .bazel/bin/launcher && rm -f .bazel/bin/launcher/annulus
printf '#!/bin/bash\necho "program $* of $PWD"\n[[ $1 != tunables ]] || echo "tunables $GLIBC_TUNABLES"\n[[ $1 != streams ]] || readlink /proc/$$/fd/{0,1,2} >"$2"\nexit 7\n' >.bazel/bin/launcher/annulus
chmod +x .bazel/bin/launcher/annulus
END
  for name in apt-get sudo; do
    printf '#!/bin/bash\necho "%s $*" >>"%s/forbidden"\nexit 1\n' $name "$work" >"$bin/$name"
  done
  chmod +x "$bin"/*
  rm -f "$work/forbidden" "$work/bazel.calls"
}
calls() { cat "$work/bazel.calls" 2>/dev/null | wc -l; }
unset LIBTORCH MPI_HOME CUDA_HOME CUDA_PATH NCCL_HOME PKG_CONFIG_PATH CC PYTHON
for name in ${!OMPI_@} ${!PMIX_@} ${!PMI_@} ${!SLURM_@}; do unset "$name"; done
export PATH="$bin:$PATH" ANNULUS_CUDA=0

# ---- A rank never sets up and never builds.
fresh
for rank in OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK; do
  run env $rank=0 "$home/annulus" train x
  exits 9 "$rank=0, nothing built"
  says "annulus version"
  run env $rank=1 "$home/annulus" train x
  exits 9 "$rank=1, nothing built"
  silent "$rank=1"
done
run env OMPI_COMM_WORLD_RANK=0 "$home/annulus" train x
says "$(printf %q "$home/annulus") version"
run env SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 "$home/annulus" train x
exits 9 "a rank of Slurm, nothing built"
run env OMPI_COMM_WORLD_RANK=0 "$home/annulus" test
exits 9 "test as a rank"
says "not for ranks"
[[ ! -e $home/.bazel && ! -e $home/.venv && $(calls) == 0 ]] || fail "a rank set up or built"

# ---- Neither the script's own help nor wrong arguments set up or build anything.
fresh
for word in test examples torch setup; do
  for option in -h --help; do
    run "$home/annulus" $word $option
    exits 0 "$word $option"
    says "./annulus $word"
  done
done
for word in examples torch setup; do
  run "$home/annulus" $word --no-such-option
  exits 2 "$word --no-such-option"
done
for word in test install wheel examples torch setup tokenizer follower; do
  run "$home/annulus" $word ""
  exits 2 "$word with an empty argument"
  says "$word: argument 1 is empty"
done
run "$home/annulus" test --test_filter= tests/launcher
exits 2 "test with an option without its value"
says "test: --test_filter is empty"
[[ ! -e $home/.bazel && ! -e $home/.venv && $(calls) == 0 ]] || fail "help or a wrong argument set up or built"

# ---- The first call sets up and builds, the second only runs; the program gets the arguments and the user's folder.
export LIBTORCH=$work/torch
run bash -c 'cd "$1" && "$2" train a.toml "b c"' - "$work" "$home/annulus"
exits 7 "the program's own exit code"
[[ $(cat "$work/out") == "program train a.toml b c of $work" ]] || { fail "captured output holds more than the program's" && cat "$work/out"; }
[[ $(calls) == 1 && ! -e $home/.venv ]] || fail "expected one build and no .venv"
run "$home/annulus" version
[[ $(cat "$work/out") == "program version of $PWD" ]] || { fail "when all is there, only the program speaks" && cat "$work/out"; }
[[ $(calls) == 1 ]] || fail "built though nothing had changed"

# ---- Streams that are closed lead to /dev/null, in the build and in the program.
rm "$home/.bazel/built"
run bash -c '"$0" streams "$1" <&- >&- 2>&-' "$home/annulus" "$work/streams"
exits 7 "with closed streams"
[[ $(calls) == 2 && $(sort -u "$work/streams") == /dev/null ]] || { fail "closed streams" && cat "$work/streams"; }
rm "$work/bazel.calls" && echo >"$work/bazel.calls"

# ---- malloc asks for huge pages, unless the user has decided.
for rank in '' OMPI_COMM_WORLD_RANK=0; do
  run env $rank "$home/annulus" tunables
  says "tunables glibc.malloc.hugetlb=1"
  run env $rank GLIBC_TUNABLES=glibc.malloc.tcache_count=7 "$home/annulus" tunables
  says "tunables glibc.malloc.tcache_count=7:glibc.malloc.hugetlb=1"
  run env $rank GLIBC_TUNABLES=glibc.malloc.hugetlb=0 "$home/annulus" tunables
  grep -qxF "tunables glibc.malloc.hugetlb=0" "$work/out" || { fail "the user's choice of pages" && cat "$work/out"; }
done

# ---- A rank runs the built program, although a source has changed.
echo '// x' >>"$home/launcher/main.cc"
run env OMPI_COMM_WORLD_RANK=0 "$home/annulus" selftest
exits 7 "a rank"
[[ $(calls) == 1 ]] || fail "a rank built"

# ---- A changed file is built, whatever its time of change; tests are not part of the program.
run "$home/annulus" version
[[ $(calls) == 2 ]] || fail "a changed source was not built"
touch "$home/tests/launcher/x_test.cc" && run "$home/annulus" version
[[ $(calls) == 2 ]] || fail "a changed test made the program build"
echo '// y' >"$work/old" && touch -d '2001-01-01' "$work/old" && cp -p "$work/old" "$home/launcher/main.cc"
run "$home/annulus" version
[[ $(calls) == 3 ]] || fail "a source replaced by an older file was not built"
echo 'build --copt=-O1' >"$home/.bazelrc.user" && run "$home/annulus" version
[[ $(calls) == 4 ]] || fail "a changed .bazelrc.user was not built"
run "$home/annulus" version
cp "$home/.bazel/bin/launcher/annulus" "$work/other" && mv "$work/other" "$home/.bazel/bin/launcher/annulus"
run "$home/annulus" version
[[ $(calls) == 5 ]] || fail "a program that someone else built was taken for ours"

# ---- Benchmarks are built only when they are called.
built() { tail -n 1 "$work/bazel.calls"; }
[[ $(built) == *"//launcher:annulus" ]] || fail "expected a build of the program alone: $(built)"
run "$home/annulus" bench ring
[[ $(calls) == 6 && $(built) == *"//launcher:annulus //benchmarks/program:annulus_bench" ]] || fail "bench did not build the benchmarks: $(built)"
says "program bench ring of"
run "$home/annulus" version
run "$home/annulus" bench ring
[[ $(calls) == 6 ]] || fail "built though all is there"
echo '// z' >>"$home/launcher/main.cc" && run "$home/annulus" version
[[ $(calls) == 7 && $(built) == *"//launcher:annulus" ]] || fail "built the benchmarks for another subcommand: $(built)"
run "$home/annulus" launch -n 2 bench ring
[[ $(calls) == 8 && $(built) == *annulus_bench ]] || fail "launch did not build the benchmarks that it starts: $(built)"

# ---- A failed build shows the compiler's message and does not run the old program.
touch "$home/launcher/broken" && run "$home/annulus" version
exits 1 "a failed build"
says "launcher/main.cc:1:1: error: this is not C++"
says "Compiling launcher/main.cc failed"
grep -qE 'program|U_FORTIFY' "$work/out" && fail "a failed build should run nothing and say only what helps" && cat "$work/out"
rm "$home/launcher/broken" && run "$home/annulus" version
exits 7 "after the repair"

# ---- `setup` prints its table.
run "$home/annulus" setup
exits 0 "annulus setup"
says "LibTorch       2.11.0                 $work/torch"

# ---- The library for PyTorch: the last line of output is its path, after the torch that it was built against.
mkdir -p "$home/.bazel/bin/python/ops"
run "$home/annulus" torch
exits 0 "annulus torch"
says "annulus: built against the torch in $work/torch"
[[ $(tail -n 1 "$work/out") == */python/ops/libannulus_torch.so ]] || { fail "the last line should be the library's path" && cat "$work/out"; }
run env LIBTORCH= "$home/annulus" torch
exits 9 "LIBTORCH= ./annulus torch"
says "LIBTORCH is set, but empty"
run "$home/annulus" wheel
exits 2 "annulus wheel against a LIBTORCH of one's own"
says "a wheel is built against the torch from PyPI that set-up installs, but LIBTORCH is set: unset it."

# ---- The tokenizer libraries are installed at their first use, and only then.
cat >"$work/python" <<'END'
#!/bin/bash
# Stands in for Python, and makes a .venv with itself in it: notes what pip is to install.
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "$*" >>"$PIP_CALLS" && [[ ! -e $PIP_CALLS.refuse ]] || { echo "ERROR: no network" && exit 1; } ;;
  -I*) printf 'python:' && printf ' %q' "${@:3}" && echo && readlink /proc/$$/fd/{0,1,2} >"$PIP_CALLS.streams" ;;
esac
END
chmod +x "$work/python"
export PIP_CALLS=$work/pip
pips() { cat "$work/pip" 2>/dev/null | wc -l; }
touch "$work/pip.refuse"
run env PYTHON="$work/python" "$home/annulus" tokenizer encode
exits 9 "without a network"
says "ERROR: no network"
rm "$work/pip.refuse"
for call in first second; do
  run env PYTHON="$work/python" "$home/annulus" tokenizer encode --tokenizer "a b"
  exits 0 "annulus tokenizer, the $call call"
  [[ $(tail -n 1 "$work/out") == "python: "*'/python/tokenizer encode --tokenizer a\ b' ]] || { fail "the arguments" && cat "$work/out"; }
  [[ $(pips) == 2 ]] || fail "the $call call: pip was called $(pips) times, expected 2"
done
grep -q -- '--no-deps tokenizers==[0-9.]* sentencepiece==[0-9.]* pyarrow==' "$work/pip" || { fail "pip's arguments" && cat "$work/pip"; }
# transformers is installed at the first chat, and only then.
grep -q transformers "$work/pip" && fail "transformers was installed without a chat"
for words in --chat --loss=assistant; do
  run env PYTHON="$work/python" "$home/annulus" tokenizer tokenize "$words"
  exits 0 "annulus tokenizer tokenize $words"
  [[ $(pips) == 3 ]] || fail "$words: pip was called $(pips) times, expected 3"
done
grep -q -- ' tokenizers==[0-9.]* .* transformers==[0-9.]* .* jinja2==' "$work/pip" || { fail "pip's arguments" && cat "$work/pip"; }
[[ $(grep -o ' tokenizers==' <<<"$(tail -n 1 "$work/pip")" | wc -l) == 1 ]] || fail "a wheel is named twice"
run env PYTHON="$work/python" OMPI_COMM_WORLD_RANK=0 "$home/annulus" tokenizer encode
exits 0 "annulus tokenizer in a rank"
# Streams that were closed are on /dev/null, so that no file of the program gets their numbers.
for numbers in 0 1 2 '0 1 2'; do
  read -ra closed <<<"$numbers"
  bash -c "PYTHON='$work/python' '$home/annulus' tokenizer encode$(printf ' %d>&-' "${closed[@]}")" &>"$work/out" <"$home/annulus" ||
    fail "closed $numbers: exit code $?"
  mapfile -t streams <"$work/pip.streams"
  for n in 0 1 2; do
    case " $numbers " in
      *" $n "*) [[ ${streams[n]-} == /dev/null ]] ;;
      *) [[ ${streams[n]-/dev/null} != /dev/null ]] ;;
    esac || fail "closed $numbers: ${streams[*]}"
  done
done
mv "$home/.venv" "$work/venv"
run env PYTHON="$work/nothing" "$home/annulus" tokenizer encode
exits 9 "annulus tokenizer without a Python"
says "$work/nothing is not of version 3.10"

# ---- Invalid variables are named.
wrong() { # NAME VALUE WORDS
  run env "$1=$2" "$home/annulus" version
  exits 9 "$1=$2"
  says "$1"
  says "$3"
}
wrong LIBTORCH "$work/nothing" "libtorch_cpu.so"
wrong LIBTORCH torch "a full path"
wrong MPI_HOME "$work/nothing" "bin/mpicxx"
wrong ANNULUS_CUDA 2 "0 or 1"
wrong CC "$work/nothing" "no such compiler"
run env CUDA_HOME="$work/nothing" ANNULUS_CUDA=1 "$home/annulus" version
exits 9 "CUDA without nvcc"
says "$work/nothing/bin/nvcc"
# A LibTorch for another CUDA than the toolkit's.
mkdir -p "$work/cuda/bin"
printf '#!/bin/bash\necho "Cuda compilation tools, release 13.0, V13.0.96"\n' >"$work/cuda/bin/nvcc"
chmod +x "$work/cuda/bin/nvcc"
touch "$work/torch/lib/libtorch_cuda.so"
printf 'libc10.so\0libcudart.so.12\0' >"$work/torch/lib/libc10_cuda.so"
run env CUDA_HOME="$work/cuda" ANNULUS_CUDA=1 "$home/annulus" version
exits 9 "a LibTorch for CUDA 12 and a toolkit of CUDA 13"
says "The LibTorch in $work/torch is for CUDA 12, but the toolkit in $work/cuda is CUDA 13.0"
says "ANNULUS_CUDA=0"
printf 'libc10.so\0libcudart.so.13\0' >"$work/torch/lib/libc10_cuda.so"
run env CUDA_HOME="$work/cuda" ANNULUS_CUDA=1 "$home/annulus" version
exits 7 "a LibTorch and a toolkit of CUDA 13"
rm "$work"/torch/lib/lib{torch,c10}_cuda.so
run env -u LIBTORCH PYTHON="$work/nothing" "$home/annulus" version
exits 9 "a Python that is not there"
says "PYTHON=$work/nothing"

# ---- Without the right to install, it prints the exact command and installs nothing. pkg-config is made to find nothing, so
# that libraries are missing.
as_nobody=()
if ((EUID == 0)); then
  chmod -R a+rwX "$work"
  as_nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
fi
rm -f "$work/forbidden" "$home/.bazel/setup"
run env PKG_CONFIG_LIBDIR="$work/none" HOME="$work" ${as_nobody[@]+"${as_nobody[@]}"} "$home/annulus" version
exits 9 "missing packages"
says "sudo apt-get install -y --no-install-recommends"
says "libhwloc-dev"
says "hwloc          missing"
grep -q 'clang-format\|slurm\|libgtest' "$work/out" && fail "the first run of a user needs no tools of developers" && cat "$work/out"
grep -q '^apt-get' "$work/forbidden" 2>/dev/null && fail "apt-get was called"
[[ ! -e $home/.bazel/setup ]] || fail "a set-up that failed left its mark"
run "$home/annulus" version
exits 7 "the same with the libraries there"

# ---- Another user's clone: the owner's program runs while it is up to date, and nothing is ever built.
chmod -R go-w "$home"
run "$home/annulus" version
chmod a-w "$home/.bazel"
before=$(calls)
other() { run ${as_nobody[@]+"${as_nobody[@]}"} "$home/annulus" "$@"; }
other version
exits 7 "another user"
[[ $(cat "$work/out") == "program version of $PWD" ]] || { fail "only the program speaks to another user" && cat "$work/out"; }
other bench ring
exits 8 "another user, benchmarks that are not built"
echo '// other' >>"$home/launcher/main.cc"
for word in version test setup; do
  other $word
  exits 8 "$word of another user, where something has changed"
  says "git clone $(printf %q "$home")"
  says "$(printf %q "$home/annulus") install PREFIX"
  grep -qE 'Permission denied|unexpectedly' "$work/out" && fail "noise for another user" && cat "$work/out"
done
((EUID == 0)) && chmod -R go-r "$home/.bazel"
other version
exits 8 "another user, who cannot read what is built"
says "install PREFIX"
grep -qE 'Permission denied|unexpectedly' "$work/out" && fail "noise for another user" && cat "$work/out"
[[ $(calls) == "$before" ]] || fail "another user built"
chmod -R u+w "$home"

# ---- How long is left.
estimates() { # SECONDS DONE TOTAL WANTED
  SECONDS=$1
  estimate_left steps "$2" "$3"
  [[ $left == "$4" ]] || fail "after $1 s and $2 of $3 steps, expected \"$4\", came \"$left\""
}
# shellcheck source=tools/live.sh
ANNULUS_PROGRESS=plain . "$home/tools/live.sh"
estimates 100 10 50 ''
estimates 104 20 50 '' # too soon to tell
estimates 120 20 50 ', about 1 min left'
estimates 130 40 50 ', less than a minute left'
estimates 140 14 250 ', about 39 min left'
estimates 150 250 250 ''
printf '[1,000 / 2,000] Compiling a.cc\nFAIL: //a (see b)\n' | follow_bazel "$work/log" 2>"$work/out"
says "build  1,000 of 2,000, less than a minute left  Compiling a.cc"
says "FAIL: //a"
ANNULUS_PROGRESS='' . "$home/tools/live.sh"
printf '[1,000 / 2,000] Compiling a.cc\n' | follow_bazel "$work/log" 2>"$work/out"
silent "a build whose output is captured"

((failures == 0)) && echo "all good"
exit $((failures > 0))
