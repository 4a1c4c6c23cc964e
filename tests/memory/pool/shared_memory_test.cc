// Tests memory that processes lend to each other: between two owners in one process, and between processes.
#include "memory/pool/shared_memory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "memory/pool/pool.h"
#include "memory/releasable.h"

namespace {
int interruptions = 0;  // how many calls of fallocate end early from now on
}

// In place of the C library's: whether a signal interrupts it depends on the version of Linux.
extern "C" int fallocate(int file, int mode, off_t begin, off_t length) {
  if (interruptions > 0) {
    --interruptions;
    errno = EINTR;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fallocate, file, mode, begin, length));
}

namespace annulus::shared_memory_test {
namespace {

constexpr int64_t kLength = 50'000;

// The second can borrow from the first.
struct Two {
  Two() { other.connect(owner.file()); }
  SharedMemory owner, other;
};

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

// The memory that the file of this owner takes.
int64_t bytes_in(const SharedMemory& owner) {
  struct stat status {};
  fstat(static_cast<int>(owner.file().descriptor), &status);
  return int64_t{512} * status.st_blocks;
}

TEST(SharedMemory, LendsWhatItAllocates) {
  Two two;
  auto& [owner, other] = two;
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
  second.connect(owner.file());
  third.connect(owner.file());
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
  Two two;
  auto& [owner, other] = two;
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

// A borrower maps a segment once, however often it is lent. Neither opens files.
TEST(SharedMemory, KeepsMappings) {
  Two two;
  auto& [owner, other] = two;
  const int64_t before = mapped_segments(), files = open_files();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(counts_from(borrowed(other, *owner.lend(numbers(owner, i))), i));
  EXPECT_EQ(mapped_segments() - before, 2);
  EXPECT_EQ(open_files(), files);
}

// Sets the bound of the pool of this process for a while.
class Bound {
 public:
  explicit Bound(int64_t bytes) { Pool::process().set_bound(bytes); }
  ~Bound() { Pool::process().set_bound(before_); }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

 private:
  const int64_t before_ = Pool::process().bound();
};

PoolStats lent_blocks() { return Pool::process().reports()[static_cast<size_t>(PoolPurpose::kLent)].stats; }

TEST(SharedMemory, KeepsNoMoreThanTheBoundOfThePool) {
  const Bound bound(8 << 20);
  Two two;
  auto& [owner, other] = two;
  const int64_t before = mapped_segments();
  for (int64_t length = 10'000; length < 4'000'000; length = length * 5 / 2) {
    const at::Tensor tensor = numbers(owner, 0, length);
    EXPECT_LE(owner.held().idle, 8 << 20) << length;
    borrowed(other, *owner.lend(tensor));
  }
  EXPECT_LE(owner.held().idle, 8 << 20);
  EXPECT_EQ(owner.held().idle, lent_blocks().cached);
  // The borrower drops mappings of what the owner has given up when it makes a new one.
  borrowed(other, *owner.lend(numbers(owner, 0, 5'000'000)));
  EXPECT_LE(mapped_segments() - before, 10);
}

// A borrower keeps its mapping until it makes a new one, but not the memory.
TEST(SharedMemory, GivesMemoryBackThatAnotherProcessHasMapped) {
  Two two;
  auto& [owner, other] = two;
  const int64_t table = bytes_in(owner);
  for (int64_t length = kLength; length < 100 * kLength; length *= 3)
    borrowed(other, *owner.lend(numbers(owner, 0, length)));
  EXPECT_EQ(owner.held().used, 0);
  EXPECT_EQ(bytes_in(owner), table + owner.held().idle);
  EXPECT_GT(owner.held().idle, 0);
  Pool::process().trim();
  EXPECT_EQ(owner.held().idle, 0);
  EXPECT_EQ(bytes_in(owner), table);
}

// What the pool of the owner calls in use is what somebody holds, in whichever process.
TEST(SharedMemory, IsInUseAsLongAsAnybodyHoldsIt) {
  const int64_t before = lent_blocks().in_use;
  Two two;
  auto& [owner, other] = two;
  at::Tensor mine = numbers(owner, 0);
  const int64_t bytes = lent_blocks().in_use - before;
  EXPECT_GE(bytes, 8 * kLength);
  const LentMemory lent = *owner.lend(mine);
  mine.reset();
  EXPECT_EQ(lent_blocks().in_use - before, bytes);
  at::Tensor theirs = borrowed(other, lent);
  EXPECT_EQ(lent_blocks().in_use - before, bytes);
  theirs.reset();
  EXPECT_EQ(lent_blocks().in_use, before);
}

// One segment is found as fast among many as among few, and a long run of calls takes neither more memory, nor files,
// nor mappings.
TEST(SharedMemory, ManyLoansTakeNoMoreThanAFew) {
  Two two;
  auto& [owner, other] = two;
  const auto lend = [&, &owner = owner, &other = other](int times) {
    for (int i = 0; i < times; ++i) {
      const at::Tensor mine = owner.allocate({20'000 + 4'000 * (i % 8)}, at::kDouble);
      const at::Tensor theirs = borrowed(other, *owner.lend(mine));
    }
  };
  lend(16);
  const int64_t bytes = bytes_in(owner), files = open_files(), mappings = mapped_segments(),
                taken = lent_blocks().taken;
  lend(20'000);
  EXPECT_EQ(bytes_in(owner), bytes);
  EXPECT_EQ(open_files(), files);
  EXPECT_EQ(mapped_segments(), mappings);
  EXPECT_EQ(lent_blocks().taken, taken);
}

// Once they are connected, processes lend and borrow even if they can open no more files.
TEST(SharedMemory, NeedsNoFilesToLend) {
  Two two;
  auto& [owner, other] = two;
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{0, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  for (const int64_t length : {kLength, 3 * kLength}) {
    const at::Tensor mine = numbers(owner, 1, length);
    EXPECT_TRUE(owner.holds(mine));
    EXPECT_TRUE(counts_from(borrowed(other, *owner.lend(mine)), 1));
  }
  setrlimit(RLIMIT_NOFILE, &before);
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
  Two two;
  auto& [owner, other] = two;
  const at::Tensor tensor = numbers(owner, 7);
  for (const auto& change : std::vector<void (*)(LentMemory&)>{
           [](LentMemory& m) { m.offset = -64; }, [](LentMemory& m) { m.offset += 1 << 30; },
           [](LentMemory& m) { m.bytes = 1 << 30; }, [](LentMemory& m) { m.bytes = -8; },
           [](LentMemory& m) { m.slot += 1; }, [](LentMemory& m) { m.slot = -1; },
           [](LentMemory& m) { m.slot = 1 << 20; }, [](LentMemory& m) { m.file += 1; }}) {
    LentMemory lent = *owner.lend(tensor);
    EXPECT_TRUE(counts_from(borrowed(other, lent), 7));  // from here on the segment is known
    change(lent);
    EXPECT_THROW(other.borrow(lent), Error);
  }
}

TEST(SharedMemory, SignalsDoNotKeepItFromMemory) {
  SharedMemory owner;
  interruptions = 5;
  EXPECT_TRUE(owner.holds(owner.allocate({10 << 20}, at::kByte)));
  EXPECT_EQ(std::exchange(interruptions, 0), 0);
}

// ulimit -f: beyond it, the system would end the process.
TEST(SharedMemory, KeepsToTheLimitOnTheSizeOfFiles) {
  const pid_t child = fork();
  if (child == 0) {
    SharedMemory owner;
    const rlimit limit{1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    const at::Tensor small = owner.allocate({100'000}, at::kByte), large = owner.allocate({2 << 20}, at::kByte);
    _exit(owner.holds(small) && !owner.holds(large) ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
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
    Two two;
    auto& [owner, other] = two;
    mine = numbers(owner, 4);
    theirs = borrowed(other, *owner.lend(mine));
  }
  EXPECT_TRUE(counts_from(mine, 4));
  EXPECT_TRUE(counts_from(theirs, 4));
}

TEST(SharedMemory, OpensOnlyWhatIsThere) {
  SharedMemory owner;
  SharedMemory().connect(owner.file());
  for (const auto& change : std::vector<void (*)(SharedFile&)>{
           [](SharedFile& f) { f.number += 1; }, [](SharedFile& f) { f.device += 1; },
           [](SharedFile& f) { f.descriptor += 1000; }, [](SharedFile& f) { f.process = 0; }}) {
    SharedFile wrong = owner.file();
    change(wrong);
    EXPECT_THROW(SharedMemory().connect(wrong), Error);
  }
  // What seems to be its own file, or one that it has opened already, is another process's.
  EXPECT_THROW(owner.connect(owner.file()), Error);
  SharedMemory other;
  other.connect(owner.file());
  EXPECT_THROW(other.connect(owner.file()), Error);
}

// Opening a device, for example, may have effects.
TEST(SharedMemory, OpensNothingElse) {
  const std::string path = ::testing::TempDir() + "something else";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const int events = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  ASSERT_GE(inotify_add_watch(events, path.c_str(), IN_OPEN), 0);
  SharedMemory owner;
  SharedFile wrong = owner.file();
  wrong.descriptor = file;
  EXPECT_THROW(SharedMemory().connect(wrong), Error);
  std::array<char, 4096> event{};
  EXPECT_EQ(read(events, event.data(), event.size()), -1);  // nothing has happened
  close(events), close(file);
}

// Starts a process that lends a tensor, numbers from 20, and sends its address. It ends when `ending` is closed.
struct Lender {
  struct Address {
    SharedFile file;
    LentMemory lent;
  };

  Lender() {
    int addresses[2], ends[2];
    if (pipe(addresses) != 0 || pipe(ends) != 0) std::abort();
    pid = fork();
    if (pid == 0) {
      close(ends[1]);
      SharedMemory owner;
      const at::Tensor tensor = numbers(owner, 20);
      const Address mine{owner.file(), *owner.lend(tensor)};
      char byte = 0;
      const bool sent = write(addresses[1], &mine, sizeof mine) == sizeof mine;
      _exit(sent && read(ends[0], &byte, 1) == 0 ? 0 : 1);
    }
    close(addresses[1]), close(ends[0]);
    ending = ends[1];
    received = read(addresses[0], &address, sizeof address) == sizeof address;
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
  Address address;
};

TEST(SharedMemory, OutlivesItsProcess) {
  const Lender lender;
  ASSERT_TRUE(lender.received);
  SharedMemory memory;
  memory.connect(lender.address.file);
  lender.end();
  EXPECT_TRUE(counts_from(borrowed(memory, lender.address.lent), 20));
}

TEST(SharedMemory, SaysWhichLenderCannotBeFound) {
  const Lender lender;
  ASSERT_TRUE(lender.received);
  lender.end();
  SharedMemory memory;
  try {
    memory.connect(lender.address.file);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUnavailable);
    EXPECT_NE(std::string(e.what()).find("process " + std::to_string(lender.pid)), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace annulus::shared_memory_test
