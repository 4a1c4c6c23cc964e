// require_agreement() and agree_together(): which ranks differ in which fields. See agreement.h.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <span>

#include "comm/agreement.h"

#include "comm/checks.h"
#include "common/checksum.h"
#include "common/error.h"

namespace annulus {
namespace {

void append_text(std::string& out, std::string_view text) {
  out += std::to_string(text.size()) + ":";
  out += text;
}

std::string take_text(std::string_view& in) {
  const size_t colon = in.find(':');
  const size_t length = std::stoul(std::string(in.substr(0, colon)));
  std::string out(in.substr(colon + 1, length));
  in.remove_prefix(colon + 1 + length);
  return out;
}

std::string serialize(const std::vector<Field>& fields) {
  std::string out;
  for (const Field& field : fields) {
    append_text(out, field.name);
    append_text(out, field.value);
  }
  return out;
}

constexpr const char* kAbsent = "absent";

// The "key = value" lines of a text such as TOML as fields, named by section and key. Any other line is a field of its
// own with the value "present".
std::vector<Field> lines_of(const std::string& text) {
  std::vector<Field> out;
  std::string section;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) continue;
    line = line.substr(first, line.find_last_not_of(" \t\r") - first + 1);
    if (line.front() == '[' && line.back() == ']' && line.find('=') == std::string::npos) {
      section = line.substr(1, line.size() - 2) + ".";
      continue;
    }
    const size_t equals = line.find('=');
    if (equals == std::string::npos) {
      out.push_back({"line \"" + section + line + "\"", "present"});
      continue;
    }
    const auto trim = [](std::string s) {
      const size_t a = s.find_first_not_of(" \t");
      return a == std::string::npos ? std::string() : s.substr(a, s.find_last_not_of(" \t") - a + 1);
    };
    out.push_back({section + trim(line.substr(0, equals)), trim(line.substr(equals + 1))});
  }
  return out;
}

// Returns one sentence for each name whose values differ. by_rank has the fields of each rank. With `expand`, values of
// several lines are compared line by line.
std::vector<std::string> differences(const Communicator& comm, const std::vector<std::vector<Field>>& by_rank,
                                     bool expand) {
  std::vector<std::string> names;  // in order of appearance
  std::vector<std::map<std::string, std::string>> values(by_rank.size());
  for (size_t r = 0; r < by_rank.size(); ++r) {
    for (const Field& field : by_rank[r]) {
      if (std::find(names.begin(), names.end(), field.name) == names.end()) names.push_back(field.name);
      values[r][field.name] = field.value;
    }
  }
  std::vector<std::string> out;
  for (const std::string& name : names) {
    std::vector<std::string> of_rank;
    bool lines = false;
    for (const auto& map : values) {
      const auto it = map.find(name);
      of_rank.push_back(it == map.end() ? kAbsent : it->second);
      lines = lines || of_rank.back().find('\n') != std::string::npos;
    }
    if (std::all_of(of_rank.begin(), of_rank.end(), [&](const std::string& v) { return v == of_rank[0]; })) continue;
    if (!expand || !lines) {
      out.push_back(name + " " + comm_internal::describe_difference(comm, of_rank));
      continue;
    }
    std::vector<std::vector<Field>> inner;
    for (const std::string& text : of_rank) inner.push_back(lines_of(text));
    const std::vector<std::string> found = differences(comm, inner, false);
    // Texts that differ only in the order of lines or in white space still differ.
    if (found.empty()) out.push_back(name + " differs in the order or spacing of its lines");
    for (const std::string& sentence : found) out.push_back(name + ": " + sentence);
  }
  return out;
}

// Gathers the fields of all ranks (`mine` is this rank's, serialized) and raises what they differ in. Collective.
[[noreturn]] void raise_difference(Communicator& host, const std::string& mine, OpLabel label) {
  std::vector<std::vector<Field>> by_rank;
  for (const std::string& text : all_gather_text(host, mine, label)) {
    std::string_view rest = text;
    std::vector<Field> of_rank;
    while (!rest.empty()) {
      std::string name = take_text(rest);
      std::string value = take_text(rest);
      of_rank.push_back({std::move(name), std::move(value)});
    }
    by_rank.push_back(std::move(of_rank));
  }
  constexpr size_t kMaxSentences = 12;
  const std::vector<std::string> sentences = differences(host, by_rank, true);
  std::string message = "ranks disagree before " + comm_internal::where(label) + ": ";
  for (size_t i = 0; i < sentences.size(); ++i) {
    if (i == kMaxSentences) {
      message += "; and " + std::to_string(sentences.size() - i) + " more";
      break;
    }
    message += (i ? "; " : "") + sentences[i];
  }
  if (sentences.empty()) message += "the order of the fields is not the same on all ranks";
  throw Error(ErrorKind::kMismatch, "comm", message);
}

}  // namespace

Field backward_term(int64_t number) {
  return {"the call whose backward it is (every rank makes the backwards of the same calls in the same order)",
          "number " + std::to_string(number)};
}

void require_agreement(Communicator& comm, const std::vector<Field>& fields, OpLabel label) {
  agree_together(comm, label, [&] { return Terms{fields, {}}; });
}

std::vector<Terms::Numbers> agree_together(Communicator& comm, OpLabel label, const std::function<Terms()>& find) {
  if (comm.size() == 1) return {find().numbers};
  Terms terms;
  std::optional<Error> failure;
  try {
    terms = find();
  } catch (...) {  // also out of memory, or what LibTorch raises: the others must learn of it
    failure = error_in_flight(label.operation);
  }
  const std::string mine = serialize(terms.alike);
  const Digest hash = digest(mine.data(), mine.size());
  struct Word {
    int64_t failed, low, high;
    Terms::Numbers numbers;
  };
  constexpr int64_t kWords = sizeof(Word) / sizeof(int64_t);
  Communicator& host = comm.host();
  at::Tensor own = at::empty({kWords}, at::kLong), all = at::empty({host.size(), kWords}, at::kLong);
  *reinterpret_cast<Word*>(own.mutable_data_ptr<int64_t>()) = {failure.has_value(), static_cast<int64_t>(hash.low),
                                                               static_cast<int64_t>(hash.high), terms.numbers};
  host.all_gather(all, own, label);
  const std::span words(reinterpret_cast<const Word*>(all.const_data_ptr<int64_t>()), static_cast<size_t>(host.size()));
  if (std::any_of(words.begin(), words.end(), [](const Word& word) { return word.failed != 0; })) {
    const auto fail = [&] {
      if (failure) throw Error(*failure);
    };
    throw failure_of_any(host, label, fail).value();
  }
  const auto same = [&](const Word& word) { return word.low == words[0].low && word.high == words[0].high; };
  if (!std::all_of(words.begin(), words.end(), same)) raise_difference(host, mine, label);
  std::vector<Terms::Numbers> numbers;
  for (const Word& word : words) numbers.push_back(word.numbers);
  return numbers;
}

}  // namespace annulus
