// Tests what an error quotes of mpirun's output if a host does not start, with messages that Open MPI prints.
#include "launcher/hosts/survey_words.h"

#include <gtest/gtest.h>

namespace annulus::survey_words_test {
namespace {

constexpr const char* kNoDaemon = R"(
ORTE was unable to reliably start one or more daemons.
This usually is caused by:

* not finding the required libraries and/or binaries on
  one or more nodes. Please check your PATH and LD_LIBRARY_PATH
--------------------------------------------------------------------------
)";

TEST(WordsOfMpirun, PreferShellErrorsToMpirunText) {
  const std::string frame = std::string(74, '-');
  EXPECT_EQ(words_of_mpirun("ssh: Could not resolve hostname b: Name or service not known\r\n" + frame + kNoDaemon),
            "ssh: Could not resolve hostname b: Name or service not known");
  EXPECT_EQ(words_of_mpirun(frame + kNoDaemon), "ORTE was unable to reliably start one or more daemons.");
  EXPECT_EQ(words_of_mpirun(frame + R"(
mpirun was unable to launch the specified application as it could not access
or execute an executable:

Executable: /opt/annulus/bin/annulus
Node: Host2

while attempting to start process rank 1.
)" + frame + "\n"),
            "mpirun was unable to launch the specified application as it could not access or execute an executable: "
            "Executable: /opt/annulus/bin/annulus Node: Host2 while attempting to start process rank 1.");
  EXPECT_EQ(words_of_mpirun(""), "");
}

TEST(WordsOfMpirun, QuoteWarningsOnlyWithoutErrors) {
  const std::string frame = std::string(74, '-');
  const std::string group =
      "[host1:00249] plm:rsh: Warning: setpgid(255,255) failed in parent with errno=Permission denied(13)";
  const std::string added = "Warning: Permanently added 'host3' (ED25519) to the list of known hosts.";
  EXPECT_EQ(words_of_mpirun(group + "\n" + added + "\nbash: annulus: No such file or directory\n" + frame + kNoDaemon),
            "bash: annulus: No such file or directory");
  EXPECT_EQ(words_of_mpirun(group + "\n" + frame + kNoDaemon),
            "ORTE was unable to reliably start one or more daemons.");
  EXPECT_EQ(words_of_mpirun(added), added);
}

}  // namespace
}  // namespace annulus::survey_words_test
