// A library that MPI programs load with LD_PRELOAD, and that carries out a plan of faults (fault_plan.h) on them:
//
//   ANNULUS_MPI_FAULTS='kill:rank=1,nth=40' mpirun -x ANNULUS_MPI_FAULTS -x LD_PRELOAD=.../libannulus_mpi_faults.so ...
//
// mpi_test (bazel/mpi.bzl) and annulus_add_mpi_test (CMake) do that with `faults`. It takes the place of the functions
// of MPI below and calls them by their profiling names (MPI standard, chapter "Tool Support"). The rank is that in
// MPI_COMM_WORLD. A fault is reported to stderr. Programs in Fortran call other names and are not affected.
#include <mpi.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/testing/fault_plan.h"
#include "common/error.h"

namespace {

using annulus::testing::FaultCounter;
using annulus::testing::FaultPlan;

// A message that is sent later or once more, with a copy of its elements. A copy that is on its way is kept until the
// end of the process, because nobody waits for it.
struct LateMessage {
  std::vector<char>* memory;
  MPI_Aint offset;
  int count;
  MPI_Datatype type;
  int to, tag;
  MPI_Comm comm;

  LateMessage(const void* data, int n, MPI_Datatype element, int dest, int message_tag, MPI_Comm on)
      : memory(new std::vector<char>()), offset(0), count(n), type(element), to(dest), tag(message_tag), comm(on) {
    MPI_Aint lower = 0, extent = 0, true_lower = 0, true_extent = 0;
    PMPI_Type_get_extent(type, &lower, &extent);
    PMPI_Type_get_true_extent(type, &true_lower, &true_extent);
    const MPI_Aint bytes = count > 0 ? extent * (count - 1) + true_extent : 0;
    offset = true_lower;
    memory->assign(static_cast<const char*>(data) + true_lower, static_cast<const char*>(data) + true_lower + bytes);
    PMPI_Type_dup(element, &type);  // the program may free its own
  }

  void send() const {
    MPI_Request request = MPI_REQUEST_NULL;
    PMPI_Isend(memory->data() - offset, count, type, to, tag, comm, &request);
    if (request != MPI_REQUEST_NULL) PMPI_Request_free(&request);
  }
};

struct State {
  std::mutex mutex;  // MPI_THREAD_MULTIPLE
  std::unique_ptr<FaultCounter> counter;
  int rank = 0;
  std::vector<LateMessage> late;
};

State& state() {
  static State* const state = new State();  // never destroyed: MPI may be called late
  return *state;
}

void say(const char* what, const char* function) {
  std::fprintf(stderr, "rank %d: the plan of faults %s %s\n", state().rank, what, function);
}

void start() {
  const char* const text = std::getenv("ANNULUS_MPI_FAULTS");
  if (text == nullptr || state().counter) return;
  int size = 1;
  PMPI_Comm_rank(MPI_COMM_WORLD, &state().rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  try {
    state().counter = std::make_unique<FaultCounter>(FaultPlan::parse(text, size), state().rank);
  } catch (const annulus::Error& error) {
    if (state().rank == 0) std::fprintf(stderr, "ANNULUS_MPI_FAULTS: %s\n", error.what());
    PMPI_Abort(MPI_COMM_WORLD, error.exit_code());
  }
}

// Carries out what happens to the rank itself, and returns what happens to the messages of this call.
FaultCounter::Now meet_fault(const char* function, bool sends = false) {
  FaultCounter::Now now;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (!state().counter) return now;
    now = state().counter->next(sends);
  }
  if (now.delay > 0) {
    say("delays", function);
    std::this_thread::sleep_for(std::chrono::duration<double>(now.delay));
  }
  if (now.kill) {
    say("kills this rank before", function);
    raise(SIGKILL);
  }
  if (now.stop) {
    say("stops this rank before", function);
    raise(SIGSTOP);
  }
  return now;
}

// Carries out a call that sends one message: `send` does it, `leave_out` does what the call does besides.
template <class Send, class LeaveOut>
int sending(const char* function, const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
            Send send, LeaveOut leave_out) {
  const FaultCounter::Now now = meet_fault(function, to != MPI_PROC_NULL);
  const bool holds = now.drop || now.reorder;
  std::vector<LateMessage> after;
  if (to != MPI_PROC_NULL) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    std::vector<LateMessage>& late = state().late;
    const auto waits = [&](const LateMessage& one) { return holds || one.to != to || one.comm != comm; };
    const auto first = std::stable_partition(late.begin(), late.end(), waits);
    after.assign(first, late.end());
    late.erase(first, late.end());
    if (now.duplicate && !holds) after.emplace_back(data, count, type, to, tag, comm);
    if (now.reorder && !now.drop) late.emplace_back(data, count, type, to, tag, comm);
  }
  if (now.drop) say("drops the message of", function);
  if (now.duplicate) say("doubles the message of", function);
  if (now.reorder) say("holds back the message of", function);
  const int result = holds ? leave_out() : send();
  for (const LateMessage& message : after) message.send();
  return result;
}

}  // namespace

extern "C" {

int MPI_Init(int* argc, char*** argv) {
  const int result = PMPI_Init(argc, argv);
  start();
  return result;
}

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  const int result = PMPI_Init_thread(argc, argv, required, provided);
  start();
  return result;
}

#define ANNULUS_SEND(name)                                                                                             \
  int MPI_##name(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm) {                     \
    return sending(                                                                                                    \
        "MPI_" #name, data, count, type, to, tag, comm, [&] { return PMPI_##name(data, count, type, to, tag, comm); }, \
        [] { return MPI_SUCCESS; });                                                                                   \
  }
#define ANNULUS_START_SEND(name)                                                                 \
  int MPI_##name(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, \
                 MPI_Request* request) {                                                         \
    return sending(                                                                              \
        "MPI_" #name, data, count, type, to, tag, comm,                                          \
        [&] { return PMPI_##name(data, count, type, to, tag, comm, request); },                  \
        [&] {                                                                                    \
          *request = MPI_REQUEST_NULL;                                                           \
          return MPI_SUCCESS;                                                                    \
        });                                                                                      \
  }

ANNULUS_SEND(Send)
ANNULUS_SEND(Ssend)
ANNULUS_SEND(Bsend)
ANNULUS_SEND(Rsend)
ANNULUS_START_SEND(Isend)
ANNULUS_START_SEND(Issend)
ANNULUS_START_SEND(Ibsend)
ANNULUS_START_SEND(Irsend)

int MPI_Sendrecv(const void* data, int count, MPI_Datatype type, int to, int tag, void* in, int in_count,
                 MPI_Datatype in_type, int from, int in_tag, MPI_Comm comm, MPI_Status* status) {
  return sending(
      "MPI_Sendrecv", data, count, type, to, tag, comm,
      [&] { return PMPI_Sendrecv(data, count, type, to, tag, in, in_count, in_type, from, in_tag, comm, status); },
      [&] { return PMPI_Recv(in, in_count, in_type, from, in_tag, comm, status); });
}

// The other calls that communicate: they can be delayed, and their rank killed or stopped.
#define ANNULUS_CALL(name, parameters, arguments) \
  int MPI_##name parameters {                     \
    meet_fault("MPI_" #name);                     \
    return PMPI_##name arguments;                 \
  }

ANNULUS_CALL(Recv, (void* in, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Status* s),
             (in, n, t, from, tag, c, s))
ANNULUS_CALL(Irecv, (void* in, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Request* r),
             (in, n, t, from, tag, c, r))
ANNULUS_CALL(Barrier, (MPI_Comm c), (c))
ANNULUS_CALL(Bcast, (void* d, int n, MPI_Datatype t, int root, MPI_Comm c), (d, n, t, root, c))
ANNULUS_CALL(Reduce, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm c),
             (d, o, n, t, op, root, c))
ANNULUS_CALL(Allreduce, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c), (d, o, n, t, op, c))
ANNULUS_CALL(Iallreduce, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c, MPI_Request* r),
             (d, o, n, t, op, c, r))
ANNULUS_CALL(Reduce_scatter, (const void* d, void* o, const int n[], MPI_Datatype t, MPI_Op op, MPI_Comm c),
             (d, o, n, t, op, c))
ANNULUS_CALL(Reduce_scatter_block, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c),
             (d, o, n, t, op, c))
ANNULUS_CALL(Gather, (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, int root, MPI_Comm c),
             (d, n, t, o, m, u, root, c))
ANNULUS_CALL(Scatter, (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, int root, MPI_Comm c),
             (d, n, t, o, m, u, root, c))
ANNULUS_CALL(Allgather, (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, MPI_Comm c),
             (d, n, t, o, m, u, c))
ANNULUS_CALL(Allgatherv,
             (const void* d, int n, MPI_Datatype t, void* o, const int m[], const int at[], MPI_Datatype u, MPI_Comm c),
             (d, n, t, o, m, at, u, c))
ANNULUS_CALL(Alltoall, (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, MPI_Comm c),
             (d, n, t, o, m, u, c))
ANNULUS_CALL(Alltoallv,
             (const void* d, const int n[], const int at[], MPI_Datatype t, void* o, const int m[], const int to[],
              MPI_Datatype u, MPI_Comm c),
             (d, n, at, t, o, m, to, u, c))

}  // extern "C"
