// The launcher's side of the watches of its job's hosts (watcher.h): tells each which ranks it has, and finds out from
// what they say, and from connections that end, which rank stands still and which host is lost. Used by supervisor.cc.
// Thread safety: one thread at a time.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "common/checked_json.h"

namespace annulus {

// What a watch says (host_watch.h): a rank that stands still, one that ended for lack of memory, the process of
// mpirun's daemon, if that has ended, or whether all of its ranks have ended.
struct WatchNews {
  std::optional<size_t> stuck = {}, memory = {};
  std::string text = {};  // how the rank stands still
  int64_t daemon = 0;
  bool over = false;
};

// Reads a message, a line, of a watch. Throws Error(kInput) if it is none.
WatchNews watch_news_of(std::string_view line);

class Watchers {
 public:
  // `own_place`: where the launcher runs (process_place in rank.h); that host cannot be lost. `number_of`: the number
  // in the job of a rank that is given as mpirun numbers it.
  Watchers(std::string own_place, std::function<int(size_t rank)> number_of)
      : own_place_(std::move(own_place)), number_of_(std::move(number_of)) {}
  ~Watchers();
  Watchers(const Watchers&) = delete;
  Watchers& operator=(const Watchers&) = delete;

  // Takes the connection of the watch that this rank has started, which this object then owns.
  void add_watcher(size_t rank, int fd);
  // Takes where a rank runs: the name of its host and what it says of its beat, {"place", "process", "page"}. Throws
  // Error(kInput) if that is malformed.
  void add_rank(size_t rank, const std::string& host, const CheckedJson& beat);
  // Takes that the connection of a rank has ended: for the reason `error`, an errno or 0, and whether the rank had said
  // before how it ends.
  void rank_ended(size_t rank, int error, bool reported);

  // Adds the descriptors to poll.
  void watch(std::vector<pollfd>& fds) const;
  // Whether a watch may have more to say.
  bool open() const;
  // Reads what the watches say.
  void read();

  // A fault for which the job cannot go on.
  struct Fault {
    size_t rank;       // the first that it concerns, as mpirun numbers it
    std::string text;  // for the user
  };
  // Returns the faults that have become known since the last call.
  std::vector<Fault> take_faults();
  // Whether the kernel had just ended processes of its host for lack of memory when this rank ended.
  bool ended_for_memory(size_t rank) const { return for_memory_.count(rank) > 0; }

 private:
  struct Host {
    std::string name;
    int fd = -1;              // of its watch
    std::string line;         // what has come of the next message
    std::set<size_t> ranks;   // all that are known
    std::set<size_t> silent;  // those whose connection has ended although they had not said how they end
    int64_t daemon = 0;       // the process of mpirun's daemon, if it has ended too early
    bool watched = false, over = false, lost_watch = false;
    bool unreachable = false;  // a connection has ended because nothing comes from the host any more
    bool said = false;
  };
  void tell(Host& host, size_t rank);
  void take(Host& host, const std::string& line);
  std::optional<std::string> loss_of(const std::string& place, const Host& host) const;

  const std::string own_place_;
  const std::function<int(size_t)> number_of_;
  std::map<std::string, Host> hosts_;  // by place
  struct Beat {
    std::string place;
    int process = 0, page = -1;
  };
  std::map<size_t, Beat> beats_;  // by rank
  std::map<size_t, int> early_;   // watches of ranks that have not said yet where they run
  std::string first_;             // the place of the first rank that has ended without a word
  std::vector<Fault> faults_;
  std::set<size_t> for_memory_;
};

}  // namespace annulus
