#!/bin/bash
# find_bugs.sh RING_TEST: plants each mistake in the ring, and checks that the test for it fails and says why.
set -uo pipefail
failed=0
finds() { # BUG TEST TEXT: with this mistake, this test fails, and this is in what it prints
  local said
  if said=$(RING_BUG=$1 "$ring_test" --gtest_filter="Ring.$2" 2>&1); then
    echo "FAILED: Ring.$2 does not notice \"$1\"" && failed=1
  elif ! grep -qE -- "$3" <<<"$said"; then
    echo "FAILED: Ring.$2 with \"$1\" does not say \"$3\":" && echo "$said" && failed=1
  else
    echo "found \"$1\": $(grep -E -m 1 -- "$3" <<<"$said")"
  fi
}
ring_test=$1
unset GTEST_OUTPUT XML_OUTPUT_FILE
finds even AddsUpAllRanks 'rank 0 of 2: '
finds "first come" RoundsAlikeInEveryOrder "Repeat it with ANNULUS_TEST_ORDER='"
finds trusting IsNeverWrongWhenMessagesAre 'duplicate:rank=1,nth=1: '
finds "sends first" AddsUpAllRanks 'every rank waits: rank 0 in ring to the right, step 1: sending 48 bytes to rank 1; rank 1'
exit $failed
