// See shared_memory.h.
#include "memory/shared_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>

#include "common/error.h"

namespace annulus {
namespace {

// The first page of a segment is its header.
constexpr int64_t kHeaderBytes = 4096;
// Tensors with fewer bytes are not worth a segment.
constexpr int64_t kSmallest = 64 << 10;
// A segment's length is a multiple of this, so that tensors of almost the same size share segments.
constexpr int64_t kGrain = 64 << 10;
// The most segments of a process: each takes a file descriptor, of which a process has 1,024 by default.
constexpr size_t kMostSegments = 512;

uint64_t random_number() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

std::string system_error(const std::string& call) { return call + " failed: " + std::strerror(errno); }

// Maps a file whose pages exist already, all at once instead of by a fault for each page.
void* map_all(int file, int64_t length) {
  return mmap(nullptr, static_cast<size_t>(length), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
}

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

}  // namespace

// A mapped segment. The header is shared by all processes that have mapped it.
class SharedMemory::Segment {
 public:
  struct Header {
    uint64_t owner;
    uint64_t number;
    int64_t process;  // where borrowers open it: the owner's pid, and the descriptor in the owner
    int64_t file;
    std::atomic<int64_t> holders;
    std::atomic<int64_t> retired;  // not 0: the owner has given the segment up and never lends it again
  };
  static_assert(std::atomic<int64_t>::is_always_lock_free, "the count must work between processes");

  // Takes ownership of the mapping, and of the descriptor if it is not negative.
  Segment(void* base, int64_t length, int file) : base_(static_cast<char*>(base)), length_(length), file_(file) {}
  ~Segment() { munmap(base_, static_cast<size_t>(length_)); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  char* base() const { return base_; }
  int64_t length() const { return length_; }
  bool idle() const { return header().holders.load(std::memory_order_acquire) == 0; }

  // Frees all pages but the header's, also for those that still have the segment mapped. Only for the owner of a
  // segment without holders: what is lent is counted before its address is sent, and until the last use of it.
  void give_back() const {
    fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, kHeaderBytes, length_ - kHeaderBytes);
  }

 private:
  char* base_;
  int64_t length_;
  File file_;
};

// One holder of a segment. A child that this process forks has copies of its holders, which must not be counted off.
struct SharedMemory::Holder {
  explicit Holder(SegmentPtr s) : segment(std::move(s)) {}
  ~Holder() {
    if (getpid() == process) segment->header().holders.fetch_sub(1, std::memory_order_acq_rel);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  const SegmentPtr segment;
  const pid_t process = getpid();
};

SharedMemory::SharedMemory() : number_(random_number()), process_(getpid()) {
  SegmentPtr first = make_segment(kHeaderBytes);
  if (!first) {
    throw Error(ErrorKind::kUnavailable, "memory",
                "no memory can be shared between processes: " + system_error("memfd_create, fallocate or mmap"));
  }
  own_.push_back(std::move(first));
}

SharedMemory::~SharedMemory() = default;

// Null, with errno, if the system refuses. The memory is taken at once: later the system could only end the process.
SharedMemory::SegmentPtr SharedMemory::make_segment(int64_t length) {
  File file(memfd_create("annulus", MFD_CLOEXEC));
  if (file.get() < 0 || fallocate(file.get(), 0, 0, length) != 0) return nullptr;
  void* base = map_all(file.get(), length);
  if (base == MAP_FAILED) return nullptr;
  new (base) Segment::Header{number_, next_segment_++, getpid(), file.get(), {0}, {0}};
  return std::make_shared<Segment>(base, length, file.release());
}

LentMemory SharedMemory::sample() const {
  const Segment::Header& header = own_[0]->header();
  return {header.process, header.file, header.owner, header.number, own_[0]->length(), kHeaderBytes, 0};
}

bool SharedMemory::reaches(const LentMemory& sample) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    mapped(sample);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// A descriptor or a pid may have been given to something else since, and in another PID namespace a pid means another
// process, so the header must say that it is the right segment.
SharedMemory::SegmentPtr SharedMemory::mapped(const LentMemory& lent) {
  for (const SegmentPtr& segment : own_) {
    if (lent.owner == number_ && lent.segment == segment->header().number) return segment;
  }
  SegmentPtr& known = borrowed_[{lent.owner, lent.segment}];
  if (known) return known;
  const auto refuse = [&](const std::string& why) {
    borrowed_.erase({lent.owner, lent.segment});
    throw Error(
        ErrorKind::kComm, "memory",
        "memory that process " + std::to_string(lent.process) + " of this host has lent cannot be opened: " + why);
  };
  const std::string ended = "; it has probably ended";
  const std::string path = "/proc/" + std::to_string(lent.process) + "/fd/" + std::to_string(lent.file);
  const File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file.get() < 0) {
    const bool none = errno == ENOENT || errno == ESRCH;
    refuse(system_error("opening " + path) + (none ? ended : ""));
  }
  const off_t length = lseek(file.get(), 0, SEEK_END);
  if (length != lent.length) refuse(path + " is something else" + ended);
  void* base = map_all(file.get(), length);
  if (base == MAP_FAILED) refuse(system_error("mmap of " + path));
  auto segment = std::make_shared<Segment>(base, length, -1);
  if (segment->header().owner != lent.owner || segment->header().number != lent.segment) {
    refuse(path + " is something else" + ended);
  }
  known = segment;
  by_address_[segment->base()] = segment;
  // A new mapping is rare, and shows that owners have changed what they hold.
  std::erase_if(borrowed_, [](const auto& entry) {
    return entry.second.use_count() == 1 && entry.second->header().retired.load(std::memory_order_acquire) != 0;
  });
  std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
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
  for (size_t i = 1; i < own_.size(); ++i) {
    const SegmentPtr& segment = own_[i];
    if (segment->length() < length || segment->length() >= 2 * length || !segment->idle()) continue;
    if (!best || segment->length() < best->length()) best = segment;
  }
  return best;
}

// Gives up segments without holders, the oldest first, until they hold no more than has been in use at once, and there
// may be another segment.
void SharedMemory::retire_idle() {
  int64_t used = 0, idle = 0;
  for (size_t i = 1; i < own_.size(); ++i) (own_[i]->idle() ? idle : used) += own_[i]->length();
  most_used_ = std::max(most_used_, used);
  for (size_t i = 1; i < own_.size() && (idle > most_used_ || own_.size() >= kMostSegments);) {
    if (!own_[i]->idle()) {
      ++i;
      continue;
    }
    idle -= own_[i]->length();
    own_[i]->header().retired.store(1, std::memory_order_release);
    own_[i]->give_back();
    by_address_.erase(own_[i]->base());
    own_.erase(own_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

at::Tensor SharedMemory::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  int64_t bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (const int64_t size : sizes) bytes *= size;
  if (bytes < kSmallest || getpid() != process_) return at::empty(sizes, options);
  const int64_t length = kHeaderBytes + (bytes + kGrain - 1) / kGrain * kGrain;
  const std::lock_guard lock(mutex_);
  SegmentPtr segment = idle_segment(length);
  if (!segment) retire_idle();
  if (!segment && own_.size() < kMostSegments) {
    segment = make_segment(length);
    if (segment) {
      own_.push_back(segment);
      by_address_[segment->base()] = segment;
    }
  }
  if (!segment) return at::empty(sizes, options);
  segment->header().holders.store(1, std::memory_order_release);
  auto memory = std::make_shared<c10::DataPtr>(hold(std::move(segment), kHeaderBytes));
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
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  Segment::Header& header = segment->header();
  header.holders.fetch_add(1, std::memory_order_acq_rel);
  return LentMemory{header.process,
                    header.file,
                    header.owner,
                    header.number,
                    segment->length(),
                    data - segment->base(),
                    static_cast<int64_t>(tensor.nbytes())};
}

c10::DataPtr SharedMemory::borrow(const LentMemory& lent) {
  const std::lock_guard lock(mutex_);
  SegmentPtr segment = mapped(lent);
  if (lent.length != segment->length() || lent.offset < kHeaderBytes || lent.bytes < 0 ||
      lent.bytes > lent.length - lent.offset) {
    throw Error(ErrorKind::kComm, "memory",
                "process " + std::to_string(lent.process) + " of this host has lent bytes " +
                    std::to_string(lent.offset) + " to " + std::to_string(lent.offset + lent.bytes) + " of " +
                    std::to_string(lent.length) + ", which are not in the segment of " +
                    std::to_string(segment->length()) + " bytes: the ranks must run the same program");
  }
  return hold(std::move(segment), lent.offset);
}

SharedMemory::Held SharedMemory::held() const {
  const std::lock_guard lock(mutex_);
  Held held;
  for (size_t i = 1; i < own_.size(); ++i) (own_[i]->idle() ? held.idle : held.used) += own_[i]->length();
  return held;
}

}  // namespace annulus
