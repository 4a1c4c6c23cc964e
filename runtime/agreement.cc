// See agreement.h.
#include "runtime/agreement.h"

#include <exception>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"

namespace annulus {
namespace {

// A report is "" for success, otherwise the exit code, a space and the message.
std::string report(const Error& e) { return std::to_string(e.exit_code()) + " " + e.what(); }

[[noreturn]] void raise(const std::string& report, size_t rank, bool name_rank) {
  const size_t space = report.find(' ');
  const auto kind = static_cast<ErrorKind>(std::stoi(report.substr(0, space)));
  // "[room] message"
  const size_t close = report.find("] ", space);
  const std::string room = report.substr(space + 2, close - space - 2);
  const std::string message = report.substr(close + 2);
  throw Error(kind, room, name_rank ? "on rank " + std::to_string(rank) + ": " + message : message);
}

}  // namespace

void together(Communicator& comm, OpLabel label, const std::function<void()>& action, bool only_first) {
  std::optional<Error> error;
  if (!only_first || comm.rank() == 0) {
    try {
      action();
    } catch (const Error& e) {
      error = e;
    } catch (const std::bad_alloc&) {
      error = Error(ErrorKind::kResource, "memory", "out of memory while " + std::string(label.operation));
    } catch (const std::exception& e) {
      error = Error(ErrorKind::kInternal, label.operation, e.what());
    }
  }
  const std::vector<std::string> reports = all_gather_text(comm, error ? report(*error) : "", label);
  if (error) throw *error;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].empty()) raise(reports[rank], rank, !only_first);
  }
}

std::string from_first(Communicator& comm, OpLabel label, const std::function<std::string()>& make) {
  std::string text;
  together(
      comm, label, [&] { text = make(); }, /*only_first=*/true);
  return all_gather_text(comm, text, label)[0];
}

}  // namespace annulus
