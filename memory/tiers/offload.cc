// See offload.h.
#include "memory/tiers/offload.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "common/error.h"
#include "memory/pool/pool_tensor.h"

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
  TierMemory memory;
  int64_t begin = 0;  // where its tensors begin in the file
  int64_t host_bytes = 0;
  Transfers::Batch transfers;
  bool fetching = false;
  std::optional<c10::Event> copied;  // on a GPU: the copies to or from the host
};

}  // namespace

class Offload::Impl {
 public:
  Impl(const OffloadSettings& settings, std::unique_ptr<TierFile> file)
      : settings_(settings), gpu_(!settings.device.is_cpu()) {
    if (gpu_) copies_.emplace(c10::impl::VirtualGuardImpl(settings.device.type()).getNewStream(settings.device));
    if (file) transfers_.emplace(std::move(file));
  }

  int64_t put(std::vector<at::Tensor> tensors, TierMemory memory) {
    settle();
    auto entry = std::make_unique<Entry>();
    Entry& e = *entry;
    e.ticket = ++tickets_;
    e.memory = std::move(memory);
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
        if (!in_host) piece.offset = std::exchange(end_, end_ + TierFile::padded(piece.bytes));
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
      if (!transfers_) {
        throw Error(ErrorKind::kInternal, "memory", "more is offloaded than was planned, and there is no file for it");
      }
      {
        const CountedWait waiting(stats_);
        transfers_->reserve(end_);
      }
      stats_.bytes_in_files += bytes;
      stats_.most_in_files = std::max(stats_.most_in_files, end_);
    }
    entries_.push_back(std::move(entry));
    leaving_ = true;
    if (!in_host) begin(e, Transfers::Way::kOut);
    return e.ticket;
  }

  // Frees what the last entry holds on the device on the thread that put it: the memory plan counts it until then. On a
  // GPU the host waits for the copy, because it would otherwise run ahead and take the memory of all layers.
  void settle() {
    if (!leaving_) return raise();
    Entry& e = *entries_.back();
    wait(e);
    if (e.copied) {
      const CountedWait waiting(stats_);
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
    for (size_t i = 0; i < e.pieces.size(); ++i) {
      Piece& piece = e.pieces[i];
      if (piece.bytes == 0 && piece.sizes.empty()) continue;
      if (!gpu_) {
        if (e.memory) piece.device = e.memory(i, piece.sizes, piece.options);
        if (!piece.device.defined()) piece.device = pool_tensor(piece.sizes, piece.options, PoolPurpose::kStaging);
      } else if (piece.offset >= 0) {
        piece.host = pinned(piece);
      }
    }
    if (e.host_bytes > 0) {
      copy_back(e);
    } else {
      begin(e, Transfers::Way::kBack);
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
    for (const auto& entry : entries_) {
      const CountedWait waiting(stats_);
      if (transfers_) transfers_->wait_quietly(entry->transfers);
    }
    entries_.clear();
    end_ = held_ = 0;
    leaving_ = false;
  }

  const OffloadSettings& settings() const { return settings_; }
  const OffloadStats& stats() const { return stats_; }

 private:
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

  // Gives the tensors of an entry to the threads.
  void begin(Entry& e, Transfers::Way way) {
    if (e.copied) e.transfers.after = &*e.copied;
    std::vector<Transfers::Part> parts;
    for (const Piece& piece : e.pieces) {
      if (piece.bytes > 0) parts.push_back({piece.memory().data_ptr(), piece.offset, piece.bytes});
    }
    transfers_->begin(e.transfers, parts, way);
  }

  void raise() {
    if (transfers_) transfers_->raise();
  }

  // Returns when no part of the entry is on its way, and raises the error of any transfer.
  void wait(Entry& e) {
    if (!transfers_) return;
    const CountedWait waiting(stats_);
    transfers_->wait(e.transfers);
  }

  const OffloadSettings settings_;
  const bool gpu_;
  std::optional<c10::Stream> copies_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::optional<Transfers> transfers_;  // ends before the entries that its threads work on
  int64_t tickets_ = 0;
  int64_t end_ = 0;       // of the file's part in use
  int64_t held_ = 0;      // bytes of entries in host memory
  bool leaving_ = false;  // whether the last entry may still be on its way out
  OffloadStats stats_;
};

Offload::Offload(const OffloadSettings& settings, std::unique_ptr<TierFile> file)
    : impl_(std::make_unique<Impl>(settings, std::move(file))) {}
Offload::~Offload() = default;
bool Offload::takes(int64_t layer) const { return layer < impl_->settings().layers; }
int64_t Offload::put(std::vector<at::Tensor> tensors, TierMemory memory) {
  const TraceSpan span(TraceKind::kTier, "give to tier");
  return impl_->put(std::move(tensors), std::move(memory));
}
void Offload::settle() { impl_->settle(); }
void Offload::fetch_next() { impl_->fetch_next(); }
std::vector<at::Tensor> Offload::take(int64_t ticket) {
  const TraceSpan span(TraceKind::kTier, "take from tier");
  return impl_->take(ticket);
}
void Offload::clear() { impl_->clear(); }
OffloadStats Offload::stats() const { return impl_->stats(); }

}  // namespace annulus
