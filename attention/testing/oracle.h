// The oracle, attention in fp64 by definition, beside the other headers of tests (annulus/testing/oracle.h). What it
// promises stands in attention/oracle/oracle.h.
#pragma once

#include "attention/oracle/oracle.h"  // IWYU pragma: export
