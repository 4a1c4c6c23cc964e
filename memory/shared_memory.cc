// See shared_memory.h.
#include "memory/shared_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "common/descriptor.h"
#include "common/error.h"

namespace annulus {
namespace {

// Tensors with fewer bytes are not worth a segment.
constexpr int64_t kSmallest = 64 << 10;
// The lengths of table and segments are multiples of this, so that each begins with a page, and tensors of almost the
// same size share segments.
constexpr int64_t kGrain = 64 << 10;
// The most segments of a process. All processes that borrow from it map them, and the system lets a process have 65,530
// mappings by default.
constexpr int64_t kMostSegments = 512;

std::string system_error(const std::string& call) { return call + " failed: " + std::strerror(errno); }

// Maps a part of a file whose pages exist already, all at once instead of by a fault for each page.
void* map_all(int file, int64_t begin, int64_t length) {
  return mmap(nullptr, static_cast<size_t>(length), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, begin);
}

// Frees the memory of a part of a file, also for those that have mapped it.
void give_pages_back(int file, int64_t begin, int64_t length) {
  fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, length);
}

// Takes memory for a part of a file at once: later the system could only end the process. In many versions of Linux a
// signal interrupts this, so it is done in pieces, which take less time than there is between the signals of a
// profiler; if it is interrupted again and again nevertheless, no memory is shared. Beyond the limit on the size of
// files (ulimit -f) the system would not only refuse, but end the process by a signal.
bool take_pages(int file, int64_t begin, int64_t length) {
  constexpr int64_t kPiece = 1 << 20;
  constexpr int kMostInterruptions = 1000;
  int interruptions = 0;
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<rlim_t>(begin + length) > limit.rlim_cur) {
    errno = EFBIG;
    return false;
  }
  for (int64_t taken = 0; taken < length;) {
    const int64_t piece = std::min(kPiece, length - taken);
    if (fallocate(file, 0, begin + taken, piece) == 0) {
      taken += piece;
    } else if (const int error = errno; error != EINTR || ++interruptions == kMostInterruptions) {
      give_pages_back(file, begin, taken);
      errno = error;
      return false;
    }
  }
  return true;
}

}  // namespace

// What processes share about a segment. Each slot has a cache line of its own.
struct alignas(64) SharedMemory::Slot {
  std::atomic<int64_t> holders;
  // Where the segment begins in the file; 0 if the slot is free. No part of the file is used twice, so those that have
  // mapped the segment see here that its owner has given it up.
  std::atomic<int64_t> begin;
  std::atomic<int64_t> length;
};

// A file that is open. The table of its segments is mapped; it is at the beginning.
class SharedMemory::File {
 public:
  static constexpr int64_t kTable = (kMostSegments * int64_t{sizeof(Slot)} + kGrain - 1) / kGrain * kGrain;
  static_assert(std::atomic<int64_t>::is_always_lock_free, "the counts must work between processes");

  File(const SharedFile& address, Descriptor descriptor, void* table)
      : address(address), descriptor_(std::move(descriptor)), slots_(static_cast<Slot*>(table)) {}
  ~File() { munmap(slots_, kTable); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  Slot& slot(int64_t number) const { return slots_[number]; }

  const SharedFile address;

 private:
  Descriptor descriptor_;
  Slot* slots_;
};

// A mapped segment.
class SharedMemory::Segment {
 public:
  // Takes ownership of the mapping.
  Segment(FilePtr file, int64_t slot, int64_t begin, int64_t length, void* base)
      : file_(std::move(file)), slot_(slot), begin_(begin), length_(length), base_(static_cast<char*>(base)) {}
  ~Segment() { munmap(base_, static_cast<size_t>(length_)); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const File& file() const { return *file_; }
  int64_t slot() const { return slot_; }
  int64_t begin() const { return begin_; }
  int64_t length() const { return length_; }
  char* base() const { return base_; }

  std::atomic<int64_t>& holders() const { return file_->slot(slot_).holders; }
  bool idle() const { return holders().load(std::memory_order_acquire) == 0; }
  bool retired() const { return file_->slot(slot_).begin.load(std::memory_order_acquire) != begin_; }

  // Gives the segment up. Only its owner may, and only if it has no holders: a loan is counted from before its address
  // is sent until after the last use of the memory, so nobody reads what is freed here.
  void retire() const {
    file_->slot(slot_).begin.store(0, std::memory_order_release);
    give_pages_back(file_->descriptor(), begin_, length_);
  }

 private:
  FilePtr file_;
  int64_t slot_;
  int64_t begin_;
  int64_t length_;
  char* base_;
};

// One holder of a segment. A child that this process forks has copies of its holders, which must not be counted off.
struct SharedMemory::Holder {
  explicit Holder(SegmentPtr s) : segment(std::move(s)) {}
  ~Holder() {
    if (getpid() == process) segment->holders().fetch_sub(1, std::memory_order_acq_rel);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  const SegmentPtr segment;
  const pid_t process = getpid();
};

SharedMemory::SharedMemory() : end_(File::kTable) {
  Descriptor file(memfd_create("annulus", MFD_CLOEXEC));
  struct stat status {};
  void* table = MAP_FAILED;
  if (file >= 0 && fstat(file, &status) == 0 && take_pages(file, 0, File::kTable)) {
    table = map_all(file, 0, File::kTable);
  }
  if (table == MAP_FAILED) {
    throw Error(ErrorKind::kUnavailable, "memory",
                "no memory can be shared between processes: " + system_error("memfd_create, fallocate or mmap"));
  }
  const SharedFile address{getpid(), file, status.st_dev, status.st_ino};
  file_ = std::make_shared<File>(address, std::move(file), table);
  files_[address.number] = file_;
}

SharedMemory::~SharedMemory() = default;

const SharedFile& SharedMemory::file() const { return file_->address; }

// In another PID namespace a pid means another process, and a descriptor may have been given to something else, so it
// is opened only once it is known to be the file: opening a device, for example, may have effects.
void SharedMemory::connect(const SharedFile& theirs) {
  const std::lock_guard lock(mutex_);
  const std::string path = "/proc/" + std::to_string(theirs.process) + "/fd/" + std::to_string(theirs.descriptor);
  const auto refuse = [&](const std::string& why) {
    throw Error(
        ErrorKind::kUnavailable, "memory",
        "the memory that process " + std::to_string(theirs.process) + " of this host lends cannot be opened: " + why);
  };
  // Where machines were copied from one that was running, another process may be found in the place of the right one.
  if (files_.contains(theirs.number)) refuse("another process has a file of the same number");
  const Descriptor found(open(path.c_str(), O_PATH | O_CLOEXEC));  // finds it, but does not open it
  struct stat status {};
  if (found < 0 || fstat(found, &status) != 0) refuse(system_error("finding " + path));
  if (status.st_dev != theirs.device || status.st_ino != theirs.number) refuse(path + " is something else");
  Descriptor file(open(("/proc/self/fd/" + std::to_string(found)).c_str(), O_RDWR | O_CLOEXEC));
  if (file < 0) refuse(system_error("opening " + path));
  void* table = map_all(file, 0, File::kTable);
  if (table == MAP_FAILED) refuse(system_error("mmap of " + path));
  files_[theirs.number] = std::make_shared<File>(theirs, std::move(file), table);
}

// Null, with errno, if the system refuses.
SharedMemory::SegmentPtr SharedMemory::map(FilePtr file, int64_t slot) {
  const int64_t begin = file->slot(slot).begin.load(std::memory_order_acquire);
  const int64_t length = file->slot(slot).length.load(std::memory_order_relaxed);
  void* base = map_all(file->descriptor(), begin, length);
  if (base == MAP_FAILED) return nullptr;
  return std::make_shared<Segment>(std::move(file), slot, begin, length, base);
}

// Null if the system refuses, or this process has as many segments as it may.
SharedMemory::SegmentPtr SharedMemory::make_segment(int64_t length) {
  int64_t slot = 0;
  while (slot < kMostSegments && file_->slot(slot).begin.load(std::memory_order_relaxed) != 0) ++slot;
  if (slot == kMostSegments || !take_pages(file_->descriptor(), end_, length)) return nullptr;
  file_->slot(slot).length.store(length, std::memory_order_relaxed);
  file_->slot(slot).begin.store(std::exchange(end_, end_ + length), std::memory_order_release);
  SegmentPtr segment = map(file_, slot);
  if (!segment) {
    give_pages_back(file_->descriptor(), end_ - length, length);
    file_->slot(slot).begin.store(0, std::memory_order_release);
    return nullptr;
  }
  own_.push_back(segment);
  by_address_[segment->base()] = segment;
  return segment;
}

SharedMemory::SegmentPtr SharedMemory::mapped(const LentMemory& lent) {
  const auto file = files_.find(lent.file);
  const bool known_slot = file != files_.end() && lent.slot >= 0 && lent.slot < kMostSegments;
  const int64_t begin = known_slot ? file->second->slot(lent.slot).begin.load(std::memory_order_acquire) : 0;
  if (begin == 0) {
    throw Error(ErrorKind::kComm, "memory",
                "nothing is lent in slot " + std::to_string(lent.slot) + " of the memory " + std::to_string(lent.file) +
                    ": the ranks must run the same program");
  }
  for (const SegmentPtr& segment : own_) {
    if (file->second == file_ && segment->begin() == begin) return segment;
  }
  if (const auto known = borrowed_.find({lent.file, begin}); known != borrowed_.end()) return known->second;
  const SegmentPtr segment = map(file->second, lent.slot);
  if (!segment) {
    throw Error(ErrorKind::kComm, "memory",
                "memory that process " + std::to_string(file->second->address.process) +
                    " of this host has lent cannot be mapped: " + system_error("mmap") +
                    "; with ANNULUS_SHARED_MEMORY=0 the ranks copy instead");
  }
  // A new mapping is rare, and shows that owners have changed what they hold.
  std::erase_if(borrowed_, [](const auto& entry) { return entry.second.use_count() == 1 && entry.second->retired(); });
  std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
  borrowed_[{lent.file, begin}] = segment;
  by_address_[segment->base()] = segment;
  return segment;
}

c10::DataPtr SharedMemory::hold(SegmentPtr segment, int64_t offset) {
  char* data = segment->base() + offset;
  return {data, new Holder(std::move(segment)), [](void* holder) { delete static_cast<Holder*>(holder); },
          c10::Device(c10::kCPU)};
}

// Of the segments that are long enough, but not twice as long as needed, the shortest. Null if there is none.
SharedMemory::SegmentPtr SharedMemory::idle_segment(int64_t length) const {
  SegmentPtr best;
  for (const SegmentPtr& segment : own_) {
    if (segment->length() < length || segment->length() >= 2 * length || !segment->idle()) continue;
    if (!best || segment->length() < best->length()) best = segment;
  }
  return best;
}

// Gives up segments without holders, the oldest first, until they hold no more than has been in use at once, and there
// may be another segment.
void SharedMemory::retire_idle() {
  int64_t used = 0, idle = 0;
  for (const SegmentPtr& segment : own_) (segment->idle() ? idle : used) += segment->length();
  most_used_ = std::max(most_used_, used);
  for (size_t i = 0; i < own_.size() && (idle > most_used_ || own_.size() >= kMostSegments);) {
    if (!own_[i]->idle()) {
      ++i;
      continue;
    }
    idle -= own_[i]->length();
    own_[i]->retire();
    by_address_.erase(own_[i]->base());
    own_.erase(own_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

at::Tensor SharedMemory::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < kSmallest || getpid() != file().process) return at::empty(sizes, options);
  const int64_t length = (bytes + kGrain - 1) / kGrain * kGrain;
  const std::lock_guard lock(mutex_);
  SegmentPtr segment = idle_segment(length);
  if (!segment) {
    retire_idle();
    segment = make_segment(length);
  }
  if (!segment) return at::empty(sizes, options);
  segment->holders().store(1, std::memory_order_release);
  auto memory = std::make_shared<c10::DataPtr>(hold(std::move(segment), 0));
  void* data = memory->get();
  return at::from_blob(
      data, sizes, [memory = std::move(memory)](void*) {}, options);
}

// Null if it lies in none.
SharedMemory::SegmentPtr SharedMemory::segment_of(const at::Tensor& tensor) const {
  if (tensor.numel() == 0) return nullptr;
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto after = by_address_.upper_bound(data);
  if (after == by_address_.begin()) return nullptr;
  SegmentPtr segment = std::prev(after)->second.lock();
  return segment && data < segment->base() + segment->length() ? segment : nullptr;
}

bool SharedMemory::holds(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return segment_of(tensor) != nullptr;
}

std::optional<LentMemory> SharedMemory::lend(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const SegmentPtr segment = segment_of(tensor);
  if (!segment) return std::nullopt;
  segment->holders().fetch_add(1, std::memory_order_acq_rel);
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  return LentMemory{segment->file().address.number, segment->slot(), data - segment->base(),
                    static_cast<int64_t>(tensor.nbytes())};
}

c10::DataPtr SharedMemory::borrow(const LentMemory& lent) {
  const std::lock_guard lock(mutex_);
  SegmentPtr segment = mapped(lent);
  if (lent.offset < 0 || lent.bytes < 0 || lent.bytes > segment->length() - lent.offset) {
    throw Error(ErrorKind::kComm, "memory",
                "process " + std::to_string(segment->file().address.process) + " of this host has lent bytes " +
                    std::to_string(lent.offset) + " to " + std::to_string(lent.offset + lent.bytes) +
                    ", which are not in the segment of " + std::to_string(segment->length()) +
                    " bytes: the ranks must run the same program");
  }
  return hold(std::move(segment), lent.offset);
}

SharedMemory::Held SharedMemory::held() const {
  const std::lock_guard lock(mutex_);
  Held held;
  for (const SegmentPtr& segment : own_) (segment->idle() ? held.idle : held.used) += segment->length();
  return held;
}

}  // namespace annulus
