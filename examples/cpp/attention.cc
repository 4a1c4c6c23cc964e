// A program that runs causal attention over all ranks, forward and backward, and compares it with a dense computation:
//   mpirun -n 4 .bazel/bin/attention --length=1000
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <string_view>
#include <system_error>

#include "comm/bootstrap/bootstrap.h"
#include "problem.h"

int main(int argc, char** argv) try {
  int64_t length = 1000;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i], option = "--length=";
    const std::string_view number = arg.substr(std::min(arg.size(), option.size()));
    const char* const end = number.data() + number.size();
    const auto [stop, error] = std::from_chars(number.data(), end, length);
    if (!arg.starts_with(option) || error != std::errc() || stop != end || length < 1) {
      std::cerr << "usage: attention [--length=POSITIONS], with at least 1 position; got " << arg << "\n";
      return 2;
    }
  }
  // Finds the other ranks and first compares the values that must be the same on all of them.
  annulus::Job job = annulus::bootstrap({.fingerprint = {{"length", std::to_string(length)}}});
  const double error = largest_error(*job.world, length);
  if (job.rank == 0) {
    std::printf("%d ranks, %lld positions: largest error %.1e\n", job.size, static_cast<long long>(length), error);
  }
  return error < 1e-12 ? 0 : 1;
} catch (const annulus::ReportedError& e) {  // another rank has printed the message
  return e.exit_code();
} catch (const annulus::Error& e) {
  std::cerr << e.what() << "\n";
  return e.exit_code();
}
