// Shows what `annulus evaluate` measured: as a table for a terminal, as JSON, and as pictures for a paper. Callers
// write the texts to files (common/files.h). Needs no LibTorch. Thread safe.
#pragma once

#include <string>
#include <vector>

#include "runtime/evaluation/results.h"

namespace annulus {

// A table of at most a few dozen lines: of each source loss, perplexity and bits per byte with 95 % intervals, and loss
// and perplexity by position in buckets that double, in the row and in the document; of each task a grid of exact
// matches in percent, lengths downwards and depths across; what it cost. Ends with a newline. What was not measured, or
// has no targets or trials, is "-".
std::string evaluation_table(const EvaluationResults& results);

// One JSON object with all numbers to the last digit. Keys, always present, in this order:
//   format            "annulus-evaluation-1"
//   version           of the program
//   model, step, ranks, context, layout, dtype
//                     as in EvaluationResults; step is null for a folder in Hugging Face's layout
//   sources           for each: name, rows, documents; `all`, `doubling`, `even`, `document_doubling`, `document_even`:
//                     a bucket, and lists of buckets; bits_per_byte (null: tokens have no bytes)
//   tasks             for each cell: task, length, depth (0 to 1, null: the task has none), trials, exact, accuracy
//                     (exact / trials), tokens, right, token_accuracy (right / tokens), nats, generated (0 to 1, null:
//                     nothing was decoded)
//   seconds, cpu_seconds, forward_tokens, stopped, near_ties
// A bucket has begin, end, targets, nats (their sum), loss (nats / targets), perplexity (exp(loss)) and error (the half
// width of the loss's 95 % interval, null: not computed). A number that JSON cannot write (not finite; a ratio with 0
// below) is null.
std::string evaluation_json(const EvaluationResults& results);

// Reads what evaluation_json() wrote; `source` names it in errors. Derived numbers (loss, perplexity, accuracies) and
// unknown keys are ignored; numbers that are null because they were not finite become NaN. Raises Error(kInput) for
// anything else.
EvaluationResults results_of_json(const std::string& text, const std::string& source = "results of `annulus evaluate`");

// Results that share a picture with others, such as those before and after training.
struct LabelledResults {
  std::string label;  // "" in a picture of these alone
  EvaluationResults results;
};

enum class PositionIn { kRow, kDocument };

// An SVG picture of perplexity against position, with a line for each source of each run that has targets, and vertical
// lines where training's rows ended. A bucket that doubles is drawn at its end: the point at 1,024 is the mean of
// positions 513 to 1,024, counted from 1. Bands are 95 % intervals, where they are known.
std::string perplexity_svg(const std::vector<LabelledResults>& runs, PositionIn where = PositionIn::kRow);

// What a cell of a task's picture shows: the share of trials that match exactly, or of strings that decoding found.
enum class TaskScore { kExact, kGenerated };

// The names of the tasks that were evaluated, each once, in the order of the cells.
std::vector<std::string> evaluated_tasks(const EvaluationResults& results);

// An SVG heat map of a task over lengths (across) and depths (downwards; one row for a task without depths).
std::string task_svg(const LabelledResults& run, const std::string& task, TaskScore score = TaskScore::kExact);

}  // namespace annulus
