// dump_tokens FORMAT WIDTH BEGIN END FILE... prints each document of a source on a line, its ids separated by spaces.
// independent_writers_test.py runs it.
#include <cstdlib>
#include <iostream>
#include <vector>

#include "common/error.h"
#include "data/shards/corpus.h"

int main(int argc, char** argv) {
  annulus::SourceConfig source;
  if (argc < 6) return 2;
  source.format = argv[1];
  source.width = std::atoll(argv[2]);
  source.begin = std::atoll(argv[3]);
  source.end = std::atoll(argv[4]);
  source.files.assign(argv + 5, argv + argc);
  try {
    const annulus::Corpus corpus(source);
    std::vector<int64_t> ids;
    corpus.visit_documents(false, [&](int64_t begin, int64_t length, uint64_t) {
      ids.resize(static_cast<size_t>(length));
      corpus.read(begin, length, ids.data());
      for (size_t i = 0; i < ids.size(); ++i) std::cout << (i == 0 ? "" : " ") << ids[i];
      std::cout << "\n";
    });
  } catch (const annulus::Error& error) {
    std::cerr << error.what() << std::endl;
    return error.exit_code();
  }
}
