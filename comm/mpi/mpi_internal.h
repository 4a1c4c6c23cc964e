// Shared by the files of comm/mpi: checked MPI calls. Not to be included elsewhere: it drags in mpi.h.
#pragma once

#include <mpi.h>

#include <memory>
#include <string>

#include "comm/mpi/mpi_runtime.h"

namespace annulus::mpi_internal {

std::string mpi_error_text(int code);
// Error(kComm) naming the call unless code is MPI_SUCCESS.
void check_mpi(int code, const char* call);

// Takes ownership of data (and duplicates it for control messages). Collective; the caller guards it by a watchdog.
std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data);

}  // namespace annulus::mpi_internal
