// Matrix products on raw row-major pointers, with row strides: small ones, called thousands of times from threads of
// their own, where a tensor operator's overhead would show. Used by flash.cc.
#pragma once

#include <cstdint>

namespace annulus {

// C [m, n] = alpha op(A) op(B) + beta C, of rows lda, ldb and ldc elements apart. The product's inner size is k; the
// letters say whether A and B are stored transposed: A is [m, k], or [k, m] with 'T'; B is [k, n], or [n, k] with 'T'.
// With beta 0, C is not read.
template <typename T>
void gemm(char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t lda, const T* b,
          int64_t ldb, T beta, T* c, int64_t ldc);

// While it lives, products of this thread are computed by this thread alone: its caller has no use for more. (Within a
// parallel region that is so anyway.)
class SerialProducts {
 public:
  SerialProducts();
  ~SerialProducts();
  SerialProducts(const SerialProducts&) = delete;
  SerialProducts& operator=(const SerialProducts&) = delete;

 private:
  int before_ = 0;
};

}  // namespace annulus
