#!/bin/bash
# Ranks started by the launcher of another MPI form one world each instead of one together. All must exit with an error
# and one message. This script sets the variables of such a launcher.
set -u
binary=$1
export HOME="${HOME:-$TEST_TMPDIR}" TMPDIR OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
TMPDIR=$(mktemp -d /dev/shm/annulus.XXXXXX)
trap 'rm -rf "$TMPDIR"' EXIT
unset TEST_PREMATURE_EXIT_FILE XML_OUTPUT_FILE
pids=()
for rank in 0 1 2; do
  PMI_SIZE=3 PMI_RANK=$rank MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=3 "$binary" --fault=none --rank=0 >>"$TMPDIR/log" 2>&1 &
  pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
  wait "$pid"
  rc=$?
  [[ $rc == 6 ]] || { echo "a rank ended with $rc, expected 6"; failed=1; }
done
cat "$TMPDIR/log"
lines=$(grep -cF "[comm] MPI formed a world of 1 rank, but 3 were started: the launcher (PMI (MPICH, Intel MPI))" "$TMPDIR/log")
[[ $lines == 1 ]] || { echo "$lines messages, expected one"; failed=1; }
exit $failed
