// The passes of flash attention over rows of scores: maximum, exponential and sum, gradient. Compiled for
// each instruction set (simd/versions.h). Used by flash.cc.
#pragma once

#include <cstdint>

namespace annulus {

// max(x[0..n), floor); NaN are ignored.
float row_max(const float* x, int64_t n, float floor);
double row_max(const double* x, int64_t n, double floor);

// x[i] = exp(x[i] - shift), exactly 0 for x[i] = -inf; returns the sum.
float row_exp(float* x, int64_t n, float shift);
double row_exp(double* x, int64_t n, double shift);

// p[i] = exp(p[i] - lse), ds[i] = p[i] * (ds[i] - delta).
void row_gradient(float* p, float* ds, int64_t n, float lse, float delta);
void row_gradient(double* p, double* ds, int64_t n, double lse, double delta);

}  // namespace annulus
