// See gemm.h. LibTorch's libraries export the BLAS that they were built with; its names are the Fortran ones, and its
// matrices column-major, so that a row-major product is the transposed one with its sides exchanged.
#include "attention/cpu_flash/gemm.h"

extern "C" {
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
            const float*, const int*, const float*, float*, const int*);
void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*, const double*, const int*,
            const double*, const int*, const double*, double*, const int*);
// MKL's; missing where LibTorch was built with another BLAS, whose small products are serial.
int MKL_Set_Num_Threads_Local(int) __attribute__((weak));
}

namespace annulus {

SerialProducts::SerialProducts() {
  if (MKL_Set_Num_Threads_Local) before_ = MKL_Set_Num_Threads_Local(1);
}
SerialProducts::~SerialProducts() {
  if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
}

namespace {

template <typename T, typename Blas>
void call(Blas blas, char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, T alpha, const T* a, int64_t lda,
          const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
  const int rows = static_cast<int>(m), columns = static_cast<int>(n), inner = static_cast<int>(k);
  const int step_a = static_cast<int>(lda), step_b = static_cast<int>(ldb), step_c = static_cast<int>(ldc);
  blas(&trans_b, &trans_a, &columns, &rows, &inner, &alpha, b, &step_b, a, &step_a, &beta, c, &step_c);
}

}  // namespace

template <>
void gemm<float>(char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
                 const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  call(sgemm_, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

template <>
void gemm<double>(char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
                  int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
  call(dgemm_, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // namespace annulus
