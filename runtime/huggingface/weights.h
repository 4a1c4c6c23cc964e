// ModelWeights: the weights in a folder in Hugging Face's layout (model.safetensors, or several files with
// model.safetensors.index.json), read slice by slice into the part of them that a rank holds. Used by ModelImport and
// by inference.
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

// Everything is checked when it is opened; the files stay open. Thread-safe.
class ModelWeights {
 public:
  // Reads the headers of all files and takes no memory for weights; if embedding and output are tied and both are
  // there, it compares the two. Every tensor of the model must be there in its shape, as fp64, fp32, fp16 or bf16, and
  // no other tensor except rotary_emb.inv_freq of older files, which follows from the configuration, and the output
  // matrix of a tied model if it has the same bits as the embedding. Raises Error(kInput), naming tensor and file, if a
  // file is missing or damaged, if the index is wrong, or if a tensor is missing, transposed, fused with others,
  // unknown, quantised or pickled; Error(kResource) for what cannot be read.
  ModelWeights(const std::string& folder, const ModelShape& shape);

  // Copies weights into the slices' `values`, on any device, rounded to nearest if their dtype is narrower. Takes
  // kBlockBytes of host memory besides. Raises as the constructor does, and Error(kInternal) for a tensor that the
  // model does not have.
  void read(const std::vector<TensorSlice>& into) const;

  // A checksum of each tensor's name, shape, dtype and first and last bytes. Ranks compare it, because each opens a
  // folder of its own.
  std::string fingerprint() const;

  // Bytes of the model's tensors in the files, and their dtypes ("BF16", "F32"), sorted.
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
  std::map<std::string, Place> tensors_;  // by name; after the checks, only those of the model
};

}  // namespace annulus
