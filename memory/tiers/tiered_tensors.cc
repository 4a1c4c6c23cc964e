// See tiered_tensors.h.
#include "memory/tiers/tiered_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "common/error.h"
#include "memory/pool/pool_tensor.h"
#include "memory/pool/pool_vector.h"

namespace annulus {
namespace {

// A vector is its chunks, one after another. In the file each begins at a block.
struct TieredVector {
  int64_t elements = 0;
  int64_t offset = 0;                    // in the file
  std::vector<at::Tensor> in_host = {};  // its chunks, without a file
};

// The chunk buffers of one chunk of a group.
struct Slot {
  std::vector<at::Tensor> device;
  std::vector<at::Tensor> host;  // on a GPU with a file: pinned, between the two
  Transfers::Batch transfers;
  std::optional<c10::Event> copied;  // on a GPU: the last copies to or from the host
};

// A chunk of a group.
struct Step {
  size_t group = 0;
  int64_t begin = 0, count = 0;  // elements
};

// Bytes [begin, end) of a chunk, at byte `at` of a range of elements.
struct Bytes {
  int64_t chunk = 0, begin = 0, end = 0, at = 0;
};

}  // namespace

class TieredTensors::Impl {
 public:
  Impl(const Settings& settings, std::unique_ptr<TierFile> file)
      : settings_(settings),
        size_(static_cast<int64_t>(c10::elementSize(settings.dtype))),
        gpu_(!settings.device.is_cpu()) {
    if (!file && !gpu_) throw Error(ErrorKind::kInternal, "memory", "a CPU's tensors have no tier but a file");
    if (gpu_) {
      for (std::optional<c10::Stream>* stream : {&reads_, &writes_}) {
        stream->emplace(c10::impl::VirtualGuardImpl(settings.device.type()).getNewStream(settings.device));
      }
    }
    if (file) transfers_.emplace(std::move(file));
  }

  size_t add(int64_t elements) {
    TieredVector vector{.elements = elements, .offset = end_};
    if (transfers_) {
      end_ += in_file(elements, size_, settings_.chunk);
      transfers_->reserve(end_);
    } else {
      for (int64_t at = 0; at < elements; at += settings_.chunk) {
        vector.in_host.push_back(at::zeros({std::min(settings_.chunk, elements - at)}, host_options()));
      }
    }
    vectors_.push_back(std::move(vector));
    return vectors_.size() - 1;
  }

  at::Tensor read(size_t vector, int64_t begin, int64_t count) {
    settle();
    at::Tensor into = pool_tensor({count}, at::TensorOptions(settings_.dtype), PoolPurpose::kStaging);
    char* const memory = static_cast<char*>(into.data_ptr());
    for (const Bytes& b : bytes_of(vector, begin, count)) {
      over_windows(vectors_[vector], b, [&](const Window& w) {
        if (w.in_file >= 0) move(w.in_file, w.memory, w.bytes, Transfers::Way::kBack);
        std::memcpy(memory + w.at, w.memory + w.begin, static_cast<size_t>(w.end - w.begin));
      });
    }
    return into;
  }

  void write(size_t vector, int64_t begin, const at::Tensor& from) {
    settle();
    const at::Tensor values = from.to(at::kCPU, settings_.dtype).contiguous();
    const char* const memory = static_cast<const char*>(values.const_data_ptr());
    for (const Bytes& b : bytes_of(vector, begin, values.numel())) {
      over_windows(vectors_[vector], b, [&](const Window& w) {
        // Whole blocks are written, so what else lies in the first and last is read before.
        const int64_t last = w.bytes - TierFile::kBlock;
        if (w.in_file >= 0 && w.begin > 0) move(w.in_file, w.memory, TierFile::kBlock, Transfers::Way::kBack);
        if (w.in_file >= 0 && w.end < w.bytes && (last > 0 || w.begin == 0)) {
          move(w.in_file + last, w.memory + last, TierFile::kBlock, Transfers::Way::kBack);
        }
        std::memcpy(w.memory + w.begin, memory + w.at, static_cast<size_t>(w.end - w.begin));
        if (w.in_file >= 0) move(w.in_file, w.memory, w.bytes, Transfers::Way::kOut);
      });
    }
  }

  void update(const std::vector<std::vector<size_t>>& groups, const Change& change) {
    settle();
    const std::vector<Step> steps = steps_of(groups);
    make_slots(groups);
    if (!steps.empty()) begin_read(slots_[0], groups[steps[0].group], steps[0]);
    for (size_t i = 0; i < steps.size(); ++i) {
      Slot& slot = slots_[i % kSlots];
      if (i + 1 < steps.size()) {
        Slot& next = slots_[(i + 1) % kSlots];
        finish_write(next);
        begin_read(next, groups[steps[i + 1].group], steps[i + 1]);
      }
      finish_read(slot, steps[i].count);
      change(steps[i].group, steps[i].begin, narrowed(slot.device, groups[steps[i].group].size(), steps[i].count));
      begin_write(slot, groups[steps[i].group], steps[i]);
    }
  }

  int64_t in_host_memory() const {
    int64_t bytes = 0;
    for (const TieredVector& vector : vectors_) {
      if (!transfers_) bytes += in_pinned_memory(vector.elements, size_, settings_.chunk);
    }
    return bytes;
  }

  const Settings& settings() const { return settings_; }
  const OffloadStats& stats() const { return stats_; }

 private:
  // Bytes [begin, end) of `memory`, which stands for `bytes` bytes of the file from `in_file` on (-1: `memory` is the
  // vector's own), and is byte `at` of a range of elements.
  struct Window {
    int64_t in_file = -1;
    char* memory = nullptr;
    int64_t bytes = 0, begin = 0, end = 0, at = 0;
  };

  at::TensorOptions host_options() const { return at::TensorOptions(settings_.dtype).pinned_memory(gpu_); }

  int64_t offset_of(const TieredVector& vector, int64_t chunk) const {
    return vector.offset + chunk * TierFile::padded(settings_.chunk * size_);
  }

  std::vector<Bytes> bytes_of(size_t vector, int64_t begin, int64_t count) const {
    if (begin < 0 || count < 0 || begin + count > vectors_.at(vector).elements) {
      throw Error(ErrorKind::kInternal, "memory", "elements beyond the end of a vector in a tier are asked for");
    }
    std::vector<Bytes> all;
    for (int64_t at = begin; at < begin + count;) {
      const int64_t chunk = at / settings_.chunk, first = chunk * settings_.chunk;
      const int64_t end = std::min(begin + count, first + settings_.chunk);
      all.push_back({chunk, (at - first) * size_, (end - first) * size_, (at - begin) * size_});
      at = end;
    }
    return all;
  }

  // Calls `f` with windows of whole blocks, which together contain these bytes.
  template <typename F>
  void over_windows(const TieredVector& vector, const Bytes& bytes, const F& f) {
    if (!transfers_) {
      const at::Tensor& chunk = vector.in_host[static_cast<size_t>(bytes.chunk)];
      f(Window{-1, static_cast<char*>(chunk.data_ptr()), bytes.end, bytes.begin, bytes.end, bytes.at});
      return;
    }
    const int64_t first = bytes.begin / TierFile::kBlock * TierFile::kBlock, end = TierFile::padded(bytes.end);
    PoolVector<char, PoolPurpose::kStaging> memory(static_cast<size_t>(std::min(Transfers::kBuffer, end - first)));
    for (int64_t at = first; at < end; at += Transfers::kBuffer) {
      const int64_t until = std::min(at + Transfers::kBuffer, end);
      const int64_t from = std::max(bytes.begin, at), to = std::min(bytes.end, until);
      f(Window{offset_of(vector, bytes.chunk) + at, memory.data(), until - at, from - at, to - at,
               bytes.at + from - bytes.begin});
    }
  }

  void move(int64_t offset, char* memory, int64_t bytes, Transfers::Way way) {
    Transfers::Batch batch;
    transfers_->begin(batch, {{memory, offset, bytes}}, way);
    transfers_->wait(batch);
  }

  std::vector<Step> steps_of(const std::vector<std::vector<size_t>>& groups) const {
    std::vector<Step> steps;
    for (size_t group = 0; group < groups.size(); ++group) {
      const int64_t elements = groups[group].empty() ? 0 : vectors_.at(groups[group][0]).elements;
      for (int64_t at = 0; at < elements; at += settings_.chunk) {
        steps.push_back({group, at, std::min(settings_.chunk, elements - at)});
      }
    }
    return steps;
  }

  void make_slots(const std::vector<std::vector<size_t>>& groups) {
    size_t most = 0;
    int64_t longest = 0;
    for (const std::vector<size_t>& group : groups) {
      most = std::max(most, group.size());
      for (const size_t vector : group) longest = std::max(longest, vectors_.at(vector).elements);
    }
    const int64_t count = std::min(settings_.chunk, longest);
    for (Slot& slot : slots_) {
      if (slot.device.size() >= most && (most == 0 || slot.device[0].numel() >= count)) continue;
      slot.device.clear(), slot.host.clear();
      for (size_t i = 0; i < most; ++i) {
        slot.device.push_back(
            pool_tensor({count}, at::TensorOptions(settings_.dtype).device(settings_.device), PoolPurpose::kStaging));
        if (gpu_ && transfers_) slot.host.push_back(at::empty({count}, host_options()));
      }
    }
  }

  static std::vector<at::Tensor> narrowed(const std::vector<at::Tensor>& all, size_t vectors, int64_t count) {
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < vectors; ++i) parts.push_back(all[i].narrow(0, 0, count));
    return parts;
  }

  std::vector<Transfers::Part> parts(const Slot& slot, const std::vector<size_t>& group, const Step& step) const {
    const std::vector<at::Tensor>& memory = gpu_ ? slot.host : slot.device;
    std::vector<Transfers::Part> parts;
    for (size_t i = 0; i < group.size(); ++i) {
      parts.push_back(
          {memory[i].data_ptr(), offset_of(vectors_[group[i]], step.begin / settings_.chunk), step.count * size_});
    }
    return parts;
  }

  // Records on `stream` that `copies` are made there after what the current stream has begun.
  template <typename F>
  void copy_on(const c10::Stream& stream, Slot& slot, const F& copies) {
    c10::Event begun(settings_.device.type());
    begun.record(c10::impl::VirtualGuardImpl(settings_.device.type()).getStream(settings_.device));
    const c10::StreamGuard guard(stream);
    begun.block(stream);
    copies();
    slot.copied.emplace(settings_.device.type());
    slot.copied->record(stream);
  }

  // The chunk of a vector in pinned memory.
  const at::Tensor& in_host(size_t vector, const Step& step) const {
    return vectors_[vector].in_host[static_cast<size_t>(step.begin / settings_.chunk)];
  }

  void begin_read(Slot& slot, const std::vector<size_t>& group, const Step& step) {
    stats_.bytes_back += static_cast<int64_t>(group.size()) * step.count * size_;
    if (transfers_) return transfers_->begin(slot.transfers, parts(slot, group, step), Transfers::Way::kBack);
    const std::optional<c10::Event> written = std::exchange(slot.copied, std::nullopt);
    if (written) written->block(*reads_);
    copy_on(*reads_, slot, [&] {
      for (size_t i = 0; i < group.size(); ++i) {
        slot.device[i].narrow(0, 0, step.count).copy_(in_host(group[i], step), /*non_blocking=*/true);
      }
    });
  }

  void finish_read(Slot& slot, int64_t count) {
    if (transfers_) {
      const CountedWait waiting(stats_);
      transfers_->wait(slot.transfers);
      for (size_t i = 0; i < slot.host.size(); ++i) {
        slot.device[i].narrow(0, 0, count).copy_(slot.host[i].narrow(0, 0, count), /*non_blocking=*/true);
      }
    } else {
      slot.copied->block(c10::impl::VirtualGuardImpl(settings_.device.type()).getStream(settings_.device));
    }
  }

  void begin_write(Slot& slot, const std::vector<size_t>& group, const Step& step) {
    stats_.bytes_out += static_cast<int64_t>(group.size()) * step.count * size_;
    if (gpu_) {
      copy_on(*writes_, slot, [&] {
        for (size_t i = 0; i < group.size(); ++i) {
          const at::Tensor to = transfers_ ? slot.host[i].narrow(0, 0, step.count) : in_host(group[i], step);
          at::Tensor(to).copy_(slot.device[i].narrow(0, 0, step.count), /*non_blocking=*/true);
        }
      });
      slot.transfers.after = &*slot.copied;
    }
    if (!transfers_) return;
    stats_.bytes_in_files += static_cast<int64_t>(group.size()) * step.count * size_;
    stats_.most_in_files = end_;
    transfers_->begin(slot.transfers, parts(slot, group, step), Transfers::Way::kOut);
  }

  // Without a file the next read of a slot waits for its copies on the device.
  void finish_write(Slot& slot) {
    if (!transfers_) return;
    const CountedWait waiting(stats_);
    transfers_->wait(slot.transfers);
  }

  // Returns when nothing is on its way.
  void settle() {
    for (Slot& slot : slots_) {
      if (transfers_) {
        finish_write(slot);
      } else if (slot.copied) {
        const CountedWait waiting(stats_);
        slot.copied->synchronize();
      }
    }
  }

  const Settings settings_;
  const int64_t size_;  // bytes of an element
  const bool gpu_;
  std::optional<c10::Stream> reads_, writes_;  // of copies from and to the host
  std::vector<TieredVector> vectors_;
  int64_t end_ = 0;  // of the file's part in use
  std::array<Slot, kSlots> slots_;
  OffloadStats stats_;
  std::optional<Transfers> transfers_;  // ends before the slots that its threads work on
};

TieredTensors::TieredTensors(const Settings& settings, std::unique_ptr<TierFile> file)
    : impl_(std::make_unique<Impl>(settings, std::move(file))) {}
TieredTensors::~TieredTensors() = default;
size_t TieredTensors::add(int64_t elements) { return impl_->add(elements); }
at::ScalarType TieredTensors::dtype() const { return impl_->settings().dtype; }
int64_t TieredTensors::chunk() const { return impl_->settings().chunk; }
int64_t TieredTensors::in_host_memory() const { return impl_->in_host_memory(); }
at::Tensor TieredTensors::read(size_t vector, int64_t begin, int64_t count) {
  return impl_->read(vector, begin, count);
}
void TieredTensors::write(size_t vector, int64_t begin, const at::Tensor& from) { impl_->write(vector, begin, from); }
void TieredTensors::update(const std::vector<std::vector<size_t>>& groups, const Change& change) {
  impl_->update(groups, change);
}
OffloadStats TieredTensors::stats() const { return impl_->stats(); }

int64_t TieredTensors::in_file(int64_t elements, int64_t size, int64_t chunk) {
  return elements / chunk * TierFile::padded(chunk * size) + TierFile::padded(elements % chunk * size);
}

int64_t TieredTensors::in_pinned_memory(int64_t elements, int64_t size, int64_t chunk) {
  const auto pinned = [](int64_t bytes) {
    return bytes == 0 ? 0 : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  };
  return elements / chunk * pinned(chunk * size) + pinned(elements % chunk * size);
}

int64_t TieredTensors::buffers(int64_t vectors, int64_t longest, int64_t size) {
  return kSlots * vectors * std::min(kChunk, longest) * size;
}

PlacedVector PlacedVector::narrow(int64_t first, int64_t n) const {
  if (tier == nullptr) return {.tensor = tensor.narrow(0, first, n)};
  return {.tier = tier, .vector = vector, .begin = begin + first, .count = n};
}

at::Tensor PlacedVector::read(int64_t first, int64_t n) const {
  if (tier != nullptr) return tier->read(vector, begin + first, n);
  return tensor.detach().narrow(0, first, n).to(at::kCPU).contiguous();
}

void PlacedVector::write(int64_t first, const at::Tensor& from) const {
  if (tier != nullptr) return tier->write(vector, begin + first, from);
  tensor.detach().narrow(0, first, from.numel()).copy_(from);
}

}  // namespace annulus
