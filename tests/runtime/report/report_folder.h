// A folder for one case, removed at its end. Used by the tests of runtime/report/.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace annulus {

class ReportFolder : public ::testing::Test {
 protected:
  ReportFolder() {
    std::string name = ::testing::TempDir() + "/report-XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    run_ = name + "/tiny-001";
    std::filesystem::create_directories(run_);
  }
  ~ReportFolder() override { std::filesystem::remove_all(std::filesystem::path(run_).parent_path()); }

  void write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(run_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }
  std::string content(const std::string& name) {
    std::ifstream in(run_ + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  std::string run_;
};

}  // namespace annulus
