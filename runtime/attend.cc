// See attend.h.
#include "runtime/attend.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/tensor.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include "attention/execution/attention.h"
#include "common/error.h"
#include "common/files.h"
#include "runtime/agreement.h"

namespace annulus {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void check_output(const AttendOptions& options) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(options.output, error) && !fs::is_regular_file(options.output, error)) {
    throw Error(ErrorKind::kUsage, "attend",
                "--output " + options.output +
                    (fs::is_directory(options.output, error) ? " is a folder" : " is no regular file") +
                    ": name a file to write");
  }
  if (fs::equivalent(options.input, options.output, error)) {
    throw Error(ErrorKind::kUsage, "attend", "--output and --input are the same file, " + options.input);
  }
  const std::string folder = folder_of(options.output);
  if (!fs::is_directory(folder, error)) {
    throw Error(ErrorKind::kResource, "attend",
                "the folder of --output " + options.output + " does not exist: mkdir -p " + folder);
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Error(ErrorKind::kResource, "attend",
                "--output " + options.output + " cannot be written: " + std::strerror(errno));
  }
}

// Reads the rows at `spans` (one after the other) of a tensor [B, S, heads, D]: only those, in few pieces.
at::Tensor read_rows(const std::string& path, const TensorInfo& info, const std::vector<Span>& spans) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error(ErrorKind::kInput, "attend", path + ": " + std::strerror(errno));
  const std::unique_ptr<const int, void (*)(const int*)> closer(&fd, [](const int* f) { close(*f); });
  int64_t rows = 0;
  for (const Span& span : spans) rows += span.count;
  const int64_t batch = info.shape[0], length = info.shape[1];
  at::Tensor tensor = at::empty({batch, rows, info.shape[2], info.shape[3]}, info.dtype);
  const int64_t row_bytes = info.shape[2] * info.shape[3] * static_cast<int64_t>(tensor.element_size());
  char* to = static_cast<char*>(tensor.data_ptr());
  const auto read = [&](int64_t first_row, int64_t count) {
    auto offset = static_cast<off_t>(info.offset) + first_row * row_bytes;
    for (int64_t left = count * row_bytes; left > 0;) {
      const ssize_t n = pread(fd, to, static_cast<size_t>(left), offset);
      if (n <= 0) {
        if (n < 0 && errno == EINTR) continue;
        throw Error(ErrorKind::kInput, "attend",
                    path + ", tensor \"" + info.name +
                        "\": " + (n < 0 ? std::strerror(errno) : "the file became shorter while it was read"));
      }
      to += n;
      offset += n;
      left -= n;
    }
  };
  for (int64_t b = 0; b < batch; ++b) {
    for (const Span& span : spans) {
      if (span.stride == 1) {
        read(b * length + span.begin, span.count);
      } else {
        for (int64_t i = 0; i < span.count; ++i) read(b * length + span.at(i), 1);
      }
    }
  }
  return tensor;
}

// The rank's part of dimension `dim` of every rank's `part`, put together on rank 0; undefined elsewhere. One peer
// after the other, so that rank 0 holds one part beside the whole.
at::Tensor gather(Communicator& world, const at::Tensor& part, const Layout& layout, int64_t dim) {
  const OpLabel label{"attend, gathering results", dim};
  if (world.rank() != 0) {
    world.exchange({{part.contiguous(), 0}}, {}, label)->wait();
    return {};
  }
  std::vector<int64_t> shape = part.sizes().vec();
  shape[static_cast<size_t>(dim)] = layout.length;
  at::Tensor whole = at::empty(shape, part.options());
  for (int rank = 0; rank < world.size(); ++rank) {
    std::vector<int64_t> positions = layout.positions(rank);
    at::Tensor piece = part;
    if (rank != 0) {
      shape[static_cast<size_t>(dim)] = static_cast<int64_t>(positions.size());
      piece = at::empty(shape, part.options());
      world.exchange({}, {{piece, rank}}, label)->wait();
    }
    const at::Tensor index =
        at::from_blob(positions.data(), {static_cast<int64_t>(positions.size())}, at::ScalarType::Long);
    whole.index_copy_(dim, index, piece);
  }
  return whole;
}

std::string amount(int64_t bytes) {
  char text[40];
  if (bytes < 10'000) {
    std::snprintf(text, sizeof text, "%lld bytes", static_cast<long long>(bytes));
  } else {
    std::snprintf(text, sizeof text, "%.2f MB", static_cast<double>(bytes) / 1e6);
  }
  return text;
}

}  // namespace

void check_options(const AttendOptions& options) {
  parse_pattern(options.pattern, "--pattern");
  parse_layout(options.layout, "--layout");
  parse_schedule(options.schedule, "--schedule");
  parse_kernel(options.kernel, "--kernel");
  if (options.scale && !(std::isfinite(*options.scale) && *options.scale != 0)) {
    throw Error(ErrorKind::kUsage, "attend", "--scale should be a finite number other than 0");
  }
  if (options.output.empty()) throw Error(ErrorKind::kUsage, "attend", "--output is empty: name a file to write");
}

AttendJob::AttendJob(const AttendOptions& options, int ranks)
    : options_(options), kernel_(parse_kernel(options.kernel, "--kernel")), file_([&] {
        check_options(options);  // what was typed wrong is said before what a file holds wrong
        request_.pattern = parse_pattern(options.pattern, "--pattern");
        request_.layout = parse_layout(options.layout, "--layout");
        request_.schedule = parse_schedule(options.schedule, "--schedule");
        check_output(options);
        return options.input;
      }()) {
  const TensorInfo* q = file_.find("q");
  const TensorInfo* k = file_.find("k");
  for (const char* name : {"q", "k", "v", "dout"}) {
    if ((options_.backward || std::strcmp(name, "dout") != 0) && file_.find(name) == nullptr) {
      std::string has;
      for (const TensorInfo& info : file_.tensors()) has += (has.empty() ? "" : ", ") + info.name;
      throw Error(ErrorKind::kInput, "attend",
                  options_.input + " has no tensor \"" + name + "\": needed are q, k, v" +
                      (options_.backward ? " and, with --backward, dout" : "") + "; it has " +
                      (has.empty() ? "none" : has));
    }
  }
  dtype_ = q->dtype;
  if (dtype_ != at::kFloat && dtype_ != at::kDouble && dtype_ != at::kBFloat16) {
    throw Error(ErrorKind::kInput, "attend",
                options_.input + ", tensor \"q\": dtype " + std::string(safetensors_dtype(dtype_)) +
                    " is none of F32, F64, BF16");
  }
  for (const TensorInfo* info : {q, k}) {
    if (info->shape.size() != 4) {
      throw Error(ErrorKind::kInput, "attend",
                  options_.input + ", tensor \"" + info->name + "\": shape " + shape_text(info->shape) +
                      " should be [batch, length, heads, head size]");
    }
  }
  const std::vector<int64_t>&qs = q->shape, &ks = k->shape;
  check_tensor("k", "[B, Sk, Hk, D] with q's B and D", {qs[0], ks[1], ks[2], qs[3]});
  check_tensor("v", "like k", ks);
  if (options_.backward) check_tensor("dout", "like q", qs);
  head_dim_ = qs[3];
  if (head_dim_ == 0) {
    throw Error(ErrorKind::kInput, "attend", options_.input + ": q has the head size 0, which should be at least 1");
  }

  request_.shape = {qs[0], qs[2], ks[2], qs[1], ks[1], options_.query_offset};
  request_.ranks = ranks;
  request_.even = options_.even;
  request_.uneven_lengths = options_.lengths;
  validate(request_);
}

void AttendJob::check_tensor(const char* name, const char* expected, const std::vector<int64_t>& shape) const {
  const TensorInfo& info = *file_.find(name);
  if (info.dtype != dtype_) {
    throw Error(ErrorKind::kInput, "attend",
                options_.input + ", tensor \"" + name + "\": dtype " + std::string(safetensors_dtype(info.dtype)) +
                    " should be q's, " + std::string(safetensors_dtype(dtype_)));
  }
  if (info.shape != shape) {
    throw Error(ErrorKind::kInput, "attend",
                options_.input + ", tensor \"" + name + "\": shape " + shape_text(info.shape) + " should be " +
                    expected + ": " + shape_text(shape));
  }
}

std::vector<Field> AttendJob::fields() const {
  return {{"attention", request_.text()},
          {"dtype", std::string(safetensors_dtype(dtype_))},
          {"head size", std::to_string(head_dim_)},
          {"kernel", std::string(to_string(kernel_))},
          {"scale", options_.scale ? std::to_string(*options_.scale) : "default"},
          {"backward", options_.backward ? "yes" : "no"}};
}

void AttendJob::run(Communicator& world) const {
  prove_plan(request_, world);
  AttentionCall call;
  call.program = cached_program(request_, world.rank());
  call.comm = &world;
  call.kernel = kernel_;
  call.scale = options_.scale.value_or(0);
  call.label = "attend";
  const Program& program = *call.program;
  const auto read = [&](const char* name, const std::vector<Span>& spans) {
    return read_rows(options_.input, *file_.find(name), spans);
  };
  const at::Tensor q = read("q", program.query_spans);
  const at::Tensor k = read("k", program.key_spans);
  const at::Tensor v = read("v", program.key_spans);
  at::Tensor dout;
  if (options_.backward) dout = read("dout", program.query_spans);

  // Ranks start together, so that the time is that of the attention.
  world.barrier({"attend, start", 0});
  const auto begin = std::chrono::steady_clock::now();
  AttentionStats forward, backward;
  const AttentionOutput output = attention_forward(q, k, v, call, &forward);
  AttentionGradients gradients;
  if (options_.backward) gradients = attention_backward(dout, q, k, v, output, call, &backward);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  at::Tensor sums = at::tensor(
      {forward.messages_sent + backward.messages_sent, forward.bytes_sent + backward.bytes_sent}, at::ScalarType::Long);
  at::Tensor slowest = at::tensor({seconds}, at::ScalarType::Double);
  world.all_reduce(sums, ReduceOp::kSum, {"attend, totals", 0});
  world.all_reduce(slowest, ReduceOp::kMax, {"attend, totals", 1});

  const Layout queries = query_layout(request_), keys = key_layout(request_);
  std::vector<NamedTensor> results;
  results.push_back({"out", gather(world, output.out, queries, 1)});
  results.push_back({"lse", gather(world, output.lse, queries, 2)});
  if (options_.backward) {
    results.push_back({"dq", gather(world, gradients.dq, queries, 1)});
    results.push_back({"dk", gather(world, gradients.dk, keys, 1)});
    results.push_back({"dv", gather(world, gradients.dv, keys, 1)});
  }
  // Together: the others wait, and a full disk is everyone's error.
  together(
      world, {"attend, writing the output", 0},
      [&] {
        write_safetensors(options_.output, results, {{"pattern", request_.pattern.text()}});
      },
      /*only_first=*/true);
  if (world.rank() != 0) return;
  const std::string layout =
      request_.uneven_lengths.empty() ? std::string(to_string(request_.layout)) : "contiguous, uneven";
  std::printf("attend: %d %s, %s, %s, %lld messages, %s sent, %.3f s -> %s\n", world.size(),
              world.size() == 1 ? "rank" : "ranks", std::string(to_string(request_.schedule)).c_str(), layout.c_str(),
              static_cast<long long>(sums.const_data_ptr<int64_t>()[0]),
              amount(sums.const_data_ptr<int64_t>()[1]).c_str(), *slowest.const_data_ptr<double>(),
              options_.output.c_str());
}

}  // namespace annulus
