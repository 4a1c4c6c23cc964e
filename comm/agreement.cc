// See agreement.h.
#include "comm/agreement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>
#include <stdexcept>

#include "comm/checks.h"
#include "comm/following_error.h"
#include "common/text.h"

namespace annulus {
namespace {

using Outcomes = std::vector<std::optional<Error>>;  // by rank; empty where all went well

Outcomes outcomes(Communicator& comm, OpLabel label, const std::function<void()>& action, bool only_first) {
  std::string mine;
  if (!only_first || comm.rank() == 0) {
    try {
      action();
    } catch (...) {
      mine = error_in_flight(label.operation).wire();
    }
  }
  Outcomes all;
  for (const std::string& report : all_gather_text(comm, mine, label)) {
    std::optional<Error> error;
    if (!report.empty()) {
      error = Error::from_wire(report).value_or(
          Error(ErrorKind::kComm, "comm", std::string(label.operation) + " failed with a report that cannot be read"));
    }
    all.push_back(std::move(error));
  }
  return all;
}

// The ranks that failed with the same message.
struct Group {
  const Error* error;
  std::vector<int> ranks;
};

std::optional<Error> one_error(const Communicator& comm, const Outcomes& all, bool only_first) {
  std::vector<Group> groups;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank]) continue;
    const std::string_view what = all[rank]->what();
    const auto same =
        std::find_if(groups.begin(), groups.end(), [&](const Group& group) { return group.error->what() == what; });
    if (same != groups.end()) {
      same->ranks.push_back(static_cast<int>(rank));
    } else {
      groups.push_back({&*all[rank], {static_cast<int>(rank)}});
    }
  }
  if (groups.empty()) return std::nullopt;
  const Error& first = *groups.front().error;
  if (only_first || groups.front().ranks.size() == all.size()) return first;

  constexpr size_t kMostGroups = 8;  // their messages are shown; the ranks of other groups are only named
  std::string message;
  std::vector<int> others;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& [error, ranks] = groups[i];
    if (i >= kMostGroups) {
      others.insert(others.end(), ranks.begin(), ranks.end());
      continue;
    }
    message += (i > 0 ? "; on " : "on ") + comm_internal::describe_ranks(comm, ranks) + ": ";
    if (error->module() != first.module()) message += "[" + std::string(error->module()) + "] ";
    message += error->message();
  }
  if (!others.empty()) message += "; with other messages also on " + comm_internal::describe_ranks(comm, others);
  return Error(first.kind(), first.module(), message);
}

}  // namespace

namespace {

// LibTorch has its own exception type for a GPU whose allocator is out of memory. When the host is out of memory, when
// a size overflows, or when cuBLAS, cuDNN or a captured graph finds no memory on the GPU, it raises its general error.
// For these this returns "out of memory", with the number of bytes that were asked for if LibTorch's message has it.
std::optional<std::string> out_of_memory(const std::string& text) {
  constexpr std::string_view kTried = "tried to allocate ";
  const auto holds = [&](const char* part) { return text.find(part) != std::string::npos; };
  if (holds("can't allocate memory") || holds("not enough memory")) {
    const size_t at = text.find(kTried);
    const double bytes = at == std::string::npos ? 0 : std::strtod(text.c_str() + at + kTried.size(), nullptr);
    return "out of memory" + (bytes > 0 ? ": " + bytes_text(bytes) + " more cannot be allocated" : "");
  }
  if (holds("Storage size calculation overflowed"))
    return "out of memory: the size of a tensor that was asked for overflows 64 bits";
  if (holds("out of memory") || holds("ALLOC_FAILED") || holds("ALLOCATION_FAILED")) return "out of memory on the GPU";
  return std::nullopt;
}

}  // namespace

Error error_in_flight(std::string_view doing) {
  const std::string before = doing.empty() ? "" : std::string(doing) + ": ";
  const auto first_line = [](const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  };
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {ErrorKind::kResource, "memory", before + "out of memory"};
  } catch (const std::length_error&) {  // a container was asked for more than its max_size()
    return {ErrorKind::kResource, "memory", before + "out of memory"};
  } catch (const c10::OutOfMemoryError& error) {
    return {ErrorKind::kResource, "memory", before + first_line(error)};
  } catch (const c10::Error& error) {
    if (const auto text = out_of_memory(error.what_without_backtrace())) {
      return {ErrorKind::kResource, "memory", before + *text};
    }
    return {ErrorKind::kInternal, "torch", before + first_line(error)};
  } catch (const std::exception& error) {
    return {ErrorKind::kInternal, "internal", before + error.what()};
  } catch (...) {
    return {ErrorKind::kInternal, "internal", before + "an exception of unknown type"};
  }
}

void together(Communicator& comm, OpLabel label, const std::function<void()>& action, bool only_first) {
  const Outcomes all = outcomes(comm, label, action, only_first);
  const std::optional<Error> error = one_error(comm, all, only_first);
  if (!error) return;
  const auto has_failed = [](const auto& outcome) { return outcome.has_value(); };
  const std::optional<Error>& own = all[static_cast<size_t>(comm.rank())];
  if (!own) {
    const auto lowest = std::find_if(all.begin(), all.end(), has_failed) - all.begin();
    throw FollowingError(*error, comm.in_job(static_cast<int>(lowest)));
  }
  throw std::count_if(all.begin(), all.end(), has_failed) == 1 ? *own : *error;
}

std::optional<Error> failure_of_any(Communicator& comm, OpLabel label, const std::function<void()>& action,
                                    bool only_first) {
  return one_error(comm, outcomes(comm, label, action, only_first), only_first);
}

std::string from_first(Communicator& comm, OpLabel label, const std::function<std::string()>& make) {
  std::string text;
  together(
      comm, label, [&] { text = make(); }, /*only_first=*/true);
  return all_gather_text(comm, text, label)[0];
}

}  // namespace annulus
