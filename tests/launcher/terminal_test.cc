// Tests how the launcher merges the output of several ranks on its terminal, and how it splits lines.
#include "launcher/launch/terminal.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <vector>

namespace annulus::terminal_test {
namespace {

// Captures what is written to a Terminal whose two streams are pipes.
class Pipes {
 public:
  Pipes() {
    EXPECT_EQ(pipe(out_.data()), 0);
    EXPECT_EQ(pipe(err_.data()), 0);
  }
  ~Pipes() {
    for (int fd : {out_[0], out_[1], err_[0], err_[1]}) close(fd);
  }
  Terminal terminal() { return Terminal(out_[1], err_[1]); }
  std::string out() { return take(out_[0]); }
  std::string err() { return take(err_[0]); }

 private:
  static std::string take(int fd) {
    std::string text(4096, '\0');
    text.resize(static_cast<size_t>(std::max<ssize_t>(0, read(fd, text.data(), text.size()))));
    return text;
  }
  std::array<int, 2> out_{}, err_{};
};

TEST(Terminal, SeparatesLinesFromRawOutput) {
  Pipes pipes;
  Terminal terminal = pipes.terminal();
  terminal.write_raw(Terminal::kOut, "step 1");
  terminal.write_line(Terminal::kOut, "[rank 1] hello");
  terminal.write_raw(Terminal::kOut, "step 2\n");
  terminal.write_line(Terminal::kOut, "[rank 2] hello");
  terminal.write_line(Terminal::kErr, "elsewhere");  // standard output's incomplete line is in another pipe
  EXPECT_EQ(pipes.out(), "step 1\n[rank 1] hello\nstep 2\n[rank 2] hello\n");
  EXPECT_EQ(pipes.err(), "elsewhere\n");
  EXPECT_EQ(terminal.error(), 0);
}

TEST(Terminal, ReportsLostOutput) {
  const int full = open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  Terminal terminal(full, STDERR_FILENO);
  terminal.write_line(Terminal::kOut, "lost");
  EXPECT_EQ(terminal.error(), ENOSPC);
  close(full);
  int outside = -1, inside = -1;
  ASSERT_EQ(openpty(&outside, &inside, nullptr, nullptr, nullptr), 0);
  Terminal hung_up(inside, inside);
  close(outside);
  hung_up.write_line(Terminal::kOut, "nobody reads it");
  EXPECT_EQ(hung_up.error(), EPIPE);
  close(inside);
}

// Only a terminal that understands escape sequences can erase a line.
TEST(Terminal, ErasesLiveLineWhereTheTerminalCan) {
  for (const auto& [term, between] :
       std::vector<std::pair<std::string, std::string>>{{"xterm", "\r\x1b[K"}, {"dumb", "\n"}, {"", "\n"}}) {
    setenv("TERM", term.c_str(), 1);
    int outside = -1, inside = -1;
    ASSERT_EQ(openpty(&outside, &inside, nullptr, nullptr, nullptr), 0);
    termios plain{};
    tcgetattr(inside, &plain);
    cfmakeraw(&plain);  // so that the terminal does not turn "\n" into "\r\n"
    tcsetattr(inside, TCSANOW, &plain);
    Terminal terminal(inside, inside);
    terminal.write_raw(Terminal::kOut, "\rstep 1");
    terminal.write_line(Terminal::kErr, "hello");
    close(inside);
    // One read may give only what was written first, because the kernel passes it on by and by; at the end it fails.
    std::string text;
    std::array<char, 4096> part{};
    for (ssize_t n = 0; (n = read(outside, part.data(), part.size())) > 0;)
      text.append(part.data(), static_cast<size_t>(n));
    EXPECT_EQ(text, "\rstep 1" + between + "hello\n") << term;
    close(outside);
  }
}

TEST(Terminal, SplitsLines) {
  LineSplitter splitter;
  std::vector<std::string> lines;
  const auto sink = [&](std::string_view line, bool replaced) {
    lines.push_back((replaced ? "live:" : "line:") + std::string(line));
  };
  splitter.feed("a\nb", sink);
  splitter.feed("c\n\nstep 1\rstep 2\rstep 3", sink);
  splitter.feed("\r\nend", sink);
  splitter.finish(sink);
  splitter.finish(sink);
  EXPECT_EQ(lines, (std::vector<std::string>{"line:a", "line:bc", "line:", "live:step 1", "live:step 2", "live:step 3",
                                             "line:end"}));
}

TEST(Terminal, CutsEndlessLines) {
  LineSplitter splitter;
  size_t bytes = 0, pieces = 0;
  const auto sink = [&](std::string_view line, bool) {
    bytes += line.size();
    ++pieces;
  };
  for (int i = 0; i < 100; ++i) splitter.feed(std::string(1000, 'x'), sink);
  splitter.finish(sink);
  EXPECT_EQ(bytes, 100'000u);
  EXPECT_GT(pieces, 3u);
}

}  // namespace
}  // namespace annulus::terminal_test
