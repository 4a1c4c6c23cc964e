// A library that MPI programs load with LD_PRELOAD, and that carries out a plan of faults (fault_plan.h) on them:
//
//   ANNULUS_MPI_FAULTS='kill:rank=1,nth=40' mpirun -x ANNULUS_MPI_FAULTS -x LD_PRELOAD=.../libannulus_mpi_faults.so ...
//
// mpi_test (bazel/mpi.bzl) and annulus_add_mpi_test (CMake) do that with `faults`. It takes the place of the functions
// of MPI below and calls them by their profiling names (MPI standard, chapter "Tool Support"). The rank is that in
// MPI_COMM_WORLD. A fault is reported to stderr. Programs in Fortran call other names and are not affected.
//
// A plan counts these calls: sends and receives, blocking and begun; starts of persistent requests; and the collectives
// of a communicator, blocking and begun. Probes, waits and tests, one-sided communication, collectives of
// neighbourhoods and files are not counted and meet no fault.
#include <mpi.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
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

// What a call sends to one rank.
struct Message {
  const void* data = nullptr;
  int count = 0;
  MPI_Datatype type = MPI_DATATYPE_NULL;
  int to = MPI_PROC_NULL, tag = 0;
  MPI_Comm comm = MPI_COMM_NULL;
};

// A message that is sent later or once more, with a copy of its elements. A copy that is on its way is kept until the
// end of the process, because nobody waits for it.
struct LateMessage {
  std::vector<char>* memory;
  MPI_Aint offset;
  Message message;

  explicit LateMessage(const Message& of) : memory(new std::vector<char>()), offset(0), message(of) {
    MPI_Aint lower = 0, extent = 0, true_lower = 0, true_extent = 0;
    PMPI_Type_get_extent(of.type, &lower, &extent);
    PMPI_Type_get_true_extent(of.type, &true_lower, &true_extent);
    const MPI_Aint bytes = of.count > 0 ? extent * (of.count - 1) + true_extent : 0;
    offset = true_lower;
    const char* const first = static_cast<const char*>(of.data) + true_lower;
    memory->assign(first, first + bytes);
    PMPI_Type_dup(of.type, &message.type);  // the program may free its own
  }

  void send() const {
    MPI_Request request = MPI_REQUEST_NULL;
    PMPI_Isend(memory->data() - offset, message.count, message.type, message.to, message.tag, message.comm, &request);
    if (request != MPI_REQUEST_NULL) PMPI_Request_free(&request);
  }
};

struct State {
  std::mutex mutex;  // MPI_THREAD_MULTIPLE
  std::unique_ptr<FaultCounter> counter;
  int rank = 0;
  std::vector<LateMessage> late;
  std::map<MPI_Request, Message> persistent;  // what a request of MPI_Send_init() and so on sends when it is started
};

State& state() {
  static State* const state = new State();  // never destroyed: MPI may be called late
  return *state;
}

void say(const char* what, const char* function) {
  std::fprintf(stderr, "rank %d: the plan of faults %s %s()\n", state().rank, what, function);
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

// Carries out a call that sends these messages to single ranks: `send` does it, `leave_out` does what the call does
// besides.
template <class Send, class LeaveOut>
int sending(const char* function, std::vector<Message> messages, Send send, LeaveOut leave_out) {
  std::erase_if(messages, [](const Message& m) { return m.to == MPI_PROC_NULL; });
  const FaultCounter::Now now = meet_fault(function, !messages.empty());
  const bool holds = now.drop || now.reorder;
  std::vector<LateMessage> after;
  if (!messages.empty()) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    std::vector<LateMessage>& late = state().late;
    const auto follows = [&](const LateMessage& one) {
      return std::any_of(messages.begin(), messages.end(),
                         [&](const Message& m) { return m.to == one.message.to && m.comm == one.message.comm; });
    };
    const auto waits = [&](const LateMessage& one) { return holds || !follows(one); };
    const auto first = std::stable_partition(late.begin(), late.end(), waits);
    after.assign(first, late.end());
    late.erase(first, late.end());
    for (const Message& message : messages) {
      if (now.duplicate && !holds) after.emplace_back(message);
      if (now.reorder && !now.drop) late.emplace_back(message);
    }
  }
  if (now.drop) say("drops the message of", function);
  if (now.duplicate) say("doubles the message of", function);
  if (now.reorder) say("holds back the message of", function);
  const int result = holds ? leave_out() : send();
  for (const LateMessage& message : after) message.send();
  return result;
}

// Remembers what a persistent request sends.
int remember(int result, const MPI_Request* request, const Message& message) {
  if (result == MPI_SUCCESS) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().persistent[*request] = message;
  }
  return result;
}

// Starts persistent requests. One whose message is left out stays inactive, so that a wait for it returns at once.
int start_requests(const char* function, int count, MPI_Request requests[]) {
  std::vector<Message> messages;
  std::vector<MPI_Request*> others;  // that send nothing to a single rank
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    for (int i = 0; i < count; ++i) {
      const auto known = state().persistent.find(requests[i]);
      if (known != state().persistent.end()) messages.push_back(known->second);
      if (known == state().persistent.end() || known->second.to == MPI_PROC_NULL) others.push_back(&requests[i]);
    }
  }
  return sending(
      function, std::move(messages), [&] { return PMPI_Startall(count, requests); },
      [&] {
        int result = MPI_SUCCESS;
        for (MPI_Request* const request : others) {
          if (result == MPI_SUCCESS) result = PMPI_Start(request);
        }
        return result;
      });
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

#define ANNULUS_SEND(name, begin, init)                                                                      \
  int MPI_##name(const void* d, int n, MPI_Datatype t, int to, int tag, MPI_Comm c) {                        \
    return sending(                                                                                          \
        "MPI_" #name, {{d, n, t, to, tag, c}}, [&] { return PMPI_##name(d, n, t, to, tag, c); },             \
        [] { return MPI_SUCCESS; });                                                                         \
  }                                                                                                          \
  int MPI_##begin(const void* d, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request* request) { \
    return sending(                                                                                          \
        "MPI_" #begin, {{d, n, t, to, tag, c}}, [&] { return PMPI_##begin(d, n, t, to, tag, c, request); },  \
        [&] {                                                                                                \
          *request = MPI_REQUEST_NULL;                                                                       \
          return MPI_SUCCESS;                                                                                \
        });                                                                                                  \
  }                                                                                                          \
  int MPI_##init(const void* d, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request* request) {  \
    return remember(PMPI_##init(d, n, t, to, tag, c, request), request, {d, n, t, to, tag, c});              \
  }

ANNULUS_SEND(Send, Isend, Send_init)
ANNULUS_SEND(Ssend, Issend, Ssend_init)
ANNULUS_SEND(Bsend, Ibsend, Bsend_init)
ANNULUS_SEND(Rsend, Irsend, Rsend_init)

int MPI_Sendrecv(const void* data, int count, MPI_Datatype type, int to, int tag, void* in, int in_count,
                 MPI_Datatype in_type, int from, int in_tag, MPI_Comm comm, MPI_Status* status) {
  return sending(
      "MPI_Sendrecv", {{data, count, type, to, tag, comm}},
      [&] { return PMPI_Sendrecv(data, count, type, to, tag, in, in_count, in_type, from, in_tag, comm, status); },
      [&] { return PMPI_Recv(in, in_count, in_type, from, in_tag, comm, status); });
}

int MPI_Sendrecv_replace(void* data, int count, MPI_Datatype type, int to, int tag, int from, int in_tag, MPI_Comm comm,
                         MPI_Status* status) {
  return sending(
      "MPI_Sendrecv_replace", {{data, count, type, to, tag, comm}},
      [&] { return PMPI_Sendrecv_replace(data, count, type, to, tag, from, in_tag, comm, status); },
      [&] { return PMPI_Recv(data, count, type, from, in_tag, comm, status); });
}

int MPI_Start(MPI_Request* request) { return start_requests("MPI_Start", 1, request); }
int MPI_Startall(int count, MPI_Request requests[]) { return start_requests("MPI_Startall", count, requests); }

// Not a call that communicates: another request may get the number of this one.
int MPI_Request_free(MPI_Request* request) {
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().persistent.erase(*request);
  }
  return PMPI_Request_free(request);
}

// The other calls that communicate: they can be delayed, and their rank killed or stopped.
#define ANNULUS_LIST(...) __VA_ARGS__
#define ANNULUS_CALL(name, parameters, arguments) \
  int MPI_##name parameters {                     \
    meet_fault("MPI_" #name);                     \
    return PMPI_##name arguments;                 \
  }
// A collective, blocking and begun.
#define ANNULUS_COLLECTIVE(name, begin, parameters, arguments)            \
  ANNULUS_CALL(name, (ANNULUS_LIST parameters), (ANNULUS_LIST arguments)) \
  ANNULUS_CALL(begin, (ANNULUS_LIST parameters, MPI_Request * request), (ANNULUS_LIST arguments, request))

ANNULUS_CALL(Recv, (void* in, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Status* s),
             (in, n, t, from, tag, c, s))
ANNULUS_CALL(Irecv, (void* in, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Request* r),
             (in, n, t, from, tag, c, r))
ANNULUS_CALL(Mrecv, (void* in, int n, MPI_Datatype t, MPI_Message* m, MPI_Status* s), (in, n, t, m, s))
ANNULUS_CALL(Imrecv, (void* in, int n, MPI_Datatype t, MPI_Message* m, MPI_Request* r), (in, n, t, m, r))
ANNULUS_COLLECTIVE(Barrier, Ibarrier, (MPI_Comm c), (c))
ANNULUS_COLLECTIVE(Bcast, Ibcast, (void* d, int n, MPI_Datatype t, int root, MPI_Comm c), (d, n, t, root, c))
ANNULUS_COLLECTIVE(Reduce, Ireduce, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, int root, MPI_Comm c),
                   (d, o, n, t, op, root, c))
ANNULUS_COLLECTIVE(Allreduce, Iallreduce, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c),
                   (d, o, n, t, op, c))
ANNULUS_COLLECTIVE(Scan, Iscan, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c),
                   (d, o, n, t, op, c))
ANNULUS_COLLECTIVE(Exscan, Iexscan, (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c),
                   (d, o, n, t, op, c))
ANNULUS_COLLECTIVE(Reduce_scatter, Ireduce_scatter,
                   (const void* d, void* o, const int n[], MPI_Datatype t, MPI_Op op, MPI_Comm c), (d, o, n, t, op, c))
ANNULUS_COLLECTIVE(Reduce_scatter_block, Ireduce_scatter_block,
                   (const void* d, void* o, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c), (d, o, n, t, op, c))
ANNULUS_COLLECTIVE(Gather, Igather,
                   (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, int root, MPI_Comm c),
                   (d, n, t, o, m, u, root, c))
ANNULUS_COLLECTIVE(Gatherv, Igatherv,
                   (const void* d, int n, MPI_Datatype t, void* o, const int m[], const int at[], MPI_Datatype u,
                    int root, MPI_Comm c),
                   (d, n, t, o, m, at, u, root, c))
ANNULUS_COLLECTIVE(Scatter, Iscatter,
                   (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, int root, MPI_Comm c),
                   (d, n, t, o, m, u, root, c))
ANNULUS_COLLECTIVE(Scatterv, Iscatterv,
                   (const void* d, const int n[], const int at[], MPI_Datatype t, void* o, int m, MPI_Datatype u,
                    int root, MPI_Comm c),
                   (d, n, at, t, o, m, u, root, c))
ANNULUS_COLLECTIVE(Allgather, Iallgather,
                   (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, MPI_Comm c),
                   (d, n, t, o, m, u, c))
ANNULUS_COLLECTIVE(Allgatherv, Iallgatherv,
                   (const void* d, int n, MPI_Datatype t, void* o, const int m[], const int at[], MPI_Datatype u,
                    MPI_Comm c),
                   (d, n, t, o, m, at, u, c))
ANNULUS_COLLECTIVE(Alltoall, Ialltoall,
                   (const void* d, int n, MPI_Datatype t, void* o, int m, MPI_Datatype u, MPI_Comm c),
                   (d, n, t, o, m, u, c))
ANNULUS_COLLECTIVE(Alltoallv, Ialltoallv,
                   (const void* d, const int n[], const int at[], MPI_Datatype t, void* o, const int m[],
                    const int to[], MPI_Datatype u, MPI_Comm c),
                   (d, n, at, t, o, m, to, u, c))
ANNULUS_COLLECTIVE(Alltoallw, Ialltoallw,
                   (const void* d, const int n[], const int at[], const MPI_Datatype t[], void* o, const int m[],
                    const int to[], const MPI_Datatype u[], MPI_Comm c),
                   (d, n, at, t, o, m, to, u, c))

}  // extern "C"
