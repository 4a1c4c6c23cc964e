#!/bin/bash
# find_bugs.sh RING_TEST BACKEND_TEST [ATTENTION_TEST]: plants each mistake, and checks that the test for it fails and says
# why.
set -uo pipefail
failed=0
finds() { # BUG PROGRAM TEST TEXT: with this mistake, this test of the program fails, and this is in what it prints
  local said
  if said=$(RING_BUG=$1 "$2" --gtest_filter="$3" 2>&1); then
    echo "FAILED: $3 does not notice \"$1\"" && failed=1
  elif ! grep -qE -- "$4" <<<"$said"; then
    echo "FAILED: $3 with \"$1\" does not say \"$4\":" && echo "$said" && failed=1
  else
    echo "found \"$1\": $(grep -E -m 1 -- "$4" <<<"$said")"
  fi
}
unset GTEST_OUTPUT XML_OUTPUT_FILE
finds even "$1" Ring.AddsUpAllRanks 'rank 0 of 2: '
finds "first come" "$1" Ring.RoundsAlikeInEveryOrder "Repeat it with ANNULUS_TEST_ORDER='"
finds trusting "$1" Ring.IsNeverWrongWhenMessagesAre 'duplicate:rank=1,nth=1: '
finds "sends first" "$1" Ring.AddsUpAllRanks \
  'every rank waits: rank 0 in ring to the right, step 1: sending 48 bytes to rank 1; rank 1'
finds "one buffer" "$2" '*ExchangesOutstandingTogether*' '^\[  FAILED  \] .*ExchangesOutstandingTogether'
[[ ! ${3-} ]] || finds "no key" "$3" RingAttention.IsByDefinitionForAnyPattern 'the pattern is '
exit $failed
