// ModelImport: initial weights of a run from a folder in Hugging Face's layout (model.from). Used by the trainer on
// every rank; a resumed run needs neither this nor the folder.
#pragma once

#include <string>

#include "runtime/config/config.h"
#include "runtime/huggingface/weights.h"

namespace annulus {

class ModelImport {
 public:
  // Opens model.from and checks it against the configuration and the data. `data_is_text`: the data's tokens are bytes.
  // `data_tokenizer`: the digest of their tokenizer; empty: unknown. Loads no weights. Raises Error(kInput), which
  // names file and tensor or key.
  ModelImport(const ModelSection& model, bool data_is_text, const std::string& data_tokenizer);

  const ModelWeights& weights() const { return weights_; }
  // Returns a line for the run's output: "weights BF16 of FOLDER, trained in bf16; its tokenizer is the data's".
  const std::string& text() const { return text_; }

  // Copies config.json, and the files that export passes through, into RUN/huggingface.
  void keep_files(const std::string& run) const;

 private:
  std::string folder_;
  ModelWeights weights_;
  std::string text_;
};

}  // namespace annulus
