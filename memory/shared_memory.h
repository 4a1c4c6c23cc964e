// Memory that the processes of one host lend to each other, so that a tensor passes from one to the next without being
// copied. comm/mpi uses it for the blocks that travel between ranks.
//
// A process allocates a tensor in a segment, an anonymous file of its own (memfd_create), and lends it by sending a
// LentMemory, which is plain data. The borrower opens the file through /proc/PID/fd, maps it, and keeps the mapping for
// the next time. Each segment counts its holders, in the segment itself: the tensors of its owner, the loans that are
// on their way, and the tensors of borrowers. The owner reuses a segment when it has no holders; nobody sends a message
// for that. It gives the pages of those that it gives up back to the system, whoever has mapped them. If a process
// ends, those that have mapped its segments keep them; the system frees the memory with the last of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace annulus {

// Says where lent memory is. It is sent between processes of the same program.
struct LentMemory {
  int64_t process = 0;   // the pid of the owner
  int64_t file = -1;     // the descriptor of the segment's file in the owner
  uint64_t owner = 0;    // the number of the owner's SharedMemory, drawn at random
  uint64_t segment = 0;  // the number of the segment there; segment 0 holds no tensors
  int64_t length = 0;    // of the whole segment in bytes
  int64_t offset = 0;    // of the lent bytes in the segment
  int64_t bytes = 0;     // that are lent
};

// Thread safe. Tensors may outlive the object that made them, and may be freed by any thread.
class SharedMemory {
 public:
  // Raises Error(kUnavailable) if the system does not let this process make memory that can be shared.
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // An address that shows another process whether it can borrow from this one.
  LentMemory sample() const;
  // Whether this process can open the segments of the process that `sample` comes from.
  bool reaches(const LentMemory& sample) noexcept;

  // A CPU tensor that can be lent, not initialised. Where the system gives no more memory that can be shared, for
  // tensors so small that copying them costs less, and in a child that the process has forked, it is an ordinary
  // tensor.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);

  // Whether the tensor lies in memory of this object, allocated or borrowed.
  bool holds(const at::Tensor& tensor) const;

  // Lends the elements of a contiguous tensor that lies in memory of this object; nothing if it lies elsewhere. The
  // borrower becomes a holder now, before it has received the address.
  std::optional<LentMemory> lend(const at::Tensor& tensor);

  // The memory that another process (or this one) has lent. Its deleter ends the loan. Call it once for each loan.
  // Raises Error(kComm) if the memory cannot be opened: its process may have ended.
  c10::DataPtr borrow(const LentMemory& lent);

  // Bytes of the segments that this process has made: those with and those without holders.
  struct Held {
    int64_t used = 0;
    int64_t idle = 0;
  };
  Held held() const;

 private:
  class Segment;
  using SegmentPtr = std::shared_ptr<Segment>;
  struct Holder;

  SegmentPtr make_segment(int64_t length);
  SegmentPtr mapped(const LentMemory& lent);
  SegmentPtr idle_segment(int64_t length) const;
  SegmentPtr segment_of(const at::Tensor& tensor) const;
  void retire_idle();
  static c10::DataPtr hold(SegmentPtr segment, int64_t offset);

  mutable std::mutex mutex_;
  const uint64_t number_;
  const pid_t process_;  // whose segments these are; a child that it forks has a copy of this object
  uint64_t next_segment_ = 0;
  int64_t most_used_ = 0;                                         // bytes of segments with holders, at most so far
  std::vector<SegmentPtr> own_;                                   // the first is segment 0
  std::map<std::pair<uint64_t, uint64_t>, SegmentPtr> borrowed_;  // by owner and number
  std::map<const char*, std::weak_ptr<Segment>> by_address_;      // own and borrowed ones, by their beginning
};

}  // namespace annulus
