// How a model's rotary embedding (arXiv 2104.09864) computes angles from positions. Used by configurations, by the
// mapping from and to Hugging Face's config.json, and by attention/modules/rotary.h, which makes the tables. Needs no
// LibTorch.
#pragma once

#include <cstdint>
#include <string>

namespace annulus {

// How the frequencies theta^(-2i / head_dim) are changed for positions beyond those of the training.
struct RotaryScaling {
  enum class Kind {
    kDefault,  // frequencies are not changed
    kLinear,   // frequency / factor
    kLlama3,   // low frequencies are divided by factor, high ones are kept, those between are blended (Llama 3.1)
    kYarn,     // the same by the number of rotations; cosine and sine are scaled, too (arXiv 2309.00071)
  };
  Kind kind = Kind::kDefault;
  double factor = 1;                                 // by which the context is extended, at least 1
  double original_context = 0;                       // positions before the extension; llama3 and yarn
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  double attention_factor = 0;                       // yarn; 0: 0.1 ln(factor) + 1
  bool truncate = true;                              // yarn: the ends of the ramp are rounded to whole numbers

  friend bool operator==(const RotaryScaling&, const RotaryScaling&) = default;

  // An inline table of TOML that has only the kind's own numbers: { kind = "yarn", factor = 4.0, original_context =
  // 8192.0, ... }.
  std::string text() const;
};

// "default", "linear", "llama3", "yarn": the kinds, as Hugging Face's rope_type spells them.
const char* rotary_kind_name(RotaryScaling::Kind kind);

struct RotarySpec {
  int64_t head_dim = 0;  // even
  double theta = 10000;
  RotaryScaling scaling = {};
  // Compute frequencies and angles in fp32, operation by operation as `transformers` does, and not in fp64. The two
  // differ by 4e-3 at position 131,072 and by 5e-2 at 1,048,576, so a model keeps what it was trained with.
  bool fp32 = false;

  // The factor of cosine and sine.
  double attention_factor() const;
  // All fields, exactly: specs with the same text have the same tables.
  std::string text() const;
};

// Raises Error(kUsage), beginning with `where`, for numbers from which no angles can be computed.
void validate(const RotaryScaling& scaling, const std::string& where);

}  // namespace annulus
