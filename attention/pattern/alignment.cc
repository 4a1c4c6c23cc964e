// Implements query offsets with names (kBottomRight in pattern.h).
#include "attention/pattern/pattern.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {

int64_t parse_query_offset(std::string_view text, std::string_view where) {
  if (const std::optional<int64_t> number = number_of_text<int64_t>(text)) return *number;
  if (text == "top-left") return 0;
  if (text == "bottom-right") return kBottomRight;
  throw Error(ErrorKind::kUsage, "pattern",
              std::string(where) + ": expected a whole number, \"bottom-right\" or \"top-left\", got \"" +
                  std::string(text) + "\"" + suggestion(text, {"bottom-right", "top-left"}));
}

AttentionShape aligned(AttentionShape shape) {
  if (shape.query_offset == kBottomRight) shape.query_offset = shape.k_len - shape.q_len;
  return shape;
}

}  // namespace annulus
