// annulus::run_ranks(n, body): ranks as threads of one process, under the name that tests of other projects look for
// (annulus/testing/run_ranks.h). What it does stands in comm/threads/threads.h.
#pragma once

#include "comm/threads/threads.h"  // IWYU pragma: export
