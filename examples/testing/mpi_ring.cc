// A ring all-reduce of one's own that calls MPI itself, as a program: tests start it with mpirun. Every block carries
// the rank that it comes from, so that a message that is not the expected one is noticed.
//   mpirun -n 3 mpi_ring [--long]      --long: blocks that MPI cannot buffer
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

// With RING_BUG="sends first" a rank begins to receive when its message has left. That works as long as MPI buffers it.
void pass_on(const std::vector<double>& out, std::vector<double>& in, int right, int left) {
  const char* const bug = std::getenv("RING_BUG");
  const int count = static_cast<int>(out.size());
  if (bug != nullptr && std::strcmp(bug, "sends first") == 0) {
    MPI_Send(out.data(), count, MPI_DOUBLE, right, 0, MPI_COMM_WORLD);
    MPI_Recv(in.data(), count, MPI_DOUBLE, left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  } else {
    MPI_Sendrecv(out.data(), count, MPI_DOUBLE, right, 0, in.data(), count, MPI_DOUBLE, left, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const size_t length = argc > 1 ? 1'000'000 : 100;
  std::vector<double> sum(length, rank + 1), out(length + 1, rank + 1), in(length + 1);
  out.back() = rank;
  for (int step = 1; step < size; ++step) {
    pass_on(out, in, (rank + 1) % size, (rank + size - 1) % size);
    const int expected = (rank + size - step) % size;
    if (in.back() != expected) {
      std::fprintf(stderr, "rank %d: expected the block of rank %d, got that of rank %.0f\n", rank, expected,
                   in.back());
      MPI_Abort(MPI_COMM_WORLD, 5);
    }
    for (size_t i = 0; i < length; ++i) sum[i] += in[i];
    out.swap(in);
  }
  const bool right = sum.front() == size * (size + 1) / 2 && sum.back() == sum.front();
  std::printf("rank %d: the sum is %s\n", rank, right ? "right" : "wrong");
  MPI_Finalize();
  return right ? 0 : 1;
}
