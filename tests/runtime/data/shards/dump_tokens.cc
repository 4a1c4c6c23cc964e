// dump_tokens prints the documents of sources: for each line FORMAT, WIDTH, BEGIN, END, FILE... on standard input,
// whose words are separated by tabs, it prints each document of the source on a line, its ids separated by spaces, and
// at last a line "end", or one that begins with "error". independent_writers_test.py runs it.
#include <iostream>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/text.h"
#include "runtime/data/shards/corpus.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const std::vector<std::string> words = annulus::split(line, '\t');
    if (words.size() < 5) return 2;
    annulus::SourceConfig source;
    source.format = words[0];
    source.width = std::stoll(words[1]);
    source.begin = std::stoll(words[2]);
    source.end = std::stoll(words[3]);
    source.files.assign(words.begin() + 4, words.end());
    try {
      const annulus::Corpus corpus(source);
      std::vector<int64_t> ids;
      corpus.visit_documents(false, [&](int64_t begin, int64_t length, uint64_t) {
        ids.resize(static_cast<size_t>(length));
        corpus.read(begin, length, ids.data());
        for (size_t i = 0; i < ids.size(); ++i) std::cout << (i == 0 ? "" : " ") << ids[i];
        std::cout << "\n";
      });
      std::cout << "end" << std::endl;
    } catch (const annulus::Error& error) {
      std::cout << "error: " << error.what() << std::endl;
    }
  }
}
