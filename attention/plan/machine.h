// MachineProfile: what a machine computes and sends in a second, as data. attention/plan/time.h predicts by it what a
// plan takes, and `auto` chooses by that. A profile is a TOML file: `annulus bench calibrate` writes this machine's,
// and those of configs/machines are built in. docs/explanation/attention.md, "The choice by cost", has the format.
//
// Used by the planner, the configuration, `plan`, `attend`, the operators for PyTorch and benchmarks. Needs no
// LibTorch. Thread safety: plain values, and functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The rate of the attention kernel for one dtype in one direction. A tile of `rows` queries and `keys` keys takes
// tile + pairs x head size / rate(rows, keys) seconds, where each query at which a side of a band cuts the keys counts
// `edge` pairs more, because a kernel computes whole blocks of pairs. A call of the kernel, which has tiles of one
// block of keys, takes `call` seconds more.
struct KernelRate {
  double call = 0;                         // seconds
  double tile = 0;                         // seconds
  double edge = 0;                         // pairs
  std::vector<int64_t> rows;               // ascending, at least 1 each
  std::vector<int64_t> keys;               // likewise
  std::vector<std::vector<double>> rates;  // by rows and then keys: pairs x head size a second

  // Interpolates the seconds of a pair between the points, linearly in 1 / rows and 1 / keys, because what a kernel
  // does once for a row is spread over its keys. Beyond the last point the rate stays as it is there. It uses only
  // operations that IEEE 754 rounds exactly, so that ranks on different hosts compute the same.
  double rate(int64_t tile_rows, int64_t tile_keys) const;
  friend bool operator==(const KernelRate&, const KernelRate&) = default;
};

// The rates of the kernels for one dtype.
struct KernelRates {
  KernelRate forward, backward;
  friend bool operator==(const KernelRates&, const KernelRates&) = default;
};

// A way from one rank to another.
struct LinkProfile {
  double latency = 0;    // seconds from the last byte sent until it can be used
  double message = 0;    // seconds of the link for each transfer, whatever its size
  double bandwidth = 0;  // bytes a second in one direction
  int shared_by = 1;     // how many consecutive ranks share this bandwidth, as they do a NIC

  friend bool operator==(const LinkProfile&, const LinkProfile&) = default;
};

struct MachineProfile {
  std::string name;
  std::string source;  // where the figures come from
  // Whether transfers go on while kernels run. If not, as where a CPU's cores do both, a rank's transfers take time of
  // their own at both ends.
  bool overlap = true;
  int ranks_per_host = 0;       // consecutive ranks of one host; 0: all ranks are on one
  double memory = 0;            // bytes of a rank's device; 0: not known, no plan is refused
  double copy = 0;              // bytes a second at which a rank adds, packs rows, and reads and writes its own tensors
  LinkProfile inside, between;  // links inside a host, and between hosts
  // By dtype; at least one is given. What a machine has no rates for is derived from what it has (kernel).
  std::optional<KernelRates> bf16, fp32, fp64;

  // The rates for elements of 2, 4 or 8 bytes. Without rates of its own a dtype has those of the next narrower one, or
  // else of the next wider one, times the ratio of their sizes, because a kernel is bound by registers and vectors of a
  // fixed number of bytes.
  KernelRates kernel(int64_t element_bytes) const;
  // How many of `ranks` are on one host: at most ranks_per_host.
  int on_a_host(int ranks) const { return ranks_per_host == 0 || ranks_per_host > ranks ? ranks : ranks_per_host; }
  const LinkProfile& link(int a, int b) const {
    return ranks_per_host == 0 || a / ranks_per_host == b / ranks_per_host ? inside : between;
  }
  // The TOML that parse_machine reads as the same machine. Equal machines have equal texts.
  std::string text() const;
  friend bool operator==(const MachineProfile&, const MachineProfile&) = default;
};

// Reads a profile. `where` names it in messages. Raises Error(kUsage), which names the key and says what is expected,
// for text that is not TOML, a key that is unknown, missing or of another type, and a figure that no machine has: a
// rate or bandwidth that is not above 0, a latency of minutes, rates that do not fit the lengths beside them.
MachineProfile parse_machine(std::string_view toml, const std::string& where);

// The names of the machines that are built in, and one of them. Raises Error(kUsage) for another name.
const std::vector<std::string>& built_in_machines();
MachineProfile built_in_machine(std::string_view name);

// The machine that a user names: one that is built in, or the path of a profile, which has a '/' or ends with ".toml".
// An empty name stands for the one that a device has if nothing is known about it: "cpu", or "h100" for "cuda". `where`
// names the option or key. Raises Error(kUsage), and Error(kInput) for a file that cannot be read.
MachineProfile find_machine(const std::string& name, std::string_view where, std::string_view device = "cpu");

}  // namespace annulus
