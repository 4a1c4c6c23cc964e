// Layouts of packed rows by annulus and by other libraries' rules, drawn rows to deal, and what a layout costs. Nothing
// is run: pairs and rows are counted. Used by `annulus bench layouts` and by tests.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention/plan/balance.h"
#include "attention/plan/layout.h"

namespace annulus {

// Lengths of documents, as mixtures of packed rows for long contexts have them. "log-normal": median 1,097 tokens,
// sigma 1.5; "long tail": 80 % log-normal (545, 1.0), 15 % log-uniform from 4,096 to 32,768, 5 % log-uniform from
// 32,768 to the row; "short": log-normal (403, 0.8), as instructions. A row is filled in the order of drawing; the last
// document is cut.
const std::vector<std::string>& length_mixtures();
std::vector<int64_t> draw_lengths(const std::string& mixture, int64_t row, std::mt19937_64& random);

// The causal pattern of one packed row.
Pattern packed_row(const std::vector<int64_t>& lengths);

// PyTorch 2.9, torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py, _PTRRLoadBalancer: blocks of
// 128 queries, sorted by their work, go to the ranks in turn, forwards and backwards alternately. The number of blocks
// is rounded down to a multiple of the ranks' there; here the last round has fewer.
Layout round_robin_layout(const std::vector<int64_t>& before, int ranks);

// MagiAttention, magi_attention/meta/solver/dispatch_solver.py, MinHeapDispatchAlg: chunks, sorted by their area, go
// each to the rank with the least area so far that has not got its number of chunks, which is the same for all.
Layout min_heap_layout(const std::vector<int64_t>& before, int ranks, int64_t chunk);

// The most pairs of a rank over the mean of all.
double most_over_mean(const Layout& layout, const std::vector<int64_t>& before);

// The rows that all ranks together must be sent at least, in any layout whose ranks have at most 1.05 of the mean pairs
// and ceil(S / P) tokens: so many ranks have queries from x on, and each of them needs all keys of the document before.
double least_rows(const std::vector<int64_t>& lengths, int ranks);

}  // namespace annulus
