// See shared_memory.h.
#include "memory/pool/shared_memory.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/descriptor.h"
#include "common/error.h"
#include "memory/pool/pool.h"
#include "memory/pool/pool_tensor.h"

namespace annulus {
namespace {

// Tensors with fewer bytes are not worth a segment.
constexpr int64_t kSmallest = 64 << 10;
// The length of the table is a multiple of this, the largest page of any system, so that segments begin with a page.
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
  std::atomic<int64_t> next;  // in the list of those that nobody holds any more: its number + 1; 0 at the end
  // Where the segment begins in the file; 0 if the slot is free. No part of the file is used twice, so those that have
  // mapped the segment see here that its owner has given it up.
  std::atomic<int64_t> begin;
  std::atomic<int64_t> length;
};

// At the beginning of a file, where it is all zero at first.
struct SharedMemory::Table {
  // The segment that its last holder has let go last: its number + 1, or 0. Any process puts segments there; their
  // owner takes all at once, so no segment can have left the list and come back while another process puts one there.
  alignas(64) std::atomic<int64_t> let_go;
  std::array<Slot, kMostSegments> slots;
};

// A file that is open. Its table is mapped.
class SharedMemory::File {
 public:
  static constexpr int64_t kTable = (int64_t{sizeof(Table)} + kGrain - 1) / kGrain * kGrain;
  static_assert(std::atomic<int64_t>::is_always_lock_free, "the counts must work between processes");

  File(const SharedFile& address, Descriptor descriptor, void* table)
      : address(address), descriptor_(std::move(descriptor)), table_(static_cast<Table*>(table)) {}
  ~File() { munmap(table_, kTable); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  Slot& slot(int64_t number) const { return table_->slots[static_cast<size_t>(number)]; }

  // Puts a segment that nobody holds on the list of those.
  void let_go(int64_t number) const {
    int64_t first = table_->let_go.load(std::memory_order_relaxed);
    do slot(number).next.store(first, std::memory_order_relaxed);
    while (!table_->let_go.compare_exchange_weak(first, number + 1, std::memory_order_acq_rel));
  }
  // Returns the segments of the list and empties it. Called by their owner.
  std::vector<int64_t> take_let_go() const {
    std::vector<int64_t> numbers;
    int64_t next = table_->let_go.exchange(0, std::memory_order_acq_rel);
    for (; next > 0 && next <= kMostSegments; next = slot(next - 1).next.load(std::memory_order_relaxed)) {
      numbers.push_back(next - 1);
    }
    return numbers;
  }

  const SharedFile address;

 private:
  Descriptor descriptor_;
  Table* table_;
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

// The memory of one SharedMemory, which holders of its segments can still find after the end of that. Its locks are
// taken in the order collecting_, the pool's, mutex_.
class SharedMemory::Segments final : public BlockSource, public std::enable_shared_from_this<Segments> {
 public:
  explicit Segments(FilePtr file);

  // Adds the segments to the pool and takes them out. After leave_pool() they belong to their holders alone.
  void join_pool() { Pool::process().add(*this); }
  void leave_pool();

  void* take(int64_t bytes) override;
  void give_back(void* block, int64_t bytes) override;
  void collect() override;

  const SharedFile& address() const { return file_->address; }
  bool in_child() const { return getpid() != file_->address.process; }

  void connect(const SharedFile& theirs);
  c10::DataPtr hold_new(void* block);
  bool holds(const at::Tensor& tensor) const;
  std::optional<LentMemory> lend(const at::Tensor& tensor);
  c10::DataPtr borrow(const LentMemory& lent);
  Held held() const;

 private:
  SegmentPtr mapped(const LentMemory& lent);
  SegmentPtr segment_of(const at::Tensor& tensor) const;
  static SegmentPtr map(FilePtr file, int64_t slot);
  c10::DataPtr hold(SegmentPtr segment, int64_t offset);

  std::mutex collecting_;  // of left_
  bool left_ = false;

  mutable std::mutex mutex_;  // of all below
  const FilePtr file_;
  int64_t end_ = File::kTable;                   // of the used part of the file
  std::array<SegmentPtr, kMostSegments> own_{};  // by slot
  std::vector<int64_t> free_slots_;
  std::map<uint64_t, FilePtr> files_;                            // of this process and of others, by number
  std::map<std::pair<uint64_t, int64_t>, SegmentPtr> borrowed_;  // by file and beginning in it
  std::map<const char*, std::weak_ptr<Segment>> by_address_;     // own and borrowed ones, by their beginning
};

// One holder of a segment. A child that this process forks has copies of its holders, which must not be counted off.
struct SharedMemory::Holder {
  Holder(SegmentPtr s, std::weak_ptr<Segments> o) : segment(std::move(s)), owner(std::move(o)) {}
  ~Holder() {
    if (getpid() != process || segment->holders().fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    segment->file().let_go(segment->slot());
    if (const std::shared_ptr<Segments> mine = owner.lock()) mine->collect();
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  const SegmentPtr segment;
  const std::weak_ptr<Segments> owner;  // empty if another process owns the segment
  const pid_t process = getpid();
};

SharedMemory::Segments::Segments(FilePtr file) : file_(std::move(file)) {
  files_[file_->address.number] = file_;
  for (int64_t slot = kMostSegments; slot > 0; --slot) free_slots_.push_back(slot - 1);
}

void SharedMemory::Segments::leave_pool() {
  {
    const std::lock_guard lock(collecting_);
    left_ = true;
  }
  Pool::process().remove(*this);
}

// Null if the system refuses, or this process has as many segments as it may.
void* SharedMemory::Segments::take(int64_t bytes) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t length = (bytes + page - 1) / page * page;
  const std::lock_guard lock(mutex_);
  if (free_slots_.empty() || !take_pages(file_->descriptor(), end_, length)) return nullptr;
  const int64_t slot = free_slots_.back();
  file_->slot(slot).length.store(length, std::memory_order_relaxed);
  file_->slot(slot).begin.store(std::exchange(end_, end_ + length), std::memory_order_release);
  SegmentPtr segment = map(file_, slot);
  if (!segment) {
    give_pages_back(file_->descriptor(), end_ - length, length);
    file_->slot(slot).begin.store(0, std::memory_order_release);
    return nullptr;
  }
  free_slots_.pop_back();
  by_address_[segment->base()] = segment;
  void* const base = segment->base();
  own_[static_cast<size_t>(slot)] = std::move(segment);
  return base;
}

// Only for segments that nobody holds. A forked child must not give up what its parent uses.
void SharedMemory::Segments::give_back(void* block, int64_t) {
  if (in_child()) return;
  const std::lock_guard lock(mutex_);
  const auto found = by_address_.find(static_cast<const char*>(block));
  const SegmentPtr segment = found->second.lock();
  segment->retire();
  by_address_.erase(found);
  own_[static_cast<size_t>(segment->slot())].reset();
  free_slots_.push_back(segment->slot());
}

void SharedMemory::Segments::collect() {
  if (in_child()) return;
  const std::lock_guard collecting(collecting_);
  if (left_) return;
  for (const int64_t slot : file_->take_let_go()) {
    const void* base = nullptr;
    {
      const std::lock_guard lock(mutex_);
      base = own_[static_cast<size_t>(slot)]->base();
    }
    Pool::process().put(base, PoolPurpose::kLent);
  }
}

// In another PID namespace a pid means another process, and a descriptor may have been given to something else, so it
// is opened only once it is known to be the file: opening a device, for example, may have effects.
void SharedMemory::Segments::connect(const SharedFile& theirs) {
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
SharedMemory::SegmentPtr SharedMemory::Segments::map(FilePtr file, int64_t slot) {
  const int64_t begin = file->slot(slot).begin.load(std::memory_order_acquire);
  const int64_t length = file->slot(slot).length.load(std::memory_order_relaxed);
  void* base = map_all(file->descriptor(), begin, length);
  if (base == MAP_FAILED) return nullptr;
  return std::make_shared<Segment>(std::move(file), slot, begin, length, base);
}

SharedMemory::SegmentPtr SharedMemory::Segments::mapped(const LentMemory& lent) {
  const auto file = files_.find(lent.file);
  const bool known_slot = file != files_.end() && lent.slot >= 0 && lent.slot < kMostSegments;
  const int64_t begin = known_slot ? file->second->slot(lent.slot).begin.load(std::memory_order_acquire) : 0;
  if (begin == 0) {
    throw Error(ErrorKind::kComm, "memory",
                "nothing is lent in slot " + std::to_string(lent.slot) + " of the memory " + std::to_string(lent.file) +
                    ": the ranks must run the same program");
  }
  if (file->second == file_) return own_[static_cast<size_t>(lent.slot)];
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

c10::DataPtr SharedMemory::Segments::hold(SegmentPtr segment, int64_t offset) {
  char* const data = segment->base() + offset;
  const bool own = &segment->file() == file_.get();
  auto* const holder = new Holder(std::move(segment), own ? weak_from_this() : std::weak_ptr<Segments>());
  return {data, holder, [](void* h) { delete static_cast<Holder*>(h); }, c10::Device(c10::kCPU)};
}

// The first holder of a block that the pool has given.
c10::DataPtr SharedMemory::Segments::hold_new(void* block) {
  const std::lock_guard lock(mutex_);
  SegmentPtr segment = by_address_.at(static_cast<const char*>(block)).lock();
  segment->holders().store(1, std::memory_order_release);
  return hold(std::move(segment), 0);
}

// Null if it lies in none.
SharedMemory::SegmentPtr SharedMemory::Segments::segment_of(const at::Tensor& tensor) const {
  if (tensor.numel() == 0) return nullptr;
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto after = by_address_.upper_bound(data);
  if (after == by_address_.begin()) return nullptr;
  SegmentPtr segment = std::prev(after)->second.lock();
  return segment && data < segment->base() + segment->length() ? segment : nullptr;
}

bool SharedMemory::Segments::holds(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return segment_of(tensor) != nullptr;
}

std::optional<LentMemory> SharedMemory::Segments::lend(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const SegmentPtr segment = segment_of(tensor);
  if (!segment) return std::nullopt;
  segment->holders().fetch_add(1, std::memory_order_acq_rel);
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  return LentMemory{segment->file().address.number, segment->slot(), data - segment->base(),
                    static_cast<int64_t>(tensor.nbytes())};
}

c10::DataPtr SharedMemory::Segments::borrow(const LentMemory& lent) {
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

SharedMemory::Held SharedMemory::Segments::held() const {
  const std::lock_guard lock(mutex_);
  Held held;
  for (const SegmentPtr& segment : own_) {
    if (segment) (segment->idle() ? held.idle : held.used) += segment->length();
  }
  return held;
}

SharedMemory::SharedMemory()
    : segments_([] {
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
        return std::make_shared<Segments>(std::make_shared<File>(address, std::move(file), table));
      }()) {
  segments_->join_pool();
}

SharedMemory::~SharedMemory() { segments_->leave_pool(); }

const SharedFile& SharedMemory::file() const { return segments_->address(); }

void SharedMemory::connect(const SharedFile& theirs) { segments_->connect(theirs); }

at::Tensor SharedMemory::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  void* block = nullptr;
  if (bytes >= kSmallest && !segments_->in_child()) {
    segments_->collect();  // what other processes have let go
    block = Pool::process().try_get(bytes, PoolPurpose::kLent, segments_.get());
  }
  if (block == nullptr) return pool_tensor(sizes, options, PoolPurpose::kTravelling);
  auto memory = std::make_shared<c10::DataPtr>(segments_->hold_new(block));
  return at::from_blob(
      block, sizes, [memory = std::move(memory)](void*) {}, options);
}

bool SharedMemory::holds(const at::Tensor& tensor) const { return segments_->holds(tensor); }
std::optional<LentMemory> SharedMemory::lend(const at::Tensor& tensor) { return segments_->lend(tensor); }
c10::DataPtr SharedMemory::borrow(const LentMemory& lent) { return segments_->borrow(lent); }
SharedMemory::Held SharedMemory::held() const { return segments_->held(); }

}  // namespace annulus
