// ModelWeights: reads weights of a folder in Hugging Face's layout (model.safetensors, or several files with
// model.safetensors.index.json) into the slices that a rank holds. Used by ModelImport and by inference.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/model/model_shape.h"
#include "runtime/run/tensor_slice.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {

// The constructor checks everything; the files stay open. Thread safe.
class ModelWeights {
 public:
  // Reads the headers of all files, and weights only to compare tied matrices. Every tensor of the model must be
  // present in its shape, as fp64, fp32, fp16 or bf16. The only other tensors accepted are rotary_emb.inv_freq of older
  // files, which follows from the configuration, and the output matrix of a tied model if it equals the embedding bit
  // by bit. Raises Error(kInput), naming tensor and file, if a file is missing or damaged, if the index is wrong, or if
  // a tensor is missing, transposed, fused with others, unknown, quantized or pickled; Error(kResource) for I/O errors.
  ModelWeights(const std::string& folder, const ModelShape& shape);

  // Copies weights into the slices' elements, on any device or in a tier, rounding to nearest if their dtype is
  // narrower, through kBlockBytes of host memory. Raises as the constructor does, and Error(kInternal) for a tensor
  // that the model lacks.
  void read(const std::vector<TensorSlice>& into) const;

  // Returns a checksum of each tensor's name, shape, dtype and first and last bytes. Ranks compare it, because their
  // folders may differ.
  std::string fingerprint() const;

  // Return the bytes of the model's tensors in the files, and their dtypes ("BF16", "F32"), sorted.
  int64_t bytes() const;
  std::vector<std::string> dtypes() const;

 private:
  struct Place {
    std::string path;  // of the file
    const SafetensorsFile* file;
    const TensorInfo* info;
  };

  void open_single(const std::string& path);
  void open_set(const std::string& folder, const std::string& index, bool tied);
  void add(const std::string& path, const SafetensorsFile& file);
  void check_known(const std::map<std::string, ParameterShape>& expected) const;
  void check_tie(const ModelShape& shape);
  void require_equal(const Place& a, const Place& b) const;

  std::string folder_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> tensors_;  // by name; after the checks, only the model's
};

}  // namespace annulus
