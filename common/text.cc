// See text.h.
#include "common/text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

namespace annulus {
namespace {

double without_sign_of_nan(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

// `format` takes `digits` and the value.
std::string formatted(const char* format, int digits, double value) {
  std::array<char, 512> text{};  // the largest double has 309 digits before the point
  std::snprintf(text.data(), text.size(), format, std::min(digits, 100), without_sign_of_nan(value));
  return text.data();
}

std::string with_noun(const std::string& number, int64_t n, std::string_view noun) {
  std::string text = number + " " + std::string(noun);
  if (n == 1) return text;
  if (noun.ends_with("ch") || noun.ends_with("s")) return text + "es";
  const bool vowel_before =
      noun.size() > 1 && std::string_view("aeou").find(noun[noun.size() - 2]) != std::string::npos;
  if (!noun.ends_with("y") || vowel_before) return text + "s";  // "keys"
  text.pop_back();
  return text + "ies";
}

}  // namespace

std::string exact(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, without_sign_of_nan(value)).ptr};
}

std::string rounded(double value, int digits) { return formatted("%.*f", digits, value); }

std::string significant(double value, int digits) { return formatted("%.*g", digits, value); }

std::string scientific(double value, int digits) { return formatted("%.*e", digits, value); }

std::string counted(int64_t n, std::string_view noun) { return with_noun(std::to_string(n), n, noun); }

std::string with_commas(int64_t number, std::string_view noun) { return with_noun(with_commas(number), number, noun); }

std::string bytes_text(double bytes) {
  bytes /= 1e6;
  const char* unit = "MB";
  for (const char* larger : {"GB", "TB", "PB", "EB"}) {
    if (bytes < 1000) break;
    bytes /= 1000;
    unit = larger;
  }
  return rounded(bytes, 1) + " " + unit;
}

std::optional<int64_t> bytes_of_text(std::string_view text) {
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  std::string_view unit = text.substr(static_cast<size_t>(rest - text.data()));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (!unit.empty()) {
    if (!unit.ends_with('B') && !unit.ends_with('b')) return std::nullopt;
    unit.remove_suffix(1);
  }
  double factor = 1000;
  if (unit.ends_with('i')) {
    factor = 1024;
    unit.remove_suffix(1);
    if (unit.empty()) return std::nullopt;
  }
  if (!unit.empty()) {
    constexpr std::string_view kPrefixes = "KMGTPE";
    const size_t power = kPrefixes.find(static_cast<char>(std::toupper(static_cast<unsigned char>(unit[0]))));
    if (unit.size() != 1 || power == std::string_view::npos) return std::nullopt;
    for (size_t i = 0; i <= power; ++i) value *= factor;
  }
  if (!(value >= 1 && value < 0x1p63)) return std::nullopt;
  return static_cast<int64_t>(value);
}

std::string toml_string(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (code < 0x20 || code == 0x7f) {
      out += {'\\', 'u', '0', '0', kDigits[code >> 4], kDigits[code & 15]};
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string shell_quote(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) {
    if (!line.empty()) line += ' ';
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                            "0123456789@%+=:,./_-") == std::string::npos;
    if (plain) {
      line += word;
      continue;
    }
    line += '\'';
    for (const char c : word) {
      if (c == '\'') {
        line += "'\\''";
      } else {
        line += c;
      }
    }
    line += '\'';
  }
  return line;
}

// Each word ends with a space. In a word, "\\s" is a space, "\\n" a line feed, "\\r" a carriage return and "\\\\" a
// backslash.
std::string words_to_line(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& word : words) {
    for (const char c : word) {
      if (c == ' ') {
        line += "\\s";
      } else if (c == '\n') {
        line += "\\n";
      } else if (c == '\r') {
        line += "\\r";
      } else if (c == '\\') {
        line += "\\\\";
      } else {
        line += c;
      }
    }
    line += ' ';
  }
  return line;
}

std::vector<std::string> words_of_line(std::string_view line) {
  std::vector<std::string> words;
  std::string word;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == ' ') {
      words.push_back(std::move(word));
      word.clear();
    } else if (line[i] == '\\' && i + 1 < line.size()) {
      const char escaped = line[++i];
      word += escaped == 's' ? ' ' : escaped == 'n' ? '\n' : escaped == 'r' ? '\r' : escaped;
    } else {
      word += line[i];
    }
  }
  return words;
}

std::string printable(std::string_view text, size_t most) {
  std::string out;
  for (char c : text.substr(0, most + 1)) out += c >= ' ' && c <= '~' ? c : '?';
  return out.size() <= most ? out : out.substr(0, most - 2) + "..";
}

std::string toml_number(double value) {
  const std::string text = exact(value);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

std::string with_commas(int64_t number) {
  std::string text = std::to_string(number);
  const size_t first = number < 0 ? 1 : 0;
  for (size_t at = text.size(); at > first + 3;) text.insert(at -= 3, 1, ',');
  return text;
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

std::string join(const std::vector<std::string>& parts, std::string_view between) {
  std::string text;
  for (const std::string& part : parts) {
    if (&part != &parts.front()) text += between;
    text += part;
  }
  return text;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string list_text(std::span<const int64_t> numbers) {
  return list_text(numbers, [](int64_t number) { return std::to_string(number); });
}

}  // namespace annulus
