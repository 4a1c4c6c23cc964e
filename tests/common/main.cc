// The main function of the test programs, which have the cases of a folder (bazel/test_unit.bzl). ANNULUS_TEST_SOURCES
// has names of source files, separated by spaces, whose cases are to run. Those of all files would not do in one
// process: some fork, and some start threads or count what the process has.
#include <fnmatch.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <set>
#include <sstream>
#include <string>

namespace annulus {
namespace {

bool any_matches(const std::string& patterns, const std::string& name) {
  std::istringstream stream(patterns);
  for (std::string pattern; std::getline(stream, pattern, ':');) {
    if (fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0) return true;
  }
  return false;
}

// GoogleTest's filter: patterns to run, and behind a minus those to leave out.
bool wanted(const std::string& filter, const std::string& name) {
  const size_t minus = filter.find('-');
  const std::string run = filter.substr(0, minus);
  return (run.empty() || any_matches(run, name)) &&
         (minus == std::string::npos || !any_matches(filter.substr(minus + 1), name));
}

// Narrows the filter to the cases of these files.
void keep_only(const std::string& sources) {
  std::istringstream stream(sources);
  std::set<std::string> files;
  for (std::string file; stream >> file;) files.insert(file);
  const std::string filter = GTEST_FLAG_GET(filter);
  std::string kept;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(j);
      const std::string name = std::string(suite.name()) + "." + test.name();
      if (files.count(std::filesystem::path(test.file()).filename()) > 0 && wanted(filter, name)) kept += name + ":";
    }
  }
  GTEST_FLAG_SET(filter, kept);
}

// As the program ends (launcher/program.cc): destructors of LibTorch's operators would take a quarter of the processor
// time of a process that does little else. Sanitizers watch them, and coverage is written by them.
[[noreturn]] void end_process(int code) {
  std::cout.flush();
  std::fflush(nullptr);
#if defined(ANNULUS_COVERAGE) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  std::exit(code);
#else
  std::_Exit(code);
#endif
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const char* const sources = std::getenv("ANNULUS_TEST_SOURCES");
  if (sources == nullptr) {
    std::cerr << "ANNULUS_TEST_SOURCES is not set; expected the files to run, for example mesh_test.cc" << std::endl;
    return 2;
  }
  annulus::keep_only(sources);
  annulus::end_process(RUN_ALL_TESTS());
}
