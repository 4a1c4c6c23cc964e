// ProgramMaker builds one rank's program: the parts that all schedules share. Internal to attention/plan.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "attention/plan/needs.h"
#include "attention/plan/plan.h"
#include "attention/plan/schedules.h"
#include "attention/plan/tiles.h"

namespace annulus {

// Returns the rank in [0, ranks) that is congruent to `rank`.
inline int wrap(int64_t rank, int ranks) { return static_cast<int>((rank % ranks + ranks) % ranks); }

class ProgramMaker {
 public:
  ProgramMaker(Needs& needs, Program& program)
      : needs_(needs),
        program_(program),
        parts_(needs.parts(program.rank)),
        parts_by_owner_(needs.by_owner(parts_)),
        heads_per_kv_head_(program.request.shape.heads / program.request.shape.kv_heads) {}

  int ranks() const { return program_.request.ranks; }
  int rank() const { return program_.rank; }

  int add_buffer(BufferKind kind, RowSet rows) {
    program_.buffers.push_back({kind, std::move(rows)});
    return static_cast<int>(program_.buffers.size()) - 1;
  }
  void send(Step& step, int peer, int buffer, RowSet rows) const {
    step.sends.push_back({peer, buffer, std::move(rows)});
  }
  void send_all(Step& step, int peer, int buffer) const { step.sends.push_back({peer, buffer, rows_of(buffer)}); }
  void receive(Step& step, int peer, int buffer) const { step.receives.push_back({peer, buffer, rows_of(buffer)}); }

  // Appends the tiles of this rank's queries with the rows of `owner` in `buffer` to a step. In the backward their
  // gradients are added to `grad_buffer`.
  void compute(Step& step, int owner, int buffer, int grad_buffer = -1) {
    static const RowSet none;
    const std::span<const uint32_t> numbers = parts_by_owner_.of(static_cast<size_t>(owner));
    const bool all = numbers.size() == parts_.size();
    against_.clear();
    for (size_t i = 0; i < numbers.size() && !all; ++i) against_.push_back(parts_[numbers[i]]);
    append_tiles(all ? parts_ : against_, heads_per_kv_head_, rows_of(buffer), buffer,
                 grad_buffer < 0 ? none : rows_of(grad_buffer), grad_buffer, step.tiles);
  }
  // Zeroes a gradient buffer and computes into it.
  void compute_into(Step& step, int owner, int buffer, int grad_buffer) {
    step.zero.push_back(grad_buffer);
    compute(step, owner, buffer, grad_buffer);
  }

 protected:
  const RowSet& rows_of(int buffer) const { return program_.buffers[static_cast<size_t>(buffer)].rows; }

  Needs& needs_;
  Program& program_;
  const std::vector<QueryPart> parts_;
  const Lists parts_by_owner_;
  const int64_t heads_per_kv_head_;
  std::vector<QueryPart> against_;  // scratch of compute()
};

}  // namespace annulus
