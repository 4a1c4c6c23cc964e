// See sample_tokenizer.h.
#include "launcher/tokens/sample_tokenizer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "common/descriptor.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/files.h"
#include "launcher/tokens/tokenizer_process.h"

namespace annulus {

std::vector<int64_t> encode_prompt(const std::string& tokenizer, const std::string& text) {
  return TokenizerProcess(tokenizer).encode(text, /*beginning=*/true);
}

std::string make_token_table(const std::string& tokenizer) {
  const char* const folder = text_from_environment("TMPDIR");
  std::string path = std::string(folder == nullptr ? "/tmp" : folder) + "/annulus-table-XXXXXX";
  const Descriptor made(mkostemp(path.data(), O_CLOEXEC));
  if (made < 0) {
    throw Error(ErrorKind::kResource, "sample", path + " could not be made: " + writing_error_text(errno));
  }
  try {
    run_tokenizer({"table", "--tokenizer=" + tokenizer, "--output=" + path}, "makes the table of tokens");
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
  return path;
}

}  // namespace annulus
