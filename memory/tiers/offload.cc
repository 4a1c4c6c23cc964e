// See offload.h.
#include "memory/tiers/offload.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "common/error.h"

namespace annulus {
namespace {

// A tensor that is or was put.
struct Piece {
  at::Tensor device, host;  // on a CPU `device` alone is used
  std::vector<int64_t> sizes;
  at::TensorOptions options;
  int64_t bytes = 0;
  int64_t offset = -1;  // in the file; -1: it stays in host memory

  const at::Tensor& memory() const { return host.defined() ? host : device; }
};

struct Entry {
  int64_t ticket = 0;
  std::vector<Piece> pieces;
  int64_t begin = 0;  // where its tensors begin in the file
  int64_t host_bytes = 0;
  int pending = 0;  // parts that are still to be written or read
  bool fetching = false;
  std::optional<c10::Event> copied;  // on a GPU: the copies to or from the host
};

// A part of a tensor that a thread writes or reads.
struct Transfer {
  Entry* entry;
  size_t piece;
  int64_t begin, bytes;
  bool out;
};

}  // namespace

class Offload::Impl {
 public:
  Impl(const OffloadSettings& settings, std::unique_ptr<TierFile> file)
      : settings_(settings), file_(std::move(file)), gpu_(!settings.device.is_cpu()) {
    if (gpu_) copies_.emplace(c10::impl::VirtualGuardImpl(settings.device.type()).getNewStream(settings.device));
    if (!file_) return;
    for (int64_t i = 0; i < kBuffers; ++i) {
      buffers_.push_back(at::empty({kBuffer + TierFile::kBlock}, at::TensorOptions(at::kByte)));
    }
    try {
      for (const at::Tensor& buffer : buffers_) {
        threads_.emplace_back([this, &buffer] { transfer(buffer); });
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  ~Impl() { stop(); }

  int64_t put(std::vector<at::Tensor> tensors) {
    settle();
    auto entry = std::make_unique<Entry>();
    Entry& e = *entry;
    e.ticket = ++tickets_;
    e.begin = end_;
    int64_t bytes = 0, pinned = 0;
    for (const at::Tensor& t : tensors) {
      if (!t.defined()) continue;
      bytes += static_cast<int64_t>(t.nbytes());
      pinned += in_pinned_memory(static_cast<int64_t>(t.nbytes()));
    }
    const bool in_host = gpu_ && held_ + pinned <= settings_.host_bytes;
    for (at::Tensor& t : tensors) {
      Piece piece;
      if (t.defined()) {
        piece.device = t.contiguous();
        piece.sizes = t.sizes().vec(), piece.options = t.options();
        piece.bytes = static_cast<int64_t>(t.nbytes());
        if (!in_host) piece.offset = std::exchange(end_, end_ + in_file(piece.bytes));
      }
      e.pieces.push_back(std::move(piece));
    }
    tensors.clear();
    stats_.bytes_out += bytes;
    if (gpu_) copy_out(e);
    if (in_host) {
      e.host_bytes = pinned;
      held_ += pinned;
    } else {
      if (!file_) {
        throw Error(ErrorKind::kInternal, "memory", "more is offloaded than was planned, and there is no file for it");
      }
      {
        const Waiting waiting(stats_);
        file_->reserve(end_);
      }
      stats_.bytes_in_files += bytes;
      stats_.most_in_files = std::max(stats_.most_in_files, end_);
    }
    entries_.push_back(std::move(entry));
    leaving_ = true;
    if (!in_host) begin(e, /*out=*/true);
    return e.ticket;
  }

  // Frees what the last entry holds on the device on the thread that put it: the memory plan counts it until then. On a
  // GPU the host waits for the copy, because it would otherwise run ahead and take the memory of all layers.
  void settle() {
    if (!leaving_) return raise();
    Entry& e = *entries_.back();
    wait(e);
    if (e.copied) {
      const Waiting waiting(stats_);
      e.copied->synchronize();
    }
    leaving_ = false;
    for (Piece& piece : e.pieces) {
      piece.device.reset();
      if (piece.offset >= 0) piece.host.reset();
    }
  }

  void fetch_next() {
    if (entries_.empty() || entries_.back()->fetching) return raise();
    settle();
    Entry& e = *entries_.back();
    e.fetching = true;
    for (Piece& piece : e.pieces) {
      if (piece.bytes == 0 && piece.sizes.empty()) continue;
      if (!gpu_) {
        piece.device = at::empty(piece.sizes, piece.options);
      } else if (piece.offset >= 0) {
        piece.host = pinned(piece);
      }
    }
    if (e.host_bytes > 0) {
      copy_back(e);
    } else {
      begin(e, /*out=*/false);
    }
  }

  std::vector<at::Tensor> take(int64_t ticket) {
    if (entries_.empty() || entries_.back()->ticket != ticket) {
      throw Error(
          ErrorKind::kInternal, "memory",
          "a layer asks for what is not next to return from the offload: each backward must run before the next "
          "forward, and once");
    }
    fetch_next();
    Entry& e = *entries_.back();
    wait(e);
    if (gpu_ && e.host_bytes == 0) copy_back(e);
    if (e.copied) e.copied->block(c10::impl::VirtualGuardImpl(settings_.device.type()).getStream(settings_.device));
    std::vector<at::Tensor> tensors;
    for (Piece& piece : e.pieces) {
      stats_.bytes_back += piece.bytes;
      tensors.push_back(std::move(piece.device));
    }
    end_ = e.begin;
    held_ -= e.host_bytes;
    entries_.pop_back();
    return tensors;
  }

  void clear() {
    for (const auto& entry : entries_) wait(*entry, /*quietly=*/true);
    entries_.clear();
    end_ = held_ = 0;
    leaving_ = false;
  }

  const OffloadSettings& settings() const { return settings_; }
  const OffloadStats& stats() const { return stats_; }

 private:
  // Counts the time during which it exists.
  class Waiting {
   public:
    explicit Waiting(OffloadStats& stats) : stats_(stats) {}
    ~Waiting() { stats_.waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    OffloadStats& stats_;
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  };

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  at::Tensor pinned(const Piece& piece) const {
    return at::empty(piece.sizes, piece.options.device(at::kCPU).pinned_memory(true));
  }

  // Copies to pinned memory on the stream of copies, after what the current stream has computed.
  void copy_out(Entry& e) {
    const c10::impl::VirtualGuardImpl streams(settings_.device.type());
    c10::Event computed(settings_.device.type());
    computed.record(streams.getStream(settings_.device));
    const c10::StreamGuard guard(*copies_);
    computed.block(*copies_);
    for (Piece& piece : e.pieces) {
      if (!piece.device.defined()) continue;
      piece.host = pinned(piece);
      piece.host.copy_(piece.device, /*non_blocking=*/true);  // settle() waits for it before the memory is freed
    }
    e.copied.emplace(settings_.device.type());
    e.copied->record(*copies_);
  }

  // The tensors are allocated on the current stream, whose work they must not overtake: their memory may have belonged
  // to layers whose backward is still queued there.
  void copy_back(Entry& e) {
    for (Piece& piece : e.pieces) {
      if (piece.host.defined()) piece.device = at::empty(piece.sizes, piece.options);
    }
    c10::Event allocated(settings_.device.type());
    allocated.record(c10::impl::VirtualGuardImpl(settings_.device.type()).getStream(settings_.device));
    const c10::StreamGuard guard(*copies_);
    allocated.block(*copies_);
    for (Piece& piece : e.pieces) {
      if (!piece.host.defined()) continue;
      piece.device.copy_(piece.host, /*non_blocking=*/true);
      piece.host.reset();  // LibTorch's allocator keeps it until the copy is done
    }
    e.copied.emplace(settings_.device.type());
    e.copied->record(*copies_);
  }

  // Gives the parts of an entry's tensors to the threads.
  void begin(Entry& e, bool out) {
    {
      const std::lock_guard lock(mutex_);
      for (size_t i = 0; i < e.pieces.size(); ++i) {
        for (int64_t at = 0; at < e.pieces[i].bytes; at += kBuffer) {
          waiting_.push_back({&e, i, at, std::min(kBuffer, e.pieces[i].bytes - at), out});
          ++e.pending;
        }
      }
    }
    work_.notify_all();
  }

  void raise() {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }

  // Returns when no part of the entry is on its way, and raises the error of any transfer.
  void wait(Entry& e, bool quietly = false) {
    const Waiting waiting(stats_);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return e.pending == 0; });
    if (failure_ && !quietly) std::rethrow_exception(failure_);
  }

  void transfer(const at::Tensor& buffer) {
    const auto address = reinterpret_cast<uintptr_t>(buffer.data_ptr());
    void* const aligned =
        reinterpret_cast<void*>((address + TierFile::kBlock - 1) / TierFile::kBlock * TierFile::kBlock);
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Transfer t = waiting_.front();
      waiting_.pop_front();
      if (!failure_ && !stop_) {
        lock.unlock();
        std::exception_ptr failed;
        try {
          carry(t, aligned);
        } catch (...) {
          failed = std::current_exception();
        }
        lock.lock();
        if (failed && !failure_) failure_ = failed;
      }
      if (--t.entry->pending == 0) done_.notify_all();
    }
  }

  void carry(const Transfer& t, void* buffer) {
    Piece& piece = t.entry->pieces[t.piece];
    if (t.out && t.entry->copied) t.entry->copied->synchronize();
    char* memory = static_cast<char*>(piece.memory().data_ptr()) + t.begin;
    const int64_t offset = piece.offset + t.begin;
    if (!file_->direct()) return t.out ? file_->write(offset, memory, t.bytes) : file_->read(offset, memory, t.bytes);
    if (t.out) {
      std::memcpy(buffer, memory, static_cast<size_t>(t.bytes));
      file_->write(offset, buffer, in_file(t.bytes));
    } else {
      file_->read(offset, buffer, in_file(t.bytes));
      std::memcpy(memory, buffer, static_cast<size_t>(t.bytes));
    }
  }

  const OffloadSettings settings_;
  const std::unique_ptr<TierFile> file_;
  const bool gpu_;
  std::optional<c10::Stream> copies_;
  std::vector<at::Tensor> buffers_;
  std::vector<std::unique_ptr<Entry>> entries_;
  int64_t tickets_ = 0;
  int64_t end_ = 0;       // of the file's part in use
  int64_t held_ = 0;      // bytes of entries in host memory
  bool leaving_ = false;  // whether the last entry may still be on its way out
  OffloadStats stats_;

  std::mutex mutex_;  // of all below, and of Entry::pending
  std::condition_variable work_, done_;
  std::deque<Transfer> waiting_;
  std::exception_ptr failure_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

Offload::Offload(const OffloadSettings& settings, std::unique_ptr<TierFile> file)
    : impl_(std::make_unique<Impl>(settings, std::move(file))) {}
Offload::~Offload() = default;
bool Offload::takes(int64_t layer) const { return layer < impl_->settings().layers; }
int64_t Offload::put(std::vector<at::Tensor> tensors) { return impl_->put(std::move(tensors)); }
void Offload::settle() { impl_->settle(); }
void Offload::fetch_next() { impl_->fetch_next(); }
std::vector<at::Tensor> Offload::take(int64_t ticket) { return impl_->take(ticket); }
void Offload::clear() { impl_->clear(); }
OffloadStats Offload::stats() const { return impl_->stats(); }

}  // namespace annulus
