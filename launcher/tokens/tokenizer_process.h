// Processes of a tokenizer's own library, which is written for Python (python/tokenizer/): one that stays and encodes
// as many texts as its caller has, and one that does something and ends. Used by the subcommands sample, evaluate and
// tokenize.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The words of `./annulus tokenizer WORDS...`. Throws Error(kUnavailable) as script_command() does
// (launcher/python_programs/script.h).
std::vector<std::string> tokenizer_command(const std::vector<std::string>& words);

class TokenizerChild;

// A process that loads a tokenizer once and then encodes one text at a time (python/tokenizer/prompt.py has the
// protocol). Not thread safe.
class TokenizerProcess {
 public:
  // Starts the process and returns while it loads the tokenizer. The first call of encode() waits for that, and reports
  // what is wrong with the tokenizer: a tokenizer.json or tokenizer.model, or a folder with one. Throws
  // Error(kUnavailable) as tokenizer_command() does, Error(kResource) if no process can be started.
  explicit TokenizerProcess(const std::string& tokenizer);
  // Ends the process.
  ~TokenizerProcess();

  // Returns the ids of a text in UTF-8. With `beginning` they are those of the beginning of a document: the tokens that
  // the tokenizer puts before a text come first, and for a folder of shards that `annulus tokenize` made the token that
  // its documents begin with. (sentencepiece puts none there.) Without it no token is added. For such a
  // folder, --specials-as-text applies to both.
  //
  // Returns {} if a signal has interrupted this process (common/interrupt.h), and from then on. After any error the
  // process has ended, and later calls throw the same error:
  // - ReportedError with the exit code of the process, which has printed what is wrong: kInput if there is
  //   no tokenizer, or the text is not UTF-8 or holds what the tokenizer cannot encode;
  // - Error(kResource) if a signal has ended the process, also since the last call;
  // - Error(kInternal) if it writes anything else than ids.
  std::vector<int64_t> encode(std::string_view text, bool beginning);

 private:
  std::unique_ptr<TokenizerChild> child_;  // null once the process has ended
  std::exception_ptr failure_;             // what ended it; null if that was an interruption
};

// Runs `./annulus tokenizer WORDS...` to its end. `what` completes "the process that ..." in messages. Throws as
// TokenizerProcess::encode() does; returns early if a signal has interrupted this process.
void run_tokenizer(const std::vector<std::string>& words, const std::string& what);

// Makes a new tokens.table (runtime/data/shards/token_table.h) in the folder for temporary files and returns its path.
// The caller must remove it. Throws as run_tokenizer() does.
std::string make_token_table(const std::string& tokenizer);

}  // namespace annulus
