// See host_watch.h.
#include "launcher/launch/host_watch.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "common/text.h"

namespace annulus {
namespace {

using nlohmann::json;

// How long after the kernel has ended a process for lack of memory the end of a rank is put down to that.
constexpr double kMemoryTime = 5;
constexpr size_t kMostFrames = 4;   // of a kernel stack
constexpr size_t kMostThreads = 3;  // of a process that are described

// The content of a file of the kernel, or nothing if it may not be read. Some can be opened and not read (stack).
std::string content(const std::string& path) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  std::array<char, 4096> piece;
  ssize_t n = 0;
  while (file >= 0 && (n = read(file, piece.data(), piece.size())) > 0)
    text.append(piece.data(), static_cast<size_t>(n));
  return text;
}

std::string folder_of_process(pid_t process) { return "/proc/" + std::to_string(process); }

// The state of a process or thread in its folder in /proc: 'R', 'S', 'D', 'T', ...; 'X' if it is gone or a zombie.
char state_in(const std::string& folder) {
  const std::string text = content(folder + "/stat");
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return 'X';
  const char state = text[name_end + 2];
  return state == 'Z' ? 'X' : state;
}

// The functions of the kernel that a thread is in, the innermost first; empty where the kernel does not tell.
std::string kernel_functions(const std::string& folder) {
  std::vector<std::string> names;
  for (const std::string& line : split(content(folder + "/stack"), '\n')) {
    const size_t begin = line.find("] "), end = line.find('+', begin);
    if (begin == std::string::npos || end == std::string::npos || names.size() == kMostFrames) continue;
    names.push_back(line.substr(begin + 2, end - begin - 2));
  }
  if (!names.empty()) return printable(join(names, " < "));
  const std::string wchan = content(folder + "/wchan");
  return wchan == "0" ? "" : printable(wchan);
}

std::string state_text(char state, const std::string& functions) {
  const std::string inside = functions.empty() ? "" : ", in " + functions;
  switch (state) {
    case 'R':
      return "it computes (R)";
    case 'S':
      return "it sleeps (S" + inside + ")";
    case 'D':
      return "it waits for a device or a file system (D" + inside + ")";
    case 'T':
      return "it is stopped (SIGSTOP)";
    case 't':
      return "it is held by a debugger (t)";
    case 'X':
      return "it is gone";
    default:
      return std::string("its state is ") + state;
  }
}

Descriptor end_of(pid_t process) { return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process, 0))); }

bool has_ended(const Descriptor& end, pid_t process) {
  if (end < 0) return kill(process, 0) != 0 && errno == ESRCH;
  pollfd ready{end, POLLIN, 0};
  return poll(&ready, 1, 0) == 1;
}

}  // namespace

std::string process_text(pid_t process) {
  const std::string folder = folder_of_process(process);
  const char state = state_in(folder);
  std::string text = state_text(state, kernel_functions(folder));
  if (state == 'T' || state == 'X') return text;
  std::error_code error;
  size_t described = 0;
  for (std::filesystem::directory_iterator it(folder + "/task", error), end; !error && it != end; it.increment(error)) {
    const std::string number = it->path().filename();
    if (number == std::to_string(process) || state_in(it->path()) != 'D' || described++ == kMostThreads) continue;
    text += "; thread " + number + " waits for a device or a file system (D, in " + kernel_functions(it->path()) + ")";
  }
  return text;
}

struct HostWatch::Rank {
  Rank(int rank, pid_t process, double after) : rank(rank), process(process), end(end_of(process)), rule(after) {}
  ~Rank() {
    if (page != nullptr) munmap(const_cast<BeatPage*>(page), sizeof *page);
  }

  // What its page and its process say now. A process that is just ending is not stopped.
  RankGlance glance() const {
    RankGlance now{.stopped = state_in(folder_of_process(process)) == 'T'};
    if (page == nullptr || page->mark != BeatPage::kMark) return now;
    now.own = page->own;
    now.others = page->others;
    now.expected = page->expected > 0;
    now.waits_for_ranks = page->waits > 0;
    now.lasting = page->lasting > 0;
    const uint32_t depth = std::min<uint32_t>(page->depth, BeatPage::kDeepest);
    now.waits = depth > 0 && page->places[depth - 1].waits;
    return now;
  }

  std::string text(double seconds, const RankGlance& now) const {
    const std::string place = page == nullptr ? "" : place_of_beat(*page);
    const std::string where = place.empty() ? "" : "; " + place;
    if (now.stopped) return "has been stopped (SIGSTOP) for " + rounded(seconds, 1) + " s" + where;
    return "has made no progress for " + rounded(seconds, 1) +
           " s and waits for no other rank: " + process_text(process) + where;
  }

  const int rank;
  const pid_t process;
  const Descriptor end;
  StuckRule rule;
  const BeatPage* page = nullptr;
  bool ended = false, said = false;
};

HostWatch::HostWatch(double after, pid_t daemon, std::string root)
    : after_(after > 0 ? after : std::numeric_limits<double>::infinity()),
      daemon_(daemon),
      vmstat_(std::move(root) + "/proc/vmstat"),
      daemon_end_(end_of(daemon)),
      memory_kills_(ended_for_memory()),
      since_memory_(kMemoryTime) {}

HostWatch::~HostWatch() = default;

int64_t HostWatch::ended_for_memory() const {
  constexpr std::string_view kName = "oom_kill ";
  for (const std::string& line : split(content(vmstat_), '\n')) {
    if (line.starts_with(kName)) return number_of_text<int64_t>(line.substr(kName.size())).value_or(0);
  }
  return 0;
}

void HostWatch::add(int rank, pid_t process, int page) {
  Rank& added = *ranks_.emplace_back(std::make_unique<Rank>(rank, process, after_));
  const std::string path = folder_of_process(process) + "/fd/" + std::to_string(page);
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (page < 0 || file < 0 || lseek(file, 0, SEEK_END) < static_cast<off_t>(sizeof(BeatPage))) return;
  void* const memory = mmap(nullptr, sizeof(BeatPage), PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) added.page = static_cast<const BeatPage*>(memory);
}

void HostWatch::watch(std::vector<pollfd>& fds) const {
  if (!daemon_said_ && !outlived_ && daemon_end_ >= 0) fds.push_back({daemon_end_, POLLIN, 0});
  for (const auto& rank : ranks_) {
    if (!rank->ended && rank->end >= 0) fds.push_back({rank->end, POLLIN, 0});
  }
}

void HostWatch::look_at_ends(double elapsed, std::vector<json>& news) {
  // The daemon comes first: a rank that ends with it ends after it.
  const bool daemon_gone = has_ended(daemon_end_, daemon_);
  std::vector<int> ended;
  for (const auto& rank : ranks_) {
    if (rank->ended || !has_ended(rank->end, rank->process)) continue;
    rank->ended = true;
    ended.push_back(rank->rank);
  }
  since_memory_ += elapsed;
  if (const int64_t kills = ended_for_memory(); std::exchange(memory_kills_, kills) < kills) since_memory_ = 0;
  for (const int rank : ended) {
    if (since_memory_ < kMemoryTime) news.push_back({{"memory", rank}});
  }
  if (!ended.empty() && !daemon_gone) outlived_ = true;
  if (daemon_gone && !outlived_ && !std::exchange(daemon_said_, true)) news.push_back({{"daemon", daemon_}});
}

std::vector<json> HostWatch::look(double elapsed) {
  std::vector<json> news;
  look_at_ends(elapsed, news);
  for (const auto& rank : ranks_) {
    if (rank->ended) continue;
    const RankGlance now = rank->glance();
    const std::optional<double> stuck = rank->rule.look(now, elapsed);
    if (stuck && !rank->said) news.push_back({{"stuck", rank->rank}, {"text", rank->text(*stuck, now)}});
    rank->said = stuck.has_value();
  }
  return news;
}

bool HostWatch::over() const {
  return !ranks_.empty() && std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->ended; });
}

void HostWatch::end_ranks() const {
  for (const auto& rank : ranks_) {
    if (rank->ended) continue;
    // By the descriptor if there is one, because the number may belong to another process by now.
    if (rank->end >= 0) {
      syscall(SYS_pidfd_send_signal, static_cast<int>(rank->end), SIGKILL, nullptr, 0);
    } else {
      kill(rank->process, SIGKILL);
    }
  }
}

}  // namespace annulus
