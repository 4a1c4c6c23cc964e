// How values are written as text, once for all rooms: exact numbers, numbers for people, strings of TOML, words of a
// shell, lists and shapes. What is written here lies in configurations, checkpoints and plans' requests and is compared
// as text: the forms stay.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The shortest decimal number that reads back as the same bits: "0.1", "1e+06", "3", "nan", "-inf". In any locale.
std::string exact(double value);

// A count with its noun, which takes an s but for one: "1 head", "2 heads", "2 switches".
std::string counted(int64_t n, std::string_view noun);

// A number of bytes for people, in powers of 1000: "12.3 MB", "2.0 GB", "20.6 PB".
std::string bytes_text(double bytes);

// A number of bytes as people type it: "141GB", "5 GB", "1.5e9", "16MiB", "1 TB"; units of 1000 and, with an i, of
// 1024. None where the text is no such number, or one that is not at least 1 and less than 2^63.
std::optional<int64_t> bytes_of_text(std::string_view text);

// With so many digits after the point: "3.14".
std::string rounded(double value, int digits);

// A float of TOML, exactly: "1.0", "0.1", "1e-05".
std::string toml_number(double value);

// A basic string of TOML with its quotes: "a \"b\" \u000A".
std::string toml_string(std::string_view text);

// Words as a POSIX shell reads them back; only those that need it are quoted.
std::string shell_quote(const std::vector<std::string>& words);

// Words on one line for another process to read, and back: any words, without regard to a shell's rules.
std::string words_to_line(const std::vector<std::string>& words);
std::vector<std::string> words_of_line(std::string_view line);

// For tables and JSON, of names that may be anything: '?' for what is not printable ASCII, and ".." where more than
// `most` characters were cut off.
std::string printable(std::string_view text, size_t most = 4096);

// "1,234,567", "-123".
std::string with_commas(int64_t number);

// "a,b,c" with `between` = ",".
std::string join(const std::vector<std::string>& parts, std::string_view between);

// What lies between the separators: of "a,,b" the parts "a", "" and "b"; of "" one empty part.
std::vector<std::string> split(std::string_view text, char separator);

// "[a, b]", where `write` makes a text of each item.
template <typename List, typename Write>
std::string list_text(const List& list, const Write& write) {
  std::string text = "[";
  for (const auto& item : list) {
    if (text.size() > 1) text += ", ";
    text += write(item);
  }
  return text + "]";
}

// Whole numbers, sizes of a tensor: "[2, 3]".
std::string list_text(std::span<const int64_t> numbers);

}  // namespace annulus
