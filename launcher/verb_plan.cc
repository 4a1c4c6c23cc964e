// annulus plan: makes the plan of a problem for any number of ranks, proves it, and says what it costs; runs nothing.
// Of any pattern but adaptive block maps, which are selected at each call. With --model it plans the memory of a
// training step instead (plan_memory.h).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "attention/plan/traffic.h"
#include "attention/plan/verifier.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/live_line.h"
#include "launcher/plan_memory.h"
#include "launcher/verb.h"
#include "memory/available.h"
#include "tensor_files/block_map_file.h"

namespace annulus {
namespace {

// What one rank sends and holds in one direction, of all ranks the least and the most.
struct Cost {
  const char* key;
  const char* name;
  bool bytes;
  double least, most;
};

class PlanVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--ranks", ranks_, "ranks to plan for");
    app.add_option("--length", length_, "tokens of the whole sequence");
    add_numbers(app, "--lengths", request_.uneven_lengths,
                "contiguous parts of these lengths, one for each rank: 5,9,2; in place of --ranks and --length");
    app.add_option("--key-length", key_length_, "keys, where there are not as many as queries");
    app.add_option("--query-offset", request_.shape.query_offset, "query i has the position i + N (default: 0)");
    app.add_option("--batch", request_.shape.batch, "batch rows (default: 1)");
    app.add_option("--heads", request_.shape.heads, "query heads (default: 1)");
    app.add_option("--kv-heads", kv_heads_, "kv heads (default: as many as query heads)");
    app.add_option("--head-dim", head_dim_, "head size, for bytes (default: 128)")->check(CLI::PositiveNumber);
    app.add_option("--element-bytes", element_bytes_, "bytes of a key or value element, 2 for bf16 (default: 2)")
        ->check(CLI::PositiveNumber);
    app.add_option("--pattern", pattern_, "which keys a query sees (default: { kind = \"causal\" })");
    app.add_option("--layout", layout_, "contiguous, zigzag (default) or striped");
    app.add_option("--schedule", schedule_, "auto (default), ring, all-gather or group-cast");
    app.add_flag("--even", request_.even, "refuse lengths that do not give every rank the same share");
    app.add_flag("--no-proof", no_proof_, "only make the plan: for very many ranks or positions");
    app.add_flag("--json", json_, "print JSON instead of a table");
    memory_.declare(app);
    app.callback([this, &app] {
      for (const CLI::Option* option : app.get_options()) {
        if (option->count() > 0) given_.push_back(option->get_name());
      }
    });
    app.footer(
        "Examples:\n"
        "  ./annulus plan --ranks 64 --length 1048576 --heads 64 --kv-heads 8\n"
        "  ./annulus plan --lengths 4096,2048,1024 --json\n"
        "  ./annulus plan --ranks 8 --length 65536 --layout contiguous \\\n"
        "      --pattern '{ kind = \"window\", left = 4095, right = 0 }'\n"
        "  ./annulus plan --model configs/plan/8b.toml --ranks 8 --device-memory 141GB");
  }

  void check() override {
    memory_.check(given_, ranks_);
    if (memory_.asked()) return;
    place();
    request_.shape.k_len = key_length_.value_or(request_.shape.q_len);
    request_.shape.kv_heads = kv_heads_.value_or(request_.shape.heads);
    request_.pattern = parse_pattern(pattern_, "--pattern");
    request_.layout = parse_layout(layout_.value_or("zigzag"), "--layout");
    request_.schedule = parse_schedule(schedule_, "--schedule");
    if (!request_.uneven_lengths.empty()) request_.layout = LayoutKind::kContiguous;
    validate(request_);
    if (is_adaptive(request_.pattern)) {
      throw Error(
          ErrorKind::kPlan, "plan",
          "an adaptive block map is selected from queries and keys at each call, so there is no plan before one; "
          "`annulus attend --mask-out F` writes the map of a call, which map = \"file\" reads");
    }
  }

  int run() override {
    if (memory_.asked()) return memory_.run(json_);
    const auto begin = std::chrono::steady_clock::now();
    request_.pattern = read_block_maps(request_.pattern, request_.shape);
    free_ = available_memory();
    require_memory(0);
    request_ = resolve_schedule(request_);
    pairs_ = count_pairs(*cached_pattern(request_));
    std::vector<Program> programs;
    std::vector<Traffic> forward, backward;
    {
      LiveLine line;
      for_each_program(request_, [&](Program program) {
        forward.push_back(traffic(program, program.forward));
        backward.push_back(traffic(program, program.backward));
        if (!no_proof_) {
          program_bytes_ += static_cast<double>(program_bytes(program));
          programs.push_back(std::move(program));
          // As many bytes for each rank to come as for those that are made.
          require_memory(program_bytes_ / static_cast<double>(programs.size()) * request_.ranks);
        }
        line.say("made " + std::to_string(forward.size()) + " of " + std::to_string(request_.ranks) + " ranks");
      });
    }
    forward_ = costs(forward);
    backward_ = costs(backward);
    made_ = seconds_since(begin);
    if (!json_) print_plan();
    if (!no_proof_) {
      LiveLine line;
      const auto proving = std::chrono::steady_clock::now();
      proof_ = verify(programs, 8, [&](int rank) {
        line.say("proved " + std::to_string(rank) + " of " + std::to_string(request_.ranks) + " ranks");
      });
      proved_ = seconds_since(proving);
    }
    json_ ? print_json() : print_proof();
    if (proof_ && !proof_->holds()) {
      throw Error(ErrorKind::kInternal, "plan", "the plan is wrong, as said above; please report it");
    }
    return 0;
  }

 private:
  [[noreturn]] static void refuse(const std::string& message) { throw Error(ErrorKind::kUsage, "launcher", message); }

  // How many ranks and positions there are, from --ranks and --length or from --lengths.
  void place() {
    const std::vector<int64_t>& lengths = request_.uneven_lengths;
    if (lengths.empty()) {
      if (!ranks_) refuse("plan needs --ranks, or --lengths with the length of each rank");
      if (!length_) refuse("plan needs --length, or --lengths with the length of each rank");
      request_.ranks = *ranks_;
      request_.shape.q_len = *length_;
      return;
    }
    if (layout_) {
      refuse("--lengths gives each rank a contiguous part, and --layout was given as well; leave one of them out");
    }
    request_.ranks = static_cast<int>(lengths.size());
    if (ranks_ && *ranks_ != request_.ranks) {
      refuse("--lengths has " + counted(request_.ranks, "length") + ", but --ranks says " + std::to_string(*ranks_) +
             "; leave --ranks out, or give each rank a length");
    }
    int64_t total = 0;
    for (const int64_t n : lengths) {
      if (n < 0 || __builtin_add_overflow(total, n, &total)) {
        refuse("--lengths are numbers of tokens from 0, which add up to the sequence's, got " + list_text(lengths));
      }
    }
    if (length_ && *length_ != total) {
      refuse("--lengths add up to " + std::to_string(total) + ", but --length says " + std::to_string(*length_) +
             "; leave --length out");
    }
    request_.shape.q_len = total;
  }

  // Before the memory is taken: a process that the kernel ends says nothing. `programs`: the bytes of all ranks', which
  // the proof keeps.
  void require_memory(double programs) {
    if (!free_) return;
    const auto most = static_cast<double>(free_->bytes);
    // What ranks need of each other is found in bits, one a key, and in two ints for each key of one owner
    // (attention/plan/needs.h).
    const auto keys = static_cast<double>(request_.shape.k_len);
    const double plan = keys / 8 + keys / request_.ranks * 2 * sizeof(int);
    if (!no_proof_ && !proof_bytes_) proof_bytes_ = proof_bytes(request_, *cached_pattern(request_));
    const double bytes = no_proof_ ? plan : plan + *proof_bytes_ + programs;
    if (bytes <= most) return;
    throw Error(ErrorKind::kResource, "plan",
                std::string(no_proof_ ? "a plan" : "the proof of a plan") + " of " + with_commas(request_.shape.q_len) +
                    " positions for " + counted(request_.ranks, "rank") + " takes " + bytes_text(bytes) + ", and " +
                    bytes_text(most) + " are free (" + free_->limit + "): " +
                    (plan <= most && !no_proof_ ? "--no-proof only makes the plan" : "plan a shorter sequence"));
  }

  std::vector<Cost> costs(const std::vector<Traffic>& ranks) const {
    const int64_t accumulator_bytes = element_bytes_ == 8 ? 8 : 4;
    std::vector<Cost> costs;
    const auto add = [&](const char* key, const char* name, bool bytes, int64_t scale, auto value) {
      const auto less = [&](const Traffic& a, const Traffic& b) { return value(a) < value(b); };
      const auto [least, most] = std::minmax_element(ranks.begin(), ranks.end(), less);
      costs.push_back({key, name, bytes, static_cast<double>(scale) * static_cast<double>(value(*least)),
                       static_cast<double>(scale) * static_cast<double>(value(*most))});
    };
    const int64_t kv = head_dim_ * element_bytes_, grad = head_dim_ * accumulator_bytes;
    add("messages_sent", "messages sent", false, 1, [](const Traffic& t) { return t.kv_messages + t.grad_messages; });
    add("kv_bytes_sent", "keys and values sent", true, kv, [](const Traffic& t) { return t.kv_rows; });
    add("gradient_bytes_sent", "gradients sent", true, grad, [](const Traffic& t) { return t.grad_rows; });
    add("kv_bytes_held", "keys and values held", true, kv, [](const Traffic& t) { return t.peak_kv_rows; });
    add("gradient_bytes_held", "gradients held", true, grad, [](const Traffic& t) { return t.peak_grad_rows; });
    return costs;
  }

  // Of all pairs of a query and a key.
  double share() const {
    const AttentionShape& s = request_.shape;
    const double all =
        static_cast<double>(s.batch * s.heads) * static_cast<double>(s.q_len) * static_cast<double>(s.k_len);
    return all > 0 ? static_cast<double>(pairs_) / all : 0;
  }

  static void print_costs(const char* direction, const std::vector<Cost>& costs) {
    std::printf("%-10s %-28s %14s %14s\n", direction, "of one rank", "least", "most");
    for (const Cost& cost : costs) {
      const double scale = cost.bytes ? 1.0 / (1 << 20) : 1;
      const std::string name = std::string(cost.name) + (cost.bytes ? ", MiB" : "");
      const int digits = cost.bytes ? 2 : 0;
      std::printf("%-10s %-28s %14.*f %14.*f\n", "", name.c_str(), digits, scale * cost.least, digits,
                  scale * cost.most);
    }
  }

  void print_plan() const {
    std::printf("%s\npairs counted %lld, %.4f of all\n\n", request_.text().c_str(), static_cast<long long>(pairs_),
                share());
    print_costs("forward", forward_);
    print_costs("backward", backward_);
    std::printf("\nmade in %.3f s, %.2f ms a rank\n", made_, 1e3 * made_ / request_.ranks);
    std::fflush(stdout);
  }

  void print_proof() const {
    if (!proof_) return;
    for (const std::string& fault : proof_->faults) std::printf("wrong: %s\n", fault.c_str());
    if (!proof_->holds()) return;
    std::printf(
        "proved in %.3f s: each of %lld pairs is computed once, %lld transfers have both ends, gradients get home\n",
        proved_, static_cast<long long>(proof_->pairs), static_cast<long long>(proof_->transfers / 2));
  }

  void print_json() const {
    using Json = nlohmann::ordered_json;
    const auto of = [](const std::vector<Cost>& costs) {
      Json all;
      for (const Cost& cost : costs) all[cost.key] = {{"least", cost.least}, {"most", cost.most}};
      return all;
    };
    Json plan = {{"request", request_.text()},
                 {"ranks", request_.ranks},
                 {"schedule", to_string(request_.schedule)},
                 {"pairs", pairs_},
                 {"share_of_pairs", share()},
                 {"forward", of(forward_)},
                 {"backward", of(backward_)},
                 {"made_seconds", made_},
                 {"proof", nullptr}};
    if (proof_) {
      plan["proof"] = {{"holds", proof_->holds()},
                       {"faults", proof_->faults},
                       {"pairs", proof_->pairs},
                       {"transfers", proof_->transfers / 2},
                       {"seconds", proved_}};
    }
    std::printf("%s\n", plan.dump(2).c_str());
  }

  PlanRequest request_;
  std::optional<int> ranks_;
  std::optional<int64_t> length_, key_length_, kv_heads_;
  std::optional<std::string> layout_;
  int64_t head_dim_ = 128, element_bytes_ = 2;
  std::string pattern_ = "{ kind = \"causal\" }", schedule_ = "auto";
  bool no_proof_ = false, json_ = false;
  PlanMemory memory_;
  std::vector<std::string> given_;  // options

  int64_t pairs_ = 0;
  std::vector<Cost> forward_, backward_;
  std::optional<Proof> proof_;
  std::optional<AvailableMemory> free_;
  std::optional<double> proof_bytes_;
  double program_bytes_ = 0;  // of the programs made so far
  double made_ = 0, proved_ = 0;
};

}  // namespace

std::unique_ptr<Verb> make_plan_verb() { return std::make_unique<PlanVerb>(); }

}  // namespace annulus
