// Tests the page that --help prints.
#include "launcher/help.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/text.h"

namespace annulus::help_test {
namespace {

std::string page(int columns) {
  CLI::App app{
      "train a model on text or on shards of tokens, on the ranks that launch has started, or alone, and validate",
      "annulus train"};
  app.formatter(std::make_shared<HelpPage>(columns));
  std::string text;
  int64_t number = 0;
  bool flag = false;
  app.add_option("CONFIG", text, "a TOML file, by default that of the run itself, in its folder with all the others");
  app.add_option("-n,--ranks", number, "the number of ranks")->check(CLI::PositiveNumber);
  app.add_option("--port", number, "a port")->check(CLI::Range(1, 65536));
  app.add_option("--device", text, "where to compute")->check(CLI::IsMember({"auto", "cpu"}));
  app.add_option("--resume", text, "continue a run")->expected(0, 1)->type_name("RUN");
  app.add_option("--log-level", text, "the least level")->type_name("LEVEL")->group("Log");
  app.add_flag("--even", flag,
               "refuse lengths that do not give every rank the same share of them, which layouts may do");
  app.add_subcommand("ring", "the seconds of a ring over those of one process, and its bytes, waiting and memory");
  app.footer(
      "Without a configuration it takes that of the folder which is named by --resume, and goes on\nfrom there.\n"
      "Example:\n  ./annulus train x.toml");
  return app.help();
}

TEST(HelpPage, WrapsToTheTerminal) {
  for (const int columns : {40, 60, 80, 100}) {
    for (const std::string& line : split(page(columns), '\n')) {
      if (line.find("Usage:") != std::string::npos) continue;
      EXPECT_LE(line.size(), static_cast<size_t>(columns)) << line;
    }
  }
  EXPECT_NE(page(60).find("\nnamed by --resume, and goes on from there.\nExample:\n  "), std::string::npos) << page(60);
  EXPECT_EQ(page(10), page(40));
  EXPECT_EQ(page(1000), page(100));
}

TEST(HelpPage, NamesKindsInWords) {
  const std::string text = page(80);
  EXPECT_NE(text.find("  -n, --ranks N             the number of ranks\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  --port N (1 to 65536)     a port\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  --device auto|cpu         where to compute\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  --resume [RUN]            continue a run\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  --even                    refuse lengths"), std::string::npos) << text;
  EXPECT_NE(text.find("\n\nLog:\n  --log-level LEVEL         the least level\n"), std::string::npos) << text;
  for (const char* const unwanted : {"INT", "TEXT", "POSITIVE", "\n\n\n", "[]"}) {
    EXPECT_EQ(text.find(unwanted), std::string::npos) << unwanted << text;
  }
  EXPECT_EQ(kind_in_words("FLOAT:FLOAT in [0 - 100]"), "N (0 to 100)");
  EXPECT_EQ(kind_in_words("UINT:NONNEGATIVE"), "N");
  EXPECT_EQ(kind_in_words("N,N,..."), "N,N,...");
}

}  // namespace
}  // namespace annulus::help_test
