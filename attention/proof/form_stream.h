// Parses the JSON form of a plan in such a way that only one rank's part is in memory at a time. Used by
// plan_form_reader.cc alone.
#pragma once

#include <cstddef>
#include <functional>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>

namespace annulus {

struct FormPieces {
  // Takes the object's members that stand before "programs".
  std::function<void(const nlohmann::json& before)> begin;
  // Takes one item of "programs" after the other.
  std::function<void(const nlohmann::json& program, size_t rank)> program;
  // Is called before the parsed values would take so many bytes, a few thousand values apart; raises an error if that
  // is too much.
  std::function<void(double bytes)> require_memory;
};

// Parses the input to its end. Returns the whole object without the items of "programs"; a value that is no object is
// returned as it is. Raises Error(kInput), which names the source, if it is not JSON, is cut off, has a name twice in
// an object, a number beyond a double's, or too many lists and objects within each other, and what `pieces` raise.
nlohmann::json stream_form(std::istream& in, const std::string& source, const FormPieces& pieces);

}  // namespace annulus
