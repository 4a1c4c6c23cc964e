// The exception type of annulus and its exit codes. Used by every package.
//
// A message states what was expected, what came, where (rank, file, key) and what to do. what() begins with the module:
//   [plan] 12 query heads cannot be split over 8 ranks: heads must be a multiple of ranks; use 4 or 6 ranks
// The code that reports the error (launcher/program.cc) prepends the rank. No code parses what(): module() and
// message() return its parts, and wire() serializes an error for another rank or process.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace annulus {

// The kind of error, by which a caller or a shell script decides how to react. The value is the exit code of the
// process; docs/how-to/troubleshooting.md lists them.
enum class ErrorKind : int {
  kInternal = 1,     // a fault of annulus itself
  kUsage = 2,        // command line or configuration
  kInput = 3,        // a file is missing, malformed or truncated
  kPlan = 4,         // lengths, heads, layout, ranks or devices do not fit together
  kMismatch = 5,     // configurations, shapes or plans differ between ranks
  kComm = 6,         // a peer has died or missed a deadline
  kBusy = 7,         // the run folder is locked by a live process
  kResource = 8,     // memory, disk, permission
  kUnavailable = 9,  // this build or machine lacks a requested feature (CUDA, MPI, a kernel)
  kRegression = 10,  // a measured ratio exceeds its allowance (bench compare)
};

class Error : public std::runtime_error {
 public:
  // module: the part of the program, "plan", "comm", "config", ... `message` does not contain it.
  Error(ErrorKind kind, std::string_view module, std::string_view message);

  ErrorKind kind() const { return kind_; }
  int exit_code() const { return static_cast<int>(kind_); }
  // Return the parts of what(), "[module] message". They are valid as long as this error or a copy of it exists.
  std::string_view module() const;
  std::string_view message() const;

  // Serializes kind, module and message for another rank or process: "4 4 plan 12 query heads cannot ...", where the
  // second number is the length of the module. The message comes last, so that a truncated text can still be parsed.
  std::string wire() const;
  // Parses the result of wire(); nullopt if the text does not have that form. Safe for any text.
  static std::optional<Error> from_wire(std::string_view text);

 private:
  ErrorKind kind_;
  size_t module_size_;
};

}  // namespace annulus
