// Checked MPI calls, for the files of comm/mpi. Do not include it elsewhere, because it includes mpi.h.
#pragma once

#include <mpi.h>

#include <memory>
#include <string>

#include "comm/mpi/mpi_runtime.h"

namespace annulus::mpi_internal {

std::string mpi_error_text(int code);
// Raises Error(kComm) naming the call, unless code is MPI_SUCCESS.
void check_mpi(int code, const char* call);

// Makes the communicator of the ranks of `data`. It takes ownership of `data`, and duplicates it for control messages.
// Collective, and it blocks: the caller guards it with a watchdog.
std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data);

}  // namespace annulus::mpi_internal
