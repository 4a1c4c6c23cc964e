// The tensors of one direction of one call: keys and values that travel, gradients, copies made to be sent. Who takes
// them, who takes them over, and who frees them. Used by the executor alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"

namespace annulus {

struct TensorPair {
  at::Tensor k, v;  // or dk and dv: [rows of the buffer's RowSet, D]
};

// dst = src, or dst += src, in the rows that both hold.
void transfer_rows(const TensorPair& dst, const RowSet& dst_rows, const TensorPair& src, const RowSet& src_rows,
                   bool add);

// Storage is taken when a buffer's life begins. When the life ends, the buffer that the plan's storage names as its
// heir takes the storage over (memory/storage.h); what has no heir is freed at once. A long ring allocates twice, not P
// times, and what is held is what the plan says, step by step.
//
// On a GPU the host is steps ahead of the device, and transfers run on a stream of their own. Storage is reused in the
// order of the compute stream alone, which is enough:
// - exchange() lets the transfers of a step begin after all that the compute stream holds by then: a block is sent
//   after the tiles or additions that made it, and nothing arrives in storage that an earlier step's tile still reads.
// - While transfers travel nobody else uses what arrives, nor changes what leaves: the verifier proves that nothing is
//   zeroed in and no tile of the step touches a buffer that is received in it, and that neither tiles nor additions
//   change one that is sent.
// - Work::wait() puts the compute stream behind all transfers of the step, the sends too, before its additions are
//   issued, which read what has arrived, and before end_step lets storage go: to the heir, or to the allocator, which
//   hands it out again in the order of the compute stream.
// So every use of a piece of storage, on either stream, is ordered after the one before it, and the host never waits.
class TravellingBlocks {
 public:
  // `steps` is one of the program's directions; k tells dtype, device and head size.
  TravellingBlocks(const Program& program, const std::vector<Step>& steps, const at::Tensor& k);

  // Hands in a buffer's content from outside, before the first step; its memory stays the caller's.
  void put(int buffer, TensorPair pair);
  TensorPair& get(int buffer) { return tensors_of(static_cast<size_t>(buffer)); }

  // Scattered rows of a buffer, copied out to be sent. The plan's sends that need this come in their order.
  TensorPair pack(int buffer, const RowSet& rows);

  // Ends the lives that end with this step, but of what the call returns: the own gradients, and keys and values that
  // the forward keeps.
  void end_step(int step);

  // K and V elements held at once, and dK and dV elements: all tensors that are there, whatever they are kept for.
  int64_t peak_kv() const { return held_->peak[0]; }
  int64_t peak_grad() const { return held_->peak[1]; }

 private:
  struct Held {
    std::array<int64_t, 2> now{}, peak{};  // keys and values; gradients
  };
  // Tensors, counted as held for as long as they exist.
  struct Block {
    Block(TensorPair p, bool gradients, std::shared_ptr<Held> held);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    TensorPair pair;
    const size_t which;
    const std::shared_ptr<Held> held;
  };

  bool is_gradient(size_t number) const { return storage_.buffers()[number].pool == kGradients; }
  TensorPair& tensors_of(size_t number);

  const Program& program_;
  const Storage storage_;
  const std::vector<int> heirs_;
  std::vector<std::vector<size_t>> ending_;  // by step: buffers whose life ends with it
  const at::TensorOptions kv_options_, grad_options_;
  const int64_t head_dim_;
  const std::shared_ptr<Held> held_ = std::make_shared<Held>();
  std::vector<std::unique_ptr<Block>> blocks_;  // by number in storage_; null: no storage now
  size_t next_copy_;                            // number of the next pack()
};

}  // namespace annulus
