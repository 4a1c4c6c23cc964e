// Prints what a proof says about a plan. Used by plan.cc and prove.cc.
#pragma once

#include <cstdio>
#include <string>

#include "attention/proof/verifier.h"
#include "common/text.h"

namespace annulus {

inline void print_proof(const Proof& proof, double seconds, std::FILE* to = stdout) {
  for (const std::string& fault : proof.faults) std::fprintf(to, "wrong: %s\n", fault.c_str());
  if (!proof.holds()) return;
  std::fprintf(
      to,
      "proved in %.3f s: each of %s is computed as often as it is counted, both ends of %s agree, and gradients "
      "reach their ranks\n",
      seconds, with_commas(proof.pairs, "pair").c_str(), with_commas(proof.transfers / 2, "transfer").c_str());
}

}  // namespace annulus
