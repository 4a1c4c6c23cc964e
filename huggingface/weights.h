// ModelWeights: the weights in a folder of Hugging Face's, model.safetensors or many files with
// model.safetensors.index.json, read slice by slice into whatever part of them a rank holds. Used by the start of a
// training run and by whoever computes with such a folder.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/description/model_shape.h"
#include "tensor_files/safetensors.h"
#include "training/run/tensor_slice.h"

namespace annulus {

// Opened and checked in full; the files stay open. Thread-safe.
class ModelWeights {
 public:
  // Looks at the headers of all files, and takes no memory for weights; where embedding and output are tied and both
  // are there, it reads both. Every tensor of the model must be there in its shape, as fp64, fp32, fp16 or bf16, and no
  // other one: but for rotary_emb.inv_freq of older files, which follows from the configuration, and for an output
  // matrix of a tied model that has the same bits as the embedding. Raises Error(kInput) that names tensor and file: a
  // file is missing or damaged, an index says what is not so, a tensor is missing, transposed, fused with others,
  // unknown, quantised or pickled; Error(kResource) for what cannot be read.
  ModelWeights(const std::string& folder, const ModelShape& shape);

  // Copies into the slices' `values`, on any device, in their dtype: rounded to nearest where it is narrower. Holds
  // kBlockBytes of the host's memory besides. Raises as the constructor does, and Error(kInternal) for a tensor that
  // the model does not have.
  void read(const std::vector<TensorSlice>& into) const;

  // Of names, shapes, dtypes and the ends of each tensor: ranks that open folders of their own compare it.
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
  std::map<std::string, Place> tensors_;  // by name; once checked, the model's alone
};

}  // namespace annulus
