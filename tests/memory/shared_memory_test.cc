// Tests memory that processes lend to each other: between two owners in one process, and between processes.
#include "memory/shared_memory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/error.h"
#include "memory/releasable.h"

namespace annulus {
namespace {

constexpr int64_t kLength = 50'000;

at::Tensor numbers(SharedMemory& memory, double first, int64_t length = kLength) {
  at::Tensor tensor = memory.allocate({length}, at::kDouble);
  tensor.copy_(at::arange(first, first + static_cast<double>(length), at::kDouble));
  return tensor;
}

at::Tensor borrowed(SharedMemory& memory, const LentMemory& lent) {
  const at::Tensor tensor = tensor_without_memory({lent.bytes / 8}, at::kDouble);
  give_memory(tensor, memory.borrow(lent));
  return tensor;
}

bool counts_from(const at::Tensor& tensor, double first) {
  return at::equal(tensor, at::arange(first, first + static_cast<double>(tensor.numel()), at::kDouble));
}

int64_t mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:annulus") != std::string::npos ? 1 : 0;
  return count;
}

int64_t open_files() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// The memory that the file which a descriptor of this process belongs to takes.
int64_t bytes_in(int file) {
  struct stat status {};
  fstat(file, &status);
  return int64_t{512} * status.st_blocks;
}

TEST(SharedMemory, LendsWhatItAllocates) {
  SharedMemory owner, other;
  const at::Tensor mine = numbers(owner, 5);
  ASSERT_TRUE(owner.holds(mine));
  EXPECT_FALSE(other.holds(mine));
  const auto lent = owner.lend(mine);
  ASSERT_TRUE(lent);
  EXPECT_EQ(lent->bytes, 8 * kLength);
  const at::Tensor theirs = borrowed(other, *lent);
  EXPECT_NE(theirs.const_data_ptr(), mine.const_data_ptr());  // mapped a second time
  EXPECT_TRUE(counts_from(theirs, 5));
  theirs.fill_(3);
  EXPECT_EQ(mine[kLength - 1].item<double>(), 3);
}

TEST(SharedMemory, LendsPartsAndWhatItHasBorrowed) {
  SharedMemory owner, second, third;
  at::Tensor mine = numbers(owner, 0);
  at::Tensor part = borrowed(second, *owner.lend(mine.narrow(0, 10'000, 20'000)));
  EXPECT_TRUE(counts_from(part, 10'000));
  const at::Tensor last = borrowed(third, *second.lend(part.narrow(0, 1'000, 10'000)));
  mine.reset();
  part.reset();
  const at::Tensor other = numbers(owner, 7);  // must not take the memory that the third one holds
  EXPECT_TRUE(counts_from(last, 11'000));
}

TEST(SharedMemory, ReusesMemoryOnceNobodyHoldsIt) {
  SharedMemory owner, other;
  at::Tensor mine = numbers(owner, 0);
  const void* const first = mine.const_data_ptr();
  at::Tensor theirs;
  {
    const LentMemory lent = *owner.lend(mine);
    mine.reset();
    EXPECT_NE(numbers(owner, 1).const_data_ptr(), first);  // lent, but not yet received
    theirs = borrowed(other, lent);
  }
  EXPECT_NE(numbers(owner, 1).const_data_ptr(), first);
  EXPECT_TRUE(counts_from(theirs, 0));
  theirs.reset();
  const at::Tensor a = numbers(owner, 1), b = numbers(owner, 2);
  EXPECT_TRUE(a.const_data_ptr() == first || b.const_data_ptr() == first);
  EXPECT_EQ(owner.held().idle, 0);
}

// A borrower maps a segment once, however often it is lent.
TEST(SharedMemory, KeepsMappings) {
  SharedMemory owner, other;
  const int64_t before = mapped_segments(), files = open_files();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(counts_from(borrowed(other, *owner.lend(numbers(owner, i))), i));
  EXPECT_EQ(mapped_segments() - before, 2);
  EXPECT_EQ(open_files() - files, 1);  // the owner's
}

TEST(SharedMemory, KeepsNoMoreThanItHasUsedAtOnce) {
  SharedMemory owner, other;
  const int64_t before = mapped_segments();
  int64_t most = 0;
  for (int64_t length = 10'000; length < 4'000'000; length = length * 5 / 2) {
    const at::Tensor tensor = numbers(owner, 0, length);
    most = std::max(most, owner.held().used);
    EXPECT_LE(owner.held().idle, most) << length;
    borrowed(other, *owner.lend(tensor));
  }
  // The borrower drops mappings of what the owner has given up when it makes a new one.
  borrowed(other, *owner.lend(numbers(owner, 0, 5'000'000)));
  EXPECT_LE(mapped_segments() - before, 8);
}

// A borrower keeps its mapping until it makes a new one, but not the memory.
TEST(SharedMemory, GivesMemoryBackThatAnotherProcessHasMapped) {
  SharedMemory owner, other;
  at::Tensor small = numbers(owner, 0);
  const LentMemory lent = *owner.lend(small);
  const int file = dup(static_cast<int>(lent.file));
  at::Tensor theirs = borrowed(other, lent);
  small.reset();
  numbers(owner, 0, 3 * kLength);  // gives up nothing, because the small one is in use
  numbers(owner, 0, 9 * kLength);
  EXPECT_TRUE(counts_from(theirs, 0));
  EXPECT_GE(bytes_in(file), 8 * kLength);
  theirs.reset();
  numbers(owner, 0, 27 * kLength);
  EXPECT_LT(bytes_in(file), 8 * kLength);
  close(file);
}

// All segments of a process that has as many as it may are idle, and none of them is long enough.
TEST(SharedMemory, GivesUpIdleSegmentsForOneOfAnotherSize) {
  SharedMemory owner;
  {
    std::vector<at::Tensor> held;
    while (held.empty() || owner.holds(held.back())) held.push_back(numbers(owner, 0));
    EXPECT_GT(held.size(), 100u);
  }
  EXPECT_TRUE(owner.holds(numbers(owner, 0, 100'000)));
}

TEST(SharedMemory, RefusesAddressesOutsideOfTheSegment) {
  SharedMemory owner, other;
  const at::Tensor tensor = numbers(owner, 7);
  for (const auto& change : std::vector<void (*)(LentMemory&)>{
           [](LentMemory& m) { m.offset = 64; }, [](LentMemory& m) { m.offset += m.length; },
           [](LentMemory& m) { m.bytes = m.length; }, [](LentMemory& m) { m.bytes = -8; }}) {
    LentMemory lent = *owner.lend(tensor);
    EXPECT_TRUE(counts_from(borrowed(other, lent), 7));  // from here on the segment is known
    change(lent);
    EXPECT_THROW(other.borrow(lent), Error);
  }
}

// For example a worker that loads data ends with copies of all objects of the process that forked it. What it allocates
// must not lie in a segment that the process may use at the same time.
TEST(SharedMemory, ForkedChildrenHoldNothing) {
  SharedMemory owner;
  at::Tensor mine = numbers(owner, 3);
  numbers(owner, 4);  // leaves an idle segment
  const pid_t child = fork();
  if (child == 0) {
    mine.reset();
    _exit(owner.holds(numbers(owner, 5)) ? 1 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_NE(numbers(owner, 9).const_data_ptr(), mine.const_data_ptr());
  EXPECT_TRUE(counts_from(mine, 3));
}

TEST(SharedMemory, SmallTensorsAreOrdinary) {
  SharedMemory owner;
  for (const int64_t length : {0, 1, 1'000}) {
    const at::Tensor tensor = owner.allocate({length, 2}, at::kDouble);
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({length, 2}));
    EXPECT_FALSE(owner.holds(tensor));
    EXPECT_FALSE(owner.lend(tensor));
  }
  EXPECT_EQ(owner.held().used, 0);
}

TEST(SharedMemory, TensorsOutliveTheObject) {
  at::Tensor mine, theirs;
  {
    SharedMemory owner, other;
    mine = numbers(owner, 4);
    theirs = borrowed(other, *owner.lend(mine));
  }
  EXPECT_TRUE(counts_from(mine, 4));
  EXPECT_TRUE(counts_from(theirs, 4));
}

TEST(SharedMemory, ReachesOnlyWhatIsThere) {
  SharedMemory owner;
  EXPECT_TRUE(SharedMemory().reaches(owner.sample()));
  for (const auto& change :
       std::vector<void (*)(LentMemory&)>{[](LentMemory& m) { m.owner += 1; }, [](LentMemory& m) { m.file += 1000; },
                                          [](LentMemory& m) { m.process = 0; }, [](LentMemory& m) { m.length *= 2; }}) {
    LentMemory wrong = owner.sample();
    change(wrong);
    EXPECT_FALSE(SharedMemory().reaches(wrong));
  }
}

// Starts a process that lends a tensor, numbers from 20, and sends its address. It ends when `ending` is closed.
struct Lender {
  Lender() {
    int addresses[2], ends[2];
    if (pipe(addresses) != 0 || pipe(ends) != 0) std::abort();
    pid = fork();
    if (pid == 0) {
      close(ends[1]);
      SharedMemory owner;
      const at::Tensor tensor = numbers(owner, 20);
      const LentMemory lent = *owner.lend(tensor);
      char byte = 0;
      const bool sent = write(addresses[1], &lent, sizeof lent) == sizeof lent;
      _exit(sent && read(ends[0], &byte, 1) == 0 ? 0 : 1);
    }
    close(addresses[1]), close(ends[0]);
    ending = ends[1];
    received = read(addresses[0], &lent, sizeof lent) == sizeof lent;
    close(addresses[0]);
  }
  void end() const {
    close(ending);
    int status = -1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }

  pid_t pid = 0;
  int ending = -1;
  bool received = false;
  LentMemory lent;
};

TEST(SharedMemory, OutlivesItsProcess) {
  const Lender lender;
  ASSERT_TRUE(lender.received);
  SharedMemory memory;
  const at::Tensor tensor = borrowed(memory, lender.lent);
  lender.end();
  EXPECT_TRUE(counts_from(tensor, 20));
}

TEST(SharedMemory, SaysThatTheLenderHasEnded) {
  const Lender lender;
  ASSERT_TRUE(lender.received);
  lender.end();
  SharedMemory memory;
  try {
    memory.borrow(lender.lent);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kComm);
    EXPECT_NE(std::string(e.what()).find("process " + std::to_string(lender.pid)), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("has probably ended"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace annulus
