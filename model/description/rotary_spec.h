// How a model's rotary embedding (arXiv 2104.09864) makes angles of positions. Used by configurations, by the mapping
// from and to Hugging Face's config.json, and by modules/rotary.h, which makes the tables. No LibTorch.
#pragma once

#include <cstdint>
#include <string>

namespace annulus {

// What is done to the frequencies theta^(-2i / head_dim) so that positions beyond those of the training have a meaning.
struct RotaryScaling {
  enum class Kind {
    kDefault,  // nothing
    kLinear,   // frequency / factor
    kLlama3,   // low frequencies are divided by factor, high ones are not, between them it is blended (Llama 3.1)
    kYarn,     // likewise by the number of rotations, and cosine and sine are scaled (arXiv 2309.00071)
  };
  Kind kind = Kind::kDefault;
  double factor = 1;                                 // of the context's extension, at least 1
  double original_context = 0;                       // positions before the extension; llama3 and yarn
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  double attention_factor = 0;                       // yarn; 0: 0.1 ln(factor) + 1
  bool truncate = true;                              // yarn: the ramp's ends are whole numbers

  friend bool operator==(const RotaryScaling&, const RotaryScaling&) = default;

  // As an inline table of TOML: { kind = "yarn", factor = 4.0, original_context = 8192.0, ... }, with the kind's own
  // numbers alone.
  std::string text() const;
};

// "default", "linear", "llama3", "yarn": the kinds, as Hugging Face's rope_type spells them.
const char* rotary_kind_name(RotaryScaling::Kind kind);

struct RotarySpec {
  int64_t head_dim = 0;  // even
  double theta = 10000;
  RotaryScaling scaling = {};
  // Frequencies and angles are rounded in fp32, operation by operation as `transformers` does it. Otherwise they are
  // fp64. The two differ by 4e-3 at position 131,072 and 5e-2 at 1,048,576: a model keeps what it was trained with.
  bool fp32 = false;

  // What cosine and sine are multiplied by.
  double attention_factor() const;
  // All of it, exactly: equal where tables are.
  std::string text() const;
};

// Raises Error(kUsage), beginning with `where`, for numbers that make no angles.
void validate(const RotaryScaling& scaling, const std::string& where);

}  // namespace annulus
