// annulus tokenize: turns text into shards of tokens. For that, this process is replaced by the Python program in
// python/tokenizer/, which uses the tokenizer's own library. --inspect and --verify show and check shards
// (launcher/tokens/inspect_tokens.h). This file has the options.
#include <CLI/CLI.hpp>

#include "launcher/python_programs/script.h"
#include "launcher/subcommand.h"
#include "launcher/tokens/inspect_tokens.h"
#include "launcher/tokens/tokenizer_process.h"

namespace annulus {
namespace {

class TokenizeSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    const auto making = [&](CLI::Option* option) { making_.push_back(option); };
    app.option_defaults()->group("Making shards");
    making(app.add_option("--tokenizer", tokenizer_, "a tokenizer.json or tokenizer.model, or a folder with one")
               ->type_name("PATH"));
    making(app.add_option("--input", input_,
                          "text files, JSONL (.jsonl, .ndjson, .json; also .gz, .zst) and Parquet; globs")
               ->type_name("GLOB"));
    making(app.add_option("--output", output_, "a folder for the shards; repeating the command continues in it")
               ->type_name("FOLDER"));
    making(app.add_option("--field", field_,
                          "the JSON field, or the Parquet column, that holds the text (default: text; with --loss "
                          "completion or assistant and with --chat: completion or messages)"));
    making(
        app.add_option(
               "--loss", loss_,
               "which tokens count as targets: all (default); completion: of lines of JSON, or rows of Parquet, with "
               "\"prompt\" and \"completion\", what follows the prompt; assistant: of those with \"messages\", the "
               "assistant's turns")
            ->check(CLI::IsMember({"all", "completion", "assistant"})));
    making(app.add_flag(
        "--chat", chat_,
        "fields hold messages, [{\"role\": ..., \"content\": ...}, ...]: apply the tokenizer's chat template "
        "(--loss assistant does)"));
    making(app.add_option("--prompt", prompt_, "with --loss completion: the field with the prompt (default: prompt)"));
    making(app.add_option("--weight", weight_,
                          "the field of a line, or of one of its messages, with the weight of its targets in the loss "
                          "(default with --loss completion or assistant: weight)"));
    making(
        app.add_flag("--trees", trees_,
                     "each line is a group of rollouts of one prompt: the field holds a list (default: completions; "
                     "with --loss all texts, or with --chat conversations). What they have in common is stored once, "
                     "as a prefix tree"));
    making(
        app.add_option("--group", group_,
                       "likewise of lines with a rollout each: those of a file with the same value of this field are "
                       "a group"));
    making(app.add_option("--kind", kind_,
                          "kind of the input files: auto (default; by their names), text, jsonl or parquet")
               ->check(CLI::IsMember({"auto", "text", "jsonl", "parquet"})));
    making(app.add_option("--bad-utf8", bad_utf8_, "refuse text that is not UTF-8 (default), or replace it by U+FFFD")
               ->check(CLI::IsMember({"refuse", "replace"})));
    making(app.add_flag("--no-special-tokens", no_special_tokens_,
                        "leave out the tokens that the tokenizer's own post-processor adds to a text"));
    making(
        app.add_flag("--specials-as-text", specials_as_text_,
                     "treat the name of a special token in a document as plain text; added tokens that the tokenizer "
                     "does not mark as special stay tokens, and are named at the end"));
    making(app.add_option("--shard-tokens", shard_tokens_,
                          "the most tokens of a shard; 0: one shard for all (default: 100000000)")
               ->check(CLI::NonNegativeNumber));
    making(app.add_option("--processes", processes_,
                          "number of processes that make tokens (default: one for each processor)")
               ->check(CLI::PositiveNumber));
    bench_option_ =
        app.add_flag("--bench", bench_,
                     "instead of --output: measure tokens per second relative to the library, on the same processors");
    app.option_defaults()->group("Looking at shards");
    inspect_option_ =
        app.add_option("--inspect", inspect_, "show what a shard, or a folder of them, holds, in any format")
            ->type_name("PATH");
    verify_option_ = app.add_option("--verify", verify_, "read a shard, or a folder of them, and check everything")
                         ->type_name("PATH");
    width_option_ =
        app.add_option("--width", width_, "with --inspect or --verify: bits of a token in a nanogpt file, 16 or 32")
            ->check(CLI::IsMember({16, 32}));
    app.option_defaults()->group("Format of shards, for both");
    app.add_option("--format", format_, "format of the shards: annulus (default), megatron, llmc or nanogpt")
        ->check(CLI::IsMember({"annulus", "megatron", "llmc", "nanogpt", "text"}));
    app.add_option("--begin", begin_, "a token that every document begins with: its id or its text");
    app.add_option("--end", end_, "a token that every document ends with: its id or its text");
    app.footer(
        "Example:\n"
        "  examples/tokens/make.sh /tmp/tokens\n"
        "  ./annulus tokenize --tokenizer /tmp/tokens/tokenizers/llama3 --input '/tmp/tokens/*.jsonl*' "
        "--output /tmp/tokens/shards\n"
        "  ./annulus tokenize --inspect /tmp/tokens/shards");
  }

  void check() override {
    const bool looking = inspect_option_->count() > 0 || verify_option_->count() > 0;
    if (!looking) {
      if (width_option_->count() > 0)
        refuse("--width is for --inspect and --verify; for new shards the size of the tokenizer decides: leave it out");
      if (format_ == "text") refuse("--format text is for --inspect and --verify");
      for (const auto& [name, empty] : {std::pair{"--tokenizer", tokenizer_.empty()}, {"--input", input_.empty()}}) {
        if (empty) refuse(std::string(name) + " is missing; it is needed unless --inspect or --verify is given");
      }
      const bool plain = (loss_.empty() || loss_ == "all") && !chat_ && prompt_.empty() && weight_.empty();
      if (bench_ && (!plain || trees_ || !group_.empty())) {
        refuse("--bench measures texts: leave --loss, --chat, --prompt, --weight, --trees and --group out");
      }
      if (!prompt_.empty() && loss_ != "completion") refuse("--prompt is for --loss completion");
      if (output_.empty() != bench_)
        refuse(bench_ ? "--bench keeps no shards: leave --output out" : "--output is missing");
      return;
    }
    if (inspect_option_->count() > 0 && verify_option_->count() > 0) refuse("give --inspect or --verify, not both");
    making_.push_back(bench_option_);
    for (const CLI::Option* option : making_) {
      if (option->count() > 0) refuse(option->get_name() + " is for making shards, not for --inspect and --verify");
    }
    source_.format = format_.empty() ? "auto" : format_;
    source_.width = width_;
    source_.begin = id("--begin", begin_);
    source_.end = id("--end", end_);
  }

  int run() override {
    if (inspect_option_->count() > 0) {
      inspect_tokens(inspect_, source_);
    } else if (verify_option_->count() > 0) {
      verify_tokens(verify_, source_);
    } else {
      become_tokenizer();
    }
    return 0;
  }

 private:
  [[noreturn]] static void refuse(const std::string& message) { refuse_usage("tokenize: " + message); }

  static int64_t id(const std::string& option, const std::string& text) {
    if (text.empty()) return -1;
    if (text.size() > 10 || text.find_first_not_of("0123456789") != std::string::npos) {
      refuse(option + " must be a token's id with --inspect and --verify, which read no tokenizer, got \"" + text +
             "\"");
    }
    return std::stoll(text);
  }

  [[noreturn]] void become_tokenizer() const {
    // Each value is joined by "=", so that none is read as an option.
    std::vector<std::string> words = {bench_ ? "bench" : "tokenize", "--tokenizer=" + tokenizer_};
    for (const std::string& glob : input_) words.push_back("--input=" + glob);
    const auto add = [&](const std::string& option, const std::string& value) {
      if (!value.empty()) words.push_back(option + "=" + value);
    };
    add("--output", output_);
    add("--format", format_);
    add("--field", field_);
    add("--loss", loss_);
    add("--prompt", prompt_);
    add("--weight", weight_);
    add("--group", group_);
    add("--kind", kind_);
    add("--begin", begin_);
    add("--end", end_);
    add("--bad-utf8", bad_utf8_);
    add("--shard-tokens", std::to_string(shard_tokens_));
    add("--processes", std::to_string(processes_));
    if (trees_) words.push_back("--trees");
    if (chat_) words.push_back("--chat");
    if (no_special_tokens_) words.push_back("--no-special-tokens");
    if (specials_as_text_) words.push_back("--specials-as-text");
    become(tokenizer_command(words), "tokenize");
  }

  std::string tokenizer_, output_, format_, field_, kind_, begin_, end_, bad_utf8_, inspect_, verify_;
  std::string loss_, prompt_, weight_, group_;
  std::vector<std::string> input_;
  bool no_special_tokens_ = false, specials_as_text_ = false, chat_ = false, trees_ = false, bench_ = false;
  int64_t shard_tokens_ = 100'000'000, processes_ = 0, width_ = 0;
  CLI::Option *inspect_option_ = nullptr, *verify_option_ = nullptr, *width_option_ = nullptr, *bench_option_ = nullptr;
  std::vector<const CLI::Option*> making_;  // options that make shards, refused with --inspect and --verify
  SourceConfig source_;
};

}  // namespace

std::unique_ptr<Subcommand> make_tokenize_subcommand() { return std::make_unique<TokenizeSubcommand>(); }

}  // namespace annulus
