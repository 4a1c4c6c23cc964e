# What run.sh finds out about the machine. run.sh reads this file and calls the functions, which share its variables.
# shellcheck shell=bash disable=SC2034,SC2154

find_torch() { # PYTHON: prints where its torch is, without importing it
  "$1" -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")' 2>/dev/null
}
find_libtorch() { # sets torch, torch_python, version, cuda, obstacle
  local p found file
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
  version=unknown cuda='' # cuda: the major version that LibTorch was built for, if its files say it
  if [[ ! $obstacle ]]; then
    file=$torch/version.py && [[ -r $file ]] || file=$torch/build-version
    version=$( (grep -oE '[0-9]+\.[0-9]+\.[0-9]+' "$file" || echo unknown) 2>/dev/null | head -n 1)
    cuda=$(grep -oE "\+cu[0-9]{2}|^cuda\b.*= '[0-9]+" "$file" 2>/dev/null | grep -oE '[0-9]+$' | tail -n 1)
    if [[ ${version%.*} != "${BUILT_LIBTORCH%.*}" && ! ${ANNULUS_ANY_LIBTORCH-} ]]; then
      obstacle="LibTorch $version in $torch, but this bundle was built with $BUILT_LIBTORCH, and only ${BUILT_LIBTORCH%.*} fits it; make a bundle with that one, or set ANNULUS_ANY_LIBTORCH=1"
    elif [[ ! -e $torch/lib/libtorch_cuda.so ]]; then
      obstacle="the LibTorch in $torch has no CUDA (no lib/libtorch_cuda.so)"
    elif [[ $cuda && $cuda != "${BUILT_CUDA%%.*}" && ! ${ANNULUS_ANY_LIBTORCH-} ]]; then
      obstacle="the LibTorch in $torch is for CUDA $cuda, but this bundle was built for CUDA ${BUILT_CUDA%%.*}, whose libraries have other names; set LIBTORCH to one for CUDA ${BUILT_CUDA%%.*}, or make a bundle with that one"
    fi
  fi
}

count_gpus() { # sets gpus
  local visible
  # The driver makes a GPU's file when something uses the GPU for the first time.
  if command -v nvidia-smi >/dev/null; then
    timeout --kill-after=5 30 nvidia-smi -L >"$scratch/gpus" 2>&1 </dev/null &
    await $!
  fi
  gpus=0
  if [[ -e $devices/nvidiactl ]]; then gpus=$(compgen -G "$devices/nvidia[0-9]*" | wc -l); fi
  if [[ ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    ((${#visible[@]} < gpus)) && gpus=${#visible[@]}
    [[ ${visible[0]-} == -1 ]] && gpus=0
  fi
}

# Reads the large libraries once in the background, so that the first steps do not wait for the disk.
read_ahead() {
  ((gpus)) && [[ ! $obstacle ]] || return
  timeout --kill-after=5 3600 xargs -0 -n 1 -P 4 cat \
    < <(printf '%s\0' "$torch"/lib/*.so* "${torch%/*}"/nvidia/*/lib/*.so*) >/dev/null 2>&1 &
}

note_facts() {
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
}

# Records which GPUs these are and, while run.sh runs, their clocks.
watch_gpus() {
  local fields
  if ((gpus)) && command -v nvidia-smi >/dev/null; then
    # If the driver does not know one of the fields, nvidia-smi prints nothing. Then only fields that all drivers know are
    # requested.
    for fields in ,clocks.max.sm,clocks.max.mem,clocks.sm,memory.total,power.limit,mig.mode.current,persistence_mode ''; do
      timeout --kill-after=5 30 nvidia-smi --query-gpu=index,name,uuid,driver_version$fields --format=csv \
        >"$details/gpus.csv" 2>"$details/logs/nvidia-smi.err" </dev/null &
      await $! && break
      rm -f "$details/gpus.csv"
    done
    timeout --kill-after=5 30 nvidia-smi topo -m >"$details/logs/topology.out" 2>&1 </dev/null &
    await $!
    # Records the actual clocks, temperature and power while the steps run, after those of earlier calls.
    { cat "$details/clocks.csv" 2>/dev/null; echo "call $(date -u +%Y-%m-%dT%H:%M:%SZ)"; } >"$out/clocks.csv"
    fields=index,clocks.sm,clocks.mem,temperature.gpu,power.draw
    timeout --kill-after=5 $((60 * minutes + 600)) stdbuf -oL nvidia-smi --query-gpu=$fields --format=csv,noheader,nounits -lms 500 \
      >>"$out/clocks.csv" 2>/dev/null </dev/null &
  fi
}

# Keeps in the details what may explain a failure: how the machine is set up, and what it has loaded.
note_machine() {
  local program
  mkdir -p "$details/machine"
  (
    for line in 'df -h /dev/shm /tmp' free 'ulimit -a' "env | grep -E '^(CUDA|NCCL|LD_)'"; do
      echo "== $line" && timeout --kill-after=5 10 bash -c "$line"
    done
  ) >"$details/machine/system.txt" 2>&1 </dev/null
  ((gpus)) || return
  if command -v nvidia-smi >/dev/null; then
    timeout --kill-after=5 20 nvidia-smi -q >"$details/machine/nvidia-smi.txt" 2>&1 </dev/null &
    await $!
  fi
  for program in "$annulus" "$bundle"/tests/*gpu_kernel_test; do
    in_bundle timeout --kill-after=5 20 ldd "$program" >"$details/machine/ldd.${program##*/}.txt" 2>&1 </dev/null &
    await $!
  done
}

# Adds what the driver has told the kernel since the last time.
note_dmesg() { # WHEN
  local file=$details/machine/dmesg.txt
  touch "$file"
  timeout --kill-after=5 10 dmesg 2>&1 </dev/null | grep -iE 'xid|nvrm|not permitted' | grep -vxFf "$file" >"$scratch/dmesg"
  [[ ! -s $scratch/dmesg ]] || { echo "== $1" && cat "$scratch/dmesg"; } >>"$file"
}
