// Calls MPI_Init and MPI_Finalize under a watchdog. See mpi_runtime.h.
#include "comm/mpi/mpi_runtime.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "comm/checks.h"
#include "comm/hosts.h"
#include "comm/mpi/mpi_internal.h"
#include "comm/watchdog.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "memory/pool/shared_memory.h"

namespace annulus {

using comm_internal::missed_deadline;
using comm_internal::Watchdog;
using mpi_internal::check_mpi;

namespace mpi_internal {

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
  return std::string(text, static_cast<size_t>(length));
}

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  throw Error(ErrorKind::kComm, "comm", std::string(call) + " failed: " + mpi_error_text(code));
}

namespace {

// Sets how Open MPI moves messages between ranks of one host. Versions 4 and 5 have different parameters and ignore
// each other's. Values that the environment or mpirun's --mca sets have precedence.
void set_transport() {
  // Open MPI sends a message in fragments of 32 KiB, by default three at a time, and moves data only while a rank calls
  // it; between calls, waiting ranks sleep and others compute. With 32 fragments a call moves 1 MiB, a quarter of the
  // memory that a rank has for its messages by default.
  setenv("OMPI_MCA_pml_ob1_send_pipeline_depth", "32", 0);
  // The alternative, a single copy from the memory of the other process, needs the ptrace permission, which containers
  // withhold, and is slower from 4 MiB on (benchmarks/results/machine-c.md, "Communication").
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
  setenv("OMPI_MCA_btl_sm_single_copy_mechanism", "none", 0);
}

}  // namespace
}  // namespace mpi_internal

std::shared_ptr<MpiRuntime> MpiRuntime::start(const MpiOptions& options) {
  if (options.max_piece_bytes < 1 || options.max_piece_bytes > (int64_t{1} << 30)) {
    throw Error(ErrorKind::kPlan, "comm",
                "MPI pieces of " + std::to_string(options.max_piece_bytes) + " bytes: expected 1 to 2^30 bytes");
  }
  int started = 0;
  check_mpi(MPI_Initialized(&started), "MPI_Initialized");
  if (started != 0) {
    throw Error(ErrorKind::kInternal, "comm", "MPI was already started in this process: make only one MpiRuntime");
  }
  std::shared_ptr<MpiRuntime> runtime(new MpiRuntime);
  runtime->options_ = options;
  runtime->abandoned_ = true;  // until MPI runs
  mpi_internal::set_transport();
  {
    const Seconds timeout = options.timeout;
    Watchdog watchdog(timeout, [timeout] {
      return missed_deadline("MPI_Init did not return", timeout) +
             ": a rank of this job has not started or is stopped; check that every host runs the same program";
    });
    int provided = MPI_THREAD_SINGLE;
    // Serialized: several threads may own communicators, but only one thread at a time calls MPI.
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    if (provided < MPI_THREAD_SERIALIZED) {
      throw Error(ErrorKind::kUnavailable, "comm",
                  "this MPI does not allow calls from several threads (MPI_THREAD_SERIALIZED): rebuild it with thread "
                  "support");
    }
    // Errors that belong to no communicator are reported on one of these two, depending on the version of MPI.
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &runtime->rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &runtime->size_), "MPI_Comm_size");
  }
  char version[MPI_MAX_LIBRARY_VERSION_STRING + 1] = {};
  int length = 0;
  if (MPI_Get_library_version(version, &length) == MPI_SUCCESS) {
    runtime->version_.assign(version, static_cast<size_t>(length));
    runtime->version_ = runtime->version_.substr(0, runtime->version_.find(','));
  }
  runtime->abandoned_ = false;
  return runtime;
}

std::unique_ptr<Communicator> MpiRuntime::make_world() {
  const Seconds timeout = options_.timeout;
  Watchdog watchdog(timeout, [this, timeout] {
    return missed_deadline("MPI_Comm_dup of all ranks did not return", timeout) + ": a rank is stopped or gone" +
           stalled();
  });
  MPI_Comm data = MPI_COMM_NULL;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &data), "MPI_Comm_dup");
    if (!shared_memory_) share_memory();
  }
  return mpi_internal::make_mpi_communicator(shared_from_this(), data);
}

// Collective. Ranks share memory if every rank wants to and can open that of all ranks of its host. The caller holds
// the mutex.
void MpiRuntime::share_memory() {
  struct Offer {
    uint64_t host = 0;
    SharedFile file;
  };
  std::shared_ptr<SharedMemory> shared;
  std::string why = "ANNULUS_SHARED_MEMORY is 0";
  Offer mine{std::hash<std::string>()(host_identity()), {}};
  try {
    if (options_.share_memory) {
      shared = std::make_shared<SharedMemory>();
      mine.file = shared->file();
    }
  } catch (const Error& e) {
    why = e.message();
  }
  std::vector<Offer> offers(static_cast<size_t>(size_));
  check_mpi(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, offers.data(), sizeof mine, MPI_BYTE, MPI_COMM_WORLD),
            "MPI_Allgather");
  int all = shared ? 1 : 0;
  for (int rank = 0; rank < size_ && all != 0; ++rank) {
    const Offer& offer = offers[static_cast<size_t>(rank)];
    if (rank == rank_ || offer.host != mine.host) continue;
    try {
      if (offer.file.descriptor < 0) throw Error(ErrorKind::kUnavailable, "comm", "it lends no memory");
      shared->connect(offer.file);
    } catch (const Error& e) {
      all = 0;
      why = "rank " + std::to_string(rank) + ": " + std::string(e.message());
    }
  }
  if (all == 0) log_debug("comm", "this rank shares no memory with others of its host: " + why);
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD), "MPI_Allreduce");
  if (all == 0) return;
  for (const Offer& offer : offers) same_host_.push_back(offer.host == mine.host);
  shared_memory_ = std::move(shared);
}

std::string MpiRuntime::stalled() const {
  if (!options_.describe_stalled) return "";
  const std::string text = options_.describe_stalled([this](int rank) { return in_job(rank); });
  return text.empty() ? "" : "; " + text;
}

MpiRuntime::~MpiRuntime() {
  if (std::uncaught_exceptions() == 0) finish();
}

void MpiRuntime::finish(bool after_failures) {
  if (abandoned_.exchange(true)) {
    int ended = 0;
    if (!after_failures || MPI_Finalized(&ended) != MPI_SUCCESS || ended != 0) return;
  }
  const Seconds timeout = std::max(options_.timeout, operation_timeout_.load());
  const auto message = [this, timeout]() -> std::optional<std::string> {
    if (options_.all_live && options_.all_live()) return std::nullopt;
    const std::string known = stalled();
    return missed_deadline("MPI_Finalize did not return", timeout) + ": another rank is still busy, stopped or gone" +
           (known.empty() ? "; no rank of this host is known to be stopped or gone, so check the other hosts" : known);
  };
  Watchdog watchdog(timeout, message, in_job(rank_));
  std::lock_guard<std::mutex> lock(mutex_);
  const int code = MPI_Finalize();
  if (code != MPI_SUCCESS) log_error("comm", "MPI_Finalize failed: error " + std::to_string(code));
}

}  // namespace annulus
