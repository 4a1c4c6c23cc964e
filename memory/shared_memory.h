// Memory that the processes of one host lend to each other, so that a tensor passes from one to the next without being
// copied. comm/mpi uses it for the blocks that travel between ranks.
//
// All memory that a process lends lies in one anonymous file (memfd_create). The others open it through /proc/PID/fd
// before anything is lent: if one of them cannot, or may have no more open files, there is still time to copy instead.
// A tensor is allocated in a segment of the file, and lent by sending a LentMemory, which is plain data. The borrower
// maps the segment and keeps the mapping for the next time. A table in the file counts the holders of each segment: the
// tensors of its owner, the loans that are on their way, and the tensors of borrowers. The owner reuses a segment when
// it has no holders; nobody sends a message for that. If it gives a segment up, it gives the pages back to the system,
// whoever has mapped them. If a process ends, those that have opened its file keep it; the system frees the memory with
// the last of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace annulus {

// Says where the shared memory of a process is. It is sent between processes of the same program.
struct SharedFile {
  int64_t process = 0;      // the pid of the owner
  int64_t descriptor = -1;  // of the file in the owner
  uint64_t device = 0;      // device and number say which file it is: st_dev and st_ino
  uint64_t number = 0;
};

// Says where lent memory is. It is sent as SharedFile is.
struct LentMemory {
  uint64_t file = 0;   // SharedFile::number of the owner's file
  int64_t slot = 0;    // of the segment in the table of the file
  int64_t offset = 0;  // of the lent bytes in the segment
  int64_t bytes = 0;   // that are lent
};

// Thread safe. Tensors may outlive the object that made them, and may be freed by any thread.
class SharedMemory {
 public:
  // Raises Error(kUnavailable) if the system does not let this process make memory that can be shared.
  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Where the memory of this process is.
  const SharedFile& file() const;
  // Opens the memory of another process, so that this one can borrow from it. Call it once for each process.
  // Raises Error(kUnavailable) if it cannot.
  void connect(const SharedFile& theirs);

  // A CPU tensor that can be lent, not initialised. Where the system gives no more memory that can be shared, for
  // tensors so small that copying them costs less, and in a child that the process has forked, it is an ordinary
  // tensor.
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);

  // Whether the tensor lies in memory of this object, allocated or borrowed.
  bool holds(const at::Tensor& tensor) const;

  // Lends the elements of a contiguous tensor that lies in memory of this object; nothing if it lies elsewhere. The
  // borrower becomes a holder now, before it has received the address; so a segment whose address is lost, or whose
  // borrower is killed, is never used again.
  std::optional<LentMemory> lend(const at::Tensor& tensor);

  // The memory that this process, or one whose memory it has opened, has lent. Its deleter ends the loan. Call it once
  // for each loan. Raises Error(kComm) if nothing is lent there, or the memory cannot be mapped.
  c10::DataPtr borrow(const LentMemory& lent);

  // Bytes of the segments that this process has made: those with and those without holders.
  struct Held {
    int64_t used = 0;
    int64_t idle = 0;
  };
  Held held() const;

 private:
  struct Slot;
  class File;
  class Segment;
  using FilePtr = std::shared_ptr<const File>;
  using SegmentPtr = std::shared_ptr<Segment>;
  struct Holder;

  SegmentPtr make_segment(int64_t length);
  SegmentPtr mapped(const LentMemory& lent);
  SegmentPtr idle_segment(int64_t length) const;
  SegmentPtr segment_of(const at::Tensor& tensor) const;
  void retire_idle();
  static SegmentPtr map(FilePtr file, int64_t slot);
  static c10::DataPtr hold(SegmentPtr segment, int64_t offset);

  mutable std::mutex mutex_;
  FilePtr file_;
  int64_t end_ = 0;        // of the part of the file that has been used
  int64_t most_used_ = 0;  // bytes of segments with holders, at most so far
  std::vector<SegmentPtr> own_;
  std::map<uint64_t, FilePtr> files_;                            // of this process and of others, by number
  std::map<std::pair<uint64_t, int64_t>, SegmentPtr> borrowed_;  // by file and beginning in it
  std::map<const char*, std::weak_ptr<Segment>> by_address_;     // own and borrowed ones, by their beginning
};

}  // namespace annulus
