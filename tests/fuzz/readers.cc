// See readers.h.
#include "tests/fuzz/readers.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <variant>

#include "attention/pattern/pattern.h"
#include "attention/plan/machine.h"
#include "attention/proof/plan_form.h"
#include "comm/headers.h"
#include "comm/threads/threads.h"
#include "common/checked_json.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/logging/log_setup.h"
#include "common/logging/record.h"
#include "launcher/hosts/host_discovery.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/host_report.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/hosts/sockets.h"
#include "launcher/launch/rank_messages.h"
#include "launcher/launch/watchers.h"
#include "launcher/topology/machine.h"
#include "runtime/config/config.h"
#include "runtime/data/row_index_file.h"
#include "runtime/data/shards/token_file.h"
#include "runtime/data/shards/token_table.h"
#include "runtime/evaluation/report.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/huggingface/text_ids.h"
#include "runtime/report/report_page.h"
#include "runtime/report/run_data.h"
#include "runtime/run/checkpoint_manifest.h"
#include "runtime/tensor_files/block_map_file.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus::testing {
namespace {

void require_equal(const std::string& a, const std::string& b) {
  if (a != b) throw std::logic_error("it does not read back as the same: " + a + " became " + b);
}

// A folder of this process, which is removed at its end.
const std::string& folder() {
  struct Folder {
    std::string path;
    Folder() {
      const char* parent = std::getenv("TEST_TMPDIR");
      path = std::filesystem::path(parent != nullptr ? parent : "/tmp") / ("annulus-fuzz-" + std::to_string(getpid()));
      std::filesystem::create_directories(path);
    }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static const Folder folder;
  return folder.path;
}

std::string file_of(std::string_view bytes, const std::string& name) {
  const std::string path = folder() + "/" + name;
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  return path;
}

// ---- Texts

void read_config(std::string_view bytes) {
  const Config config = parse_config(bytes, "input");
  const std::string text = to_toml(config);
  require_equal(text, to_toml(parse_config(text, "what was written")));
}

// A small shape keeps what a valid pattern may take small.
constexpr AttentionShape kShape = {2, 4, 2, 96, 96, 0};

void read_pattern(std::string_view bytes) {
  const PatternSpec spec = parse_pattern(bytes, "input");
  require_equal(spec.text(), parse_pattern(spec.text(), "what was written").text());
  validate(spec, kShape);
  if (spec.kind != PatternSpec::Kind::kBlocks && !has_mask(spec) && !is_adaptive(spec)) {
    count_pairs(make_pattern(spec, kShape));
  }
}

void read_machine(std::string_view bytes) {
  const MachineProfile machine = parse_machine(bytes, "input");
  require_equal(machine.text(), parse_machine(machine.text(), "what was written").text());
}

void read_source(std::string_view bytes) { parse_source(bytes, "input"); }

void read_log_settings(std::string_view bytes) { parse_log_settings(bytes, "input"); }

void read_hosts(std::string_view bytes) { parse_hosts(bytes, "input"); }

void read_hostfile_of(std::string_view bytes) { read_hostfile(file_of(bytes, "hostfile")); }

void read_topology(std::string_view bytes) { Machine::from_xml_text(bytes, "input"); }

void read_synthetic(std::string_view bytes) { Machine::from_synthetic(std::string(bytes)); }

// ---- Messages

// What a process sends to the launcher: one line, JSON, whose texts are bytes.
nlohmann::json message(std::string_view bytes) { return message_of(parse_checked_json(bytes, "fuzz", "input")); }

void read_host_report(std::string_view bytes) {
  const HostReport report = report_from_json(message(bytes), "input");
  report_from_json(report_to_json(report), "what was written");
}

void read_record(std::string_view bytes) {
  if (const std::optional<LogRecord> record = record_from_json(bytes)) json_text(*record);
}

void read_rank_message(std::string_view bytes) {
  constexpr int kRanks = 4;
  const RankMessage message = rank_message_of(bytes, kRanks);
  if (const auto* started = std::get_if<RankStarted>(&message); started != nullptr && !started->beat.is_null()) {
    Watchers watchers("here", [](size_t rank) { return static_cast<int>(rank); });
    watchers.add_rank(1, started->host, CheckedJson(started->beat, "fuzz", "input"));
  } else if (const auto* of_log = std::get_if<RankRecord>(&message)) {
    read_record(of_log->text);
  }
}

void read_watch_news(std::string_view bytes) { watch_news_of(bytes); }

void read_hello(std::string_view bytes) {
  if (!connection_of(std::string(bytes), "00112233445566778899aabbccddeeff")) {
    throw Error(ErrorKind::kInput, "fuzz", "the connection is closed");
  }
}

void read_question(std::string_view bytes) { host_question_of(bytes); }

// Headers of a collective, as other ranks sent them.
void read_headers(std::string_view bytes) {
  using comm_internal::CollectiveHeader;
  std::vector<CollectiveHeader> headers(std::min<size_t>(bytes.size() / sizeof(CollectiveHeader), 3));
  if (headers.empty()) return;
  std::memcpy(headers.data(), bytes.data(), headers.size() * sizeof(CollectiveHeader));
  run_ranks(static_cast<int>(headers.size()), [&](Communicator& comm) {
    if (comm.rank() == 0) comm_internal::describe_disagreement(comm, headers, "call");
  });
}

// ---- Files

void read_tensors(std::string_view bytes) {
  const SafetensorsFile file(file_of(bytes, "x.safetensors"));
  for (const TensorInfo& tensor : file.tensors()) file.load(tensor.name);
}

void read_block_map(std::string_view bytes) {
  PatternSpec spec = parse_pattern(
      "{ kind = \"blocks\", block = 16, map = \"file\", file = \"" + file_of(bytes, "map.safetensors") + "\" }",
      "input");
  make_block_map(read_block_maps(spec, kShape), kShape);
}

void read_manifest_of(std::string_view bytes) {
  file_of(bytes, "manifest.json");
  manifest_text(read_manifest(folder()));
}

std::string sealed_manifest(std::string_view bytes) {
  nlohmann::json json = nlohmann::json::parse(bytes, nullptr, false);
  if (json.is_discarded() || !json.is_object()) return std::string(bytes);
  json.erase("checksum");
  try {
    const std::string text = json.dump();
    json["checksum"] = checksum(text.data(), text.size());
    return json.dump();
  } catch (const nlohmann::json::exception&) {  // not UTF-8
    return std::string(bytes);
  }
}

void visit(const TokenFile& file) {
  std::vector<int64_t> ids(static_cast<size_t>(std::min<int64_t>(file.tokens(), 4096)));
  file.read(0, static_cast<int64_t>(ids.size()), ids.data());
  file.visit_documents(/*hashed=*/true, [](int64_t, int64_t, uint64_t) {});
  file.visit_weights(0, file.tokens(), [](int64_t, int64_t, float) {});
  for (int64_t at = 0; file.has_trees() && at < file.tokens();) {
    const Branch branch = file.branch_at(at);
    at = branch.begin + branch.length;
  }
  file.verify();
}

void read_tokens(std::string_view bytes) { visit(*TokenFile::open(file_of(bytes, "input.tokens"), {})); }

void read_llmc(std::string_view bytes) { visit(*TokenFile::open(file_of(bytes, "llmc.bin"), {.format = "llmc"})); }

void read_nanogpt(std::string_view bytes) {
  visit(*TokenFile::open(file_of(bytes, "nanogpt.bin"), {.format = "nanogpt", .width = 16, .end = 1}));
}

void read_megatron(std::string_view bytes) {
  file_of(std::string(24, '\1'), "pair.bin");  // as many bytes as the kept index has tokens for
  visit(*TokenFile::open(file_of(bytes, "pair.idx"), {.format = "megatron"}));
}

void read_tokenization(std::string_view bytes) {
  file_of(bytes, "tokenization.json");
  Tokenizations().of_folder(folder());
  std::filesystem::remove(folder() + "/tokenization.json");  // the readers of token files would use it
}

void read_table(std::string_view bytes) {
  const TokenTable table = TokenTable::load(file_of(bytes, "tokens.table"));
  TokenText text(table);
  std::string out;
  for (int64_t id = 0; id < table.size(); ++id) text.append(id, out);
}

// The header's last 16 bytes are the checksum of what follows it (docs/reference/formats.md).
std::string sealed_table(std::string_view bytes) {
  constexpr size_t kHeader = 64, kChecksum = 16;
  std::string sealed(bytes);
  if (sealed.size() < kHeader) return sealed;
  const std::string sum = checksum(sealed.data() + kHeader, sealed.size() - kHeader);
  for (size_t i = 0; i < kChecksum; ++i) {
    sealed[kHeader - kChecksum + i] = static_cast<char>(std::stoi(sum.substr(2 * i, 2), nullptr, 16));
  }
  return sealed;
}

constexpr size_t kRowTail = 224, kRowDigest = 32;

void read_rows(std::string_view bytes) {
  const std::string digest(bytes.substr(bytes.size() < kRowTail ? 0 : bytes.size() - kRowTail, kRowDigest));
  const std::shared_ptr<const RowIndex> rows = open_rows(file_of(bytes, "rows.index"), digest, nullptr);
  if (!rows) return;
  for (const Split split : {Split::kTrain, Split::kValidation}) {
    for (int64_t r = 0; r < std::min<int64_t>(rows->rows(split), 4); ++r) rows->row(split, r);
  }
  rows->verify();
}

// The tail's last 8 bytes are the XXH3-64 of what precedes them in it.
std::string sealed_rows(std::string_view bytes) {
  std::string sealed(bytes);
  if (sealed.size() < kRowTail) return sealed;
  const uint64_t hash = hash64(sealed.data() + sealed.size() - kRowTail, kRowTail - sizeof(uint64_t));
  std::memcpy(sealed.data() + sealed.size() - sizeof hash, &hash, sizeof hash);
  return sealed;
}

void read_model_config_of(std::string_view bytes) { parse_folder_config(std::string(bytes), "config.json"); }

void read_text_ids_of(std::string_view bytes) {
  file_of(bytes, "generation_config.json");
  read_text_ids(folder());
}

// A run's folder whose metrics these are, in the form that its page has.
void read_metrics_of(std::string_view bytes) {
  std::filesystem::create_directories(folder() + "/run");
  file_of(bytes, "run/metrics.jsonl");
  report_page({run_data(folder() + "/run")});
}

void read_evaluation(std::string_view bytes) {
  const EvaluationResults results = results_of_json(std::string(bytes), "input");
  const std::string text = evaluation_json(results);
  require_equal(text, evaluation_json(results_of_json(text, "what was written")));
  evaluation_table(results);
  perplexity_svg({{"", results}});
  for (const std::string& task : evaluated_tasks(results)) task_svg({"", results}, task);
}

void read_plan(std::string_view bytes) {
  std::istringstream in{std::string(bytes)};
  prove(read_plan_form(in, {.name = "input", .free = AvailableMemory{int64_t{256} << 20, "the limit of this test"}}));
}

}  // namespace

const std::vector<Reader>& readers() {
  static const std::vector<Reader> all = {
      {"config", read_config},
      {"pattern", read_pattern},
      {"machine", read_machine},
      {"source", read_source},
      {"log-settings", read_log_settings},
      {"hosts", read_hosts},
      {"hostfile", read_hostfile_of},
      {"topology", read_topology, nullptr, 40},  // hwloc reads each in a process of its own first
      {"synthetic", read_synthetic, nullptr, 40},
      {"host-report", read_host_report},
      {"record", read_record},
      {"rank-message", read_rank_message},
      {"watch-news", read_watch_news},
      {"hello", read_hello},
      {"question", read_question},
      {"headers", read_headers},
      {"safetensors", read_tensors},
      {"block-map", read_block_map},
      {"manifest", read_manifest_of, sealed_manifest},
      {"tokens", read_tokens},
      {"llmc", read_llmc},
      {"nanogpt", read_nanogpt},
      {"megatron", read_megatron},
      {"tokenization", read_tokenization},
      {"table", read_table, sealed_table},
      {"rows", read_rows, sealed_rows},
      {"model-config", read_model_config_of},
      {"text-ids", read_text_ids_of},
      {"plan", read_plan},
      {"metrics", read_metrics_of},
      {"evaluation", read_evaluation},
  };
  return all;
}

}  // namespace annulus::testing
