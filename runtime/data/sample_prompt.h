// The prompt of the command that a run suggests when it is done: the beginning of a line of its own text. Used by
// runtime/training/trainer.cc.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/data/dataset.h"

namespace annulus {

// Returns a few words (at most 32 bytes of printable UTF-8) from the first row that is held out for validation, or else
// of step `step`. `table`: the path of the tokens.table of its ids. Returns "" if the row has no such words, or if the
// table or the row cannot be read, because a run that is done does not fail by this.
std::string sample_prompt(const Dataset& data, int64_t step, const std::string& table);

// Returns the words that a prompt may have at the beginning of the first line of `text` that has any. A line that
// `text` cuts off loses its last word.
std::string first_words(const std::string& text);

}  // namespace annulus
