// See run_trace.h.
#include "runtime/run/run_trace.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "comm/agreement.h"
#include "comm/gather_trace.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "common/trace/last_operations.h"

namespace annulus {
namespace {

constexpr OpLabel kPreparing{"preparing the trace"};

std::string span_text(int64_t first, int64_t last) {
  return std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
}

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw Error(ErrorKind::kUsage, "train", "--trace " + std::string(text) + ": " + why);
}

}  // namespace

TraceSteps parse_trace_steps(std::string_view text, int64_t steps) {
  const size_t dash = text.find('-');
  const std::optional<int64_t> first = number_of_text<int64_t>(text.substr(0, dash));
  const std::optional<int64_t> last =
      dash == std::string_view::npos ? first : number_of_text<int64_t>(text.substr(dash + 1));
  if (!first || !last || *first < 1) refuse(text, "expected steps, counted from 1, such as 100-104 or 100");
  if (*last < *first)
    refuse(text, "the last step comes before the first; did you mean " + span_text(*last, *first) + "?");
  if (*last - *first >= kMostSteps) {
    refuse(text, "expected at most " + with_commas(kMostSteps, "step") + "; each takes some memory of every rank");
  }
  if (*last > steps) {
    refuse(text, "the run ends with step " + std::to_string(steps) + "; name steps up to that, or raise run.steps");
  }
  return {*first, *last};
}

RunTrace::RunTrace(const std::optional<TraceSteps>& steps, const std::string& run, Communicator& world, int64_t done)
    : steps_(steps), run_(run), world_(world) {
  std::error_code none;
  if (std::filesystem::is_directory(run + "/logs", none)) set_last_operations_folder(run + "/logs");
  if (!steps_) return;
  if (done >= steps_->first) {
    refuse(span_text(steps_->first, steps_->last), "the run has already made " + with_commas(done, "step") +
                                                       "; name steps from " + std::to_string(done + 1) + " on");
  }
  together(
      world_, kPreparing,
      [&] {
        FileSystem::real().make_folder(run_ + "/traces");
        const std::string file = path(steps_->last);
        require_output("train", "the trace " + file, file);
      },
      /*only_first=*/true);
}

std::string RunTrace::path(int64_t last) const {
  return run_ + "/traces/steps-" + span_text(steps_->first, last) + ".json";
}

std::vector<std::string> RunTrace::before_step(int64_t done) {
  if (!steps_) return {};
  if (window_ && done >= steps_->last) return finish(done);
  if (!window_ && done + 1 >= steps_->first) window_.emplace(trace_rank());
  return {};
}

std::vector<std::string> RunTrace::finish(int64_t done) {
  if (!window_) return {};
  const TraceRecord record = window_->finish();
  window_.reset();
  const std::string file = path(done);
  const GatheredTrace gathered = gather_trace(world_, record, file, {{"steps", span_text(steps_->first, done)}});
  steps_.reset();
  std::vector<std::string> lines = {"trace:       " + file + " (clocks of ranks agree within " +
                                    significant(static_cast<double>(gathered.clock_error) / 1e3, 2) +
                                    " microseconds; open it in ui.perfetto.dev)"};
  if (gathered.dropped > 0) {
    lines.push_back("the trace lacks " + with_commas(gathered.dropped, "record") +
                    " beyond the most that a thread keeps, and so its arrows: trace fewer steps");
  }
  return lines;
}

}  // namespace annulus
