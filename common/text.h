// Formats values as text: exact and human-readable numbers, TOML strings, shell words, lists and shapes. Used by every
// layer. Configurations, checkpoints and plan requests contain these texts and are compared as text, so the formats
// must not change.
//
// Thread safety: functions without state.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace annulus {

// The shortest decimal number that reads back as the same bits, in any locale: "0.1", "1e+06", "3", "nan", "-inf". A
// NaN has no sign here and in the functions below, because its sign is meaningless and differs between processors.
std::string exact(double value);

// Formats as printf's %.*f: "3.14".
std::string rounded(double value, int digits);

// Formats with at most `digits` significant digits, as printf's %g: "3.14", "1e+39".
std::string significant(double value, int digits);

// Formats with `digits` digits after the point, as printf's %e: "3.1e-07".
std::string scientific(double value, int digits);

// Formats a count with its noun: "1 head", "2 heads", "2 switches", "2 queries".
std::string counted(int64_t n, std::string_view noun);
// Formats likewise, with commas in the number: "1 token", "1,048,576 tokens".
std::string with_commas(int64_t number, std::string_view noun);

// Formats a number of bytes in powers of 1000: "12.3 MB", "2.0 GB", "20.6 PB".
std::string bytes_text(double bytes);

// Parses a number of bytes: "141GB", "5 GB", "1.5e9", "16MiB", "1 TB". Units are powers of 1000, or of 1024 with an i.
// Returns nullopt if the text is not such a number, or if the number is less than 1 or at least 2^63.
std::optional<int64_t> bytes_of_text(std::string_view text);

// Formats as an exact TOML float: "1.0", "0.1", "1e-05".
std::string toml_number(double value);

// Formats as a TOML basic string, with its quotes: "a \"b\" \u000A".
std::string toml_string(std::string_view text);

// Joins the words into a POSIX shell command line; only words that need quotes are quoted.
std::string shell_quote(const std::vector<std::string>& words);

// Serializes words on one line for another process, and parses such a line. Words may contain any characters; the
// format is not that of a shell.
std::string words_to_line(const std::vector<std::string>& words);
std::vector<std::string> words_of_line(std::string_view line);

// Parses the whole text as a number. Returns nothing if it is none.
template <typename T>
std::optional<T> number_of_text(std::string_view text) {
  T value{};
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && rest == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

// Parses the number at the beginning of the text. Returns 0 if there is none.
template <typename T>
T leading_number(std::string_view text) {
  T value{};
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// Returns the text with small letters for the capital letters of ASCII.
std::string lower_case(std::string_view text);

// Returns an arbitrary name for tables and JSON: with '?' for bytes that are not printable ASCII, truncated to `most`
// characters, the last two "..", if it is longer.
std::string printable(std::string_view text, size_t most = 4096);

// Formats "1,234,567", "-123".
std::string with_commas(int64_t number);

// Returns "a,b,c" for `between` = ",".
std::string join(const std::vector<std::string>& parts, std::string_view between);

// Returns the parts between the separators: "a,,b" gives "a", "" and "b"; "" gives one empty part.
std::vector<std::string> split(std::string_view text, char separator);

// Returns "[a, b]". `write` returns the text of an item.
template <typename List, typename Write>
std::string list_text(const List& list, const Write& write) {
  std::string text = "[";
  for (const auto& item : list) {
    if (text.size() > 1) text += ", ";
    text += write(item);
  }
  return text + "]";
}

// Formats ascending numbers with runs joined: [0, 1, 2, 5] gives "0-2, 5".
template <typename List>
std::string ranges_text(const List& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (last > i) text += "-" + std::to_string(numbers[last]);
    i = last + 1;
  }
  return text;
}

// Formats integers, such as the sizes of a tensor: "[2, 3]".
std::string list_text(std::span<const int64_t> numbers);

}  // namespace annulus
