// The parameters of a rotary position embedding (RoPE, arXiv 2104.09864). Used by configurations, by the mapping from
// and to Hugging Face's config.json, and by attention/modules/rotary.h, which makes the tables. Needs no LibTorch.
#pragma once

#include <cstdint>
#include <string>

namespace annulus {

// Context extension: how the frequencies theta^(-2i / head_dim) are changed for positions beyond those of the training.
struct RotaryScaling {
  enum class Kind {
    kDefault,  // unchanged frequencies
    kLinear,   // frequency / factor
    kLlama3,   // low frequencies are divided by factor, high ones kept, those between interpolated (Llama 3.1)
    kYarn,     // likewise, with a ramp over the number of rotations; cosine and sine are scaled (arXiv 2309.00071)
    kNone,     // all frequencies are 0: nothing is rotated, and positions are not encoded (NoPE, arXiv 2305.19466)
  };
  Kind kind = Kind::kDefault;
  double factor = 1;                                 // of the context extension, >= 1
  double original_context = 0;                       // positions before the extension; llama3 and yarn
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  double attention_factor = 0;                       // yarn; 0: 0.1 ln(factor) + 1
  bool truncate = true;                              // yarn: round the ends of the ramp to integers

  friend bool operator==(const RotaryScaling&, const RotaryScaling&) = default;

  // Returns an inline TOML table with the parameters of the kind: { kind = "yarn", factor = 4.0, original_context =
  // 8192.0, ... }.
  std::string text() const;
};

// Returns Hugging Face's rope_type: "default", "linear", "llama3" or "yarn"; or "none", which is none of its types.
const char* rotary_kind_name(RotaryScaling::Kind kind);

struct RotarySpec {
  int64_t head_dim = 0;  // even
  double theta = 10000;
  RotaryScaling scaling = {};
  // Compute frequencies and angles in fp32, operation by operation as `transformers` does, instead of fp64. The two
  // differ by 4e-3 at position 131,072 and by 5e-2 at 1,048,576, so a model must keep the choice of its training.
  bool fp32 = false;

  // Returns the factor of cosine and sine.
  double attention_factor() const;
  // Returns all fields, exactly: specs with equal texts have equal tables.
  std::string text() const;

  friend bool operator==(const RotarySpec&, const RotarySpec&) = default;
};

// Raises Error(kUsage), prefixed by `where`, for parameters that give no valid angles.
void validate(const RotaryScaling& scaling, const std::string& where);

}  // namespace annulus
