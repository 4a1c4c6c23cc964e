// See survey_words.h.
#include "launcher/hosts/survey_words.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "common/text.h"
#include "launcher/hosts/sockets.h"

namespace annulus {

std::vector<std::string> texts_in(const CheckedJson& list) {
  constexpr size_t kMost = 65536;
  std::vector<std::string> texts;
  for (const CheckedJson& one : list.list(kMost)) texts.push_back(one.text(kLongestMessage));
  return texts;
}

std::string words_of_mpirun(std::string_view text) {
  std::vector<std::string> outside, inside, warnings;
  bool frame = false, told = false;
  for (std::string line : split(text, '\n')) {
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
    line.erase(0, std::min(line.find_first_not_of(" \t"), line.size()));
    if (line.starts_with("-----")) {
      frame = !frame;
      told = told || (!frame && !inside.empty());
    } else if (!line.empty() && !frame) {
      // Neither a host that ssh meets for the first time nor mpirun's lost race for a process group is why it failed.
      const bool warning = line.starts_with("Warning: ") || line.find("plm:rsh: Warning: ") != std::string::npos;
      (warning ? warnings : outside).push_back(line);
    } else if (!line.empty() && !told && !line.starts_with("This usually is caused by")) {
      inside.push_back(line);
      if (line.ends_with("daemons.")) told = true;  // a list of possible causes follows
    }
  }
  std::vector<std::string> words = !outside.empty() ? outside : !inside.empty() ? inside : warnings;
  words.resize(std::min<size_t>(words.size(), 6));
  return join(words, " ");
}

}  // namespace annulus
