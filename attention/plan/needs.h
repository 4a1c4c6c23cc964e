// Needs: which key rows of one rank the queries of another rank meet. Schedules send no others. Internal to
// attention/plan.
//
// Rows are held as bits, one for each row of the owner, separately for each class: batch rows and kv heads that every
// slice of the pattern treats alike.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// Some key rows of one owner.
struct RowBits {
  int owner = 0;
  std::vector<std::vector<uint64_t>> words;  // by class; bit i: the owner's row i

  bool any() const;
  // Adds the rows of `other`, of the same owner.
  void join(const RowBits& other);
  bool includes(const RowBits& other) const;
};

// A slice's part that falls to one rank's queries.
struct QueryPart {
  const Slice* slice = nullptr;
  Span queries;  // positions
  Span rows;     // their storage rows
};

class Needs {
 public:
  // `pattern` and the layouts must outlive this.
  Needs(const Pattern& pattern, const Layout& queries, const Layout& keys);

  int ranks() const { return keys_.ranks(); }
  const std::vector<QueryPart>& parts(int reader);
  // The rows of `owner` that meet a query of `reader` within some slice. Exact.
  RowBits of(int owner, int reader);
  RowBits none(int owner) const;
  // Every row of the owner, of all batch rows and heads.
  bool complete(const RowBits& bits) const;
  // Counted over batch rows and kv heads.
  int64_t count(const RowBits& bits) const;
  // All rows of an owner as one block, in its storage order; and some of them, in the same order.
  RowSet all_rows(int owner) const;
  RowSet rows(const RowBits& bits) const;

 private:
  struct Class {
    Span batch, heads;                // kv heads
    std::vector<uint8_t> in_product;  // by product: whether the class is in it
  };
  void make_classes();
  RowBits find(int owner, int reader);

  const Pattern& pattern_;
  const Layout& queries_;
  const Layout& keys_;
  std::vector<size_t> product_;  // by slice: number of its (batch rows, heads)
  std::vector<Class> classes_;
  std::vector<std::vector<QueryPart>> parts_;  // by reader; made when first asked for
  std::vector<bool> parted_;
  std::vector<RowBits> found_;  // by owner and reader, words empty until asked for; not used where it would be large
};

}  // namespace annulus
