// Needs: which key rows of one rank are paired by the pattern with queries of another rank. Schedules send only these
// rows; all-gather sends every rank the rows that any rank needs. Internal to attention/plan.
//
// Row sets are bits, one for each row of the owner and each class. A class is a set of batch rows and kv heads that
// every slice of the pattern treats alike. One object serves all programs of a plan. docs/explanation/attention.md,
// "Needs", has an example. Not thread safe: results are computed at their first use and cached.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention/plan/incidence.h"
#include "attention/plan/plan.h"

namespace annulus {

// Some key rows of one owner.
struct RowBits {
  int owner = 0;
  // The words of all classes, concatenated; bit i of a class stands for the owner's row i. Empty: no rows.
  std::vector<uint64_t> words;

  bool any() const;
  // Adds the rows of `other`, which must have the same owner.
  void join(const RowBits& other);
};

// The part of a slice with one rank's queries.
struct QueryPart {
  const Slice* slice = nullptr;
  Span queries;  // positions
  Span rows;     // their storage rows
};

// How far the rows of one owner travel in a ring, where the owner's block visits rank owner + i in visit i = 1, 2, ...
// For each row of each class, `first` and `last` are the first and the last visit of a rank that needs the row, or 0 if
// no rank does. They determine which rows the visits 1, ..., i need, and which the visits from i on need.
struct Reach {
  struct Run {  // consecutive rows with equal values
    int64_t rows = 0;
    int first = 0, last = 0;
  };
  std::vector<std::vector<Run>> runs;  // by class
  std::vector<int> firsts, lasts;      // the distinct nonzero values, ascending
  // Recently used row sets. The key is the number of `lasts` that a set includes, or minus the number of `firsts`.
  std::vector<std::pair<int64_t, RowSet>> remembered;
};

// Keeps what is made for each owner, up to a bound in bytes, and the last one beyond it.
template <typename Value>
class KeptByOwner {
 public:
  // Returns the owner's value, made if it is not here. Valid until the next call.
  template <typename Make, typename Bytes>
  Value& get(int owner, const Make& make, const Bytes& bytes_of) {
    constexpr int64_t kMostBytes = 256'000'000;
    if (const auto found = kept_.find(owner); found != kept_.end()) return found->second;
    if (last_ && last_->first == owner) return last_->second;
    Value made = make();
    const int64_t bytes = bytes_of(made);
    if (bytes_ + bytes > kMostBytes) return last_.emplace(owner, std::move(made)).second;
    bytes_ += bytes;
    return kept_.emplace(owner, std::move(made)).first->second;
  }

 private:
  std::unordered_map<int, Value> kept_;
  std::optional<std::pair<int, Value>> last_;
  int64_t bytes_ = 0;
};

class Needs {
 public:
  // `pattern` and the layouts must outlive this.
  Needs(const Pattern& pattern, const Layout& queries, const Layout& keys);

  int ranks() const { return keys_.ranks(); }
  // Returns the positions of a rank's queries.
  const std::vector<Span>& query_spans(int rank) const { return queries_.spans[static_cast<size_t>(rank)]; }
  // Returns the parts of the slices with the reader's queries, by slice and then by the rank's spans.
  std::vector<QueryPart> parts(int reader);
  // Returns, for each owner, the ascending indices of the `parts` whose queries may be paired with its rows.
  Lists by_owner(const std::vector<QueryPart>& parts) const;

  // Returns, for each owner, exactly the rows that are paired with a query of `reader`, the reader's own rows included.
  std::vector<RowBits> read_by(int reader);
  // Returns, for each reader, the rows of `owner` that are paired with its queries.
  std::vector<RowBits> read_of(int owner);
  // Returns the rows of `owner` that are paired with a query of any of `readers`.
  RowBits read_by_any(int owner, const std::vector<int>& readers);
  // The same as rows, without blocks if there are none.
  RowSet rows_for(int owner, const std::vector<int>& readers);
  // Returns, by group of `within` consecutive ranks, the rows of `owner` that its ranks need; for the owner's own group
  // those that its other ranks need. Valid until the next call of a function here.
  const std::vector<RowBits>& read_by_groups(int owner, int within);
  // Returns the number of rows that ranks need of other ranks, summed over all ranks, batch rows and kv heads.
  __int128 foreign_rows();

  // Returns the owner's rows that the ranks of visits [first, past) of a ring need (see Reach), without blocks if there
  // are none. Either first must be 1, or past must be ranks().
  RowSet needed_on_the_way(int owner, int first, int past);
  // Returns the first and the last visit of a rank that needs any row of the owner; {0, 0} if there is none.
  std::pair<int, int> first_and_last_visit(int owner);
  // Returns whether the rank of the last visit needs every row that the ranks of earlier visits need.
  bool last_visit_needs_all(int owner);

  // Returns whether `bits` contains every row of the owner, for all batch rows and kv heads.
  bool complete(const RowBits& bits) const;
  // Returns the number of rows, over all batch rows and kv heads.
  int64_t count(const RowBits& bits) const;
  // Return all rows of an owner as one block, or some of its rows, in the owner's storage order.
  RowSet all_rows(int owner) const;
  RowSet rows(const RowBits& bits) const;

 private:
  struct Class {
    Span batch, heads;  // kv heads
  };
  void make_classes();
  size_t words_of(int owner) const { return static_cast<size_t>((keys_.count(owner) + 63) / 64); }
  const std::vector<uint32_t>& classes_of(const Slice& slice) const {
    return classes_of_product_[product_[static_cast<size_t>(&slice - pattern_.slices.data())]];
  }
  void mark(RowBits& bits, const Slice& slice, int64_t first_row, int64_t stride, int64_t count) const;
  const Lists& slices_by_reader();
  const Lists& readers_by_slice();
  const Lists& slices_by_owner();
  const std::vector<RowBits>& kept_read_of(int owner);  // valid until the next call
  Reach& reach(int owner);
  Reach find_reach(int owner);

  const Pattern& pattern_;
  const Layout& queries_;
  const Layout& keys_;
  const Holders query_holders_, key_holders_;
  std::vector<uint32_t> product_;  // by slice: the index of its distinct (batch rows, heads)
  std::vector<Class> classes_;
  std::vector<std::vector<uint32_t>> classes_of_product_;
  // These are made at their first use.
  std::optional<Lists> readers_by_slice_, slices_by_reader_, slices_by_owner_;
  KeptByOwner<Reach> reaches_;
  KeptByOwner<std::vector<RowBits>> reads_;   // what read_of returns
  KeptByOwner<std::vector<RowBits>> groups_;  // what read_by_groups returns for groups of within_ ranks
  int within_ = 0;
};

}  // namespace annulus
