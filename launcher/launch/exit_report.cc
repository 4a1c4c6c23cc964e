// See exit_report.h.
#include "launcher/launch/exit_report.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/logging/record.h"
#include "common/text.h"
#include "launcher/launch/signals.h"

namespace annulus {
namespace {

// "rank 0", "ranks 0-3", "ranks 0, 2-3"
std::string rank_list(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  return (ranks.size() == 1 ? "rank " : "ranks ") + ranges_text(ranks);
}

// Adds the messages about the ranks that failed. `code` is the job's exit code.
void add_failures(const std::vector<RankEnd>& failures, int code, const JobEnd& end,
                  std::vector<std::string>& messages) {
  const RankEnd& first = failures.front();
  std::vector<int> same, other;
  for (const RankEnd& f : failures) {
    const bool equal = f.abrupt == first.abrupt && f.code == first.code && f.message == first.message;
    // Ranks that die abruptly after the first one were killed by mpirun.
    if (f.rank == first.rank || (equal && !f.abrupt)) {
      same.push_back(f.rank);
    } else if (!f.abrupt) {
      other.push_back(f.rank);
    }
  }
  if (first.said) {
    // One rank has printed it for all.
  } else if (!first.message.empty()) {
    messages.push_back((end.ranks == 1 ? "" : rank_list(same) + ": ") + first.message);
  } else {
    std::string how = "ended with exit code " + std::to_string(code);
    if (first.abrupt && code > 128 && code < 128 + NSIG) how = "was ended by " + signal_text(code - 128);
    if (first.memory) how += "; the kernel has just ended processes of its host for lack of memory";
    const auto rank = static_cast<size_t>(first.rank);
    const std::vector<std::string> lines = rank < end.unseen.size() ? end.unseen[rank] : std::vector<std::string>();
    std::string message = rank_list(same) + " " + how + (lines.empty() ? "" : "; its last lines:");
    for (const std::string& line : lines) message += "\n  " + line;
    messages.push_back(std::move(message));
  }
  if (!other.empty()) messages.push_back(rank_list(other) + " failed after it");
}

// Puts the first rank that failed by itself before those that ended because of it and were heard earlier.
void put_cause_first(std::vector<RankEnd>& failures) {
  if (failures.empty() || failures.front().follows < 0) return;
  const auto cause =
      std::find_if(failures.begin(), failures.end(), [](const RankEnd& f) { return f.follows < 0 && !f.abrupt; });
  if (cause != failures.end()) std::rotate(failures.begin(), cause, cause + 1);
}

std::optional<int> failed_rank_of(const std::vector<RankEnd>& failures, int ranks) {
  if (failures.empty()) return std::nullopt;
  const RankEnd& first = failures.front();
  if (first.follows >= 0) return first.follows;  // mpirun ended that rank before it could report
  if (first.said) return std::nullopt;           // one rank has reported the failure of all
  const auto alike = std::count_if(failures.begin(), failures.end(), [&](const RankEnd& f) {
    return !f.abrupt && f.follows < 0 && f.code == first.code && f.message == first.message;
  });
  if (ranks > 1 && alike == ranks) return std::nullopt;
  return first.rank;
}

// Whether this is rank 0 of a run that stopped on request, which has itself printed how to continue.
bool has_printed_how_to_continue(const RankEnd& f) {
  return f.rank == 0 && !f.abrupt && !f.said && f.message.empty() && f.code > 128;
}

}  // namespace

ResumePoint resume_point(int64_t step, const std::string& folder, const std::vector<std::string>& command) {
  namespace fs = std::filesystem;
  if (folder.empty()) return {ResumePoint::Checkpoint::kNoneYet, step, folder, command};
  // The command resumes from the newest checkpoint that exists, which is usually `folder`, or else one beside it.
  std::string newest;
  std::error_code error;
  for (fs::directory_iterator it(fs::path(folder).parent_path(), error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with("step-") || name <= newest) continue;
    if (access((it->path() / "manifest.json").c_str(), F_OK) == 0) newest = name;
  }
  if (newest.empty()) return {ResumePoint::Checkpoint::kGone, step, folder, command};
  return {ResumePoint::Checkpoint::kThere, std::strtoll(newest.c_str() + std::strlen("step-"), nullptr, 10),
          fs::path(folder).parent_path() / newest, command};
}

std::string resume_text(const ResumePoint& resume) {
  const std::string step = with_commas(resume.step);
  switch (resume.checkpoint) {
    case ResumePoint::Checkpoint::kThere:
      return "to continue from the checkpoint of step " + step + ": " + shell_quote(resume.command);
    case ResumePoint::Checkpoint::kGone:
      return "the checkpoint of step " + step + " is not in " + resume.folder + " any more";
    case ResumePoint::Checkpoint::kNoneYet:
      break;
  }
  return "there is no checkpoint yet: the steps that were done are lost";
}

ExitReport exit_report_of(const JobEnd& end) {
  std::vector<std::string> messages;
  const bool interrupted = end.stop_signal != 0;
  if (end.mpirun_signal != 0 && !end.forced && !interrupted && !end.faulty) {
    messages.push_back("mpirun was ended by " + signal_text(end.mpirun_signal));
  }
  // Ranks that ended on request, or because other ranks ended, have not failed.
  std::vector<RankEnd> failures;
  for (const RankEnd& f : end.failed) {
    const bool asked = interrupted && (f.abrupt || f.code >= 128);
    if (!asked) failures.push_back(f);
  }
  put_cause_first(failures);
  const bool faulty = end.faulty && !interrupted;
  if (faulty) failures.clear();  // they follow from what has been said
  int code = end.mpirun_code;
  // A rank that fails while it stops, for example on a full disk while it writes its checkpoint, has failed.
  if (!failures.empty() && !failures.front().abrupt) {
    code = failures.front().code;
  } else if (!end.failed.empty() && !end.failed.front().abrupt) {
    code = end.failed.front().code;
  }
  if (!end.failed.empty() && code == 0) code = 1;
  if (faulty) {
    code = static_cast<int>(ErrorKind::kComm);
  } else if (!failures.empty()) {
    add_failures(failures, code, end, messages);
  } else if (code != 0 && !interrupted) {
    // No rank reported anything, so only mpirun's own output can explain it.
    messages.push_back("mpirun ended with exit code " + std::to_string(code) +
                       (end.any_started ? "" : " before any rank started") + "; it said:\n" +
                       (end.mpirun_output.empty() ? "(nothing)" : end.mpirun_output));
  }
  if (interrupted && code != 0 && (failures.empty() || end.forced)) {
    code = 128 + end.stop_signal;
    messages.push_back(end.forced ? "stopped; what was not in a finished checkpoint is lost" : "stopped");
  }
  if (end.output_error != 0 && (code == 0 || code == 128 + SIGPIPE)) {
    code = 128 + SIGPIPE;
    if (end.output_error != EPIPE) {
      const Error error(ErrorKind::kResource, "output",
                        "standard output could not be written: " + writing_error_text(end.output_error));
      code = error.exit_code();
      messages.emplace_back(error.what());
    }
  }
  // If standard output was closed, what a rank printed was lost.
  const bool said = end.output_error == 0 && !end.quiet &&
                    std::any_of(end.failed.begin(), end.failed.end(), has_printed_how_to_continue);
  if (code != 0 && end.resume && !said) {
    messages.push_back(resume_text(*end.resume));
  }
  if (code != 0) messages.push_back("exit code " + std::to_string(code) + ", logs in " + end.log_dir);
  return {code, faulty ? end.faulty : failed_rank_of(failures, end.ranks), faulty || !failures.empty(),
          std::move(messages)};
}

std::string stop_reason(int signal, int output_error) {
  if (signal == SIGINT) return "Ctrl-C";
  if (signal != SIGPIPE) return strsignal(signal);
  if (output_error == EPIPE) return "the output was closed";
  return std::string("the output cannot be written: ") + std::strerror(output_error);
}

}  // namespace annulus
