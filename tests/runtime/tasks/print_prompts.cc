// Prints the prompts of tasks for tasks_test.py, which checks them against definitions of its own.
//
// Reads one JSON object a line, the settings of a prompt: task, length, depth, vocab, seed, sample, pairs, haystack,
// needles, and `encode`: "bytes" (each byte is an id), "pieces", or none. Prints for each line an object with tokens,
// answer, room and answers, or with `error`, the text of the Error, and `kind`, its exit code.
//
// A piece is up to two spaces followed by one to five letters or digits of ASCII, or any other byte. Its id has its
// bytes as digits of base 256, so that a reader can turn ids into text; with the key "begin", this id comes first.
#include <cctype>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "runtime/tasks/task.h"

namespace annulus {
namespace {

std::vector<int64_t> encode_pieces(const std::string& text) {
  const auto is_word = [&](size_t i) {
    return i < text.size() && std::isalnum(static_cast<unsigned char>(text[i])) != 0;
  };
  std::vector<int64_t> ids;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < at + 2 && end < text.size() && text[end] == ' ') ++end;
    const size_t word = end;
    while (end < word + 5 && is_word(end)) ++end;
    if (end == word) end = at + 1;
    int64_t id = 0;
    for (; at < end; ++at) id = id * 256 + static_cast<unsigned char>(text[at]);
    ids.push_back(id);
  }
  return ids;
}

nlohmann::json prompt_of(const nlohmann::json& line) {
  TaskSettings settings;
  settings.name = line.at("task");
  settings.length = line.at("length");
  settings.depth = line.value("depth", settings.depth);
  settings.vocab = line.value("vocab", settings.vocab);
  settings.seed = line.value("seed", settings.seed);
  settings.pairs = line.value("pairs", settings.pairs);
  settings.haystack = line.value("haystack", settings.haystack);
  settings.needles = line.value("needles", settings.needles);
  const std::string encode = line.value("encode", "");
  std::vector<int64_t> begin;
  if (line.contains("begin")) begin.push_back(line["begin"]);
  if (!encode.empty()) {
    settings.encode = [=](const std::string& text) {
      std::vector<int64_t> ids = begin;
      if (encode == "pieces") {
        for (const int64_t id : encode_pieces(text)) ids.push_back(id);
      } else {
        for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
      }
      return ids;
    };
  }
  const TaskPrompt prompt = make_prompt(settings, line.value("sample", int64_t{0}));
  return {{"tokens", prompt.tokens}, {"answer", prompt.answer}, {"room", prompt.room}, {"answers", prompt.answers}};
}

}  // namespace
}  // namespace annulus

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    nlohmann::json result;
    try {
      result = annulus::prompt_of(nlohmann::json::parse(line));
    } catch (const annulus::Error& error) {
      result = {{"error", error.what()}, {"kind", error.exit_code()}};
    }
    std::cout << result << "\n";
  }
}
