// See text_ids.h.
#include "runtime/huggingface/text_ids.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "common/files.h"
#include "runtime/huggingface/config_reader.h"

namespace annulus {

using huggingface::ConfigReader;

TextIds read_text_ids(const std::string& folder) {
  constexpr int64_t kMostIds = 1 << 24;
  TextIds ids;
  // generation_config.json comes first: texts of instruction-tuned models do not end as their config.json says.
  for (const char* name : {"/generation_config.json", "/config.json"}) {
    const std::string path = folder + name;
    std::error_code error;
    if (!std::filesystem::exists(path, error) && !error) continue;
    const nlohmann::json object = huggingface::parse_object(read_small_file("huggingface", path), path);
    const ConfigReader reader(path, object);
    if (!ids.begin && reader.find("bos_token_id") != nullptr) ids.begin = reader.whole("bos_token_id", 0, kMostIds);
    const nlohmann::json* ends = reader.find("eos_token_id");
    if (!ids.ends.empty() || ends == nullptr) continue;
    for (const nlohmann::json& end : ends->is_array() ? *ends : nlohmann::json::array({*ends})) {
      if (!end.is_number_integer() || end < 0 || end > kMostIds) {
        reader.refuse("eos_token_id", "expected an id or a list of ids, got " + huggingface::shown(*ends));
      }
      ids.ends.push_back(end.get<int64_t>());
    }
  }
  return ids;
}

}  // namespace annulus
