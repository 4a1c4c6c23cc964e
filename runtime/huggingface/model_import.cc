// See model_import.h.
#include "runtime/huggingface/model_import.h"

#include <vector>

#include "common/files.h"
#include "common/text.h"
#include "runtime/huggingface/model_files.h"
#include "runtime/run/run_folder.h"

namespace annulus {

ModelImport::ModelImport(const ModelSection& model, bool data_is_text, const std::string& data_tokenizer)
    : folder_(model.from), weights_(folder_, model) {
  text_ = "weights " + join(weights_.dtypes(), ", ") + " of " + folder_ + ", trained in " + model.dtype + "; " +
          check_tokenizer(folder_, model.vocab, data_is_text, data_tokenizer);
}

void ModelImport::keep_files(const std::string& run) const {
  const std::string to = huggingface_folder(run);
  FileSystem::real().make_folder(to);
  std::vector<std::string> names = passed_files();
  names.emplace_back("config.json");
  copy_files(names, folder_, to);
}

}  // namespace annulus
