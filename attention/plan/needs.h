// Needs: which key rows of one rank the queries of another rank meet. Schedules send no others, but all-gather sends
// each rank what any rank needs. Internal to attention/plan.
//
// Rows are held as bits, one for each row of the owner, separately for each class: batch rows and kv heads that every
// slice of the pattern treats alike. What is found serves all programs of a plan: an object is made once for them.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "attention/plan/incidence.h"
#include "attention/plan/plan.h"

namespace annulus {

// Some key rows of one owner.
struct RowBits {
  int owner = 0;
  std::vector<uint64_t> words;  // as many for each class, one class after the other; bit i: the owner's row i. Or none

  bool any() const;
  // Adds the rows of `other`, of the same owner.
  void join(const RowBits& other);
};

// A slice's part that falls to one rank's queries.
struct QueryPart {
  const Slice* slice = nullptr;
  Span queries;  // positions
  Span rows;     // their storage rows
};

// How far the rows of one owner travel. The block of an owner visits the ranks owner + 1, owner + 2, ...: rank
// owner + i in visit i. Each row of each class has a first and a last visit of a rank that needs it; 0 where there is
// none. What the ranks of the visits up to i need, and what those from i on need, follows from these two numbers.
struct Reach {
  struct Run {  // rows that are alike, in storage order
    int64_t rows = 0;
    int first = 0, last = 0;
  };
  std::vector<std::vector<Run>> runs;  // by class
  std::vector<int> firsts, lasts;      // all that occur but 0, ascending
  // What was asked for last: by number of firsts (counted negative) or lasts that it holds.
  std::vector<std::pair<int64_t, RowSet>> remembered;
};

class Needs {
 public:
  // `pattern` and the layouts must outlive this.
  Needs(const Pattern& pattern, const Layout& queries, const Layout& keys);

  int ranks() const { return keys_.ranks(); }
  // By slice, then by the rank's spans.
  std::vector<QueryPart> parts(int reader);
  // For each owner the numbers of those of `parts` whose queries may meet its rows, ascending.
  Lists by_owner(const std::vector<QueryPart>& parts) const;

  // The rows of each owner that meet a query of `reader` within some slice, by owner; exact. The reader's own are among
  // them.
  std::vector<RowBits> read_by(int reader);
  // The same from the other side: the rows of `owner` that each reader's queries meet, by reader.
  std::vector<RowBits> read_of(int owner);
  // How many rows of other ranks the queries of each rank meet, summed over the ranks, batch rows and kv heads.
  __int128 foreign_rows();

  // What the ranks of visits [first, past) of a ring need of the owner's rows (see Reach). Either first is 1, or past
  // is ranks(). No blocks where they need nothing.
  RowSet needed_on_the_way(int owner, int first, int past);
  // The first and the last visit of a rank that needs any row of the owner; 0 where none does.
  std::pair<int, int> first_and_last_visit(int owner);
  // Whether the last visit's rank needs all that the ranks of the visits before it do.
  bool last_visit_needs_all(int owner);

  // Every row of the owner, of all batch rows and heads.
  bool complete(const RowBits& bits) const;
  // Counted over batch rows and kv heads.
  int64_t count(const RowBits& bits) const;
  // All rows of an owner as one block, in its storage order; and some of them, in the same order.
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
  Reach& reach(int owner);
  Reach find_reach(int owner);

  const Pattern& pattern_;
  const Layout& queries_;
  const Layout& keys_;
  const Holders query_holders_, key_holders_;
  std::vector<uint32_t> product_;  // by slice: number of its (batch rows, heads)
  std::vector<Class> classes_;
  std::vector<std::vector<uint32_t>> classes_of_product_;
  // Made when first asked for.
  std::optional<Lists> readers_by_slice_, slices_by_reader_, slices_by_owner_;
  std::vector<std::optional<Reach>> reaches_;  // by owner
  std::optional<Reach> unkept_;                // the last one asked for, where all would be large
  int64_t kept_bytes_ = 0;
};

}  // namespace annulus
