// See rotary_spec.h.
#include "attention/modules/rotary_spec.h"

#include <cmath>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
const char* rotary_kind_name(RotaryScaling::Kind kind) {
  switch (kind) {
    case RotaryScaling::Kind::kLinear:
      return "linear";
    case RotaryScaling::Kind::kLlama3:
      return "llama3";
    case RotaryScaling::Kind::kYarn:
      return "yarn";
    case RotaryScaling::Kind::kNone:
      return "none";
    case RotaryScaling::Kind::kDefault:
      break;
  }
  return "default";
}

std::string RotaryScaling::text() const {
  std::string text = std::string("{ kind = \"") + rotary_kind_name(kind) + "\"";
  const auto add = [&](const char* name, double value) {
    text += std::string(", ") + name + " = " + toml_number(value);
  };
  if (kind != Kind::kDefault && kind != Kind::kNone) add("factor", factor);
  if (kind == Kind::kLlama3 || kind == Kind::kYarn) add("original_context", original_context);
  if (kind == Kind::kLlama3) {
    add("low_freq_factor", low_freq_factor);
    add("high_freq_factor", high_freq_factor);
  }
  if (kind == Kind::kYarn) {
    add("beta_fast", beta_fast);
    add("beta_slow", beta_slow);
    add("attention_factor", attention_factor);
    text += std::string(", truncate = ") + (truncate ? "true" : "false");
  }
  return text + " }";
}

double RotarySpec::attention_factor() const {
  if (scaling.kind != RotaryScaling::Kind::kYarn) return 1;
  if (scaling.attention_factor > 0) return scaling.attention_factor;
  return scaling.factor <= 1 ? 1 : 0.1 * std::log(scaling.factor) + 1;
}

std::string RotarySpec::text() const {
  return std::to_string(head_dim) + " " + toml_number(theta) + " " + scaling.text() + (fp32 ? " fp32" : " fp64");
}

void validate(const RotaryScaling& s, const std::string& where) {
  const auto require = [&](bool ok, const std::string& message) {
    if (!ok) throw Error(ErrorKind::kUsage, "config", where + ": " + message);
  };
  const auto at_least_one = [&](double value, const char* name) {
    require(std::isfinite(value) && value >= 1,
            std::string(name) + " must be at least 1, but is " + toml_number(value));
  };
  if (s.kind == RotaryScaling::Kind::kDefault || s.kind == RotaryScaling::Kind::kNone) return;
  at_least_one(s.factor, "factor");
  if (s.kind == RotaryScaling::Kind::kLinear) return;
  at_least_one(s.original_context, "original_context, the positions before the extension,");
  if (s.kind == RotaryScaling::Kind::kLlama3) {
    require(s.low_freq_factor > 0 && s.high_freq_factor > s.low_freq_factor && std::isfinite(s.high_freq_factor),
            "high_freq_factor must be above low_freq_factor and both above 0, but they are " +
                toml_number(s.high_freq_factor) + " and " + toml_number(s.low_freq_factor));
    return;
  }
  require(s.beta_slow > 0 && s.beta_fast > s.beta_slow && std::isfinite(s.beta_fast),
          "beta_fast must be above beta_slow and both above 0, but they are " + toml_number(s.beta_fast) + " and " +
              toml_number(s.beta_slow));
  require(s.attention_factor >= 0 && std::isfinite(s.attention_factor),
          "attention_factor must not be negative, but is " + toml_number(s.attention_factor));
}

}  // namespace annulus
