// See program.h.
#include "launcher/program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "attention/execution/cudnn_workaround.h"
#include "comm/agreement.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/bootstrap/launch_info.h"
#include "comm/following_error.h"
#include "comm/hosts.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/files.h"
#include "common/logging/log.h"
#include "common/logging/log_setup.h"
#include "common/logging/logger.h"
#include "common/terminal.h"
#include "common/text.h"
#include "common/trace/last_operations.h"
#include "common/trace/recorder.h"
#include "launcher/command_line.h"
#include "launcher/help.h"
#include "launcher/launch/rank.h"
#include "launcher/launch/rank_place.h"
#include "launcher/network/network.h"
#include "launcher/rank_locations.h"
#include "launcher/subcommand.h"
#include "launcher/threads.h"
#include "memory/freed_memory.h"
#include "memory/pool/pool.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

// Settles what this process inherits, before any file is opened and any thread is started. Processes that it starts,
// such as mpirun and the ranks, inherit it in turn.
void prepare_process() {
  // A standard stream that is closed leads to /dev/null. Otherwise the next file that is opened would get its number,
  // and what is meant for the stream would be written into the file. open() takes the lowest number that is free.
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0 && errno == EBADF) open("/dev/null", O_RDWR);
  }
  // A write beyond the limit on the size of files (ulimit -f) fails with an error, which names the file, instead of
  // ending the process.
  signal(SIGXFSZ, SIG_IGN);
  // A parent that ignores its children passes that on, and mpirun's exit code would be lost.
  signal(SIGCHLD, SIG_DFL);
}

std::string overview() {
  std::string text =
      "annulus: exact attention over sequences too long for one device\n\n"
      "  annulus COMMAND [OPTIONS]\n";
  const int columns = terminal_columns(STDOUT_FILENO);
  const auto add = [&](std::string_view name, std::string_view help) {
    text += help_entry(std::string(name), help, /*first=*/14, columns);
  };
  const SubcommandEntry* before = nullptr;
  for (const SubcommandEntry& entry : subcommands()) {
    if (entry.hidden) continue;
    if (!before || entry.group != before->group) {
      text += "\n" + (entry.group.empty() ? "" : std::string(entry.group) + ":\n");
    }
    before = &entry;
    add(entry.name, entry.help);
  }
  // Only the script of a clone has these commands; that of an installation does not.
  const char* const script = std::getenv("ANNULUS_SCRIPT");
  if (script != nullptr && fs::exists(fs::path(script).parent_path() / "tools" / "install.sh")) {
    text += "\nBuild and test (the script of a clone):\n";
    add("test", "run all tests, or the named targets");
    add("examples", "build and run examples/cpp, a workspace that uses annulus");
    add("torch", "build the library for PyTorch, and print where it is");
    add("wheel", "make the wheel `annulus` for PyTorch, and print where it is");
    add("docs", "build one site of the pages and of the references, and print where it is");
    add("install", "copy everything that is needed to run annulus to a folder, for other hosts");
    add("setup", "show what the build needs and what was found, and install what is missing");
  }
  return text + "\n`" + shell_quote({typed_program()}) +
         " COMMAND --help` shows the options of a subcommand and an example.\n"
         "Example:\n  " +
         shell_quote({typed_program(), "launch", "-n", "2", "train", "configs/quickstart.toml"}) + "\n";
}

// mpirun's users type "-np 4", which CLI11 would read as "-n p 4".
std::vector<std::string> with_long_np(std::vector<std::string> args) {
  for (std::string& arg : args) {
    if (arg == "-np") arg = "--np";
    for (const SubcommandEntry& entry : subcommands()) {
      if (arg == entry.name) return args;  // the following arguments belong to this subcommand
    }
  }
  return args;
}

// Before `fit CONFIG` was a subcommand it was `plan --model CONFIG`, which goes on for one version. Returns whether
// these are arguments of that form, and makes them those of `fit`.
bool take_former_fit(std::vector<std::string>& args) {
  constexpr std::string_view kModel = "--model";
  const auto of_model = std::find_if(args.begin(), args.end(), [&](const std::string& arg) {
    return arg == kModel || arg.starts_with(std::string(kModel) + "=");
  });
  if (of_model == args.end()) return false;
  if (*of_model == kModel) {
    args.erase(of_model);
  } else {
    of_model->erase(0, kModel.size() + 1);
  }
  return true;
}

int dispatch(std::vector<std::string> args, const LaunchInfo& info) {
  if (args.empty()) {
    std::fputs(overview().c_str(), stderr);
    return static_cast<int>(ErrorKind::kUsage);
  }
  std::string word = args.front();
  args.erase(args.begin());
  const bool former_fit = word == "plan" && take_former_fit(args);
  if (former_fit) word = "fit";
  if (word == "--help" || word == "-h" || word == "help") {
    if (word == "help" && !args.empty()) return dispatch({args.front(), "--help"}, info);
    std::fputs(overview().c_str(), stdout);
    return 0;
  }
  const SubcommandEntry& entry = find_subcommand(word == "--version" ? "version" : word);
  if (!entry.program.empty()) run_other_program(entry);
  if (entry.alone && info.launched && info.size > 1) {
    const Error error(ErrorKind::kUsage, "launcher",
                      "`" + std::string(entry.name) + "` runs in one process, but this is a job of " +
                          counted(info.size, "rank") + ": run it without mpirun or srun");
    if (info.rank != 0) throw ReportedError(error);
    throw error;
  }
  for (const char* const placing : {"launch", "topology", "doctor"}) {
    if (entry.name == placing) args = with_long_np(std::move(args));
  }
  ParsedSubcommand parsed = parse_subcommand(entry, args);
  if (parsed.subcommand == nullptr) {
    std::fputs(parsed.text.c_str(), stdout);
    return 0;
  }
  if (former_fit) {
    log_warn("launcher",
             "`plan --model CONFIG` is now `fit CONFIG`, with the same options; the old form goes on for one "
             "version");
  }
  log_debug("launcher", "process " + std::to_string(getpid()));
  if (entry.ranks && info.launched) {
    const Network network = network_from_environment(parsed.subcommand->network());
    const int context = parsed.subcommand->context(std::max({1, info.size, info.local_size}));
    const std::optional<int> threads =
        rank_place().take(info, {.context = context, .device = parsed.subcommand->device(), .hcas = network.hcas});
    set_job_network(network, info);
    set_threads(threads);
  } else {
    set_threads(std::nullopt);
  }
  keep_freed_memory();
  return parsed.subcommand->run();
}

// Checks that all that a subcommand printed was written, because a job whose output was lost on a full disk has failed.
// An earlier failed write counts as well: it sets stdout's error flag, and the last flush does not repeat it. Returns 0
// if everything was written, or 128 + SIGPIPE if the reader has closed the pipe; throws Error(kResource) otherwise.
int require_printed() {
  std::cout.flush();
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  const int reason = flushed ? 0 : errno;
  if (flushed && std::cout && std::ferror(stdout) == 0) return 0;
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  const bool gone = reason == EPIPE || (poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0);
  if (gone) return 128 + SIGPIPE;  // without a message, like a program that does not ignore the signal
  throw Error(ErrorKind::kResource, "output",
              std::string("standard output could not be written") +
                  (reason == 0 ? " in full; the disk that it goes to may be full" : ": " + writing_error_text(reason)));
}

// What a rank did before it lost another explains the loss, so the message names the file that has it.
Error with_last_operations(const Error& error) {
  const std::string file = save_last_operations(trace_rank(), error.message());
  if (file.empty()) return error;
  // The same text on all ranks, so that `launch` shows it once.
  return {error.kind(), error.module(),
          std::string(error.message()) + "; what the ranks did last is in " + folder_of(file) +
              "/last-operations-rank-R.json (docs/how-to/monitoring.md, Traces)"};
}

// Ends the process without running the destructors of static objects. Nothing needs them: whatever a subcommand began
// has ended, and each record of the log was flushed when it was written. LibTorch's alone, which take its table of
// operators apart, take 0.06 s, about a third of the shortest command.
[[noreturn]] void end_process(int code) {
  std::cout.flush();
  std::fflush(nullptr);
#ifdef ANNULUS_COVERAGE  // counts are written at a regular exit
  std::exit(code);
#else
  std::_Exit(code);
#endif
}

}  // namespace

void run_other_program(const SubcommandEntry& entry) {
  const std::string name(entry.program);
  std::error_code error;
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  std::vector<std::string> words = command_arguments();
  // The first place is that of an installation, the second that of Bazel's build.
  for (const fs::path& path : {here / name, here.parent_path() / "benchmarks" / "program" / name}) {
    if (access(path.c_str(), X_OK) != 0) continue;
    std::vector<char*> argv = {const_cast<char*>(path.c_str())};
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    setenv("ANNULUS_PROGRAM", typed_program().c_str(), 1);  // so that messages suggest what the user typed
    execv(path.c_str(), argv.data());
    throw Error(ErrorKind::kUnavailable, "launcher", path.string() + " cannot be run: " + std::strerror(errno));
  }
  throw Error(ErrorKind::kUnavailable, "launcher",
              "`" + std::string(entry.name) + "` is a separate program, " + name + ", which was not found beside " +
                  here.string() + "; ./annulus " + std::string(entry.name) + " builds it");
}

void run_program(int argc, char** argv) {
  prepare_process();
  LaunchInfo rank;
  int code = 0;
  std::optional<Error> error;
  bool said = false;          // whether one rank has printed the error for all
  std::optional<int> failed;  // the rank that failed, if this one only ends because of it
  try {
    remember_command_line(argc, argv);
    install_logger();
    if (const char* const log = text_from_environment("ANNULUS_LOG")) {
      set_log_settings(parse_log_settings(log, "ANNULUS_LOG"));
    }
    rank = launch_info();
    set_log_place(host_name(), rank.rank, std::max(1, rank.size));
    set_main_trace_thread(rank.rank);
    if (const char* const logs = text_from_environment("ANNULUS_LOG_DIR")) set_last_operations_folder(logs);
    attach_to_launcher(rank);
    if (avoid_wrong_gradients()) {
      log_warn_once_per_job(
          "launcher",
          "TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 is not heeded: with it, cuDNN's attention in LibTorch gives wrong "
          "gradients for batches of more than one row");
    }
    code = dispatch(command_arguments(), rank);
    if (const int lost = require_printed(); code == 0) code = lost;
    // All that took memory of the pool has ended, so this is a fault of annulus, though not of the run's results.
    const std::string left = Pool::in_use_of_process();
    if (!left.empty()) log_error("memory", "not returned to the pool at the end: " + left);
  } catch (const ReportedError& reported) {
    error = reported;
    said = true;
  } catch (const FollowingError& following) {
    error = following;
    failed = following.failed();
  } catch (...) {
    error = error_in_flight("");
  }
  if (error && error->kind() == ErrorKind::kComm) error = with_last_operations(*error);
  if (error) code = error->exit_code();  // docs/how-to/troubleshooting.md, "Exit codes"
  if (error && attached_to_launcher()) {
    if (!said)
      log_unshown(LogLevel::kError, error->module(), error->message());  // the launcher shows how the job ended
    if (failed) {
      report_following(*error, *failed);
    } else {
      report_error(*error, said);
    }
  } else if (attached_to_launcher()) {
    report_exit(code);
  } else if (error && !said) {
    log_error(*error);
  }
  end_process(code);
}

}  // namespace annulus
