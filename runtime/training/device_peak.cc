// See device_peak.h.
#include "runtime/training/device_peak.h"

namespace annulus {
namespace {

struct Peak {
  std::string_view name;    // as in cudaGetDeviceProperties
  double bf16, tf32, fp32;  // TFLOP/s, dense
};

// Where a data sheet gives figures only with sparsity, these are half of them.
constexpr Peak kPeaks[] = {
    // NVIDIA H100 Tensor Core GPU data sheet: SXM, PCIe, NVL.
    {"NVIDIA H100 80GB HBM3", 989.5, 494.5, 67},
    {"NVIDIA H100 PCIe", 756.5, 378, 51},
    {"NVIDIA H100 NVL", 835.5, 417.5, 60},
    // NVIDIA H200 Tensor Core GPU data sheet: SXM, NVL.
    {"NVIDIA H200", 989.5, 494.5, 67},
    {"NVIDIA H200 NVL", 835.5, 417.5, 60},
    // NVIDIA GH200 Grace Hopper Superchip data sheet: its GPU is that of an H100 SXM.
    {"NVIDIA GH200 480GB", 989.5, 494.5, 67},
    {"NVIDIA GH200 144G HBM3e", 989.5, 494.5, 67},
    // NVIDIA HGX B200 data sheet, an eighth of the board; NVIDIA GB200 NVL72 data sheet, half a superchip.
    {"NVIDIA B200", 2250, 1125, 75},
    {"NVIDIA GB200", 2500, 1250, 80},
    // NVIDIA A100 Tensor Core GPU data sheet: all variants alike.
    {"NVIDIA A100-SXM4-40GB", 312, 156, 19.5},
    {"NVIDIA A100-SXM4-80GB", 312, 156, 19.5},
    {"NVIDIA A100-PCIE-40GB", 312, 156, 19.5},
    {"NVIDIA A100 80GB PCIe", 312, 156, 19.5},
    // NVIDIA A10, A30 and A40 data sheets.
    {"NVIDIA A10", 125, 62.5, 31.2},
    {"NVIDIA A30", 165, 82, 10.3},
    {"NVIDIA A40", 149.7, 74.8, 37.4},
    // NVIDIA L4, L40 and L40S data sheets.
    {"NVIDIA L4", 121, 60, 30.3},
    {"NVIDIA L40", 181.05, 90.5, 90.5},
    {"NVIDIA L40S", 362.05, 183, 91.6},
    // NVIDIA Ada GPU Architecture white paper, appendix A; NVIDIA Ampere GA102 white paper, appendix A. The figures are
    // for products of bf16 with fp32 sums, which these GPUs compute at half the speed of those with fp16 sums.
    {"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6},
    {"NVIDIA GeForce RTX 3090", 71, 35.6, 35.6},
};

}  // namespace

std::optional<double> peak_flops(std::string_view name, at::ScalarType dtype, bool tf32) {
  for (const Peak& peak : kPeaks) {
    if (peak.name != name) continue;
    if (dtype == at::kBFloat16) return peak.bf16 * 1e12;
    if (dtype == at::kFloat) return (tf32 ? peak.tf32 : peak.fp32) * 1e12;
  }
  return std::nullopt;
}

}  // namespace annulus
