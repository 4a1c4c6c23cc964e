// See gather_trace.h.
#include "comm/gather_trace.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>

#include "comm/agreement.h"
#include "comm/hosts.h"
#include "common/files.h"
#include "common/trace/chrome_trace.h"

namespace annulus {
namespace {

constexpr OpLabel kAligning{"aligning the clocks of a trace"};
constexpr OpLabel kGathering{"gathering a trace"};

// Sends numbers to a rank, and receives as many from one.
void send(Communicator& comm, const at::Tensor& numbers, int to) {
  comm.exchange({{numbers, to}}, {}, kAligning)->wait();
}
void receive(Communicator& comm, const at::Tensor& numbers, int from) {
  comm.exchange({}, {{numbers, from}}, kAligning)->wait();
}

at::Tensor two_numbers(int64_t a = 0, int64_t b = 0) {
  at::Tensor numbers = at::empty({2}, at::kLong);
  numbers.mutable_data_ptr<int64_t>()[0] = a;
  numbers.mutable_data_ptr<int64_t>()[1] = b;
  return numbers;
}

// Rank 0's side for one rank, which it then tells the result.
void measure(Communicator& comm, const RankClock& clock, int rank) {
  int64_t least = INT64_MAX, offset = 0;
  for (int trip = 0; trip < kTrips; ++trip) {
    const at::Tensor answer = two_numbers();
    const int64_t t0 = clock.now();
    send(comm, two_numbers(), rank);
    receive(comm, answer, rank);
    const int64_t t3 = clock.now();
    const int64_t t1 = answer.const_data_ptr<int64_t>()[0], t2 = answer.const_data_ptr<int64_t>()[1];
    const int64_t took = (t3 - t0) - (t2 - t1);
    if (took >= least) continue;
    least = took;
    offset = ((t1 - t0) + (t2 - t3)) / 2;
  }
  send(comm, two_numbers(offset, (least + 1) / 2), rank);
}

ClockOffset answer(Communicator& comm, const RankClock& clock) {
  const at::Tensor numbers = two_numbers();
  for (int trip = 0; trip < kTrips; ++trip) {
    receive(comm, numbers, 0);
    const int64_t t1 = clock.now();
    send(comm, two_numbers(t1, clock.now()), 0);
  }
  receive(comm, numbers, 0);
  return {numbers.const_data_ptr<int64_t>()[0], numbers.const_data_ptr<int64_t>()[1]};
}

at::Tensor bytes_of(size_t size) { return at::empty({static_cast<int64_t>(size)}, at::kByte); }

// Passes the texts of all other ranks to `take` on rank 0, in rank order. `take` must not raise. The ranks take turns,
// so that none waits for more than one text to be taken.
void collect(Communicator& comm, const std::string& mine, const std::vector<int64_t>& sizes,
             const std::function<void(std::string_view)>& take) {
  for (int rank = 1; rank < comm.size(); ++rank) {
    if (comm.rank() == rank) {
      const at::Tensor text = bytes_of(mine.size());
      std::memcpy(text.mutable_data_ptr(), mine.data(), mine.size());
      comm.exchange({{text, 0}}, {}, kGathering)->wait();
    } else if (comm.rank() == 0) {
      const at::Tensor text = bytes_of(static_cast<size_t>(sizes[static_cast<size_t>(rank)]));
      comm.exchange({}, {{text, rank}}, kGathering)->wait();
      take({static_cast<const char*>(text.const_data_ptr()), text.nbytes()});
    }
    comm.barrier(kGathering);
  }
}

}  // namespace

RankClock RankClock::steady() {
  std::error_code none;
  return {first_line("/proc/sys/kernel/random/boot_id") + " " +
              std::filesystem::read_symlink("/proc/self/ns/time", none).string(),
          trace_clock};
}

ClockOffset align_clock(Communicator& comm, const RankClock& clock) {
  Communicator& host = comm.host();
  const std::vector<std::string> of_rank = all_gather_text(host, clock.identity, kAligning);
  ClockOffset mine;
  for (int rank = 1; rank < host.size(); ++rank) {
    if (of_rank[static_cast<size_t>(rank)] == of_rank[0]) continue;
    if (host.rank() == 0) measure(host, clock, rank);
    if (host.rank() == rank) mine = answer(host, clock);
  }
  return mine;
}

GatheredTrace gather_trace(Communicator& comm, const TraceRecord& record, const std::string& path,
                           const std::vector<std::pair<std::string, std::string>>& about) {
  Communicator& host = comm.host();
  const ClockOffset clock = align_clock(host);
  const int64_t first = first_time(record);
  at::Tensor least = two_numbers(first == INT64_MAX ? first : first - clock.offset, 0);
  at::Tensor most = two_numbers(clock.error, record.dropped);
  host.all_reduce(least, ReduceOp::kMin, kGathering);
  host.all_reduce(most, ReduceOp::kMax, kGathering);
  const int64_t earliest = least.const_data_ptr<int64_t>()[0], origin = earliest == INT64_MAX ? 0 : earliest;
  GatheredTrace gathered{.dropped = 0, .clock_error = most.const_data_ptr<int64_t>()[0]};
  const bool whole = most.const_data_ptr<int64_t>()[1] == 0;  // otherwise a message may lack an end
  const std::string mine =
      chrome_events(record, {.host = host_name(), .offset = -clock.offset - origin, .until = 0, .arrows = whole});

  const at::Tensor of_mine = two_numbers(static_cast<int64_t>(mine.size()), record.dropped);
  at::Tensor of_all = at::empty({host.size(), 2}, at::kLong);
  host.all_gather(of_all, of_mine, kGathering);
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < host.size(); ++rank) {
    sizes.push_back(of_all.const_data_ptr<int64_t>()[2 * rank]);
    gathered.dropped += of_all.const_data_ptr<int64_t>()[2 * rank + 1];
  }
  if (host.rank() > 0) collect(host, mine, sizes, nullptr);
  together(
      host, kGathering,
      [&] {
        // The other ranks' texts are received in any case, since these ranks are sending them.
        std::exception_ptr failed;
        bool collected = false;
        const auto write_all = [&](OutputFile* file) {
          const auto write = [&](std::string_view text) {
            if (file == nullptr || failed) return;
            try {
              file->write(text.data(), text.size());
            } catch (...) {
              failed = std::current_exception();
            }
          };
          std::vector<std::pair<std::string, std::string>> texts = about;
          texts.insert(texts.end(), {{"clocks", "aligned with rank 0's by the shortest of " + std::to_string(kTrips) +
                                                    " round trips, those of one host shared"},
                                     {"clock error, ns, at most", std::to_string(gathered.clock_error)},
                                     {"records dropped", std::to_string(gathered.dropped)}});
          write(chrome_head(texts));
          write(mine);
          collected = true;
          collect(host, mine, sizes, [&](std::string_view text) {
            write(",\n");
            write(text);
          });
          write(chrome_tail());
          if (failed) std::rethrow_exception(failed);
        };
        FileSystem& files = FileSystem::real();
        try {
          replace_file(files, path, [&](const std::string& beside) {
            const std::unique_ptr<OutputFile> file = files.create(beside);
            write_all(file.get());
            file->sync();
            file->close();
          });
        } catch (...) {
          if (!collected) write_all(nullptr);
          throw;
        }
      },
      /*only_first=*/true);
  return gathered;
}

}  // namespace annulus
