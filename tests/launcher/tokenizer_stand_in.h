// A fixture for tests of launcher/tokens/: scripts in place of ./annulus, so that no tokenizer is needed. Used by
// sample_tokenizer_test.cc and tokenizer_process_test.cc; tests/python/tokenizer/ tests the real tokenizer.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

namespace annulus {

class TokenizerStandIn : public ::testing::Test {
 protected:
  // Makes `body` what `./annulus tokenizer WORDS...` runs from now on.
  void script(const std::string& body) {
    const std::string path = folder_ + "/tokenizer_script";
    std::ofstream(path) << "#!/bin/bash\n" << body;
    ASSERT_EQ(chmod(path.c_str(), 0755), 0);
    setenv("ANNULUS_SCRIPT", path.c_str(), 1);
  }
  std::string content(const std::string& name) {
    std::ifstream in(folder_ + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  const std::string folder_ = ::testing::TempDir();
};

}  // namespace annulus
