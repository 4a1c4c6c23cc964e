// A program that calls MPI itself, and nothing of annulus, on two ranks: tests start it with plans of faults.
//
//   mpi_faults_main messages     rank 1 sends the numbers 1 to 6 to rank 0, WAYS times ROUNDS times, each time in seven
//                                calls that send; rank 0 prints what it received: "way 3, round 0: 1 2 3 4 5 6"
//   mpi_faults_main all          each rank calls every function that a plan counts once
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kWays = 8, kRounds = 3, kLast = 6;
constexpr int kNumber = 1, kEnd = 2, kBack = 3;  // tags
const MPI_Comm kWorld = MPI_COMM_WORLD;

void check(bool fine, const char* what) {
  if (fine) return;
  std::fprintf(stderr, "%s\n", what);
  MPI_Abort(kWorld, 5);
}

void wait_for(MPI_Request& request) { MPI_Wait(&request, MPI_STATUS_IGNORE); }

// Sends one number. Ways that receive as well receive the same number from rank 0, whatever becomes of what they send.
void send(int way, int number) {
  int in = 0;
  MPI_Request request = MPI_REQUEST_NULL, more[2];
  switch (way) {
    case 0:
      MPI_Send(&number, 1, MPI_INT, 0, kNumber, kWorld);
      return;
    case 1:
      MPI_Isend(&number, 1, MPI_INT, 0, kNumber, kWorld, &request);
      wait_for(request);
      return;
    case 2:
      MPI_Ssend(&number, 1, MPI_INT, 0, kNumber, kWorld);
      return;
    case 3:
      MPI_Issend(&number, 1, MPI_INT, 0, kNumber, kWorld, &request);
      wait_for(request);
      return;
    case 4:
      MPI_Sendrecv(&number, 1, MPI_INT, 0, kNumber, &in, 1, MPI_INT, 0, kBack, kWorld, MPI_STATUS_IGNORE);
      check(in == number, "MPI_Sendrecv has not received");
      return;
    case 5:
      in = number;
      MPI_Sendrecv_replace(&in, 1, MPI_INT, 0, kNumber, 0, kBack, kWorld, MPI_STATUS_IGNORE);
      check(in == number, "MPI_Sendrecv_replace has not received");
      return;
    case 6:
      MPI_Send_init(&number, 1, MPI_INT, 0, kNumber, kWorld, &request);
      MPI_Start(&request);
      wait_for(request);
      MPI_Request_free(&request);
      return;
    default:
      MPI_Send_init(&number, 1, MPI_INT, 0, kNumber, kWorld, &more[0]);
      MPI_Recv_init(&in, 1, MPI_INT, 0, kBack, kWorld, &more[1]);
      MPI_Startall(2, more);
      MPI_Waitall(2, more, MPI_STATUSES_IGNORE);
      check(in == number, "MPI_Startall has not received");
      for (MPI_Request& one : more) MPI_Request_free(&one);
  }
}

void send_numbers(int way) {
  for (int number = 1; number <= kLast; ++number) send(way, number);
  MPI_Send(nullptr, 0, MPI_INT, 0, kEnd, kWorld);
}

std::string received(int way) {
  std::vector<MPI_Request> back;
  std::vector<int> numbers;
  for (int number = 1; number <= kLast; ++number) numbers.push_back(number);
  if (way == 4 || way == 5 || way == 7) {
    for (const int& number : numbers) {
      MPI_Isend(&number, 1, MPI_INT, 1, kBack, kWorld, &back.emplace_back());
    }
  }
  std::string text;
  while (true) {
    int number = 0;
    MPI_Status status;
    MPI_Recv(&number, 1, MPI_INT, 1, MPI_ANY_TAG, kWorld, &status);
    if (status.MPI_TAG == kEnd) break;
    text += " " + std::to_string(number);
  }
  MPI_Waitall(static_cast<int>(back.size()), back.data(), MPI_STATUSES_IGNORE);
  return text;
}

void call_all(int rank) {
  const int peer = 1 - rank;
  int x[2] = {rank, rank}, y[2] = {};
  const int ones[2] = {1, 1}, at[2] = {0, 1}, bytes[2] = {0, sizeof(int)};
  const MPI_Datatype types[2] = {MPI_INT, MPI_INT};
  static char buffer[4096 + MPI_BSEND_OVERHEAD];
  MPI_Buffer_attach(buffer, sizeof buffer);
  MPI_Request request = MPI_REQUEST_NULL;

  // Each way of sending is received in another way.
  MPI_Request in = MPI_REQUEST_NULL, started[5];
  const auto begin = [&] { MPI_Irecv(y, 1, MPI_INT, peer, 0, kWorld, &in); };
  const auto checked = [&] {
    check(y[0] == peer, "a message is not that of the other rank");
    y[0] = -1;
  };
  begin();
  MPI_Send(x, 1, MPI_INT, peer, 0, kWorld);
  wait_for(in), checked();
  MPI_Bsend(x, 1, MPI_INT, peer, 0, kWorld);
  MPI_Recv(y, 1, MPI_INT, peer, 0, kWorld, MPI_STATUS_IGNORE), checked();
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Ibsend(x, 1, MPI_INT, peer, 0, kWorld, &request), wait_for(request);
  MPI_Mprobe(peer, 0, kWorld, &message, MPI_STATUS_IGNORE);
  MPI_Mrecv(y, 1, MPI_INT, &message, MPI_STATUS_IGNORE), checked();
  MPI_Isend(x, 1, MPI_INT, peer, 0, kWorld, &request);
  MPI_Mprobe(peer, 0, kWorld, &message, MPI_STATUS_IGNORE);
  MPI_Imrecv(y, 1, MPI_INT, &message, &in), wait_for(in), wait_for(request), checked();
  MPI_Sendrecv(x, 1, MPI_INT, peer, 0, y, 1, MPI_INT, peer, 0, kWorld, MPI_STATUS_IGNORE), checked();
  y[0] = rank;
  MPI_Sendrecv_replace(y, 1, MPI_INT, peer, 0, peer, 0, kWorld, MPI_STATUS_IGNORE), checked();
  MPI_Recv_init(y, 1, MPI_INT, peer, 0, kWorld, &started[0]);
  MPI_Start(&started[0]);
  MPI_Issend(x, 1, MPI_INT, peer, 0, kWorld, &request);
  wait_for(started[0]), wait_for(request), checked();
  MPI_Ssend_init(x, 1, MPI_INT, peer, 0, kWorld, &started[1]);
  int own[3] = {};  // by messages to the rank itself, which is ready to receive them
  for (int i = 0; i < 3; ++i) MPI_Recv_init(&own[i], 1, MPI_INT, rank, i + 1, kWorld, &started[i + 2]);
  MPI_Startall(5, started);
  int values[3] = {7, 8, 9};
  MPI_Ssend(&values[0], 1, MPI_INT, rank, 1, kWorld);
  MPI_Rsend(&values[1], 1, MPI_INT, rank, 2, kWorld);
  MPI_Irsend(&values[2], 1, MPI_INT, rank, 3, kWorld, &request), wait_for(request);
  MPI_Waitall(5, started, MPI_STATUSES_IGNORE), checked();
  check(own[0] == 7 && own[1] == 8 && own[2] == 9, "a message to the rank itself is not what was sent");
  for (MPI_Request& one : started) MPI_Request_free(&one);

  const auto sums = [&](int want) { check(y[0] == want, "a sum is wrong"); };
#define BOTH(name, begin, ...)                \
  MPI_##name(__VA_ARGS__, kWorld);            \
  MPI_##begin(__VA_ARGS__, kWorld, &request); \
  wait_for(request)
  MPI_Barrier(kWorld);
  MPI_Ibarrier(kWorld, &request), wait_for(request);
  BOTH(Bcast, Ibcast, y, 1, MPI_INT, 0);
  BOTH(Reduce, Ireduce, x, y, 1, MPI_INT, MPI_SUM, 0);
  BOTH(Allreduce, Iallreduce, x, y, 1, MPI_INT, MPI_SUM);
  sums(1);
  BOTH(Scan, Iscan, x, y, 1, MPI_INT, MPI_SUM);
  sums(rank);
  BOTH(Exscan, Iexscan, x, y, 1, MPI_INT, MPI_SUM);
  BOTH(Reduce_scatter, Ireduce_scatter, x, y, ones, MPI_INT, MPI_SUM);
  BOTH(Reduce_scatter_block, Ireduce_scatter_block, x, y, 1, MPI_INT, MPI_SUM);
  sums(1);
  BOTH(Gather, Igather, x, 1, MPI_INT, y, 1, MPI_INT, 0);
  BOTH(Gatherv, Igatherv, x, 1, MPI_INT, y, ones, at, MPI_INT, 0);
  BOTH(Scatter, Iscatter, x, 1, MPI_INT, y, 1, MPI_INT, 0);
  BOTH(Scatterv, Iscatterv, x, ones, at, MPI_INT, y, 1, MPI_INT, 0);
  BOTH(Allgather, Iallgather, x, 1, MPI_INT, y, 1, MPI_INT);
  BOTH(Allgatherv, Iallgatherv, x, 1, MPI_INT, y, ones, at, MPI_INT);
  BOTH(Alltoall, Ialltoall, x, 1, MPI_INT, y, 1, MPI_INT);
  BOTH(Alltoallv, Ialltoallv, x, ones, at, MPI_INT, y, ones, at, MPI_INT);
  y[0] = y[1] = -1;
  BOTH(Alltoallw, Ialltoallw, x, ones, bytes, types, y, ones, bytes, types);
#undef BOTH
  check(y[0] == 0 && y[1] == 1, "what is exchanged is wrong");
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(kWorld, &rank);
  if (argc > 1 && std::strcmp(argv[1], "all") == 0) {
    call_all(rank);
    std::printf("rank %d called all\n", rank);
  } else {
    for (int way = 0; way < kWays; ++way) {
      for (int round = 0; round < kRounds; ++round) {
        if (rank == 1) {
          send_numbers(way);
        } else {
          std::printf("way %d, round %d:%s\n", way, round, received(way).c_str());
        }
      }
    }
  }
  MPI_Finalize();
  return 0;
}
