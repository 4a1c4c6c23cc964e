// A communicator of one's own over another one, as for a device that sends only from memory of its own: what is sent is
// first copied to such memory. The code under test of backend_test.cc.
#pragma once

#include <memory>

#include "annulus/testing/run_ranks.h"  // Communicator

// comm must outlive the result. Thread safety: as comm.
//
// RING_BUG="one buffer" takes the memory of a message again while it is on its way.
std::unique_ptr<annulus::Communicator> staging(annulus::Communicator& comm);
