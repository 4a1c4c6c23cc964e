#!/bin/bash
# Runs tests under the compiler's sanitizers: collectives, what ranks that are threads share, and the threads of offload
# under the thread sanitizer; collectives, checkpoints and the loops over one tile of attention under the address (with
# leaks) and undefined-behaviour sanitizers together. The last line is "N passed, N failed".
#   --all   also the kernels of attention under the latter, the operators for PyTorch under the former, and attention over
#           ranks, the data reader, saves behind the training and training with sharded state under both; takes an hour longer
# Used by .ci/run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "tools/sanitizers.sh" "$@"

all=()
[[ ${1-} != --all ]] || all=(//tests/runtime/training/state:sharded_training_test //tests/runtime/training:saving_test
  //tests/runtime/run:checkpoint_save_test //tests/runtime/run:checkpoint_worlds_test //tests/runtime/data:batch_reader_test
  //tests/runtime/data:dataset_test //tests/attention/execution:attention_test //tests/attention/execution:planned_call_test
  //tests/attention/execution:orders_test //tests/attention/execution:merge_over_ranks_test //tests/comm:rounds_test
  //tests/comm:agreement_test //tests/comm:testing_test)
collectives=//tests/comm:threads_test
operators=(//integration_tests/pytorch:torch_ops_test //integration_tests/pytorch:torch_ops_2_ranks_test
  //integration_tests/pytorch:torch_groups_2_ranks_test)
shared=(//tests/memory/pool:pool_stress_test //tests/memory/pool:shared_memory_threads_test //tests/memory/tiers:offload_test
  //tests/memory/tiers:tiered_tensors_test)
tiles=//tests/attention/kernels:tile_math_test
kernels=(//tests/attention/kernels:kernel_test //tests/attention/kernels:kernel_parts_test
  //tests/attention/kernels:shared_keys_test //tests/attention/kernels:windows_test)
checkpoints=(//tests/runtime/run:checkpoint_test //tests/runtime/run:checkpoint_faults_test)

passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
under() { # SANITIZER TARGET...
  echo "-- $1"
  ./annulus test --ci "--config=$1" "${@:2}" 2>&1 | tee "$log"
  local rc=${PIPESTATUS[0]}
  add_counts "$(tail -n 1 "$log")" "$rc"
}
under tsan "$collectives" "${shared[@]}" ${all:+"${checkpoints[@]}" "${operators[@]}"} "${all[@]}"
under asan //tests/common:leaks_are_found_test "$collectives" //tests/memory/pool:pool_test //tests/memory/pool:pool_stress_test \
  "${checkpoints[@]}" "$tiles" ${all:+"${kernels[@]}"} "${all[@]}"
echo "$passed passed, $failed failed"
((failed == 0))
