// Tests of runtime/tasks/task.h: names, what is refused, and where an answer begins. What prompts contain is
// checked by tasks_test.py, against definitions of its own.
#include "runtime/tasks/task.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::task_test {
namespace {

std::vector<int64_t> bytes_of(const std::string& text) {
  std::vector<int64_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string text_of(const std::vector<int64_t>& ids, int64_t begin = 0) {
  std::string text;
  for (size_t i = static_cast<size_t>(begin); i < ids.size(); ++i) text += static_cast<char>(ids[i]);
  return text;
}

TaskSettings settings_of(const std::string& name, int64_t length) {
  TaskSettings settings;
  settings.name = name;
  settings.length = length;
  if (is_text_task(name)) settings.encode = bytes_of;
  return settings;
}

TEST(Task, NamesStandForTasks) {
  EXPECT_EQ(tasks_of("kv"), std::vector<std::string>{"kv"});
  EXPECT_EQ(tasks_of("ruler"), (std::vector<std::string>{"niah_single_1", "niah_single_2", "niah_single_3",
                                                         "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
                                                         "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"}));
  for (const std::string& name : task_names()) EXPECT_EQ(tasks_of(name), std::vector<std::string>{name});
  EXPECT_EQ(task_names().size(), 4 + tasks_of("ruler").size());
  expect_error(ErrorKind::kUsage, {"unknown task \"niah_multkey_1\"", "did you mean \"niah_multikey_1\"?"},
               [] { tasks_of("niah_multkey_1"); });
  expect_error(ErrorKind::kUsage, {"unknown task \"rulr\"", "did you mean \"ruler\"?"}, [] { tasks_of("rulr"); });
  expect_error(ErrorKind::kUsage, {"unknown task \"ruler\""}, [] { make_prompt(settings_of("ruler", 100), 0); });
}

TEST(Task, SomeHaveADepthAndSomeAreText) {
  for (const std::string& name : task_names()) {
    EXPECT_EQ(is_text_task(name), name != "copy" && name != "induction" && name != "kv") << name;
    EXPECT_EQ(has_depth(name), name == "needle" || name == "induction" || name == "kv") << name;
  }
}

TEST(Task, DecodedTextsAreScoredByTheShareOfAnswersThatTheyHold) {
  const std::vector<std::string> answers = {"VQXTB", "4821937", "apple"};
  EXPECT_EQ(share_found(answers, " vqxtb, then Apple and 4821937."), 1) << "any order, and any case";
  EXPECT_EQ(share_found(answers, "4821937 4821937"), 1.0 / 3) << "each counts once";
  EXPECT_EQ(share_found(answers, "pineAPPLEs: 4821937"), 2.0 / 3) << "also inside other words";
  EXPECT_EQ(share_found(answers, "VQXT B, 482193, app-le"), 0);
  EXPECT_EQ(share_found(answers, ""), 0);
  EXPECT_EQ(share_found({"aPPle"}, "An APPLE"), 1);
}

TEST(Task, RefusesALengthThatIsTooShortAndTakesTheOneItNames) {
  for (const std::string& name : task_names()) {
    int64_t needed = 0;
    for (int tries = 0; tries < 2 && needed < 1000000; ++tries) {
      // The second time with what was asked for, less one.
      const int64_t length = tries == 0 ? 1 : needed - 1;
      const std::string text = error_text(ErrorKind::kUsage, [&] { make_prompt(settings_of(name, length), 3); });
      ASSERT_TRUE(text.starts_with("[task] " + name + " needs at least ")) << text;
      std::string digits;
      for (const char c : text.substr(0, text.find(" token"))) {
        if (c == ' ') digits.clear();
        if (c >= '0' && c <= '9') digits += c;
      }
      needed = std::stoll(digits);
    }
    const TaskPrompt prompt = make_prompt(settings_of(name, needed), 3);
    EXPECT_EQ(prompt.answer + prompt.room, needed) << name;
  }
}

TEST(Task, RefusesWhatItCannotBeMadeOf) {
  for (const double depth : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    for (const std::string& name : task_names()) {
      TaskSettings settings = settings_of(name, 4000);
      settings.depth = depth;
      if (!has_depth(name)) {
        EXPECT_NO_THROW(make_prompt(settings, 0)) << name;
        continue;
      }
      expect_error(ErrorKind::kUsage, {name + ": expected a depth from 0"}, [&] { make_prompt(settings, 0); });
    }
  }
  for (const std::string& name : task_names()) {
    TaskSettings settings = settings_of(name, 4000);
    settings.encode = nullptr;
    settings.vocab = 5;
    expect_error(ErrorKind::kUsage,
                 {name, is_text_task(name) ? "needs a tokenizer" : "a vocabulary of at least 6 ids, got 5"},
                 [&] { make_prompt(settings, 0); });
  }
  for (const int64_t pairs : {-1, 1, 8193}) {
    TaskSettings settings = settings_of("kv", 4000);
    settings.pairs = pairs;
    expect_error(ErrorKind::kUsage, {"kv: expected 2 to 512 pairs"}, [&] { make_prompt(settings, 0); });
  }
  for (const char* needle : {"no {key}", "no {value}", "{value} before {key}", "{key} twice {key} {value}", ""}) {
    TaskSettings settings = settings_of("needle", 4000);
    settings.needles = {"A {key} is {value}.", needle};
    // Whichever needle the prompt would have.
    expect_error(ErrorKind::kInput, {"one {key}, and one {value} after it"}, [&] { make_prompt(settings, 0); });
  }
  TaskSettings settings = settings_of("niah_single_2", 4000);
  settings.haystack = " \n\t";
  expect_error(ErrorKind::kInput, {"white space alone"}, [&] { make_prompt(settings, 0); });
}

// A tokenizer that joins a word to the spaces and letters before it: the answer begins with the token that differs.
TEST(Task, AnAnswerBeginsWithTheFirstTokenThatItChanges) {
  TaskSettings settings = settings_of("needle", 600);
  settings.needles = {"The code of {key} is x{value}."};
  const TaskPrompt bytes = make_prompt(settings, 0);
  EXPECT_EQ(text_of(bytes.tokens, bytes.answer), bytes.answers.at(0));
  EXPECT_TRUE(text_of(bytes.tokens).ends_with(" is x" + bytes.answers[0]));

  settings.encode = [](const std::string& text) {  // a token a word, its length; and a beginning
    std::vector<int64_t> ids = {-1};
    int64_t letters = 0;
    for (const char c : text) {
      if (c == ' ') ids.push_back(std::exchange(letters, 0));
      letters += c != ' ';
    }
    ids.push_back(letters);
    return ids;
  };
  const TaskPrompt words = make_prompt(settings, 0);
  EXPECT_EQ(words.tokens.front(), -1);
  EXPECT_EQ(words.answer, static_cast<int64_t>(words.tokens.size()) - 1);
  EXPECT_EQ(words.tokens.back(), 8) << "x and 7 digits";

  settings.encode = [](const std::string& text) {  // a tokenizer that drops digits
    std::vector<int64_t> ids;
    for (const char c : text) {
      if (c < '0' || c > '9') ids.push_back(c);
    }
    return ids;
  };
  expect_error(ErrorKind::kInput, {"expected token ids for the answer"}, [&] { make_prompt(settings, 0); });
}

// Tokenizing a long text is slow, so the haystack's size is found in few attempts.
TEST(Task, FindsTheSizeOfALongHaystackInFewAttempts) {
  for (const std::string& name : task_names()) {
    if (!is_text_task(name)) continue;
    TaskSettings settings = settings_of(name, 200000);
    int64_t encoded = 0;
    settings.encode = [&](const std::string& text) {
      encoded += static_cast<int64_t>(text.size());
      return bytes_of(text);
    };
    const TaskPrompt prompt = make_prompt(settings, 0);
    EXPECT_LE(prompt.answer + prompt.room, 200000);
    EXPECT_LE(encoded, 12 * 200000) << name << ": bisection alone takes more";
  }
}

}  // namespace
}  // namespace annulus::task_test
