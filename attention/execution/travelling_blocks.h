// Allocates, reuses and frees the tensors of one direction of one call: travelling keys and values, gradients, queries
// and results, and packed copies of rows that are sent. Used by the executor alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"
#include "comm/communicator.h"

namespace annulus {

// The tensors of a buffer, each [rows of the buffer's RowSet, D] or, for lse, [rows, 1]: k and v; dk and dv; q, and in
// the backward dout, out and lse; out and lse, and in the backward dq (row_content of attention/plan/traffic.h).
using BlockTensors = std::vector<at::Tensor>;

// What transfer_rows does with the rows that both buffers have.
enum class Joining {
  kCopy,   // dst = src
  kAdd,    // dst += src
  kMerge,  // dst are out and lse, which become those over the keys of both
};
// The rows of `dst` and `src` are stored in the order of their sets.
void transfer_rows(const BlockTensors& dst, const RowSet& dst_rows, const BlockTensors& src, const RowSet& src_rows,
                   Joining joining);

// Whether the backward lends the buffer that the forward saves.
bool lends_saved(const Program& program, const Communicator& comm);

// Storage is allocated when a buffer's life begins. When the life ends, the buffer that memory/storage.h names as its
// successor takes the storage over; without a successor the storage is freed at once. So a long ring allocates two
// travelling blocks instead of P, and in every step the memory held is what the plan says. On a CPU, memory comes from
// the pool of the process and returns to it (memory/pool/pool.h), on a GPU from LibTorch's caching allocator.
//
// Between ranks that lend to each other (Communicator::lends_to) blocks are not copied. A buffer that is sent to such a
// rank is lendable, and one that is received from such a rank has no memory until the message arrives; then it has the
// sender's. These have no successors, because another rank may still read them when their life here ends. The rank's
// own keys, values and queries belong to the caller, so the rows that are sent are copied to lendable memory first.
// This copy does not count as held: it lies in this rank's memory, but it is the block that the receivers hold and
// count.
//
// On a GPU the host is several steps ahead of the device, and transfers run on a
// stream of their own. Storage is reused in the order of the compute stream, which is sufficient:
// - exchange() makes the transfers of a step wait for everything that has been issued to the compute stream. So a block
//   is sent after the tiles or additions that made it, and nothing arrives in storage that an earlier tile still reads.
// - During the transfers of a step nothing else uses a buffer that is received or changes one that is sent: the
//   verifier proves that the step neither zeroes a received buffer nor has a tile that touches it, and that neither
//   tiles nor additions change a sent one.
// - Work::wait() makes the compute stream wait for all transfers of the step, sends included, before the additions are
//   issued, which read what has arrived, and before end_step gives storage to the successor or back to the allocator,
//   which reuses it in the order of the compute stream.
// So every use of a piece of storage, on either stream, is ordered after the previous one, and the host never waits.
class TravellingBlocks {
 public:
  // `steps` must be program.forward or program.backward; k gives dtype, device and head size. The program and the
  // communicator must outlive this object.
  TravellingBlocks(const Program& program, const std::vector<Step>& steps, const at::Tensor& k, Communicator& comm);

  // Sets the tensors of a buffer that the caller provides, before the first step.
  void put(int buffer, BlockTensors tensors);
  // The tensors of a buffer, allocated at the first use and not initialised.
  BlockTensors& get(int buffer) { return tensors_of(static_cast<size_t>(buffer)); }

  // Gives a buffer this content: where it will be lent it is copied to such memory, otherwise these are its tensors.
  void fill(int buffer, BlockTensors tensors);

  // The tensors of a transfer: the rows of the buffer, or a copy of rows that are scattered in it. Must be called for
  // all sends in the order of the plan.
  BlockTensors to_send(const Transfer& send);
  BlockTensors to_receive(const Transfer& receive) { return get(receive.buffer); }

  // Ends the lives that end with this step, except for the buffers that the call returns: the rank's own gradients, and
  // the keys and values that the forward keeps.
  void end_step(int step);

  // The most K and V elements, dK and dV elements, and elements of other ranks' queries and of partial results, held at
  // once. All tensors count for as long as they exist.
  int64_t peak_kv() const { return held_->peak[0]; }
  int64_t peak_grad() const { return held_->peak[1]; }
  int64_t peak_query() const { return held_->peak[2]; }
  int64_t peak_result() const { return held_->peak[3]; }

 private:
  static constexpr size_t kGiven = 4;
  struct Held {
    std::array<int64_t, kGiven + 1> now{}, peak{};  // keys and values; gradients; queries; results; what does not count
  };
  // Tensors that count as held for as long as this object exists.
  struct Block {
    Block(BlockTensors t, size_t which, std::shared_ptr<Held> held);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    int64_t elements() const;

    BlockTensors tensors;
    const size_t which;
    const std::shared_ptr<Held> held;
  };
  // A copy of the caller's rows that were sent last, in memory that can be lent, and which rows these are.
  struct OwnCopy {
    BlockTensors tensors;
    RowSet rows;
  };

  enum class Place : char { kOrdinary, kLendable, kBorrowed };

  size_t which_of(size_t number) const;
  // The kind of a buffer or, for a packed copy, of the buffer that it is copied from.
  BufferKind kind_of(size_t number) const;
  // Makes buffers lendable or borrowed, before the first step.
  void place(const std::vector<Step>& steps);
  BlockTensors allocate(int64_t rows, BufferKind kind, Place place);
  BlockTensors& tensors_of(size_t number);

  const Program& program_;
  const bool backward_;
  const Storage storage_;
  const std::vector<int> successors_;
  std::vector<std::vector<size_t>> ending_;  // by step: the buffers whose life ends with it
  std::vector<BufferKind> copied_;           // of each packed copy
  const at::TensorOptions kv_options_, grad_options_;
  const int64_t head_dim_;
  const std::shared_ptr<Held> held_ = std::make_shared<Held>();
  std::vector<std::unique_ptr<Block>> blocks_;  // by number in storage_; null: it has no storage now
  size_t next_copy_;                            // the number in storage_ of the next packed copy
  Communicator& comm_;
  std::vector<Place> places_;          // by number in storage_
  std::map<int, OwnCopy> own_copies_;  // by buffer
};

}  // namespace annulus
