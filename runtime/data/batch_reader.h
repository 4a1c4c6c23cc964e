// BatchReader: reads the batches of coming steps on other threads, so that a step finds its tokens ready. Used by
// runtime/training/, which also calls fill_batch for validation.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <vector>

#include "attention/pattern/span.h"
#include "runtime/data/dataset.h"

namespace annulus {

// A rank's share of a batch: some of its rows, and some positions of these rows.
struct BatchShape {
  int64_t rows = 0;       // in the batch, over all ranks
  int64_t first_row = 0;  // the first of them that is this rank's
  int64_t own_rows = 0;
  std::vector<Span> positions;  // this rank's positions in a row, rising
  // If the layout follows the documents: returns the positions for a batch with these rows of this rank, as many as
  // `positions`. It is called by the threads that read.
  std::function<std::vector<Span>(const std::vector<DrawnRow>& own)> place = {};
  bool restart = false;  // rotary positions restart with every document, and go on along the paths of trees
  bool weighs = false;   // also give the weights of targets

  // Whether rotary positions are given, because they are not the same for all batches.
  bool rotary() const { return restart || place; }
  // Returns the number of positions.
  int64_t length() const;
  int64_t plane() const { return own_rows * length(); }
  // Planes [own_rows, positions]: tokens, targets, with rotary() rotary positions, and with `weighs` weights. These are
  // fp32 and fill the first half of their plane.
  int64_t planes() const { return 2 + (rotary() ? 1 : 0) + (weighs ? 1 : 0); }
  int64_t values() const { return planes() * plane(); }
};

struct Batch {
  std::vector<DrawnRow> rows;  // this rank's
  int64_t targets = 0;         // this rank's targets that count
  double weight = 0;           // the sum of their weights
};

// Fills `to`, an array of values() numbers, with what this rank has of its rows. Thread-safe.
Batch fill_batch(const Dataset& data, const BatchShape& shape, std::vector<DrawnRow> rows, int64_t* to);

// Only one thread may call take().
class BatchReader {
 public:
  struct Step {
    std::vector<Batch> batches;  // data.accumulate of them
    size_t slot = 0;             // the slot that holds the batches' values, one batch after the other
    std::vector<SourceUse> uses;
  };

  // Reads steps [begin, end), which have `batches` times shape.rows rows each. Each slot is memory for batches *
  // shape.values() numbers; the reader is ahead by the number of slots, less the one that take() has given. `data` and
  // the slots must outlive the reader. It begins at once, with a thread for each slot.
  BatchReader(const Dataset& data, BatchShape shape, int64_t batches, int64_t begin, int64_t end,
              std::vector<int64_t*> slots);
  BatchReader(const BatchReader&) = delete;
  BatchReader& operator=(const BatchReader&) = delete;

  // Returns the next step, `begin` first. It is valid until the next call, which gives its slot back. Rethrows what
  // reading this step raised.
  const Step& take();

  // Seconds that calls of take() have waited so far.
  double waited() const { return waited_; }

 private:
  size_t slot_of(int64_t step) const;
  void begin_to_read(int64_t step);
  Step read(int64_t step) const;

  const Dataset& data_;
  const BatchShape shape_;
  const int64_t batches_;
  const int64_t begin_, end_;
  int64_t next_;                          // the step that take() gives next
  const std::vector<int64_t*> memory_;    // by slot
  Step taken_;                            // the last step that take() has given
  double waited_ = 0;                     // seconds
  std::vector<std::future<Step>> steps_;  // by slot; destroyed first, which waits until nothing is read any more
};

}  // namespace annulus
