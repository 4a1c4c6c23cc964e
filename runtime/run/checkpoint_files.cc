// See checkpoint_files.h.
#include "runtime/run/checkpoint_files.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

std::string range_text(const ManifestTensor& tensor, int64_t begin, int64_t end) {
  return "tensor \"" + tensor.name + "\", elements [" + std::to_string(begin) + ":" + std::to_string(end) + "]";
}

int64_t elements_of(const TensorSlice& slice) {
  return std::accumulate(slice.shape.begin(), slice.shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t element_bytes(const ManifestTensor& tensor) { return static_cast<int64_t>(c10::elementSize(tensor.dtype)); }

}  // namespace

void check_slice(const TensorSlice& slice) {
  const at::Tensor& values = slice.values;
  const int64_t elements = elements_of(slice);
  const bool vector = values.defined() ? values.dim() == 1 && values.is_contiguous() : slice.in_tier.tier != nullptr;
  if (vector && slice.begin >= 0 && slice.begin + slice.elements().numel() <= elements) {
    return;
  }
  throw Error(ErrorKind::kInternal, "checkpoint",
              "the slice of tensor \"" + slice.name + "\" from element " + std::to_string(slice.begin) +
                  " on is not a contiguous vector within its " + counted(elements, "element"));
}

SlicesFile::SlicesFile(const std::string& folder, std::string name, const std::vector<TensorSlice>& slices,
                       FileSystem& files, int64_t block_bytes, const std::function<void()>& before_block)
    : name_(std::move(name)) {
  Manifest sizes;
  sizes.block_bytes = block_bytes;
  struct Source {
    const TensorSlice* slice;
    ManifestTensor tensor;
  };
  std::vector<TensorInfo> infos;
  std::map<std::string, Source> sources;
  for (const TensorSlice& slice : slices) {
    const PlacedVector elements = slice.elements();
    ManifestTensor tensor{slice.name, elements.scalar_type(), slice.shape, {}};
    const int64_t end = slice.begin + elements.numel();
    tensor.slices.push_back({name_, slice.begin, end, {}});
    const std::string stored = stored_name(tensor, tensor.slices[0]);
    TensorInfo info{stored, tensor.dtype, stored_shape(tensor, tensor.slices[0]), 0, 0};
    if (sources.emplace(stored, Source{&slice, std::move(tensor)}).second) {
      infos.push_back(std::move(info));
    } else if (end > slice.begin) {
      throw Error(ErrorKind::kInternal, "checkpoint", stored + " was passed twice");
    }
  }
  writer_.emplace(folder + "/" + name_, std::move(infos), std::map<std::string, std::string>{{"format", "pt"}}, files);
  for (const TensorInfo& info : writer_->tensors()) {
    auto& [slice, tensor] = sources.at(info.name);
    const PlacedVector elements = slice->elements();
    const int64_t length = elements.numel(), most = sizes.block_elements(tensor);
    for (int64_t at = 0; at < length; at += most) {
      before_block();
      const at::Tensor block = elements.read(at, std::min(most, length - at));
      // The checksum is taken before the data is written, so that errors of the disk are found.
      tensor.slices[0].blocks.push_back(checksum(block.const_data_ptr(), block.nbytes()));
      writer_->write(block.const_data_ptr(), block.nbytes());
    }
    tensors_.push_back(std::move(tensor));
  }
}

void SlicesFile::finish(Manifest& manifest) {
  writer_->finish();
  for (ManifestTensor& tensor : tensors_) manifest.tensors.push_back(std::move(tensor));
  manifest.files[name_] = {writer_->file_bytes(), checksum(writer_->header().data(), writer_->header().size())};
}

Manifest manifest_of_step(const std::string& folder, int64_t step) {
  Manifest manifest = read_manifest(folder);
  if (manifest.step != step) {
    checkpoint_damaged(folder, "its manifest is that of step " + std::to_string(manifest.step));
  }
  return manifest;
}

Manifest verified_manifest(const std::string& folder, int64_t step, CheckpointPart part, int rank, int ranks) {
  Manifest manifest = manifest_of_step(folder, step);
  CheckpointReader(folder, manifest).check(part, rank, ranks);
  return manifest;
}

void verify_sizes(const std::string& folder) {
  for (const auto& [name, said] : read_manifest(folder).files) {
    std::error_code error;
    if (std::filesystem::file_size(folder + "/" + name, error) != said.bytes || error) {
      checkpoint_damaged(folder + "/" + name, "does not have the size that was written, or is missing");
    }
  }
}

CheckpointReader::CheckpointReader(std::string folder, const Manifest& manifest)
    : folder_(std::move(folder)), manifest_(manifest) {
  for (const ManifestTensor& tensor : manifest.tensors) {
    for (const ManifestSlice& slice : tensor.slices) ++slices_in_[slice.file];
  }
}

const SafetensorsFile& CheckpointReader::open(const std::string& name) {
  if (open_name_ == name) return *open_file_;
  const std::string path = folder_ + "/" + name;
  const ManifestFile& said = manifest_.files.at(name);
  const uint64_t bytes = readable_size(path);
  if (bytes != said.bytes) {
    checkpoint_damaged(path, "has " + counted(bytes, "byte") + ", but " + std::to_string(said.bytes) + " were written");
  }
  open_name_.clear();
  open_file_.emplace(path);
  if (checksum(open_file_->header().data(), open_file_->header().size()) != said.header_checksum) {
    checkpoint_damaged(path, "the checksum of its header does not match");
  }
  const auto slices = slices_in_.find(name);
  if (open_file_->tensors().size() != (slices == slices_in_.end() ? 0 : slices->second)) {
    checkpoint_damaged(path, "holds tensors that the manifest does not name");
  }
  open_name_ = name;
  return *open_file_;
}

void CheckpointReader::read_block(const ManifestTensor& tensor, const ManifestSlice& slice, size_t block, int64_t begin,
                                  int64_t end, const Sink& sink) {
  const SafetensorsFile& file = open(slice.file);
  const std::string path = folder_ + "/" + slice.file;
  const TensorInfo* info = file.find(stored_name(tensor, slice));
  if (!info || info->shape != stored_shape(tensor, slice) || info->dtype != tensor.dtype) {
    checkpoint_damaged(path, range_text(tensor, slice.begin, slice.end) + ", differs from what the manifest says");
  }
  const int64_t size = element_bytes(tensor), length = slice.end - slice.begin;
  const int64_t first = static_cast<int64_t>(block) * manifest_.block_elements(tensor);
  const int64_t last = first + std::min(manifest_.block_elements(tensor), length - first);
  Checksum sum;
  for (int64_t at = first; at < last;) {
    const int64_t stop = std::min(last, at + kBlockBytes / size);
    const auto bytes = static_cast<size_t>((stop - at) * size);
    if (buffer_.size() < bytes) buffer_.resize(bytes);
    file.read(*info, static_cast<uint64_t>(at * size), bytes, buffer_.data());
    sum.update(buffer_.data(), bytes);
    if (stop == last && sum.hex() != slice.blocks[block]) {
      checkpoint_damaged(
          path, "the checksum of " + range_text(tensor, slice.begin + first, slice.begin + last) + ", does not match");
    }
    const int64_t from = std::max(begin, slice.begin + at), to = std::min(end, slice.begin + stop);
    if (from < to && sink) sink(from, to, buffer_.data() + (from - slice.begin - at) * size);
    at = stop;
  }
}

void CheckpointReader::check(CheckpointPart part, int rank, int ranks, std::vector<std::string>* damage) {
  struct Block {
    const std::string* file;
    const ManifestTensor* tensor;
    const ManifestSlice* slice;
    size_t block;
    int64_t bytes;
  };
  // The blocks are sorted by file, so that each file is opened once.
  std::vector<Block> blocks;
  std::set<std::string> files;
  if (part == CheckpointPart::kAll) {
    for (const auto& [name, file] : manifest_.files) files.insert(name);
  }
  int64_t total = 0;
  for (const ManifestTensor& tensor : manifest_.tensors) {
    if (part == CheckpointPart::kModel && is_optimizer(tensor.name)) continue;
    const int64_t most = manifest_.block_elements(tensor);
    for (const ManifestSlice& slice : tensor.slices) {
      files.insert(slice.file);
      for (size_t i = 0; i < slice.blocks.size(); ++i) {
        const int64_t before = static_cast<int64_t>(i) * most;
        const int64_t bytes = std::min(most, slice.end - slice.begin - before) * element_bytes(tensor);
        blocks.push_back({&slice.file, &tensor, &slice, i, bytes});
        total += bytes;
      }
    }
  }
  std::ranges::stable_sort(blocks, [](const Block& a, const Block& b) { return *a.file < *b.file; });
  const auto look = [&](const std::function<void()>& at) {
    try {
      at();
    } catch (const Error& error) {
      if (!damage || error.kind() != ErrorKind::kInput) throw;
      if (damage->empty() || damage->back() != error.message()) damage->emplace_back(error.message());
    }
  };
  // Files are shared among the ranks separately from blocks, because a file may have no blocks.
  int number = 0;
  for (const std::string& file : files) {
    if (number++ % ranks == rank) look([&] { open(file); });
  }
  int64_t before = 0;
  for (const Block& block : blocks) {
    if (total == 0 || before * ranks / total == rank) {
      look([&] { read_block(*block.tensor, *block.slice, block.block, 0, 0, nullptr); });
    }
    before += block.bytes;
  }
}

void CheckpointReader::read(const ManifestTensor& tensor, int64_t begin, int64_t end, const Sink& sink) {
  if (begin == end) return;
  const int64_t most = manifest_.block_elements(tensor);
  auto slice = std::ranges::partition_point(tensor.slices, [&](const ManifestSlice& s) { return s.end <= begin; });
  for (; slice != tensor.slices.end() && slice->begin < end; ++slice) {
    const int64_t from = std::max(begin, slice->begin), to = std::min(end, slice->end);
    for (int64_t block = (from - slice->begin) / most; slice->begin + block * most < to; ++block) {
      read_block(tensor, *slice, static_cast<size_t>(block), from, to, sink);
    }
  }
}

}  // namespace annulus
