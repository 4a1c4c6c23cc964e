// Decodes ids with a tokens.table, for table_test.py: each line of standard input holds ids, and each line of output
// the bytes of their text in hexadecimal.
#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>

#include "runtime/data/shards/token_table.h"

int main(int, char** argv) {
  try {
    const auto table = annulus::TokenTable::load(argv[1]);
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream ids(line);
      annulus::TokenText decoder(table);
      std::string text;
      for (int64_t id = 0; ids >> id;) decoder.append(id, text);
      for (const unsigned char byte : text) std::printf("%02x", byte);
      std::printf("\n");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
