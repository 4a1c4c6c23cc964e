// A rank's share of the rows of a stage of the data: their shape, requests, tables and the memory that they are read
// into. Internal to training.h.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <memory>
#include <utility>
#include <vector>

#include "memory/pinned.h"
#include "runtime/training/job.h"
#include "runtime/training/training.h"
#include "runtime/training/training_charges.h"

namespace annulus {

struct Training::Share {
  Share(int64_t accumulate, const LayerRequests& layers, BatchShape batch_shape, RotaryTables tables, bool recorded,
        at::Device device)
      : shape(std::move(batch_shape)),
        requests(layers.of_rows(shape.first_row, shape.own_rows)),
        rotary(std::move(tables)),
        graph(device, recorded) {
    std::vector<int64_t> sizes = {shape.planes(), shape.own_rows, shape.length()};
    if (device.is_cuda()) batch = at::empty(sizes, at::TensorOptions(at::kLong).device(device));
    sizes.insert(sizes.begin(), accumulate);
    for (int64_t i = 0; i < kTokenSlots; ++i) slots.push_back(host_memory(sizes, at::kLong, device));
  }

  // Begins to read the rows of steps [begin, until).
  void read(const Dataset& data, int64_t accumulate, int64_t begin, int64_t until) {
    std::vector<int64_t*> memory;
    for (const at::Tensor& slot : slots) memory.push_back(slot.data_ptr<int64_t>());
    reader.reset();  // the previous reader writes to the same memory
    reader = std::make_unique<BatchReader>(data, shape, accumulate, begin, until, std::move(memory));
    next = begin;
    end = until;
  }

  // Returns the tokens [planes, rows, positions] on the device that computes the step.
  at::Tensor on_device(const at::Tensor& host) {
    if (!batch.defined()) return host;
    send(host, batch);
    return batch;
  }

  // Returns the weights of a batch's targets [rows * positions]; undefined: all are 1.
  at::Tensor weights(const at::Tensor& of) const {
    if (!shape.weighs) return {};
    return of[shape.planes() - 1].view({-1}).view(at::kFloat).narrow(0, 0, shape.plane());
  }

  RotaryTables tables(const at::Tensor& of) const {
    if (!shape.rotary()) return rotary;
    const at::Tensor positions = of[2].view({-1});
    RotaryTables own = rotary;
    for (RotaryTable& table : own.distinct) {
      table = {table.cosine.index_select(0, positions), table.sine.index_select(0, positions)};
    }
    return own;
  }

  BatchShape shape;
  std::vector<PlanRequest> requests;  // of these rows, without their documents
  RotaryTables rotary;                // of this rank's positions; with shape.rotary(), of the whole context
  at::Tensor batch;                   // on a GPU, where a recorded step reads it
  std::vector<at::Tensor> slots;      // int64 [accumulate, planes, rows, positions], in host memory
  StepGraph graph;
  int64_t next = -1;  // the step whose rows the reader gives next
  int64_t end = -1;   // the step at which the reader ends
  std::unique_ptr<BatchReader> reader;
};

}  // namespace annulus
