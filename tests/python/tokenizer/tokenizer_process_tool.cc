// Encodes texts with one TokenizerProcess, for process_test.py: the arguments are a tokenizer and pairs of `beginning`
// or `bare` and the file of a text. Each line of output holds the ids of one. Ends with the exit code of an error.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "comm/bootstrap/bootstrap.h"
#include "common/error.h"
#include "launcher/tokens/tokenizer_process.h"

int main(int count, char** words) {
  try {
    annulus::TokenizerProcess process(words[1]);
    for (int i = 2; i + 1 < count; i += 2) {
      std::ifstream file(words[i + 1], std::ios::binary);
      const std::string text(std::istreambuf_iterator<char>(file), {});
      for (const int64_t id : process.encode(text, std::string_view(words[i]) == "beginning")) {
        std::printf("%lld ", static_cast<long long>(id));
      }
      std::printf("\n");
    }
  } catch (const annulus::ReportedError& error) {
    return error.exit_code();
  } catch (const annulus::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.exit_code();
  }
}
