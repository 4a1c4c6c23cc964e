// Memory that the processes of one host lend to each other, so that a tensor passes from one to the next without a
// copy. comm/mpi uses it for the blocks that travel between ranks.
//
// All memory that a process lends lies in one anonymous file (memfd_create). The other processes open it through
// /proc/PID/fd before anything is lent, so that all can fall back to copies if one of them cannot. A tensor is
// allocated in a segment of the file, and lent by sending a LentMemory, which is plain data. The borrower maps the
// segment and caches the mapping. A table in the file holds the reference count of each segment: tensors of its owner,
// loans in flight, and tensors of borrowers. Whoever lets a segment go last puts it on a list in the table, from which
// its owner takes it without a message and without a search.
//
// Segments are blocks of the pool of the process (pool.h), which keeps those that nobody holds for the next tensor and
// gives them back to the system beyond its bound, even if other processes have mapped them. The file outlives its owner
// until the last process that has opened it ends.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace annulus {

// The location of a process's shared memory, in the form in which it is sent to other processes of the same program.
struct SharedFile {
  int64_t process = 0;      // the pid of the owner
  int64_t descriptor = -1;  // of the file, in the owner
  uint64_t device = 0;      // st_dev and st_ino identify the file
  uint64_t number = 0;
};

// The location of lent memory, sent like SharedFile.
struct LentMemory {
  uint64_t file = 0;   // SharedFile::number of the owner's file
  int64_t slot = 0;    // of the segment, in the table of the file
  int64_t offset = 0;  // of the lent bytes, in the segment
  int64_t bytes = 0;   // lent
};

// Thread safe. Tensors may outlive the object that made them, and may be freed by any thread.
class SharedMemory {
 public:
  // Raises Error(kUnavailable) if the system does not let this process create shared memory.
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Returns the location of this process's memory.
  const SharedFile& file() const;
  // Opens the memory of another process for borrowing. Call it once for each process.
  // Raises Error(kUnavailable) if that fails.
  void connect(const SharedFile& theirs);

  // Returns an uninitialized CPU tensor that can be lent. It is an ordinary tensor, of the pool, if no shared memory is
  // left, if it is so small that a copy costs less, and in a forked child.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);

  // Returns whether the tensor lies in memory that this object allocated or borrowed.
  bool holds(const at::Tensor& tensor) const;

  // Lends a contiguous tensor; returns nullopt if it lies outside this object's memory. The borrower counts as a holder
  // at once, before it has received the address, so a segment whose address is lost, or whose borrower is killed, is
  // never reused.
  std::optional<LentMemory> lend(const at::Tensor& tensor);

  // Returns memory lent by this process, or by one whose memory it has opened. Its deleter ends the loan. Call it once
  // for each loan. Raises Error(kComm) if nothing is lent there, or the memory cannot be mapped.
  c10::DataPtr borrow(const LentMemory& lent);

  // Bytes of this process's own segments with holders, and of those without.
  struct Held {
    int64_t used = 0;
    int64_t idle = 0;
  };
  Held held() const;

 private:
  struct Slot;
  struct Table;
  class File;
  class Segment;
  using FilePtr = std::shared_ptr<const File>;
  using SegmentPtr = std::shared_ptr<Segment>;
  struct Holder;
  class Segments;

  const std::shared_ptr<Segments> segments_;
};

}  // namespace annulus
